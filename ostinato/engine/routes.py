"""The experts of every KV slot: the routes of a token are stored in the slot of its keys and values.

They are shared with a block, copied with it, evicted with it, and forgotten when a policy is published: their
key is that of the prefix tree (policy, prefix tokens). Tokens that are computed again are recorded again.
"""

from __future__ import annotations

import numpy as np

from ostinato.engine.cache import BLOCK
from ostinato.engine.sequences import Sequence
from ostinato.model.config import MoEConfig
from ostinato.routes import route_dtype
from ostinato.types import NO_EXPERT


class RouteStore:
    """Routes of all slots: [blocks, BLOCK, layers, K] of the narrowest type that holds the ids."""

    def __init__(self, blocks: int, moe: MoEConfig) -> None:
        shape = (blocks, BLOCK, len(moe.layers), moe.top_k)
        self._blocks = np.full(shape, NO_EXPERT, route_dtype(moe.num_experts))
        self._slots = self._blocks.reshape(-1, *shape[2:])

    def write(self, slots: np.ndarray, routes: np.ndarray) -> None:
        """Store routes [W, layers, K] of the rows whose keys go to ``slots`` [W]."""
        self._slots[slots] = routes

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copy the routes of whole blocks."""
        self._blocks[targets] = self._blocks[sources]

    def read_routes(self, sequence: Sequence, ran: int, length: int = 0) -> np.ndarray:
        """Return routes [n, layers, K] from ``routes_from`` on, up to ``length`` or, if that is less, to the
        ``ran`` tokens that have run; tokens that have not run have NO_EXPERT. Rows that a preempted sequence
        had are returned as they were then."""
        routes_from = sequence.request.routes_from
        first_block, ran = routes_from // BLOCK, max(routes_from, ran)
        blocks = self._blocks[sequence.blocks[first_block : -(-ran // BLOCK)]]
        routes = np.full(
            (max(length, ran) - routes_from, *self._slots.shape[1:]), NO_EXPERT, self._slots.dtype
        )
        routes[: ran - routes_from] = blocks.reshape(-1, *routes.shape[1:])[
            routes_from - first_block * BLOCK :
        ][: ran - routes_from]
        old_routes = sequence.routes
        return routes if old_routes is None else np.concatenate([old_routes, routes[len(old_routes) :]])
