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
    """``count`` neighbouring blocks of rows from ``start`` on, with keys from ``key_start`` on.

    Causal: every block sees itself. Not causal: the one block sees all of the prefix.
    """

    start: int
    length: int
    count: int
    key_start: int
    key_length: int
    causal: bool

    def queries(self, rows: Tensor) -> Tensor:
        """[T, H, D] -> [B, H, N, D], a view; [T, H] -> [B, H, N]."""
        return _view_blocks(rows, self.start, self.count, self.length)

    def keys(self, rows: Tensor) -> Tensor:
        """[T, Hkv, D] -> [B, Hkv, M, D], a view."""
        return _view_blocks(rows, self.key_start, self.count, self.key_length)


def _view_blocks(rows: Tensor, start: int, count: int, length: int) -> Tensor:
    return rows[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2)


class PackedAttention:
    """``Attend`` for the rows of one microbatch, whose segments follow each other without gaps.

    ``forward``, (q, k, v, scale) -> (out [T, H, Dv], fp32 lse [T, H]), replaces the forward of this file's
    kernel, which then computes the backward only.
    """

    def __init__(self, segments: tuple[Segment, ...], forward: Forward | None = None) -> None:
        check_segments(segments)
        self._forward = forward
        self.segments, self.num_rows = segments, segments[-1].stop
        self.longest = max(s.stop - s.start + s.prefix_stop - s.prefix_start for s in segments)
        self.parts = _make_own_parts(segments) + _make_prefix_parts(segments)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """q [T, H, Dk], k [T, Hkv, Dk], v [T, Hkv, Dv] -> [T, H, Dv]. The layer's number plays no role. A
        window that is shorter than a sequence is computed from all pairs. Raises ValueError for such a window
        together with ``forward``."""
        if len(q) != self.num_rows:
            raise ValueError(f"q has {len(q)} rows for segments of {self.num_rows}; take both from one batch")
        if window is not None and window < self.longest:
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
    soft cap (scores become softcap * tanh(score / softcap)), and sinks [H]: scores of keys whose values are
    0."""
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
        places = torch.arange(num_prefix, num_prefix + num_own, device=q.device).unsqueeze(1)
        distance = places - torch.arange(num_skipped, num_prefix + num_own, device=q.device)
        is_masked = distance < 0 if window is None else (distance < 0) | (distance >= window)
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
    """Raise ValueError, naming the segment that is not in its place."""
    if not segments or segments[0].start != 0:
        raise ValueError("segments do not start at row 0; list all rows of the microbatch in order")
    for previous, following in pairwise(segments):
        if previous.stop != following.start:
            raise ValueError(
                f"segment {following} does not start where {previous} stops; list all rows in order"
            )
    for segment in segments:
        if segment.start >= segment.stop:
            raise ValueError(f"segment {segment} is empty; leave it out")
        if not 0 <= segment.prefix_start <= segment.prefix_stop <= segment.start:
            raise ValueError(f"the prefix of {segment} is not before it; place prompts before answers")


def _make_own_parts(segments: tuple[Segment, ...]) -> tuple[Part, ...]:
    """Make a causal part for each run of equally long segments."""
    runs = [list(run) for _, run in groupby(segments, key=lambda s: s.stop - s.start)]
    return tuple(
        Part(run[0].start, length := run[0].stop - run[0].start, len(run), run[0].start, length, causal=True)
        for run in runs
    )


def _make_prefix_parts(segments: tuple[Segment, ...]) -> tuple[Part, ...]:
    """Make an unmasked part for each run of siblings."""
    runs = [list(run) for _, run in groupby(segments, key=lambda s: (s.prefix_start, s.prefix_stop))]
    return tuple(
        Part(
            start=run[0].start,
            length=run[-1].stop - run[0].start,
            count=1,
            key_start=run[0].prefix_start,
            key_length=run[0].prefix_stop - run[0].prefix_start,
            causal=False,
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
        kernel = kernel_for(q, v)
        ctx.kernel, ctx.parts, ctx.scale = kernel, parts, scale
        if forward is not None:
            out, lse = forward(q, k, v, scale)
            ctx.states = [None] * len(parts)
            ctx.save_for_backward(q, k, v, out, lse)
            return out
        q_, k_, v_ = (kernel.prepare(x) for x in (q, k, v))
        precision = torch.promote_types(q.dtype, torch.float32)  # of the merge, and of the sums of gradients
        out = q.new_empty(*q.shape[:2], v.shape[-1], dtype=precision)
        lse = q.new_empty(q.shape[:2], dtype=precision)
        states = []
        for part in parts:
            part_out, part_lse, state = kernel.forward(
                part.queries(q_), part.keys(k_), part.keys(v_), scale, part.causal
            )
            states.append(state)
            if part.causal:  # causal parts come first and write every row
                part.queries(out).copy_(part_out)
                part.queries(lse).copy_(part_lse)
            else:
                merge(part.queries(out), part.queries(lse), part_out, part_lse)
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
                part.queries(grad_out),
                part.queries(q_),
                part.keys(k_),
                part.keys(v_),
                part.queries(out),
                part.queries(lse),
                state,
                ctx.scale,
                part.causal,
            )
            views = (part.queries(grads[0]), part.keys(grads[1]), part.keys(grads[2]))
            for view, part_grad in zip(views, part_grads, strict=True):
                view.add_(part_grad)
        return *(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True)), None, None, None


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Extend the key set of (out [B, H, N, D], lse [B, H, N]), in place, by that of the part."""
    union = torch.logaddexp(lse, part_lse)
    out.mul_((lse - union).exp_().unsqueeze(-1))
    out.addcmul_(part_out.to(out.dtype), (part_lse - union).exp_().unsqueeze(-1))
    lse.copy_(union)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Attention of q [B, H, N, Dk] over k [B, Hkv, M, Dk] and v [B, Hkv, M, Dv].

    prepare(x) casts a tensor to the dtype of the kernel
    forward(q, k, v, scale, causal) -> (out [B, H, N, Dv], lse [B, H, N], state)
    backward(grad_out, q, k, v, out, lse, state, scale, causal) -> (grad_q, grad_k, grad_v), where out and lse
    may belong to a larger key set.
    """

    prepare: Callable[[Tensor], Tensor]
    forward: Callable[..., tuple[Tensor, Tensor, Any]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _widen_to_fp32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _compute_scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """The scaled scores [B, Hkv, G, N, M]."""
    scores = (_group_heads(q, k) @ k.unsqueeze(2).mT).mul_(scale)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(future, float("-inf"))
    return scores


def _group_heads(x: Tensor, k: Tensor) -> Tensor:
    """[B, H, N, D] -> [B, Hkv, G, N, D]: the G query heads of each key head."""
    return x.unflatten(1, (k.shape[1], -1))


def _math_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, None]:
    scores = _compute_scores(q, k, scale, causal)
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp_() @ v.unsqueeze(2)
    return out.flatten(1, 2), lse.flatten(1, 2), None


def _math_backward(
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


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, None]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, _pad(v, q), 0.0, causal, scale=scale
    )
    return out[..., : v.shape[-1]], lse, None


def _cpu_backward(
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
        _pad(grad_out, q), q, k, _pad(v, q), _pad(out, q), lse, 0.0, causal, scale=scale
    )
    return grad_q, grad_k, grad_v[..., : v.shape[-1]]


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, Any]:
    out, lse, *state = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, _pad(v, q), 0.0, causal, False, scale=scale
    )
    return out[..., : v.shape[-1]], lse, state


def _cuda_backward(
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
        _pad(grad_out, q), q, k, _pad(v, q), _pad(out, q), lse.contiguous(),
        cum_seq_q, cum_seq_k, max_q, max_k, 0.0, causal, rng_state, unused, scale=scale,
    )  # fmt: skip
    return grad_q, grad_k, grad_v[..., : v.shape[-1]]


def _pad(x: Tensor, q: Tensor) -> Tensor:
    """Pad x with zeros to the head dimension of q: MLA has Dv < Dk, which flash attention does not support.
    No other number changes."""
    num_zeros = q.shape[-1] - x.shape[-1]
    return F.pad(x, (0, num_zeros)) if num_zeros else x


MATH = Kernel(_widen_to_fp32, _math_forward, _math_backward)
# Always in fp32: the backward of the bf16 CPU kernel takes three times as long.
FLASH_CPU = Kernel(_widen_to_fp32, _cpu_forward, _cpu_backward)
FLASH_CUDA = Kernel(lambda x: x, _cuda_forward, _cuda_backward)


def kernel_for(q: Tensor, v: Tensor) -> Kernel:
    """The kernel for queries [..., Dk] and values [..., Dv] of this dtype on this device."""
    if v.shape[-1] > q.shape[-1]:
        return MATH
    if q.device.type == "cpu":
        return FLASH_CPU
    can_flash = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return FLASH_CUDA if q.device.type == "cuda" and can_flash else MATH
