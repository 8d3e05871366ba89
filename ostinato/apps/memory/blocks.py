"""The parts of a memory: blocks in the context, and the originals, which are outside of it and never change.

A turn is cut into pieces of limited length; each piece is a block. A block is verbatim (level 0), shortened
(levels 1 to 4), or gone from the context. A block that is gone can be restored from its original.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ostinato.apps.memory.facts import parse_day, resolve_dates

LEVELS = (1.0, 0.75, 0.5, 0.25, 0.125, 0.0)  # share of the original's tokens that a block of level l may have


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A message. ``speaker`` is a name or a role, ``day`` that of the chat session ("2023-05-08") or ""."""

    speaker: str
    text: str
    day: str = ""
    pinned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of a turn in its present form in the context."""

    id: int  # in order of time
    turn: int
    part: int = 0  # number of the piece in its turn
    speaker: str
    day: str
    text: str
    tokens: int  # of its line, with the tokens that the caller adds for each block
    whole: int  # of the original's line
    source: str  # sha256 of the original
    before: str = ""  # sha256 of the original of the piece before it
    after: str = ""
    level: int = 0
    pinned: bool = False
    uses: int = 0  # number of later turns that mentioned it, and of its restorations
    used_at: int = 0  # the turn of the last use, or its own
    score: float = 0.0  # by ``importance.score_text``, when the block was new

    @property
    def line(self) -> str:
        return format_line(self.speaker, self.text, self.day if not self.level else "")


def format_line(speaker: str, text: str, day: str = "") -> str:
    """Format a block as a line. The day is added if the text has dates that are relative to it."""
    is_relative = day and resolve_dates(text, parse_day(day)) != text
    return f"{f'[{day[:10]}] ' if is_relative else ''}{speaker}: {text}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryState:
    """The context as a value, blocks in order of time. Copies share the blocks, so a fork costs nothing."""

    blocks: tuple[Block, ...] = ()
    turns: int = 0  # number of appended turns
    next_id: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all lines, each counted on its own."""
        return sum(block.tokens for block in self.blocks)

    @property
    def text(self) -> str:
        return "".join(block.line for block in self.blocks)

    def find_block(self, id: int) -> Block | None:
        return next((block for block in self.blocks if block.id == id), None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> MemoryState:
        return cls(**{**tree, "blocks": tuple(Block(**row) for row in tree["blocks"])})


class Originals(Protocol):
    """A store of original texts by hash. Its texts never change and are never deleted."""

    def put(self, text: str) -> str:
        """Store a text, unless it is there already, and return its sha256."""
        ...

    def get(self, source: str) -> str:
        """Return a text by its sha256. Raises KeyError where there is none."""
        ...


@dataclass(slots=True)
class Kept:
    """Originals in the memory of this process."""

    texts: dict[str, str] = field(default_factory=dict)

    def put(self, text: str) -> str:
        source = hash_text(text)
        self.texts.setdefault(source, text)
        return source

    def get(self, source: str) -> str:
        return self.texts[source]


def hash_text(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
