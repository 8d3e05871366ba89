"""The engine's use of its drafter: when it is called, what it observes, which drafts the engine can afford.

Speculation must never cost more than it saves, so the drafter is called only while it pays. After every pass
for which it was called the profit is computed: what plain decoding would have taken for the same progress,
less what the pass takes by the cost table, less the time spent on drafting. After a loss the drafter is
skipped for so many passes that the loss is no more than a two-hundredth of their time; meanwhile it does not
observe what was sampled either, and catches up when it is called again.
"""

from __future__ import annotations

import time

import numpy as np

from ostinato.engine.cache import BLOCK, KVCache
from ostinato.engine.cost import CostTable
from ostinato.engine.model_input import NO_DRAFTS, ModelInput
from ostinato.engine.postprocess import StepOutput
from ostinato.engine.sequences import ALWAYS, NO_HANDLE, Sequence, SequenceTable
from ostinato.protocols import Drafter
from ostinato.types import DraftQuery, Drafts, SampledTokens

MAX_ROWS = 512  # draft tokens in one pass
MAX_DEPTH = 32  # draft tokens of one sequence, about: it bounds the table of costs that is handed over
TRIALS = 0.005  # share of the time that may be lost on trying whether drafts pay
LONGEST_NAP = 1000  # passes
INTRODUCTION_S = 15e-6  # that a drafter takes to open a request, about
LEAST_FIXED = 0.2  # share of a pass that does not depend on its rows; below, even perfect drafts gain little
LAST = 1.5  # tokens: temperature of the softmax of tokens left that weights the sequences
STRICT = 0.5  # the same in the profit, where sequences that are last together must all advance


class Speculation:
    """What is drafted for the sequences in ``slots``."""

    def __init__(self, drafter: Drafter, cost: CostTable, table: SequenceTable) -> None:
        self._drafter, self._cost, self._table = drafter, cost, table
        self._met: set[str] = set()  # uids of prompts seen in requests
        self._returning = False  # whether the latest had been seen before
        self._nap = 0  # passes to come for which it is not called
        self._profit = 0.0  # seconds per pass, lately
        self._waiting = False  # others wait for a slot, so all tokens count alike
        self._fixed = 0.0  # share of a pass that does not depend on its rows
        self.awake = False  # called for the pass at hand
        self.spent = 0.0  # seconds of drafting for the pass at hand
        self._farewells = 0.0  # seconds of telling what ended, not yet in the account

    def begin(self, uids: set[str]) -> None:
        """Requests of these prompts begin. Once prompts recur there is history to draft from, so the profit
        measured without it is reset."""
        returning = not self._met.isdisjoint(uids)
        self._met |= uids
        if returning != self._returning:
            self._returning, self._nap, self._profit = returning, 0, 0.0

    def _open(self, slots: np.ndarray) -> None:
        """Open a handle for each sequence that the drafter does not know yet."""
        state = self._table
        for slot in slots[state.handle[slots] == NO_HANDLE].tolist():
            sequence = state.at(slot)
            sequence.handle = self._drafter.open(sequence.request)
            state.handle[slot], state.observed[slot] = sequence.handle, sequence.prompt_len

    def propose(self, chosen: np.ndarray, counts: np.ndarray, waiting: int) -> Drafts:
        """Drafts for a pass of ``counts`` rows of known text of the ``chosen`` slots, aligned with them;
        ``waiting`` others have no slot yet. Nothing is drafted for one with a constraint."""
        self.awake, self.spent = False, 0.0
        if self._nap:
            self._nap -= 1
            return NO_DRAFTS
        table = self._table
        free = table.banned_until[chosen] < ALWAYS
        decoding = np.flatnonzero(free & (counts == table.length[chosen] - table.computed[chosen]))
        self._waiting = waiting > 0
        if 2 * len(decoding) < min(len(chosen) + waiting, len(table.length)):
            return NO_DRAFTS  # the batch is filling: the pass of the many will not notice what a few gain now
        known, attended = int(counts.sum()), float(table.length[chosen] @ counts)
        # what a pass of half the rows would take shows how much of this one does not depend on them
        half_s, whole_s = self._cost.seconds(np.array([0.5, 1.0]) * known, np.array([0.5, 1.0]) * attended)
        self._fixed = min(max(2.0 * float(half_s / whole_s) - 1.0, 0.0), 1.0)
        worth_it = self._fixed >= LEAST_FIXED and self._worth_meeting(chosen[decoding], float(whole_s))
        if not worth_it:
            return NO_DRAFTS
        start = time.perf_counter()
        self.awake = True
        drafts = self._ask(chosen[decoding], known, attended)
        self.spent = time.perf_counter() - start
        if len(drafts.tokens) == 0:
            return NO_DRAFTS
        aligned = np.zeros(len(chosen), np.int32)
        aligned[decoding] = drafts.counts
        return Drafts(counts=aligned, tokens=drafts.tokens)

    def _worth_meeting(self, ready: np.ndarray, pass_s: float) -> bool:
        """Whether the best possible gain is much more than what opening the newcomers' handles costs."""
        newcomers = int((self._table.handle[ready] == NO_HANDLE).sum())
        gain_s = self._fixed * pass_s * float(self._left(ready).max())
        return newcomers * INTRODUCTION_S <= 0.25 * gain_s or self._waiting

    def _ask(self, ready: np.ndarray, known: int, attended: float) -> Drafts:
        """What the drafter has for ``ready`` in a pass of ``known`` rows besides."""
        state = self._table
        self.observe(ready)
        # a pass samples one token more than it drafts, so the last one allowed need not be drafted
        room = np.minimum(state.limit[ready] - state.length[ready] - 1, MAX_DEPTH)
        most = int(min(room.sum(), MAX_ROWS))
        if most <= 0:
            return NO_DRAFTS
        extra, longer = np.arange(most + 1), float(state.length[ready].mean())
        return self._drafter.propose(
            DraftQuery(
                handles=state.handle[ready],
                room=room.astype(np.int32),
                weights=self._weights(ready).astype(np.float32),
                seconds=self._cost.seconds(known + extra, attended + extra * longer),
            )
        )

    def judge(
        self, slots: np.ndarray, emitted: np.ndarray, ended: np.ndarray, plain_s: float, pass_s: float
    ) -> float:
        """Compute the profit of a pass for which the drafter was called, and decide how long to skip it.

        emitted: tokens of each of ``slots``; ended: those that got their last one; plain_s and pass_s:
        predicted seconds of a pass without drafts, and of this one. Returns the seconds that plain decoding
        would have taken for the same progress.
        """
        passes = average = float(emitted.mean())
        if not self._waiting:  # as many as the end has come nearer, which others may hold up
            after = np.where(ended, 0, self._left(slots))
            passes = _soft_max(after + emitted) - _soft_max(after)
        without_s = plain_s * (self._fixed * passes + (1.0 - self._fixed) * average)
        spent, self._farewells = self.spent + self._farewells, 0.0
        self._profit = 0.75 * self._profit + 0.25 * (without_s - pass_s - spent)
        if self._profit <= 0:
            self._nap = min(int(-self._profit / (TRIALS * plain_s)), LONGEST_NAP)
        return without_s

    def account(
        self, plan: ModelInput, nodes: int, ready: np.ndarray, output: StepOutput, seconds: float, step: int
    ) -> float:
        """Update the cost table and the profit after a pass with ``nodes`` draft tokens.
        Returns the seconds that plain decoding would have taken for the same progress."""
        if not (self.awake or step % 8 == 0):
            return seconds
        rows, attended = len(plan.tokens), plan.attended
        if rows - nodes == len(ready) and not output.stops:  # prefills and ends are not what a row costs
            self._cost.observe(rows, attended, seconds - self.spent)
        if not self.awake:
            return seconds
        ended = np.zeros(len(ready), bool)
        ended[list(output.stops)] = True
        plain_s = float(self._cost.seconds(rows - nodes, attended * (rows - nodes) / rows))
        pass_s = float(self._cost.seconds(rows, attended))
        without_s = self.judge(plan.slots[ready], output.counts, ended, plain_s, pass_s)
        return without_s if nodes else seconds - self.spent

    def observe_end(self, slots: np.ndarray) -> None:
        """``observe`` for sequences that have ended, which closes their handles. Those without a handle are
        skipped."""
        start, state = time.perf_counter(), self._table
        self.observe(slots[state.handle[slots] != NO_HANDLE], ended=True)
        self._farewells += time.perf_counter() - start

    def observe(self, slots: np.ndarray, ended: bool = False) -> None:
        """Pass on to the drafter what has been sampled in ``slots`` since the last call."""
        state = self._table
        self._open(slots)
        counts = state.length[slots] - state.observed[slots]
        if len(slots) == 0 or not (ended or counts.any()):
            return
        owner = np.repeat(np.arange(len(slots)), counts)
        row = slots[owner]
        place = state.observed[row] + np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        state.observed[slots] = state.length[slots]
        self._drafter.observe(
            SampledTokens(
                handles=state.handle[slots],
                counts=counts.astype(np.int32),
                tokens=state.text[row, place],
                probs=np.exp(state.logprobs[row, place]),
                edges=state.edges[row, place],
                ended=np.full(len(slots), ended),
            )
        )
        if ended:
            self._forget(slots)

    def _forget(self, slots: np.ndarray) -> None:
        """Their handles are closed."""
        self._table.handle[slots] = NO_HANDLE
        for slot in slots.tolist():
            self._table.at(slot).handle = NO_HANDLE

    def close(self, sequences: list[Sequence]) -> None:
        """Close the handles of sequences that were dropped and have no slot any more."""
        handles = np.array([s.handle for s in sequences if s.handle != NO_HANDLE], np.int64)
        for sequence in sequences:
            sequence.handle = NO_HANDLE
        nothing, none = np.zeros(len(handles), np.int32), np.zeros(0, np.float32)
        if len(handles):
            self._drafter.observe(
                SampledTokens(
                    handles=handles,
                    counts=nothing,
                    tokens=np.zeros(0, np.int32),
                    probs=none,
                    edges=none,
                    ended=np.ones(len(handles), bool),
                )
            )

    def _weights(self, ready: np.ndarray) -> np.ndarray:
        """What a token of each is worth, 1 on the average.

        A token that is accepted saves its own row of a later pass, whichever sequence gets it. The fixed
        part of a pass is saved only where passes become fewer: while others wait the tokens of all do that
        alike, in the tail those of the sequence that ends last.
        """
        if self._waiting:
            return np.ones(len(ready))
        left = self._left(ready)
        last = np.exp((left - left.max()) / LAST)
        return self._fixed * last * (len(ready) / last.sum()) + 1.0 - self._fixed

    def _left(self, slots: np.ndarray) -> np.ndarray:
        """Tokens that each will still be given: predicted, or as many as are allowed."""
        state = self._table
        length, limit, expected = state.length[slots], state.limit[slots], state.expected[slots]
        late = length + 1 + (length - state.prompt[slots]) // 4  # longer than predicted: for some while yet
        return np.clip(np.where(expected > 0, np.maximum(expected, late), limit), length, limit) - length


def _soft_max(left: np.ndarray) -> float:
    peak = float(left.max())
    return peak + STRICT * float(np.log(np.exp((left - peak) / STRICT).sum()))


def afford(table: SequenceTable, cache: KVCache, chosen: np.ndarray, drafts: Drafts) -> tuple[Drafts, int]:
    """Allocate the blocks of drafts from what is free; nothing is preempted or forgotten for a draft.

    Returns the drafts of which there is room, and how many draft tokens there was none for.
    """
    spare = cache.free
    want = (table.length[chosen] + drafts.counts + BLOCK - 1) // BLOCK - table.num_blocks[chosen]
    dropped = np.zeros(len(chosen), bool)
    for s in np.flatnonzero((want > 0) & (drafts.counts > 0)).tolist():
        if want[s] > spare:
            dropped[s] = True
            continue
        spare -= int(want[s])
        slot = int(chosen[s])
        table.at(slot).blocks.extend(cache.allocate() for _ in range(int(want[s])))
        table.show_blocks(slot)
    if not dropped.any():
        return drafts, 0
    kept = np.repeat(~dropped, drafts.counts)
    counts = np.where(dropped, 0, drafts.counts).astype(np.int32)
    return Drafts(counts=counts, tokens=drafts.tokens[kept]), int((~kept).sum())
