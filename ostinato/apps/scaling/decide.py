"""Forecasts of one curve, and decisions about the rest of a budget: go on, stop, or measure more."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ostinato.apps.scaling.gates import Standing, assess
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

    A curve that is not identified is never decided upon. Raises ValueError for a budget that is spent.
    """
    now = float(known.series.compute[-1])
    if not terms.budget > now:
        raise ValueError(
            f"budget is {terms.budget:g} and {now:g} of it are spent; use the compute of the whole run"
        )
    assessment = assess(known)
    # 80 %, so that it is above the lower end with 90 %
    gain = None if assessment.silent else interval(known.gain(now, terms.budget), level=0.8)
    if gain is None or assessment.standing is Standing.NOT_IDENTIFIED:
        ends = None if gain is None else gain.ends()
        return Decision(action=Action.UNDECIDED, reason=assessment.reason, gain=ends)
    least = terms.least(now)
    brings = f"the rest of the budget brings {gain.low:.3f} to {gain.high:.3f} (80 %)"
    action = Action.STOP if gain.high < least else Action.CONTINUE if gain.low > least else Action.UNDECIDED
    return Decision(action=action, reason=f"{brings} and has to bring {least:.3g}", gain=gain)
