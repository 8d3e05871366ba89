"""The engine's dealings with its drafter: when it is asked, what it is told, what the engine can afford.

Speculation must never cost more than it saves, so it is asked only while it pays. After every pass for
which it was asked the account is made up: what plain decoding would have taken for the same tokens, less what
the pass takes by the cost table, less the time spent on drafting. When that is negative it is left alone for
1, 3, 7, ... 63 passes; meanwhile it is not even told what was sampled, and catches up when asked again.
"""

from __future__ import annotations

import time

import numpy as np

from ostinato.engine.cache import BLOCK, KVCache
from ostinato.engine.cost import CostTable
from ostinato.engine.passes import NO_DRAFTS
from ostinato.engine.seats import NO_HANDLE, Seats, Sequence
from ostinato.protocols import Drafter
from ostinato.types import Drafts, Emitted, Running

IDLE = 0.03  # of a pass: what rows may add to it and still count as idle
MAX_ROWS = 512  # draft tokens in one pass
MAX_DEPTH = 32  # draft tokens of one sequence, about: it bounds the table of costs that is handed over
TREES_UP_TO = 8  # sequences: beyond, a chain with the noise in hand gets nearly all of a tree's gain
LONGEST_NAP = 6  # passes left out are 2 ** level - 1


class Speculation:
    """What is drafted for the sequences in ``seats``."""

    def __init__(self, drafter: Drafter, cost: CostTable, seats: Seats, leaves: int) -> None:
        self._drafter, self._cost, self._seats, self._leaves = drafter, cost, seats, leaves
        self._level, self._nap = 0, 0
        self._profit = 0.0  # seconds per pass, lately
        self.awake = False  # asked for the pass at hand
        self.spent = 0.0  # seconds of drafting for the pass at hand

    def new_policy(self) -> None:
        """What did not pay may do so from here on: look again soon."""
        self._level //= 2
        self._nap = min(self._nap, 2**self._level - 1)

    def open(self, sequence: Sequence) -> None:
        """It is about to be seated."""
        if sequence.handle == NO_HANDLE:
            sequence.handle = self._drafter.open(sequence.request)
            sequence.told = sequence.prompt_len

    def propose(self, chosen: np.ndarray, counts: np.ndarray, waiting: bool) -> Drafts:
        """Drafts for a pass of ``counts`` rows of known text of the ``chosen`` seats, aligned with them."""
        self.awake, self.spent = self._nap == 0, 0.0
        if not self.awake:
            self._nap -= 1
            return NO_DRAFTS
        start = time.perf_counter()
        seats = self._seats
        decoding = counts == seats.length[chosen] - seats.computed[chosen]
        ready = chosen[decoding]
        self.tell(ready)
        # a pass samples one token more than it drafts, so the last one allowed need not be drafted
        room = np.minimum(seats.limit[ready] - seats.length[ready] - 1, MAX_DEPTH)
        leaves = self._leaves if len(ready) <= TREES_UP_TO else 1
        most = int(min(room.sum() * leaves, MAX_ROWS))
        drafts = NO_DRAFTS
        if most > 0:
            extra, known = np.arange(most + 1), int(counts.sum())
            attended, longer = float(seats.length[chosen] @ counts), float(seats.length[ready].mean())
            seconds = self._cost.seconds(known + extra, attended + extra * longer)
            drafts = self._drafter.propose(
                Running(
                    handles=seats.handle[ready],
                    room=room.astype(np.int32),
                    weights=self._weights(ready, waiting, seconds),
                    seconds=seconds,
                    leaves=leaves,
                )
            )
        self.spent = time.perf_counter() - start
        if len(drafts.tokens) == 0:
            return NO_DRAFTS
        aligned = np.zeros(len(chosen), np.int32)
        aligned[decoding] = drafts.counts
        return Drafts(counts=aligned, tokens=drafts.tokens, parents=drafts.parents)

    def judge(self, drafted: int, without_s: float, with_s: float) -> None:
        """Account of a pass for which it was asked: predicted seconds of plain decoding for the same tokens,
        and of the pass. Decides how long it is left alone."""
        gain = without_s - with_s if drafted else 0.0
        self._profit = (self._profit + gain - self.spent) / 2
        if self._profit > 0:
            self._level //= 2
        else:
            self._level = min(self._level + 1, LONGEST_NAP)
        self._nap = 2**self._level - 1

    def tell(self, seats: np.ndarray, ended: bool = False) -> None:
        """Show the drafter what has been sampled in ``seats`` since it was last told."""
        state = self._seats
        counts = state.length[seats] - state.told[seats]
        if not ended and not counts.any():
            return
        owner = np.repeat(np.arange(len(seats)), counts)
        row = seats[owner]
        place = state.told[row] + np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        state.told[seats] = state.length[seats]
        self._drafter.observe(
            Emitted(
                handles=state.handle[seats],
                counts=counts.astype(np.int32),
                tokens=state.text[row, place],
                probs=np.exp(state.logprobs[row, place]),
                edges=state.edges[row, place],
                ended=np.full(len(seats), ended),
            )
        )

    def close(self, sequences: list[Sequence]) -> None:
        """Nobody waits for these any more, and they have no seat."""
        handles = np.array([s.handle for s in sequences if s.handle != NO_HANDLE], np.int64)
        nothing, none = np.zeros(len(handles), np.int32), np.zeros(0, np.float32)
        if len(handles):
            self._drafter.observe(
                Emitted(
                    handles=handles,
                    counts=nothing,
                    tokens=np.zeros(0, np.int32),
                    probs=none,
                    edges=none,
                    ended=np.ones(len(handles), bool),
                )
            )

    def _weights(self, ready: np.ndarray, waiting: bool, seconds: np.ndarray) -> np.ndarray:
        """What a token of each is worth, 1 on the average.

        A token that is accepted saves its own row of a later pass, whoever gets it. The fixed part of a pass
        is saved only where passes become fewer: while others wait everybody's tokens do that alike, in the
        tail those of the sequence that ends last. So the fixed part goes to those predicted to be long.
        """
        state, S = self._seats, len(ready)
        expected = state.expected[ready]
        if waiting or S == 1 or not expected.any():
            return np.ones(S, np.float32)
        left = np.clip(expected, state.length[ready] + 1, state.limit[ready]) - state.length[ready]
        left[expected == 0] = np.median(left[expected > 0])
        last = np.exp((left - left.max()) / max(2.0, 0.25 * float(left.max())))
        row_s = (seconds[-1] - seconds[0]) / (len(seconds) - 1)
        fixed = max(0.0, 1.0 - row_s * S / seconds[0])
        return (fixed * last * (S / last.sum()) + 1.0 - fixed).astype(np.float32)


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
