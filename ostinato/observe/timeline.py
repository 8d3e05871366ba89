"""The work of every worker over time: the rows of timeline.jsonl, merged so that the file stays small.

A row is a span: {"worker": "sampler-0", "kind": "decode", "from": 1763650000.1, "to": 1763650000.4}.
Times are Unix seconds of the worker's host. A worker does one thing at a time; its name is that of its slot,
so its replacement has the same name. Time that no span covers is idle. The file is append-only, like the
ledger: work that was repeated appears twice.

    spans of a step -> kept -> timeline.jsonl -> coarse -> a picture
                                              -> usage  -> utilisation, idle share
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

GAP_S = 0.005  # spans of one kind that are closer than this are merged
DETAIL_BYTES = 8 << 20  # every time the file grows by this much, half as many steps are written
MOST_PER_STEP = 128  # spans of one worker


class Kind(StrEnum):
    """The kinds of a worker's activity."""

    PREFILL = "prefill"
    DECODE = "decode"
    WAIT = "wait"  # for another worker; idle, with a reason
    PUBLISH = "publish"
    GRADE = "grade"
    PACK = "pack"
    TRAIN = "train"
    SAVE = "save"
    START = "start"  # loading, until it is ready


IDLE = frozenset({Kind.WAIT, Kind.START})  # kinds that do not count as work


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    worker: str
    kind: Kind
    start: float  # Unix seconds
    stop: float
    step: int = -1  # the step it belongs to; -1: none
    amount: int = 0  # rows, tokens or bytes
    busy: float = -1.0  # seconds of work in it, if spans with gaps between them were merged; -1: all of it

    @property
    def length(self) -> float:
        return self.stop - self.start

    @property
    def seconds(self) -> float:
        """Seconds of work, without the gaps between merged spans."""
        return self.length if self.busy < 0 else self.busy

    def to_json(self) -> dict[str, Any]:
        optional = {"amount": self.amount} if self.amount else {}
        step = {"step": self.step} if self.step >= 0 else {}
        gaps = self.length - self.seconds > 1e-4
        optional |= {"busy": round(self.seconds, 4)} if gaps else {}
        return {
            "worker": self.worker,
            "kind": self.kind,
            "from": round(self.start, 4),
            "to": round(self.stop, 4),
            **step,
            **optional,
        }

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Span:
        """The span of a row. Raises KeyError, ValueError or TypeError for an invalid row."""
        return cls(
            worker=str(row["worker"]),
            kind=Kind(row["kind"]),
            start=float(row["from"]),
            stop=float(row["to"]),
            step=int(row.get("step", -1)),
            amount=int(row.get("amount", 0)),
            busy=float(row.get("busy", -1.0)),
        )


# ---- merging


def merge_spans(spans: Iterable[Span], gap_s: float = GAP_S) -> Iterator[Span]:
    """Merge neighbouring spans of one worker, kind and step, at most ``gap_s`` apart; yields them in the
    order of their ends. The merged span covers the gaps, but its ``busy`` does not count them."""
    last: dict[str, Span] = {}
    for span in spans:
        before = last.get(span.worker)
        mergeable = before is not None and (before.kind, before.step) == (span.kind, span.step)
        if before is not None and mergeable and span.start - before.stop <= gap_s:
            last[span.worker] = Span(
                worker=span.worker,
                kind=span.kind,
                start=before.start,
                stop=max(before.stop, span.stop),
                step=span.step,
                amount=before.amount + span.amount,
                busy=before.seconds + span.seconds,
            )
            continue
        if before is not None:
            yield before
        last[span.worker] = span
    yield from sorted(last.values(), key=lambda span: span.stop)


def coarsen(spans: Iterable[Span], grain_s: float) -> list[Span]:
    """Merge spans without changing totals: a worker's short spans within ``grain_s`` seconds become one span
    per kind, placed end to end. Amounts, and seconds by worker and kind, are unchanged, and nothing moves by
    more than the grain; a window of W seconds has at most 2 W / grain + 1 such stretches of a worker. Ordered
    by start."""
    coarse: list[Span] = []
    short: dict[str, list[Span]] = defaultdict(list)  # by worker: a stretch that fits into a grain
    for span in sorted(spans, key=lambda span: span.start):
        stretch = short[span.worker]
        if stretch and span.stop - stretch[0].start > grain_s:
            coarse += _merge_kinds(stretch)
            stretch.clear()
        if span.length > grain_s:
            coarse.append(span)
        else:
            stretch.append(span)
    for stretch in short.values():
        coarse += _merge_kinds(stretch)
    return sorted(coarse, key=lambda span: span.start)


def _merge_kinds(stretch: Sequence[Span]) -> Iterator[Span]:
    """One span per kind, placed end to end from the start of the first span."""
    kinds: dict[Kind, list[Span]] = defaultdict(list)
    for span in stretch:
        kinds[span.kind].append(span)
    start = stretch[0].start if stretch else 0.0
    for same_kind in kinds.values():
        stop = start + sum(span.seconds for span in same_kind)
        yield replace(
            same_kind[0], start=start, stop=stop, amount=sum(span.amount for span in same_kind), busy=-1.0
        )
        start = stop


def limit_spans(spans: Sequence[Span], most: int) -> list[Span]:
    """``coarsen`` with a grain at which no worker has more than ``most`` spans (at least one per kind)."""
    assert most >= len(Kind)
    coarse = list(spans)
    if not coarse:
        return coarse
    grain = max(span.stop for span in coarse) - min(span.start for span in coarse)
    grain /= most
    while max(Counter(span.worker for span in coarse).values()) > most:
        coarse = coarsen(spans, grain)
        grain *= 2
    return coarse


def select_spans(spans: Iterable[Span], *, step: int, file_bytes: int) -> list[Span]:
    """The spans to write for a step, given all of its ``spans`` (in order per worker) and the file's size.

    Every step is written in the first 8 MiB of the file, every 2nd in the next 8, every 4th in the next: the
    file grows with the logarithm of the run. A step is written in full or not at all, except for
    ``limit_spans`` where a worker changed its kind of work more than ``MOST_PER_STEP`` times.
    """
    if step % 2 ** (file_bytes // DETAIL_BYTES):
        return []
    return limit_spans(list(merge_spans(spans)), MOST_PER_STEP)


# ---- utilisation


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Seconds by worker and kind from ``start`` to ``stop``. Where spans of one worker overlap, the time
    counts once, for the span that began first."""

    start: float
    stop: float
    seconds: Mapping[str, Mapping[Kind, float]]

    def utilisation(self, worker: str) -> float:
        """The share of the window in which the worker was working; waiting and loading do not count."""
        busy = sum(seconds for kind, seconds in self.seconds[worker].items() if kind not in IDLE)
        return min(1.0, busy / (self.stop - self.start)) if self.stop > self.start else 0.0

    def idle(self, pool: str | None = None) -> float | None:
        """The bubble share: idle time of the workers (of a pool; None: all) over all their time. None if
        there are no such workers."""
        shares = [1 - self.utilisation(name) for name in self.seconds if pool in (None, pool_of(name))]
        return sum(shares) / len(shares) if shares else None


def usage(spans: Iterable[Span], start: float, stop: float) -> Usage:
    """The usage in one window, in Unix seconds."""
    return usages(spans, [(start, stop)])[0]


def usages(spans: Iterable[Span], windows: Sequence[tuple[float, float]]) -> list[Usage]:
    """The usage in each window; windows must be in order and must not overlap."""
    stops = [stop for _, stop in windows]
    sums: list[dict[tuple[str, Kind], float]] = [defaultdict(float) for _ in windows]
    until: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: span.start):
        start = max(span.start, until.get(span.worker, span.start))
        if start >= span.stop > span.start:  # wholly within an earlier span
            continue
        until[span.worker] = max(start, span.stop)
        density = span.seconds / span.length if span.length else 1.0
        for i in range(bisect_right(stops, start), len(windows)):
            if windows[i][0] >= span.stop:
                break
            inside = min(span.stop, stops[i]) - max(start, windows[i][0])
            sums[i][span.worker, span.kind] += inside * density
    return [
        Usage(start=start, stop=stop, seconds=_group_by_worker(until, seconds))
        for (start, stop), seconds in zip(windows, sums, strict=True)
    ]


def add_usages(parts: Sequence[Usage]) -> Usage:
    """Sum of several windows: a usage from 0 to the sum of their lengths."""
    sums: dict[tuple[str, Kind], float] = defaultdict(float)
    for part in parts:
        for name, kinds in part.seconds.items():
            for kind, seconds in kinds.items():
                sums[name, kind] += seconds
    names = dict.fromkeys(name for part in parts for name in part.seconds)
    length = sum(part.stop - part.start for part in parts)
    return Usage(start=0.0, stop=length, seconds=_group_by_worker(names, sums))


def _group_by_worker(
    names: Iterable[str], sums: Mapping[tuple[str, Kind], float]
) -> dict[str, dict[Kind, float]]:
    """Seconds by worker and kind, with the workers ``names`` in their usual order."""
    by_worker: dict[str, dict[Kind, float]] = {name: {} for name in sort_workers(names)}
    for (worker, kind), seconds in sums.items():
        by_worker[worker][kind] = seconds
    return by_worker


POOLS = {"sampler": "samplers", "trainer": "trainer", "grader": "graders"}


def pool_of(worker: str) -> str:
    """The ledger's pool of a worker, by its name; a worker of no pool is a pool by itself."""
    return POOLS.get(worker.rstrip("0123456789").rstrip("-").removesuffix("s"), worker)


def sort_workers(workers: Iterable[str]) -> list[str]:
    """Workers in the order samplers, trainer, graders, others; by number within a pool."""
    pools = list(POOLS.values())

    def place(worker: str) -> tuple[int, str, int]:
        stem = worker.rstrip("0123456789")
        pool = pool_of(worker)
        return pools.index(pool) if pool in pools else len(pools), stem, int(worker[len(stem) :] or 0)

    return sorted(workers, key=place)
