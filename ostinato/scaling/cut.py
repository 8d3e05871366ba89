"""Where a fit begins: the early phase of a run is no sigmoid's, and what is left out is said.

The paper leaves out about one epoch (arXiv 2510.13786, appendix A.5). Beyond that a cut is worth its
evaluations only where the ceiling depends on it. A fit to fewer evaluations is right whether or not the early
ones belong, and less precise: a difference beyond the loss of precision speaks against them (Hausman 1978).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ostinato.scaling.gates import FEWEST, TOLD, assess
from ostinato.scaling.noise import MEASURED, Noise
from ostinato.scaling.posterior import posterior
from ostinato.scaling.series import Series

COARSE = (24, 48)  # cells of a posterior of which only A's mean and spread are wanted
EPOCHS = 3.0  # a run has to be this long for its first epoch to be left out
Z = 3.0  # standard deviations by which A has to move
LEAST_SD = 0.002  # of a difference: two fits to nearly the same evaluations do not differ by less
MOST_LEFT_OUT = 0.4  # share of the evaluations


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One cut of the sweep. ``moved`` is how far the ceilings of all later cuts lie from that of this one, in
    standard deviations of the difference, the largest of them; 0 for the last."""

    first: float  # compute of the first evaluation that is fitted
    evaluations: int
    A: float
    sd: float
    moved: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What was chosen, what was tried, and one sentence that says why."""

    first: float
    stable: bool  # does any cut give the ceiling of those after it?
    sweep: tuple[Tried, ...]
    reason: str


def auto_cut(
    series: Series,
    *,
    epoch: float | None = None,
    least: float = 0.0,
    noise: Noise = MEASURED,
) -> Cut:
    """The earliest cut from which on A stays where it is.

    ``epoch`` is the compute of one pass over the training prompts, None where it is not known. Evaluations
    within it are left out where the run is at least 3 epochs long and the epoch ends before C_mid (without
    the rise there is no B to be told); those before ``least`` in any case. From there on cuts that leave out
    at most 40 % of the evaluations and keep 5 are tried. Raises ValueError for a series with nothing left.
    """
    asked = series.between(first=least)
    if not len(asked):
        raise ValueError(
            f"{series.name} has no evaluation at compute {least:g} or later; use a smaller --cut"
        )
    if len(asked) < FEWEST:
        few = f"{len(asked)} evaluations are too few to try a cut, so all of them are fitted"
        return Cut(first=float(asked.compute[0]), stable=True, sweep=(), reason=few)
    start, why = _start(asked, epoch)
    kept = asked.between(first=start)
    known = posterior(kept, draws=512, cells=COARSE)
    if assess(known).standing not in TOLD:
        reason = f"{why}; the curve is not identified, so the ceiling of a later cut says nothing"
        return Cut(first=float(kept.compute[0]), stable=True, sweep=(), reason=reason)
    tries = max(1, min(math.ceil(MOST_LEFT_OUT * len(kept)), len(kept) - FEWEST + 1))
    sweep = _sweep(kept, tries, noise)
    chosen = next((one for one in sweep[:-1] if one.moved <= Z), sweep[0])
    stable = chosen.moved <= Z
    return Cut(
        first=chosen.first, stable=stable, sweep=sweep, reason=f"{why}; {_told(sweep, chosen, stable)}"
    )


def _start(series: Series, epoch: float | None) -> tuple[float, str]:
    """(where the sweep begins, why there)"""
    first, last = float(series.compute[0]), float(series.compute[-1])
    if epoch is None:
        return first, "the length of an epoch is not known"
    if epoch <= first:
        return first, f"the first epoch (up to compute {epoch:.4g}) has no evaluation"
    if last < EPOCHS * epoch:
        return first, f"the run is {last / epoch:.1f} epochs long, too short to leave the first out"
    C_mid = float(np.median(posterior(series, draws=512, cells=COARSE).C_mid))
    if epoch >= C_mid or len(series.between(first=epoch)) < FEWEST:
        return first, (
            f"the first epoch (up to compute {epoch:.4g}) holds half of the gain (C_mid {C_mid:.4g}) and is"
            " kept"
        )
    return epoch, f"the first epoch (up to compute {epoch:.4g}) is left out"


def _sweep(kept: Series, tries: int, noise: Noise) -> tuple[Tried, ...]:
    windows = [kept.take(slice(start, None)) for start in range(tries)]
    draws = [posterior(one, noise=noise, draws=512, cells=COARSE).A for one in windows]
    mean, sd = np.array([each.mean() for each in draws]), np.array([each.std() for each in draws])
    moved = [
        max((_apart(mean, sd, at, later) for later in range(at + 1, tries)), default=0.0)
        for at in range(tries)
    ]
    return tuple(
        Tried(first=float(one.compute[0]), evaluations=len(one), A=float(m), sd=float(s), moved=z)
        for one, m, s, z in zip(windows, mean, sd, moved, strict=True)
    )


def _apart(mean: np.ndarray, sd: np.ndarray, early: int, late: int) -> float:
    """|A_late - A_early| in standard deviations of the difference: its variance is that of the less precise
    less that of the more precise, and taken as a quarter of the former at least (both are skewed)."""
    variance = max(sd[late] ** 2 - sd[early] ** 2, sd[late] ** 2 / 4, LEAST_SD**2)
    return abs(float(mean[late] - mean[early])) / math.sqrt(variance)


def _told(sweep: tuple[Tried, ...], chosen: Tried, stable: bool) -> str:
    spread = max(one.A for one in sweep) - min(one.A for one in sweep)
    tried = f"over {len(sweep)} cuts A moves by {spread:.3f}"
    if not stable:
        return f"{tried} and settles at none of them, so nothing more is left out: do not trust this ceiling"
    if chosen is sweep[0]:
        return f"{tried}, no more than the evaluations left out explain, so nothing more is left out"
    return f"{tried}, and from compute {chosen.first:.4g} on it stays"
