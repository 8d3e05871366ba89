"""Two recipes: whose ceiling is higher, whose score at a compute, and where one overtakes the other.

Runs that differ by their seed alone end at different ceilings. How far is estimated from the seeds of both
sides together (``seeds``), and the mean of n seeds has the n-th part of the variance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.scaling import curve
from ostinato.scaling.fit import fit
from ostinato.scaling.gates import BARS, Assessment, Bars, Standing, assess
from ostinato.scaling.posterior import Interval, Posterior, interval
from ostinato.scaling.seeds import FLOOR, Z90, spread
from ostinato.scaling.series import require_comparable


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedA:
    """All refitted with the mean of their A: slopes compare at an equal ceiling only (appendix A.6)."""

    A: float
    B: tuple[float, float]  # means of the sides
    apart: float  # |A1 - A2| of their own fits; beyond the floor the refit says little


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What may be said of two sides. Probabilities are None where one of their runs is not identified; what
    hangs on B and C_mid, crossings and ``shared``, where they are not known of all runs."""

    names: tuple[str, str]
    seeds: tuple[int, int]
    assessments: tuple[tuple[Assessment, ...], tuple[Assessment, ...]]  # of each run
    between: float  # 90 % half-width of A from seed to seed, median of what is known of it
    higher_A: float | None  # P(A1 > A2)
    difference: Interval | None  # A1 - A2, 90 %
    at: float | None
    higher_score: float | None  # P(R1(at) > R2(at))
    crosses: float | None  # P(the curves cross, from where all have been measured on)
    crossover: Interval | None  # compute of the last crossing, given that they do
    shared: SharedA | None
    reason: str  # why nothing is ranked
    unknown: str  # whose B and C_mid are not known


def compare(
    one: Posterior | Sequence[Posterior],
    other: Posterior | Sequence[Posterior],
    *,
    at: float | None = None,
    floor: float = FLOOR,
    bars: Bars = BARS,
    reach: float = 100.0,
    seed: int = 0,
) -> Comparison:
    """Compare two recipes by one run or several seeds of each, on the same axis and held-out set.

    ``floor`` is the 90 % half-width of A from seed to seed, before your own seeds tell (0: none whatever).
    Crossings are looked for from where all have been measured to ``reach`` times the longest run. Raises
    ValueError for runs that do not compare.
    """
    sides = tuple([side] if isinstance(side, Posterior) else list(side) for side in (one, other))
    runs = [*sides[0], *sides[1]]
    require_comparable(*(known.series for known in runs))
    found = [[assess(known, bars) for known in side] for side in sides]
    refused = [
        f"{known.series.name} is not identified: {what.reason}"
        for known, what in zip(runs, [*found[0], *found[1]], strict=True)
        if what.standing is Standing.NOT_IDENTIFIED
    ]
    flat = [
        known.series.name for known, what in zip(runs, [*found[0], *found[1]], strict=True) if not what.steep
    ]
    told, rng = not refused, np.random.default_rng(seed)
    n = min(len(known.A) for known in runs)
    sd = spread([_ceilings(side) for side in sides], floor / Z90, rng, n) if floor else np.zeros(n)
    drawn = tuple([_of_another_seed(known, sd, rng) for known in side] for side in sides)
    A = [np.mean([draws[1] for draws in side], axis=0) for side in drawn]
    low = max(float(known.series.compute[0]) for known in runs)
    high = reach * max(float(known.series.compute[-1]) for known in runs)
    crossing = np.empty(0) if flat else last_crossing(drawn[0], drawn[1], low, high)
    crossed = crossing[np.isfinite(crossing)]
    return Comparison(
        names=(_name(sides[0]), _name(sides[1])),
        seeds=(len(sides[0]), len(sides[1])),
        assessments=(tuple(found[0]), tuple(found[1])),
        between=float(Z90 * np.median(sd)),
        higher_A=float(np.mean(A[0] > A[1])) if told else None,
        difference=interval(A[0] - A[1]) if told else None,
        at=at,
        higher_score=_higher(drawn, at) if told and at is not None else None,
        crosses=None if flat else len(crossed) / n,
        crossover=interval(crossed) if len(crossed) else None,
        shared=None if flat else shared_A(*sides),
        reason="; ".join(refused),
        unknown=", ".join(flat),
    )


def _name(side: Sequence[Posterior]) -> str:
    return " + ".join(known.series.name for known in side)


Draws = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # R0, A, B, C_mid


def _ceilings(side: Sequence[Posterior]) -> tuple[np.ndarray, np.ndarray]:
    """([s] means, [s] standard errors) of A."""
    return np.array([known.A.mean() for known in side]), np.array([known.A.std() for known in side])


def _of_another_seed(known: Posterior, sd: np.ndarray, rng: np.random.Generator) -> Draws:
    """Draws of the curve that another seed would have had: A is shifted.

    In an order of their own: posteriors drawn with one seed go up and down together, and a difference of
    two would look better known than it is.
    """
    order = rng.permutation(len(sd))
    R0, A, B, C_mid = (draws[order] for draws in (known.R0, known.A, known.B, known.C_mid))
    return R0, np.clip(A + sd * rng.standard_normal(len(sd)), R0, 1.0), B, C_mid


def _score(C: float | np.ndarray, side: Sequence[Draws]) -> np.ndarray:
    """[N, ...]: the mean curve of the seeds of one side."""
    return np.mean([curve.score(C, *draws) for draws in side], axis=0)


def _higher(sides: Sequence[Sequence[Draws]], at: float) -> float:
    first, second = (_score(at, side) for side in sides)
    return float(np.mean(first > second))


def last_crossing(
    one: Sequence[Draws], other: Sequence[Draws], low: float, high: float, cells: int = 200
) -> np.ndarray:
    """[N]: the largest C in (low, high) at which the mean curves of two sides cross, NaN where they do not;
    to within a cell of ln C, in which the difference of scores is taken as linear."""
    log_C = np.linspace(np.log(low), np.log(high), cells + 1)
    columns = [[tuple(x[:, None] for x in draws) for draws in side] for side in (one, other)]
    first, second = (_score(np.exp(log_C), side) for side in columns)  # pyright: ignore[reportArgumentType]
    gap = first - second
    changes = np.sign(gap[:, :-1]) * np.sign(gap[:, 1:]) < 0
    last = cells - 1 - np.argmax(changes[:, ::-1], axis=1)
    before, after = (np.take_along_axis(gap, (last + k)[:, None], 1)[:, 0] for k in (0, 1))
    with np.errstate(divide="ignore", invalid="ignore"):
        within = before / (before - after)
    at = log_C[last] + (log_C[1] - log_C[0]) * np.where(changes.any(1), within, np.nan)
    return np.exp(at)


def shared_A(one: Sequence[Posterior], other: Sequence[Posterior]) -> SharedA:
    """The paper's comparison of slopes."""
    sides = (one, other)
    A = [float(np.mean([known.fit.curve.A for known in side])) for side in sides]
    mean = max(sum(A) / 2, *(known.series.R0 for side in sides for known in side))
    B = [float(np.mean([fit(known.series, A=mean).curve.B for known in side])) for side in sides]
    return SharedA(A=mean, B=(B[0], B[1]), apart=abs(A[0] - A[1]))
