"""Every operation of the product on the device, in bf16, against the same in fp64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lab.gpu.world import DENSE, EXPERTS, TINY_EXPERTS, Line, Lines, World, off
from ostinato.algo.logprobs import linear_logprobs
from ostinato.engine.paged import GpuPaged, KVStore, Rows, TorchPaged, TritonPaged
from ostinato.engine.sampler import sample, sample_torch
from ostinato.engine.sequences import Settings
from ostinato.model.config import MoEConfig, parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.moe import ExpertLora
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.packed import PackedAttention
from ostinato.model.shapes import AdapterSpec
from ostinato.train.passes import choose_head_products
from ostinato.types import Sampling, Segment

if TYPE_CHECKING:
    from ostinato.model.cuda import CudaKernels

FORWARD, BACKWARD = 8e-3, 2e-2  # of bf16, as shares of the largest value: a few roundings of 2e-3
SEVERAL = ("add_lora", "experts", "experts with adapters")  # products of rounded products: twice that

TRITON = ("rms_norm", "add_rms_norm", "rope", "silu_mul", "add_lora", "packed attention")

Function = Callable[..., Tensor]


def ceilings(world: World) -> Lines:
    """Bandwidth of a copy and rate of a bf16 product: what speeds are shares of."""
    world.copied = _copied(world, world.sizes.copy_mb << 20)
    world.multiplied = _multiplied(world, world.sizes.gemm)
    yield Line(name="copy", value=world.copied / 1e12, unit="TB/s", bar=2.5, speed=True)
    yield Line(name="bf16 product", value=world.multiplied / 1e12, unit="TFLOP/s", bar=600, speed=True)
    yield Line(name="memory of the device", value=world.memory / 1e9, unit="GB")


def _copied(world: World, size: int) -> float:
    """Bytes a second, read and written."""
    source = torch.empty(size, dtype=torch.uint8, device=world.device)
    target = torch.empty_like(source)
    return 2 * size / world.seconds(lambda: target.copy_(source), 5)


def _multiplied(world: World, n: int) -> float:
    """FLOP/s of n x n matrices."""
    a, b = (torch.randn(n, n, device=world.device).bfloat16() for _ in range(2))
    return 2 * n**3 / world.seconds(lambda: a @ b, 5)


def operations(world: World) -> Lines:
    """Outputs and gradients of all ``Ops``, and of those that are in Triton."""
    cases = _cases(world, TORCH_OPS)
    if world.kernels is None:
        yield Line(name="triton", note="no card, or no Triton")
    else:
        cases += [
            (f"triton: {name}", function, shapes)
            for name, function, shapes in _cases(world, world.kernels.ops)
            if name in TRITON
        ]
    for name, function, shapes in cases:
        inputs = [_drawn(shape, index) for index, shape in enumerate(shapes)]
        ours = [x.to(world.device, copy=True).requires_grad_() for x in inputs]
        twins = [x.double().requires_grad_() for x in inputs]
        found, wanted = function(*ours), function(*twins)
        bar = FORWARD * (1 + name.endswith(SEVERAL))
        yield Line(name=name, value=off(found, wanted), bar=bar, most=True)
        weights = _drawn(tuple(wanted.shape), 99)
        (found.float() * weights.to(world.device).float()).sum().backward()
        (wanted * weights.double()).sum().backward()
        pairs = [(one.grad, other.grad) for one, other in zip(ours, twins, strict=True)]
        worst = max(off(one, other) for one, other in pairs if one is not None and other is not None)
        yield Line(name=f"{name}, gradients", value=worst, bar=BACKWARD, most=True)
    yield from _attention_speed(world)


def _attention_speed(world: World) -> Lines:
    """Of packed attention forward and backward: prompts with eight answers each, short and long."""
    heads, groups, dim = world.sizes.heads
    sets = {"": TORCH_OPS} | ({} if world.kernels is None else {"triton: ": world.kernels.ops})
    for name, families, before, behind in (("short", 16, 128, 48), ("long", 1, 1024, 896)):
        if world.dry:
            families, before, behind = 1, 8, 3
        segments: list[Segment] = []
        for family in range(families):
            first = family * (before + 8 * behind)
            segments.append(Segment(start=first, stop=first + before))
            for start in range(first + before, first + before + 8 * behind, behind):
                prefix = {"prefix_start": first, "prefix_stop": first + before}
                segments.append(Segment(start=start, stop=start + behind, **prefix))
        rows = segments[-1].stop
        q, k, v = (
            _drawn((rows, n, dim), 1).to(world.device).requires_grad_() for n in (heads, groups, groups)
        )
        for label, ops in sets.items():

            def work(ops: Ops = ops, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
                ops.attention(tuple(segments))(0, q, k, v, dim**-0.5).sum().backward()  # noqa: B023

            millis = 1e3 * world.seconds(work, 3)
            yield Line(name=f"{label}packed attention, {name} answers, {rows} rows", value=millis, unit="ms")


def _drawn(shape: Sequence[int], seed: int) -> Tensor:
    """bf16 values on the CPU, of about 1."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _cases(world: World, ops: Ops) -> list[tuple[str, Function, list[tuple[int, ...]]]]:
    (heads, groups, dim), rows = world.sizes.heads, 40 if world.dry else 300
    hidden, width, num, top_k = world.sizes.expert_shape
    ids = torch.rand(rows, num, generator=torch.Generator().manual_seed(5)).topk(top_k, dim=1).indices
    small = 1 / hidden**0.5

    def experts(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *factors: Tensor) -> Tensor:
        added = ExpertLora(*(factor * small for factor in factors), scale=2.0) if factors else None
        mixed = weights.float().softmax(1) if x.dtype == torch.bfloat16 else weights.softmax(1)
        return ops.experts(x, ids.to(x.device), mixed, gate_up * small, down * small, added)

    def lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return ops.add_lora(y, x, a, b, 0.5)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, 1e-6)

    def norm_after_sum(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return torch.cat(ops.add_rms_norm(x, residual, weight, 1e-6))

    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = (turn[:, : dim // 2].repeat(1, 2) for turn in (cos, sin))  # both halves of a head alike
        return ops.rope(x, cos, sin)

    shapes = [(rows, hidden), (rows, top_k), (num, 2 * width, hidden), (num, hidden, width)]
    rank = 8  # rows of 16 bytes, which a grouped product needs
    shared = [(2 * rank, hidden), (num, 2 * width, 2 * rank), (num, rank, width), (hidden, rank)]
    attend = [(rows, heads, dim), (rows, groups, dim), (rows, groups, dim)]
    return [
        ("linear", ops.linear, [(rows, hidden), (width, hidden), (width,)]),
        ("rms_norm", norm, [(rows, hidden), (hidden,)]),
        ("add_rms_norm", norm_after_sum, [(rows, hidden), (rows, hidden), (hidden,)]),
        ("rope", rope, [(rows, heads, dim), (rows, dim), (rows, dim)]),
        ("silu_mul", ops.silu_mul, [(rows, 2 * width)]),
        ("add_lora", lora, [(rows, width), (rows, hidden), (rank, hidden), (width, rank)]),
        ("experts", experts, shapes),
        ("experts with adapters", experts, [*shapes, *shared]),
        ("packed attention", partial(_packed, ops, rows), attend),
    ]


def _packed(ops: Ops, rows: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A prompt with three answers of two lengths, and a sequence by itself."""
    third, fifth = rows // 3, rows // 5
    cuts = [(0, third, 0, 0)]
    for length in (fifth, fifth, fifth // 2):
        cuts.append((cuts[-1][1], cuts[-1][1] + length, 0, third))
    cuts.append((cuts[-1][1], rows, 0, 0))
    segments = tuple(Segment(start=a, stop=b, prefix_start=c, prefix_stop=d) for a, b, c, d in cuts)
    return ops.attention(segments)(0, q, k, v, q.shape[2] ** -0.5)


def paged(world: World) -> Lines:
    """What the sampler attends with: a prompt, a chunk behind a cached part, decoding, drafts."""
    yield from _attention(world, "", GpuPaged)
    if world.kernels is not None:
        yield from _attention(world, "triton: ", TritonPaged)


def _attention(world: World, label: str, attention: type[GpuPaged] | type[TritonPaged]) -> Lines:
    heads, groups, dim = world.sizes.heads
    shape, blocks = (groups, dim, dim), 64
    by_position = attention is TritonPaged
    store = KVStore.allocate(1, blocks, shape, torch.bfloat16, world.device, by_position=by_position)
    twin = KVStore.allocate(1, blocks, shape, torch.float32, torch.device("cpu"))
    tables = np.random.default_rng(0).permutation(blocks)[:60].reshape(3, 20).astype(np.int32)
    done = np.zeros(3, np.int64)
    for name, counts in (
        ("prompts", (100, 37, 1)),
        ("a chunk behind a prefix, decoding", (120, 1, 1)),
        ("decoding", (1, 1, 1)),
        ("drafts", (5, 3, 1)),
    ):
        owners = np.repeat(np.arange(3, dtype=np.int32), counts)
        places = np.concatenate([np.arange(d, d + n) for d, n in zip(done, counts, strict=True)])
        slots = tables[owners, places // 16].astype(np.int64) * 16 + places % 16
        arrays = (slots, tables, owners, (places + 1).astype(np.int32))
        rows, there = (
            Rows(*(torch.from_numpy(a).to(device) for a in arrays), owners=owners, seen=arrays[3])
            for device in ("cpu", world.device)
        )
        q, k, v = (_drawn((len(owners), h, dim), 7 + h) for h in (heads, groups, groups))
        found = attention(store, there)(
            0, q.to(world.device), k.to(world.device), v.to(world.device), dim**-0.5
        )
        wanted = TorchPaged(twin, rows)(0, q.float(), k.float(), v.float(), dim**-0.5)
        yield Line(name=f"{label}paged attention: {name}", value=off(found, wanted), bar=FORWARD, most=True)
        done += counts


def sampler(world: World) -> Lines:
    """Tokens drawn from the same logits at the same noise."""
    for label, kernels in world.sets.items():
        yield from _draws(world, label, kernels)


def _draws(world: World, label: str, kernels: CudaKernels | None) -> Lines:
    count, chunk = world.sizes.draws, min(world.sizes.draws, 2048)
    some = [Sampling(), Sampling(temperature=0.7, top_k=50), Sampling(top_p=0.9), Sampling(min_p=0.02)]
    settings = Settings.of([some[row % 4] for row in range(chunk)])
    noise, generator = np.random.default_rng(1), torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(chunk, world.sizes.vocab, generator=generator)
    there, apart, drawn, gap = logits.to(world.device), 0, 0, 0.0
    while drawn < count:
        u = noise.random(chunk)
        ours, twin = sample(there, settings, u, kernels), sample_torch(logits, settings, u)
        other = ours.tokens != twin.tokens
        edges = np.abs(u - twin.edges), np.abs(u - twin.edges - np.exp(twin.logprobs))
        apart, drawn = apart + int(other.sum()), drawn + chunk
        gap = max(gap, float(np.where(other, np.minimum(*edges), 0).max()))
    yield Line(name=f"{label}tokens that are the twin's", value=1 - apart / drawn, bar=0.9999)
    yield Line(name=f"{label}other tokens, from an edge", value=gap, bar=1e-5, most=True)


def routes(world: World) -> Lines:
    """Experts chosen from the same scores, and their weights."""
    _, _, num, top_k = world.sizes.expert_shape
    logits = torch.randn(4096, num, generator=torch.Generator().manual_seed(3))
    plain: dict[str, Any] = {"num_experts": num, "top_k": top_k, "intermediate_size": 8, "layers": (0,)}
    moe = MoEConfig(norm_topk=True, **plain)
    ids, weights, _ = TORCH_OPS.route(logits.to(world.device), moe)
    wanted, twin, _ = TORCH_OPS.route(logits, moe)
    same = float((ids.cpu() == wanted).all(dim=1).double().mean())
    yield Line(name="rows with the twin's experts", value=same, bar=0.9999)
    yield Line(name="weights of experts", value=off(weights, twin), bar=1e-4, most=True)


def head(world: World) -> Lines:
    """Log-probabilities and their gradient through the frozen fp32 head, in bf16 products."""
    decoder = world.decoder(world.raw(DENSE, layers=1))
    count, size = (64, decoder.config.hidden_size)
    hidden = _drawn((count, size), 11)
    targets = torch.randint(decoder.config.vocab_size, (count,), generator=torch.Generator().manual_seed(4))
    weight, twin = decoder.head_weight, hidden.double().requires_grad_()
    wanted, _ = linear_logprobs(twin, weight.double().cpu(), targets)
    wanted.sum().backward()
    assert twin.grad is not None
    sets = {"": TORCH_OPS} | ({} if world.kernels is None else {"triton: ": world.kernels.ops})
    for label, ops in sets.items():
        nt, nn = choose_head_products(decoder, ops)
        ours = hidden.to(world.device, copy=True).requires_grad_()
        found, _ = linear_logprobs(
            ours, weight, targets.to(world.device), matmul_nt=nt, matmul_nn=nn, head=ops.head
        )
        found.sum().backward()
        assert ours.grad is not None
        yield Line(
            name=f"{label}log-probabilities of the head", value=off(found, wanted), bar=1e-4, most=True
        )
        yield Line(
            name=f"{label}gradients of the head", value=off(ours.grad, twin.grad), bar=BACKWARD, most=True
        )
    logits, there = decoder.logits(hidden.to(world.device)), weight.double().cpu()
    yield Line(
        name="logits of the sampler", value=off(logits, hidden.double() @ there.T), bar=1e-4, most=True
    )


def replay(world: World) -> Lines:
    """The laws of replay: recorded routes change nothing, forced ones are obeyed, recomputing agrees."""
    raw = {**EXPERTS, **TINY_EXPERTS, "initializer_range": 0.3}
    config, spec = parse_config(raw), AdapterSpec(rank=8, alpha=16, targets=("attn",))
    assert config.moe is not None
    layers, experts, top_k = len(config.moe.layers), config.moe.num_experts, config.moe.top_k
    scores = torch.rand(24, layers, experts, generator=torch.Generator().manual_seed(6))
    forced = scores.topk(top_k, dim=-1).indices
    for dtype, bound in ((torch.float32, 1e-3), (torch.bfloat16, 3e-2)):
        twin = Decoder(config, dtype=dtype).init_weights(0)
        there, _, _ = _replayed(twin, init_adapters(config, spec), forced)
        decoder, adapters = twin.to(world.device), init_adapters(config, spec, 0, world.device)
        hidden, native, grads = _replayed(decoder, adapters, None)
        again, same, _ = _replayed(decoder, adapters, native)
        equal = float(torch.equal(again, hidden) and torch.equal(same, native))
        name = str(dtype).removeprefix("torch.")
        yield Line(name=f"replay of its own routes is the identity, {name}", value=equal, bar=1)
        here, _, _ = _replayed(decoder, adapters, forced.to(world.device))
        yield Line(name=f"forced routes, {name}", value=off(here, there), bar=bound, most=True)
        recomputed = _replayed(decoder, adapters, None, recompute=True)[2]
        worst = max(off(one, other) for one, other in zip(recomputed, grads, strict=True))
        yield Line(name=f"gradients recomputed, {name}", value=worst, bar=bound, most=True)


def _replayed(
    decoder: Decoder, adapters: Adapters, routing: Tensor | None, *, recompute: bool = False
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Hidden states, own routes and gradients of adapters of a short sequence."""
    ids = torch.arange(24, device=decoder.device)
    attend = PackedAttention((Segment(start=0, stop=24),))
    hidden, native = decoder.forward(
        ids, ids, attend, adapters=adapters, routing=routing, recompute=recompute
    )
    assert native is not None
    leaves = [b for _, b in adapters.tensors.values()]
    return hidden, native, list(torch.autograd.grad(hidden.float().square().mean(), leaves))


PARTS = (operations, paged, sampler, routes, head, replay)
