"""Which sequences run in the next pass, and in which KV blocks: on ints and arrays, without torch.

    waiting --admit--> running --schedule--> rows of the next pass
       ^                  |
       +---- preempt -----+        (out of blocks: recomputed later, same tokens)

Sequences with a known prefix begin after it. A group's siblings wait a step for the first sibling, then
share its prompt.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from ostinato.engine.cache import BLOCK, KVCache, OutOfBlocks
from ostinato.engine.counters import Counters
from ostinato.engine.sequences import Sequence, SequenceTable
from ostinato.types import Request


class Scheduler:
    """Schedules the waiting queue, the running ``table`` and the ``cache`` of blocks.

    ``step_tokens``: rows of known text in a pass. ``expect`` predicts the tokens of the answer to a request
    (0: unknown): the longest are started first. ``shares``: see ``share_queue``. ``before_preemption`` gets
    the slot of a sequence that is about to lose its blocks.
    """

    def __init__(
        self,
        table: SequenceTable,
        cache: KVCache,
        counters: Counters,
        *,
        step_tokens: int,
        expect: Callable[[Request], float] | None = None,
        shares: Mapping[str, float] | None = None,
        before_preemption: Callable[[int], None] = lambda slot: None,
    ) -> None:
        self.table, self.cache, self.waiting = table, cache, deque[Sequence]()
        self._counters, self._step_tokens, self._expect = counters, step_tokens, expect
        self._before_preemption, self._shares = before_preemption, {} if shares is None else shares

    def __len__(self) -> int:
        """The number of sequences that have not ended."""
        return len(self.waiting) + len(self.table)

    @property
    def unfinished(self) -> list[Sequence]:
        return [*map(self.table.get_sequence, self.table.order), *self.waiting]

    def add(self, new_sequences: Seq[Sequence]) -> None:
        """Append sequences to the queue; with predictions the whole queue is sorted by ``sort_queue``."""
        self.waiting.extend(new_sequences)
        if self._expect is not None:
            self.waiting = sort_queue(self.waiting, new_sequences, self._expect)

    def remove(self, slot: int) -> Sequence:
        """Remove a sequence from its slot, release its blocks, and discard its nodes that are not ready."""
        sequence = self.table.remove(slot)
        self.cache.discard(sequence.nodes)
        self.cache.release(sequence.blocks)
        sequence.nodes, sequence.blocks = [], []
        return sequence

    def drop(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Remove those of ``sequences`` that have not ended from queue and slots, and return them."""
        dropped_ids = set(map(id, sequences))
        waiting = [sequence for sequence in self.waiting if id(sequence) in dropped_ids]
        self.waiting = deque(sequence for sequence in self.waiting if id(sequence) not in dropped_ids)
        slots = [slot for slot in self.table.order if id(self.table.get_sequence(slot)) in dropped_ids]
        return [*waiting, *map(self.remove, slots)]

    def find_requests(self, requests: Collection[Request]) -> tuple[list[int], list[Sequence]]:
        """Return (slots, waiting sequences) of those requests that have not ended."""
        request_ids = set(map(id, requests))
        slots = [
            slot for slot in self.table.order if id(self.table.get_sequence(slot).request) in request_ids
        ]
        return slots, [sequence for sequence in self.waiting if id(sequence.request) in request_ids]

    def admit(self) -> list[tuple[int, int]]:
        """Admit waiting sequences while there is room; return (source, target) of blocks to copy first."""
        if self.waiting and not self.table.is_full:
            running = map(self.table.get_sequence, self.table.order)
            self.waiting = share_queue(self.waiting, running, self._shares)
        copies: list[tuple[int, int]] = []
        postponed: deque[Sequence] = deque()
        room = self.cache.num_available - len(self.table)  # a spare block for each that runs
        while self.waiting and not self.table.is_full:
            sequence = self.waiting.popleft()
            tokens = sequence.prefix(sequence.text)
            match = self.cache.match(tokens)
            if match.pending:  # a sibling is computing this prefix right now
                postponed.append(sequence)
                continue
            # a matched block that no sequence uses was counted as room
            needed = len(tokens) // BLOCK + 1 - sum(self.cache.refs[b] > 1 for b in match.blocks)
            if needed > room and len(self.table):
                postponed.append(sequence)
                break
            self.cache.share(match.blocks)
            sequence.blocks = list(match.blocks)
            # The source may be evicted here, even to be the target: it keeps its content until the copies are
            # made, before any forward.
            if match.copied:
                sequence.blocks.append(self.cache.allocate())
                copies.append((match.source, sequence.blocks[-1]))
            while len(sequence.blocks) * BLOCK < len(tokens):
                sequence.blocks.append(self.cache.allocate())
            sequence.generation = self.cache.generation
            if sequence.sampled is None:
                sequence.cached = min(match.tokens, sequence.prompt_len)
                self._counters.cached += sequence.cached
            else:
                sequence.again.append((min(match.tokens, sequence.computed), sequence.computed))
            sequence.nodes = self.cache.insert(tokens, sequence.blocks, ready=False)
            room -= needed
            self.table.add(sequence, match.tokens)
        self.waiting.extendleft(reversed(postponed))
        return copies

    def schedule(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (slots, rows of known text) of the next pass: sequences that decode, then prompts within
        ``step_tokens``. Blocks are appended for them, and sequences that are preempted for that are left
        out. Slots of a policy are consecutive."""
        table = self.table
        order = np.array(table.order, np.int64)
        need = table.length[order] - table.computed[order]
        order = order[np.argsort(need > 1, kind="stable")]  # those that decode need one row
        need = table.length[order] - table.computed[order]
        num_earlier = np.cumsum(need) - need
        counts = np.minimum(need, self._step_tokens - num_earlier)
        order, counts = order[counts > 0], counts[counts > 0]
        short = table.num_blocks[order] * BLOCK < table.length[order]
        preempted_slots: set[int] = set()
        for slot in order[short].tolist():
            if slot not in preempted_slots:
                preempted_slots |= self.append_blocks(slot)
        if preempted_slots:
            is_kept = ~np.isin(order, list(preempted_slots))
            order, counts = order[is_kept], counts[is_kept]
        by_policy = np.argsort(table.policy[order], kind="stable")  # rows of a policy are consecutive
        return order[by_policy], counts[by_policy]

    def append_blocks(self, slot: int) -> set[int]:
        """Append the blocks for the next token of a sequence. If none is free, surplus blocks of drafts are
        released, then the youngest sequences are preempted, perhaps this one. Preempted ones go to the front
        of the queue. Returns their slots."""
        sequence, length, preempted_slots = (
            self.table.get_sequence(slot),
            int(self.table.length[slot]),
            set[int](),
        )
        while len(sequence.blocks) * BLOCK < length:
            try:
                sequence.blocks.append(self.cache.allocate())
            except OutOfBlocks:
                if self._release_surplus_blocks():
                    continue
                youngest = self.table.order[-1]  # usually it has the fewest tokens to compute again
                self._before_preemption(youngest)
                victim = self.remove(youngest)
                preempted_slots.add(youngest)
                self.waiting.appendleft(victim)
                self._counters.preempted += 1
                if victim is sequence:
                    return preempted_slots
        self.table.show_blocks(slot)
        return preempted_slots

    def mark_computed(self, slots: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Record that rows were computed, and make the nodes of completed sequences ready. Returns the
        indices in ``slots`` of those whose text is all computed; they are to be sampled now."""
        table = self.table
        table.computed[slots] += counts
        ready = np.flatnonzero(table.computed[slots] == table.length[slots])
        for slot in slots[ready].tolist():
            sequence = table.get_sequence(slot)
            for node in sequence.nodes:
                node.ready = True
            sequence.nodes = []
        return ready

    def keep_prefix(self, slot: int) -> None:
        """Insert the blocks of a sequence that ends into the prefix tree, unless a policy was published
        since it began or its prompt was not all computed."""
        sequence, computed = self.table.get_sequence(slot), int(self.table.computed[slot])
        if sequence.generation == self.cache.generation and not sequence.nodes:
            self.cache.insert(sequence.prefix(self.table.text[slot, :computed]), sequence.blocks)

    def _release_surplus_blocks(self) -> int:
        """Release the blocks that drafts have left past the ends of sequences; return their number."""
        table, num_freed = self.table, 0
        for slot in table.order:
            sequence, needed = table.get_sequence(slot), -(-int(table.length[slot]) // BLOCK)
            surplus, sequence.blocks[needed:] = sequence.blocks[needed:], []
            self.cache.release(surplus)
            # a block that has just been added is not in the table yet, and has to be shown
            table.num_blocks[slot] = min(int(table.num_blocks[slot]), len(sequence.blocks))
            num_freed += len(surplus)
        return num_freed


def sort_queue(
    waiting: Iterable[Sequence], new_sequences: Seq[Sequence], expect: Callable[[Request], float]
) -> deque[Sequence]:
    """Return the queue by predicted answer, the longest first: a long answer that starts late delays all.
    Predictions for ``new_sequences``, which are in ``waiting`` too, are stored in them. Preempted sequences
    come first."""
    predictions: dict[str, float] = {}  # by prompt: siblings have the same prediction
    for sequence in new_sequences:
        request = sequence.request
        if request.uid not in predictions:
            predictions[request.uid] = expect(request)
        if predictions[request.uid] > 0:
            sequence.expected = sequence.prompt_len + predictions[request.uid]
    # preempted sequences come first: their callers have waited longest
    return deque(
        sorted(
            waiting, key=lambda sequence: (sequence.sampled is None, len(sequence.text) - sequence.expected)
        )
    )


def share_queue(
    waiting: deque[Sequence], running: Iterable[Sequence], shares: Mapping[str, float]
) -> deque[Sequence]:
    """Return the queue in the order in which policies get slots in proportion to their ``shares`` (1 where
    absent): next is always the policy with the fewest sequences for its share, those that run included.
    Sequences of one policy keep their order, so whatever others ask for, each policy gets on."""
    names = {sequence.request.policy for sequence in waiting}
    if len(names) < 2:
        return waiting
    count = Counter(sequence.request.policy for sequence in running)
    turns: list[float] = []
    for sequence in waiting:
        name = sequence.request.policy
        count[name] += 1
        turns.append(count[name] / shares.get(name, 1.0))
    order = sorted(range(len(turns)), key=turns.__getitem__)
    queue = list(waiting)
    return deque(queue[index] for index in order)
