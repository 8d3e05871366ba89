"""How far runs differ by their seed alone: part of every interval of an ``ablation``.

Two runs say next to nothing about it. The posterior of the standard deviation tau is a grid (restricted
likelihood, as in random-effects meta-analysis), flat in tau (Gelman 2006); where one's own seeds have fewer
than 3 degrees of freedom, three runs of the paper stand in, whose ceilings lay within 0.015 of each other
and of which it takes 0.02 as the margin (arXiv 2510.13786, section 2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

FLOOR = 0.02  # the paper's margin: half of a 90 % interval of a run's A
Z90 = NormalDist().inv_cdf(0.95)
ENOUGH = 3  # degrees of freedom of one's own seeds that need no others
PAPER = 2  # degrees of freedom of the paper's three runs


def spread(
    groups: Sequence[tuple[np.ndarray, np.ndarray]], scale: float, rng: np.random.Generator, n: int
) -> np.ndarray:
    """[n] draws of tau, the standard deviation between runs of a group.

    ``groups`` are ([s] means, [s] standard errors) of the runs of each group, whose own mean is free (flat).
    Where they have fewer than ``ENOUGH`` degrees of freedom, as if two more had been seen around ``scale``.
    """
    tau = np.geomspace(scale / 30, scale * 30, 400)
    log_p = np.log(tau)  # flat in tau, on a grid of ln tau
    if sum(len(means) - 1 for means, _ in groups) < ENOUGH:
        log_p = -PAPER * (np.log(tau) + scale**2 / (2 * tau**2))  # a scaled inverse chi-squared of tau^2
    for means, errors in groups:
        weight = 1 / (tau[:, None] ** 2 + errors**2)
        centre = (weight @ means) / weight.sum(1)
        off = means - centre[:, None]
        log_p += 0.5 * (np.log(weight).sum(1) - np.log(weight.sum(1)) - (weight * off**2).sum(1))
    mass = np.cumsum(np.exp(log_p - log_p.max()))
    return np.interp(rng.random(n) * mass[-1], mass, tau)
