"""Pages of ``ostinato scale``: what may not be told is not drawn, nothing becomes markup or is loaded."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.report.charts import Chart, Section, to_plain
from ostinato.report.facts import Cell, Column, Line, Table
from ostinato.report.ledger import section, summary, tables
from ostinato.report.reading import RunData
from ostinato.report.scaling import (
    Course,
    Forest,
    Page,
    Stretch,
    compute_text,
    curve_chart,
    drawn_forest,
    html,
    places,
    profile_chart,
    residual_chart,
    slope_chart,
    ticks,
    write_page,
)

PROBE = "</script><img src=x onerror=alert(1)><!--"
NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
COMPUTE = np.geomspace(1000, 50_000, 12)


def course(told: bool = True, refuted: bool = False, name: str = "run", last: float = 20_000) -> Course:
    at = places([COMPUTE], 100_000)
    quantiles = np.linspace(0.4, 0.6, len(at)) + np.linspace(-0.02, 0.02, 5)[:, None]
    return Course(
        name=name,
        compute=COMPUTE,
        score=np.linspace(0.4, 0.6, len(COMPUTE)),
        window=(float(COMPUTE[2]), last),
        places=at,
        quantiles=None if refuted else quantiles,
        told=told,
    )


def labels(chart: Chart) -> list[str]:
    return [series.label for series in chart.series]


def test_a_told_curve_has_a_median_two_bands_and_its_evaluations_by_part() -> None:
    chart = curve_chart([course()], "GPU-hours", "")
    assert labels(chart) == ["median, 90 %", "50 %", "left out", "fitted", "later"]
    counts = {series.label: sum(v is not None for v in series.values) for series in chart.series}
    assert counts["left out"] == 2 and counts["left out"] + counts["fitted"] + counts["later"] == len(COMPUTE)


def test_a_curve_that_is_not_told_has_a_band_and_no_point() -> None:
    chart = curve_chart([course(told=False)], "GPU-hours", "")
    band = chart.series[0]
    assert labels(chart)[0] == "90 %" and "50 %" not in labels(chart)
    assert band.low is not None and all(value is None for value in band.values)
    assert "90 %" not in labels(curve_chart([course(refuted=True)], "GPU-hours", ""))


def test_runs_side_by_side_are_named() -> None:
    chart = curve_chart([course(name="a"), course(name="b", told=False)], "GPU-hours", "")
    assert (
        "a, median, 90 %" in labels(chart) and "b, 90 %" in labels(chart) and "b, 50 %" not in labels(chart)
    )


computes = st.lists(st.floats(1e-3, 1e22), min_size=1, max_size=30, unique=True).map(sorted)


@settings(max_examples=50, deadline=None)
@given(computes, st.floats(1e-3, 1e22))
def test_evaluations_are_places_and_stand_apart(compute: list[float], last: float) -> None:
    """Neighbours without a place between them would be joined by a line."""
    measured = np.array(compute)
    if len(measured) > 1 and np.min(measured[1:] / measured[:-1]) < 1 + 1e-9:
        return
    at = places([measured], last)
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


def test_less_than_two_decades_have_their_places_as_labels() -> None:
    wide = residual_chart(np.array([10.0, 2000.0]), np.zeros(2), np.ones(2), "steps")
    narrow = residual_chart(np.array([2000.0, 8000.0]), np.zeros(2), np.ones(2), "steps")
    assert list(wide.labels) == [] and list(narrow.labels) == ["2,000", "8,000"]


def test_slopes_leave_out_what_has_no_logarithm() -> None:
    logits = np.array([np.nan, *np.linspace(-1, 1, len(COMPUTE) - 1)])
    chart = slope_chart([course()], [logits], 0.61, "GPU-hours")
    assert sum(value is not None for value in chart.series[0].values) == len(COMPUTE) - 1


# -- forest plots


@settings(max_examples=50, deadline=None)
@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_few_inside_and_even(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert 1 <= len(found) <= 5
    slack = 1e-4 * max(abs(low), width)
    assert all(low - slack <= tick <= low + width + slack for tick in found)


def test_a_forest_stays_in_its_column() -> None:
    rows = (
        Stretch(name="a" * 50, low=0.5, high=0.7, middle=0.6, text="[0.5, 0.7]"),
        Stretch(name="b", low=0.55, high=1.0, middle=None, text="[0.55, 1]", seen=0.4),
    )
    drawn = drawn_forest(Forest(title="A", note="", rows=rows))
    xs = [x for row in drawn["rows"] for x in (*row["x"], row["middle"], row["seen"]) if x is not None]
    assert len(xs) == 6 and min(xs) >= 210 and max(xs) <= 540
    assert len(drawn["rows"][0]["name"]) == 32 and drawn["rows"][0]["full"] == "a" * 50
    same = drawn_forest(
        Forest(title="A", note="", rows=(Stretch(name="x", low=1, high=1, middle=1, text=""),))
    )
    assert same["rows"][0]["x"] == (375.0, 375.0)


# -- the page


class Tags(HTMLParser):
    """The tags of a page, and the texts of its script elements."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and self.cdata_elem == "script":
            self.scripts[-1] += data


def whole_page(name: str) -> Page:
    line = Line(name=name, note=name, cells=(Cell(value=name),))
    charts = [
        curve_chart([course(name=name), course(name="other")], "GPU-hours", name),
        profile_chart(np.linspace(0.5, 0.7, 5), np.linspace(4, 0, 5)),
    ]
    return Page(
        title=name,
        kind="fit",
        lead=[name],
        alarms=[name],
        tables=[Table(title=name, columns=(Column(name=name),), lines=(line,))],
        forests=[
            Forest(title=name, note=name, rows=(Stretch(name=name, low=0, high=1, middle=None, text=name),))
        ],
        sections=[Section(title=name, charts=charts)],
    )


def test_what_others_wrote_never_becomes_markup() -> None:
    found = Tags(html(whole_page(PROBE), NOW))
    assert "img" not in {tag for tag, _ in found.tags}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert sum(tag == "script" for tag, _ in found.tags) == 2  # data, charts.js
    assert json.loads(found.scripts[0])["curve"]["series"][0]["label"].startswith(PROBE)


def test_the_page_admits_its_own_script_and_nothing_from_outside(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", whole_page("run"), NOW)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = Tags(page)
    policy = next(a["content"] for tag, a in found.tags if tag == "meta" and a.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(found.scripts[1].encode()).digest()).decode()
    assert policy is not None and "default-src 'none'" in policy and f"'sha256-{digest}'" in policy
    assert not [a for _, a in found.tags if "src" in a or "href" in a]
    assert not re.findall(r"url\(|@import", page)
    assert "2026-01-02 03:04 UTC" in page


def test_a_page_without_plots_is_sentences() -> None:
    page = html(Page(title="run", kind="ledger", lead=["Nothing."]), NOW)
    assert "Nothing." in page and 'class="plot"' not in page


# -- the ledger


def ledger(rows: int = 3) -> RunData:
    row = {
        "wall_s": 2.0,
        "seconds": {"rollout": 1.5, "train": 0.5},
        "tokens": {"sampled": 10.0, "trained": 8.0, "wasted": 2.0, "wasted/truncated": 2.0},
        "flops": {"rollout": 3.0, "train": 1.0, "useful": 3.0, "wasted": 1.0},
    }
    return RunData(
        name="run",
        recipe_text="",
        recipe={},
        metrics=[],
        evals=[],
        ledger=[{**row, "step": step, "ended_at": 10.0 * step} for step in range(1, rows + 1)],
        starts=[],
        damage=[],
    )


@given(st.integers(1, 9))
def test_pools_add_up_to_the_steps(rows: int) -> None:
    sums = summary(ledger(rows))
    assert sums["seconds"]["rollout"] + sums["seconds"]["train"] == sums["seconds"]["steps"] == 2.0 * rows
    assert sums["seconds"]["between"] == 8.0 * (rows - 1)
    assert sums["flops"]["useful"] + sums["flops"]["wasted"] == 4.0 * rows


def test_the_tables_have_shares_and_what_is_missing_is_left_out() -> None:
    seconds, tokens, flops = tables(ledger())
    shares = {line.name: line.cells[1].value for table in (seconds, tokens, flops) for line in table.lines}
    assert shares["rollout"] == "75.0%" and shares["trained"] == "80.0%" and shares["wasted"] == "25.0%"
    assert "reward" not in shares and "held-out evaluation" not in shares
    assert tables(ledger(0)) == [] and section(ledger(0)) is None
    old = RunData(
        name="run",
        recipe_text="",
        recipe={},
        metrics=[],
        evals=[],
        ledger=[{"step": 1, "wall_s": 2.0}],
        starts=[],
        damage=[],
    )
    assert [table.title for table in tables(old)] == ["Seconds"]


def test_the_stack_of_the_ledger() -> None:
    found = section(ledger())
    assert found is not None
    by_title = {chart.title: chart for chart in found.charts}
    assert [one.label for one in by_title["Seconds by pool"].series] == ["rollout", "train"]
    assert to_plain(by_title["FLOPs of each step"])["stacked"] is True
