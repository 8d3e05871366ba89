"""What every worker was busy with, and when: the rows of timeline.jsonl, merged so that a run stays small.

A row is a span: {"worker": "sampler-0", "kind": "decode", "from": 1763650000.1, "to": 1763650000.4}.
Times are Unix seconds of the host that worked. A worker does one thing at a time; its name is that of its
place, which its replacement takes over. What no span covers is idle. The file is only ever appended to,
like the ledger: work that is done again was done twice.

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

GAP_S = 0.005  # spans of one kind that are nearer than this are one
DETAIL_BYTES = 8 << 20  # of the file, until steps are left out; and again until half of the rest are
MOST_PER_STEP = 128  # spans of one worker


class Kind(StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    WAIT = "wait"  # for another worker; idle, with a reason
    PUBLISH = "publish"
    GRADE = "grade"
    PACK = "pack"
    TRAIN = "train"
    SAVE = "save"
    START = "start"  # loading, until it can work


IDLE = frozenset({Kind.WAIT, Kind.START})  # nothing comes of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    worker: str
    kind: Kind
    start: float  # Unix seconds
    stop: float
    step: int = -1  # that it belongs to, where it belongs to one
    amount: int = 0  # rows, tokens or bytes
    busy: float = -1.0  # seconds of it that it worked, where it is several with gaps in between; -1: all

    @property
    def length(self) -> float:
        return self.stop - self.start

    @property
    def seconds(self) -> float:
        """Of work: gaps that were joined are none."""
        return self.length if self.busy < 0 else self.busy

    def to_json(self) -> dict[str, Any]:
        more = {"amount": self.amount} if self.amount else {}
        step = {"step": self.step} if self.step >= 0 else {}
        gaps = self.length - self.seconds > 1e-4
        more |= {"busy": round(self.seconds, 4)} if gaps else {}
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
        """Raises KeyError, ValueError or TypeError for what is no span."""
        return cls(
            worker=str(row["worker"]),
            kind=Kind(row["kind"]),
            start=float(row["from"]),
            stop=float(row["to"]),
            step=int(row.get("step", -1)),
            amount=int(row.get("amount", 0)),
            busy=float(row.get("busy", -1.0)),
        )


# ---- fewer of them


def merged(spans: Iterable[Span], gap_s: float = GAP_S) -> Iterator[Span]:
    """Neighbours of one worker, kind and step as one span, in the order of their ends, with how long it
    was busy: a gap is drawn over, and not worked through."""
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
                busy=before.seconds + span.seconds,
            )
            continue
        if before is not None:
            yield before
        last[span.worker] = span
    yield from sorted(last.values(), key=lambda span: span.stop)


def coarse(spans: Iterable[Span], grain_s: float) -> list[Span]:
    """Fewer spans that stand for the same: what a worker did in less than ``grain_s`` becomes one span for
    each kind, laid one behind the other. Seconds by worker and kind and amounts stay what they were, and
    nothing moves by more than the grain; a window of W seconds has at most 2 W / grain + 1 such stretches of
    a worker. Ordered by start."""
    found: list[Span] = []
    short: dict[str, list[Span]] = defaultdict(list)  # by worker: a stretch that fits into a grain
    for span in sorted(spans, key=lambda span: span.start):
        stretch = short[span.worker]
        if stretch and span.stop - stretch[0].start > grain_s:
            found += _by_kind(stretch)
            stretch.clear()
        if span.length > grain_s:
            found.append(span)
        else:
            stretch.append(span)
    for stretch in short.values():
        found += _by_kind(stretch)
    return sorted(found, key=lambda span: span.start)


def _by_kind(stretch: Sequence[Span]) -> Iterator[Span]:
    """One span for each kind, from the start of the first one on."""
    kinds: dict[Kind, list[Span]] = defaultdict(list)
    for span in stretch:
        kinds[span.kind].append(span)
    at = stretch[0].start if stretch else 0.0
    for alike in kinds.values():
        stop = at + sum(span.seconds for span in alike)
        yield replace(alike[0], start=at, stop=stop, amount=sum(span.amount for span in alike), busy=-1.0)
        at = stop


def fewer(spans: Sequence[Span], most: int) -> list[Span]:
    """As ``coarse`` as it takes for a worker to have at most ``most`` spans: one for each kind, at least."""
    assert most >= len(Kind)
    found = list(spans)
    if not found:
        return found
    grain = max(span.stop for span in found) - min(span.start for span in found)
    grain /= most
    while max(Counter(span.worker for span in found).values()) > most:
        found = coarse(spans, grain)
        grain *= 2
    return found


def kept(spans: Iterable[Span], *, step: int, file_bytes: int) -> list[Span]:
    """What of a step's spans (in order, each worker's) is written to a timeline.jsonl of ``file_bytes``.

    Every step for the first 8 MiB of the file, every 2nd for the next 8, every 4th for the next ones: the
    file grows with the logarithm of the run, and a step is there in full or not at all, but for
    ``fewer`` where a worker changed its kind of work more than ``MOST_PER_STEP`` times.
    """
    if step % 2 ** (file_bytes // DETAIL_BYTES):
        return []
    return fewer(list(merged(spans)), MOST_PER_STEP)


# ---- what they come to


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What workers did from ``start`` to ``stop``: seconds by worker and kind. Time that overlaps within a
    worker counts once, as what began first."""

    start: float
    stop: float
    seconds: Mapping[str, Mapping[Kind, float]]

    def utilisation(self, worker: str) -> float:
        """The share of the window in which it worked; to wait or to load is not to work."""
        busy = sum(s for kind, s in self.seconds[worker].items() if kind not in IDLE)
        return min(1.0, busy / (self.stop - self.start)) if self.stop > self.start else 0.0

    def idle(self, pool: str | None = None) -> float | None:
        """The bubble share: time in which workers (of a pool; None: all) did not work, over all their time.
        None without such workers."""
        shares = [1 - self.utilisation(name) for name in self.seconds if pool in (None, pool_of(name))]
        return sum(shares) / len(shares) if shares else None


def usage(spans: Iterable[Span], start: float, stop: float) -> Usage:
    """Of one window."""
    return usages(spans, [(start, stop)])[0]


def usages(spans: Iterable[Span], windows: Sequence[tuple[float, float]]) -> list[Usage]:
    """Of each of many windows, which are in order and do not overlap."""
    stops = [stop for _, stop in windows]
    sums: list[dict[tuple[str, Kind], float]] = [defaultdict(float) for _ in windows]
    until: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: span.start):
        start = max(span.start, until.get(span.worker, span.start))
        if start >= span.stop > span.start:  # all of it is within an earlier one
            continue
        until[span.worker] = max(start, span.stop)
        density = span.seconds / span.length if span.length else 1.0
        for i in range(bisect_right(stops, start), len(windows)):
            if windows[i][0] >= span.stop:
                break
            inside = min(span.stop, stops[i]) - max(start, windows[i][0])
            sums[i][span.worker, span.kind] += inside * density
    return [
        Usage(start=start, stop=stop, seconds=_by_worker(until, found))
        for (start, stop), found in zip(windows, sums, strict=True)
    ]


def together(parts: Sequence[Usage]) -> Usage:
    """Several windows as one of their whole length, beginning at 0."""
    sums: dict[tuple[str, Kind], float] = defaultdict(float)
    for part in parts:
        for name, kinds in part.seconds.items():
            for kind, seconds in kinds.items():
                sums[name, kind] += seconds
    names = dict.fromkeys(name for part in parts for name in part.seconds)
    length = sum(part.stop - part.start for part in parts)
    return Usage(start=0.0, stop=length, seconds=_by_worker(names, sums))


def _by_worker(names: Iterable[str], sums: Mapping[tuple[str, Kind], float]) -> dict[str, dict[Kind, float]]:
    found: dict[str, dict[Kind, float]] = {name: {} for name in in_order(names)}
    for (worker, kind), seconds in sums.items():
        found[worker][kind] = seconds
    return found


POOLS = {"sampler": "samplers", "trainer": "trainer", "grader": "graders"}


def pool_of(worker: str) -> str:
    """The pool of the ledger that a worker belongs to, by its name; any other is a pool by itself."""
    return POOLS.get(worker.rstrip("0123456789").rstrip("-").removesuffix("s"), worker)


def in_order(workers: Iterable[str]) -> list[str]:
    """Samplers, trainer, graders, the others; by number within a pool."""
    pools = list(POOLS.values())

    def place(worker: str) -> tuple[int, str, int]:
        stem = worker.rstrip("0123456789")
        pool = pool_of(worker)
        return pools.index(pool) if pool in pools else len(pools), stem, int(worker[len(stem) :] or 0)

    return sorted(workers, key=place)
