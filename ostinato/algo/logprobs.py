"""Log-probabilities of given tokens and the entropy of their distribution, never ``[R, V]`` at once.

Legend: R rows of the loss, D hidden size, V vocabulary. Logits exist for ``chunk`` rows at a time. The
default chunk is small because [chunk, V] in fp32 is the peak memory of the head, and large enough that
the weight is read from memory only a few times per step.

Two functions compute the same: ``linear_logprobs`` for a frozen linear head (the fast path), and
``chunked_logprobs`` for any differentiable head (the reference, and for a trainable or adapted head).

With a ``support`` a row's distribution is normalised over the ids that the sampler drew its token from: log
p(y) = z_y - logsumexp of z over the support, the entropy is that of the same distribution, and logits outside
have gradient zero ("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1).

Where the vocabulary is split into parts (``Vocabulary``), V is the size of the local part, a chunk of n rows
exchanges n maxima and 3 n sums, and nothing of size V is sent (Megatron-LM, arXiv 1909.08053 section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from ostinato.types import Support

CHUNK = 256
CACHE_BYTES = 1 << 20  # half of a common L2 cache

Matmul = Callable[[Tensor, Tensor], Tensor]
Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The ``size`` token ids from ``start`` on, whose logits this rank computes; other ranks have the others,
    and call the same function with the same rows, targets and supports.

    ``sum`` and ``max`` give the sum and the maximum of a tensor [n, k] over all parts, bit-identical on each;
    they may overwrite their argument. Gradients of hidden states are then partial sums: each part has the
    gradients through its own logits.
    """

    start: int
    size: int
    sum: Reduce
    max: Reduce


def chunked_logprobs(
    hidden: Tensor,
    targets: Tensor,
    logits: Callable[[Tensor], Tensor],
    *,
    support: Support | None = None,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    want_entropy: bool = True,
    vocabulary: Vocabulary | None = None,
) -> tuple[Tensor, Tensor]:
    """log softmax(logits(hidden) / temperature)[targets] and the entropy (nats) of that distribution.

    hidden: [R, D], targets: [R] integer, ``support``: of R tokens or None (the whole vocabulary for all),
    ``logits``: [n, D] -> [n, V], of the part of the ``vocabulary`` where there is one (None: all of it).
    Returns logprobs [R] and entropy [R] in fp32 (fp64 for fp64 logits), both with gradients to ``hidden`` and
    to whatever ``logits`` closes over; detach the entropy to log it. Without ``want_entropy`` it is NaN,
    meaning not computed. Logits are recomputed chunk by chunk in backward instead of being kept. Raises
    ValueError for a target outside of its support, for no rows, for arguments of different lengths, and for a
    temperature or a chunk that is not positive.
    """
    _check_arguments(targets, hidden, support, temperature, chunk)

    def score_chunk(hidden_nD: Tensor, targets_n: Tensor, support_n: Support | None) -> tuple[Tensor, Tensor]:
        scaled_nV = _widen_to_fp32(logits(hidden_nD)) / temperature
        if support_n is not None:
            scaled_nV = scaled_nV.masked_fill(
                _mask_outside(support_n, scaled_nV, vocabulary), _choose_masked_logit(scaled_nV)
            )
        if vocabulary is not None:
            return _score_part_with_grad(scaled_nV, targets_n, vocabulary, want_entropy)
        log_p_nV = torch.log_softmax(scaled_nV, dim=-1)
        logprobs_n = log_p_nV.gather(1, targets_n[:, None]).squeeze(1)
        if not want_entropy:
            return logprobs_n, torch.full_like(logprobs_n, torch.nan)
        return logprobs_n, -(log_p_nV.exp() * log_p_nV).sum(-1)

    # Checkpointing per chunk keeps the chunk's inputs only. Without gradients it would only warn and slow.
    parts = [
        checkpoint(score_chunk, *inputs, use_reentrant=False)
        if torch.is_grad_enabled()
        else score_chunk(*inputs)
        for inputs in _split_chunks(hidden, targets.long(), support, chunk)
    ]
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def _score_part_with_grad(
    z_nV: Tensor, targets_n: Tensor, vocabulary: Vocabulary, want_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropy, each [n], from one part of the logits, with gradients."""
    z_nV = z_nV - vocabulary.max(
        z_nV.detach().amax(-1, keepdim=True)
    )  # a shift for numerical range only: it needs no gradient
    p_nV = z_nV.exp()
    local_sums = (
        _gather_target_logits(z_nV, targets_n, vocabulary),
        p_nV.sum(-1),
        torch.linalg.vecdot(p_nV, z_nV),
    )
    sums: Tensor = _Sum.apply(torch.stack(local_sums, dim=1), vocabulary.sum)  # type: ignore[assignment]
    target_logit, exp_sum, weighted_sum = sums.unbind(1)
    logprobs = target_logit - exp_sum.log()
    if not want_entropy:
        return logprobs, torch.full_like(logprobs, torch.nan)
    return logprobs, exp_sum.log() - weighted_sum / exp_sum


class _Sum(torch.autograd.Function):
    """Sum over parts. All parts compute the same from it, so each summand has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reduce: Reduce) -> Tensor:
        return reduce(x.clone())  # ``reduce`` may overwrite its argument, which belongs to the graph

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    support: Support | None = None,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    want_entropy: bool = True,
    entropy_grad: bool = False,
    matmul_nt: Matmul | None = None,
    matmul_nn: Matmul | None = None,
    vocabulary: Vocabulary | None = None,
    score: Callable[[Tensor, float, Tensor], Tensor] | None = None,
    head: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """``chunked_logprobs`` for a frozen linear head, logits = hidden @ weight.T, one pass over the logits.

    hidden: [R, D], weight: [V, D] (of the part, where there is a ``vocabulary``), targets: [R], support: of R
    tokens. Each row's loss depends on its own logits only, so the slope d logprob_r / d hidden_r =
    (weight[target_r] - sum_v p_rv weight[v]) / temperature is known in the forward pass. It is kept ([R, D]
    fp32) and backward is a multiplication: nothing is recomputed, one of the three head GEMMs of a training
    step is saved. The entropy has a gradient with ``entropy_grad`` only (one more GEMM), is NaN without
    ``want_entropy``, else detached.

    ``matmul_nt(x [n, D], w [V, D]) -> [n, V]`` (overwritten here) and ``matmul_nn(dy [n, V], w [V, D]) -> [n,
    D]``, both fp32 out, replace the default together: the FP32 head, both operands cast to fp32.
    ``score(logits [n, V], temperature, targets [n]) -> [n]`` computes the log-probabilities instead, from
    logits that are -inf outside of a support; the gradients stay the same. ``head(logits [n, V], targets [n])
    -> [n, 2]`` does what ``_score`` does, where the entropy needs no gradient. Raises ValueError for a weight
    that requires a gradient, for ``entropy_grad`` without ``want_entropy``, for one of the matmuls alone, and
    as ``chunked_logprobs`` does.
    """
    _check_arguments(targets, hidden, support, temperature, chunk)
    if weight.requires_grad:
        raise ValueError("weight requires a gradient; linear_logprobs freezes the head, use chunked_logprobs")
    if entropy_grad and not want_entropy:
        raise ValueError("entropy_grad is True but want_entropy is False; set both")
    if (matmul_nt is None) != (matmul_nn is None):
        raise ValueError("one of matmul_nt and matmul_nn is missing; give both or neither")
    if matmul_nt is None or matmul_nn is None:
        weight = weight.to(torch.promote_types(hidden.dtype, torch.float32))
        matmul_nt, matmul_nn = _make_fp32_head(weight, min(chunk, len(hidden)))
    logprobs, entropy = _LinearLogprobs.apply(
        hidden,
        weight,
        targets.long(),
        support,
        temperature,
        chunk,
        want_entropy,
        entropy_grad,
        vocabulary,
        score,
        head,
        matmul_nt,
        matmul_nn,
    )
    return logprobs, entropy


def _make_fp32_head(weight_VD: Tensor, max_rows: int) -> tuple[Matmul, Matmul]:
    """(matmul_nt, matmul_nn) in the dtype of the weight; each call of the first overwrites its last
    result."""
    # One logits buffer for all chunks: fresh pages cost the CPU more than the softmax does.
    buffer = weight_VD.new_empty(max_rows, len(weight_VD))

    def matmul_nt(x_nD: Tensor, w_VD: Tensor) -> Tensor:
        return torch.mm(x_nD.to(w_VD.dtype), w_VD.T, out=buffer[: len(x_nD)])

    return matmul_nt, torch.mm


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        targets,
        support,
        temperature,
        chunk,
        want_entropy,
        entropy_grad,
        vocabulary,
        score_logits,
        score_head,
        *matmuls,
    ):
        matmul_nt, matmul_nn = matmuls
        want_slope = ctx.needs_input_grad[0]
        scores, slopes, entropy_slopes = [], [], []
        for hidden_nD, targets_n, support_n in _split_chunks(hidden, targets, support, chunk):
            logits_nV = _widen_to_fp32(matmul_nt(hidden_nD, weight))
            if score_logits is not None:
                outside_nV = None if support_n is None else _mask_outside(support_n, logits_nV, None)
                supported_nV = (
                    logits_nV if outside_nV is None else logits_nV.masked_fill(outside_nV, -torch.inf)
                )
                logprobs_n = score_logits(supported_nV, temperature, targets_n)
            if temperature != 1:
                logits_nV.div_(temperature)
            entropy_slope_nV = torch.empty_like(logits_nV) if want_slope and entropy_grad else None
            if vocabulary is not None:
                chunk_scores = _score_part(
                    logits_nV, targets_n, support_n, entropy_slope_nV, vocabulary, want_entropy
                )
            elif score_head is None or entropy_slope_nV is not None or logits_nV.dtype != torch.float32:
                chunk_scores = _score(logits_nV, targets_n, support_n, entropy_slope_nV, want_entropy)
            else:
                if support_n is not None:
                    _set_outside(logits_nV, support_n, logits_nV.new_full((), -torch.inf))
                chunk_scores = score_head(logits_nV, targets_n)
                if not want_entropy:
                    chunk_scores[:, 1] = torch.nan
            if score_logits is not None:
                chunk_scores[:, 0] = logprobs_n
            scores.append(chunk_scores)
            if want_slope:  # scoring has left d logprob / d logits in logits_nV
                slopes.append(matmul_nn(logits_nV, weight) / temperature)
            if entropy_slope_nV is not None:
                entropy_slopes.append(matmul_nn(entropy_slope_nV, weight) / temperature)
        logprobs, entropy = torch.cat(scores).unbind(1)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        ctx.dtype = hidden.dtype
        ctx.save_for_backward(*(torch.cat(parts) for parts in (slopes, entropy_slopes) if parts))
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        grad_logprobs, grad_entropy = grads
        slope_RD, *entropy_slope_RD = ctx.saved_tensors
        grad_RD = grad_logprobs[:, None] * slope_RD
        if entropy_slope_RD:
            grad_RD.addcmul_(grad_entropy[:, None], entropy_slope_RD[0])
        return grad_RD.to(ctx.dtype), *(None,) * 12  # none for the 12 arguments behind ``hidden``


def _split_chunks(
    hidden: Tensor, targets: Tensor, support: Support | None, chunk: int
) -> Iterator[tuple[Tensor, Tensor, Support | None]]:
    """The inputs of ``chunk`` rows at a time; the support is None where it restricts none of them."""
    parts = hidden.split(chunk), targets.split(chunk)
    return zip(*parts, _split_support(support, chunk, len(parts[0])), strict=True)


def _score(
    logits_nV: Tensor,
    targets_n: Tensor,
    support: Support | None,
    entropy_slope_nV: Tensor | None,
    want_entropy: bool,
) -> Tensor:
    """(log p[target], entropy) [n, 2]; the entropy is NaN without ``want_entropy``. Overwrites ``logits_nV``
    with d log p[target] / d logits = onehot - p, and ``entropy_slope_nV``, if given, with d entropy / d
    logits.

    A CPU takes a few rows at a time, in place: six passes over a tile in the cache are five times faster than
    six passes over the chunk in memory. A GPU takes the whole chunk at once.
    """
    num_rows, vocab_size = logits_nV.shape
    cache_rows = max(1, CACHE_BYTES // (vocab_size * logits_nV.element_size()))
    tile_rows = cache_rows if logits_nV.device.type == "cpu" else num_rows
    scratch = logits_nV.new_empty(min(tile_rows, num_rows), vocab_size)
    scores = logits_nV.new_full((num_rows, 2), torch.nan)
    starts = range(0, num_rows, tile_rows)
    for start, tile_support in zip(starts, _split_support(support, tile_rows, len(starts)), strict=True):
        rows = slice(start, start + tile_rows)
        z, target, score = logits_nV[rows], targets_n[rows, None], scores[rows]
        p = scratch[: len(z)]
        if tile_support is not None:
            # Any logit works outside, where p is set to 0 below: we take an ordinary one, since the
            # exponential of -1e30 takes twelve times as long.
            _set_outside(z, tile_support, z.gather(1, target))
        z.sub_(z.amax(-1, keepdim=True))
        target_logit = z.gather(1, target)
        torch.exp(z, out=p)
        if tile_support is not None:
            _set_outside(p, tile_support, p.new_zeros(()))
        total = p.sum(-1, keepdim=True)
        score[:, :1] = target_logit - total.log()
        if want_entropy:
            score[:, 1:] = total.log() - torch.linalg.vecdot(p, z)[:, None] / total
        if entropy_slope_nV is not None:  # dH / d logits = -p (log p + H)
            torch.sub(z, total.log() - score[:, 1:], out=entropy_slope_nV[rows]).mul_(p).div_(-total)
        torch.div(p, -total, out=z)
        # 1 - p by expm1: for a near-certain token it is the whole gradient, and cancellation would lose it.
        z.scatter_(1, target, -torch.expm1(score[:, :1]))
    return scores


def _score_part(
    logits_nV: Tensor,
    targets_n: Tensor,
    support: Support | None,
    entropy_slope_nV: Tensor | None,
    vocabulary: Vocabulary,
    want_entropy: bool,
) -> Tensor:
    """``_score``, with all that it overwrites, for the logits of a part of the vocabulary: a whole chunk at
    once, with two exchanges."""
    z, zero = logits_nV, logits_nV.new_zeros(())
    if support is not None:
        _set_outside(z, support, torch.full_like(zero, _choose_masked_logit(z)), vocabulary)
    z.sub_(vocabulary.max(z.amax(-1, keepdim=True)))
    target_logit = _gather_target_logits(z, targets_n, vocabulary)
    if support is not None:
        _set_outside(z, support, zero, vocabulary)  # see ``_score``: this makes their exponential fast
    p = torch.exp(z)
    if support is not None:
        _set_outside(p, support, zero, vocabulary)
    local_sums = torch.stack((target_logit, p.sum(-1), torch.linalg.vecdot(p, z)), dim=1)
    target_logit, total, weighted_sum = vocabulary.sum(local_sums).split(1, dim=1)
    log_p, entropy = target_logit - total.log(), total.log() - weighted_sum / total
    if entropy_slope_nV is not None:
        torch.sub(z, total.log() - entropy, out=entropy_slope_nV).mul_(p).div_(-total)
    torch.div(p, -total, out=z)
    local_ids, is_local = _locate_targets(targets_n, vocabulary)
    rows = is_local.nonzero().squeeze(1)
    z[rows, local_ids[rows]] = -torch.expm1(log_p[rows, 0])
    return torch.cat((log_p, entropy if want_entropy else torch.full_like(entropy, torch.nan)), dim=1)


def _locate_targets(targets_n: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """(index of each target in this part of the vocabulary, 0 if it is in another; whether it is in this
    one), each [n]."""
    local_ids = targets_n - vocabulary.start
    is_local = (local_ids >= 0) & (local_ids < vocabulary.size)
    return local_ids.masked_fill(~is_local, 0), is_local


def _gather_target_logits(z_nV: Tensor, targets_n: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Logit [n] of the target, 0 where the target is in another part."""
    local_ids, is_local = _locate_targets(targets_n, vocabulary)
    return z_nV.gather(1, local_ids[:, None]).squeeze(1).masked_fill(~is_local, 0)


def _split_support(support: Support | None, size: int, num_parts: int) -> list[Support | None]:
    """The support in ``num_parts`` pieces of ``size`` rows; None for a piece without a restricted row."""
    if support is None:
        return [None] * num_parts
    return [part if len(part.ids) else None for part in support.split(size)]


def _set_outside(x_nV: Tensor, support: Support, value: Tensor, vocabulary: Vocabulary | None = None) -> None:
    """Set x to ``value`` ([n, 1] or []) outside of the support of its row, in place. Rows without a support
    are not changed.

    The kept entries are saved and put back, which costs one sweep where a mask of [n, V] costs many.
    """
    positions, flat = _find_kept_positions(support, x_nV, vocabulary), x_nV.view(-1)
    kept_values = flat[positions]
    if support.counts.all():
        x_nV.copy_(value)  # a tenth of the time of a selection
    else:
        is_restricted_n = torch.from_numpy(support.counts > 0).to(x_nV.device)
        torch.where(is_restricted_n[:, None], value, x_nV, out=x_nV)
    flat[positions] = kept_values


def _mask_outside(support: Support, z_nV: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """Mask [n, V] bool of the ids outside of the support of their row; False where a row has none."""
    is_restricted = torch.from_numpy(support.counts > 0).to(z_nV.device)
    outside_nV = is_restricted[:, None].expand(z_nV.shape).contiguous()
    outside_nV.view(-1)[_find_kept_positions(support, z_nV, vocabulary)] = False
    return outside_nV


def _find_kept_positions(support: Support, z_nV: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """Int64 indices of the ids of the support in the flattened logits, without those of other parts."""
    owners, ids = np.repeat(np.arange(len(support), dtype=np.int64), support.counts), support.ids
    if vocabulary is not None:
        is_local = (ids >= vocabulary.start) & (ids < vocabulary.start + vocabulary.size)
        owners, ids = owners[is_local], ids[is_local] - vocabulary.start
    return torch.from_numpy(owners * z_nV.shape[1] + ids).to(z_nV.device)


def _choose_masked_logit(z: Tensor) -> float:
    """A logit whose exponential is 0 next to any other, but finite, so that 0 times it is 0, not NaN."""
    return torch.finfo(z.dtype).min / 4


def _widen_to_fp32(x: Tensor) -> Tensor:
    """``x`` in fp32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check_arguments(
    targets: Tensor, hidden: Tensor, support: Support | None, temperature: float, chunk: int
) -> None:
    """Raise ValueError for arguments that do not fit each other, or are out of range."""
    if len(targets) != len(hidden) or not len(targets):
        raise ValueError(
            f"targets has {len(targets)} entries for {len(hidden)} rows; give one each, at least 1"
        )
    if support is not None and len(support) != len(targets):
        raise ValueError(f"support has {len(support)} entries for {len(targets)} targets; give one each")
    if support is not None and not (is_held := support.holds(targets.cpu().numpy())).all():
        row = int(is_held.argmin())
        raise ValueError(
            f"target {int(targets[row])} of row {row} is not in its support; give the ids it was drawn from"
        )
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities need a positive number")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; use at least 1 row")
