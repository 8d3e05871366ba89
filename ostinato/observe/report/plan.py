"""Predicted against measured: plan.json of a run folder beside the medians of its metrics."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from ostinato.observe.report.charts import Section
from ostinato.observe.report.facts import NOT_MEASURED, Line, Table
from ostinato.observe.report.reading import RunData, mapping, names_under, number, numbers

# part of a step -> (its metric, the phases of the plan in it, named as in ``plan.record``, which a test
# asserts). In turns the train time includes publishing; with overlap there is no separate rollout time.
PUBLISH = "time/publish_s"
IN_TURNS = {
    "rollout": ("time/rollout_s", ("rollout",)),
    "train": ("time/train_s", ("train", "logprobs", "refit")),
}
OVERLAPPED = {"train": ("time/train_s", ("train", "logprobs")), "refit": (PUBLISH, ("refit",))}
SENT = "comm/bytes/"  # by collective and axis
WARM_UP = 1  # steps that are not counted


def plan_sections(data: RunData) -> list[Section]:
    """Seconds and bytes, planned and measured; empty for a run without a plan."""
    if not data.plan:
        return []
    layouts = ", ".join(f"{phase} {layout}" for phase, layout in mapping(data.plan.get("layouts")).items())
    lead = f"Planned for {data.plan.get('cluster', 'an unknown cluster')}: {layouts}." if layouts else ""
    low, high = (number(data.plan, end) or 1 for end in ("low", "high"))
    against = Table(
        title="Of a step",
        head=("planned", "measured", "measured / planned"),
        rows=[*_seconds(data), *_bytes(data)],
        note=f"Medians over steps, the first {WARM_UP} left out; a plan's own band is {low:.2f} to "
        f"{high:.2f} of its total. Bytes: planned for training and old log-probabilities, counted with "
        "publishes, checkpoints and measurements.",
    )
    tables = [against] if against.rows else []
    return [Section(title="Plan against run", anchor="plan", lead=lead, tables=tables)]


def _seconds(data: RunData) -> Iterator[Line]:
    """Seconds of a step by part, each with the plan's largest term."""
    phases = mapping(data.plan.get("seconds"))
    overlapped = any(PUBLISH in row for row in data.metrics)
    for part, (key, names) in (OVERLAPPED if overlapped else IN_TURNS).items():
        terms = Counter[str]()
        for name in names:
            terms.update(numbers(mapping(phases.get(name))))
        note = f"s; mostly {max(terms, key=terms.__getitem__)}" if terms else "s"
        yield from _line(data, f"{part}\n{note}", terms.total(), key, ".3g", ".2f")
    yield from _line(data, "step\ns", number(data.plan, "total") or 0.0, "step_time", ".3g", ".2f")


def _bytes(data: RunData) -> Iterator[Line]:
    """Bytes that the first rank sends in a step, by collective and axis."""
    planned = numbers(mapping(data.plan.get("traffic")))
    for name in sorted({*planned, *names_under(data.metrics[-1:], SENT)}):
        yield from _line(data, f"{name}\nbytes sent", planned.get(name, 0.0), SENT + name, ",.0f", ".3f")


def _line(data: RunData, name: str, planned: float, key: str, form: str, ratio: str) -> Iterator[Line]:
    """Planned, measured, and their ratio if both are known; nothing if neither is."""
    values = [value for row in data.metrics[WARM_UP:] if (value := number(row, key)) is not None]
    measured = statistics.median(values) if values else None
    if planned or measured is not None:
        text = NOT_MEASURED if measured is None else format(measured, form)
        yield name, f"{planned:{form}}", text, f"{measured / planned:{ratio}}" if measured and planned else ""
