"""Decides when the engine calls its drafter, what the drafter observes, and which drafts fit into memory.

Speculation must never cost more than it saves, so the drafter is called only while it pays. After every pass
for which it was called the profit is computed: the seconds of plain decoding for the same progress, less
those of the pass by the cost table, less those of drafting. After a loss the drafter is skipped for so many
passes that the loss is no more than a two-hundredth of their time; meanwhile it does not observe sampled
tokens either; it gets them when it is called again.
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
MAX_DEPTH = 32  # draft tokens of a sequence, about: it bounds the table of costs in a query
TRIALS = 0.005  # share of the time that may be lost on trials of the drafter
LONGEST_NAP = 1000  # passes
INTRODUCTION_S = 15e-6  # seconds in which a drafter opens a request, about
LEAST_FIXED = 0.2  # share of a pass that does not depend on its rows; below, even perfect drafts gain little
LAST = 1.5  # tokens: temperature of the softmax of tokens left that weights the sequences
STRICT = 0.5  # the same temperature in the profit, where all of the longest sequences must advance


class Speculation:
    """Makes drafts for the sequences of ``table``, as long as drafting pays."""

    def __init__(self, drafter: Drafter, cost: CostTable, table: SequenceTable) -> None:
        self._drafter, self._cost, self._table = drafter, cost, table
        self._known_uids: set[str] = set()  # uids of prompts seen in requests
        self._is_returning = False  # whether the latest prompts had been seen before
        self._skips = 0  # coming passes for which the drafter is not called
        self._profit = 0.0  # seconds per pass, lately
        self._others_wait = False  # others wait for a slot, so all tokens count alike
        self._fixed = 0.0  # share of a pass that does not depend on its rows
        self.awake = False  # whether the drafter was called for this pass
        self.spent = 0.0  # seconds of drafting for this pass
        self._unbilled_s = 0.0  # seconds of reporting ends, not yet in the profit

    def begin(self, uids: set[str]) -> None:
        """Record the prompts of new requests. The measured profit and the skips are reset when recurring
        prompts follow new ones or the other way round: only recurring prompts have a history to draft
        from."""
        is_returning = not self._known_uids.isdisjoint(uids)
        self._known_uids |= uids
        if is_returning != self._is_returning:
            self._is_returning, self._skips, self._profit = is_returning, 0, 0.0

    def _open_handles(self, slots: np.ndarray) -> None:
        """Open a handle for each sequence that has none."""
        table = self._table
        for slot in slots[table.handle[slots] == NO_HANDLE].tolist():
            sequence = table.get_sequence(slot)
            sequence.handle = self._drafter.open(sequence.request)
            table.handle[slot], table.observed[slot] = sequence.handle, sequence.prompt_len

    def propose(self, slots: np.ndarray, counts: np.ndarray, waiting: int) -> Drafts:
        """Return drafts for a pass of ``counts`` rows of known text of ``slots``, aligned with them;
        ``waiting`` others have no slot yet. Nothing is drafted in a skipped pass, of which one less is left
        then, while the batch is filling, or while drafts would gain too little. Sequences with a constraint
        have no drafts."""
        self.awake, self.spent = False, 0.0
        if self._skips:
            self._skips -= 1
            return NO_DRAFTS
        table = self._table
        may_draft = table.banned_until[slots] < ALWAYS
        decoding = np.flatnonzero(may_draft & (counts == table.length[slots] - table.computed[slots]))
        self._others_wait = waiting > 0
        if 2 * len(decoding) < min(len(slots) + waiting, len(table.length)):
            return NO_DRAFTS  # the batch is filling: a few sequences gain little now
        num_known, attended = int(counts.sum()), float(table.length[slots] @ counts)
        # the seconds of a pass of half the rows show which share of this pass does not depend on rows
        half_s, whole_s = self._cost.predict_seconds(
            np.array([0.5, 1.0]) * num_known, np.array([0.5, 1.0]) * attended
        )
        self._fixed = min(max(2.0 * float(half_s / whole_s) - 1.0, 0.0), 1.0)
        is_profitable = self._fixed >= LEAST_FIXED and self._gains_enough(slots[decoding], float(whole_s))
        if not is_profitable:
            return NO_DRAFTS
        start = time.perf_counter()
        self.awake = True
        drafts = self._query_drafter(slots[decoding], num_known, attended)
        self.spent = time.perf_counter() - start
        if len(drafts.tokens) == 0:
            return NO_DRAFTS
        slot_counts = np.zeros(len(slots), np.int32)
        slot_counts[decoding] = drafts.counts
        return Drafts(counts=slot_counts, tokens=drafts.tokens)

    def _gains_enough(self, slots: np.ndarray, pass_s: float) -> bool:
        """Return whether the best possible gain is four times the cost of opening new handles, or others
        wait."""
        num_new = int((self._table.handle[slots] == NO_HANDLE).sum())
        gain_s = self._fixed * pass_s * float(self._predict_left(slots).max())
        return num_new * INTRODUCTION_S <= 0.25 * gain_s or self._others_wait

    def _query_drafter(self, slots: np.ndarray, num_known: int, attended: float) -> Drafts:
        """Give the drafter the new tokens, and return its drafts for ``slots`` in a pass with ``num_known``
        rows of known text."""
        table = self._table
        self.observe(slots)
        # a pass samples a token more than it drafts, so the last token allowed need not be drafted
        room = np.minimum(table.limit[slots] - table.length[slots] - 1, MAX_DEPTH)
        max_tokens = int(min(room.sum(), MAX_ROWS))
        if max_tokens <= 0:
            return NO_DRAFTS
        extra, mean_length = np.arange(max_tokens + 1), float(table.length[slots].mean())
        return self._drafter.propose(
            DraftQuery(
                handles=table.handle[slots],
                room=room.astype(np.int32),
                weights=self._weigh_sequences(slots).astype(np.float32),
                seconds=self._cost.predict_seconds(num_known + extra, attended + extra * mean_length),
            )
        )

    def judge(
        self, slots: np.ndarray, emitted: np.ndarray, ended: np.ndarray, plain_s: float, pass_s: float
    ) -> float:
        """Update the profit after a pass for which the drafter was called, and after a loss the number of
        passes to skip. The seconds of drafting and of reporting ends are charged to this pass.

        emitted: tokens of each of ``slots``; ended: those that got their last token; plain_s and pass_s:
        predicted seconds of a pass without drafts, and of this pass. Returns the seconds that plain decoding
        would have taken for the same progress.
        """
        passes = mean_emitted = float(emitted.mean())
        if not self._others_wait:  # passes by which the end of the longest sequences is nearer
            tokens_left = np.where(ended, 0, self._predict_left(slots))
            passes = _compute_soft_max(tokens_left + emitted) - _compute_soft_max(tokens_left)
        without_s = plain_s * (self._fixed * passes + (1.0 - self._fixed) * mean_emitted)
        drafting_s, self._unbilled_s = self.spent + self._unbilled_s, 0.0
        self._profit = 0.75 * self._profit + 0.25 * (without_s - pass_s - drafting_s)
        if self._profit <= 0:
            self._skips = min(int(-self._profit / (TRIALS * plain_s)), LONGEST_NAP)
        return without_s

    def account(
        self, plan: ModelInput, nodes: int, ready: np.ndarray, output: StepOutput, seconds: float, step: int
    ) -> float:
        """Update the cost table and the profit after a pass with ``nodes`` draft tokens; while the drafter
        is skipped, only every eighth pass updates the table. Returns the seconds that plain decoding would
        have taken for the same progress; ``seconds`` if the drafter was not called."""
        if not (self.awake or step % 8 == 0):
            return seconds
        rows, attended = len(plan.tokens), plan.attended
        if rows - nodes == len(ready) and not output.stops:  # prefills and ends take time besides rows
            self._cost.observe(rows, attended, seconds - self.spent)
        if not self.awake:
            return seconds
        has_ended = np.zeros(len(ready), bool)
        has_ended[list(output.stops)] = True
        plain_s = float(self._cost.predict_seconds(rows - nodes, attended * (rows - nodes) / rows))
        pass_s = float(self._cost.predict_seconds(rows, attended))
        without_s = self.judge(plan.slots[ready], output.counts, has_ended, plain_s, pass_s)
        return without_s if nodes else seconds - self.spent

    def observe_end(self, slots: np.ndarray) -> None:
        """Report the last tokens of sequences that have ended to the drafter, and close their handles.
        Sequences without a handle are left out. The seconds are charged to the next profit."""
        start, table = time.perf_counter(), self._table
        self.observe(slots[table.handle[slots] != NO_HANDLE], ended=True)
        self._unbilled_s += time.perf_counter() - start

    def observe(self, slots: np.ndarray, ended: bool = False) -> None:
        """Give the drafter the tokens that were sampled in ``slots`` since the last call, after opening
        missing handles. With ``ended`` the handles are closed. Does nothing without new tokens, unless
        ``ended``."""
        table = self._table
        self._open_handles(slots)
        counts = table.length[slots] - table.observed[slots]
        if len(slots) == 0 or not (ended or counts.any()):
            return
        owner = np.repeat(np.arange(len(slots)), counts)
        row = slots[owner]
        place = table.observed[row] + np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        table.observed[slots] = table.length[slots]
        self._drafter.observe(
            SampledTokens(
                handles=table.handle[slots],
                counts=counts.astype(np.int32),
                tokens=table.text[row, place],
                probs=np.exp(table.logprobs[row, place]),
                edges=table.edges[row, place],
                ended=np.full(len(slots), ended),
            )
        )
        if ended:
            self._clear_handles(slots)

    def _clear_handles(self, slots: np.ndarray) -> None:
        """Mark the sequences as without a handle, in the table and in themselves."""
        self._table.handle[slots] = NO_HANDLE
        for slot in slots.tolist():
            self._table.get_sequence(slot).handle = NO_HANDLE

    def close(self, sequences: list[Sequence]) -> None:
        """Close the handles of sequences that were dropped, as ended without new tokens."""
        handles = np.array([s.handle for s in sequences if s.handle != NO_HANDLE], np.int64)
        for sequence in sequences:
            sequence.handle = NO_HANDLE
        zeros, no_floats = np.zeros(len(handles), np.int32), np.zeros(0, np.float32)
        if len(handles):
            self._drafter.observe(
                SampledTokens(
                    handles=handles,
                    counts=zeros,
                    tokens=np.zeros(0, np.int32),
                    probs=no_floats,
                    edges=no_floats,
                    ended=np.ones(len(handles), bool),
                )
            )

    def _weigh_sequences(self, slots: np.ndarray) -> np.ndarray:
        """Return the value of a token of each sequence, 1 on average.

        A token that is accepted saves its own row of a later pass, whichever sequence gets it. The fixed
        part of a pass is saved only where passes become fewer: while others wait, tokens of all sequences
        count alike; in the tail, those of the sequences that end last.
        """
        if self._others_wait:
            return np.ones(len(slots))
        tokens_left = self._predict_left(slots)
        last_weights = np.exp((tokens_left - tokens_left.max()) / LAST)
        return self._fixed * last_weights * (len(slots) / last_weights.sum()) + 1.0 - self._fixed

    def _predict_left(self, slots: np.ndarray) -> np.ndarray:
        """Predict the tokens that each sequence will still get; where unknown, the number that is allowed."""
        table = self._table
        length, limit, expected = table.length[slots], table.limit[slots], table.expected[slots]
        # for a sequence that is longer than its prediction: a quarter of its answer more
        min_length = length + 1 + (length - table.prompt[slots]) // 4
        return (
            np.clip(np.where(expected > 0, np.maximum(expected, min_length), limit), length, limit) - length
        )


def _compute_soft_max(values: np.ndarray) -> float:
    """Return a smooth maximum of ``values``, at the temperature STRICT."""
    peak = float(values.max())
    return peak + STRICT * float(np.log(np.exp((values - peak) / STRICT).sum()))


def allocate_drafts(
    table: SequenceTable, cache: KVCache, slots: np.ndarray, drafts: Drafts
) -> tuple[Drafts, int]:
    """Allocate blocks for drafts from free ones; nothing is preempted or evicted for a draft.

    Returns (the drafts without those that do not fit, the number of draft tokens that do not fit). A draft
    fits whole or not at all.
    """
    spare = cache.num_free
    needed = (table.length[slots] + drafts.counts + BLOCK - 1) // BLOCK - table.num_blocks[slots]
    is_dropped = np.zeros(len(slots), bool)
    for s in np.flatnonzero((needed > 0) & (drafts.counts > 0)).tolist():
        if needed[s] > spare:
            is_dropped[s] = True
            continue
        spare -= int(needed[s])
        slot = int(slots[s])
        table.get_sequence(slot).blocks.extend(cache.allocate() for _ in range(int(needed[s])))
        table.show_blocks(slot)
    if not is_dropped.any():
        return drafts, 0
    is_kept = np.repeat(~is_dropped, drafts.counts)
    counts = np.where(is_dropped, 0, drafts.counts).astype(np.int32)
    return Drafts(counts=counts, tokens=drafts.tokens[is_kept]), int((~is_kept).sum())
