"""How much longer the fullest expert rank takes than the mean one: measured loads, or lognormal popularity.

A layer waits for the rank with most rows, so its expert products and exchanges take the straggler factor, max
over mean load, times what they would take if rows were spread evenly (``parallel.load``). Experts are placed
in their order; a placement by load (``parallel.placement``) does better, and is given as measured loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ostinato.parallel.load import rank_loads, stragglers
from ostinato.parallel.placement import contiguous
from ostinato.plan.problem import Imbalance

DRAWS = 1000  # of lognormal popularity: the mean is then known to about 1 %
WIDEST = 4.0  # sigma: beyond all that was ever measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Max over mean load of expert ranks. ``mean`` prices time, ``high`` (95 %) sizes buffers."""

    mean: float
    high: float


@lru_cache(maxsize=256)
def straggler(imbalance: Imbalance, num_experts: int, ranks: int) -> Straggler:
    """Of ``ranks`` that keep equally many of ``num_experts`` each. Raises ValueError where loads are measured
    for another number of experts."""
    if ranks == 1:
        return Straggler(mean=1.0, high=1.0)
    if imbalance.loads is None:
        rng = np.random.default_rng(0)
        drawn = np.exp(imbalance.sigma * rng.standard_normal((DRAWS, num_experts)))
        factors = stragglers(drawn.reshape(DRAWS, ranks, -1).sum(axis=-1))
    else:
        loads = np.asarray(imbalance.loads, np.float64)
        if loads.shape[1] != num_experts:
            raise ValueError(
                f"loads were measured for {loads.shape[1]} experts, this model has {num_experts}; "
                "measure them with this model"
            )
        factors = stragglers(rank_loads(loads, contiguous(len(loads), num_experts, ranks), ranks))
    return Straggler(mean=float(factors.mean()), high=float(np.quantile(factors, 0.95)))


@lru_cache(maxsize=64)
def sigma_of(mean: float, num_experts: int, ranks: int) -> float:
    """The spread of lognormal popularity with which ``ranks`` have the straggler factor ``mean``: a measured
    factor is so carried over to other numbers of ranks. 0 for 1 rank, and ``WIDEST`` at most."""
    low, high = 0.0, WIDEST
    if ranks == 1 or straggler(Imbalance(sigma=high), num_experts, ranks).mean <= mean:
        return 0.0 if ranks == 1 else high
    while high - low > 1e-3:
        middle = (low + high) / 2
        less = straggler(Imbalance(sigma=middle), num_experts, ranks).mean < mean
        low, high = (middle, high) if less else (low, middle)
    return (low + high) / 2


def distinct_ranks(num_experts: int, top_k: int, ranks: int) -> float:
    """Over how many of ``ranks`` the ``top_k`` experts of a token are spread on average, if all sets of
    experts are equally likely: a row travels once to each of them."""
    each, missed = num_experts // ranks, 1.0
    for drawn in range(top_k):  # the chance that a given rank has none of them
        missed *= max(0.0, num_experts - each - drawn) / (num_experts - drawn)
    return ranks * (1.0 - missed)


__all__ = ["Straggler", "distinct_ranks", "sigma_of", "straggler"]
