"""What the engine tells its drafter before a pass, and what it can afford of the answer."""

from __future__ import annotations

import numpy as np

from ostinato.engine.cache import BLOCK, KVCache
from ostinato.engine.cost import CostTable
from ostinato.engine.passes import NO_DRAFTS
from ostinato.engine.seats import Seats
from ostinato.protocols import Drafter
from ostinato.types import Drafts, Running

IDLE = 0.03  # of a pass: what rows may add to it and still count as idle
MAX_ROWS = 512  # draft tokens in one pass
TREES_UP_TO = 8  # sequences: beyond, a chain with the noise in hand gets nearly all of a tree's gain


def propose(
    drafter: Drafter,
    cost: CostTable,
    seats: Seats,
    chosen: np.ndarray,
    counts: np.ndarray,
    *,
    leaves: int,
    waiting: bool,
) -> Drafts:
    """Drafts for a pass of ``counts`` rows of known text of the ``chosen`` seats, aligned with them."""
    decoding = counts == seats.length[chosen] - seats.computed[chosen]
    ready = chosen[decoding]
    # a pass samples one token more than it drafts, so the last one allowed need not be drafted
    room = np.minimum(seats.limit[ready] - seats.length[ready] - 1, MAX_ROWS)
    leaves = leaves if len(ready) <= TREES_UP_TO else 1
    most = int(min(room.sum() * leaves, MAX_ROWS))
    if most <= 0:
        return NO_DRAFTS
    extra, known = np.arange(most + 1), int(counts.sum())
    attended = float((seats.computed[chosen] + counts / 2) @ counts)
    drafts = drafter.propose(
        Running(
            handles=seats.handle[ready],
            room=room.astype(np.int32),
            weights=_weights(seats, ready, waiting),
            seconds=cost.seconds(known + extra, attended + extra * float(seats.length[ready].mean())),
            leaves=leaves,
        )
    )
    if len(drafts.tokens) == 0:
        return NO_DRAFTS
    aligned = np.zeros(len(chosen), np.int32)
    aligned[decoding] = drafts.counts
    return Drafts(counts=aligned, tokens=drafts.tokens, parents=drafts.parents)


def _weights(seats: Seats, ready: np.ndarray, waiting: bool) -> np.ndarray:
    """What a token of each is worth. While others wait all count alike; in the tail the sequence that ends
    last decides how long everybody waits, so a token counts by what is predicted to be left."""
    expected = seats.expected[ready]
    if waiting or not expected.any():
        return np.ones(len(ready), np.float32)
    left = np.maximum(1.0, expected - seats.length[ready])
    left[expected == 0] = np.median(left[expected > 0])
    return np.clip(left / left.mean(), 0.5, 2.0).astype(np.float32)


def afford(
    seats: Seats, cache: KVCache, chosen: np.ndarray, drafts: Drafts, leaves: int
) -> tuple[Drafts, int]:
    """Allocate the blocks of the main paths from what is free; nobody is preempted or forgotten for a guess.

    Returns the drafts of which there is room, and how many draft tokens there was none for. Blocks of further
    leaves are left free.
    """
    branches = (leaves - 1) * int((drafts.counts > 0).sum()) if leaves > 1 else 0
    longest = int(drafts.counts.max(initial=0)) // BLOCK + 2
    spare = cache.free - branches * longest
    want = (seats.length[chosen] + drafts.counts + BLOCK - 1) // BLOCK - seats.num_blocks[chosen]
    dropped = np.full(len(chosen), spare < 0) & (drafts.counts > 0)
    for s in np.flatnonzero((want > 0) & (drafts.counts > 0) & ~dropped).tolist():
        if want[s] > spare:
            dropped[s] = True
            continue
        spare -= int(want[s])
        seat = int(chosen[s])
        seats.at(seat).blocks.extend(cache.allocate() for _ in range(int(want[s])))
        seats.show_blocks(seat)
    if not dropped.any():
        return drafts, 0
    kept = np.repeat(~dropped, drafts.counts)
    counts = np.where(dropped, 0, drafts.counts).astype(np.int32)
    return Drafts(counts=counts, tokens=drafts.tokens[kept], parents=drafts.parents[kept]), int((~kept).sum())


def idle_rows(cost: CostTable, rows: int, attended: float, context: int) -> int:
    """How many more rows, each seeing ``context`` positions, leave the pass nearly as short as it is."""
    more = np.arange(1, 65)
    seconds = cost.seconds(rows + more, attended + more * context)
    return int((seconds <= (1 + IDLE) * float(cost.seconds(rows, attended))).sum())
