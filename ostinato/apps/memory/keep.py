"""A memory within a budget: append a turn; if the memory is too long, mask, allocate and refill.

    append    make verbatim blocks of the turn's pieces; within the budget nothing else happens
    mask      choose the blocks outside the recent window that matter least for their length and age
    allocate  choose the levels of these blocks that are worth most in the remaining room
    refill    shorten each from its original, never from a shortened text; a text that fails the checks is
              replaced by an extract

The budget holds after every append, by construction: pieces, window and pins are limited so that all other
blocks can always be dropped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ostinato.apps.memory.blocks import LEVELS, Block, MemoryState, Originals, Turn, format_line
from ostinato.apps.memory.facts import find_unsupported, parse_day, resolve_dates
from ostinato.apps.memory.importance import Importance, find_mentioned, score_blocks, score_text
from ostinato.apps.memory.refill import Refiller, make_extract

COMPRESSIBILITY = 0.3  # tau as a share of the tokens of the original


def compute_utility(score: float, whole: int, tokens: float | np.ndarray) -> float | np.ndarray:
    """Compute the utility of ``tokens`` tokens of a block of ``whole`` tokens and importance ``score``."""
    return score * -np.expm1(-np.asarray(tokens, np.float64) / (COMPRESSIBILITY * max(whole, 1)))


def allocate(
    scores: Sequence[float], wholes: Sequence[int], options: Sequence[Sequence[int]], room: int
) -> list[int]:
    """Return the index of an option (a number of tokens) for each block, so that together they fit into
    ``room`` and have the greatest utility.

    Raises ValueError for a block without an option of 0, and for a ``room`` below 0. Of choices with exactly
    the same utility, the one with more tokens for the earlier block is taken. Time and memory are in
    proportion to blocks x options x room.
    """
    if any(0 not in counts for counts in options) or room < 0:
        raise ValueError(
            f"a room of {room} tokens for options {[list(counts) for counts in options]}; each needs a 0"
        )
    best_utilities = np.zeros(room + 1)  # [c]: utility of the blocks from the last one back, within c tokens
    choices: list[np.ndarray] = []
    for score, whole, counts in reversed(list(zip(scores, wholes, options, strict=True))):
        utilities = np.full((len(counts), room + 1), -np.inf)
        for k, tokens in enumerate(counts):
            if tokens <= room:
                utilities[k, tokens:] = best_utilities[: room + 1 - tokens] + compute_utility(
                    score, whole, tokens
                )
        option_order = np.argsort([-tokens for tokens in counts], kind="stable")
        choices.append(option_order[np.argmax(utilities[option_order], axis=0)])
        best_utilities = utilities.max(axis=0)
    indices, remaining = [], room
    for choice, counts in zip(reversed(choices), options, strict=True):
        indices.append(int(choice[remaining]))
        remaining -= counts[indices[-1]]
    return indices


GONE = len(LEVELS) - 1
SIGHT = 200  # characters of the originals beside a gap that a refiller gets


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes in tokens of ``count``, for lines with their speakers."""

    budget: int
    recent: int  # the newest turns, verbatim
    piece: int = 96  # turns are cut into pieces of so many at most
    per_block: int = 0  # added to each verbatim block by the caller's form: the marks of a chat template
    least: int = 12  # a block is not shortened to fewer
    slack: float = 0.1  # share of the budget that is freed in addition
    at_once: int = 8  # blocks that are masked, if so many are enough
    half_life: float = 200.0  # turns after which a block counts half

    @classmethod
    def of(cls, budget: int, recent: int = 0, per_block: int = 0) -> Sizes:
        """Choose sizes: a window of a third of the budget unless it is given, pieces of an eighth, but
        of 96 tokens at most. Raises ValueError for a budget or a window that is too small."""
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
        """Tokens that pinned blocks may have together."""
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
    """A masked block to be written again within ``budget`` tokens; 0: the block is dropped."""

    block: Block
    level: int
    budget: int  # of its line
    room: int  # of its text alone, about
    left: str
    original: str  # with absolute dates
    right: str


@dataclass(slots=True, kw_only=True)
class Memory:
    """The functions that make one state of a memory from another. They store originals, and add to
    ``counters`` (``memory/{rewritten,gone,unsupported,too_long,read,wrote}``, the last two in tokens)."""

    sizes: Sizes
    count: Callable[[str], int]
    originals: Originals
    importance: Importance = score_blocks
    refiller: Refiller | None = None  # None: extracts
    whole: Callable[[MemoryState], int] | None = None  # tokens of a state in the caller's own form
    on_block: Callable[[Block], None] = lambda block: None  # called with every new piece
    counters: Counter[str] = field(default_factory=Counter)

    # -- for callers

    def append(self, state: MemoryState, turn: Turn) -> MemoryState:
        """Append a turn (see ``append_blocks``) and bring the state within the budget. Raises ValueError for
        a day that is no date, for pins without room, and for a ``count`` that gives no numbers of tokens or
        too large ones."""
        return self.fit(self.append_blocks(state, turn))

    def pin(self, state: MemoryState, id: int) -> MemoryState:
        """Restore the block and keep it verbatim from now on. Raises ValueError if it is not in the context,
        or if there is no room for it beside other pins."""
        block = state.find_block(id)
        if block is None:
            raise ValueError(f"the memory has no block {id} in the context; restore it first")
        return self.restore(state, replace(block, pinned=True))

    def unpin(self, state: MemoryState, id: int) -> MemoryState:
        """Allow a block to be shortened again. An id that is not in the context changes nothing."""
        blocks = tuple(replace(block, pinned=False) if block.id == id else block for block in state.blocks)
        return replace(state, blocks=blocks)

    def restore(self, state: MemoryState, block: Block) -> MemoryState:
        """Put ``block``, which may be shortened or gone, back at its place with its original, as a use of it.
        Other blocks make room. Raises ValueError if there is no room for it, KeyError without its
        original."""
        text = self.originals.get(block.source)
        restored_block = replace(
            block, text=text, tokens=block.whole, level=0, uses=block.uses + 1, used_at=state.turns
        )
        others = [other for other in state.blocks if other.id != block.id]
        self._check_pins([*others, restored_block])
        blocks = tuple(sorted([*others, restored_block], key=lambda member: member.id))
        return self.fit(replace(state, blocks=blocks), frozenset([block.id]))

    def fit(self, state: MemoryState, fixed_ids: frozenset[int] = frozenset()) -> MemoryState:
        """Bring the state within the budget. The blocks ``fixed_ids`` (one piece at most) stay as they are.
        Raises ValueError if the other blocks cannot make room."""
        while self.measure(state) > self.sizes.budget:
            gaps = self.plan(state, fixed_ids)
            state = self.apply(state, gaps, [self._refill(gap) for gap in gaps if gap.budget])
        return state

    def _refill(self, gap: Gap) -> str:
        return self.refiller(gap.left, gap.original, gap.right, gap.room) if self.refiller else ""

    # -- steps of a fit

    def append_blocks(self, state: MemoryState, turn: Turn) -> MemoryState:
        """Append the pieces of the turn as blocks, whatever the budget. Their originals are stored,
        ``on_block`` is called with each, and blocks that the turn mentions count as used. Raises ValueError
        as ``append``."""
        parse_day(turn.day)  # raises its error before anything is stored
        used_ids = find_mentioned(state.blocks, turn.text)
        old_blocks = [
            replace(block, uses=block.uses + 1, used_at=state.turns) if block.id in used_ids else block
            for block in state.blocks
        ]
        pieces = split_text(turn.text, lambda text: self._count_verbatim(turn, text) <= self.sizes.piece)
        sources = [self.originals.put(piece) for piece in pieces]
        last = old_blocks[-1] if old_blocks and old_blocks[-1].id == state.next_id - 1 else None
        if last is not None and sources:
            old_blocks[-1] = replace(last, after=sources[0])
        new_blocks = [
            Block(
                id=state.next_id + k,
                turn=state.turns,
                part=k,
                speaker=turn.speaker,
                day=turn.day,
                text=piece,
                tokens=(tokens := self._count_verbatim(turn, piece)),
                whole=tokens,
                source=sources[k],
                before=sources[k - 1] if k else last.source if last else "",
                after=sources[k + 1] if k + 1 < len(sources) else "",
                pinned=turn.pinned,
                used_at=state.turns,
                score=score_text(piece, old_blocks),
            )
            for k, piece in enumerate(pieces)
        ]
        self._check_pins([*old_blocks, *new_blocks])
        for block in new_blocks:
            self.on_block(block)
        return MemoryState(
            blocks=(*old_blocks, *new_blocks), turns=state.turns + 1, next_id=state.next_id + len(new_blocks)
        )

    def measure(self, state: MemoryState) -> int:
        """Count the tokens of the context in the caller's form. Without such a form, the count is the larger
        one of two: of all lines together, and line by line."""
        if self.whole is not None:
            return self.whole(state)
        verbatim_count = sum(not block.level for block in state.blocks)
        return max(state.tokens, self._count(state.text) + self.sizes.per_block * verbatim_count)

    def find_recent_ids(self, state: MemoryState) -> set[int]:
        """Return the ids of the recent window: the newest blocks up to one that is missing or shortened, of
        ``sizes.recent`` tokens together at most."""
        remaining = self.sizes.recent
        for age, block in enumerate(reversed(state.blocks), 1):
            remaining -= block.tokens
            if remaining < 0 or block.level or block.id != state.next_id - age:
                return set(range(state.next_id - age + 1, state.next_id))
        return {block.id for block in state.blocks}

    def choose_candidates(
        self, state: MemoryState, excess_tokens: int, fixed_ids: frozenset[int] = frozenset()
    ) -> list[Candidate]:
        """Choose the blocks that matter least for their length and age, in that order. There are ``at_once``
        of them, or more if these have fewer than ``excess_tokens`` tokens; fewer if no more may be masked."""
        window = self.find_recent_ids(state) | fixed_ids
        free_blocks = [block for block in state.blocks if not block.pinned and block.id not in window]
        ages = [0.5 ** ((state.turns - block.used_at) / self.sizes.half_life) for block in free_blocks]
        scores = [score * age for score, age in zip(self.importance(state, free_blocks), ages, strict=True)]
        order = sorted(
            range(len(free_blocks)),
            key=lambda k: (scores[k] / max(1, free_blocks[k].tokens), free_blocks[k].id),
        )
        candidates: list[Candidate] = []
        freed_tokens = 0
        for k in order:
            if len(candidates) >= self.sizes.at_once and freed_tokens >= excess_tokens:
                break
            candidates.append(self._make_candidate(free_blocks[k], scores[k]))
            freed_tokens += free_blocks[k].tokens
        return candidates

    def plan(self, state: MemoryState, fixed_ids: frozenset[int] = frozenset()) -> list[Gap]:
        """Mask blocks and allocate their room. Return the gaps to be written again, in order of time. Raises
        ValueError if no block may be masked."""
        total = self.measure(state)
        excess_tokens = total - math.floor(self.sizes.budget * (1 - self.sizes.slack))
        candidates = self.choose_candidates(state, excess_tokens, fixed_ids)
        if not candidates:
            raise ValueError(
                f"count gives {total} tokens for a memory of {len(state.blocks)} blocks that have "
                f"{state.tokens} one by one, which the budget of {self.sizes.budget} cannot hold; "
                "raise it, or use a count that grows with the text"
            )
        room = max(0, sum(candidate.block.tokens for candidate in candidates) - excess_tokens)
        option_indices = allocate(
            [candidate.score for candidate in candidates],
            [candidate.block.whole for candidate in candidates],
            [candidate.options for candidate in candidates],
            room,
        )
        gaps = (
            self._make_gap(candidate, k)
            for candidate, k in zip(candidates, option_indices, strict=True)
            if candidate.options[k] < candidate.block.tokens
        )
        return sorted(gaps, key=lambda gap: gap.block.id)

    def apply(self, state: MemoryState, gaps: Sequence[Gap], texts: Sequence[str]) -> MemoryState:
        """Fill the gaps that have a budget with ``texts``, in order. A text that does not fit, or has a fact
        that its original lacks, is replaced by an extract. A block without a budget or a fitting extract is
        dropped."""
        remaining_texts = iter(texts)
        block_of = {
            gap.block.id: self._fill(gap, next(remaining_texts)) if gap.budget else None for gap in gaps
        }
        self.counters["memory/gone"] += sum(block is None for block in block_of.values())
        self.counters["memory/rewritten"] += sum(block is not None for block in block_of.values())
        blocks = (block_of.get(block.id, block) for block in state.blocks)
        return replace(state, blocks=tuple(block for block in blocks if block is not None))

    def find_faults(self, gap: Gap, text: str) -> list[str]:
        """Return numbers, dates and names of a refill that its original lacks."""
        context = f"{gap.original}\n{gap.block.speaker}"
        return find_unsupported(text, self.originals.get(gap.block.source), context)

    # -- details

    def _make_candidate(self, block: Block, score: float) -> Candidate:
        """Make a candidate with the levels that an extract at least fits into, and the last."""
        levels, options, text = [block.level], [block.tokens], self._resolve_dates(block)
        for level in range(block.level + 1, GONE):
            tokens = math.ceil(LEVELS[level] * block.whole)
            if self.sizes.least <= tokens < options[-1] and make_extract(
                text, self._make_fit_test(block, tokens)
            ):
                levels.append(level)
                options.append(tokens)
        return Candidate(block=block, score=score, levels=(*levels, GONE), options=(*options, 0))

    def _make_gap(self, candidate: Candidate, option_index: int) -> Gap:
        block, get = candidate.block, self.originals.get
        budget = candidate.options[option_index]
        return Gap(
            block=block,
            level=candidate.levels[option_index],
            budget=budget,
            room=max(0, budget - self._count_line(block.speaker, "")),
            left=get(block.before)[-SIGHT:] if block.before else "",
            original=self._resolve_dates(block),
            right=get(block.after)[:SIGHT] if block.after else "",
        )

    def _resolve_dates(self, block: Block) -> str:
        """Return the text to shorten: the original of a block, with absolute dates."""
        return resolve_dates(self.originals.get(block.source), parse_day(block.day))

    def _make_fit_test(self, block: Block, tokens: int) -> Callable[[str], bool]:
        return lambda text: self._count_line(block.speaker, text) <= tokens

    def _fill(self, gap: Gap, text: str) -> Block | None:
        """Return the block with ``text``, or with an extract if the text is no good. A good text fits and has
        no fact that the original lacks. Return None if the extract is not good either. Counts what was read
        and written, and texts that were refused."""
        fits = self._make_fit_test(gap.block, gap.budget)
        self.counters["memory/read"] += sum(map(self._count, (gap.left, gap.original, gap.right)))
        text = " ".join(text.split())
        self.counters["memory/wrote"] += self._count(text) if text else 0
        if text and not fits(text):
            self.counters["memory/too_long"] += 1
            text = ""
        if text and self.find_faults(gap, text):
            self.counters["memory/unsupported"] += 1
            text = ""
        text = text or make_extract(gap.original, fits)
        if not text or not fits(text) or self.find_faults(gap, text):
            return None
        tokens = self._count_line(gap.block.speaker, text)
        return replace(gap.block, text=text, level=gap.level, tokens=tokens)

    def _check_pins(self, blocks: Sequence[Block]) -> None:
        total = sum(block.whole for block in blocks if block.pinned)
        if total > self.sizes.pins:
            raise ValueError(
                f"pinned blocks have {total} tokens together and the memory has room for {self.sizes.pins} "
                f"(its budget of {self.sizes.budget} less the recent window and one piece); pin less"
            )

    def _count_verbatim(self, turn: Turn, text: str) -> int:
        return self._count(format_line(turn.speaker, text, turn.day)) + self.sizes.per_block

    def _count_line(self, speaker: str, text: str) -> int:
        return self._count(format_line(speaker, text))

    def _count(self, text: str) -> int:
        tokens = self.count(text)
        if not isinstance(tokens, int) or tokens < 0:
            raise ValueError(f"count gives {tokens!r} for a text; it has to give a number of tokens")
        return tokens


def split_text(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Split ``text`` into pieces that fit. Joined they are the text; an empty text has none. The text is
    halved at ends of paragraphs, sentences or words if it has any. Raises ValueError if not even a character
    fits."""
    if fits(text):
        return [text] if text else []
    if len(text) < 2:
        raise ValueError(
            f"count gives more tokens for {text!r} with its speaker than memory.piece; use larger pieces or "
            "another count"
        )
    cut = _find_cut(text)
    return [*split_text(text[:cut], fits), *split_text(text[cut:], fits)]


def _find_cut(text: str) -> int:
    """Find a place to cut, in the middle half if possible."""
    low, high = len(text) // 4, len(text) - len(text) // 4
    for mark in ("\n\n", "\n", ". ", "! ", "? ", " "):
        places = [place + len(mark) for place in _find_marks(text, mark, low, high)]
        if places:
            return min(places, key=lambda place: (abs(2 * place - len(text)), place))
    return len(text) // 2


def _find_marks(text: str, mark: str, low: int, high: int) -> Generator[int]:
    """Yield the places from ``low`` to ``high`` at which ``mark`` begins."""
    place = text.find(mark, low, high)
    while place >= 0:
        yield place
        place = text.find(mark, place + 1, high)
