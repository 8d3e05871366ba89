"""Native kernels against their torch twins, and the law that the engine's exactness rests on: in fp32 a row's
result does not depend on how many rows there are."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ostinato.engine.paged import GpuPaged, KVStore, NativePaged, Rows, TorchPaged
from ostinato.model.config import MoEConfig
from ostinato.model.lora import Lora, lora_linear
from ostinato.model.moe import ExpertLora
from ostinato.model.native import BuildError, Kernels
from ostinato.model.native.build import load_library
from ostinato.model.ops import TORCH_OPS

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}
DTYPES = list(TOLERANCE)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: Tensor, twin: Tensor) -> None:
    scale = max(1.0, float(twin.float().abs().max()))
    assert (ours.float() - twin.float()).abs().max() <= TOLERANCE[twin.dtype] * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 17, 70])
@pytest.mark.parametrize(("depth", "columns"), [(64, 48), (70, 33), (33, 5), (1600, 65)])
def test_linear(kernels: Kernels, dtype: torch.dtype, rows: int, depth: int, columns: int) -> None:
    x, w = draw(rows, depth, dtype=dtype), draw(columns, depth, dtype=dtype, seed=1) / depth**0.5
    bias = draw(columns, dtype=dtype, seed=2)
    close(kernels.ops.linear(x, w), TORCH_OPS.linear(x, w))
    close(kernels.ops.linear(x, w, bias), TORCH_OPS.linear(x, w, bias))
    wide = kernels.ops.linear(x, w, None, torch.float32)
    assert wide.dtype == torch.float32
    assert (wide - x.float() @ w.float().T).abs().max() < 1e-4  # the fp32 head: exact products, fp32 sums
    dy = draw(rows, columns, dtype=dtype, seed=3)
    close(kernels.training.gemm.nn(dy, w), dy @ w)


def test_linear_of_a_strided_view(kernels: Kernels) -> None:
    x = draw(20, 100)
    close(kernels.ops.linear(x[:, 10:74], draw(9, 64, seed=1)), x[:, 10:74] @ draw(9, 64, seed=1).T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 24, 64])
def test_norms_rope_and_silu(kernels: Kernels, dtype: torch.dtype, width: int) -> None:
    ours = kernels.ops
    x, other, weight = (draw(5, width, dtype=dtype, seed=s) for s in (0, 1, 2))
    close(ours.rms_norm(x, weight[0], 1e-6), TORCH_OPS.rms_norm(x, weight[0], 1e-6))
    for a, b in zip(
        ours.add_rms_norm(x, other, weight[0], 1e-6),
        TORCH_OPS.add_rms_norm(x, other, weight[0], 1e-6),
        strict=True,
    ):
        close(a, b)
    heads = draw(5, 4, width, dtype=dtype)
    close(ours.rms_norm(heads[:, 1:3], weight[0], 1e-6), TORCH_OPS.rms_norm(heads[:, 1:3], weight[0], 1e-6))
    close(ours.rope(heads[:, 1:3], x, other), TORCH_OPS.rope(heads[:, 1:3], x, other))
    close(ours.silu_mul(x), TORCH_OPS.silu_mul(x))


def test_the_norm_of_a_single_head_reads_its_own_rows(kernels: Kernels) -> None:
    """With one key-value head, reshape keeps the strided view instead of copying it. The kernel assumed that
    rows are one width apart, so it normalised the neighbours of the head, and log-probabilities were off by
    0.6."""
    heads, weight = draw(5, 4, 24), draw(24, seed=1)
    close(kernels.ops.rms_norm(heads[:, 2:3], weight, 1e-6), TORCH_OPS.rms_norm(heads[:, 2:3], weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [True, False, None])
def test_experts(kernels: Kernels, dtype: torch.dtype, shared: bool | None) -> None:
    tokens, top_k, num, width, hidden, rank = 21, 2, 5, 24, 32, 4
    x = draw(tokens, hidden, dtype=dtype)
    ids = torch.stack(
        [torch.randperm(num, generator=torch.Generator().manual_seed(t))[:top_k] for t in range(tokens)]
    )
    weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(1))
    gate_up, down = draw(num, 2 * width, hidden, dtype=dtype) / 6, draw(num, hidden, width, dtype=dtype) / 5
    lora = None
    if shared is not None:
        outer = () if shared else (num,)
        lora = ExpertLora(
            gate_up_a=draw(*outer, 2 * rank, hidden, dtype=dtype) / 6,
            gate_up_b=draw(num, 2 * width, 2 * rank, dtype=dtype) / 3,
            down_a=draw(num, rank, width, dtype=dtype) / 5,
            down_b=draw(*outer, hidden, rank, dtype=dtype) / 2,
            scale=0.5,
        )
    close(
        kernels.ops.experts(x, ids, weights, gate_up, down, lora),
        TORCH_OPS.experts(x, ids, weights, gate_up, down, lora),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 7, 16, 21])
@pytest.mark.parametrize(
    ("heads", "groups", "key_dim", "value_dim"), [(6, 2, 64, 64), (4, 4, 24, 16), (4, 1, 10, 32)]
)
def test_paged_attention(
    kernels: Kernels,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    key_dim: int,
    value_dim: int,
    window: int | None,
) -> None:
    """Two sequences in scattered blocks, one with a chunk of rows, one decoding; four forwards fill the
    cache. What a GPU runs (GpuPaged) expanded the keys of a prompt for each of its rows: 17 GB for 2,048.
    """
    native, twin, gpu = (
        KVStore.allocate(1, 12, (groups, key_dim, value_dim), dtype, torch.device("cpu")) for _ in range(3)
    )
    for store in (native, twin, gpu):  # what an ended sequence has left behind
        store.keys.fill_(torch.nan), store.values.fill_(torch.nan)
    tables = torch.tensor([[7, 2, 9, 0], [4, 11, 1, 3]], dtype=torch.int32)
    for first, counts in (((0, 0), (18, 41)), ((18, 41), (17, 1)), ((35, 42), (5, 1)), ((40, 43), (1, 1))):
        owner = torch.tensor([0] * counts[0] + [1] * counts[1], dtype=torch.int32)
        positions = torch.cat([torch.arange(f, f + n) for f, n in zip(first, counts, strict=True)])
        slots = tables[owner.long(), positions // 16].long() * 16 + positions % 16
        rows = Rows(slots, tables, owner, (positions + 1).to(torch.int32))
        total = sum(counts)
        q, k = (
            draw(total, heads, key_dim, dtype=dtype, seed=1),
            draw(total, groups, key_dim, dtype=dtype, seed=2),
        )
        v = draw(total, groups, value_dim, dtype=dtype, seed=3)
        ours = NativePaged(kernels, native, rows)(0, q, k, v, key_dim**-0.5, window)
        close(ours, TorchPaged(twin, rows)(0, q, k, v, key_dim**-0.5, window))
        if window is None:
            close(ours, GpuPaged(gpu, rows)(0, q, k, v, key_dim**-0.5))
    for store in (twin, gpu) if window is None else (twin,):
        assert torch.equal(native.keys.nan_to_num(), store.keys.nan_to_num())
        assert torch.equal(native.values.nan_to_num(), store.values.nan_to_num())


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("num", [4, 16, 37, 128])
def test_route(kernels: Kernels, num: int, norm: bool) -> None:
    moe = MoEConfig(num_experts=num, top_k=3, intermediate_size=8, layers=(0,), norm_topk=norm, scaling=1.5)
    logits = draw(40, num) * 3
    ids, weights, native = kernels.ops.route(logits, moe)
    twin_ids, twin_weights, _ = TORCH_OPS.route(logits, moe)
    assert torch.equal(ids.long(), twin_ids) and torch.equal(native, ids)
    close(weights, twin_weights)
    assert torch.equal(kernels.ops.route(logits[7:8], moe)[1], weights[7:8])
    replayed = kernels.ops.route(logits, moe, None, twin_ids)
    close(replayed[1], weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_dim", [300, 1040])
def test_attention_takes_values_of_any_width(kernels: Kernels, dtype: torch.dtype, value_dim: int) -> None:
    """The sums of an unusual width lived in an array of 1024: wider values wrote over the stack."""
    native, twin = (KVStore.allocate(1, 3, (1, 8, value_dim), dtype, torch.device("cpu")) for _ in range(2))
    places = torch.arange(20)
    tables = torch.tensor([[2, 0]], dtype=torch.int32)
    slots = tables[0, places // 16].long() * 16 + places % 16
    rows = Rows(slots, tables, torch.zeros(20, dtype=torch.int32), (places + 1).to(torch.int32))
    q, k, v = (draw(20, 1, n, dtype=dtype, seed=n) for n in (8, 8, value_dim))
    close(NativePaged(kernels, native, rows)(0, q, k, v, 0.3), TorchPaged(twin, rows)(0, q, k, v, 0.3))


def test_keys_that_cannot_be_paired_are_refused() -> None:
    """bf16 keys are stored in pairs: of an odd width the kernel wrote past the end of the cache."""
    with pytest.raises(ValueError, match="odd width"):
        KVStore.allocate(1, 2, (1, 7, 8), torch.bfloat16, torch.device("cpu"))


def test_the_exponential() -> None:
    """Relative error under 2e-7 from -87 on, exactly 0 below."""
    try:
        library = load_library()
    except BuildError as error:
        pytest.skip(str(error))
    x = torch.linspace(-87, 88, 1 << 14)
    y = torch.empty_like(x)
    library.exp_f32(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_long(x.numel()))
    exact = x.double().exp()
    assert float(((y - exact) / exact)[1:].abs().max()) < 2e-7
    x = torch.full((16,), -87.5)
    library.exp_f32(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_long(16))
    assert (y[:16] == 0).all()


@pytest.mark.parametrize("trouble", ["no home", "locked home", "broken compiler", "no compiler"])
def test_what_keeps_kernels_from_being_built_is_a_named_error(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container whose user has no home, or may not enter it, a RuntimeError or PermissionError ended the
    run where torch could have done the work."""
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such flag' >&2; echo '  ^' >&2; exit 1\n")
    compiler.chmod(0o755)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def locked(path: Path, *args: object, **kwargs: object) -> bool:
        if tmp_path in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return path.is_file()

    monkeypatch.setenv("XDG_CACHE_HOME", "" if trouble == "no home" else str(tmp_path / "cache"))
    if trouble == "no home":
        monkeypatch.setattr(Path, "home", no_home)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        (tmp_path / f"ostinato-{os.geteuid()}").symlink_to(tmp_path)  # somebody else's trap
    elif trouble == "locked home":
        monkeypatch.setattr(Path, "exists", locked)
        monkeypatch.setattr(Path, "mkdir", locked)
    else:
        monkeypatch.setenv("PATH", str(tmp_path) if trouble == "broken compiler" else "")
    output = {"no home": "XDG_CACHE_HOME", "locked home": "Permission denied"}
    output |= {"broken compiler": "error: no such flag$", "no compiler": "install one"}
    with pytest.raises(BuildError, match=output[trouble]):
        load_library()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [96, 97])
def test_a_row_is_the_same_in_any_batch(kernels: Kernels, dtype: torch.dtype, depth: int) -> None:
    """The law that the engine's exactness rests on; the forms of bf16 all add in one order."""
    x, w = draw(70, depth, dtype=dtype), draw(130, depth, dtype=dtype, seed=1)
    whole, wide = kernels.ops.linear(x, w), kernels.ops.linear(x, w, None, torch.float32)
    for rows in (1, 2, 5, 16, 17, 33, 49, 64, 65):
        assert torch.equal(kernels.ops.linear(x[:rows], w), whole[:rows])
        assert torch.equal(kernels.ops.linear(x[:rows], w, None, torch.float32), wide[:rows])


def test_training_with_native_products_is_training(kernels: Kernels) -> None:
    x, w = draw(70, 64, dtype=torch.bfloat16), draw(96, 64, dtype=torch.bfloat16, seed=1) / 8
    factors = [draw(8, 64, seed=2) / 8, draw(96, 8, seed=3)]
    results = []
    for gemm in (TORCH_OPS.gemm, kernels.training.gemm):
        leaves = [t.clone().requires_grad_() for t in (x, *factors)]
        inputs, a, b = leaves
        lora = Lora(a.to(torch.bfloat16), b.to(torch.bfloat16), 0.5)
        y = lora_linear(inputs, w, None, lora, gemm)
        y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for twin, ours in zip(*results, strict=True):
        assert (ours.float() - twin.float()).norm() <= 0.01 * twin.float().norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 15, 16, 70])
@pytest.mark.parametrize(("rank", "columns"), [(4, 33), (7, 64), (48, 960)])
def test_add_lora(kernels: Kernels, dtype: torch.dtype, rows: int, rank: int, columns: int) -> None:
    x, y = draw(rows, 64, dtype=dtype), draw(rows, columns, dtype=dtype, seed=1)
    a, b = draw(rank, 64, dtype=dtype, seed=2) / 8, draw(columns, rank, dtype=dtype, seed=3) / rank**0.5
    close(kernels.ops.add_lora(y.clone(), x, a, b, 0.5), TORCH_OPS.add_lora(y, x, a, b, 0.5))
    wide = kernels.ops.add_lora(
        y.clone().float(), x, a, b, 0.5
    )  # the router's logits are fp32 whatever the model is
    assert wide.dtype == torch.float32
    close(wide.to(dtype), TORCH_OPS.add_lora(y, x, a, b, 0.5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_the_work_and_change_nothing(kernels: Kernels, dtype: torch.dtype) -> None:
    w, gate_up = draw(130, 96, dtype=dtype, seed=1), draw(300, 192, dtype=dtype)
    weight, dy = draw(192, dtype=dtype, seed=2), draw(70, 130, dtype=dtype, seed=3)

    def everything() -> list[Tensor]:
        products = [kernels.ops.linear(draw(rows, 96, dtype=dtype), w) for rows in (1, 20, 40, 64, 70)]
        rows = [kernels.ops.rms_norm(gate_up, weight, 1e-6), kernels.ops.silu_mul(gate_up)]
        return [*products, *rows, kernels.training.gemm.nn(dy, w)]

    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            results.append(everything())
        finally:
            torch.set_num_threads(before)
    # torch's own fp32 product (nn) may be cut differently; ours may not
    assert all(torch.equal(a, b) for a, b in zip(results[0][:-1], results[1][:-1], strict=True))
    close(results[0][-1], results[1][-1])
