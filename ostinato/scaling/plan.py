"""Curves that have not been measured yet: simulated ones, and how a series may go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ostinato.scaling.curve import Sigmoid
from ostinato.scaling.noise import simulate
from ostinato.scaling.posterior import Posterior
from ostinato.scaling.series import Series, series

COARSE = (24, 48)  # cells of a posterior of which only a width is wanted
MOST = 200  # simulated evaluations: a budget in other units than the run is no matter of memory
FARTHEST = 1e300  # steps: the quotient of two amounts of compute may be infinite


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


def futures(known: Posterior, last: float, count: int, *, seed: int = 0) -> list[Series]:
    """``count`` ways in which the series may go on until compute ``last``, with evaluations as often as so
    far: curves and noise drawn from the posterior.

    Of more than ``MOST`` evaluations to come some are left out, ever more of the later ones.
    """
    before = known.series
    step = cadence(before)
    # floats throughout: a budget may hold more steps than any integer type of numpy
    more = np.fmax(1.0, np.floor(np.fmin((last - before.compute[-1]) / step, FARTHEST) + 1e-9))
    which = np.arange(1, more + 1) if more <= MOST else np.unique(np.geomspace(1, more, MOST).round())
    C = before.compute[-1] + step * which
    chosen = np.linspace(0, len(known.A) - 1, count).astype(int)
    scores = known.measured(C, seed=seed)[chosen]
    stderr = None if before.stderr is None else np.append(before.stderr, np.full(len(C), before.stderr[-1]))
    return [
        replace(
            before,
            compute=np.append(before.compute, C),
            score=np.append(before.score, score),
            stderr=stderr,
        )
        for score in scores
    ]
