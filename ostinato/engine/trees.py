"""Drafts that are trees (RhymeRL, arXiv 2508.18588): how their leaves are run, verified and settled.

A tree is run as its leaves: the first leaf (the main path) in the sequence's own blocks, every other leaf in
blocks of its own from the block on in which drafts begin. A node is one row, whatever the number of leaves
below it; its key and value are written for each of them. So a row of a tree sees exactly what it would see in
plain decoding, position by position, and no attention kernel has to know of trees; the blocks of the winning
leaf become the sequence's, and nothing is moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.algo.speculate import accepted_path, depths, leaves
from ostinato.engine.cache import BLOCK, KVCache, OutOfBlocks
from ostinato.engine.sequences import SequenceTable
from ostinato.types import Drafts


@dataclass(slots=True, eq=False)
class Leaf:
    """A further leaf of a tree: ``blocks`` stand in for the sequence's own from index ``first`` on."""

    owner: int  # which of the sequences of the pass
    path: list[int]  # nodes from the root
    main: frozenset[int]  # nodes of the main path
    first: int
    blocks: list[int]


def are_chains(drafts: Drafts) -> bool:
    """Whether every node's parent is the node before it."""
    n = len(drafts.tokens)
    firsts = np.repeat(np.cumsum(drafts.counts) - drafts.counts, drafts.counts)
    return bool((drafts.parents == np.arange(n) - firsts - 1).all())


def grow_trees(
    seats: SequenceTable,
    chosen: np.ndarray,
    drafts: Drafts,
    roots: np.ndarray,
    positions: np.ndarray,
    cache: KVCache,
) -> list[Leaf]:
    """Give every further leaf blocks of its own, and set the positions of the nodes to their depths."""
    further: list[Leaf] = []
    start = 0
    for s, count in enumerate(drafts.counts.tolist()):
        parents = drafts.parents[start : start + count]
        start += count
        if count == 0:
            continue
        length = int(seats.length[chosen[s]])
        positions[roots[s] : roots[s] + count] = length + depths(parents)
        main, *others = leaves(parents)
        for path in others:
            first = length // BLOCK
            blocks: list[int] = []
            further.append(Leaf(s, path, frozenset(main), first, blocks))
            try:
                for _ in range((length + len(path) - 1) // BLOCK + 1 - first):
                    blocks.append(cache.allocate())
            except OutOfBlocks:
                release_trees(further, cache)
                raise
    return further


def branch(
    tables: np.ndarray,
    owner: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    further: list[Leaf],
    firsts: np.ndarray,
    counts: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Tables, table of each row, rows to write and their slots, with the further leaves."""
    S, on_main = len(tables), np.ones(len(owner), bool)
    tables = np.concatenate([tables, tables[[leaf.owner for leaf in further]]])
    table = owner.copy()
    writes: list[int] = []
    places: list[int] = []
    for number, leaf in enumerate(further):
        row = S + number
        tables[row, leaf.first : leaf.first + len(leaf.blocks)] = leaf.blocks
        root = int(firsts[leaf.owner] + counts[leaf.owner])
        for r in (root + node for node in leaf.path if node not in leaf.main):
            if on_main[r]:  # not seen below another leaf
                on_main[r] = False
                table[r] = row
        # known text of this pass too, where it stands in the block in which the draft begins
        rows = [*range(int(firsts[leaf.owner]), root), *(root + node for node in leaf.path)]
        for r in rows:
            place = int(positions[r])
            if place // BLOCK >= leaf.first:
                writes.append(r)
                places.append(int(tables[row, place // BLOCK]) * BLOCK + place % BLOCK)
    own = np.flatnonzero(on_main)
    write = np.concatenate([own, np.array(writes, np.int64)]).astype(np.int32)
    return tables, table, write, np.concatenate([slots[own], np.array(places, np.int64)])


def copied_blocks(further: Sequence[Leaf], seats: SequenceTable, chosen: np.ndarray) -> list[tuple[int, int]]:
    """(source, target) of the blocks in which drafts begin: each leaf has its own copy of the text there."""
    return [
        (seats.at(seat).blocks[leaf.first], leaf.blocks[0])
        for leaf in further
        if seats.length[seat := int(chosen[leaf.owner])] % BLOCK
    ]


def tree_paths(
    drafts: Drafts, nodes: np.ndarray, starts: np.ndarray, drawn: np.ndarray
) -> dict[int, list[int]]:
    """Accepted nodes of every sequence that has a draft."""
    paths, first = {}, 0
    for r, (count, start) in enumerate(zip(nodes.tolist(), starts.tolist(), strict=True)):
        some = slice(first, first + count)
        first += count
        if count:
            paths[r] = accepted_path(
                drafts.tokens[some], drafts.parents[some], drawn[start : start + count + 1]
            )
    return paths


def settle_trees(
    further: Sequence[Leaf],
    seats: SequenceTable,
    chosen: np.ndarray,
    ready: np.ndarray,
    paths: Mapping[int, list[int]],
    cache: KVCache,
) -> None:
    """The winning leaf's blocks become the sequence's; those of the others are free again."""
    place = {int(s): r for r, s in enumerate(ready)}
    settled: set[int] = set()
    for leaf in further:
        path, seat = paths.get(place[leaf.owner], []), int(chosen[leaf.owner])
        wins = leaf.owner not in settled and bool(path) and path == leaf.path[: len(path)]
        if wins and not leaf.main.issuperset(path):
            settled.add(leaf.owner)
            sequence = seats.at(seat)
            end = leaf.first + len(leaf.blocks)
            own = sequence.blocks[leaf.first : end]
            sequence.blocks[leaf.first : end], leaf.blocks = leaf.blocks, own
            seats.num_blocks[seat] = leaf.first
            seats.show_blocks(seat)
    release_trees(further, cache)


def release_trees(further: Sequence[Leaf], cache: KVCache) -> None:
    """Give back the blocks of leaves."""
    for leaf in further:
        cache.release(leaf.blocks)
        leaf.blocks = []
