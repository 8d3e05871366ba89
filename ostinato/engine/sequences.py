"""The running sequences as arrays: one row of every array is a slot, so that a pass is prepared and its
tokens are appended by a few array operations, whatever the size of the batch.

A sequence takes a slot when it is admitted and leaves it when it ends or is preempted; in between its tokens
are stored here and nowhere else. Entries beyond ``length`` are never read.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from ostinato.engine.cache import BLOCK, POLICY_BIT, SALT_BIT, Node
from ostinato.types import Completion, Emitted, Request, Sampling

NO_HANDLE = -1
ALWAYS = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """The sampling settings of B rows, as arrays [B]."""

    temperature: np.ndarray  # float32
    top_k: np.ndarray  # int32
    top_p: np.ndarray  # float32
    min_p: np.ndarray  # float32

    @classmethod
    def of(cls, rows: Seq[Sampling]) -> Settings:
        return cls(
            np.array([s.temperature for s in rows], np.float32),
            np.array([s.top_k for s in rows], np.int32),
            np.array([s.top_p for s in rows], np.float32),
            np.array([s.min_p for s in rows], np.float32),
        )

    def find_filtered(self, vocab_size: int) -> np.ndarray:
        """Return [B] bool, the rows that a filter may cut. A greedy row is none: its token is not drawn."""
        top_k = (self.top_k > 0) & (self.top_k < vocab_size)
        return (self.temperature > 0) & (top_k | (self.top_p < 1) | (self.min_p > 0))

    def take(self, index: np.ndarray | slice) -> Settings:
        return Settings(self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index])


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in flight. ``text`` and ``sampled`` are stored here while it waits; while it runs its slot
    has them."""

    index: int  # of the request in its call
    request: Request
    results: asyncio.Queue[tuple[int, Completion] | BaseException]
    on_tokens: Callable[[int, Emitted], None] | None
    address: int  # key of its noise
    limit: int  # length at which it is truncated
    policy: int  # number of the policy that it is sampled from
    text: np.ndarray  # [length] int32: prompt and what has been sampled
    sampled: tuple[np.ndarray, ...] | None = None  # logprobs, edges, versions of the answer
    generation: int = 0  # of the prefix tree, when its first blocks were allocated
    supports: list[np.ndarray] = field(
        default_factory=list
    )  # ids that each token of the answer was drawn from
    routes: np.ndarray | None = None  # from ``routes_from`` on, as they were when it was preempted
    expected: float = 0.0  # length that is predicted, the prompt included; 0: unknown
    blocks: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)  # of the tree, that its prefill is about to make ready
    handle: int = NO_HANDLE  # at the drafter
    observed: int = 0  # length up to which the drafter has its tokens
    cached: int = 0
    computed: int = 0  # positions that had run when it was preempted
    again: list[tuple[int, int]] = field(default_factory=list)  # [from, to) that ran again, per preemption
    drafted: int = 0
    accepted: int = 0
    passes: int = 0

    @property
    def prompt_len(self) -> int:
        return len(self.request.tokens)

    def prefix(self, tokens: np.ndarray) -> list[int]:
        """Return the keys of ``tokens`` in the prefix tree. Sequences of different policies or salts share
        no key; the salt is a part of the first key, which is enough."""
        keys = (tokens.astype(np.int64) + (self.policy << POLICY_BIT)).tolist()
        if keys and (salt := self.request.salt):
            keys[0] += int.from_bytes(hashlib.sha256(salt.encode()).digest()) << SALT_BIT
        return keys


class SequenceTable:
    """The state of up to ``size`` running sequences of up to ``width`` tokens."""

    def __init__(self, size: int, width: int) -> None:
        # Untouched pages of these cost no memory: use grows with the sequences.
        self.text = np.empty((size, width + 1), np.int32)
        self.logprobs = np.empty((size, width + 1), np.float32)
        self.edges = np.empty((size, width + 1), np.float32)
        self.versions = np.empty((size, width + 1), np.int32)
        self.tables = np.zeros((size, (width + BLOCK - 1) // BLOCK + 1), np.int32)
        self.num_blocks = np.zeros(size, np.int64)
        self.length = np.zeros(size, np.int64)
        self.computed = np.zeros(size, np.int64)  # positions whose keys and values are known
        self.prompt = np.zeros(size, np.int64)
        self.limit = np.zeros(size, np.int64)
        self.expected = np.zeros(size, np.float64)
        self.address = np.zeros(size, np.uint64)
        self.handle = np.full(size, NO_HANDLE, np.int64)
        self.observed = np.zeros(size, np.int64)
        self.temperature = np.zeros(size, np.float32)
        self.top_k = np.zeros(size, np.int32)
        self.top_p = np.zeros(size, np.float32)
        self.min_p = np.zeros(size, np.float32)
        self.filtered = np.zeros(size, bool)  # the ids that its filters keep are recorded
        self.banned_until = np.zeros(size, np.int64)  # length from which on every token may be sampled
        self.drafted = np.zeros(size, np.int64)
        self.accepted = np.zeros(size, np.int64)
        self.passes = np.zeros(size, np.int64)
        self.special = np.zeros(size, bool)  # has stop strings: checked token by token
        self.listened = np.zeros(size, bool)  # its tokens are streamed to a listener
        self.top = np.zeros(size, np.int64)  # number of likeliest tokens for the listener
        self.policy = np.zeros(size, np.int64)
        self._stop_token_counts: dict[tuple[int, ...], int] = {}  # number of slots by stop tokens
        self.sequences: list[Sequence | None] = [None] * size
        self.order: list[int] = []  # slots in use, the youngest last
        self._free_slots = list(range(size - 1, -1, -1))

    def __len__(self) -> int:
        return len(self.order)

    @property
    def is_full(self) -> bool:
        return not self._free_slots

    def add(self, sequence: Sequence, computed: int) -> int:
        """Move a sequence into a free slot, and return the slot. ``computed`` positions are in its blocks."""
        slot = self._free_slots.pop()
        length, prompt, sampling = len(sequence.text), sequence.prompt_len, sequence.request.sampling
        self.text[slot, :length] = sequence.text
        if sequence.sampled is not None:
            for array, values in zip(
                (self.logprobs, self.edges, self.versions), sequence.sampled, strict=True
            ):
                array[slot, prompt:length] = values
        sequence.text, sequence.sampled = np.empty(0, np.int32), None
        self.length[slot], self.computed[slot], self.prompt[slot] = length, computed, prompt
        self.limit[slot], self.expected[slot] = sequence.limit, sequence.expected
        self.address[slot], self.handle[slot] = sequence.address, sequence.handle
        self.observed[slot] = sequence.observed
        self.temperature[slot], self.top_k[slot] = sampling.temperature, sampling.top_k
        self.top_p[slot], self.min_p[slot] = sampling.top_p, sampling.min_p
        self.filtered[slot] = sampling.filtered
        self.banned_until[slot] = prompt + sampling.min_tokens if sampling.stop_tokens else 0
        if sequence.request.constraint is not None:
            self.banned_until[slot] = ALWAYS
        self.drafted[slot], self.accepted[slot] = sequence.drafted, sequence.accepted
        self.passes[slot] = sequence.passes
        self.special[slot], self.listened[slot] = bool(sampling.stop_strings), sequence.on_tokens is not None
        self.top[slot] = sequence.request.top_logprobs if sequence.on_tokens is not None else 0
        self.policy[slot] = sequence.policy
        self._stop_token_counts[sampling.stop_tokens] = (
            self._stop_token_counts.get(sampling.stop_tokens, 0) + 1
        )
        self.sequences[slot] = sequence
        self.num_blocks[slot] = 0
        self.show_blocks(slot)
        self.order.append(slot)
        return slot

    def show_blocks(self, slot: int) -> None:
        """Copy the blocks that were added to the sequence into the table."""
        sequence = self.get_sequence(slot)
        old_count, new_count = int(self.num_blocks[slot]), len(sequence.blocks)
        self.tables[slot, old_count:new_count] = sequence.blocks[old_count:]
        self.num_blocks[slot] = new_count

    def remove(self, slot: int) -> Sequence:
        """Free the slot, move its text and results back to the sequence, and return that."""
        sequence, length, prompt = self.get_sequence(slot), int(self.length[slot]), int(self.prompt[slot])
        sequence.text = self.text[slot, :length].copy()
        arrays = (self.logprobs, self.edges, self.versions)
        sequence.sampled = tuple(array[slot, prompt:length].copy() for array in arrays)
        sequence.drafted, sequence.accepted = int(self.drafted[slot]), int(self.accepted[slot])
        sequence.passes, sequence.observed = int(self.passes[slot]), int(self.observed[slot])
        sequence.computed = int(self.computed[slot])
        stop_tokens = sequence.request.sampling.stop_tokens
        self._stop_token_counts[stop_tokens] -= 1
        if not self._stop_token_counts[stop_tokens]:
            del self._stop_token_counts[stop_tokens]
        self.sequences[slot] = None
        self.order.remove(slot)
        self._free_slots.append(slot)
        return sequence

    def get_sequence(self, slot: int) -> Sequence:
        """Return the sequence in a slot that is in use."""
        sequence = self.sequences[slot]
        assert sequence is not None, "no sequence has this slot"
        return sequence

    def list_stop_tokens(self) -> list[int]:
        """Return the stop tokens of all running sequences."""
        return sorted({token for tokens in self._stop_token_counts for token in tokens})

    def settings(self, slots: np.ndarray) -> Settings:
        return Settings(self.temperature[slots], self.top_k[slots], self.top_p[slots], self.min_p[slots])
