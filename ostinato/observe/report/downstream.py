"""Scores on the downstream sets of a run, over its steps and side by side."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.observe.report.charts import Section, Series, figure, ready
from ostinato.observe.report.facts import Cell, Column, Estimate, Line, Table, difference, estimate
from ostinato.observe.report.reading import Row, RunData, number

COLORS = ("--blue", "--orange", "--teal", "--purple", "--red", "--grey")
MISSING = "not measured"


def downstream_sections(data: RunData) -> list[Section]:
    """pass@1 of each set; empty for a run that has none."""
    if not data.downstream:
        return []
    steps = sorted({int(row["step"]) for rows in data.downstream.values() for row in rows})
    lines = [
        _series(name, {int(row["step"]): row for row in rows}, steps, COLORS[at % len(COLORS)])
        for at, (name, rows) in enumerate(data.downstream.items())
    ]
    note = (
        "Share of prompts solved by one answer (pass@1) on sets that are not trained on; band: 95 % interval."
    )
    chart = figure(
        [{"step": step} for step in steps], "Downstream scores", note, "", lines, low=0.0, high=1.0
    )
    table = Table(
        title="Downstream",
        columns=tuple(Column(name=name) for name in ("before", "after", "change")),
        lines=tuple(line for name, rows in data.downstream.items() for line in _lines(name, rows)),
        note="With 95 % intervals over prompts; that of a change takes the two as independent.",
    )
    return [Section(title="Downstream", anchor="downstream", charts=[ready(chart)], tables=[table])]


def _series(name: str, rows: dict[int, Row], steps: Sequence[int], color: str) -> Series:
    found = [estimate(rows[step], "pass@1") if step in rows else None for step in steps]
    bands = [None if one is None else one.interval for one in found]
    return Series(
        label=name,
        values=[None if one is None else one.value for one in found],
        color=color,
        low=[None if band is None else band[0] for band in bands],
        high=[None if band is None else band[1] for band in bands],
        marker="dot",
    )


def _lines(name: str, rows: Sequence[Row]) -> list[Line]:
    """pass@1, and the mean reward where the rows have one."""
    kinds = {"pass@1": "pass@1", "reward": "mean reward"}
    return [_line(f"{name}, {kinds[key]}", rows, key) for key in kinds if any(key in row for row in rows)]


def _line(name: str, rows: Sequence[Row], key: str) -> Line:
    before = estimate(rows[0], key) if rows[0]["step"] == 0 else None
    after = estimate(rows[-1], key) if rows[-1]["step"] else None
    change = difference(before, after) if before and after else None
    told = f"{number(rows[-1], 'n') or 0:.0f} prompts; after step {rows[-1]['step']}"
    cells = (_text(before), _text(after), "" if change is None else _text(change, "+.3f"))
    return Line(name=name, note=told, cells=tuple(Cell(value=cell) for cell in cells))


def _text(value: Estimate | None, form: str = ".3f") -> str:
    if value is None:
        return MISSING
    if value.interval is None:
        return format(value.value, form)
    low, high = value.interval
    return f"{value.value:{form}} [{low:{form}}, {high:{form}}]"
