"""A run's forecasts of its own score, one per evaluation: forecast.jsonl as a section of the report.

Nothing is fitted here. Every row has its quantiles; a quantity that is not identified has no median.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ostinato.observe.report.charts import Chart, Section, Series, Values, plotted
from ostinato.observe.report.facts import NONE, Table, compute_text
from ostinato.observe.report.reading import Row, RunData, number

LAST = 6  # forecasts that the table shows
LEVELS = ("q05", "q25", "q50", "q75", "q95")
MOVED = {
    "A": ("Predicted ceiling", "Where the curve ends however much is spent (A)"),
    "at_budget": ("Predicted at the budget", "Where the curve is when the budget is spent"),
}


def forecast_sections(data: RunData) -> list[Section]:
    """The curve of the last forecast, and how the predicted ceiling and score at the budget changed; empty
    for a run without forecasts."""
    rows = [row for row in data.forecasts if number(row, "compute") and number(row, "score") is not None]
    if not rows:
        return []
    newest, last = data.forecasts[-1], rows[-1]
    axis = str(last.get("counted", "?"))
    drawn = {"compute", "q05", "q95"} <= set(last.get("curve") or ())
    charts = [_curve(rows, axis)] if drawn else []
    charts += [_moved(rows, key, axis) for key in MOVED if any(row.get(key) for row in rows)]
    lead = f"After the evaluation of step {last['step']}: {last.get('sentence', '?')}."
    if newest["step"] > last["step"]:  # what is shown below is outdated
        lead += f" At step {newest['step']} no more could be predicted: {newest.get('sentence', '?')}."
    table = _table(rows, axis)
    return [Section(title="Forecast", anchor="forecast", lead=lead, charts=charts, tables=[table])]


def _curve(rows: Sequence[Row], axis: str) -> Chart:
    """Scores over compute with the bands of the last forecast, up to the budget."""
    curve, scores = rows[-1]["curve"], {float(row["compute"]): float(row["score"]) for row in rows}
    C, at = np.array(curve["compute"]), places([*scores], curve["compute"][-1])
    known = {q: np.interp(np.log(at), np.log(C), curve[q]).tolist() for q in LEVELS if q in curve}
    nothing: Values = [None] * len(at)
    ends = {"color": "--blue", "low": known["q05"], "high": known["q95"]}
    median = known.get("q50", nothing)
    drawn = [Series(label="median, 90 %" if "q50" in known else "90 %", values=median, **ends)]
    if "q25" in known:
        half = {"color": "--blue", "low": known["q25"], "high": known["q75"]}
        drawn.append(Series(label="50 %", values=nothing, **half))
    points = [scores.get(float(C)) for C in at]
    drawn.append(Series(label="measured", values=points, color="--ink", marker="dot"))
    note = "Held-out score, 0 to 1, and what is known of its curve, without the noise of evaluations."
    return _over(at.tolist(), f"# {axis}", "curve", "Score over compute", note, drawn)


def places(compute: Sequence[float], last: float, count: int = 64) -> np.ndarray:
    """[m] where curves are drawn: at all evaluations, once between neighbours (so that evaluations are drawn
    as unconnected points), and at ``count`` places evenly spaced in ln C up to ``last``."""
    measured = np.unique(compute)
    between = np.exp((np.log(measured[:-1]) + np.log(measured[1:])) / 2)
    even = np.geomspace(measured[0], max(last, measured[-1]), count)
    return np.unique(np.concatenate([measured, between, even]))


def _moved(rows: Sequence[Row], key: str, axis: str) -> Chart:
    """Intervals of a predicted score over the compute at which each was predicted."""
    title, note = MOVED[key]
    intervals = [row.get(key) or (None, None, None) for row in rows]
    low, middle, high = (list(values) for values in zip(*intervals, strict=True))
    drawn = [Series(label="median, 90 %", values=middle, color="--blue", low=low, high=high, marker="dot")]
    note = f"{note}; 90 %, without a median where not identified."
    at = [float(row["compute"]) for row in rows]
    return _over(at, f"after # {axis}", f"forecast-{key}", title, note, drawn)


def _over(at: list[float], along: str, key: str, title: str, note: str, drawn: list[Series]) -> Chart:
    """A chart over ln C."""
    labels = [compute_text(float(f"{C:.3g}")) for C in at]
    return plotted(title, note, "", drawn, key=key, steps=at, labels=labels, log_x=True, along=along)


def _table(rows: Sequence[Row], axis: str) -> Table:
    lines = [
        (
            f"step {row['step']}\n{row.get('gate', '')}",
            compute_text(float(row["compute"])),
            f"{row['score']:.3f}",
            *(_interval(row.get(key)) for key in ("A", "at_budget", "gain")),
            str(row.get("verdict", "?")),
        )
        for row in rows[-LAST:]
    ]
    head = (f"spent\n{axis}", "score\nmeasured", "A\n90 %", "at the budget\n90 %", "gain of the rest\n90 %")
    note = f"The last {LAST} of {len(rows)}." if len(rows) > LAST else ""
    return Table(title="Forecast", head=(*head, "verdict"), rows=lines, note=note)


def _interval(found: Sequence[float | None] | None) -> str:
    if not found:
        return NONE
    low, middle, high = (math.nan if value is None else value for value in found)
    median = "" if math.isnan(middle) else f"{middle:.3f} "
    return f"{median}[{low:.3f}, {high:.3f}]"
