"""Weights in few bits, as they are published: each form against a slow twin, bit by bit, and against the tool
that writes it, where that is installed; folders of all of them on both backends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_transformers import saved
from torch import Tensor

from ostinato.model.config_keys import read_quantisation
from ostinato.model.hf import load_model
from ostinato.model.published import AWQ_ORDER, FORMS, FP4

FORM: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [16, 24]},
    "fp8-map": {"quant_method": "fp8", "activation_scheme": "static"},
    "fp8-rows": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
    },
    "nvfp4": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {
            "group_0": {
                "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
            }
        },
    },
    "nvfp4-modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 16,
                },
            }
        },
    },
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 16,
        "desc_act": True,
        "checkpoint_format": "gptq",
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
    "mxfp4": {"quant_method": "mxfp4"},
}
Written = tuple[dict[str, Tensor], Tensor]  # parts by the ends of their names, and the weight that they are


def words(codes: list[int], order: tuple[int, ...] = tuple(range(8))) -> list[int]:
    """Codes of 4 bits, eight a word: that of column i of a word begins at bit 4 order[i]."""
    found = []
    for start in range(0, len(codes), 8):
        word = sum(code << 4 * order[i] for i, code in enumerate(codes[start : start + 8]))
        found.append(word - (1 << 32) if word >> 31 else word)
    return found


def rows_of(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[R, C] -> int32 [R, C / 8]."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))
    return torch.tensor([words(row, order) for row in padded.tolist()], dtype=torch.int32)


def grouped(weight: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [N, K] of 4 bits, zeros and scales [N, G], and what they stand for, one number at a time."""
    n, k = weight.shape
    codes, exact = torch.zeros(n, k, dtype=torch.int64), torch.zeros(n, k)
    zero, scale = torch.zeros(n, k // size, dtype=torch.int64), torch.zeros(n, k // size)
    for i in range(n):
        for g in range(k // size):
            part = weight[i, g * size : (g + 1) * size].tolist()
            step = float(torch.tensor((max(*part, 0) - min(*part, 0)) / 14 or 1.0).half())
            scale[i, g], zero[i, g] = step, min(14, max(1, round(-min(*part, 0) / step)))
            for j, number in enumerate(part):
                code = min(15, max(0, round(number / step) + int(zero[i, g])))
                codes[i, g * size + j] = code
                exact[i, g * size + j] = (code - int(zero[i, g])) * step
    return codes, zero, scale, exact


def float8(weight: Tensor) -> Written:
    rows, columns = FORM["fp8"]["weight_block_size"]
    scale = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    codes, exact = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            here = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = weight[here].abs().max() / 448
            codes[here] = (weight[here] / scale[i, j]).to(torch.float8_e4m3fn)
            exact[here] = codes[here].float() * scale[i, j]
    return {"": codes, "_scale_inv": scale}, exact


def float8_map(weight: Tensor) -> Written:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    parts = {".weight": codes, ".weight_scale_inv": scale, ".activation_scale": torch.tensor(1.0)}
    return parts, codes.float() * scale


def float8_rows(weight: Tensor) -> Written:
    """As llm-compressor writes FP8_DYNAMIC; a scale for the whole map is ModelOpt's FP8."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale, exact = torch.empty(len(weight), 1), torch.empty_like(weight)
    for i, row in enumerate(weight):
        scale[i] = row.abs().max() / 448
        codes[i] = (row / scale[i]).to(torch.float8_e4m3fn)
        exact[i] = codes[i].float() * scale[i]
    return {".weight": codes, ".weight_scale": scale}, exact


def nvfp4(weight: Tensor) -> Written:
    """compressed-tensors' ``nvfp4-pack-quantized``, whose scale for all is a divisor."""
    n, k = weight.shape
    whole = torch.tensor(448 * 6) / weight.abs().max()
    codes, exact = torch.zeros(n, k // 2, dtype=torch.uint8), torch.zeros(n, k)
    scale = torch.zeros(n, k // 16, dtype=torch.float8_e4m3fn)
    for i in range(n):
        for g in range(k // 16):
            part = weight[i, g * 16 : (g + 1) * 16]
            scale[i, g] = part.abs().max() / 6 * whole
            step = scale[i, g].float() / whole
            for j, number in enumerate(part.tolist()):
                code = min(range(16), key=lambda code: abs(FP4[code] * float(step) - number))
                codes[i, (g * 16 + j) // 2] += code << 4 * (j % 2)
                exact[i, g * 16 + j] = FP4[code] * step
    return {".weight_packed": codes, ".weight_scale": scale, ".weight_global_scale": whole.reshape(1)}, exact


def nvfp4_modelopt(weight: Tensor) -> Written:
    """ModelOpt's: the scale for all is a factor, here a power of 2, so that both have the same numbers."""
    whole = 2.0 ** (448 * 6 / weight.abs().max()).log2().floor()
    parts, _ = nvfp4(weight)
    scale = (parts[".weight_scale"].float() / parts[".weight_global_scale"] * whole).to(torch.float8_e4m3fn)
    steps = (scale.float() / whole).repeat_interleave(16, 1)
    values = torch.tensor(
        [
            [FP4[b >> 4 * half & 15] for b in row for half in (0, 1)]
            for row in parts[".weight_packed"].tolist()
        ]
    )
    names = {".weight": parts[".weight_packed"], ".weight_scale": scale, ".input_scale": torch.tensor(1.0)}
    return {**names, ".weight_scale_2": 1 / whole}, values * steps


def packed(weight: Tensor) -> Written:
    """Its asymmetric form; test_compressed_tensors has the other."""
    codes, zero, scale, exact = grouped(weight, 16)
    parts = {
        ".weight_packed": rows_of(codes),
        ".weight_scale": scale,
        ".weight_zero_point": rows_of(zero.T).T.contiguous(),
        ".weight_shape": torch.tensor(weight.shape),
    }
    return parts, exact


def gptq(weight: Tensor) -> Written:
    """The layout of AutoGPTQ's ``QuantLinear.pack`` (nn_modules/qlinear/qlinear_cuda.py, v0.7), inputs in
    the order of their importance."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))
    codes, zero, scale, exact = grouped(weight[:, order], 16)
    back = order.argsort()
    parts = {
        ".qweight": rows_of(codes[:, back]).T.contiguous(),
        ".qzeros": rows_of(zero.T - 1),
        ".scales": scale.T.half().contiguous(),
        ".g_idx": (torch.arange(len(order)) // 16)[back].int(),
    }
    return parts, exact[:, back]


def awq(weight: Tensor) -> Written:
    """The layout of AutoAWQ's ``WQLinear_GEMM.from_linear`` (awq/modules/linear/gemm.py, v0.2): columns of a
    word are written in the order 0 2 4 6 1 3 5 7."""
    codes, zero, scale, exact = grouped(weight, 16)
    places = tuple(AWQ_ORDER)
    assert [places.index(i) for i in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {
        ".qweight": rows_of(codes.T, places),
        ".qzeros": rows_of(zero.T, places),
        ".scales": scale.T.half().contiguous(),
    }
    return parts, exact


def mxfp4(weight: Tensor) -> Written:
    """Experts [E, K, N], in blocks of 32 inputs."""
    experts, k, n = weight.shape
    blocks = torch.zeros(experts, n, k // 32, 16, dtype=torch.uint8)
    scales, exact = torch.zeros(experts, n, k // 32, dtype=torch.uint8), torch.zeros_like(weight)
    for e in range(experts):
        for i in range(n):
            for g in range(k // 32):
                part = weight[e, g * 32 : (g + 1) * 32, i].tolist()
                power = int(torch.tensor(max(map(abs, part))).log2().floor()) - 2
                scales[e, i, g] = power + 127
                for j, number in enumerate(part):
                    code = min(range(16), key=lambda code: abs(FP4[code] * 2.0**power - number))
                    blocks[e, i, g, j // 2] += code << 4 * (j % 2)
                    exact[e, g * 32 + j, i] = FP4[code] * 2.0**power
    return {"_blocks": blocks, "_scales": scales}, exact


WRITE: dict[str, Callable[[Tensor], Written]] = {
    "fp8": float8,
    "fp8-map": float8_map,
    "fp8-rows": float8_rows,
    "nvfp4": nvfp4,
    "nvfp4-modelopt": nvfp4_modelopt,
    "compressed-tensors": packed,
    "gptq": gptq,
    "awq": awq,
    "mxfp4": mxfp4,
}


@pytest.mark.parametrize("method", FORMS)
def test_weights_are_what_their_writer_meant(method: str) -> None:
    shape = (2, 64, 8) if method == "mxfp4" else (24, 64)
    parts, exact = WRITE[method](torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    form = read_quantisation({"quantization_config": FORM[method]})
    assert form is not None
    assert form == read_quantisation({"text_config": {"quantization_config": FORM[method]}})
    assert torch.equal(FORMS[method].widen(parts, form), exact)
    assert FORMS[method].shape(lambda end: list(parts[end].shape), form) == tuple(exact.shape)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "size"), [(4, 16), (4, None), (8, 32)])
def test_what_compressed_tensors_writes(symmetric: bool, bits: int, size: int | None) -> None:
    pytest.importorskip("compressed_tensors", minversion="0.15")
    from compressed_tensors.compressors import PackedQuantizationCompressor as Tool
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    strategy: Any = "group" if size else "channel"
    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=size)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    runs = weight.unflatten(1, (-1, size or 64))
    scale, zero = calculate_qparams(runs.amin(-1), runs.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    parts = Tool.compress(state, scheme)
    theirs = Tool.decompress(dict(parts), scheme)["weight"]
    about = FORM["compressed-tensors"] | {"config_groups": {"group_0": scheme.model_dump(mode="json")}}
    form = read_quantisation({"quantization_config": about})
    assert form is not None
    ours = FORMS[form.method].widen({f".{name}": part for name, part in parts.items()}, form)
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-6, atol=0)
    assert 0 < float((ours - weight).norm() / weight.norm()) < 0.2


@pytest.mark.parametrize("method", ["nvfp4", "fp8-rows"])
def test_what_compressed_tensors_reads_in_float(method: str) -> None:
    pytest.importorskip("compressed_tensors", minversion="0.15")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    about = FORM[method]["config_groups"]["group_0"] | {"targets": ["Linear"]}
    tool: Any = BaseCompressor.get_value_from_registry(FORM[method]["format"])
    parts, exact = WRITE[method](torch.randn(24, 64, generator=torch.Generator().manual_seed(1)))
    state = {end.removeprefix("."): part for end, part in parts.items()}
    theirs = tool.decompress(state, QuantizationScheme.model_validate(about))["weight"]
    near = {"rtol": 2**-7, "atol": 0} if method == "nvfp4" else {"rtol": 1e-6, "atol": 0}  # it gives bfloat16
    torch.testing.assert_close(exact, theirs.float(), **near)


def test_experts_are_those_of_transformers() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    parts, exact = mxfp4(torch.randn(2, 64, 8, generator=torch.Generator().manual_seed(2)))
    theirs = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=torch.float32)
    assert torch.equal(theirs, exact)


def quantise(folder: Path, method: str) -> dict[str, Tensor]:
    """The maps of a folder's layers in few bits; what they stand for."""
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors, exact, form = load_file(file), dict[str, Tensor](), FORMS[method]
    meant = "experts." if method == "mxfp4" else "proj.weight"
    for name in [name for name in tensors if meant in name and "bias" not in name]:
        parts, exact[name] = WRITE[method](tensors.pop(name).float())
        base = name.removesuffix(form.weight_end) if form.weight_end else name
        tensors |= {base + end: part for end, part in parts.items()}
    if ".k_scale" in form.optional_ends:  # of the cache of keys, beside an attention or a plain weight
        tensors |= {f"model.layers.0.self_attn.{name}k_scale": torch.tensor(1.0) for name in ("", "q_norm.")}
    save_file(tensors, file, metadata={"format": "pt"})
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, "quantization_config": FORM[method]}))
    return exact


@pytest.mark.parametrize("method", FORMS)
def test_folders_are_read_by_both_backends(method: str, tmp_path: Path) -> None:
    """A part that lacks is named; what is saved again is plain."""
    pytest.importorskip("transformers", minversion="5.0")
    from ostinato.hf.model import load_transformers

    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "hidden_size": 32, "intermediate_size": 32}
    kind, own = ("gpt_oss", experts) if method == "mxfp4" else ("qwen3", {"vocab_size": 64})
    folder = saved(kind, tmp_path / "model", **own)
    exact = quantise(folder, method)
    theirs = load_transformers(folder, dtype=torch.float32, device="cpu").model.state_dict()
    assert exact and all(torch.equal(theirs[name], weight) for name, weight in exact.items())
    if method != "mxfp4":
        ours = load_model(folder)
        assert torch.equal(
            dict(ours.named_linears())["layers.0.mlp.down"].weight,
            exact[next(name for name in exact if "layers.0.mlp.down" in name)],
        )
    tensors = load_file(folder / "model.safetensors")
    need = FORMS[method].required_ends[0]
    lost = next(name for name in tensors if name.endswith(need))
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for read in (load_model, lambda folder: load_transformers(folder, dtype=torch.float32, device="cpu")):
        if method != "mxfp4" or read is not load_model:
            with pytest.raises(ValueError, match=lost.removesuffix(need)):
                read(folder)
