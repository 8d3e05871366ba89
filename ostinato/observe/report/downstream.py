"""Scores on the downstream sets of a run, over its steps and side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ostinato.observe.report.charts import COLORS, Section, figure, scored
from ostinato.observe.report.facts import Line, Table, change_line
from ostinato.observe.report.reading import Row, RunData, number


def downstream_sections(data: RunData) -> list[Section]:
    """pass@1 of each set; empty for a run that has none."""
    if not data.downstream:
        return []
    steps = sorted({int(row["step"]) for rows in data.downstream.values() for row in rows})
    series = []
    for (name, rows), color in zip(data.downstream.items(), COLORS * len(data.downstream), strict=False):
        of_step = {int(row["step"]): row for row in rows}
        series.append(scored([of_step.get(step, {}) for step in steps], "pass@1", name, color, "dot"))
    note = (
        "Share of prompts solved by one answer (pass@1) on sets that are not trained on; band: 95 % interval."
    )
    at = [{"step": step} for step in steps]
    chart = figure(at, "Downstream scores", note, "", series, low=0.0, high=1.0)
    table = Table(
        title="Downstream",
        head=("before", "after", "change"),
        rows=[line for name, rows in data.downstream.items() for line in _lines(name, rows)],
        note="With 95 % intervals over prompts; that of a change takes the two as independent.",
    )
    return [Section(title="Downstream", anchor="downstream", charts=[chart], tables=[table])]


def _lines(name: str, rows: Sequence[Row]) -> Iterator[Line]:
    """pass@1, and the mean reward where the rows have one."""
    before = rows[0] if rows[0]["step"] == 0 else None
    after = rows[-1] if rows[-1]["step"] else None
    size = f"{number(rows[-1], 'n') or 0:.0f} prompts; after step {rows[-1]['step']}"
    for key, kind in (("pass@1", "pass@1"), ("reward", "mean reward")):
        if any(key in row for row in rows):
            yield change_line(f"{name}, {kind}\n{size}", before, after, key)
