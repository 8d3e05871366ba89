"""The settings of a drafter (its sources and limits), and its counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

MOST_DEPTH = 32  # of a draft
BINS = 10  # of the table of reliability


class Source(StrEnum):
    """The sources of draft tokens. The order is that of ``Source`` in native/estimate.h."""

    HISTORY = "history"  # closed responses to the same prompt
    SIBLING = "sibling"  # responses to it that are being sampled, or were since the last ``forget``
    OWN = "own"  # the sequence itself and its prompt
    OTHER = "other"  # recent responses to any prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings of a drafter: by default every source, the noise, and a single budget for the batch.

    Memory is bounded: the ring over all prompts by ``ring`` observations, the live text of one prompt by
    ``group`` and of all by ``total`` of them, of at most 64 bytes each (half of that is usual).
    """

    sources: frozenset[Source] = frozenset(Source)
    use_noise: bool = True  # compare the uniform of the coming position with stored intervals
    length: int = MOST_DEPTH  # the longest draft, in tokens
    most: int = 32  # last tokens of context that are searched for in history ...
    least: int = 3  # ... and how many of them must match at least
    epochs: int = 3  # newest blocks of history that are searched, at most 4
    ladder: tuple[int, ...] = (6, 3)  # context lengths tried in history when the longest match is unsure
    live: tuple[int, ...] = (12, 6, 3)  # context lengths in siblings' and own text, longest first
    shared: tuple[int, ...] = (8, 4)  # the same over all prompts
    walk: int = 16  # newest occurrences that are read, of the shortest context in live text
    ring: int = 1 << 18
    group: int = 1 << 18
    total: int = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStats:
    """The counters of a drafter since it was created; ``new - old`` has the counts of the time between.

    By source, by depth (1 first) and by bin of the estimate, in tenths. A candidate is labelled once its
    position is sampled, whether it was drafted or not; ``predicted`` is the sum of their estimates.
    """

    passes: int  # calls of propose
    naps: int  # of these, the calls in which the whole drafter was skipped
    looked: int  # look-ups, each of the candidates for a position
    slept: int  # (sequence, pass) pairs in which a sequence was skipped
    emitted: int  # emitted tokens, drafted or not
    drafted: Mapping[Source, int]
    accepted: Mapping[Source, int]
    drafted_at: tuple[int, ...]  # [MOST_DEPTH]
    accepted_at: tuple[int, ...]  # [MOST_DEPTH]
    labels: tuple[int, ...]  # [BINS]
    hits: tuple[int, ...]  # [BINS] labelled candidates that were right
    predicted: tuple[float, ...]  # [BINS]
    open_s: float  # seconds spent in open, propose and observe; one thread, no waiting
    propose_s: float
    observe_s: float
    live_bytes: int = field(metadata={"state": True})  # of live text, now
    sequences: int = field(metadata={"state": True})  # open ones, now
    groups: int = field(metadata={"state": True})  # prompts with live text, now

    @property
    def seconds(self) -> float:
        """Seconds spent in open, propose and observe together."""
        return self.open_s + self.propose_s + self.observe_s

    def __sub__(self, earlier: DraftStats) -> DraftStats:
        """Return the counts since ``earlier``; fields that are a state keep their current value."""
        values: dict[str, Any] = {}
        for counter in fields(self):
            new_value, old_value = getattr(self, counter.name), getattr(earlier, counter.name)
            values[counter.name] = (
                new_value if counter.metadata.get("state") else _subtract(new_value, old_value)
            )
        return DraftStats(**values)


def _subtract(new_value: Any, old_value: Any) -> Any:
    if isinstance(new_value, Mapping):
        return {key: new_value[key] - old_value[key] for key in new_value}
    if isinstance(new_value, tuple):
        return tuple(a - b for a, b in zip(new_value, old_value, strict=True))
    return new_value - old_value
