"""Pages of ``ostinato scale``: what may not be told is not drawn, nothing becomes markup or is loaded."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_ledger import a_step, killed_and_resumed, start

from ostinato.observe.ledger import Summary, summary
from ostinato.observe.report.charts import Chart, Section, to_plain
from ostinato.observe.report.facts import Table
from ostinato.observe.report.ledger import by_step, section, tables
from ostinato.observe.report.scaling import (
    Course,
    Forest,
    Page,
    Stretch,
    compute_text,
    curve_chart,
    drawn_forest,
    html,
    places,
    residual_chart,
    slope_chart,
    ticks,
    width_chart,
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


def test_the_fit_window_is_told_without_colour() -> None:
    """It was told by the colour of the points alone."""
    chart = to_plain(curve_chart([course()], "GPU-hours", ""))
    assert [name for _, name in chart["edges"]] == ["fitted from here", "fitted up to here"]
    markers = {one["label"]: one["marker"] for one in chart["series"] if one["marker"]}
    assert markers == {"left out": "ring", "fitted": "dot", "later": "cross"}
    beside = to_plain(curve_chart([course(name="one"), course(name="other")], "GPU-hours", ""))
    dashed = {one["label"]: one["dashed"] for one in beside["series"] if "median" in one["label"]}
    assert dashed == {"one, median, 90 %": False, "other, median, 90 %": True}


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
    charts = [
        curve_chart([course(name=name), course(name="other")], "GPU-hours", name),
        width_chart([(1.0, 0.1), (2.0, 0.05)], 0.06, name),
    ]
    return Page(
        title=name,
        kind="fit",
        lead=[name],
        alarms=[name],
        tables=[Table(title=name, head=(name,), rows=[(f"{name}\n{name}", name)])],
        forests=[
            Forest(title=name, note=name, rows=(Stretch(name=name, low=0, high=1, middle=None, text=name),))
        ],
        sections=[Section(title=name, charts=charts)],
    )


def test_what_others_wrote_never_becomes_markup() -> None:
    found = Tags(html(whole_page(PROBE), NOW))
    assert "img" not in {tag for tag, _ in found.tags}
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    assert sum(tag == "script" for tag, _ in found.tags) == 3  # data, uplot.js, charts.js
    assert json.loads(found.scripts[0])["curve"]["series"][0]["label"].startswith(PROBE)


def test_the_page_admits_its_own_script_and_nothing_from_outside(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", whole_page("run"), NOW)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = Tags(page)
    policy = next(a["content"] for tag, a in found.tags if tag == "meta" and a.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(found.scripts[-1].encode()).digest()).decode()
    assert policy is not None and "default-src 'none'" in policy and f"'sha256-{digest}'" in policy
    assert not [a for _, a in found.tags if "src" in a or "href" in a]
    assert not re.findall(r"url\(|@import", page)
    assert "2026-01-02 03:04 UTC" in page


def test_a_page_without_plots_is_sentences() -> None:
    page = html(Page(title="run", kind="ledger", lead=["Nothing."]), NOW)
    assert "Nothing." in page and 'class="plot"' not in page


# -- the ledger


def books(rows: list[dict[str, Any]]) -> dict[str, Summary]:
    return {"run": summary(rows)}


def shares(rows: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[str, ...]]:
    found = tables(books(rows))
    return {
        (table.title, name.partition("\n")[0]): tuple(cells) for table in found for name, *cells in table.rows
    }


def test_the_tables_of_a_ledger_by_hand() -> None:
    found = shares(killed_and_resumed())
    assert found["Device time, pool local", "sample"] == ("44.0 s", "27.5%")  # of 1 x 48 + 4 x 28
    assert found["Device time, pool local", "lost"] == ("6.0 s", "3.8%")
    assert found["Device time, pool local", "all"] == ("2 min 40 s", "100.0%")
    assert found["Wall clock", "loading"] == ("12.0 s", "15.8%")
    assert found["FLOPs of training", "useful"] == ("8.1 k", "49.1%")
    assert found["FLOPs of training", "wasted: repeated"] == ("6 k", "36.4%")
    assert found["Tokens", "not trained: repeated"] == ("100", "25.0%")
    assert found["Compute", "restarts"] == ("1",) and found["Compute", "tokens"] == ("400",)
    assert found["Evaluation, in no compute", "FLOPs"] == ("400", "")


def test_runs_stand_side_by_side_and_what_none_has_is_left_out() -> None:
    short = [start(1, 0.0, price=0.0), a_step(1, 1, 15.0)]
    both = {"long": summary(killed_and_resumed()), "short": summary(short)}
    made = {table.title: table for table in tables(both)}
    assert made["Tokens"].head == ["long", "share", "short", "share"]
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


def test_the_stack_of_the_ledger_has_every_second_of_the_pools() -> None:
    """By step; the steps that were done again are lost time of the one that followed them."""
    rows = killed_and_resumed()
    steps = by_step(rows)
    assert [row["step"] for row in steps] == [1, 2, 3]
    seconds = sum(value for row in steps for name, value in row.items() if name.startswith("seconds/"))
    assert seconds == pytest.approx(summary(rows).pools["local"].total)
    assert steps[1]["seconds/lost"] == 10 + 12 + 6 and steps[0]["seconds/eval"] == 4
    found = section(rows)
    assert found is not None
    by_title = {chart.title: chart for chart in found.charts}
    labels = [one.label for one in by_title["Device time by part"].series]
    assert labels == ["sample", "grade", "train", "measure", "eval", "idle", "lost"]
    labels = [one.label for one in by_title["FLOPs of each step"].series]
    assert labels == ["useful", "measurement", "zero variance"]
    assert to_plain(by_title["FLOPs of each step"])["stacked"] is True
    assert section([]) is None and section([start(1, 0.0)]) is None
