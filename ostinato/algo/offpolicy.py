"""Mismatch of sampler and trainer: its measurement, and its correction by importance weights and masks.

Throughout, for a token drawn by the sampler mu and scored by the trainer pi,
``log_ratio = trainer_logprobs - sampler_logprobs`` and r = exp(log_ratio) = pi / mu. A batch of R tokens
carries ``sample_idx`` [R], the sample of each token among ``num_samples``; all trained tokens of a sample
are in the same call. Weights carry no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

# exp(20) = 5e8 and its square are far inside fp32, and a ratio beyond it carries no information.
LOG_RATIO_BOUND = 20.0


class Correction(StrEnum):
    """The weight of a token by its ratio r, or by prod r of its sequence; "inside" is in [low, high]."""

    NONE = "none"
    TOKEN_TRUNCATE = "token_truncate"  # min(r, high): TIS; low is not used
    TOKEN_MASK = "token_mask"  # r inside, 0 outside: IcePop
    SEQUENCE_TRUNCATE = "sequence_truncate"  # min(prod r, high) for every token of the sequence
    SEQUENCE_MASK = "sequence_mask"  # prod r inside, 0 outside: TRL's default with high 3
    GEOMETRIC_MASK = "geometric_mask"  # 1 if exp(mean log r) is inside, else 0: rejects whole sequences


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log ratio clamped to +-LOG_RATIO_BOUND: finite, and exactly 1 at 0."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def sequence_sums(values: Tensor, sample_idx: Tensor, num_samples: int) -> Tensor:
    """Sums [num_samples] of per-token values [R] by sample; 0 for samples that are not in the microbatch."""
    return values.new_zeros(num_samples).index_add(0, sample_idx.long(), values)


def sequence_means(values: Tensor, sample_idx: Tensor, num_samples: int) -> Tensor:
    """Means [num_samples] of per-token values [R] by sample; 0 for absent samples."""
    lengths = sequence_sums(torch.ones_like(values), sample_idx, num_samples)
    return sequence_sums(values, sample_idx, num_samples) / lengths.clamp(min=1)


def importance_weights(
    log_ratio: Tensor,
    sample_idx: Tensor,
    num_samples: int,
    mode: Correction,
    *,
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Weights [R] that correct a loss under the trainer for tokens drawn by the sampler (see ``Correction``).

    A masked token keeps its aggregation weight in the denominator: masking makes a step smaller, never
    the surviving tokens larger. TIS: Yao et al. 2025; IcePop: Ring-1T, arXiv 2510.18855.
    """
    log_ratio = log_ratio.detach()
    match mode:
        case Correction.NONE:
            return torch.ones_like(log_ratio)
        case Correction.TOKEN_TRUNCATE | Correction.TOKEN_MASK:
            ratio = bounded_exp(log_ratio)
        case Correction.SEQUENCE_TRUNCATE | Correction.SEQUENCE_MASK:
            ratio = bounded_exp(sequence_sums(log_ratio, sample_idx, num_samples))[sample_idx.long()]
        case Correction.GEOMETRIC_MASK:
            ratio = bounded_exp(sequence_means(log_ratio, sample_idx, num_samples))[sample_idx.long()]
    if mode in (Correction.TOKEN_TRUNCATE, Correction.SEQUENCE_TRUNCATE):
        return ratio.clamp(max=high)
    is_inside = (ratio >= low) & (ratio <= high)
    if mode is Correction.GEOMETRIC_MASK:
        return is_inside.to(ratio.dtype)
    return torch.where(is_inside, ratio, torch.zeros_like(ratio))


def kl_k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r per token: unbiased for KL(mu || pi), tokens from mu, never negative (Schulman 2020)."""
    log_ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(log_ratio) - log_ratio  # expm1: r - 1 would cancel where the policies almost agree


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums and maxima over the tokens of one microbatch; ``mismatch_metrics`` combines them."""

    count: int
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


def mismatch(
    trainer_logprobs: Tensor,
    sampler_logprobs: Tensor,
    *,
    correction: Tensor | None = None,
    taus: Sequence[float] = (1.5, 2.0),
) -> Mismatch:
    """Measure log r = trainer - sampler over R tokens, without gradient and without leaving the device.

    ``correction``: the weights of ``importance_weights``, if any; the tokens that they mask or truncate are
    counted. ``taus`` define the tails F(tau): the share of tokens with abs(log r) > log tau.
    """
    log_ratio = (trainer_logprobs - sampler_logprobs).detach().float()
    ratio = bounded_exp(log_ratio)
    gap = log_ratio.abs()
    sums = {
        "abs": gap.sum(),
        "ratio": ratio.sum(),
        "ratio_squared": ratio.square().sum(),
        "k3": kl_k3(log_ratio).sum(),
    }
    sums |= {f"tail_{tau:g}": (gap > math.log(tau)).sum() for tau in taus}
    if correction is not None:
        sums["masked"] = (correction == 0).sum()
        sums["truncated"] = ((correction > 0) & (correction < ratio)).sum()
    # the maximum of -ratio is the minimum of the ratio: parts are combined by maxima alone
    return Mismatch(len(ratio), sums, {"abs": gap.max(), "ratio": ratio.max(), "-ratio": -ratio.min()})


def mismatch_metrics(parts: Sequence[Mismatch]) -> dict[str, float]:
    """Metrics of a step from its microbatches; TRL's names where TRL has one.

    ``sampling/ess`` is (sum r)^2 / (R sum r^2) in (0, 1], 1 when the policies agree. ``sampling/kl_k3``
    estimates KL(sampler || trainer) in nats per token. Raises ValueError for an empty step.
    """
    if not parts:
        raise ValueError("mismatch_metrics got no microbatch; measure at least one")
    count = sum(part.count for part in parts)
    sums = {name: sum(float(part.sums[name]) for part in parts) for name in parts[0].sums}
    maxima = {name: max(float(part.maxima[name]) for part in parts) for name in parts[0].maxima}
    metrics = {
        "sampling/sampling_logp_difference/mean": sums["abs"] / count,
        "sampling/sampling_logp_difference/max": maxima["abs"],
        "sampling/importance_sampling_ratio/mean": sums["ratio"] / count,
        "sampling/importance_sampling_ratio/max": maxima["ratio"],
        "sampling/importance_sampling_ratio/min": -maxima["-ratio"],
        # at most 1 by Cauchy-Schwarz, except for rounding in the sums
        "sampling/ess": min(1.0, sums["ratio"] ** 2 / (count * sums["ratio_squared"])),
        "sampling/kl_k3": sums["k3"] / count,
    }
    share_names = [name for name in sums if name.startswith("tail_") or name in ("masked", "truncated")]
    return metrics | {f"sampling/{name}": sums[name] / count for name in share_names}
