"""Experts that tokens choose together, on one rank: fewer copies travel, and no rank gets more to do.

A row travels once to every rank that keeps one of its experts (``parallel.experts``). So of all placements
that are about as even, the best is the one where the experts of a token are on few ranks. numpy only.

L MoE layers, E experts, K experts per token.
"""

from __future__ import annotations

import numpy as np

from ostinato.types import NO_EXPERT

SLACK = 0.02  # of the mean load of a rank, for the sake of fewer copies


def chosen_together(routes: np.ndarray, num_experts: int) -> np.ndarray:
    """[L, E, E] int64, symmetric, zeros on the diagonal: how many tokens of routes [T, L, K] chose both."""
    ids = routes[routes[:, 0, 0] != NO_EXPERT].astype(np.int64)
    layers, top_k = routes.shape[1:]
    counts = np.zeros((layers, num_experts, num_experts), np.int64)
    for layer in range(layers):
        for first in range(top_k):
            for second in range(first + 1, top_k):
                both = ids[:, layer, first] * num_experts + ids[:, layer, second]
                counts[layer] += np.bincount(both, minlength=num_experts**2).reshape(num_experts, -1)
    return counts + counts.transpose(0, 2, 1)


def gathered(
    owner: np.ndarray, loads: np.ndarray, pairs: np.ndarray, ranks: int, *, slack: float = SLACK
) -> np.ndarray:
    """[L, E]: ``owner`` after swaps of two experts that bring more of the ``pairs`` [L, E, E] onto one rank.

    No rank gets more than the largest has now or, where that is more, 1 + ``slack`` times the mean of loads
    [L, E]. It ends: the number of pairs that share a rank grows with every swap.
    """
    return np.stack(
        [
            _gathered(*layer, ranks, slack)
            for layer in zip(owner, loads.astype(np.float64), pairs.astype(np.float64), strict=True)
        ]
    )


def _gathered(
    owner: np.ndarray, loads: np.ndarray, pairs: np.ndarray, ranks: int, slack: float
) -> np.ndarray:
    owner, at = owner.copy(), np.arange(len(owner))
    totals = np.bincount(owner, weights=loads, minlength=ranks)
    limit = max(totals.max(), (1 + slack) * totals.mean()) * (1 + 1e-12)
    while True:
        shared = np.stack([pairs[:, owner == rank].sum(axis=1) for rank in range(ranks)], axis=1)
        there, here = shared[:, owner], shared[at, owner]  # of expert a on the rank of b; of a where it is
        gain = there + there.T - 2 * pairs - here[:, None] - here
        lighter = loads[:, None] - loads  # what the rank of a loses to that of b
        fits = (totals[owner][:, None] - lighter <= limit) & (totals[owner] + lighter <= limit)
        gain[~fits | (owner[:, None] == owner)] = 0
        one, other = np.unravel_index(gain.argmax(), gain.shape)
        if gain[one, other] <= 0:
            return owner
        totals[owner[one]] -= lighter[one, other]
        totals[owner[other]] += lighter[one, other]
        owner[one], owner[other] = owner[other], owner[one]


__all__ = ["SLACK", "chosen_together", "gathered"]
