"""Predicted against measured: plan.json of a run folder beside the medians of its metrics."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.observe.report.charts import Section
from ostinato.observe.report.facts import NOT_MEASURED, Table
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
    """Seconds and bytes, planned and measured, and what was weighed since; empty for a run
    without a plan that weighed nothing."""
    weighed = [weighed_table(data)] if data.weighed else []
    if not data.plan:
        return [Section(title="Layouts", anchor="plan", tables=weighed)] if weighed else []
    layouts = ", ".join(f"{phase} {layout}" for phase, layout in _mapping(data.plan.get("layouts")).items())
    lead = f"Planned for {data.plan.get('cluster', 'an unknown cluster')}: {layouts}." if layouts else ""
    tables = [table for table in (seconds_table(data), traffic_table(data), *weighed) if table.rows]
    return [Section(title="Plan against run", anchor="plan", lead=lead, tables=tables)]


def seconds_table(data: RunData) -> Table:
    """Seconds of one step by part: planned, measured (median), their ratio, and the plan's largest term."""
    phases, rows = _mapping(data.plan.get("seconds")), []
    overlapped = any(PUBLISH in row for row in data.metrics)
    for part, (key, names) in ((OVERLAPPED if overlapped else IN_TURNS) | STEP).items():
        terms = Counter[str]()
        for name in names:
            terms.update(numbers(_mapping(phases.get(name))))
        planned = sum(terms.values()) if names else number(data.plan, "total") or 0.0
        measured = _median(data, key)
        if planned or measured is not None:
            largest = max(terms, key=terms.__getitem__, default="")
            share = f"{largest} {terms[largest] / planned:.0%}" if largest and planned else ""
            rows.append((f"{part}\ns", *_ratio(planned, measured, ".3g", ".2f"), share))
    return Table(
        title="Seconds of a step",
        head=("planned", "measured", "measured / planned", "largest term"),
        rows=rows,
        words=("largest term",),
        note=f"Medians over steps, the first {WARM_UP} left out; a plan's own band is "
        f"{number(data.plan, 'low') or 1:.2f} to {number(data.plan, 'high') or 1:.2f} of its total.",
    )


def traffic_table(data: RunData) -> Table:
    """Bytes that one rank sends in a training step by collective and axis, and what was counted."""
    planned, last = numbers(_mapping(data.plan.get("traffic"))), data.metrics[-1] if data.metrics else {}
    sent = "comm/bytes/"
    names = {*planned, *(key.removeprefix(sent) for key in last if key.startswith(sent))}
    rows = [
        (f"{name}\nbytes", *_ratio(planned.get(name, 0.0), _median(data, sent + name), ",.0f", ".3f"))
        for name in sorted(names)
    ]
    return Table(
        title="Bytes sent by the first rank",
        head=("planned", "counted", "counted / planned"),
        rows=rows,
        note="Planned: training and old log-probabilities. Counted: all that was sent since the step before, "
        "also by publishes, checkpoints and measurements.",
    )


def weighed_table(data: RunData) -> Table:
    """What was weighed at checkpoints: is another layout better now?"""
    rows = [
        (
            f"step {row['step']:.0f}",
            "on under another" if row.get("switch") else "stay",
            str(row.get("reason", "")),
        )
        for row in data.weighed
    ]
    return Table(title="Layouts weighed", head=("decision", "why"), rows=rows, words=("decision", "why"))


def _ratio(planned: float, measured: float | None, form: str, ratio: str) -> Sequence[str]:
    """Planned, measured, and their ratio where there is one."""
    text = NOT_MEASURED if measured is None else format(measured, form)
    return format(planned, form), text, format(measured / planned, ratio) if measured and planned else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _median(data: RunData, key: str) -> float | None:
    values = [value for row in data.metrics[WARM_UP:] if (value := number(row, key)) is not None]
    return statistics.median(values) if values else None
