"""Mixture of experts: the choice of experts as a pure function, and their feed-forward networks.

Routing is a value. ``route`` chooses experts or takes them as an argument; in both cases the weights follow
the model's own formula on the live logits, so a replayed choice gives the same numbers and has a gradient.
The model's own choice is returned as well: comparing the two shows whether a replay is aligned.

T tokens, D model, F width of one expert, E experts, K experts per token, S = T * K, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ostinato.model.config import MoEConfig, Scoring
from ostinato.model.elementwise import silu_mul
from ostinato.model.gemm import Gemm
from ostinato.model.weights import Quantised, Weight, load_saved_weight, save_weight
from ostinato.types import NO_EXPERT


class ExpertLora(NamedTuple):
    """Low-rank updates of all experts of a layer, ready to use. Gate and up together have the rank R = 2r.

    A factor is per expert [E, ...], or in the shared_outer scheme shared by all, without the first dimension.
    """

    gate_up_a: Tensor  # [E, R, D] or [R, D]
    gate_up_b: Tensor  # [E, 2F, R]
    down_a: Tensor  # [E, r, F]
    down_b: Tensor  # [E, D, r] or [D, r]
    scale: float


def route(
    logits: Tensor, moe: MoEConfig, bias: Tensor | None = None, routing: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the experts of every token, their mixture weights, and the model's own choice: (ids [T, K]
    int64, weights [T, K] fp32, native [T, K] int64).

    ``logits`` [T, E] fp32. ``bias`` [E] is DeepSeek-V3's correction, which acts on the choice only (arXiv
    2412.19437 section 2.1.2). ``routing`` [T, K] replays a choice (R3, arXiv 2510.11370); in a row of
    NO_EXPERT the model chooses. Without a routing, ids and native are one tensor.
    """
    scores = _sigmoid(logits) if moe.scoring == Scoring.SIGMOID else logits.softmax(dim=-1)
    ids = native = choose_experts(scores.detach(), moe, bias)
    if routing is not None:
        routing = routing.long()  # torch takes 255 in a byte for -1
        ids = torch.where(routing[:, :1] == NO_EXPERT, native, routing)
    weights = scores.gather(1, ids)
    if moe.norm_topk:
        # softmax scores of a replayed choice may all underflow; 1e-20 is lost beside any other sum
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids, weights if moe.scaling == 1.0 else weights * moe.scaling, native


def _sigmoid(x: Tensor) -> Tensor:
    """Compute the sigmoid, with the same rounding in every batch. torch's own rounds differently if the size
    of a tensor is no multiple of its vector width, so a token's weights would depend on the number of
    tokens."""
    return 1 / (1 + (-x.clamp(min=-80)).exp())  # below -80 the exponential overflows, and its gradient is NaN


def choose_experts(scores: Tensor, moe: MoEConfig, bias: Tensor | None) -> Tensor:
    """Choose the top-K experts [T, K] by score + bias, within the best groups when experts are grouped.

    The rank of a group is the sum of its two best experts (DeepSeek-V3, arXiv 2412.19437 section 2.1.2).
    """
    return _rank_scores(scores, moe, bias).topk(moe.top_k, dim=-1).indices


def _rank_scores(scores: Tensor, moe: MoEConfig, bias: Tensor | None) -> Tensor:
    """Compute the values by which experts are chosen, [T, E]: score + bias, and -inf outside of the best
    groups."""
    if bias is not None:
        scores = scores + bias
    if moe.num_groups > 1:
        groups = scores.unflatten(1, (moe.num_groups, -1))
        group_values = groups.topk(2, dim=-1).values.sum(dim=-1)
        mask = torch.zeros_like(group_values, dtype=torch.bool)
        mask.scatter_(1, group_values.topk(moe.topk_groups, dim=-1, sorted=False).indices, True)
        scores = groups.masked_fill(~mask.unsqueeze(-1), -torch.inf).flatten(1)
    return scores


def compute_routing_margins(logits: Tensor, moe: MoEConfig, bias: Tensor | None = None) -> Tensor:
    """Compute by how much the last expert chosen exceeds the first expert that is not chosen, [T] fp32 in
    units of the logits.

    With a correction bias it is the smallest change of a logit that can flip the choice: four times the
    difference of score + bias, since no sigmoid is steeper than 1/4. NaN if there is no other expert to
    choose.
    """
    nans = logits.new_full(logits.shape[:1], torch.nan)
    if moe.top_k == moe.num_experts:
        return nans
    scores = _sigmoid(logits) if moe.scoring == Scoring.SIGMOID else logits.softmax(dim=-1)
    ranking = _rank_scores(scores, moe, bias).topk(moe.top_k + 1, dim=-1)
    compared_values = ranking.values * 4 if bias is not None else logits.gather(1, ranking.indices)
    margins = (compared_values[:, -2] - compared_values[:, -1]).clamp(min=0)
    return torch.where(ranking.values[:, -1] > -torch.inf, margins, nans)


def check_routing(routing: Tensor, num_tokens: int, moe: MoEConfig) -> None:
    """Raise ValueError for a routing [T, L_moe, K] that cannot be replayed, as ``find_routing_fault``
    describes."""
    if fault := find_routing_fault(routing, num_tokens, moe):
        raise ValueError(fault)


def find_routing_fault(routing: Tensor, num_tokens: int, moe: MoEConfig) -> str:
    """Return, in one sentence, why a routing [T, L_moe, K] cannot be replayed; "" if it can. The reasons are
    a wrong shape or type, ids out of range, an expert twice in a row, and a row with NO_EXPERT in some slots
    only."""
    expected_shape = (num_tokens, len(moe.layers), moe.top_k)
    if tuple(routing.shape) != expected_shape:
        return f"routing has shape {tuple(routing.shape)}; [tokens, MoE layers, K] is {expected_shape}"
    if routing.dtype.is_floating_point:
        return f"routing has dtype {routing.dtype}; give integer expert ids"
    if routing.numel() == 0:
        return ""
    min_id, max_id = (int(bound) for bound in routing.aminmax())
    if max_id >= moe.num_experts or min_id < NO_EXPERT:
        return f"routing has ids from {min_id} to {max_id}; experts are 0 to {moe.num_experts - 1}"
    ids = routing.short() if routing.dtype == torch.uint8 else routing  # torch takes 255 in a byte for -1
    is_absent = ids == NO_EXPERT
    if bool((is_absent != is_absent[..., :1]).any()):
        return f"routing has a row with some slots {NO_EXPERT}; a row is given whole or not at all"
    shifts = range(1, moe.top_k)  # every two slots are compared in place, since a sort would copy them
    if any(
        bool(((ids[..., shift:] == ids[..., :-shift]) & ~is_absent[..., shift:]).any()) for shift in shifts
    ):
        return "routing has a row that names the same expert twice; each of the top_k must differ"
    return ""


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Weight,
    down: Weight,
    lora: ExpertLora | None = None,
    *,
    gemm: Gemm | None = None,
    gate: Callable[[Tensor], Tensor] = silu_mul,
) -> Tensor:
    """Compute the mixture sum_k weights[t, k] * expert_{ids[t, k]}(x_t): x [T, D] -> [T, D].

    ``gate_up`` [E, 2F, D], ``down`` [E, D, F]. Tokens are sorted by expert, so each expert is one matrix
    product over its own rows. ``gemm``: products of frozen bf16 experts and of codes; None: torch's.
    ``gate``: computes silu(gate) * up. The slow twin is ``experts_loop`` in the tests.
    """
    top_k = ids.shape[1]
    sorted_ids, order = ids.flatten().sort(stable=True)  # [S], rows grouped by expert
    expert_ids = torch.arange(gate_up.shape[0], device=ids.device)
    # no bincount, which would wait for the GPU
    ends = torch.searchsorted(sorted_ids, expert_ids, right=True, out_int32=True)
    token_idx = order // top_k
    return mixture(
        x,
        ends,
        lambda rows: rows.index_select(0, token_idx),
        lambda rows: _sum_rows(rows, order, weights),
        gate_up,
        down,
        lora,
        gemm=gemm,
        gate=gate,
    )


def mixture(
    x: Tensor,
    ends: Tensor,
    spread: Callable[[Tensor], Tensor],
    combine: Callable[[Tensor], Tensor],
    gate_up: Weight,
    down: Weight,
    lora: ExpertLora | None,
    *,
    gemm: Gemm | None = None,
    gate: Callable[[Tensor], Tensor] = silu_mul,
) -> Tensor:
    """Compute ``experts`` for rows that are sorted in any way: x [T, D] -> [T, D].

    ``spread``: [T, N] -> [S, N], a copy of a row for each of its experts, sorted by expert. ``ends`` [E] are
    the ends of the experts' rows. ``combine``: [S, N] -> [T, N], the weighted sum of the copies of a row. S
    may differ from T * K, and T may be 0.
    """
    rows = spread(x)
    hidden = grouped_linear(rows, gate_up, ends, gemm)
    if lora is not None:
        is_shared = lora.gate_up_a.dim() == 2
        # a shared A sees every token once, however many experts it goes to
        low = (
            spread(F.linear(x, lora.gate_up_a)) if is_shared else _multiply_factor(rows, lora.gate_up_a, ends)
        )
        hidden = hidden + _multiply_factor(low * lora.scale, lora.gate_up_b, ends)
    act = gate(hidden)
    out = combine(grouped_linear(act, down, ends, gemm))
    if lora is None:
        return out
    low = _multiply_factor(act, lora.down_a, ends) * lora.scale
    if lora.down_b.dim() == 2:  # a shared B commutes with the weighted sum
        return out + F.linear(combine(low), lora.down_b)
    return out + combine(_multiply_factor(low, lora.down_b, ends))


def _sum_rows(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Undo the sort and sum the weighted rows of each token: rows [S, N] in the order of experts -> [T, N].
    The order of the sum is fixed, which ``index_add`` does not guarantee."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    by_token = rows.index_select(0, inverse).view(*weights.shape, rows.shape[-1])
    return torch.bmm(weights.to(rows.dtype).unsqueeze(1), by_token).squeeze(1)


def _multiply_factor(x: Tensor, factor: Tensor, ends: Tensor) -> Tensor:
    """Compute ``grouped_linear`` with a factor of an adapter. On a CPU bf16 is widened: the numbers of rows
    differ in every batch, and torch's bf16 product compiles a kernel for each new number (0.5 ms)."""
    if x.dtype != torch.bfloat16 or x.is_cuda:
        return grouped_linear(x, factor, ends)
    return _WideGrouped.apply(x, factor, ends)  # type: ignore[return-value]


class _WideGrouped(torch.autograd.Function):
    """Products of bf16 rows and factors in fp32, each rounded once. The tensors saved for the backward are
    bf16."""

    @staticmethod
    def forward(ctx, x, factor, ends):
        needs_x, needs_factor, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_factor else None, factor if needs_x else None, ends)
        return grouped_linear(x.float(), factor.float(), ends).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, factor, ends = ctx.saved_tensors
        dtype, grad, grad_x, grad_factor = grad.dtype, grad.float(), None, None
        if factor is not None:
            wide_factor = factor.float()
            grad_x = _map_experts(grad, ends, lambda rows, expert: rows @ wide_factor[expert]).to(dtype)
        if x is not None:
            spans = pairwise([0, *ends.tolist()])
            grad_factor = torch.stack(
                [grad[start:stop].T @ x[start:stop].float() for start, stop in spans]
            ).to(dtype)
        return grad_x, grad_factor, None


def grouped_linear(x: Tensor, weight: Weight, ends: Tensor, gemm: Gemm | None = None) -> Tensor:
    """Multiply rows [ends[e-1], ends[e]) of x [S, K] by weight[e]^T of [E, N, K] -> [S, N]. ``ends`` [E]
    int32. ``gemm`` computes frozen bf16 weights and codes on a CPU; None: torch does."""
    if not x.shape[0]:  # an empty result, but in the graph, since other ranks wait for its backward
        expert = weight[0]
        return (
            F.linear(x, expert.to(x.dtype)) if isinstance(expert, Tensor) else expert.product(x).to(x.dtype)
        )
    if isinstance(weight, Quantised):
        nt, nn = (gemm.nt, gemm.nn) if gemm is not None else (_multiply_codes_nt, _multiply_codes_nn)
        return _FrozenGrouped.apply(x, weight, ends, nt, nn)  # type: ignore[return-value]
    if gemm is not None and weight.dtype == torch.bfloat16 and not x.is_cuda:
        return _FrozenGrouped.apply(x, weight, ends, gemm.nt, gemm.nn)  # type: ignore[return-value]
    if weight.dtype != x.dtype:
        return _FrozenGrouped.apply(x, weight, ends, _widen_nt, _widen_nn)  # type: ignore[return-value]
    if _can_multiply_grouped(x, weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    return _map_experts(x, ends, lambda rows, expert: F.linear(rows, weight[expert]))


def _multiply_codes_nt(rows: Tensor, weight: Quantised) -> Tensor:
    return weight.product(rows).to(rows.dtype)


def _multiply_codes_nn(rows: Tensor, weight: Quantised) -> Tensor:
    return weight.transposed_product(rows).to(rows.dtype)


def _widen_nt(rows: Tensor, weight: Tensor) -> Tensor:
    return F.linear(rows, weight.to(rows.dtype))


def _widen_nn(rows: Tensor, weight: Tensor) -> Tensor:
    return rows @ weight.to(rows.dtype)


class _FrozenGrouped(torch.autograd.Function):
    """Products of rows and frozen experts, one expert after the other: ``nt`` (rows, w) -> rows w^T, ``nn``
    -> rows w. If experts are stored in fewer bits than x, one at a time is widened."""

    @staticmethod
    def forward(ctx, x, weight, ends, nt, nn):
        save_weight(ctx, weight, ends)
        ctx.nn = nn
        return _map_experts(x, ends, lambda rows, expert: nt(rows, weight[expert]))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        ends, weight = load_saved_weight(ctx)
        grad_x = _map_experts(grad, ends, lambda rows, expert: ctx.nn(rows, weight[expert]))
        return grad_x, None, None, None, None


def _map_experts(x: Tensor, ends: Tensor, product: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Apply ``product`` to the rows of every expert that has any, and concatenate the results. At least one
    expert must have rows."""
    parts, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            parts.append(product(x[start:end], expert))
        start = end
    return torch.cat(parts)


def _can_multiply_grouped(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch's grouped product takes these: rows of a multiple of 16 bytes, in bf16, or on a
    CPU in fp32."""
    if x.dtype not in ((torch.bfloat16,) if x.is_cuda else (torch.bfloat16, torch.float32)):
        return False
    return all(width * x.element_size() % 16 == 0 for width in weight.shape[1:])
