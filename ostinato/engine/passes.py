"""One pass over the model: which rows it has, where their keys and values go, what they see.

A sequence that decodes has 1 + k rows: its last token and the k nodes of its draft. A chain continues the
sequence's own blocks. A tree is run as its leaves: the first leaf (the main path) in the sequence's own
blocks, every other leaf in blocks of its own from the block on in which drafts begin. A node is one row,
whatever the number of leaves below it; its key and value are written for each of them. So a row of a tree
sees exactly what it would see in plain decoding, position by position, and no attention kernel has to know of
trees; the blocks of the winning leaf become the sequence's, and nothing is moved.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ostinato.algo.speculate import depths, leaves
from ostinato.engine.cache import BLOCK, KVCache, OutOfBlocks
from ostinato.engine.seats import Seats
from ostinato.types import Drafts


@dataclass(slots=True, eq=False)
class Leaf:
    """A further leaf of a tree: ``blocks`` stand in for the sequence's own from index ``first`` on."""

    owner: int  # which of the sequences of the pass
    path: list[int]  # nodes from the root
    main: frozenset[int]  # nodes of the main path
    first: int
    blocks: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """S sequences, T rows; rows of a sequence are consecutive, row 0 before its draft."""

    seats: np.ndarray  # [S]
    counts: np.ndarray  # [S] rows
    firsts: np.ndarray  # [S] first row
    owner: np.ndarray  # [T] int32: which sequence
    tokens: np.ndarray  # [T] int64
    positions: np.ndarray  # [T] int64
    tables: np.ndarray  # [S + further leaves, blocks] int32
    table: np.ndarray  # [T] int32: row of ``tables``
    write: np.ndarray | None  # [W] int32: the row that is written to slot w; None: row w
    slots: np.ndarray  # [W] int64
    further: list[Leaf]

    @property
    def attended(self) -> int:
        """Positions that the rows see, in all."""
        return int(self.positions.sum()) + len(self.positions)


NO_DRAFTS = Drafts(counts=np.zeros(0, np.int32), tokens=np.zeros(0, np.int32), parents=np.zeros(0, np.int32))


def draft_counts(drafts: Drafts, sequences: int) -> np.ndarray:
    """[S] int64, also where nothing is drafted."""
    return drafts.counts.astype(np.int64) if len(drafts.counts) else np.zeros(sequences, np.int64)


def are_chains(drafts: Drafts) -> bool:
    """Whether every node's parent is the node before it."""
    n = len(drafts.tokens)
    firsts = np.repeat(np.cumsum(drafts.counts) - drafts.counts, drafts.counts)
    return bool((drafts.parents == np.arange(n) - firsts - 1).all())


def plan_pass(seats: Seats, chosen: np.ndarray, counts: np.ndarray, drafts: Drafts, cache: KVCache) -> Pass:
    """The pass of ``chosen`` seats, of which ``counts`` rows of known text and then ``drafts`` are run.

    ``drafts.counts`` is aligned with ``chosen``, or empty where nothing is drafted. The blocks of the main
    paths are there already, those of further leaves come from ``cache``.
    """
    rows = counts + draft_counts(drafts, len(chosen))
    ends = np.cumsum(rows)
    firsts, T = ends - rows, int(ends[-1])
    owner = np.repeat(np.arange(len(chosen), dtype=np.int32), rows)
    offset = np.arange(T) - firsts[owner]
    positions = seats.computed[chosen][owner] + offset
    tokens = np.empty(T, np.int64)
    if len(drafts.tokens):
        known = offset < counts[owner]
        tokens[known] = seats.text[chosen[owner[known]], positions[known]]
        tokens[~known] = drafts.tokens
    else:
        tokens[:] = seats.text[chosen[owner], positions]
    further: list[Leaf] = []
    if len(drafts.tokens) and not are_chains(drafts):
        further = _grow_trees(seats, chosen, drafts, firsts + counts, positions, cache)
    width = int(seats.num_blocks[chosen].max(initial=1))
    tables = seats.tables[chosen, : max([width, *(leaf.first + len(leaf.blocks) for leaf in further)])]
    table = owner
    write: np.ndarray | None = None
    slots = tables[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    if further:
        tables, table, write, slots = _branch(tables, owner, positions, slots, further, firsts, counts)
    return Pass(
        chosen, rows, firsts, owner, tokens, positions, tables, table.astype(np.int32), write, slots, further
    )


def _grow_trees(
    seats: Seats,
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
                for leaf in further:
                    cache.release(leaf.blocks)
                raise
    return further


def _branch(
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
