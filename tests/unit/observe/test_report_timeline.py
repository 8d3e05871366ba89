"""The pipeline in the report: who did what when, idle shares, ages, publishes and lost workers, from rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_rows import SAMPLERS, STEP_S, pipeline_metrics, step_row, step_spans
from small_ledger import a_step

from ostinato.config import Recipe, dump_toml
from ostinato.observe.report import write_report
from ostinato.observe.report.charts import Chart
from ostinato.observe.report.gantt import LANES, SPANS, Step, picture, pictures, recorded, steps_of
from ostinato.observe.report.reading import RunData, read_run, thinned
from ostinato.observe.report.timeline import pipeline_sections
from ostinato.observe.timeline import Kind, Span
from ostinato.run import RunFolder

BEGAN = 1.76e9


def data(
    steps: int = 3,
    *,
    spans: list[Span] | None = None,
    metrics: list[dict[str, Any]] | None = None,
    ledger: list[dict[str, Any]] | None = None,
) -> RunData:
    numbers = range(1, steps + 1)
    return RunData(
        name="run",
        recipe_text="",
        recipe={},
        metrics=[{"step": n, **pipeline_metrics(n)} for n in numbers] if metrics is None else metrics,
        evals=[],
        ledger=[step_row(n) for n in numbers] if ledger is None else ledger,
        spans=[span for n in numbers for span in step_spans(n)] if spans is None else spans,
        starts=[],
        damage=[],
    )


def charts(of: RunData) -> dict[str, Chart]:
    return {chart.title: chart for section in pipeline_sections(of) for chart in section.charts}


def spans_of(lane: dict[str, Any]) -> list[list[int]]:
    return [lane["spans"][i : i + 5] for i in range(0, len(lane["spans"]), 5)]


# ---- the picture


def test_a_picture_has_a_lane_for_each_worker_in_their_order() -> None:
    spans = step_spans(2)
    shown = picture(spans, BEGAN + STEP_S, BEGAN + 2 * STEP_S, steps_of([step_row(2)]))
    assert [lane["worker"] for lane in shown["lanes"]] == [*SAMPLERS, "trainer", "grader-0"]
    assert shown["seconds"] == STEP_S and not shown["coarse"] and not shown["hidden"]
    assert shown["steps"] == [(2, 0, 6000)]
    train = [one for one in spans_of(shown["lanes"][3]) if shown["kinds"][one[0]] == "train"]
    assert len(train) == 1 and train[0][3] == 2
    assert train[0][1] + train[0][2] == 5900
    assert 0.5 < shown["lanes"][3]["used"] < 0.9


@pytest.mark.slow
def test_a_long_run_is_thinned_and_shown_closely_in_places() -> None:
    """Of 16 times as many spans as have room: the whole with the same seconds, and three closer looks."""
    steps = [Step(step=n, start=float(n), stop=n + 1.0) for n in range(2000)]
    spans = [
        Span(worker="sampler-0", kind=kind, start=n + i / 50, stop=n + (i + (n != 7)) / 50)
        for n in range(2000)
        for i, kind in enumerate([Kind.PREFILL, Kind.DECODE] * 25)
    ]
    shown = pictures(spans, steps)
    names = ["the whole run", "the first steps", "the last steps", "step 7, the most idle"]
    assert [one["name"] for one in shown] == names
    assert [one["coarse"] for one in shown] == [True, False, False, False]
    for one in shown:
        assert sum(len(spans_of(lane)) for lane in one["lanes"]) <= SPANS
    sums = Counter[int]()
    for kind, _, ms, *_ in spans_of(shown[0]["lanes"][0]):
        sums[kind] += ms
    assert sums[0] == pytest.approx(999_500, rel=0.01) and sums[1] == pytest.approx(999_500, rel=0.01)


def test_more_workers_than_there_is_room_for_are_counted() -> None:
    spans = [Span(worker=f"sampler-{n}", kind=Kind.DECODE, start=0.0, stop=1.0) for n in range(LANES + 44)]
    shown = picture(spans, 0.0, 1.0)
    assert (len(shown["lanes"]), shown["hidden"]) == (LANES, 44)
    assert shown["idle"] == {"samplers": 0.0}


def test_a_step_that_was_done_again_is_there_twice_and_steps_never_overlap() -> None:
    again = {**step_row(2), "session": 2, "ended_at": BEGAN + 100}
    rows = [{"event": "start"}, step_row(1), step_row(2), {"event": "eval", "step": 2}, again]
    assert [one.step for one in steps_of(rows)] == [1, 2, 2]
    early = {**step_row(3), "ended_at": BEGAN + 101}
    assert steps_of([*rows, early])[-1] == Step(step=3, start=BEGAN + 100, stop=BEGAN + 101)


@given(st.integers(0, 300), st.integers(1, 40), st.integers(9, 60))
def test_a_long_timeline_is_read_in_bounded_memory(count: int, ends: int, between: int) -> None:
    """Both ends as they are; between them at most so many, of the same seconds."""
    kinds = [Kind.PREFILL, Kind.DECODE]
    spans = [Span(worker="s", kind=kinds[n % 2], start=float(n), stop=n + 0.5) for n in range(count)]
    found = thinned(iter(spans), ends, between)
    assert len(found) <= 2 * ends + 2 * between
    assert found[:ends] == spans[:ends]
    assert found[len(found) - min(ends, count) :] == spans[count - min(ends, count) :]
    assert sum(one.seconds for one in found) == pytest.approx(0.5 * count)


# ---- the section


def test_a_run_without_a_pipeline_has_no_section() -> None:
    plain = [{"step": 1, "reward": 0.5, "staleness/mean": 0.0, "staleness/max": 0.0}]
    assert pipeline_sections(data(spans=[], metrics=plain, ledger=[a_step(1, 1, BEGAN)])) == []
    assert pictures([], []) == []


def test_idle_shares_are_by_pool_and_step() -> None:
    idle = charts(data())["Idle time"]
    assert [one.label for one in idle.series] == ["samplers", "trainer", "graders"]
    assert list(idle.steps) == [1, 2, 3]
    trainer = dict(zip([one.label for one in idle.series], [one.values for one in idle.series], strict=True))
    assert all(value is not None and 0.2 < value < 0.45 for value in trainer["trainer"])
    section = pipeline_sections(data())[0]
    assert section.lead.startswith("Idle from the first step to the last: samplers ")
    table = section.tables[0]
    assert [row[0] for row in table.rows] == [*SAMPLERS, "trainer", "grader-0"]
    assert table.head[:2] == ("worked", "prefill") and table.head[-1] == "idle"


def test_workers_that_share_the_cores_are_told_as_such() -> None:
    alone = data(ledger=[a_step(1, n, BEGAN + n * STEP_S) for n in (1, 2, 3)])
    assert "share this machine's cores" in pipeline_sections(alone)[0].lead
    assert "cores" not in pipeline_sections(data())[0].lead


def test_many_workers_are_told_by_pool() -> None:
    spans = [Span(worker=f"sampler-{n}", kind=Kind.DECODE, start=BEGAN, stop=BEGAN + 3) for n in range(40)]
    (table,) = pipeline_sections(data(1, spans=spans))[0].tables
    assert [row[:2] for row in table.rows] == [("sampler x 40", "50.0%")]


def test_without_a_timeline_the_loop_s_own_figure_is_drawn() -> None:
    idle = charts(data(spans=[]))["Idle time"]
    assert [one.label for one in idle.series] == ["all"] and list(idle.series[0].values) == [0.1] * 3


def test_ages_by_step() -> None:
    drawn = charts(data())
    ages = drawn["Age of tokens"]
    assert [one.label for one in ages.series] == ["0", "1", "2"]
    for age, one in enumerate(ages.series):
        assert one.values == [pipeline_metrics(n)[f"staleness/hist/{age}"] for n in (1, 2, 3)]
    assert list(drawn["Staleness"].series[1].values) == [2.0] * 3


def test_publishes_queue_and_lost_workers_are_drawn() -> None:
    drawn = charts(data(8))
    assert {"Published", "Time to publish", "Queue", "Trainer waited"} <= drawn.keys()
    assert [one.label for one in drawn["Workers"].series] == [
        "alive",
        "replaced workers",
        "answers begun again",
    ]


def test_every_admitted_group_is_accounted_for() -> None:
    facts = {fact.name: (fact.value, fact.note) for fact in pipeline_sections(data(8))[0].facts}
    assert facts == {
        "Groups admitted": ("160", ""),
        "trained on": ("127", ""),
        "dropped": ("1", "stale 1"),
        "in play": ("32", ""),
    }


# ---- the page


def test_the_page_draws_what_the_folder_has(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", dump_toml(Recipe.parse({"name": "t"})))
    assert 'class="chart gantt"' not in write_report(run).read_text()
    for step in (1, 2):
        run.timeline.append(*(span.to_json() for span in step_spans(step)))
        run.ledger.append({"event": "start", **START} if step == 1 else step_row(2))
    page = write_report(run).read_text()
    assert 'class="chart gantt"' in page and '<a href="#pipeline">' in page
    assert '"worker":"sampler-2"' in page


START = {
    "session": 1,
    "at": BEGAN,
    "process_started": BEGAN,
    "step": 0,
    "pools": {},
    "price_per_device_hour": 0,
    "currency": "USD",
}


def test_a_row_that_is_no_span_ends_the_timeline_in_words(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", dump_toml(Recipe.parse({"name": "t"})))
    run.timeline.append(step_spans(1)[0].to_json(), {"worker": "a", "kind": "sleeps", "from": 1, "to": 2})
    found = read_run(run)
    assert len(found.spans) == 1
    assert len(found.damage) == 1 and "timeline.jsonl has a row that is no span" in found.damage[0]


def test_steps_without_a_span_are_not_recorded() -> None:
    """A long run leaves steps out of its timeline: they are not idle, nothing is known of them."""
    steps = [Step(step=n, start=BEGAN + 6 * (n - 1), stop=BEGAN + 6 * n) for n in (1, 2, 3)]
    spans = [span for n in (1, 3) for span in step_spans(n)]
    assert [step.step for step, _ in recorded(spans, steps)] == [1, 3]
