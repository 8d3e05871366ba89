"""Which rank keeps which experts, from measured loads. numpy only, and a pure function of its arguments.

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


def contiguous(layers: int, experts: int, ranks: int) -> np.ndarray:
    """[L, E]: the first E / R experts to rank 0, and so on; ValueError where they do not come out even."""
    return np.tile(np.repeat(np.arange(ranks), _each(experts, ranks)), (layers, 1))


def place(loads: np.ndarray, ranks: int, *, nodes: int = 1) -> np.ndarray:
    """[L, E]: a placement that spreads loads [L, E] as evenly as it finds.

    With ``nodes``, ranks are grouped into so many of equal size; loads are spread over nodes first, since
    links between nodes are the slower ones, and then over the ranks of each.
    """
    if ranks % nodes:
        raise ValueError(f"{ranks} expert ranks on {nodes} nodes do not come out even; use a divisor")
    each = _each(loads.shape[1], ranks)
    return np.stack([_place_layer(layer.astype(np.float64), ranks, nodes, each) for layer in loads])


def _place_layer(loads: np.ndarray, ranks: int, nodes: int, each: int) -> np.ndarray:
    if nodes == 1:
        return _improved(loads, _greedy(loads, ranks, each), ranks)
    node, per_node = _place_layer(loads, nodes, 1, len(loads) // nodes), ranks // nodes
    owner = np.empty_like(node)
    for one in range(nodes):
        here = np.flatnonzero(node == one)
        owner[here] = one * per_node + _place_layer(loads[here], per_node, 1, each)
    return owner


def _greedy(loads: np.ndarray, ranks: int, each: int) -> np.ndarray:
    """Longest processing time first, with room for ``each`` experts on a rank."""
    owner, room = np.empty(len(loads), np.int64), [each] * ranks
    lightest = [(0.0, rank) for rank in range(ranks)]
    for expert in np.argsort(-loads, kind="stable").tolist():
        load, rank = heapq.heappop(lightest)
        owner[expert] = rank
        room[rank] -= 1
        if room[rank]:  # a rank without room is left out
            heapq.heappush(lightest, (load + float(loads[expert]), rank))
    return owner


def _improved(loads: np.ndarray, owner: np.ndarray, ranks: int) -> np.ndarray:
    owner = owner.copy()
    for one, other in swaps(loads, owner, ranks):
        owner[one], owner[other] = owner[other], owner[one]
    return owner


def swaps(loads: np.ndarray, owner: np.ndarray, ranks: int) -> Iterator[tuple[int, int]]:
    """Pairs of experts that change places, one after another, in a layer of loads [E] and owner [E].

    Each takes load from the rank that then has most, as much as leaves the larger of the two ranks smallest.
    It ends: the loads of ranks, in descending order, get lexicographically smaller with every swap.
    """
    loads, owner = loads.astype(np.float64), owner.copy()
    totals = np.bincount(owner, weights=loads, minlength=ranks)
    least = 1e-9 * totals.max(initial=0)  # rounding is no improvement
    while True:
        top = int(totals.argmax())
        here, there = np.flatnonzero(owner == top), np.flatnonzero(owner != top)
        if not len(there):
            return
        moved = loads[here, None] - loads[there]
        larger = np.maximum(totals[top] - moved, totals[owner[there]] + moved)
        best = np.unravel_index(larger.argmin(), larger.shape)
        if larger[best] >= totals[top] - least:
            return
        one, other = int(here[best[0]]), int(there[best[1]])
        rank = int(owner[other])
        totals[top] -= moved[best]
        totals[rank] += moved[best]
        owner[one], owner[other] = rank, top
        yield one, other


def placed_experts(owner: np.ndarray, ranks: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """By MoE layer and rank the experts that it keeps, ascending: what ``shares_of`` takes."""
    return tuple(
        tuple(tuple(np.flatnonzero(layer == rank).tolist()) for rank in range(ranks)) for layer in owner
    )


def owner_of(placement: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """[L, E]: the inverse of ``placed_experts``."""
    owner = np.empty((len(placement), sum(map(len, placement[0]))), np.int64)
    for layer, ranks in zip(owner, placement, strict=True):
        for rank, experts in enumerate(ranks):
            layer[list(experts)] = rank
    return owner


def slots(owner: np.ndarray) -> np.ndarray:
    """[L, E] int64: the place of every expert when all that ranks keep stands in a row, rank after rank."""
    order = np.argsort(owner, axis=1, kind="stable")
    found = np.empty_like(order)
    np.put_along_axis(found, order, np.arange(owner.shape[1])[None], axis=1)
    return found


def _each(experts: int, ranks: int) -> int:
    if experts % ranks:
        raise ValueError(f"{experts} experts on {ranks} ranks do not come out even; use a divisor")
    return experts // ranks


def write_placement(path: Path, placement: Placement) -> None:
    ranks = len(placement[0])
    atomic_write(path, (to_json({"ranks": ranks, "experts": placement}) + "\n").encode())


def read_placement(path: Path, ranks: int) -> Placement:
    """What ``write_placement`` wrote. Raises ValueError where it is no such file, or for other ranks."""
    try:
        found = parse_json(path.expanduser().read_text())
        written, experts = int(found["ranks"]), found["experts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"parallel.placement is {str(path)!r}, which is no placement ({error}); "
            "make one with ostinato place"
        ) from None
    if written != ranks:
        raise ValueError(
            f"parallel.placement is {str(path)!r}, for {written} expert ranks, and the layout has {ranks}; "
            f"make one with ostinato place --ranks {ranks}"
        )
    return tuple(tuple(tuple(kept) for kept in layer) for layer in experts)
