"""Training attention over packed segments: a prompt that siblings share is computed once.

A row of a segment sees its own segment causally and the whole prefix of the segment. Softmax over the union
of two key sets is exact from two softmaxes, given their log-sum-exps (as in Flash attention across blocks of
keys, arXiv 2205.14135 section 3.1):

    lse = log(exp(lse_a) + exp(lse_b))        out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)

so the forward takes one unmasked call for all siblings of a prefix (a) and one causal call for each run of
equally long neighbours (b): no mask, no padding, no copy of the prefix. Flash backward recomputes
P = exp(S - lse) and dS = P (dP - rowsum(dOut * Out)); given the lse and out of the *union*, the backward
of each part is its exact share of the gradient, and the sum of the shares is the gradient.

The slow twin is in tests/reference/plain_layers.py.

T rows, H query heads, Hkv key heads, Dk and Dv head dimensions; B blocks of N rows each see M keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ostinato.types import Segment

Forward = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Part:
    """``count`` neighbouring blocks of rows from row ``start`` on, and as many blocks of keys from
    ``key_start`` on.

    In a causal part every block attends to itself. In any other part there is one block, which sees all of
    the prefix.
    """

    start: int
    length: int
    count: int
    key_start: int
    key_length: int
    is_causal: bool

    def view_queries(self, rows: Tensor) -> Tensor:
        """View [T, H, D] as [B, H, N, D], or [T, H] as [B, H, N]."""
        return _view_blocks(rows, self.start, self.count, self.length)

    def view_keys(self, rows: Tensor) -> Tensor:
        """View [T, Hkv, D] as [B, Hkv, M, D]."""
        return _view_blocks(rows, self.key_start, self.count, self.key_length)


def _view_blocks(rows: Tensor, start: int, count: int, length: int) -> Tensor:
    return rows[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2)


class PackedAttention:
    """Implements ``Attend`` for the rows of one microbatch, whose segments follow each other without gaps.

    If ``forward``, (q, k, v, scale) -> (out [T, H, Dv], fp32 lse [T, H]), is given, it computes the forward,
    and the kernel of this file computes only the backward.
    """

    def __init__(self, segments: tuple[Segment, ...], forward: Forward | None = None) -> None:
        check_segments(segments)
        self._forward = forward
        self.segments, self.num_rows = segments, segments[-1].stop
        self.max_length = max(s.stop - s.start + s.prefix_stop - s.prefix_start for s in segments)
        self.parts = _make_own_parts(segments) + _make_prefix_parts(segments)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Compute the attention [T, H, Dv] of q [T, H, Dk], k [T, Hkv, Dk], v [T, Hkv, Dv]. ``layer`` has no
        effect. With a window that is shorter than a sequence, all pairs are computed and the others masked.
        Raises ValueError for such a window together with ``forward``, and for q of another number of rows."""
        if len(q) != self.num_rows:
            raise ValueError(f"q has {len(q)} rows for segments of {self.num_rows}; take both from one batch")
        if window is not None and window < self.max_length:
            if self._forward is not None:
                raise ValueError(f"model.exact is true, but a layer sees {window} positions; set it to false")
            return attend_all_pairs(self.segments, q, k, v, scale, window)
        return _Attention.apply(q, k, v, self.parts, scale, self._forward)  # type: ignore[return-value]


def attend_all_pairs(
    segments: tuple[Segment, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute what ``PackedAttention`` returns, segment by segment in plain torch. It also takes a window, a
    soft cap (scores become softcap * tanh(score / softcap)), and sinks [H]: the scores of additional keys
    whose values are 0."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    outputs = []
    for segment in segments:
        num_prefix, num_own = segment.prefix_stop - segment.prefix_start, segment.stop - segment.start
        num_skipped = max(0, num_prefix - window + 1) if window is not None else 0  # no row sees these
        rows, prefix = (
            slice(segment.start, segment.stop),
            slice(segment.prefix_start + num_skipped, segment.prefix_stop),
        )
        keys, values = (torch.cat((x[prefix], x[rows])) for x in (k, v))
        positions = torch.arange(num_prefix, num_prefix + num_own, device=q.device).unsqueeze(1)
        distances = positions - torch.arange(num_skipped, num_prefix + num_own, device=q.device)
        is_masked = distances < 0 if window is None else (distances < 0) | (distances >= window)
        queries = q[rows].unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("nhgd,mhd->hgnm", queries.to(dtype), keys.to(dtype)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(is_masked, -torch.inf)
        if sinks is not None:
            sink_scores = sinks.to(dtype).view(k.shape[1], -1, 1, 1).expand(-1, -1, num_own, 1)
            scores = torch.cat((scores, sink_scores), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(keys)].to(v.dtype)
        outputs.append(torch.einsum("hgnm,mhd->nhgd", weights, values).flatten(1, 2))
    return torch.cat(outputs)


def check_segments(segments: tuple[Segment, ...]) -> None:
    """Raise ValueError unless the segments are non-empty, follow each other from row 0 on without gaps, and
    come after their prefixes. The error names the wrong segment."""
    if not segments or segments[0].start != 0:
        raise ValueError("segments do not start at row 0; list all rows of the microbatch in order")
    for left_segment, right_segment in pairwise(segments):
        if left_segment.stop != right_segment.start:
            raise ValueError(
                f"segment {right_segment} does not start where {left_segment} stops; list all rows in order"
            )
    for segment in segments:
        if segment.start >= segment.stop:
            raise ValueError(f"segment {segment} is empty; leave it out")
        if not 0 <= segment.prefix_start <= segment.prefix_stop <= segment.start:
            raise ValueError(f"the prefix of {segment} is not before it; place prompts before answers")


def _make_own_parts(segments: tuple[Segment, ...]) -> tuple[Part, ...]:
    """Make a causal part for each run of neighbouring segments of equal length."""
    runs = [list(run) for _, run in groupby(segments, key=lambda s: s.stop - s.start)]
    return tuple(
        Part(
            run[0].start, length := run[0].stop - run[0].start, len(run), run[0].start, length, is_causal=True
        )
        for run in runs
    )


def _make_prefix_parts(segments: tuple[Segment, ...]) -> tuple[Part, ...]:
    """Make an unmasked part for each run of neighbouring segments with the same prefix."""
    runs = [list(run) for _, run in groupby(segments, key=lambda s: (s.prefix_start, s.prefix_stop))]
    return tuple(
        Part(
            start=run[0].start,
            length=run[-1].stop - run[0].start,
            count=1,
            key_start=run[0].prefix_start,
            key_length=run[0].prefix_stop - run[0].prefix_start,
            is_causal=False,
        )
        for run in runs
        if run[0].prefix_start < run[0].prefix_stop
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        parts: tuple[Part, ...],
        scale: float,
        forward: Forward | None,
    ) -> Tensor:
        kernel = choose_kernel(q, v)
        ctx.kernel, ctx.parts, ctx.scale = kernel, parts, scale
        if forward is not None:
            out, lse = forward(q, k, v, scale)
            ctx.states = [None] * len(parts)
            ctx.save_for_backward(q, k, v, out, lse)
            return out
        q_, k_, v_ = (kernel.prepare(x) for x in (q, k, v))
        wide_dtype = torch.promote_types(q.dtype, torch.float32)  # of the merge, and of the sums of gradients
        out = q.new_empty(*q.shape[:2], v.shape[-1], dtype=wide_dtype)
        lse = q.new_empty(q.shape[:2], dtype=wide_dtype)
        states = []
        for part in parts:
            part_out, part_lse, state = kernel.forward(
                part.view_queries(q_), part.view_keys(k_), part.view_keys(v_), scale, part.is_causal
            )
            states.append(state)
            if part.is_causal:  # causal parts come first and write every row
                part.view_queries(out).copy_(part_out)
                part.view_queries(lse).copy_(part_lse)
            else:
                merge_part(part.view_queries(out), part.view_queries(lse), part_out, part_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.states = states
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        q_, k_, v_, out, grad_out = (ctx.kernel.prepare(x) for x in (q, k, v, out, grad_out))
        grads = [torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v)]
        for part, state in zip(ctx.parts, ctx.states, strict=True):
            part_grads = ctx.kernel.backward(
                part.view_queries(grad_out),
                part.view_queries(q_),
                part.view_keys(k_),
                part.view_keys(v_),
                part.view_queries(out),
                part.view_queries(lse),
                state,
                ctx.scale,
                part.is_causal,
            )
            views = (part.view_queries(grads[0]), part.view_keys(grads[1]), part.view_keys(grads[2]))
            for view, part_grad in zip(views, part_grads, strict=True):
                view.add_(part_grad)
        return *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True)), None, None, None


def merge_part(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge the attention over a further set of keys, the part, into (out [B, H, N, D], lse [B, H, N]), in
    place."""
    union_lse = torch.logaddexp(lse, part_lse)
    out.mul_((lse - union_lse).exp_().unsqueeze(-1))
    out.addcmul_(part_out.to(out.dtype), (part_lse - union_lse).exp_().unsqueeze(-1))
    lse.copy_(union_lse)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Attention of q [B, H, N, Dk] over k [B, Hkv, M, Dk] and v [B, Hkv, M, Dv].

    prepare(x) casts a tensor to the dtype of the kernel.

    forward(q, k, v, scale, causal) -> (out [B, H, N, Dv], lse [B, H, N], state)

    backward(grad_out, q, k, v, out, lse, state, scale, causal) -> (grad_q, grad_k, grad_v). Its out and lse
    may be those of a larger set of keys.
    """

    prepare: Callable[[Tensor], Tensor]
    forward: Callable[..., tuple[Tensor, Tensor, Any]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _widen_to_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _compute_scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """Compute the scaled scores [B, Hkv, G, N, M], with -inf for later keys if ``causal``."""
    scores = (_group_heads(q, k) @ k.unsqueeze(2).mT).mul_(scale)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(future, float("-inf"))
    return scores


def _group_heads(x: Tensor, k: Tensor) -> Tensor:
    """View [B, H, N, D] as [B, Hkv, G, N, D], by the G query heads of each key head."""
    return x.unflatten(1, (k.shape[1], -1))


def _compute_math_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, None]:
    scores = _compute_scores(q, k, scale, causal)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp_() @ v.unsqueeze(2)
    return out.flatten(1, 2), lse.flatten(1, 2), None


def _compute_math_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    state: None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    probs = (_compute_scores(q, k, scale, causal) - _group_heads(lse.unsqueeze(-1), k)).exp_()
    delta = _group_heads((grad_out * out).sum(-1, keepdim=True), k)
    q, grad_out = _group_heads(q, k), _group_heads(grad_out, k)
    grad_scores = (grad_out @ v.unsqueeze(2).mT).sub_(delta).mul_(probs).mul_(scale)
    grad_q = (grad_scores @ k.unsqueeze(2)).flatten(1, 2)
    return grad_q, (grad_scores.mT @ q).sum(2), (probs.mT @ grad_out).sum(2)


def _run_cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, None]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, _pad_width(v, q), 0.0, causal, scale=scale
    )
    return out[..., : v.shape[-1]], lse, None


def _run_cpu_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    state: None,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _pad_width(grad_out, q), q, k, _pad_width(v, q), _pad_width(out, q), lse, 0.0, causal, scale=scale
    )
    return grad_q, grad_k, grad_v[..., : v.shape[-1]]


def _run_cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Any]:
    out, lse, *state = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, _pad_width(v, q), 0.0, causal, False, scale=scale
    )
    return out[..., : v.shape[-1]], lse, state


def _run_cuda_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    state: Any,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    cum_seq_q, cum_seq_k, max_q, max_k, rng_state, unused, _ = state
    grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        _pad_width(grad_out, q), q, k, _pad_width(v, q), _pad_width(out, q), lse.contiguous(),
        cum_seq_q, cum_seq_k, max_q, max_k, 0.0, causal, rng_state, unused, scale=scale,
    )  # fmt: skip
    return grad_q, grad_k, grad_v[..., : v.shape[-1]]


def _pad_width(x: Tensor, q: Tensor) -> Tensor:
    """Pad x with zeros to the head dimension of q: MLA has Dv < Dk, which flash attention does not support.
    All other numbers stay the same."""
    num_zeros = q.shape[-1] - x.shape[-1]
    return F.pad(x, (0, num_zeros)) if num_zeros else x


MATH = Kernel(_widen_to_fp32, _compute_math_forward, _compute_math_backward)
# Always in fp32: the backward of the bf16 CPU kernel takes three times as long.
FLASH_CPU = Kernel(_widen_to_fp32, _run_cpu_forward, _run_cpu_backward)
FLASH_CUDA = Kernel(lambda x: x, _run_cuda_forward, _run_cuda_backward)


def choose_kernel(q: Tensor, v: Tensor) -> Kernel:
    """Choose the kernel for queries [..., Dk] and values [..., Dv]."""
    if v.shape[-1] > q.shape[-1]:
        return MATH
    if q.device.type == "cpu":
        return FLASH_CPU
    can_flash = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return FLASH_CUDA if q.device.type == "cuda" and can_flash else MATH
