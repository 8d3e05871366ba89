"""Imbalance of the use of experts, and its cost where each rank keeps some of them. numpy only.

    routes [T, L, K] --expert_loads--> loads [L, E] --rank_loads(owner)--> [L, R] --compute_stragglers--> [L]

All ranks wait in every layer for the one that got most rows, so a layer takes its straggler factor, the
largest load of a rank over the mean, times what it would take if rows were spread evenly.

T tokens, L MoE layers, K experts per token, E experts, R ranks. ``owner`` [L, E]: the rank that keeps an
expert (``parallel.placement``). A load is a number of (token, expert) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ostinato.types import NO_EXPERT

NOMINAL_RANKS = 8  # the nominal share of one rank: the experts of a node of eight
SIGMA = 0.7  # of ln popularity, where no load is known: assumed
DRAWS = 1000  # of such popularity: the mean straggler is then known to about 1 %


def expert_loads(routes: np.ndarray, num_experts: int) -> np.ndarray:
    """Number [L, E] int64 of tokens of routes [T, L, K] that chose each expert. Rows of NO_EXPERT are unknown
    and not counted. Raises ValueError for an id that is no expert."""
    ids = routes.astype(np.int64)
    is_known = ids != NO_EXPERT
    if is_known.any() and not 0 <= ids[is_known].min() <= ids[is_known].max() < num_experts:
        raise ValueError(
            f"routes have ids from {ids[is_known].min()} to {ids[is_known].max()}; "
            f"experts are 0 to {num_experts - 1}"
        )
    num_layers = ids.shape[1]
    ids += num_experts * np.arange(num_layers)[:, None]
    return np.bincount(ids[is_known], minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def rank_loads(loads: np.ndarray, owner: np.ndarray, ranks: int) -> np.ndarray:
    """Load [L, R] of each rank: the sum of the loads [L, E] of its experts, layer by layer."""
    layers = len(loads)
    slots = owner + ranks * np.arange(layers)[:, None]
    totals = np.bincount(slots.ravel(), weights=loads.ravel(), minlength=layers * ranks)
    return totals.reshape(layers, ranks)


def compute_stragglers(loads: np.ndarray) -> np.ndarray:
    """Straggler factor [...] of loads [..., R]: the largest load over the mean; 1 without any load, since no
    rank waits."""
    mean = loads.mean(axis=-1)
    return np.where(mean > 0, loads.max(axis=-1) / np.where(mean > 0, mean, 1), 1.0)


def nominal_ranks(num_experts: int, max_ranks: int = NOMINAL_RANKS) -> int:
    """The largest number of ranks up to ``max_ranks`` that can keep equally many experts each."""
    return max(ranks for ranks in range(1, max_ranks + 1) if num_experts % ranks == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imbalance:
    """Imbalance of loads under a placement. Factors are max over mean; 1 is even."""

    ranks: int
    straggler: float  # of all layers together: the sum of their largest rank loads over that of their means
    worst_straggler: float  # of the worst layer
    capacity: float  # of single experts, in the worst layer: the capacity factor that drops no token

    @property
    def metrics(self) -> dict[str, float]:
        """``routing/straggler`` is under ``routing/straggler_ranks`` expert ranks."""
        return {
            "routing/straggler": self.straggler,
            "routing/straggler_worst": self.worst_straggler,
            "routing/straggler_ranks": float(self.ranks),
            "routing/capacity_factor": self.capacity,
        }


def measure_imbalance(loads: np.ndarray, owner: np.ndarray, ranks: int) -> Imbalance:
    """Imbalance of loads [L, E] where ``owner`` [L, E] says which of the ``ranks`` keeps an expert."""
    loads_by_rank = rank_loads(loads, owner, ranks)
    factors = compute_stragglers(loads_by_rank)
    mean_load = loads_by_rank.mean(axis=-1).sum()
    return Imbalance(
        ranks=ranks,
        straggler=float(loads_by_rank.max(axis=-1).sum() / mean_load) if mean_load > 0 else 1.0,
        worst_straggler=float(factors.max()),
        capacity=float(compute_stragglers(loads).max()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """Max over mean load of expert ranks. ``mean`` prices time, ``high`` (95 %) sizes buffers."""

    mean: float
    high: float


@lru_cache(maxsize=256)
def expected_straggler(num_experts: int, ranks: int) -> Straggler:
    """Expected straggler of ``ranks`` that keep equally many of ``num_experts`` each, in their order, for
    lognormal popularity of experts; a placement by load (``parallel.placement``) does better."""
    if ranks == 1:
        return Straggler(mean=1.0, high=1.0)
    rng = np.random.default_rng(0)
    popularity = np.exp(SIGMA * rng.standard_normal((DRAWS, num_experts)))
    factors = compute_stragglers(popularity.reshape(DRAWS, ranks, -1).sum(axis=-1))
    return Straggler(mean=float(factors.mean()), high=float(np.quantile(factors, 0.95)))


@lru_cache(maxsize=256)
def distinct_ranks(num_experts: int, top_k: int, ranks: int) -> float:
    """Mean number of ``ranks`` that keep the ``top_k`` experts of a token, if all sets of experts are equally
    likely; a row travels once to each of them."""
    experts_per_rank, miss_chance = num_experts // ranks, 1.0
    for num_drawn in range(top_k):  # the chance that a given rank has none of them
        miss_chance *= max(0.0, num_experts - experts_per_rank - num_drawn) / (num_experts - num_drawn)
    return ranks * (1.0 - miss_chance)
