"""Proves, at the start of a run on a GPU, that Triton kernels give the numbers of their twins in torch.

The proof has few rows at the widths of the model, so that what is compiled is what the run launches. A fault
of an untested compiler or GPU is reported by the name of the kernel, and torch's operators are used instead.
A kernel that writes outside its memory still ends the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ostinato.engine.cache import BLOCK
from ostinato.engine.paged import KVStore, Places
from ostinato.engine.pass_graphs import can_mix
from ostinato.engine.runner import Runner
from ostinato.engine.sampler import sample, sample_torch
from ostinato.engine.sequences import Settings
from ostinato.model.attention import compute_attention
from ostinato.model.cuda import CudaKernels, mix_ops, paged
from ostinato.model.cuda.proof import draw_values, find_fault
from ostinato.model.decoder import Decoder
from ostinato.model.moe import ExpertLora
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.weights import Attention, Moe
from ostinato.types import Sampling

Case = tuple[str, Callable[[], Tensor], Callable[[], Tensor]]  # (kernel, ours, torch's)
ROWS = 5
LENGTHS = (600, 17, 40)  # positions of three sequences: more than a split of attention, and than a block


def prove_kernels(decoder: Decoder, kernels: CudaKernels) -> tuple[CudaKernels | None, str]:
    """Compare ``kernels`` with torch on the decoder's device. Returns (the part of them that gives torch's
    numbers, or None; a sentence that names the first fault, "" without one). A fault of a kernel excludes
    all of them, a fault of a graph or of mixed policies only that ability."""
    sentence = ""
    with torch.inference_mode():
        for name, ours, twin in _make_cases(decoder, kernels):
            if fault := find_fault(ours, twin, decoder.dtype):
                return None, f"{name} in Triton {fault}; torch's operators are used instead"
        if kernels.graph is None:
            return kernels, ""
        plain = replace(kernels, graph=None)
        if fault := find_fault(
            lambda: _run_passes(decoder, kernels), lambda: _run_passes(decoder, plain), decoder.dtype
        ):
            return plain, f"CUDA graphs are not used: a captured pass {fault}"
        for name, ours, twin in _make_mixed_cases(decoder, kernels) if can_mix(decoder, kernels) else ():
            if not sentence and (fault := find_fault(ours, twin, decoder.dtype)):
                kernels = replace(kernels, mixes=False)
                sentence = f"{name} of several policies in Triton {fault}; each policy has passes of its own"
    return kernels, sentence


def _make_cases(decoder: Decoder, kernels: CudaKernels) -> Iterator[Case]:
    config, ops, eps = decoder.local, kernels.ops, decoder.config.rms_norm_eps
    x, y = (
        draw_values(decoder, ROWS, config.hidden_size),
        draw_values(decoder, ROWS, config.hidden_size, seed=1),
    )
    weight = decoder.blocks[0].attn_norm
    yield "rms_norm", lambda: ops.rms_norm(x, weight, eps), lambda: TORCH_OPS.rms_norm(x, weight, eps)
    yield (
        "add_rms_norm",
        lambda: torch.cat(ops.add_rms_norm(x, y, weight, eps)),
        lambda: torch.cat(TORCH_OPS.add_rms_norm(x, y, weight, eps)),
    )
    wide = draw_values(decoder, ROWS, 2 * config.intermediate_size)
    yield "silu_mul", lambda: ops.silu_mul(wide), lambda: TORCH_OPS.silu_mul(wide)
    a, b = (
        draw_values(decoder, 16, config.hidden_size) / config.hidden_size**0.5,
        draw_values(decoder, config.hidden_size, 16),
    )
    yield (
        "add_lora",
        lambda: ops.add_lora(y.clone(), x, a, b, 0.5),
        lambda: TORCH_OPS.add_lora(y.clone(), x, a, b, 0.5),
    )
    if kernels.exact:
        narrow_weight = draw_values(decoder, 24, config.hidden_size) / config.hidden_size**0.5
        yield "linear", lambda: ops.linear(x, narrow_weight), lambda: TORCH_OPS.linear(x, narrow_weight)
        yield (
            "linear of rows alone",
            lambda: _compare_single_rows(ops, x, narrow_weight),
            lambda: torch.ones(1, device=x.device),
        )
    yield from _make_attention_cases(decoder)
    yield "draw", lambda: _compare_draws(decoder, kernels), lambda: torch.ones(1, device=decoder.device)
    moe, block = decoder.config.moe, next((b.mlp for b in decoder.blocks if isinstance(b.mlp, Moe)), None)
    if moe is None or block is None:
        return
    logits, bias = draw_values(decoder, ROWS, moe.num_experts).float(), block.correction_bias
    yield (
        "route",
        lambda: torch.cat(ops.route(logits, moe, bias)[:2], dim=1),
        lambda: torch.cat(TORCH_OPS.route(logits, moe, bias)[:2], dim=1),
    )
    ids, weights, _ = TORCH_OPS.route(logits, moe, bias)
    ids, gate_up, down = ids % moe.num_local, block.gate_up, block.down
    factors = _draw_expert_factors(decoder, block)
    for name, lora in (("experts", None), ("experts with adapters", factors)):
        yield (
            name,
            lambda lora=lora: ops.experts(x, ids, weights, gate_up, down, lora),
            lambda lora=lora: TORCH_OPS.experts(x, ids, weights, gate_up, down, lora),
        )


def _make_mixed_cases(decoder: Decoder, kernels: CudaKernels) -> Iterator[Case]:
    """Yield cases with rows of two policies: the first two rows are of the second policy, the others of the
    first. Experts are a case only in a mixture."""
    config, device = decoder.local, decoder.device
    owners = np.repeat(np.array([1, 0], np.int32), (2, ROWS - 2))
    x, y = (
        draw_values(decoder, ROWS, config.hidden_size),
        draw_values(decoder, ROWS, config.hidden_size, seed=1),
    )
    a, b = (
        draw_values(decoder, 2, 16, config.hidden_size) / config.hidden_size**0.5,
        draw_values(decoder, 2, config.hidden_size, 16),
    )
    ops = mix_ops(kernels.ops, torch.from_numpy(owners).to(device), paged.Tiles.of(owners, 1, device))

    def run_apart(call: Callable[[slice, int], Tensor]) -> Tensor:
        return torch.cat((call(slice(0, 2), 1), call(slice(2, ROWS), 0)))

    yield (
        "add_lora",
        lambda: ops.add_lora(y.clone(), x, a, b, 0.5),
        lambda: run_apart(lambda rows, p: TORCH_OPS.add_lora(y[rows], x[rows], a[p], b[p], 0.5)),
    )
    moe, block = decoder.config.moe, next((b.mlp for b in decoder.blocks if isinstance(b.mlp, Moe)), None)
    if moe is None or block is None:
        return
    factors = _draw_expert_factors(decoder, block), _draw_expert_factors(decoder, block, seed=1)
    stacked_factors = ExpertLora(
        *map(torch.stack, zip(factors[0][:4], factors[1][:4], strict=True)), scale=0.5
    )
    ids, weights, _ = TORCH_OPS.route(draw_values(decoder, ROWS, moe.num_experts).float(), moe, None)
    ids, expert_weights = ids % moe.num_local, (block.gate_up, block.down)
    yield (
        "experts",
        lambda: ops.experts(x, ids, weights, *expert_weights, stacked_factors),
        lambda: run_apart(
            lambda rows, p: TORCH_OPS.experts(x[rows], ids[rows], weights[rows], *expert_weights, factors[p])
        ),
    )


def _draw_expert_factors(decoder: Decoder, block: Moe, *, seed: int = 0) -> ExpertLora:
    (count, width, size), rank = block.gate_up.shape, 8
    shapes = (2 * rank, size), (count, width, 2 * rank), (count, rank, width // 2), (size, rank)
    return ExpertLora(
        *(draw_values(decoder, *shape, seed=seed) / shape[-1] ** 0.5 for shape in shapes), scale=0.5
    )


def _make_attention_cases(decoder: Decoder) -> Iterator[Case]:
    config, device, scale = decoder.local, decoder.device, decoder.config.head_dim**-0.5
    kv_heads, key_dim, _ = decoder.kv_shape
    places = _lay_out_rows(LENGTHS, (1, 3, 1))
    rows, count = places.move_to(device), sum(-(-length // BLOCK) for length in LENGTHS)
    store = KVStore.allocate(1, count, decoder.kv_shape, decoder.dtype, device, by_position=True)
    keys, values = store.key_layers[0], store.value_layers[0]
    keys.copy_(draw_values(decoder, *keys.shape))
    values.copy_(draw_values(decoder, *values.shape, seed=1))
    q = draw_values(decoder, len(places.seen), config.num_heads, key_dim)

    def run_kernel(parallel: bool) -> Tensor:
        tiles = paged.Tiles.of(places.owners, config.num_heads // kv_heads, device)
        return paged.paged_attention(
            q, keys, values, rows.tables, rows.sequence, rows.lengths, tiles, scale, parallel=parallel
        )

    def run_twin() -> Tensor:
        out = []
        for row, (owner, seen) in enumerate(zip(places.owners.tolist(), places.seen.tolist(), strict=True)):
            k, v = (x[rows.tables[owner].long()].flatten(0, 1)[:seen] for x in (keys, values))
            out.append(compute_attention(q[row : row + 1], k, v, scale))
        return torch.cat(out)

    yield "paged_attention", lambda: run_kernel(False), run_twin
    yield "paged_attention and merge", lambda: run_kernel(True), run_twin
    attn, eps = decoder.blocks[0].attn, decoder.config.rms_norm_eps
    if not isinstance(attn, Attention):
        return
    qkv = draw_values(decoder, len(places.seen), config.num_heads + 2 * kv_heads, key_dim)
    cos, sin = decoder.compute_rotations(rows.lengths)
    weights = (draw_values(decoder, key_dim), draw_values(decoder, key_dim, seed=1))

    def run_project() -> Tensor:
        queries = paged.store_projection(qkv, weights, eps, cos, sin, rows.slots, keys, values)
        return torch.cat((queries, *(x.flatten(0, 1)[rows.slots] for x in (keys, values))), dim=1)

    def run_project_twin() -> Tensor:
        parts = qkv.split([config.num_heads, kv_heads, kv_heads], dim=1)
        rotated_heads = (
            TORCH_OPS.rope(TORCH_OPS.rms_norm(x, w, eps), cos, sin)
            for x, w in zip(parts, weights, strict=False)
        )
        return torch.cat((*rotated_heads, parts[2]), dim=1)

    yield "project", run_project, run_project_twin


def _compare_single_rows(ops: Ops, x: Tensor, weight: Tensor) -> Tensor:
    """Return 1 where the product of every row alone equals, bit by bit, that among other rows, else 2."""
    row_products = torch.cat([ops.linear(row, weight) for row in x.split(1)])
    return torch.tensor([1.0 if torch.equal(ops.linear(x, weight), row_products) else 2.0], device=x.device)


def _lay_out_rows(lengths: tuple[int, ...], counts: tuple[int, ...]) -> Places:
    """Return places of the last rows of sequences of these lengths, whose blocks follow each other."""
    blocks = [-(-length // BLOCK) for length in lengths]
    tables = np.zeros((len(lengths), max(blocks)), np.int32)
    for sequence, (first_block, count) in enumerate(zip(np.cumsum([0, *blocks]), blocks, strict=False)):
        tables[sequence, :count] = np.arange(first_block, first_block + count)
    owners = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    seen = np.concatenate([np.arange(n - k, n) + 1 for n, k in zip(lengths, counts, strict=True)])
    slots = tables[owners, (seen - 1) // BLOCK].astype(np.int64) * BLOCK + (seen - 1) % BLOCK
    return Places(slots, tables, owners, seen.astype(np.int32))


def _compare_draws(decoder: Decoder, kernels: CudaKernels) -> Tensor:
    """Return 1 if tokens and log-probabilities agree with each filter, else 2. Another token counts as equal
    if the uniform lies on an edge, which rounding moves."""
    samplings = [Sampling(), Sampling(temperature=0.7, top_k=50), Sampling(top_p=0.9), Sampling(min_p=0.02)]
    settings, u = Settings.of(samplings), np.array([0.1, 0.4, 0.6, 0.9])
    logits = 3 * draw_values(decoder, len(samplings), decoder.config.vocab_size).float()
    ours, twin = sample(logits, settings, u, kernels), sample_torch(logits, settings, u)
    edges = np.minimum(np.abs(u - twin.edges), np.abs(u - twin.edges - np.exp(twin.logprobs)))
    is_same = ours.tokens == twin.tokens
    difference = np.where(is_same, np.abs(ours.logprobs - twin.logprobs), edges).max()
    return torch.tensor([1.0 if difference <= 1e-4 else 2.0], device=decoder.device)


def _run_passes(decoder: Decoder, kernels: CudaKernels) -> Tensor:
    """Return hidden states of two passes of the same shape over other sequences: a capture and its replay."""
    layers, shape = decoder.config.num_layers, decoder.kv_shape
    store = KVStore.allocate(layers, 4, shape, decoder.dtype, decoder.device, by_position=True)
    runner, hidden = Runner(decoder, kernels, store), []
    for lengths in ((3, 1), (2, 2)):
        places = _lay_out_rows(lengths, lengths)
        tokens = np.arange(4) + lengths[0]
        hidden.append(runner.forward(tokens, places.seen.astype(np.int64) - 1, places)[0])
    return torch.cat(hidden)
