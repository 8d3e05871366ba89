"""Which rank keeps which experts, from measured loads: pure functions, in numpy alone.

A placement is ``owner`` [L, E]: the rank that keeps an expert. Every rank keeps equally many in every layer,
so that memory and shapes are the same everywhere. The aim is the smallest largest load of a rank, layer by
layer: multiway partition with equal cardinality. Longest processing time first (Graham 1969, the heaviest
expert to the lightest rank that has room), then swaps of two experts while one lowers the largest load.

L MoE layers, E experts, R ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ostinato.inputs import parse_json
from ostinato.parallel.shares import Placement
from ostinato.run import atomic_write, to_json


def place_contiguously(layers: int, experts: int, ranks: int) -> np.ndarray:
    """Owner [L, E] with the first E / R experts on rank 0, and so on. Raises ValueError where R does not
    divide E."""
    return np.tile(np.repeat(np.arange(ranks), _divide_experts(experts, ranks)), (layers, 1))


def place_by_load(loads: np.ndarray, ranks: int, *, nodes: int = 1) -> np.ndarray:
    """Owner [L, E] that spreads loads [L, E] over the ranks as evenly as the search finds.

    The ranks are grouped into ``nodes`` groups of equal size; loads are spread over nodes first, since links
    between nodes are the slower ones, and then over the ranks of each. Raises ValueError where nodes do not
    divide the ranks, or ranks the experts.
    """
    if ranks % nodes:
        raise ValueError(f"{ranks} expert ranks on {nodes} nodes do not come out even; use a divisor")
    experts_per_rank = _divide_experts(loads.shape[1], ranks)
    return np.stack(
        [_place_layer(layer.astype(np.float64), ranks, nodes, experts_per_rank) for layer in loads]
    )


def _place_layer(loads: np.ndarray, ranks: int, nodes: int, experts_per_rank: int) -> np.ndarray:
    """Owner [E] of one layer of loads [E], over nodes first."""
    if nodes == 1:
        return _apply_swaps(loads, _assign_greedily(loads, ranks, experts_per_rank), ranks)
    node_of_expert, ranks_per_node = _place_layer(loads, nodes, 1, len(loads) // nodes), ranks // nodes
    owner = np.empty_like(node_of_expert)
    for node in range(nodes):
        experts = np.flatnonzero(node_of_expert == node)
        owner[experts] = node * ranks_per_node + _place_layer(
            loads[experts], ranks_per_node, 1, experts_per_rank
        )
    return owner


def _assign_greedily(loads: np.ndarray, ranks: int, experts_per_rank: int) -> np.ndarray:
    """Longest processing time first, with room for ``experts_per_rank`` experts on a rank."""
    owner, free_slots = np.empty(len(loads), np.int64), [experts_per_rank] * ranks
    rank_heap = [(0.0, rank) for rank in range(ranks)]
    for expert in np.argsort(-loads, kind="stable").tolist():
        load, rank = heapq.heappop(rank_heap)
        owner[expert] = rank
        free_slots[rank] -= 1
        if free_slots[rank]:  # a rank without room is left out
            heapq.heappush(rank_heap, (load + float(loads[expert]), rank))
    return owner


def _apply_swaps(loads: np.ndarray, owner: np.ndarray, ranks: int) -> np.ndarray:
    """A copy of ``owner`` after all swaps of ``find_swaps``."""
    owner = owner.copy()
    for outgoing, incoming in find_swaps(loads, owner, ranks):
        owner[outgoing], owner[incoming] = owner[incoming], owner[outgoing]
    return owner


def find_swaps(loads: np.ndarray, owner: np.ndarray, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of experts that change places, one after another, in a layer of loads [E] and owner [E].

    A swap is between the rank that has the largest load at that time and another; it is the one after which
    the larger load of the two ranks is smallest. The search ends, since the loads of ranks, in descending
    order, get lexicographically smaller with every swap.
    """
    loads, owner = loads.astype(np.float64), owner.copy()
    totals = np.bincount(owner, weights=loads, minlength=ranks)
    tolerance = 1e-9 * totals.max(initial=0)  # rounding is no improvement
    while True:
        heaviest_rank = int(totals.argmax())
        local_experts, remote_experts = (
            np.flatnonzero(owner == heaviest_rank),
            np.flatnonzero(owner != heaviest_rank),
        )
        if not len(remote_experts):
            return
        moved_load = loads[local_experts, None] - loads[remote_experts]
        larger_total = np.maximum(
            totals[heaviest_rank] - moved_load, totals[owner[remote_experts]] + moved_load
        )
        best_pair = np.unravel_index(larger_total.argmin(), larger_total.shape)
        if larger_total[best_pair] >= totals[heaviest_rank] - tolerance:
            return
        outgoing, incoming = int(local_experts[best_pair[0]]), int(remote_experts[best_pair[1]])
        partner = int(owner[incoming])
        totals[heaviest_rank] -= moved_load[best_pair]
        totals[partner] += moved_load[best_pair]
        owner[outgoing], owner[incoming] = partner, heaviest_rank
        yield outgoing, incoming


def placed_experts(owner: np.ndarray, ranks: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The experts that each rank keeps, by MoE layer and rank, ascending: what ``shares_of`` takes."""
    return tuple(
        tuple(tuple(np.flatnonzero(layer == rank).tolist()) for rank in range(ranks)) for layer in owner
    )


def owner_of(placement: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """Owner [L, E] from the experts of each layer and rank: the inverse of ``placed_experts``."""
    owner = np.empty((len(placement), sum(map(len, placement[0]))), np.int64)
    for layer, ranks in zip(owner, placement, strict=True):
        for rank, experts in enumerate(ranks):
            layer[list(experts)] = rank
    return owner


def number_slots(owner: np.ndarray) -> np.ndarray:
    """Position [L, E] int64 of every expert in the list of all experts, ordered by rank and then by index."""
    experts_by_rank = np.argsort(owner, axis=1, kind="stable")
    places = np.empty_like(experts_by_rank)
    np.put_along_axis(places, experts_by_rank, np.arange(owner.shape[1])[None], axis=1)
    return places


def _divide_experts(experts: int, ranks: int) -> int:
    """Experts per rank. Raises ValueError where they do not come out even."""
    if experts % ranks:
        raise ValueError(f"{experts} experts on {ranks} ranks do not come out even; use a divisor")
    return experts // ranks


def write_placement(path: Path, placement: Placement) -> None:
    ranks = len(placement[0])
    atomic_write(path, (to_json({"ranks": ranks, "experts": placement}) + "\n").encode())


def read_placement(path: Path, ranks: int) -> Placement:
    """The placement that ``write_placement`` wrote. Raises ValueError for a missing or other file, and for
    another number of ranks."""
    try:
        content = parse_json(path.expanduser().read_text())
        num_written_ranks, experts = int(content["ranks"]), content["experts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"parallel.placement is {str(path)!r}, which is no placement ({error}); "
            "make one with ostinato place"
        ) from None
    if num_written_ranks != ranks:
        raise ValueError(
            f"parallel.placement is {str(path)!r}, for {num_written_ranks} expert ranks, and the layout has "
            f"{ranks}; make one with ostinato place --ranks {ranks}"
        )
    return tuple(tuple(tuple(ids) for ids in layer) for layer in experts)
