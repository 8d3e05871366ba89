"""What a run foretold of itself, evaluation by evaluation: forecast.jsonl as a section of the report.

Nothing is fitted here. Every row has its quantiles; what is not identified has no medians, and has none here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ostinato.observe.report.charts import Chart, Section, Series
from ostinato.observe.report.facts import Cell, Column, Line, Table
from ostinato.observe.report.reading import Row, RunData, number
from ostinato.observe.report.scaling import NONE, Course, compute_text, curve_chart, places

LAST = 6  # forecasts that the table shows
LEVELS = ("q05", "q25", "q50", "q75", "q95")
TOLD = ("identified", "provisional")


def forecast_sections(data: RunData) -> list[Section]:
    """The curve as the last forecast has it, and how ceiling and score at the budget moved; empty for a run
    that foretold nothing."""
    rows = [row for row in data.forecasts if number(row, "compute") and number(row, "score") is not None]
    if not rows:
        return []
    newest = data.forecasts[-1]
    last = rows[-1]
    axis = str(last.get("counted", "?"))
    charts = [_curve(rows, data.name, axis)] if _points(last) else []
    moved = {
        "A": ("Foretold ceiling", "Where the curve ends however much is spent (A)"),
        "at_budget": ("Foretold at the budget", "Where the curve is when the budget is spent"),
    }
    for key, (title, note) in moved.items():
        if any(row.get(key) for row in rows):
            charts.append(
                _moved(rows, key, title, f"{note}; 90 %, without a median where not identified.", axis)
            )
    lead = f"After the evaluation of step {last['step']}: {last.get('sentence', '?')}."
    if newest["step"] > last["step"]:  # what is shown below is not of today
        lead += f" At step {newest['step']} no more could be foretold: {newest.get('sentence', '?')}."
    return [
        Section(title="Forecast", anchor="forecast", lead=lead, charts=charts, tables=[_table(rows, axis)])
    ]


def _curve(rows: Sequence[Row], name: str, axis: str) -> Chart:
    """Scores over compute with the bands of the last forecast, up to the budget."""
    last = rows[-1]
    compute = np.array([row["compute"] for row in rows])
    curve = last["curve"]
    C = np.array(curve["compute"])
    at = places([compute], float(C[-1]))
    bands = [
        np.interp(np.log(at), np.log(C), curve[q]) if q in curve else np.full(len(at), np.nan) for q in LEVELS
    ]
    course = Course(
        name=name,
        compute=compute,
        score=np.array([row["score"] for row in rows]),
        window=(float(compute[0]), float(compute[-1])),
        places=at,
        quantiles=np.array(bands),
        told=last.get("gate") in TOLD,
    )
    note = "Held-out score, 0 to 1, and what is known of its curve, without the noise of evaluations."
    return curve_chart([course], axis, note)


def _points(row: Row) -> bool:
    """Has the row a curve that can be drawn?"""
    return bool(row.get("curve")) and {"compute", "q05", "q95"} <= set(row["curve"])


def _moved(rows: Sequence[Row], key: str, title: str, note: str, axis: str) -> Chart:
    """Intervals of a foretold score over the compute at which they were foretold."""
    intervals = [row.get(key) or (None, None, None) for row in rows]
    low, middle, high = (list(values) for values in zip(*intervals, strict=True))
    compute = [float(row["compute"]) for row in rows]
    return Chart(
        key=f"forecast-{key}",
        title=title,
        note=note,
        unit="",
        steps=compute,
        labels=[compute_text(float(f"{C:.3g}")) for C in compute],
        series=[
            Series(label="median, 90 %", values=middle, color="--blue", low=low, high=high, marker="dot")
        ],
        log_x=True,
        along=f"after # {axis}",
    )


def _table(rows: Sequence[Row], axis: str) -> Table:
    names = ("spent", "score", "A", "at the budget", "gain of the rest", "verdict")
    notes = (axis, "measured", "90 %", "90 %", "90 %", "")
    columns = [Column(name=name, note=note) for name, note in zip(names, notes, strict=True)]
    left_out = max(0, len(rows) - LAST)
    return Table(
        title="Forecast",
        columns=tuple(columns),
        lines=tuple(_line(row) for row in rows[-LAST:]),
        note=f"The last {LAST} of {len(rows)}." if left_out else "",
    )


def _line(row: Row) -> Line:
    cells = [
        compute_text(float(row["compute"])),
        f"{row['score']:.3f}",
        *(_interval(row.get(key)) for key in ("A", "at_budget", "gain")),
        str(row.get("verdict", "?")),
    ]
    return Line(
        name=f"step {row['step']}", note=str(row.get("gate", "")), cells=tuple(Cell(value=c) for c in cells)
    )


def _interval(found: Sequence[float | None] | None) -> str:
    if not found:
        return NONE
    low, middle, high = (math.nan if value is None else value for value in found)
    told = "" if math.isnan(middle) else f"{middle:.3f} "
    return f"{told}[{low:.3f}, {high:.3f}]"
