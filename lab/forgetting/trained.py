"""The trained policy inside ``ostinato.apps.memory``: importance and levels of a real memory's blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lab.forgetting.ceiling import Knowing
from lab.forgetting.contenders import Count, Lines
from lab.forgetting.policy import (
    GONE,
    HASHED,
    Policy,
    Rules,
    changing,
    fixed_of,
    hashed_words,
    offered,
    softmax,
)
from lab.forgetting.sense import Sense
from lab.forgetting.world import History
from ostinato.apps.memory.blocks import Block, Kept, MemoryState, Turn
from ostinato.apps.memory.importance import Importance
from ostinato.apps.memory.keep import Candidate, Memory, Parts, Sizes
from ostinato.apps.memory.refill import Refiller

NEVER = 1e12  # turns: importance does not fade by itself
WHOLE = Parts()
PIECE = 32  # longer than any turn of the world


@dataclass(slots=True)
class Trained:
    """``importance`` and ``decide`` of a ``Memory``; ``came`` is its ``on_block``. One for each history:
    it keeps what later turns are about, for the blocks that it has seen."""

    policy: Policy
    sense: Sense
    count: Count
    rules: Rules
    static: dict[int, np.ndarray] = field(default_factory=dict)  # by block: [L]
    content: dict[int, list[str]] = field(default_factory=dict)
    subjects: dict[int, str] = field(default_factory=dict)
    rooms: dict[int, np.ndarray] = field(default_factory=dict)  # [L]
    again: dict[int, float] = field(default_factory=dict)
    seen: int = 0  # tokens that came

    def came(self, block: Block) -> None:
        weights, fixed = self.policy.weights, fixed_of(block.speaker, block.text, block.whole)
        content, subject = self.sense.content(block.text), self.sense.subject(block.speaker, block.text)
        words = weights[:, hashed_words(content)].sum(1)
        self.static[block.id] = words + weights[:, HASHED + 1 : HASHED + 5] @ fixed
        for id, mine in self.subjects.items():
            if mine == subject:
                self.again[id] = max(self.again[id], self.sense.replaced(self.content[id], content))
        self.content[block.id], self.subjects[block.id], self.again[block.id] = content, subject, 0.0
        rooms = offered(block.speaker, block.text, block.whole, self.count, self.rules.least)
        self.rooms[block.id] = np.array(rooms)
        self.seen += block.whole

    def logits(self, state: MemoryState, blocks: Sequence[Block], need: int) -> np.ndarray:
        """[blocks, L]."""
        again = np.array([self.again[one.id] for one in blocks], np.float32)
        ages, levels = [state.turns - one.turn for one in blocks], np.array([one.level for one in blocks])
        phi = changing(ages, levels, again, self.seen / self.rules.budget, need / self.rules.budget)
        static = np.stack([self.static[one.id] for one in blocks])
        return static + phi @ self.policy.weights[:, HASHED:].T

    def importance(self, state: MemoryState, blocks: Sequence[Block]) -> Sequence[float]:
        """The tokens that the policy expects to leave of a block (a memory divides them by what it has)."""
        if not blocks:
            return []
        live = {one.id for one in state.blocks}
        for id in [id for id in self.subjects if id not in live]:
            for table in (self.static, self.content, self.subjects, self.again, self.rooms):
                table.pop(id)
        need = state.tokens - math.floor(self.rules.budget * (1 - self.rules.slack))
        logits = self.logits(state, blocks, need)
        found = []
        for one, row in zip(blocks, logits, strict=True):
            left = self.rooms[one.id].copy()
            left[one.level] = one.tokens
            found.append(float(softmax(np.where(self._allowed(one), row, -1e9)) @ left))
        return found

    def _allowed(self, block: Block) -> np.ndarray:
        """[L] levels that a block may have, as ``Memory`` offers them."""
        rooms = self.rooms[block.id]
        allowed = (np.arange(GONE + 1) > block.level) & (rooms >= self.rules.least) & (rooms < block.tokens)
        allowed[[block.level, GONE]] = True
        return allowed

    def decide(self, state: MemoryState, candidates: Sequence[Candidate], room: int) -> Sequence[int]:
        need = sum(one.block.tokens for one in candidates) - room
        logits = self.logits(state, [one.block for one in candidates], need)
        return [
            max(range(len(one.levels)), key=lambda k, row=row, one=one: (row[one.levels[k]], -k))
            for one, row in zip(candidates, logits, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Held:
    """A memory at the end of a history."""

    lines: Lines
    counters: dict[str, int]
    tokens: int  # most that there were


def remember(
    found: History, rules: Rules, count: Count, *, trained: Trained | Knowing | None = None,
    importance: Importance | None = None, refiller: Refiller | None = None, parts: Parts = WHOLE,
) -> Held:  # fmt: skip
    """A history through a memory of ``ostinato.apps.memory``, turn by turn. Without allocation what is
    trained decides only how much blocks matter."""
    more: dict[str, Any] = {}
    if trained is not None:
        decide = trained.decide if parts.allocation else None
        more = {"importance": trained.importance, "decide": decide, "on_block": trained.came}
    elif importance is not None:
        more = {"importance": importance}
    memory = Memory(sizes=sizes(rules), count=count, originals=Kept(), refiller=refiller, parts=parts, **more)
    state, most = MemoryState(), 0
    for turn in found.turns:
        state = memory.append(state, Turn(speaker=turn.speaker, text=turn.text))
        most = max(most, state.tokens)
    return Held(lines_of(found, state), dict(memory.counters), most)


def sizes(rules: Rules) -> Sizes:
    return Sizes(
        budget=rules.budget, recent=rules.recent, piece=PIECE, least=rules.least,
        slack=rules.slack, at_once=rules.at_once, half_life=NEVER,
    )  # fmt: skip


def lines_of(found: History, state: MemoryState) -> Lines:
    """By turn, its pieces joined."""
    texts: dict[int, list[str]] = {}
    for block in state.blocks:
        texts.setdefault(block.turn, []).append(block.text)
    return [(found.turns[at], f"{found.turns[at].speaker}: {' '.join(some)}") for at, some in texts.items()]


__all__ = ["Held", "Trained", "remember"]
