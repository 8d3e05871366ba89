"""Curves over compute, forecasts, sets and tables of a ledger: what may not be reported is not drawn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_ledger import a_step, killed_and_resumed, start

from ostinato.apps.scaling.curve import Sigmoid
from ostinato.apps.scaling.forecast import outlook
from ostinato.apps.scaling.series import simulated
from ostinato.config import ForecastSection
from ostinato.observe.ledger import Summary, summary
from ostinato.observe.report import write_report
from ostinato.observe.report.charts import Chart, downstream_sections, to_plain
from ostinato.observe.report.facts import comparisons, compute_text
from ostinato.observe.report.forecast import forecast_sections, places
from ostinato.observe.report.ledger import tables
from ostinato.observe.report.reading import read_run
from ostinato.run import RunFolder

computes = st.lists(st.floats(1e-3, 1e22), min_size=1, max_size=30, unique=True).map(sorted)


@given(computes, st.floats(1e-3, 1e22))
def test_evaluations_are_places_and_stand_apart(compute: list[float], last: float) -> None:
    """Neighbours without a place between them would be joined by a line."""
    measured = np.array(compute)
    if len(measured) > 1 and np.min(measured[1:] / measured[:-1]) < 1 + 1e-9:
        return
    at = places(compute, last)
    assert np.all(np.diff(at) > 0) and np.isin(measured, at).all()
    assert at[-1] == pytest.approx(max(last, compute[-1]))
    assert np.all(np.diff(np.searchsorted(at, measured)) > 1)


@pytest.mark.parametrize(
    ("C", "text"),
    [
        (0.0, "0"),
        (0.125, "0.125"),
        (12.34567, "12.35"),
        (30_213.4, "30,210"),
        (4.0512e18, "4.051e18"),
        (1e21, "1e21"),
        (1e-5, "1e-5"),
        (float("inf"), "never"),
        (float("nan"), "-"),
    ],
)
def test_compute_as_text(C: float, text: str) -> None:
    assert compute_text(C) == text


# -- the ledger


def accounts(rows: list[dict[str, Any]]) -> dict[str, Summary]:
    return {"run": summary(rows)}


def shares(rows: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[str, ...]]:
    found = tables(accounts(rows))
    return {
        (table.title, name.partition("\n")[0]): tuple(cells) for table in found for name, *cells in table.rows
    }


def test_the_tables_of_a_ledger_by_hand() -> None:
    found = shares(killed_and_resumed())
    assert found["Device time, pool local", "sample"] == ("44.0 s   27.5%",)  # of 1 x 48 + 4 x 28
    assert found["Device time, pool local", "lost"] == ("6.0 s    3.8%",)
    assert found["Device time, pool local", "all"] == ("2 min 40 s  100.0%",)
    assert found["Wall clock", "loading"] == ("12.0 s   15.8%",)
    assert found["FLOPs of training", "train"] == ("10 k   60.6%",)
    assert found["Tokens", "not trained: repeated"] == ("100   25.0%",)
    assert found["Compute", "restarts"] == ("1",) and found["Compute", "tokens"] == ("400",)
    assert found["Evaluation, in no compute", "FLOPs"] == ("400       -",)


def test_runs_stand_side_by_side_and_what_none_has_is_left_out() -> None:
    short = [start(1, 0.0, price=0.0), a_step(1, 1, 15.0)]
    both = {"long": summary(killed_and_resumed()), "short": summary(short)}
    made = {table.title: table for table in tables(both)}
    assert made["Tokens"].head == ["long", "short"]
    by_name = {name.partition("\n")[0]: cells for name, *cells in made["Compute"].rows}
    assert by_name["bill"] == ["0.12 USD", ""]  # the price of the second is not known
    assert tables({}) == []


def test_every_amount_has_its_currency() -> None:
    euros = [
        row | {"currency": "EUR"} if row["event"] == "start" else row for row in killed_and_resumed(2000.0)
    ]
    made = {table.title: table for table in tables({"a": summary(killed_and_resumed()), "b": summary(euros)})}
    by_name = {name.partition("\n")[0]: cells for name, *cells in made["Compute"].rows}
    assert by_name["money"] == ["0.1178 USD", "24.54 EUR"] and by_name["bill"] == ["0.12 USD", "26.76 EUR"]


# ---- forecasts and downstream sets in the report: what the rows say, and no median that they do not have


SCALERL = Sigmoid(R0=0.4, A=0.61, B=1.92, C_mid=2542.0)
FALLEN = {"gate": "not identified", "A": None, "B": None, "C_mid": None, "at_budget": None} | {
    "gain": None,
    "curve": None,
    "verdict": "no forecast",
    "sentence": "not identified: the scores have fallen",
}


def predicted(path: Path, last: int) -> RunFolder:
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
    run = predicted(tmp_path, 15)
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
    run = predicted(tmp_path, 5)
    assert [*run.forecast.rows()][-1]["gate"] == "not identified"
    charts = charts_of(run)
    known = [one for one in charts["curve"].series if one.low is not None]
    assert len(known) == 1 and set(known[0].values) == {None}
    assert {value for one in charts["forecast-A"].series for value in one.values} == {None}
    (table,) = forecast_sections(read_run(run))[0].tables
    assert table.rows[-1][3].startswith("[") and table.rows[0][3] == "-"


@pytest.mark.slow
def test_of_a_curve_that_refutes_the_model_nothing_is_drawn(tmp_path: Path) -> None:
    run = predicted(tmp_path, 12)
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
    run = predicted(tmp_path, 6)
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
