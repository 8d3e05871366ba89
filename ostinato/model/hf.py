"""Hugging Face folders in and out.

One table, ``hf_tensors``, names every tensor of a checkpoint as a view into the decoder's weights. Loading
copies files into the views and saving writes the views to files, so the two cannot disagree.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ostinato.model.config import read_config
from ostinato.model.decoder import Decoder
from ostinato.model.weights import Attention, Moe
from ostinato.run import atomic_write

# Files that travel with the weights: tokenizer, chat template, generation defaults.
_COMPANIONS = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt"
    " tokenizer.model tiktoken.model chat_template.jinja chat_template.json generation_config.json"
)

_HF_ROLES = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_a": "self_attn.q_a_proj",
    "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_b": "self_attn.kv_b_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "shared.gate": "mlp.shared_experts.gate_proj",
    "shared.up": "mlp.shared_experts.up_proj",
    "shared.down": "mlp.shared_experts.down_proj",
    "router": "mlp.gate",
    "experts.gate": "mlp.experts.{}.gate_proj",
    "experts.up": "mlp.experts.{}.up_proj",
    "experts.down": "mlp.experts.{}.down_proj",
}
_MIXTRAL_ROLES = {
    "router": "block_sparse_moe.gate",
    "experts.gate": "block_sparse_moe.experts.{}.w1",
    "experts.up": "block_sparse_moe.experts.{}.w3",
    "experts.down": "block_sparse_moe.experts.{}.w2",
}


def hf_module(logical: str, model_type: str) -> str:
    """``layers.3.attn.q`` -> ``model.layers.3.self_attn.q_proj``; experts keep a ``{}`` for their index."""
    _, layer, role = logical.split(".", 2)
    roles = _HF_ROLES | _MIXTRAL_ROLES if model_type == "mixtral" else _HF_ROLES
    return f"model.layers.{layer}.{roles[role]}"


def hf_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(name in a checkpoint, view into the decoder's weights) for every tensor."""
    kind = decoder.config.model_type
    yield "model.embed_tokens.weight", decoder.embed
    for layer, block in enumerate(decoder.blocks):
        name, attn = f"model.layers.{layer}", block.attn
        yield f"{name}.input_layernorm.weight", block.attn_norm
        yield f"{name}.post_attention_layernorm.weight", block.mlp_norm
        norms = (
            {"q_norm": attn.q_norm, "k_norm": attn.k_norm}
            if isinstance(attn, Attention)
            else {"q_a_layernorm": attn.q_a_norm, "kv_a_layernorm": attn.kv_a_norm}
        )
        for norm, weight in norms.items():
            if weight is not None:
                yield f"{name}.self_attn.{norm}.weight", weight
        if isinstance(block.mlp, Moe) and block.mlp.correction_bias is not None:
            yield f"{name}.mlp.gate.e_score_correction_bias", block.mlp.correction_bias
    for logical, linear in decoder.named_linears().items():
        module = hf_module(logical, kind)
        if linear.weight.dim() == 3:
            for expert, weight in enumerate(linear.weight.unbind()):
                yield f"{module.format(expert)}.weight", weight
            continue
        yield f"{module}.weight", linear.weight
        if linear.bias is not None:
            yield f"{module}.bias", linear.bias
    yield "model.norm.weight", decoder.norm
    if not decoder.config.tie_embeddings:
        yield "lm_head.weight", decoder.head


def load_model(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    fp32_head: bool = False,
) -> Decoder:
    """The decoder in a Hugging Face folder, cast to ``dtype``. Raises ValueError as ``fill`` does, and for an
    unsupported config.
    """
    decoder = Decoder(read_config(folder), dtype=dtype, device=device, fp32_head=fp32_head)
    fill(decoder, folder)
    return decoder


def fill(decoder: Decoder, folder: str | Path) -> None:
    """Copy the weights in a Hugging Face folder (single or sharded safetensors) into ``decoder``.

    Raises ValueError, in one sentence, for a missing, unexpected or misshapen tensor, and a truncated file.
    """
    folder = Path(folder)
    views = dict(hf_tensors(decoder))
    fused = _fused_views(decoder)
    missing, unexpected, extra_layers = set(views), [], 0
    with torch.no_grad():
        for path in weight_files(folder):
            for name, tensor in _read(path):
                name = _canonical(name, decoder)
                if name in fused:
                    view, parts = fused[name]
                    _copy(view, tensor, name, path)
                    missing -= parts
                elif name in views:
                    _copy(views[name], tensor, name, path)
                    missing.discard(name)
                elif _is_extra_layer(name, decoder):
                    extra_layers += 1
                elif not _is_redundant(name, decoder):
                    unexpected.append(name)
    _report(folder, sorted(missing), unexpected)
    if extra_layers:
        warnings.warn(
            f"{folder}: {extra_layers} tensors of multi-token-prediction layers were not loaded", stacklevel=2
        )


def _report(folder: Path, missing: list[str], unexpected: list[str]) -> None:
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} tensors that config.json calls for, the first is {missing[0]}; "
            "download the model again or correct config.json"
        )
    if unexpected:
        raise ValueError(
            f"{folder} has {len(unexpected)} tensors that its config.json does not call for, the first is "
            f"{unexpected[0]}; this decoder would not compute what the model was trained to"
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder. Raises ValueError where one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{index} is not a safetensors index ({error!r}); download the model again"
            ) from error
        paths = [folder / name for name in names]
    else:
        paths = [folder / "model.safetensors"]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} does not exist; download the model again, as safetensors")
    return paths


def _read(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is truncated or not a safetensors file ({error}); download it again"
        ) from error


def _copy(view: Tensor, tensor: Tensor, name: str, path: Path) -> None:
    if view.shape != tensor.shape:
        raise ValueError(
            f"{name} in {path} has shape {list(tensor.shape)}, config.json calls for {list(view.shape)}; "
            "the weights and config.json are of different models"
        )
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise ValueError(
            f"{name} in {path} is {tensor.dtype}; quantised weights are not supported, use a 16-bit model"
        )
    view.copy_(tensor)


def _canonical(name: str, decoder: Decoder) -> str:
    """transformers v5 calls Mixtral's block ``mlp`` in memory; a file may have been written either way."""
    if decoder.config.model_type == "mixtral":
        return name.replace(".mlp.", ".block_sparse_moe.")
    return name


def _fused_views(decoder: Decoder) -> dict[str, tuple[Tensor, set[str]]]:
    """Experts in one tensor, as transformers v5 holds them in memory: (view, the names it stands for)."""
    fused, linears, kind = {}, decoder.named_linears(), decoder.config.model_type
    for layer, block in enumerate(decoder.blocks):
        if not isinstance(block.mlp, Moe):
            continue
        for stored, roles in (("gate_up", ("gate", "up")), ("down", ("down",))):
            logical = [f"layers.{layer}.experts.{role}" for role in roles]
            count = linears[logical[0]].weight.shape[0]
            modules = [hf_module(name, kind) for name in logical]
            parts = {f"{module.format(e)}.weight" for module in modules for e in range(count)}
            prefix = modules[0].partition("{}")[0]
            fused[f"{prefix}{stored}_proj"] = (getattr(block.mlp, stored), parts)
    return fused


def _is_extra_layer(name: str, decoder: Decoder) -> bool:
    """DeepSeek-V3 files carry multi-token-prediction layers behind the last one."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return decoder.config.mla is not None and match is not None and int(match[1]) >= decoder.config.num_layers


def _is_redundant(name: str, decoder: Decoder) -> bool:
    """Copies of what is known anyway: a tied head, rotary frequencies in files of old."""
    return name.endswith("rotary_emb.inv_freq") or (
        decoder.config.tie_embeddings and name == "lm_head.weight"
    )


def save_model(
    decoder: Decoder, folder: str | Path, tokenizer_from: str | Path | None = None, shard_bytes: float = 5e9
) -> None:
    """Write a folder that ``transformers`` and ``load_model`` load: config, weights, tokenizer files.

    ``tokenizer_from``: a folder whose tokenizer, chat template and generation config are copied along.
    Every file is written beside its name and then moved, so a full disk leaves no half file.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _shards(decoder, shard_bytes)
    names = (
        ["model.safetensors"]
        if len(shards) == 1
        else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    )
    for name, tensors in zip(names, shards, strict=True):
        content = {key: view.detach().cpu().contiguous() for key, view in tensors.items()}
        write_tensors(folder / name, content, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if len(shards) > 1:
        size = sum(_num_bytes(view) for tensors in shards for view in tensors.values())
        weight_map = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
        _write_json(index, {"metadata": {"total_size": size}, "weight_map": weight_map})
    for stale in folder.glob(
        "model*.safetensors*"
    ):  # an earlier save with other shards would shadow this one
        if stale.name not in names and not (stale == index and len(shards) > 1):
            stale.unlink()
    _write_json(folder / "config.json", _config_json(decoder))
    if tokenizer_from is not None and Path(tokenizer_from).resolve() != folder.resolve():
        for name in _COMPANIONS.split():
            if (Path(tokenizer_from) / name).is_file():
                shutil.copyfile(Path(tokenizer_from) / name, folder / name)


def _config_json(decoder: Decoder) -> dict[str, Any]:
    """The config as it was read, with the dtype that the weights now have."""
    raw = dict(decoder.config.raw)
    raw.pop("torch_dtype", None)
    return raw | {"dtype": str(decoder.dtype).removeprefix("torch.")}


def _shards(decoder: Decoder, shard_bytes: float) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, view in hf_tensors(decoder):
        if shards[-1] and filled + _num_bytes(view) > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = view
        filled += _num_bytes(view)
    return shards


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file, whole or not at all. A full disk is an OSError, as for every other file."""
    try:
        atomic_write(path, lambda partial: save_file(tensors, partial, metadata=metadata))
    except SafetensorError as error:
        raise OSError(f"{path} could not be written ({error}); free disk space") from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    atomic_write(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
