"""A memory within a budget: append, and where it is too long mask, allocate and refill.

    append    the turn's pieces become blocks, verbatim; within the budget nothing else happens
    mask      blocks outside the recent window that matter least for their length and age, ties by id
    allocate  the levels of these blocks that are worth most in the room that is left
    refill    each from its original, never from what it was shortened to; checked, else an extract

The budget holds after every append, by construction: pieces, window and pins are limited so that what else
there is can always go.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ostinato.apps.memory.blocks import LEVELS, Block, MemoryState, Originals, Turn, line
from ostinato.apps.memory.facts import absolute, day_of, find_unsupported
from ostinato.apps.memory.importance import Importance, lexical, score_text, spoken_of
from ostinato.apps.memory.refill import Refiller, extract

COMPRESSIBILITY = 0.3  # tau as a share of the tokens of the whole


def utility(score: float, whole: int, tokens: float | np.ndarray) -> float | np.ndarray:
    """What ``tokens`` of a block of ``whole`` tokens and importance ``score`` are worth."""
    return score * -np.expm1(-np.asarray(tokens, np.float64) / (COMPRESSIBILITY * max(whole, 1)))


def allocate(
    scores: Sequence[float], wholes: Sequence[int], options: Sequence[Sequence[int]], room: int
) -> list[int]:
    """The index of one option (a number of tokens) for each block, within ``room`` together and worth most.

    Every block needs an option of 0. Between choices that are worth the same to the last bit, the one with
    more tokens for the earlier block is made. Time and memory: blocks x options x room.
    """
    if any(0 not in mine for mine in options) or room < 0:
        raise ValueError(
            f"a room of {room} tokens for options {[list(mine) for mine in options]}; each needs a 0"
        )
    best = np.zeros(room + 1)  # [c]: of the blocks from the last one back, within c tokens
    choices: list[np.ndarray] = []
    for score, whole, mine in reversed(list(zip(scores, wholes, options, strict=True))):
        worth = np.full((len(mine), room + 1), -np.inf)
        for k, tokens in enumerate(mine):
            if tokens <= room:
                worth[k, tokens:] = best[: room + 1 - tokens] + utility(score, whole, tokens)
        order = np.argsort([-tokens for tokens in mine], kind="stable")
        choices.append(order[np.argmax(worth[order], axis=0)])
        best = worth.max(axis=0)
    chosen, left = [], room
    for choice, mine in zip(reversed(choices), options, strict=True):
        chosen.append(int(choice[left]))
        left -= mine[chosen[-1]]
    return chosen


GONE = len(LEVELS) - 1
SIGHT = 200  # characters of the originals beside a gap that a refiller sees


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """All in tokens of ``count``, lines with their speakers."""

    budget: int
    recent: int  # the newest turns, verbatim
    piece: int = 96  # turns are cut into pieces of so many at most
    per_block: int = 0  # that the caller's form adds to each verbatim block: a chat template's marks
    least: int = 12  # a block is not shortened to fewer
    slack: float = 0.1  # of the budget, that is freed beyond what is needed
    at_once: int = 8  # blocks that are masked, if so many are enough
    half_life: float = 200.0  # turns after which a block counts half

    @classmethod
    def of(cls, budget: int, recent: int = 0, per_block: int = 0) -> Sizes:
        """A window of a third unless it is given, pieces of an eighth and 96 tokens at most."""
        recent = recent or budget // 3
        return cls(budget=budget, recent=recent, piece=min(96, budget // 8, recent), per_block=per_block)

    def __post_init__(self) -> None:
        if not self.least <= self.piece <= self.recent <= self.budget - self.piece:
            raise ValueError(
                f"memory.budget is {self.budget} tokens with a recent window of {self.recent} and pieces of "
                f"{self.piece}; use a budget of at least both, a window of at least a piece, and pieces of "
                f"{self.least} or more"
            )
        if not 0 <= self.slack < 1 or self.at_once < 1 or self.half_life <= 0 or self.per_block < 0:
            raise ValueError(
                f"memory.slack is {self.slack}, at_once {self.at_once}, half_life {self.half_life}; "
                "use 0 <= slack < 1, and more than 0"
            )

    @property
    def pins(self) -> int:
        """What pinned blocks may have together."""
        return self.budget - self.recent - self.piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A masked block. Option k is a level and its tokens: the first leaves it as it is, the last drops it."""

    block: Block
    score: float
    levels: tuple[int, ...]
    options: tuple[int, ...]  # falling


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A masked block to be written again within ``budget`` tokens; 0: it goes."""

    block: Block
    level: int
    budget: int  # of its line
    room: int  # of its text alone, about
    left: str
    original: str  # with absolute dates
    right: str


@dataclass(slots=True, kw_only=True)
class Memory:
    """What keeps states of memory: it has no state itself, but for ``counters`` of what it did
    (``memory/{rewritten,gone,unsupported,too_long,read,wrote}``, the last two in tokens)."""

    sizes: Sizes
    count: Callable[[str], int]
    originals: Originals
    importance: Importance = lexical
    refiller: Refiller | None = None  # None: extracts
    whole: Callable[[MemoryState], int] | None = None  # tokens of a state in the caller's own form
    on_block: Callable[[Block], None] = lambda block: None  # called with every new piece
    counters: Counter[str] = field(default_factory=Counter)

    # -- what a caller does

    def append(self, state: MemoryState, turn: Turn) -> MemoryState:
        """Within the budget again. ValueError for a pin for which there is no room, and for a ``count`` that
        is none."""
        return self.fit(self.joined(state, turn))

    def pin(self, state: MemoryState, id: int) -> MemoryState:
        """The block verbatim, from now on. ValueError where it is not in the memory, or there is no room for
        it beside other pins."""
        block = state.block(id)
        if block is None:
            raise ValueError(f"the memory has no block {id} in the context; restore it first")
        return self.restore(state, replace(block, pinned=True))

    def unpin(self, state: MemoryState, id: int) -> MemoryState:
        blocks = tuple(replace(block, pinned=False) if block.id == id else block for block in state.blocks)
        return replace(state, blocks=blocks)

    def restore(self, state: MemoryState, block: Block) -> MemoryState:
        """``block`` (whatever became of it) with its original, at its place; others give way."""
        text = self.originals.get(block.source)
        restored = replace(
            block, text=text, tokens=block.whole, level=0, uses=block.uses + 1, used_at=state.turns
        )
        others = [one for one in state.blocks if one.id != block.id]
        self._check_pins([*others, restored])
        blocks = tuple(sorted([*others, restored], key=lambda one: one.id))
        return self.fit(replace(state, blocks=blocks), frozenset([block.id]))

    def fit(self, state: MemoryState, keep: frozenset[int] = frozenset()) -> MemoryState:
        """Within the budget; blocks of ``keep`` (one piece at most) stay as they are."""
        while self.measure(state) > self.sizes.budget:
            gaps = self.plan(state, keep)
            state = self.apply(state, gaps, [self._refilled(gap) for gap in gaps if gap.budget])
        return state

    def _refilled(self, gap: Gap) -> str:
        return self.refiller(gap.left, gap.original, gap.right, gap.room) if self.refiller else ""

    # -- the parts

    def joined(self, state: MemoryState, turn: Turn) -> MemoryState:
        """With the pieces of the turn behind it, whatever the budget; blocks that it speaks of are used."""
        day_of(turn.day)
        used = spoken_of(state.blocks, turn.text)
        old = [
            replace(block, uses=block.uses + 1, used_at=state.turns) if block.id in used else block
            for block in state.blocks
        ]
        pieces = split(turn.text, lambda text: self._verbatim_cost(turn, text) <= self.sizes.piece)
        sources = [self.originals.put(piece) for piece in pieces]
        last = old[-1] if old and old[-1].id == state.next_id - 1 else None
        if last is not None and sources:
            old[-1] = replace(last, after=sources[0])
        new = [
            Block(
                id=state.next_id + k,
                turn=state.turns,
                part=k,
                speaker=turn.speaker,
                day=turn.day,
                text=piece,
                tokens=(cost := self._verbatim_cost(turn, piece)),
                whole=cost,
                source=sources[k],
                before=sources[k - 1] if k else last.source if last else "",
                after=sources[k + 1] if k + 1 < len(sources) else "",
                pinned=turn.pinned,
                used_at=state.turns,
                score=score_text(piece, old),
            )
            for k, piece in enumerate(pieces)
        ]
        self._check_pins([*old, *new])
        for block in new:
            self.on_block(block)
        return MemoryState(blocks=(*old, *new), turns=state.turns + 1, next_id=state.next_id + len(new))

    def measure(self, state: MemoryState) -> int:
        """Tokens of the context in the caller's form; without one of the lines together, or one by one where
        these are more."""
        if self.whole is not None:
            return self.whole(state)
        verbatim = sum(not block.level for block in state.blocks)
        return max(state.tokens, self._count(state.text) + self.sizes.per_block * verbatim)

    def recent(self, state: MemoryState) -> set[int]:
        """Ids of the window: the newest blocks, none missing or shortened, of ``sizes.recent`` tokens at
        most together."""
        left = self.sizes.recent
        for age, block in enumerate(reversed(state.blocks), 1):
            left -= block.tokens
            if left < 0 or block.level or block.id != state.next_id - age:
                return set(range(state.next_id - age + 1, state.next_id))
        return {block.id for block in state.blocks}

    def masked(self, state: MemoryState, need: int, keep: frozenset[int] = frozenset()) -> list[Candidate]:
        """The blocks that matter least for their length and age, in that order: ``at_once`` of them, or as
        many more as it takes to free ``need`` tokens."""
        window = self.recent(state) | keep
        free = [block for block in state.blocks if not block.pinned and block.id not in window]
        ages = [0.5 ** ((state.turns - one.used_at) / self.sizes.half_life) for one in free]
        scores = [score * age for score, age in zip(self.importance(state, free), ages, strict=True)]
        order = sorted(range(len(free)), key=lambda k: (scores[k] / max(1, free[k].tokens), free[k].id))
        found: list[Candidate] = []
        freed = 0
        for k in order:
            if len(found) >= self.sizes.at_once and freed >= need:
                break
            found.append(self._candidate(free[k], scores[k]))
            freed += free[k].tokens
        return found

    def plan(self, state: MemoryState, keep: frozenset[int] = frozenset()) -> list[Gap]:
        """Mask and allocate: what is written again, in order of time. ValueError where nothing may go."""
        total = self.measure(state)
        need = total - math.floor(self.sizes.budget * (1 - self.sizes.slack))
        candidates = self.masked(state, need, keep)
        if not candidates:
            raise ValueError(
                f"count gives {total} tokens for a memory of {len(state.blocks)} blocks that have "
                f"{state.tokens} one by one, which the budget of {self.sizes.budget} cannot hold; "
                "raise it, or use a count that grows with the text"
            )
        room = max(0, sum(candidate.block.tokens for candidate in candidates) - need)
        chosen = allocate(
            [candidate.score for candidate in candidates],
            [candidate.block.whole for candidate in candidates],
            [candidate.options for candidate in candidates],
            room,
        )
        gaps = (
            self._gap(one, k)
            for one, k in zip(candidates, chosen, strict=True)
            if one.options[k] < one.block.tokens
        )
        return sorted(gaps, key=lambda gap: gap.block.id)

    def apply(self, state: MemoryState, gaps: Sequence[Gap], texts: Sequence[str]) -> MemoryState:
        """With ``texts`` in the gaps that have a budget, in order, where they fit and say nothing that the
        original does not; else with extracts, and where not even these fit without the block."""
        written = iter(texts)
        found = {gap.block.id: self._fill(gap, next(written)) if gap.budget else None for gap in gaps}
        self.counters["memory/gone"] += sum(block is None for block in found.values())
        self.counters["memory/rewritten"] += sum(block is not None for block in found.values())
        blocks = (found.get(block.id, block) for block in state.blocks)
        return replace(state, blocks=tuple(block for block in blocks if block is not None))

    def faults(self, gap: Gap, text: str) -> list[str]:
        """Numbers, dates and names of a refill that its original lacks."""
        also = f"{gap.original}\n{gap.block.speaker}"
        return find_unsupported(text, self.originals.get(gap.block.source), also)

    # -- how

    def _candidate(self, block: Block, score: float) -> Candidate:
        """Its levels are those at which there is an extract at least."""
        levels, options, text = [block.level], [block.tokens], self._text(block)
        for level in range(block.level + 1, GONE):
            tokens = math.ceil(LEVELS[level] * block.whole)
            if self.sizes.least <= tokens < options[-1] and extract(text, self._within(block, tokens)):
                levels.append(level)
                options.append(tokens)
        return Candidate(block=block, score=score, levels=(*levels, GONE), options=(*options, 0))

    def _gap(self, one: Candidate, option: int) -> Gap:
        block, get = one.block, self.originals.get
        budget = one.options[option]
        return Gap(
            block=block,
            level=one.levels[option],
            budget=budget,
            room=max(0, budget - self._cost(block.speaker, "")),
            left=get(block.before)[-SIGHT:] if block.before else "",
            original=self._text(block),
            right=get(block.after)[:SIGHT] if block.after else "",
        )

    def _text(self, block: Block) -> str:
        """What is shortened, with absolute dates."""
        return absolute(self.originals.get(block.source), day_of(block.day))

    def _within(self, block: Block, tokens: int) -> Callable[[str], bool]:
        return lambda text: self._cost(block.speaker, text) <= tokens

    def _fill(self, gap: Gap, text: str) -> Block | None:
        fits = self._within(gap.block, gap.budget)
        self.counters["memory/read"] += sum(map(self._count, (gap.left, gap.original, gap.right)))
        text = " ".join(text.split())
        self.counters["memory/wrote"] += self._count(text) if text else 0
        if text and not fits(text):
            self.counters["memory/too_long"] += 1
            text = ""
        if text and self.faults(gap, text):
            self.counters["memory/unsupported"] += 1
            text = ""
        text = text or extract(gap.original, fits)
        if not text or not fits(text) or self.faults(gap, text):
            return None
        tokens = self._cost(gap.block.speaker, text)
        return replace(gap.block, text=text, level=gap.level, tokens=tokens)

    def _check_pins(self, blocks: Sequence[Block]) -> None:
        pinned = sum(block.whole for block in blocks if block.pinned)
        if pinned > self.sizes.pins:
            raise ValueError(
                f"pinned blocks have {pinned} tokens together and the memory has room for {self.sizes.pins} "
                f"(its budget of {self.sizes.budget} less the recent window and one piece); pin less"
            )

    def _verbatim_cost(self, turn: Turn, text: str) -> int:
        return self._count(line(turn.speaker, text, turn.day)) + self.sizes.per_block

    def _cost(self, speaker: str, text: str) -> int:
        return self._count(line(speaker, text))

    def _count(self, text: str) -> int:
        tokens = self.count(text)
        if not isinstance(tokens, int) or tokens < 0:
            raise ValueError(f"count gives {tokens!r} for a text; it has to give a number of tokens")
        return tokens


def split(text: str, fits: Callable[[str], bool]) -> list[str]:
    """``text`` in pieces for each of which ``fits``, halved at ends of paragraphs, sentences or words where
    there are any: joined they are the text. ValueError where not even a character fits."""
    if fits(text):
        return [text] if text else []
    if len(text) < 2:
        raise ValueError(
            f"count gives more tokens for {text!r} with its speaker than memory.piece; use larger pieces or "
            "another count"
        )
    at = _middle(text)
    return [*split(text[:at], fits), *split(text[at:], fits)]


def _middle(text: str) -> int:
    """A place to cut, in the middle half if possible."""
    low, high = len(text) // 4, len(text) - len(text) // 4
    for mark in ("\n\n", "\n", ". ", "! ", "? ", " "):
        places = [at + len(mark) for at in _places(text, mark, low, high)]
        if places:
            return min(places, key=lambda at: (abs(2 * at - len(text)), at))
    return len(text) // 2


def _places(text: str, mark: str, low: int, high: int) -> Generator[int]:
    at = text.find(mark, low, high)
    while at >= 0:
        yield at
        at = text.find(mark, at + 1, high)
