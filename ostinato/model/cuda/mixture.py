"""Mixture of experts of a sampler's pass in Triton: the choice, the sort, grouped products, the weighted sum.

Nothing is read back from the GPU. Rows are sorted by expert in a single launch; a program of a grouped
product has an expert and some of its columns, and walks the rows of the expert, whose number the host does
not know. The twins are ``model.moe.route`` and ``experts``, which prefill and training use.

T rows, D hidden size, F width of an expert, E experts, K experts per row, S = T * K pairs, R rank.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# A kernel is no Python function: its types are Triton's.
from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ostinato.model import moe as twin
from ostinato.model.config import MoEConfig, Scoring
from ostinato.model.cuda.elementwise import silu_mul
from ostinato.model.cuda.products import linear
from ostinato.model.moe import ExpertLora
from ostinato.model.weights import Weight

MAX_ROWS = 256  # of a pass; for more rows torch's grouped product is faster
CHUNK = 1024
BLOCK_N = 32  # columns of a program
BLOCK_K = 64  # inputs that a program of 16 rows loads at once; with 64 rows half as many, or registers spill
COLUMNS = 1024  # of a program of the weighted sum


def route(
    logits: Tensor, moe: MoEConfig, bias: Tensor | None = None, routing: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``moe.route`` in a single launch; of equal scores the expert with the smaller id is chosen.
    Groups of experts, other types than fp32 and passes under autograd are left to the twin."""
    if moe.num_groups > 1 or torch.is_grad_enabled() or logits.dtype != torch.float32:
        return twin.route(logits, moe, bias, routing)
    ids = torch.empty(len(logits), moe.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(len(logits), moe.top_k, dtype=torch.float32, device=logits.device)
    native = ids if routing is None else torch.empty_like(ids)
    replayed = ids if routing is None else routing.long().contiguous()
    if len(logits):
        _route_kernel[(len(logits),)](
            logits, logits if bias is None else bias, replayed, ids, native, weights, routing is not None,
            logits.stride(0), moe.num_experts, moe.top_k, moe.scaling,
            SIGMOID=moe.scoring == Scoring.SIGMOID, BIAS=bias is not None,
            RENORMALISE=moe.norm_topk, E=triton.next_power_of_2(moe.num_experts),
            K=triton.next_power_of_2(moe.top_k), num_warps=1,
        )  # fmt: skip
    return ids, weights, native


@triton.jit(do_not_specialize=["is_given"])
def _route_kernel(
    logits, bias, routing, ids, native, weights, is_given, stride, num_experts, top_k, scaling,
    SIGMOID: tl.constexpr, BIAS: tl.constexpr, RENORMALISE: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    expert, rank = tl.arange(0, E), tl.arange(0, K)
    is_expert = expert < num_experts
    z = tl.load(logits + row * stride + expert, mask=is_expert, other=float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-tl.maximum(z, -80.0)))
    else:
        mass = tl.exp(z - tl.max(z))
        scores = mass / tl.sum(mass)
    ranking = scores
    if BIAS:
        ranking += tl.load(bias + expert, mask=is_expert, other=0.0)
    ranking = tl.where(ranking == ranking, ranking, float("inf"))  # NaN as inf, so that ids stay in range
    ranking = tl.where(is_expert, ranking, float("-inf"))
    expert_weights = tl.zeros([K], tl.float32)
    for k in range(top_k):
        best = tl.min(tl.where(ranking == tl.max(ranking), expert, E))
        replayed = tl.load(routing + row * top_k + k, mask=is_given != 0, other=-1).to(tl.int32)
        expert_id = tl.where(replayed >= 0, replayed, best)
        tl.store(native + row * top_k + k, best.to(tl.int64))
        tl.store(ids + row * top_k + k, expert_id.to(tl.int64))
        expert_weights = tl.where(
            rank == k, tl.sum(tl.where(expert == expert_id, scores, 0.0)), expert_weights
        )
        ranking = tl.where(expert == best, float("-inf"), ranking)
    if RENORMALISE:
        expert_weights = expert_weights / (tl.sum(expert_weights) + 1e-20)
    tl.store(weights + row * top_k + rank, expert_weights * scaling, mask=rank < top_k)


class SortedPairs(NamedTuple):
    """Pairs (row, expert), sorted by expert and then by row. Pair p is of row p // K."""

    order: Tensor  # [S] int32: the pair at each place
    places: Tensor  # [S] int32: the place of each pair
    spans: Tensor  # [2, E] int32: the first place of each expert, and the place after its last
    policies: int = 1  # P: with several, "expert" e * P + p is expert e for the rows of policy p


def sort_pairs(ids: Tensor, num_experts: int) -> SortedPairs:
    """Sort the pairs of ids [T, K] by expert, stably, in a single launch: the program of every expert counts
    the pairs of the experts before it."""
    assert ids.is_contiguous()
    buffers = torch.empty(2, ids.numel(), dtype=torch.int32, device=ids.device)
    spans = torch.empty(2, num_experts, dtype=torch.int32, device=ids.device)
    _sort_kernel[(num_experts,)](ids, buffers[0], buffers[1], spans, ids.numel(), num_experts, CHUNK=CHUNK)
    return SortedPairs(buffers[0], buffers[1], spans)


@triton.jit
def _sort_kernel(ids, order, places, spans, pairs, num_experts, CHUNK: tl.constexpr):
    expert = tl.program_id(0)
    first_place = tl.full([], 0, tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        first_place += tl.sum(
            (tl.load(ids + pair, mask=pair < pairs, other=num_experts) < expert).to(tl.int32)
        )
    place = first_place
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        is_own = (tl.load(ids + pair, mask=pair < pairs, other=num_experts) == expert).to(tl.int32)
        target = place + tl.cumsum(is_own, axis=0) - is_own
        tl.store(order + target, pair, mask=is_own > 0)
        tl.store(places + pair, target, mask=is_own > 0)
        place += tl.sum(is_own)
    tl.store(spans + expert, first_place)
    tl.store(spans + num_experts + expert, place)


class Update(NamedTuple):
    """A low-rank addition to a grouped product: scale * low b^T."""

    low: Tensor  # [T, R] by row, or [S, R] by place
    by_row: bool
    b: Tensor  # [E, N, R], or [N, R] for all experts
    scale: float


def multiply_grouped(
    x: Tensor,
    weight: Tensor,
    pairs: SortedPairs,
    rows: int,
    update: Update | None = None,
    *,
    gated: bool = False,
    fixed: bool = False,
) -> Tensor:
    """Compute [S, N] by place: x times weight[e]^T of [E, N, D], or weight[p, e]^T of [P, E, N, D], plus
    ``update``. x is [T, D] by row, with K as ``rows``, or [S, D] by place, with ``rows`` 0. ``gated``: return
    silu of the first half of the columns times the second, [S, N / 2]. ``fixed``: tiles do not depend on the
    number of pairs."""
    num_outputs, inputs = weight.shape[-2:]
    num_experts = pairs.spans.shape[1]
    assert x.stride(1) == weight.stride(-1) == 1 and weight.stride(-2) == inputs
    num_pairs, columns = len(pairs.order), num_outputs // 2 if gated else num_outputs
    out = x.new_empty(num_pairs, columns)
    low, low_by_row, b, scale = update or Update(x, False, x, 0.0)
    rank = b.shape[-1] if update else 0
    assert not update or (low.stride(1) == 1 and b.stride(-1) == 1 and b.stride(-2) == rank)
    is_small = not fixed and num_pairs <= 16 * num_experts
    _grouped_kernel[(num_experts, triton.cdiv(columns, BLOCK_N))](
        x, weight, low, b, out, pairs.order, pairs.spans, x.stride(0), low.stride(0), *_find_strides(weight),
        *_find_strides(b), num_experts, pairs.policies, inputs, columns, rank, scale,
        K=rows, LOW_K=rows if low_by_row else 0, GATED=gated,
        RANK=max(16, triton.next_power_of_2(rank)) if rank else 0, M=16 if is_small else 64, N=BLOCK_N,
        D=BLOCK_K if is_small else BLOCK_K // 2,
    )  # fmt: skip
    return out


def _find_strides(factor: Tensor) -> tuple[int, int]:
    """Return the strides of policies and of experts of [P, E, N, R], of [E, N, R], or of [N, R], where what
    is missing has the stride 0."""
    # zeros in front for the dimensions that are missing
    policy, expert = (0, 0, *factor.stride()[:-2])[-2:]
    return policy, expert


@triton.jit
def _grouped_kernel(
    x, weight, low, b, out, order, spans, x_row, low_row, w_policy, w_expert, b_policy, b_expert, num_experts,
    policies, inputs, columns, rank, scale,
    K: tl.constexpr, LOW_K: tl.constexpr, GATED: tl.constexpr, RANK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    column = tl.program_id(1) * N + tl.arange(0, N)
    column_mask = column < columns
    first_place, last_place = tl.load(spans + number), tl.load(spans + num_experts + number)
    expert, policy = (number // policies).to(tl.int64), (number % policies).to(tl.int64)
    expert_weight = weight + policy * w_policy + expert * w_expert + column[None, :] * inputs
    gate_factor_weight = (
        expert_weight + columns * inputs
    )  # the second half of the columns: the factor of the gate
    for start in range(first_place, last_place, M):
        place = start + tl.arange(0, M)
        row_mask = place < last_place
        pair = tl.load(order + place, mask=row_mask, other=0)
        source = x + (pair // K if K > 0 else place).to(tl.int64)[:, None] * x_row
        result = tl.zeros([M, N], tl.float32)
        factor = tl.zeros([M, N], tl.float32)
        for begin in range(0, inputs, D):
            depth = begin + tl.arange(0, D)
            x_part = tl.load(
                source + depth[None, :], mask=row_mask[:, None] & (depth[None, :] < inputs), other=0.0
            )
            mask = column_mask[None, :] & (depth[:, None] < inputs)
            w_part = tl.load(expert_weight + depth[:, None], mask=mask, other=0.0).to(x_part.dtype)
            result = tl.dot(x_part, w_part, result, input_precision="ieee")
            if GATED:
                w_part = tl.load(gate_factor_weight + depth[:, None], mask=mask, other=0.0).to(x_part.dtype)
                factor = tl.dot(x_part, w_part, factor, input_precision="ieee")
        if RANK > 0:
            depth = tl.arange(0, RANK)
            source = low + (pair // LOW_K if LOW_K > 0 else place).to(tl.int64)[:, None] * low_row
            x_part = tl.load(
                source + depth[None, :], mask=row_mask[:, None] & (depth[None, :] < rank), other=0.0
            )
            mask = column_mask[None, :] & (depth[:, None] < rank)
            up = b + policy * b_policy + expert * b_expert + column[None, :] * rank + depth[:, None]
            result += scale * tl.dot(x_part, tl.load(up, mask=mask, other=0.0), input_precision="ieee")
            if GATED:
                w_part = tl.load(up + columns * rank, mask=mask, other=0.0)
                factor += scale * tl.dot(x_part, w_part, input_precision="ieee")
        if GATED:
            result = result * (1.0 / (1.0 + tl.exp(-result))) * factor
        target = out + place.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


def sum_pairs(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Compute the weighted sum [T, N] of the pairs of every row: ``rows`` [S, N] by place, weights [T, K]
    fp32."""
    count, top_k = weights.shape
    out = rows.new_empty(count, rows.shape[1])
    _combine_kernel[(count, triton.cdiv(rows.shape[1], COLUMNS))](
        rows, places, weights, out, top_k, rows.shape[1], BLOCK=COLUMNS
    )
    return out


@triton.jit
def _combine_kernel(rows, places, weights, out, top_k, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(top_k):
        place = tl.load(places + row * top_k + k).to(tl.int64)
        value = tl.load(rows + place * columns + column, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weights + row * top_k + k) * value
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=mask)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weight,
    down: Weight,
    lora: ExpertLora | None = None,
    *,
    fixed: bool = False,
    owners: Tensor | None = None,
) -> Tensor:
    """Compute ``moe.experts`` for a sampler's pass, in 4 launches, or 6 with adapters. What these kernels do
    not take (codes, other types, autograd, more than MAX_ROWS rows) is left to the twin. With ``fixed`` tiles
    the number of rows is not limited, and the result of a row depends on no other row. With ``owners`` [T]
    int32 the factors are those of several policies, [P, ...], and each row uses those of its policy, in 7
    launches."""
    is_plain = isinstance(gate_up, Tensor) and isinstance(down, Tensor) and gate_up.dtype == x.dtype
    if not fixed and (
        not is_plain or torch.is_grad_enabled() or not 0 < len(x) <= MAX_ROWS or x.dtype == torch.float64
    ):
        return twin.experts(x, ids, weights, gate_up, down, lora, gate=silu_mul)
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor), "codes are not exact"
    top_k, num_experts = ids.shape[1], len(gate_up)
    if owners is None or lora is None:
        pairs = sort_pairs(ids, num_experts)
    else:
        policies = len(lora.down_a)
        expert_policy_ids = torch.add(owners.unsqueeze(1), ids, alpha=policies)
        pairs = sort_pairs(expert_policy_ids, num_experts * policies)._replace(policies=policies)
        lora = ExpertLora(*(_expand_experts(factor, num_experts) for factor in lora[:4]), scale=lora.scale)
    product = partial(multiply_grouped, pairs=pairs, fixed=fixed)
    if lora is None:
        act = product(x, gate_up, rows=top_k, gated=True)
        return sum_pairs(product(act, down, rows=0), pairs.places, weights)
    a = lora.gate_up_a
    is_shared = a.dim() == 2
    multiply = linear if fixed else F.linear
    low = multiply(x, a) if is_shared else product(x, a, rows=top_k)
    act = product(
        x, gate_up, rows=top_k, update=Update(low, is_shared, lora.gate_up_b, lora.scale), gated=True
    )
    low = product(act, lora.down_a, rows=0)
    rows = product(act, down, rows=0, update=Update(low, False, lora.down_b, lora.scale))
    return sum_pairs(rows, pairs.places, weights)


def _expand_experts(factor: Tensor, num_experts: int) -> Tensor:
    """Expand [P, N, R] for all experts to [P, E, N, R] without a copy; return [P, E, N, R] as it is."""
    return factor if factor.dim() == 4 else factor.unsqueeze(1).expand(-1, num_experts, -1, -1)
