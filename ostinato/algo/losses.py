"""Policy losses: pure functions of per-token tensors, to be minimised.

Every argument is [R], one entry per trained token: ``new_logprobs`` under the policy that learns (with
gradient), ``old_logprobs`` under the policy that the ratio rho = exp(new - old) is anchored to,
``advantages``, ``weights`` (of the aggregation: they define the average), ``sample_idx`` (the sample of each
token, among ``num_samples``) and ``correction``, importance weights without gradient (``offpolicy``), or
None for 1. A loss never divides: its total is sum(weights * correction * loss), its stats are sums over
tokens, to be divided by the global count once the step is complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ostinato.algo.offpolicy import bounded_exp, kl_k3, sequence_means
from ostinato.algo.own_loss import OwnLoss


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss of one microbatch: ``total`` has gradients, ``stats`` are detached sums over ``count``
    tokens."""

    total: Tensor
    count: int
    stats: dict[str, Tensor] = field(default_factory=dict)


def clipped(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    correction: Tensor | None = None,
) -> LossTerms:
    """PPO's clipped surrogate, -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), per token.

    GRPO (arXiv 2402.03300, eq. 3) and Dr.GRPO with one epsilon; DAPO (arXiv 2503.14476, eq. 10) with a
    higher ``clip_high``. They differ in advantages and weights, which this function only applies.
    """
    ratio = bounded_exp(new_logprobs - old_logprobs)
    return _clip_surrogate(ratio, advantages, weights, clip_low, clip_high, correction)


def sequence_clipped(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    sample_idx: Tensor,
    num_samples: int,
    *,
    clip_low: float,
    clip_high: float,
    correction: Tensor | None = None,
) -> LossTerms:
    """GSPO (arXiv 2507.18071, eq. 5-7): the clipped surrogate with s_i = exp(mean_t log rho[i, t]).

    All trained tokens of a sample must be in the call (``pack`` ensures it); each receives the gradient of
    the sequence's ratio.
    """
    log_ratio = sequence_means(new_logprobs - old_logprobs, sample_idx, num_samples)
    ratio = bounded_exp(log_ratio)[sample_idx.long()]
    return _clip_surrogate(ratio, advantages, weights, clip_low, clip_high, correction)


def cispo(
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    ratio_cap: float,
    correction: Tensor | None = None,
) -> LossTerms:
    """CISPO: -sg(min(rho, ratio_cap)) A log p (MiniMax-M1, arXiv 2506.13585; ScaleRL, 2510.13786, eq. 4).

    ``ratio_cap`` is the absolute cap (TRL's convention for this loss; verl's is cap - 1). A capped token
    keeps its gradient with a bounded weight; there is no lower clip and no token is dropped. As in TRL,
    ``cispo_clip_ratio`` counts the capped tokens of positive advantage.
    """
    ratio = bounded_exp(new_logprobs - old_logprobs).detach()
    token_loss = -ratio.clamp(max=ratio_cap) * advantages * new_logprobs
    is_capped = (ratio > ratio_cap) & (advantages > 0)
    return _sum_terms(token_loss, weights, correction, {"cispo_clip_ratio": is_capped})


def reinforce(
    new_logprobs: Tensor, advantages: Tensor, weights: Tensor, *, correction: Tensor | None = None
) -> LossTerms:
    """REINFORCE, -A log p (RLOO, arXiv 2402.14740). No ratio: off-policy only ``correction`` corrects it."""
    return _sum_terms(-advantages * new_logprobs, weights, correction, {})


def own_loss_terms(
    loss: OwnLoss,
    new_logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    sample_idx: Tensor,
    num_samples: int,
    *,
    correction: Tensor | None = None,
) -> LossTerms:
    """The terms of a user's own loss (``algo.loss``), weighted and corrected as the others."""
    values, stats = loss.terms(new_logprobs, old_logprobs, advantages, sample_idx, num_samples)
    return _sum_terms(values, weights, correction, stats)


def reference_kl(new_logprobs: Tensor, ref_logprobs: Tensor, weights: Tensor) -> LossTerms:
    """k3 of KL(new || ref) per token: exp(ref - new) - 1 - (ref - new) (GRPO, arXiv 2402.03300, eq. 4)."""
    kl = kl_k3(ref_logprobs - new_logprobs)
    return _sum_terms(kl, weights, None, {"kl": kl.detach()})


def add_teacher_kl(
    advantages: Tensor, new_logprobs: Tensor, teacher_logprobs: Tensor, coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """(advantages + coef * (teacher - new), sums over tokens): the reverse KL of each token, which has no
    gradient of its own (on-policy distillation; GKD, arXiv 2306.13649).

    Its expectation under the policy is -KL(policy || teacher) at that position, so the policy gradient with
    it is the gradient of the KL. ``new`` is the policy that learns: with an importance ratio this also holds
    for tokens of an older policy.
    """
    reverse_kl = new_logprobs.detach() - teacher_logprobs
    sums = {"opd/reverse_kl": reverse_kl.sum(), "opd/teacher_logprob": teacher_logprobs.sum()}
    return advantages - coef * reverse_kl, sums


def _clip_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    weights: Tensor,
    clip_low: float,
    clip_high: float,
    correction: Tensor | None,
) -> LossTerms:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), and the counts of
    clipped tokens."""
    token_loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    is_clipped_low = (ratio < 1 - clip_low) & (advantages < 0)
    is_clipped_high = (ratio > 1 + clip_high) & (advantages > 0)
    stats = {
        "clip_ratio/low_mean": is_clipped_low,
        "clip_ratio/high_mean": is_clipped_high,
        "clip_ratio/region_mean": is_clipped_low | is_clipped_high,
    }
    return _sum_terms(token_loss, weights, correction, stats)


def _sum_terms(
    token_loss: Tensor, weights: Tensor, correction: Tensor | None, stats: dict[str, Tensor]
) -> LossTerms:
    """The terms of a loss [R]: its weighted sum, and the sums of ``stats`` [R]."""
    if correction is not None:
        weights = weights * correction
    sums = {name: values.sum() for name, values in stats.items()}
    return LossTerms((weights * token_loss).sum(), len(token_loss), sums)
