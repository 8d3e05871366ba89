"""Curves that have not been measured yet: simulated ones, what more evaluations would tell, how long a pilot
has to be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ostinato.scaling.curve import Sigmoid
from ostinato.scaling.noise import CONSERVATIVE, Noise, simulate
from ostinato.scaling.posterior import Posterior, interval, posterior
from ostinato.scaling.series import Series, series

COARSE = (24, 48)  # cells of a posterior of which only a width is wanted


def simulated(
    curve: Sigmoid,
    compute: Sequence[float] | np.ndarray,
    *,
    sd: float = 0.0042,
    rho: float = 0.45,
    seed: int = 0,
    name: str = "simulated",
) -> Series:
    """Evaluations of a known curve with AR(1) noise; the defaults are what published runs show. Scores are
    clipped to [0, 1]."""
    rng = np.random.default_rng(seed)
    C = np.asarray(compute, float)
    noise = simulate(rng, 1, len(C), sd, rho)[0]
    return series(name, C, np.clip(curve.score(C) + noise, 0, 1), R0=curve.R0)


def cadence(known: Series) -> float:
    """Compute between evaluations: the median."""
    return float(np.median(np.diff(known.compute))) if len(known) > 1 else float(known.compute[0])


def futures(
    known: Posterior, last: float, count: int, *, every: float | None = None, seed: int = 0
) -> list[Series]:
    """``count`` ways in which the series may go on until compute ``last``, with an evaluation ``every`` so
    much (as often as so far): curves and noise drawn from the posterior."""
    before = known.series
    step = every or cadence(before)
    more = max(1, math.floor((last - before.compute[-1]) / step + 1e-9))
    C = before.compute[-1] + step * np.arange(1, more + 1)
    chosen = np.linspace(0, len(known.A) - 1, count).astype(int)
    scores = known.measured(C, seed=seed)[chosen]
    stderr = None if before.stderr is None else np.append(before.stderr, np.full(more, before.stderr[-1]))
    return [
        replace(
            before,
            compute=np.append(before.compute, C),
            score=np.append(before.score, score),
            stderr=stderr,
        )
        for score in scores
    ]


def expected_width(known: Posterior, last: float, *, count: int = 8, seed: int = 0) -> float:
    """Mean 90 % width of A once the series has gone on until compute ``last``."""
    widths = [
        interval(posterior(one, noise=known.noise, draws=512, cells=COARSE).A).width
        for one in futures(known, last, count, seed=seed)
    ]
    return float(np.mean(widths))


def halving(known: Posterior, most: float, *, count: int = 8, levels: int = 8) -> float | None:
    """The least compute, on a geometric grid up to ``most``, at which the width of A is expected to be half
    of what it is; None where it is not by then. More evaluations do not tell less: the grid is bisected."""
    now = float(known.series.compute[-1])
    if most <= now:
        return None
    half = interval(known.A).width / 2
    grid = np.geomspace(min(now + cadence(known.series), most), most, levels)
    low, high = 0, levels
    while low < high:
        middle = (low + high) // 2
        enough = expected_width(known, float(grid[middle]), count=count) <= half
        low, high = (low, middle) if enough else (middle + 1, high)
    return float(grid[low]) if low < levels else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pilot:
    """The shortest run that gives the width, and the widths of all lengths that were tried."""

    compute: float | None  # None: no length up to the longest
    width: float
    lengths: tuple[tuple[float, float], ...]  # (compute, expected 90 % width of A)


def plan_pilot(
    guess: Sigmoid,
    every: float,
    width: float,
    *,
    first: float = 0.0,
    noise: Noise = CONSERVATIVE,
    longest: float = 12.0,
    steps: int = 23,
) -> Pilot:
    """How long a run has to be for A to be known to ``width`` (90 %), if its curve is the ``guess``.

    Evaluated ``every`` so much compute, from ``first`` on; tried up to ``longest`` x C_mid. The width is that
    of evaluations on the curve itself, with the noise that the posterior assumes: what to expect on average.
    """
    if not every > 0:
        raise ValueError(f"every is {every}; use the compute between evaluations, a positive number")
    if not 0 < width < 1:
        raise ValueError(f"width is {width}; use the wanted 90 % width of A, in (0, 1)")
    lengths = []
    for ratio in np.linspace(1.0, longest, steps):
        C = np.arange(every, ratio * guess.C_mid + 1e-9 * every, every)
        C = C[first <= C]
        if len(C) < 5:
            continue
        known = posterior(simulated(guess, C, sd=0.0), noise=noise, draws=1024, cells=COARSE)
        lengths.append((float(C[-1]), interval(known.A).width))
    enough = [C for C, reached in lengths if reached <= width]
    return Pilot(compute=enough[0] if enough else None, width=width, lengths=tuple(lengths))
