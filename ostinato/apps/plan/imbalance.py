"""How much longer the fullest expert rank takes than the mean one, for lognormal popularity of experts.

A layer waits for the rank with most rows, so its expert products and exchanges take the straggler factor, max
over mean load, times what they would take if rows were spread evenly (``parallel.load``). Experts are placed
in their order; a placement by load (``parallel.placement``) does better.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ostinato.parallel.load import stragglers

DRAWS = 1000  # of lognormal popularity: the mean is then known to about 1 %
SIGMA = 0.7  # of ln popularity: assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Max over mean load of expert ranks. ``mean`` prices time, ``high`` (95 %) sizes buffers."""

    mean: float
    high: float


@lru_cache(maxsize=256)
def straggler(num_experts: int, ranks: int) -> Straggler:
    """Of ``ranks`` that keep equally many of ``num_experts`` each."""
    if ranks == 1:
        return Straggler(mean=1.0, high=1.0)
    rng = np.random.default_rng(0)
    drawn = np.exp(SIGMA * rng.standard_normal((DRAWS, num_experts)))
    factors = stragglers(drawn.reshape(DRAWS, ranks, -1).sum(axis=-1))
    return Straggler(mean=float(factors.mean()), high=float(np.quantile(factors, 0.95)))


def distinct_ranks(num_experts: int, top_k: int, ranks: int) -> float:
    """Over how many of ``ranks`` the ``top_k`` experts of a token are spread on average, if all sets of
    experts are equally likely: a row travels once to each of them."""
    each, missed = num_experts // ranks, 1.0
    for drawn in range(top_k):  # the chance that a given rank has none of them
        missed *= max(0.0, num_experts - each - drawn) / (num_experts - drawn)
    return ranks * (1.0 - missed)
