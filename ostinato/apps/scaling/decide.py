"""Forecasts of one curve, and decisions about the rest of a budget: go on, stop, or measure more."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ostinato.apps.scaling.forms import Choice, choose, rival, rival_sentence
from ostinato.apps.scaling.gates import Assessment, Standing, assess
from ostinato.apps.scaling.posterior import Interval, Posterior, interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A score to come, as far as it may be reported (``Assessment.shown``); ``measured`` is the interval of
    one evaluation, noise and all."""

    compute: float
    score: Interval | None
    measured: Interval | None


def forecast(known: Posterior, C: float) -> Forecast:
    """R(C)."""
    assessment = assess(known)
    one = known.measured(np.array([C]))[:, 0]
    return Forecast(compute=C, score=assessment.shown(known.score(C)), measured=assessment.shown(one))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Will a target be reached, and with how much compute in all? None where the curve is not identified.
    ``compute`` is infinite where the target is above the asymptote."""

    target: float
    probability: float | None  # that A is above it
    compute: Interval | None


def reach(known: Posterior, T: float) -> Reach:
    """P(A > T) and quantiles of C(T)."""
    if assess(known).standing is Standing.NOT_IDENTIFIED:
        return Reach(target=T, probability=None, compute=None)
    return Reach(target=T, probability=float(np.mean(known.A > T)), compute=interval(known.compute_for(T)))


class Action(StrEnum):
    CONTINUE = "continue"
    STOP = "stop"
    UNDECIDED = "undecided"

    @property
    def exit_code(self) -> int:
        return {Action.CONTINUE: 0, Action.STOP: 10, Action.UNDECIDED: 20}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    action: Action
    reason: str
    gain: Interval | None  # 80 %: of R(budget) - R(now); None where there is no curve
    rival: str = ""  # a sentence where another law has predicted this run better


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Stop where the gain of the whole rest of the ``budget`` is below ``min_gain``, or below ``price`` for
    each unit of compute (with 90 %); go on where it is above both (with 90 %)."""

    budget: float  # compute in all
    min_gain: float = 0.01
    price: float = 0.0  # score that a unit of compute has to bring

    def least(self, since: float) -> float:
        """Score that the compute from ``since`` to the budget has to bring."""
        return max(self.min_gain, self.price * (self.budget - since))


def decide(known: Posterior, terms: Terms) -> Decision:
    """Is the rest of the budget worth it?

    A curve that is not identified is never decided upon, and a run is not stopped where a law that predicted
    it better predicts the gain. Raises ValueError for a budget that is spent.
    """
    now = float(known.series.compute[-1])
    if not terms.budget > now:
        raise ValueError(
            f"budget is {terms.budget:g} and {now:g} of it are spent; use the compute of the whole run"
        )
    assessment = assess(known)
    identified = assessment.standing is not Standing.NOT_IDENTIFIED
    gain = None if assessment.silent else _gain(known, terms)
    action, laws = verdict(known, terms), choose(known.series) if identified else []
    other = _gain_of(rival(laws), now, terms.budget)
    disputed = action is Action.STOP and other >= terms.least(now)
    reason = _reason(assessment, gain, terms.least(now)) + f"; another law predicts {other:.3f}" * disputed
    return Decision(
        action=Action.UNDECIDED if disputed else action,
        reason=reason,
        gain=gain if identified or gain is None else gain.ends(),
        rival=rival_sentence(laws),
    )


def verdict(known: Posterior, terms: Terms) -> Action:
    """What the posterior alone says of the rest of the budget."""
    if assess(known).standing is Standing.NOT_IDENTIFIED:
        return Action.UNDECIDED
    gain, least = _gain(known, terms), terms.least(float(known.series.compute[-1]))
    if gain.high < least:
        return Action.STOP
    return Action.CONTINUE if gain.low > least else Action.UNDECIDED


def _gain(known: Posterior, terms: Terms) -> Interval:
    """Of the rest of the budget; 80 %, so that it is above the lower end with 90 %."""
    return interval(known.gain(float(known.series.compute[-1]), terms.budget), level=0.8)


def _gain_of(best: Choice | None, now: float, budget: float) -> float:
    """The gain of the rest by another law; 0 without one."""
    if best is None or best.law is None:
        return 0.0
    before, after = best.law.score(np.array([now, budget]))
    return float(after - before)


def _reason(assessment: Assessment, gain: Interval | None, least: float) -> str:
    if gain is None or assessment.standing is Standing.NOT_IDENTIFIED:
        return assessment.reason
    brings = f"the rest of the budget brings {gain.low:.3f} to {gain.high:.3f} (80 %)"
    return f"{brings} and has to bring {least:.3g}"
