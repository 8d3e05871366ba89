"""Forecasts and downstream sets in the report: what the rows say, and no median that they do not have."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ostinato.config import ForecastSection
from ostinato.launch.forecast import outlook
from ostinato.observe.report import write_report
from ostinato.observe.report.charts import Chart, downstream_sections, to_plain
from ostinato.observe.report.facts import comparisons
from ostinato.observe.report.forecast import forecast_sections
from ostinato.observe.report.reading import read_run
from ostinato.run import RunFolder
from ostinato.scaling.curve import Sigmoid
from ostinato.scaling.plan import simulated

SCALERL = Sigmoid(R0=0.4, A=0.61, B=1.92, C_mid=2542.0)
FALLEN = {"gate": "not identified", "A": None, "B": None, "C_mid": None, "at_budget": None} | {
    "gain": None,
    "curve": None,
    "verdict": "no forecast",
    "sentence": "not identified: the scores have fallen",
}


def foretold(path: Path, last: int) -> RunFolder:
    """A run of ``last`` evaluations, one every 1,000 units of compute, each with a look ahead."""
    path.mkdir(exist_ok=True)
    run = RunFolder(path)
    whole = simulated(SCALERL, [1000.0 * at for at in range(1, 26)], seed=3)
    for n in range(1, last + 1):
        row = outlook(whole.take(slice(n)), 40_000.0, ForecastSection())
        run.forecast.append({"step": 10 * n, "axis": "flops", **row})
    return run


def charts_of(run: RunFolder) -> dict[str, Chart]:
    (section,) = forecast_sections(read_run(run))
    for chart in section.charts:
        json.dumps(to_plain(chart), allow_nan=False)
    return {chart.key: chart for chart in section.charts}


@pytest.mark.slow
def test_the_curve_is_that_of_the_last_row(tmp_path: Path) -> None:
    run = foretold(tmp_path, 15)
    charts, last = charts_of(run), [*run.forecast.rows()][-1]
    assert set(charts) == {"curve", "forecast-A", "forecast-at_budget"}
    band, half, points = charts["curve"].series
    at = [i for i, value in enumerate(points.values) if value is not None]
    assert [charts["curve"].steps[i] for i in at] == [1000.0 * n for n in range(1, 16)]
    assert charts["curve"].steps[-1] == 40_000
    assert band.values[-1] == last["curve"]["q50"][-1] and half.low is not None
    assert math.isclose(band.values[-1] or 0, last["at_budget"][1], rel_tol=1e-4)
    moved = charts["forecast-A"].series[0]
    assert moved.values[-1] == last["A"][1] and moved.low is not None and moved.low[-1] == last["A"][0]


def test_what_is_not_identified_has_no_median_in_any_figure_or_cell(tmp_path: Path) -> None:
    run = foretold(tmp_path, 5)
    assert [*run.forecast.rows()][-1]["gate"] == "not identified"
    charts = charts_of(run)
    known = [one for one in charts["curve"].series if one.low is not None]
    assert len(known) == 1 and set(known[0].values) == {None}
    assert {value for one in charts["forecast-A"].series for value in one.values} == {None}
    (table,) = forecast_sections(read_run(run))[0].tables
    assert table.rows[-1][3].startswith("[") and table.rows[0][3] == "-"


@pytest.mark.slow
def test_of_a_curve_that_refutes_the_model_nothing_is_drawn(tmp_path: Path) -> None:
    run = foretold(tmp_path, 12)
    last = [*run.forecast.rows()][-1]
    run.forecast.append({**last, **FALLEN, "step": 130, "compute": 13_000.0})
    (section,) = forecast_sections(read_run(run))
    assert "curve" not in charts_of(run) and "have fallen" in section.lead
    assert charts_of(run)["forecast-A"].series[0].values[-1] is None


def test_a_run_without_forecasts_and_sets_has_no_such_sections(tmp_path: Path) -> None:
    data = read_run(RunFolder(tmp_path))
    assert forecast_sections(data) == downstream_sections(data) == []


def score(step: int, value: float, **changes: Any) -> dict[str, Any]:
    usual = {"step": step, "set": "eval", "split": "eval", "weights": "model", "n": 50, "samples": 1}
    return {**usual, "pass@1": value, "stderr": 0.05, "answer_stderr": None, **changes}


def test_downstream_sets_stand_beside_the_main_one(tmp_path: Path) -> None:
    """Each on its own steps; the headline is the main set's alone, and another split does not hide it."""
    run = foretold(tmp_path, 6)
    run.recipe.write_text('[eval]\nsplit = "train"\n')
    for step in (0, 10, 20):
        run.eval.append(score(step, 0.3 + step / 100, split="train"))
    for step in (0, 20):
        run.eval.append(score(step, 0.1 + step / 50, set="<b>hard"))
    run.eval.append(score(20, 0.9, set="late", reward=1.5, reward_stderr=0.1))
    data = read_run(run)
    assert [row["pass@1"] for row in data.evals] == [0.3, 0.4, 0.5]
    (section,) = downstream_sections(data)
    hard, late = section.charts[0].series
    assert section.charts[0].steps == [0, 20]
    assert (hard.values, late.values) == ([0.1, 0.5], [None, 0.9])
    lines = [row for row in comparisons(data).rows if ", " in row[0].partition("\n")[0]]
    cells, names = [row[1:] for row in lines], [row[0].partition("\n")[0] for row in lines]
    assert names == ["<b>hard, pass@1", "late, pass@1", "late, mean reward"]
    assert cells[2][1] == "1.500 [1.304, 1.696]"
    assert cells[0][2].startswith("+0.400 [") and cells[1][0] == "not measured" and cells[1][2] == ""
    page = write_report(run).read_text()
    assert "<b>hard" not in page and "&lt;b&gt;hard" in page and "Forecast" in page
