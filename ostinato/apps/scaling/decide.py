"""Forecasts of one curve, and decisions about the rest of a budget: go on, stop, or measure more."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ostinato.apps.scaling.curve import FEWEST
from ostinato.apps.scaling.gates import Assessment, Standing, assess
from ostinato.apps.scaling.posterior import Interval, Posterior, interval, posterior
from ostinato.apps.scaling.series import Series

ORIGINS = (0.5, 0.6, 0.7, 0.8)  # shares of the evaluations after which the rest is predicted
CLEARLY = 0.7  # the error of the line has to be below this share of the posterior's


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A forecast score as far as it may be reported (``Assessment.find_interval``). ``measured`` is that of
    one evaluation, with its noise."""

    compute: float
    score: Interval | None
    measured: Interval | None


def forecast(posterior: Posterior, C: float) -> Forecast:
    """Forecast R(C)."""
    assessment = assess(posterior)
    evaluations = posterior.simulate_evaluations(np.array([C]))[:, 0]
    return Forecast(
        compute=C,
        score=assessment.find_interval(posterior.score(C)),
        measured=assessment.find_interval(evaluations),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The probability that a target is reached, and the compute that it takes in all; None unless the curve
    is identified. ``compute`` is infinite if the target is above the asymptote."""

    target: float
    probability: float | None  # that A is above it
    compute: Interval | None


def reach(posterior: Posterior, T: float) -> Reach:
    """Forecast P(A > T) and the quantiles of C(T); None for a curve that is not identified."""
    if assess(posterior).standing is Standing.NOT_IDENTIFIED:
        return Reach(target=T, probability=None, compute=None)
    return Reach(
        target=T, probability=float(np.mean(posterior.A > T)), compute=interval(posterior.compute_for(T))
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
    action: Action
    reason: str
    gain: Interval | None  # 80 %: of R(budget) - R(now); None where there is no curve
    rival: str = ""  # a sentence where a line in ln C has predicted this run better


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of a decision. Stop if the gain of the whole rest of the ``budget`` is below ``min_gain``, or
    below ``price`` for each unit of compute (with 90 %). Go on if it is above both (with 90 %)."""

    budget: float  # compute in all
    min_gain: float = 0.01
    price: float = 0.0  # score that a unit of compute has to bring

    def least(self, since: float) -> float:
        """Score that the compute from ``since`` to the budget has to bring."""
        return max(self.min_gain, self.price * (self.budget - since))


def decide(posterior: Posterior, terms: Terms) -> Decision:
    """Decide whether the rest of the budget is worth its compute.

    A curve that is not identified gives no decision. A run is not stopped if a line predicted it better and
    promises the gain. Raises ValueError for a budget that is spent.
    """
    now = float(posterior.series.compute[-1])
    if not terms.budget > now:
        raise ValueError(
            f"budget is {terms.budget:g} and {now:g} of it are spent; use the compute of the whole run"
        )
    assessment = assess(posterior)
    is_identified = assessment.standing is not Standing.NOT_IDENTIFIED
    gain = None if assessment.silent else _forecast_gain(posterior, terms)
    action, line = (
        decide_by_posterior(posterior, terms),
        find_rival(posterior.series) if is_identified else None,
    )
    line_gain = 0.0 if line is None else line.gain(now, terms.budget)
    is_disputed = action is Action.STOP and line_gain >= terms.least(now)
    reason = (
        _explain(assessment, gain, terms.least(now))
        + f"; a line in ln C predicts {line_gain:.3f}" * is_disputed
    )
    return Decision(
        action=Action.UNDECIDED if is_disputed else action,
        reason=reason,
        gain=gain if is_identified or gain is None else gain.ends(),
        rival="" if line is None else line.sentence,
    )


def decide_by_posterior(posterior: Posterior, terms: Terms) -> Action:
    """Decide by the posterior alone about the rest of the budget; UNDECIDED for a curve that is not
    identified."""
    if assess(posterior).standing is Standing.NOT_IDENTIFIED:
        return Action.UNDECIDED
    gain, least = _forecast_gain(posterior, terms), terms.least(float(posterior.series.compute[-1]))
    if gain.high < least:
        return Action.STOP
    return Action.CONTINUE if gain.low > least else Action.UNDECIDED


def _forecast_gain(curve_posterior: Posterior, terms: Terms) -> Interval:
    """Return the interval of the gain from the rest of the budget. It is 80 %, so that the gain is above its
    lower end with 90 %."""
    return interval(curve_posterior.gain(float(curve_posterior.series.compute[-1]), terms.budget), level=0.8)


def _explain(assessment: Assessment, gain: Interval | None, least: float) -> str:
    if gain is None or assessment.standing is Standing.NOT_IDENTIFIED:
        return assessment.reason
    statement = f"the rest of the budget brings {gain.low:.3f} to {gain.high:.3f} (80 %)"
    return f"{statement} and has to bring {least:.3g}"


# ---- the other law: a sigmoid gives a ceiling even to a score that rises with ln C without end


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """R = level + slope ln C, at most 1, by least squares. ``error``: root mean square of its prediction
    errors from ``ORIGINS``; ``posterior_error``: the same of the posterior's median."""

    level: float
    slope: float
    error: float
    posterior_error: float

    def score(self, C: np.ndarray | float) -> np.ndarray:
        return np.minimum(self.level + self.slope * np.log(C), 1.0)

    def gain(self, now: float, then: float) -> float:
        return float(self.score(then) - self.score(now))

    @property
    def sentence(self) -> str:
        return (
            f"A line in ln C has predicted this run better ({self.error:.4f} against "
            f"{self.posterior_error:.4f}, root mean square); it has no ceiling."
        )


def find_rival(series: Series) -> Line | None:
    """Return the line if it predicted a series clearly better than the posterior did, over all origins and
    from the last one alone; else None. The last one counts too, because at the first origins a sigmoid is
    often not identified yet and would not have been reported.

    Of simulated sigmoids one in ten has such a line at 3 C_mid and none in 40 at 5; of curves that rise with
    ln C without end, more than eight in ten.
    """
    line_errors, posterior_errors = (_measure_errors(series, law) for law in (_predict_line, _predict_median))
    if not line_errors or not line_errors[-1] < posterior_errors[-1]:
        return None
    line_error, posterior_error = (
        math.sqrt(np.mean(np.square(errors))) for errors in (line_errors, posterior_errors)
    )
    slope, level = np.polyfit(np.log(series.compute), series.score, 1)
    return (
        Line(level=level, slope=slope, error=line_error, posterior_error=posterior_error)
        if line_error < CLEARLY * posterior_error
        else None
    )


def _measure_errors(series: Series, law: Callable[[Series, np.ndarray], np.ndarray]) -> list[float]:
    """Return the root mean square of the prediction errors from each origin with ``FEWEST`` evaluations
    before it."""
    cuts = [round(origin * len(series)) for origin in ORIGINS]
    return [
        math.sqrt(np.mean((series.score[cut:] - law(series.take(slice(cut)), series.compute[cut:])) ** 2))
        for cut in cuts
        if FEWEST <= cut < len(series)
    ]


def _predict_line(series: Series, computes: np.ndarray) -> np.ndarray:
    slope, level = np.polyfit(np.log(series.compute), series.score, 1)
    return np.minimum(level + slope * np.log(computes), 1.0)


def _predict_median(series: Series, computes: np.ndarray) -> np.ndarray:
    return np.median(posterior(series, draws=1024, cells=(24, 48)).score(computes), axis=0)
