"""The arithmetic on NVIDIA GPUs: kernels in Triton, with the signatures of ``model/ops.py`` and engine.

Imported only for a CUDA device, since only torch's CUDA wheels bring Triton. Every kernel has a twin in
torch, and tests run both: without a GPU in Triton's interpreter (float32), on a GPU in its own types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.model.cuda import paged, policies, products
from ostinato.model.cuda.elementwise import add_rms_norm, rms_norm, rope, silu_mul
from ostinato.model.cuda.graphs import Graph
from ostinato.model.cuda.mixture import experts, route
from ostinato.model.cuda.sampling import score_targets
from ostinato.model.cuda.scoring import score_in_place
from ostinato.model.cuda.varlen import VarlenAttention
from ostinato.model.exact import BLOCK, Blocks, make_exact_ops
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.types import Segment


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute y + scale * x a^T b^T in two launches. Outside of autograd y is overwritten."""
    low = F.linear(x, a)
    if torch.is_grad_enabled():
        return torch.addmm(y, low.to(y.dtype), b.t().to(y.dtype), alpha=scale)
    return y.addmm_(low.to(y.dtype), b.t().to(y.dtype), alpha=scale)


def add_product(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Add x w^T to y in place, in one launch, and return y."""
    return y.addmm_(x, w.t())


CUDA_OPS = replace(
    TORCH_OPS,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope=rope,
    silu_mul=silu_mul,
    add_lora=add_lora,
    route=route,
    experts=experts,
    gemm=replace(TORCH_OPS.gemm, add=add_product),
    attention=VarlenAttention,
    head=score_in_place,
)


# for the sampler with ``model.exact``: the result of a row depends on that row alone
EXACT_OPS = replace(
    CUDA_OPS,
    linear=products.linear,
    add_lora=products.add_lora,
    experts=partial(experts, fixed=True),
    score=score_targets,
)


@dataclass(frozen=True, slots=True)
class CudaKernels:
    """The argument with which an engine runs on these kernels, as ``model.native.Kernels`` on a CPU.

    ``graph`` makes the graphs in which small passes are captured; None: kernels are launched one by one.
    ``exact``: the kernels are also the trainer's, and compute each row alike for any number of rows, although
    others are faster. ``mixes``: a captured pass may have rows of several policies.
    """

    ops: Ops = CUDA_OPS
    graph: Callable[[], Graph] | None = None
    exact: bool = False
    mixes: bool = True


def mix_ops(ops: Ops, owners: Tensor, tiles: paged.Tiles) -> Ops:
    """Return ``ops`` for adapters of several policies (``lora.stack_adapters``). ``owners`` [T] int32 are the
    places of the rows' policies in the stack, and each tile of ``tiles`` has rows of a single policy."""
    return replace(
        ops,
        add_lora=partial(policies.add_lora, owners=owners, tiles=tiles),
        experts=partial(ops.experts, owners=owners),
    )


class BlockAttention:
    """Compute (q, k, v, scale) -> (out, log-sum-exp) for the rows of a microbatch by the sampler's kernel, on
    rows in blocks (``exact.Blocks``). The first call allocates the memory of a layer, which all later calls
    overwrite."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        self._blocks = Blocks(segments)
        self._memory: tuple[Tensor, Tensor] | None = None  # of a layer; all layers use it
        self._places: tuple[Tensor, ...] = ()  # on the device
        self._tiles: paged.Tiles | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        blocks, num_kv_heads = self._blocks, k.shape[1]
        if self._memory is None or self._tiles is None:
            shape = blocks.count, BLOCK, num_kv_heads
            self._memory = k.new_zeros(*shape, k.shape[2]), v.new_zeros(*shape, v.shape[2])
            host_tensors = blocks.writers, blocks.slots, blocks.tables, blocks.sequence, blocks.lengths
            self._places = tuple(x.to(q.device) for x in host_tensors)
            self._tiles = paged.Tiles.of(blocks.sequence.numpy(), q.shape[1] // num_kv_heads, q.device)
        writers, slots, tables, sequence, lengths = self._places
        k, v = (x.index_select(0, writers) for x in (k, v))
        paged.write_cache(k, v, slots, *self._memory)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        keys, values = self._memory
        out = paged.paged_attention(
            q, keys, values, tables, sequence, lengths, self._tiles, scale, lse, parallel=False
        )
        return out, lse


def make_exact_training_ops() -> Ops:
    """Make the trainer's ops for ``model.exact``: their forward is that of EXACT_OPS, bit for bit."""
    return make_exact_ops(
        EXACT_OPS,
        CUDA_OPS,
        products.add_nt,
        lambda segments: VarlenAttention(segments, BlockAttention(segments)),
    )
