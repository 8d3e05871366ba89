"""Data for page/gantt.js: a lane of spans for each worker, coarser if there are many spans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.observe.ledger import Event
from ostinato.observe.report.reading import Row, number
from ostinato.observe.timeline import Kind, Span, Usage, fewer, in_order, usage, usages

SPANS = 6000  # in one picture
POOLS = ("samplers", "trainer", "graders")  # the pools with devices; the controller has none
LANES = 256  # workers shown, at most
MARKS = 400  # of steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """When a training step began and ended."""

    step: int
    start: float  # Unix seconds
    stop: float


def steps_of(ledger: Iterable[Row]) -> list[Step]:
    """The steps in the rows of a ledger, in order of time and without overlap; a repeated step is in there
    twice."""
    found: list[Step] = []
    for row in ledger:
        step, stop, seconds = (number(row, name) for name in ("step", "ended_at", "seconds"))
        if row.get("event") != Event.STEP or step is None or stop is None or seconds is None:
            continue
        start = max(stop - seconds, found[-1].stop if found else float("-inf"))
        if start < stop:
            found.append(Step(step=int(step), start=start, stop=stop))
    return found


def recorded(spans: Sequence[Span], steps: Sequence[Step]) -> list[tuple[Step, Usage]]:
    """The usage of workers in each step that the timeline has; in long runs it omits most steps."""
    found = usages(spans, [(one.start, one.stop) for one in steps])
    return [(step, use) for step, use in zip(steps, found, strict=True) if any(use.seconds.values())]


def whole(spans: Sequence[Span], steps: Sequence[Step]) -> dict[str, Any] | None:
    """The picture of the whole run; None without spans."""
    if not spans:
        return None
    start, stop = min(span.start for span in spans), max(span.stop for span in spans)
    return picture(spans, start, stop, steps, name="the whole run")


def picture(
    spans: Iterable[Span], start: float, stop: float, steps: Sequence[Step] = (), *, name: str = ""
) -> dict[str, Any]:
    """The picture from ``start`` to ``stop`` (Unix seconds). Its times are milliseconds after ``start``;
    a lane is flat, five numbers for each span: kind, start, duration, step (-1: none), amount."""
    inside = [span for span in spans if span.stop > start and span.start < stop]
    names = in_order({span.worker for span in inside})[:LANES]
    drawn = [span for span in inside if span.worker in set(names)]
    found = fewer(drawn, max(len(Kind), SPANS // max(1, len(names))))
    lanes: dict[str, list[int]] = {worker: [] for worker in names}
    for span in found:
        lanes[span.worker] += _flat(span, start)
    use = usage(inside, start, stop)
    return {
        "name": name,
        "start": start,
        "seconds": round(stop - start, 3),
        "coarse": len(found) < len(drawn),
        "kinds": [str(kind) for kind in Kind],
        "lanes": [
            {"worker": worker, "used": round(use.utilisation(worker), 4), "spans": lane}
            for worker, lane in lanes.items()
        ],
        "idle": {pool: round(share, 4) for pool in POOLS if (share := use.idle(pool)) is not None},
        "hidden": len({span.worker for span in inside}) - len(names),
        "steps": [_mark(one, start) for one in _few([s for s in steps if s.stop > start and s.start < stop])],
    }


KINDS: Mapping[Kind, int] = {kind: place for place, kind in enumerate(Kind)}


def _flat(span: Span, origin: float) -> tuple[int, int, int, int, int]:
    start, stop = (round(1000 * (at - origin)) for at in (span.start, span.stop))
    return KINDS[span.kind], start, stop - start, span.step, span.amount


def _mark(step: Step, origin: float) -> tuple[int, int, int]:
    """Its number, and when it began and ended."""
    return step.step, round(1000 * (step.start - origin)), round(1000 * (step.stop - origin))


def _few(steps: Sequence[Step]) -> Sequence[Step]:
    return steps[:: 1 + len(steps) // MARKS]
