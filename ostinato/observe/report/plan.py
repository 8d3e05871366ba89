"""Predicted against measured: plan.json of a run folder beside the medians of its metrics."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.observe.report.charts import Section
from ostinato.observe.report.facts import NOT_MEASURED, Cell, Column, Line, Table
from ostinato.observe.report.reading import RunData, number, numbers

# part of a step -> what metrics.jsonl measures, phases of the plan in it: as ``plan.record`` has them, which
# a test asserts. In turns the trainer publishes in its own time; with overlap rollouts have no time.
PUBLISH = "time/publish_s"
IN_TURNS = {
    "rollout": ("time/rollout_s", ("rollout",)),
    "train": ("time/train_s", ("train", "logprobs", "refit")),
}
OVERLAPPED = {"train": ("time/train_s", ("train", "logprobs")), "refit": (PUBLISH, ("refit",))}
STEP = {"step": ("step_time", ())}  # the plan's total
WARM_UP = 1  # steps that are not counted


def plan_sections(data: RunData) -> list[Section]:
    """Seconds and bytes that the plan said and the run took, and what was weighed since; empty for a run
    without a plan that weighed nothing."""
    weighed = [weighed_table(data)] if data.weighed else []
    if not data.plan:
        return [Section(title="Layouts", anchor="plan", charts=[], tables=weighed)] if weighed else []
    found = data.plan.get("layouts")
    layouts = found if isinstance(found, Mapping) else {}
    told = ", ".join(f"{phase} {layout}" for phase, layout in layouts.items())
    lead = f"Planned for {data.plan.get('cluster', 'an unknown cluster')}: {told}." if told else ""
    tables = [table for table in (seconds_table(data), traffic_table(data), *weighed) if table.lines]
    return [Section(title="Plan against run", anchor="plan", lead=lead, charts=[], tables=tables)]


def seconds_table(data: RunData) -> Table:
    """Seconds of one step by part: planned, measured (median), their ratio, and the plan's largest term."""
    planned = data.plan.get("seconds")
    phases: Mapping[str, Any] = planned if isinstance(planned, Mapping) else {}
    lines = []
    overlapped = any(PUBLISH in row for row in data.metrics)
    for part, (key, names) in ((OVERLAPPED if overlapped else IN_TURNS) | STEP).items():
        terms = _terms(phases, names) if names else {}
        said = sum(terms.values()) if names else number(data.plan, "total") or 0.0
        took = _median(data, key)
        if not said and took is None:
            continue
        largest = max(terms, key=terms.__getitem__, default="")
        share = f"{largest} {terms[largest] / said:.0%}" if largest and said else ""
        lines.append(
            Line(
                name=part,
                note="s",
                cells=(
                    Cell(value=f"{said:.3g}"),
                    Cell(value=NOT_MEASURED if took is None else f"{took:.3g}"),
                    Cell(value="" if took is None or not said else f"{took / said:.2f}"),
                    Cell(value=share),
                ),
            )
        )
    names = ("planned", "measured", "measured / planned", "largest term")
    return Table(
        title="Seconds of a step",
        columns=tuple(Column(name=name, number=name != "largest term") for name in names),
        lines=tuple(lines),
        note=f"Medians over steps, the first {WARM_UP} left out; a plan's own band is "
        f"{number(data.plan, 'low') or 1:.2f} to {number(data.plan, 'high') or 1:.2f} of its total.",
    )


def traffic_table(data: RunData) -> Table:
    """Bytes that one rank sends in a training step by collective and axis, and what was counted."""
    planned = data.plan.get("traffic")
    said = numbers(planned) if isinstance(planned, Mapping) else {}
    counted = {
        key.removeprefix("comm/bytes/"): _median(data, key)
        for row in data.metrics[-1:]
        for key in row
        if key.startswith("comm/bytes/")
    }
    lines = []
    for name in sorted({*said, *counted}):
        took = counted.get(name)
        ratio = took / said[name] if took and said.get(name) else None
        lines.append(
            Line(
                name=name,
                note="bytes",
                cells=(
                    Cell(value=f"{said.get(name, 0.0):,.0f}"),
                    Cell(value=NOT_MEASURED if took is None else f"{took:,.0f}"),
                    Cell(value="" if ratio is None else f"{ratio:.3f}"),
                ),
            )
        )
    return Table(
        title="Bytes sent by the first rank",
        columns=tuple(Column(name=name) for name in ("planned", "counted", "counted / planned")),
        lines=tuple(lines),
        note="Planned: training and old log-probabilities. Counted: all that was sent since the step before, "
        "also by publishes, checkpoints and measurements.",
    )


def weighed_table(data: RunData) -> Table:
    """What was weighed at checkpoints: is another layout better now?"""
    lines = [
        Line(
            name=f"step {row['step']:.0f}",
            note="",
            cells=(
                Cell(value="on under another" if row.get("switch") else "stay"),
                Cell(value=str(row.get("reason", ""))),
            ),
        )
        for row in data.weighed
    ]
    columns = (Column(name="decision", number=False), Column(name="why", number=False))
    return Table(title="Layouts weighed", columns=columns, lines=tuple(lines))


def _terms(phases: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in names:
        terms = phases.get(name)
        for term, seconds in numbers(terms).items() if isinstance(terms, Mapping) else ():
            found[term] = found.get(term, 0.0) + seconds
    return found


def _median(data: RunData, key: str) -> float | None:
    values = [value for row in data.metrics[WARM_UP:] if (value := number(row, key)) is not None]
    return statistics.median(values) if values else None


__all__ = ["plan_sections", "seconds_table", "traffic_table", "weighed_table"]
