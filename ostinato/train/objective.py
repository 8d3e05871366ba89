"""The loss of a microbatch under an algorithm, as a function of its scores."""

from __future__ import annotations

from ostinato.algo.algorithms import Algorithm, policy_loss
from ostinato.algo.offpolicy import importance_weights, mismatch
from ostinato.train.inputs import Inputs
from ostinato.train.passes import Objective, Outcome, Scores


def batch_objective(algorithm: Algorithm, num_samples: int) -> Objective:
    """For the microbatches of a batch of ``num_samples``. A decoupled algorithm anchors its ratio at the old
    policy and corrects for the mismatch of old and behaviour; another one anchors it at behaviour."""

    def objective(part: Inputs, scores: Scores) -> Outcome:
        logprobs, entropy, weights = scores.logprobs, scores.entropy, None
        assert logprobs is not None and entropy is not None
        old = logprobs.detach() if part.old is None else part.old
        if algorithm.decoupled:
            weights = importance_weights(
                old - part.behaviour,
                part.sample_idx,
                num_samples,
                algorithm.correction,
                low=algorithm.correction_low,
                high=algorithm.correction_high,
            )
        terms = policy_loss(
            algorithm,
            logprobs,
            old if algorithm.decoupled else part.behaviour,
            part.advantages,
            part.weights,
            part.sample_idx,
            num_samples=num_samples,
            correction=weights,
            ref_logprobs=part.reference,
            entropy=entropy if algorithm.needs_entropy else None,
        )
        return Outcome(
            loss=terms.total,
            stats={"entropy": entropy.detach().sum(), **terms.stats},
            mismatch=mismatch(old, part.behaviour, correction=weights),
            counts=scores.counts,
        )

    return objective


__all__ = ["batch_objective"]
