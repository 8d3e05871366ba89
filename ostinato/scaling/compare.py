"""Two runs: whose ceiling is higher, whose score at a compute, and where one overtakes the other.

Runs that differ by their seed alone end at different ceilings: three of the paper's lay within 0.015, and it
takes 0.02 as the margin (arXiv 2510.13786, section 2.2). It is read as a 90 % interval of each run's A.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from ostinato.scaling import curve
from ostinato.scaling.fit import fit
from ostinato.scaling.gates import BARS, Assessment, Bars, Standing, assess
from ostinato.scaling.posterior import Interval, Posterior, interval
from ostinato.scaling.series import require_comparable

FLOOR = 0.02
Z90 = NormalDist().inv_cdf(0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedA:
    """Both refitted with the mean of their A: slopes compare at an equal ceiling only (appendix A.6)."""

    A: float
    B: tuple[float, float]
    apart: float  # |A1 - A2| of their own fits; beyond the floor the refit says little


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What may be said of two runs. Probabilities are None where one of them is not identified."""

    names: tuple[str, str]
    assessments: tuple[Assessment, Assessment]
    higher_A: float | None  # P(A1 > A2)
    at: float | None
    higher_score: float | None  # P(R1(at) > R2(at))
    crosses: float | None  # P(the curves cross, from where both have been measured on)
    crossover: Interval | None  # compute of the last crossing, given that they do
    shared: SharedA
    reason: str


def compare(
    one: Posterior,
    other: Posterior,
    *,
    at: float | None = None,
    floor: float = FLOOR,
    bars: Bars = BARS,
    reach: float = 100.0,
    seed: int = 0,
) -> Comparison:
    """Compare two runs on the same axis and held-out set; ``floor`` is the 90 % half-width of A from run to
    run (0 for none, or that of your own seeds).

    Crossings are looked for from where both have been measured to ``reach`` times the longer run. Raises
    ValueError for runs that do not compare.
    """
    require_comparable(one.series, other.series)
    assessments = (assess(one, bars), assess(other, bars))
    refused = [
        f"{known.series.name} is not identified: {found.reason}"
        for known, found in zip((one, other), assessments, strict=True)
        if found.standing is Standing.NOT_IDENTIFIED
    ]
    rng = np.random.default_rng(seed)
    n = min(len(one.A), len(other.A))
    shifts = rng.standard_normal((2, n)) * floor / Z90
    pairs = tuple(
        (known.R0[:n], np.maximum(known.A[:n] + shift, known.R0[:n]), known.B[:n], known.C_mid[:n])
        for known, shift in zip((one, other), shifts, strict=True)
    )
    told = not refused
    low = max(float(known.series.compute[0]) for known in (one, other))
    high = reach * max(float(known.series.compute[-1]) for known in (one, other))
    crossing = last_crossing(pairs[0], pairs[1], low, high) if told else np.empty(0)
    crossed = crossing[np.isfinite(crossing)]
    return Comparison(
        names=(one.series.name, other.series.name),
        assessments=assessments,
        higher_A=float(np.mean(pairs[0][1] > pairs[1][1])) if told else None,
        at=at,
        higher_score=_higher(pairs, at) if told and at is not None else None,
        crosses=len(crossed) / n if told else None,
        crossover=interval(crossed) if len(crossed) else None,
        shared=shared_A(one, other),
        reason="; ".join(refused),
    )


Draws = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # R0, A, B, C_mid


def _higher(pairs: tuple[Draws, ...], at: float) -> float:
    scores = [curve.score(at, *draws) for draws in pairs]
    return float(np.mean(scores[0] > scores[1]))


def last_crossing(one: Draws, other: Draws, low: float, high: float, cells: int = 200) -> np.ndarray:
    """[N]: the largest C in (low, high) at which two curves cross, NaN where they do not; to within a cell of
    ln C, in which the difference of scores is taken as linear."""
    log_C = np.linspace(np.log(low), np.log(high), cells + 1)
    first, second = (curve.score(np.exp(log_C), *(x[:, None] for x in draws)) for draws in (one, other))
    gap = first - second
    changes = np.sign(gap[:, :-1]) * np.sign(gap[:, 1:]) < 0
    last = cells - 1 - np.argmax(changes[:, ::-1], axis=1)
    before, after = (np.take_along_axis(gap, (last + k)[:, None], 1)[:, 0] for k in (0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        within = before / (before - after)
    at = log_C[last] + (log_C[1] - log_C[0]) * np.where(changes.any(1), within, np.nan)
    return np.exp(at)


def shared_A(one: Posterior, other: Posterior) -> SharedA:
    """The paper's comparison of slopes."""
    A = [known.fit.curve.A for known in (one, other)]
    mean = max(sum(A) / 2, one.series.R0, other.series.R0)
    B = tuple(fit(known.series, A=mean).curve.B for known in (one, other))
    return SharedA(A=mean, B=(B[0], B[1]), apart=abs(A[0] - A[1]))
