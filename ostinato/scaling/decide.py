"""Go on, stop, or measure more: what the forecast says about the rest of a budget."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ostinato.scaling.gates import BARS, Assessment, Bars, Standing, assess
from ostinato.scaling.plan import COARSE, cadence, futures
from ostinato.scaling.posterior import Interval, Posterior, interval, posterior


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A score to come. ``point`` is None where the curve is not identified, ``score`` too where there
    is none; ``measured`` is the interval for one evaluation, noise and all."""

    compute: float
    point: float | None
    score: Interval | None
    measured: Interval | None
    assessment: Assessment


def forecast(known: Posterior, C: float, bars: Bars = BARS) -> Forecast:
    """R(C), as far as it may be told."""
    assessment = assess(known, bars)
    if assessment.silent:
        return Forecast(compute=C, point=None, score=None, measured=None, assessment=assessment)
    score, measured = interval(known.score(C)), interval(known.measured(np.array([C]))[:, 0])
    if assessment.standing is Standing.NOT_IDENTIFIED:
        return Forecast(
            compute=C, point=None, score=score.ends(), measured=measured.ends(), assessment=assessment
        )
    return Forecast(compute=C, point=score.median, score=score, measured=measured, assessment=assessment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Will a target be reached, and with how much compute in all? None: it may not be told. ``compute`` is
    infinite where the target is above the asymptote."""

    target: float
    probability: float | None  # that A is above it
    compute: Interval | None
    assessment: Assessment


def reach(known: Posterior, T: float, bars: Bars = BARS) -> Reach:
    """P(A > T) and quantiles of C(T)."""
    assessment = assess(known, bars)
    if assessment.standing is Standing.NOT_IDENTIFIED:
        return Reach(target=T, probability=None, compute=None, assessment=assessment)
    return Reach(
        target=T,
        probability=float(np.mean(known.A > T)),
        compute=interval(known.compute_for(T)),
        assessment=assessment,
    )


class Action(StrEnum):
    CONTINUE = "continue"
    STOP = "stop"
    UNDECIDED = "undecided"

    @property
    def exit_code(self) -> int:
        return {Action.CONTINUE: 0, Action.STOP: 10, Action.UNDECIDED: 20}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``settled`` is the compute by which most futures are decided, None where none is within the budget."""

    action: Action
    reason: str
    gain: Interval | None  # 80 %: of R(budget) - R(now); None where there is no curve
    settled: float | None
    assessment: Assessment


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Stop where the gain of the whole rest of the ``budget`` is below ``min_gain`` (with 90 %); go on where
    it is above both that and ``price`` for each unit of compute (with 90 %)."""

    budget: float  # compute in all
    min_gain: float = 0.01
    price: float = 0.0  # score that a unit of compute has to bring


def decide(known: Posterior, terms: Terms, bars: Bars = BARS, *, settle: bool = True) -> Decision:
    """Is the rest of the budget worth it?

    A curve that is not identified is never decided upon. ``settle=False`` leaves the simulation of futures
    out. Raises ValueError for a budget that is spent.
    """
    now = float(known.series.compute[-1])
    if not terms.budget > now:
        raise ValueError(
            f"budget is {terms.budget:g} and {now:g} of it are spent; use the compute of the whole run"
        )
    assessment = assess(known, bars)
    gain = None if assessment.silent else _gain(known, terms)
    action = _action(known, assessment, terms)
    settled = None
    if action is Action.UNDECIDED and settle and not assessment.silent:
        settled = settling(known, terms, bars)
    return Decision(
        action=action,
        reason=_reason(action, assessment, gain, settled),
        gain=gain.ends() if gain and assessment.standing is Standing.NOT_IDENTIFIED else gain,
        settled=settled,
        assessment=assessment,
    )


def _action(known: Posterior, assessment: Assessment, terms: Terms) -> Action:
    if assessment.standing is Standing.NOT_IDENTIFIED:
        return Action.UNDECIDED
    gain, left = _gain(known, terms), terms.budget - float(known.series.compute[-1])
    if gain.high < terms.min_gain:
        return Action.STOP
    if gain.low > max(terms.min_gain, terms.price * left):
        return Action.CONTINUE
    return Action.UNDECIDED


def _gain(known: Posterior, terms: Terms) -> Interval:
    """80 %: one end is passed with 90 %."""
    return interval(known.gain(float(known.series.compute[-1]), terms.budget), level=0.8)


def _reason(action: Action, assessment: Assessment, gain: Interval | None, settled: float | None) -> str:
    if gain is None or assessment.standing is Standing.NOT_IDENTIFIED:
        start = assessment.reason
    else:
        start = f"the rest of the budget brings {gain.low:.3f} to {gain.high:.3f} (80 %)"
    if action is not Action.UNDECIDED or assessment.silent:
        return start
    until = f"until compute {settled:.4g}" if settled is not None else "but the budget may not settle it"
    return f"{start}; measure on, {until}"


def settling(
    known: Posterior, terms: Terms, bars: Bars = BARS, *, count: int = 8, levels: int = 6, most: float = 0.75
) -> float | None:
    """The least compute, on a grid up to the budget, by which the share ``most`` of ``count`` simulated
    futures leads to a decision about the same budget; None where it is not settled by then."""
    now = float(known.series.compute[-1])
    first = min(now + cadence(known.series), terms.budget)
    ways = futures(known, terms.budget, count)
    for C in np.geomspace(first, terms.budget, levels + 1)[:-1]:
        decided = 0
        for way in ways:
            so_far = way.between(last=float(C) * (1 + 1e-9))
            later = posterior(so_far, noise=known.noise, draws=512, cells=COARSE)
            decided += _action(later, assess(later, bars), terms) is not Action.UNDECIDED
        if decided >= most * count:
            return float(C)
    return None
