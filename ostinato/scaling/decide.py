"""Go on, stop, or measure more: what the forecast says about the rest of a budget."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ostinato.scaling.forms import Choice, choose, rival, rival_sentence
from ostinato.scaling.gates import Assessment, Standing, assess
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


def forecast(known: Posterior, C: float) -> Forecast:
    """R(C), as far as it may be told."""
    assessment = assess(known)
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


def reach(known: Posterior, T: float) -> Reach:
    """P(A > T) and quantiles of C(T)."""
    assessment = assess(known)
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
    rival: str = ""  # a sentence where another law has foretold this run better


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


def decide(known: Posterior, terms: Terms, *, settle: bool = True) -> Decision:
    """Is the rest of the budget worth it?

    A curve that is not identified is never decided upon, and one to which a law that has foretold it better
    promises the gain is not stopped. ``settle=False`` leaves the simulation of futures out. Raises ValueError
    for a budget that is spent.
    """
    now = float(known.series.compute[-1])
    if not terms.budget > now:
        raise ValueError(
            f"budget is {terms.budget:g} and {now:g} of it are spent; use the compute of the whole run"
        )
    assessment = assess(known)
    told = assessment.standing is not Standing.NOT_IDENTIFIED
    gain = None if assessment.silent else _gain(known, terms, now)
    action, laws = verdict(known, terms), choose(known.series) if told else []
    promised = _promised(rival(laws), now, terms.budget)
    disputed = action is Action.STOP and promised >= terms.least(now)
    settled = None
    if action is Action.UNDECIDED and settle and not assessment.silent:
        settled = settling(known, terms)
    start = _start(assessment, gain, terms.least(now)) + f"; another law promises {promised:.3f}" * disputed
    action = Action.UNDECIDED if disputed else action
    return Decision(
        action=action,
        reason=start if action is not Action.UNDECIDED or assessment.silent else _until(start, settled),
        gain=gain if told or gain is None else gain.ends(),
        settled=settled,
        assessment=assessment,
        rival=rival_sentence(laws),
    )


def verdict(known: Posterior, terms: Terms, *, since: float | None = None) -> Action:
    """What the posterior alone says of the compute from ``since`` (what is spent) to the budget."""
    if assess(known).standing is Standing.NOT_IDENTIFIED:
        return Action.UNDECIDED
    since = float(known.series.compute[-1]) if since is None else since
    gain, least = _gain(known, terms, since), terms.least(since)
    if gain.high < least:
        return Action.STOP
    return Action.CONTINUE if gain.low > least else Action.UNDECIDED


def _gain(known: Posterior, terms: Terms, since: float) -> Interval:
    """80 %: one end is passed with 90 %."""
    return interval(known.gain(since, terms.budget), level=0.8)


def _promised(best: Choice | None, now: float, budget: float) -> float:
    """The gain of the rest by another law; 0 without one."""
    if best is None or best.law is None:
        return 0.0
    before, after = best.law.score(np.array([now, budget]))
    return float(after - before)


def _start(assessment: Assessment, gain: Interval | None, least: float) -> str:
    if gain is None or assessment.standing is Standing.NOT_IDENTIFIED:
        return assessment.reason
    brings = f"the rest of the budget brings {gain.low:.3f} to {gain.high:.3f} (80 %)"
    return f"{brings} and has to bring {least:.3g}"


def _until(start: str, settled: float | None) -> str:
    until = f"until compute {settled:.4g}" if settled is not None else "but the budget may not settle it"
    return f"{start}; measure on, {until}"


def settling(
    known: Posterior, terms: Terms, *, count: int = 8, levels: int = 6, most: float = 0.75
) -> float | None:
    """The least compute, on a grid below the budget, by which the share ``most`` of ``count`` simulated
    futures tells whether what is left of the budget now is worth it; None where it is not told by then.

    The gain is that from now on and not from then on, which vanishes as the budget is spent: "not worth the
    rest" is true of every run at its end.
    """
    now = float(known.series.compute[-1])
    first = now + cadence(known.series)
    if first >= terms.budget:
        return None
    ways = futures(known, terms.budget, count)
    for C in np.geomspace(first, terms.budget, levels + 1)[:-1]:
        decided = 0
        for way in ways:
            so_far = way.between(last=float(C) * (1 + 1e-9))
            later = posterior(so_far, noise=known.noise, draws=512, cells=COARSE)
            decided += verdict(later, terms, since=now) is not Action.UNDECIDED
        if decided >= most * count:
            return float(C)
    return None
