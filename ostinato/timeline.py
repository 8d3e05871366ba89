"""What every worker was busy with, and when: the rows of timeline.jsonl, merged so that a run stays small.

A row is a span: {"worker": "sampler-0", "kind": "decode", "from": 1763650000.1, "to": 1763650000.4}.
Times are Unix seconds of the host that worked. What no span covers is idle. The file is only ever
appended to, like the ledger: work that is done again was done twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

GAP_S = 0.005  # spans of one kind that are nearer than this are one


class Kind(StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    WAIT = "wait"  # for somebody by name; idle, with a reason
    PUBLISH = "publish"
    GRADE = "grade"
    PACK = "pack"
    TRAIN = "train"
    SAVE = "save"
    START = "start"  # loading, until it can work


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    worker: str
    kind: Kind
    start: float  # Unix seconds
    stop: float
    step: int = -1  # that it belongs to, where it belongs to one
    amount: int = 0  # rows, tokens or bytes

    def to_json(self) -> dict[str, Any]:
        more = {"amount": self.amount} if self.amount else {}
        step = {"step": self.step} if self.step >= 0 else {}
        return {
            "worker": self.worker,
            "kind": self.kind,
            "from": round(self.start, 4),
            "to": round(self.stop, 4),
            **step,
            **more,
        }

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Span:
        return cls(
            worker=row["worker"],
            kind=Kind(row["kind"]),
            start=row["from"],
            stop=row["to"],
            step=row.get("step", -1),
            amount=row.get("amount", 0),
        )


def merged(spans: Iterable[Span], gap_s: float = GAP_S) -> Iterator[Span]:
    """Neighbours of one worker, kind and step as one span; in the order of their ends."""
    last: dict[str, Span] = {}
    for span in spans:
        before = last.get(span.worker)
        alike = before is not None and (before.kind, before.step) == (span.kind, span.step)
        if before is not None and alike and span.start - before.stop <= gap_s:
            last[span.worker] = Span(
                worker=span.worker,
                kind=span.kind,
                start=before.start,
                stop=max(before.stop, span.stop),
                step=span.step,
                amount=before.amount + span.amount,
            )
            continue
        if before is not None:
            yield before
        last[span.worker] = span
    yield from sorted(last.values(), key=lambda span: span.stop)


__all__ = ["GAP_S", "Kind", "Span", "merged"]
