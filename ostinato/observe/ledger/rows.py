"""The rows of ledger.jsonl: their required fields, and the time that each accounts for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ostinato.run import Jsonl, RunFolder

Row = Mapping[str, Any]


class Event(StrEnum):
    START = "start"
    STEP = "step"
    EVAL = "eval"
    END = "end"


# ---- fields of a row


def is_number(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _is_counts(value: Any) -> bool:
    """Whether ``value`` is a mapping of names to numbers."""
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _is_token_counts(value: Any) -> bool:
    """Whether ``value`` maps names to numbers, and "dropped" to numbers by reason."""
    return (
        isinstance(value, dict)
        and _is_counts(value | {"dropped": 0})
        and _is_counts(value.get("dropped", {}))
    )


def _is_pools(value: Any) -> bool:
    """Whether ``value`` maps names to a number of devices and their busy seconds by part."""
    pools = value.values() if isinstance(value, dict) else [None]
    return all(
        isinstance(pool, dict) and is_number(pool.get("devices")) and _is_counts(pool.get("busy", {}))
        for pool in pools
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


FORMS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("session", "step", "at", "process_started", "seconds", "ended_at"), is_number),
    **dict.fromkeys(("price_per_device_hour", "clock_back"), is_number),
    **dict.fromkeys(("flops", "routing", "judge", "forgetting"), _is_counts),
    **{
        "tokens": _is_token_counts,
        "pools": _is_pools,
        "currency": _is_text,
        "why": _is_text,
        "part": _is_text,
    },
}
NEEDED_FIELDS: Mapping[Event, tuple[str, ...]] = {  # the fields that every reader needs
    Event.START: ("session", "at", "process_started", "step", "pools", "price_per_device_hour", "currency"),
    Event.STEP: ("session", "step", "seconds", "ended_at", "pools", "tokens"),
    Event.EVAL: ("session", "step", "seconds", "ended_at", "pools"),
    Event.END: ("session", "at", "step", "why"),
}


OLDER_EVENTS = ("save", "lost")  # rows of earlier versions, whose time counts as idle


def read(folder: RunFolder) -> list[dict[str, Any]]:
    """The rows of a run's ledger, see ``check_ledger``."""
    return list(check_ledger(folder.ledger))


def check_ledger(log: Jsonl) -> Iterator[dict[str, Any]]:
    """Yield the rows of a ledger, without a torn last line and rows of ``OLDER_EVENTS``. Raises ValueError
    for a line that is damaged or of another format."""
    for number, row in enumerate(log.rows(), start=1):
        if row.get("event") in OLDER_EVENTS:
            continue
        if fault := find_fault(row, is_first=number == 1):
            raise ValueError(
                f"line {number} of {log.path} {fault}: the ledger is damaged, or of a version of ostinato "
                "that this one does not read; rename the file, and a new ledger begins, without what was "
                "spent so far"
            )
        yield row


def find_fault(row: Row, *, is_first: bool) -> str:
    """The fault of a row, as the rest of a sentence; empty for a good one. ``is_first``: of the ledger."""
    event = row.get("event")
    if event not in tuple(Event):
        return "has no 'event'"
    if is_first and event != Event.START:
        return "is not the start of a session"
    for key in [*NEEDED_FIELDS[Event(event)], *row]:
        if key not in row:
            return f"has no {key!r}"
        if key in FORMS and not FORMS[key](row[key]):
            return f"has {row[key]!r} for {key!r}"
    if event == Event.STEP and not is_number(row["tokens"].get("sampled")):
        return "does not say how many tokens were sampled"
    return ""


# ---- rows as time


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """A row and the time that it accounts for: its own seconds, and the ``gap`` before it without a row."""

    row: Row
    start: Row  # of its session
    event: Event
    gap: float
    seconds: float

    @property
    def is_evaluation(self) -> bool:
        """Whether its own seconds are those of a held-out evaluation, which has finished or was lost."""
        return self.event is Event.EVAL or (self.event is Event.END and self.row.get("part") == "eval")

    @property
    def training(self) -> float:
        """Wall seconds that are not evaluation."""
        return self.gap + (0.0 if self.is_evaluation else self.seconds)

    @property
    def devices(self) -> Mapping[str, int]:
        """Devices by pool, during its own seconds."""
        return count_devices(self.row if "pools" in self.row else self.start)

    def device_seconds(self, *, training: bool = False) -> float:
        own_seconds = 0.0 if training and self.is_evaluation else self.seconds
        return self.gap * sum(count_devices(self.start).values()) + own_seconds * sum(self.devices.values())


def spells(rows: Iterable[Row]) -> Iterator[Spell]:
    """Yield the rows with their time. No second of a session counts twice, and no time between sessions
    counts."""
    start: Row = {}
    cursor = 0.0
    for row in rows:
        event = Event(row["event"])
        if event is Event.START:
            start, cursor = row, row["process_started"]
        seconds = max(0.0, row.get("seconds", 0.0))
        gap = max(0.0, find_end(row) - seconds - cursor)
        cursor = max(cursor, find_end(row))
        yield Spell(row=row, start=start, event=event, gap=gap, seconds=seconds)


def find_end(row: Row) -> float:
    """The end of the row in Unix seconds, by the clock of its process."""
    return row["ended_at"] if "ended_at" in row else row["at"]


def count_devices(row: Row) -> dict[str, int]:
    return {name: pool["devices"] for name, pool in row["pools"].items()}
