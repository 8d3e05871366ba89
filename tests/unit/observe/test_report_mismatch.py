"""The section on sampler against trainer, the same in a terminal and as JSON, and what the watch said."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mismatch_rows import mismatch_row, routing_metrics
from typer.testing import CliRunner

from ostinato.algo.algorithms import algorithm
from ostinato.cli.app import app
from ostinato.config import Recipe, dump_toml
from ostinato.observe.mismatch import arm
from ostinato.observe.report import write_report
from ostinato.observe.report.charts import Chart, Section, to_plain
from ostinato.observe.report.concerns import Level, concerns
from ostinato.observe.report.facts import Line, Table, figure_text, marked_steps, milestones
from ostinato.observe.report.mismatch import mismatch_section, summary
from ostinato.observe.report.reading import RunData, read_run
from ostinato.run import RunFolder, to_json

ALARM = {
    "step": 44,
    "since": 40,
    "rule": "tail",
    "collapse": True,
    "sentence": "F(2) is 0.15",
    "figures": {"tail_2": 0.15},
}


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from the disk: NaN is null."""
    return json.loads(to_json(row))


def data(*rows: Mapping[str, Any], **changes: Any) -> RunData:
    whole: dict[str, Any] = {
        "name": "run",
        "recipe_text": "",
        "recipe": {"trainer": {"steps": 80}},
        "metrics": [{"step": step, "reward": 0.5, **routing_metrics(step)} for step in (1, 40, 80)],
        "evals": [],
        "ledger": [],
        "starts": [],
        "damage": [],
        "mismatch": [plain(row) for row in rows],
    }
    return RunData(**{**whole, **changes})


def charts(section: Section) -> dict[str, Chart]:
    return {chart.key: chart for chart in section.charts}


def row_of(table: Table, name: str) -> Line:
    (row,) = (row for row in table.rows if row[0].partition("\n")[0] == name)
    return row


def cells(table: Table, name: str) -> list[str]:
    return [cell.partition("\n")[0] for cell in row_of(table, name)[1:]]


def k3_line(section: Section) -> Line:
    return row_of(section.tables[0], "k3")


def test_the_table_by_hand() -> None:
    """Two answers of two tokens; replay halves each log ratio."""
    native = arm([math.log(1.2), -math.log(1.2), math.log(3), 0.0], [0, 0, 1, 1])  # pyright: ignore
    half = arm([0.5 * math.log(1.2), -0.5 * math.log(1.2), 0.5 * math.log(3), 0.0], [0, 0, 1, 1])  # pyright: ignore
    (table,) = mismatch_section(data({"step": 3, "arms": {"native": native, "replay": half}})).tables
    assert table.head == ["native\nits own experts", "with replay\nthe sampler's experts"]
    assert cells(table, "largest |log r|") == ["1.1", "0.549"]
    assert cells(table, "F(1.1)") == ["0.75", "0.25"]
    assert cells(table, "F(2)") == ["0.25", "0"]
    assert cells(table, "TIS would cut") == ["0.25", "0"]
    assert cells(table, "IcePop would mask") == ["0", "0"]
    k3 = row_of(table, "k3")
    assert "\n" not in k3[1] and "sampler || trainer" in k3[0] and "nats" in k3[0]  # two answers
    assert not [row for row in table.rows if row[0].startswith("Pearson")]


def test_the_last_measurement_stands_beside_the_floor_of_the_first() -> None:
    section = mismatch_section(data(mismatch_row(1), mismatch_row(25), mismatch_row(75, growth=2)))
    (table,) = section.tables
    assert table.title == "Step 75" and len(table.head) == 3 and all(len(row) == 4 for row in table.rows)
    assert "Step 75" in section.lead and section.lead.count("[") == 2
    facts = {fact.name: fact for fact in section.facts}
    assert facts["Routes of a token"].value == "24 bytes"
    assert facts["Experts in training"].note == mismatch_row(75)["decision"]
    assert "the gate asks for 90%" in facts["Experts in common"].note


def test_the_plots() -> None:
    shown = charts(mismatch_section(data(mismatch_row(1), mismatch_row(25), mismatch_row(80))))
    gap = {one.label: one for one in shown["log-probability-gap"].series}
    assert shown["log-probability-gap"].steps == [1, 40, 80]
    for name in ("native", "with replay"):
        first, between, last = gap[f"KL, {name}"].values
        assert first and last and between is None, "step 25 is no step of this run"
    assert shown["agreement"].mark == (0.9, "gate")
    assert len(shown["agreement"].series) == 2
    assert all(json.dumps(to_plain(chart)) for chart in shown.values())


@pytest.mark.parametrize(("replay", "gated"), [(True, True), ("auto", True), (False, False)])
def test_no_gate_is_told_of_where_nothing_is_replayed(replay: bool | str, gated: bool) -> None:
    """With replay off the report said that the gate asks for 90 % and refuses less."""
    section = mismatch_section(data(mismatch_row(1), recipe={"trainer": {"replay": replay}}))
    (common,) = (fact for fact in section.facts if fact.name == "Experts in common")
    chart = charts(section)["agreement"]
    told = ["the gate" in common.note, "the gate" in chart.note, chart.mark is not None]
    assert told == [gated] * 3


def test_too_few_answers_have_no_interval() -> None:
    row = plain(mismatch_row(1) | {"step": 3})
    for one in row["arms"].values():
        one |= {"k3_low": None, "k3_high": None}
    section = mismatch_section(data(row))
    assert not any("[" in cell for cell in k3_line(section)[1:])
    assert all("\n[" in cell for cell in k3_line(mismatch_section(data(mismatch_row(1))))[1:3])
    assert "[" not in section.lead


def test_the_correction_is_told_with_the_run_s_own_bounds() -> None:
    def told(**keys: Any) -> list[str]:
        starts = [{"algorithm": plain(asdict(algorithm("grpo", **keys)))}]
        rows = [{"step": 80, "sampling/masked": 0.01, "sampling/truncated": 0.02}]
        facts = mismatch_section(data(mismatch_row(1), starts=starts, metrics=rows)).facts
        return [f"{fact.value} ({fact.note})" for fact in facts if fact.name == "Correction of the ratio"]

    assert told() == []
    assert told(correction="token_mask") == [
        "token_mask, outside 0.5 to 5 (1% of the tokens of the last step)"
    ]
    assert told(correction="token_mask", correction_high=3)[0].startswith("token_mask, outside 0.5 to 3 (1%")
    assert told(correction="token_truncate")[0].startswith("token_truncate, above 2 (2%")


def test_replay_of_another_step_is_not_shown() -> None:
    """A last measurement without replay, of a batch that carried no routes, was drawn beside the replay of
    the one before as if both were of one step."""
    later = mismatch_row(25)
    later["arms"] = {"native": later["arms"]["native"]}
    (table,) = mismatch_section(data(mismatch_row(1), later)).tables
    assert [name.partition("\n")[0] for name in table.head] == ["native", "floor"]


def test_a_dense_run_shows_what_applies() -> None:
    rows = [{"step": step, "reward": 0.5} for step in (1, 80)]
    section = mismatch_section(data(mismatch_row(1, dense=True), metrics=rows))
    assert "nothing to replay" in section.lead
    (table,) = section.tables
    assert [name.partition("\n")[0] for name in table.head] == ["native", "floor"]
    assert charts(section)["agreement"].empty
    assert not [fact for fact in section.facts if "outes" in fact.name or "xperts" in fact.name]


def test_a_run_that_was_never_measured_says_so_in_a_sentence() -> None:
    section = mismatch_section(data(recipe={"log": {"mismatch_every": 0}}))
    assert "mismatch.jsonl has no rows (log.mismatch_every is 0)" in section.lead
    assert not section.tables and not section.facts
    assert "log-probability-gap" in charts(section)


WHOLE = to_json(mismatch_row(1))
damaged = st.recursive(
    st.none() | st.booleans() | st.floats(-1e3, 1e3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["k3", "0", "share"]), inner),
    max_leaves=6,
)


@given(st.data())
def test_a_damaged_row_loses_what_is_damaged_and_no_more(draw: st.DataObject) -> None:
    """Any value of a row may be of another version of the program, or of a disk that lies."""
    row = json.loads(WHOLE)
    native = row["arms"]["native"]
    for where in (native, row["routers"]["layers"][0], row["routers"], row):
        for key in draw.draw(st.lists(st.sampled_from(sorted(where)), max_size=3)):
            if key != "step":
                where[key] = draw.draw(damaged)
    run = data(row)
    section = mismatch_section(run)
    assert section.lead and to_json(summary(run)) and concerns(run) is not None
    assert all(chart.empty or json.dumps(to_plain(chart)) for chart in section.charts)


def test_replay_that_makes_it_worse_is_a_warning() -> None:
    """Routes shifted by one raise k3 from 1e-5 to 0.1 (reference pilot), while everything else looks fine."""

    def said(row: Mapping[str, Any]) -> list[str]:
        found = concerns(data(row))
        return [one.text for one in found if one.level is Level.BAD and "Replay made" in one.text]

    row = mismatch_row(25)
    assert not said(row)
    row["arms"] = {"native": row["arms"]["replay"], "replay": row["arms"]["native"]}
    assert "misaligned" in said(row)[0]


def test_rows_without_a_route_are_a_concern() -> None:
    row = mismatch_row(25) | {"coverage": 0.75}
    assert any("25.0% of the rows" in one.text for one in concerns(data(row)))


def test_best_and_collapse_are_facts_marks_and_words() -> None:
    evals = [
        {"step": step, "split": "eval", "n": 256, "pass@1": value, "stderr": 0.03}
        for step, value in ((0, 0.3), (20, 0.6), (40, 0.8), (80, 0.2))
    ]
    run = data(mismatch_row(1), evals=evals, alarms=[ALARM])
    best, collapse = milestones(run)
    assert (best.value, best.note[:13]) == ("step 40", "pass@1 0.800 ")
    assert (collapse.value, collapse.note) == ("step 44", "tail, since step 40")
    assert marked_steps(run) == [(40, "best"), (44, "collapse")]
    assert any("The run collapsed at step 44: F(2) is 0.15" in one.text for one in concerns(run))
    sign = data(alarms=[{**ALARM, "rule": "gradient", "collapse": False}])
    assert milestones(sign) == [] and marked_steps(sign) == []
    (said,) = (one for one in concerns(sign) if "stability watch" in one.text)
    assert said.level is Level.LOOK


def new_run(path: Path) -> RunFolder:
    run = RunFolder.create(path / "run", dump_toml(Recipe()))
    run.write(1, {"reward": 0.5, **routing_metrics(1)})
    run.mismatch.append(mismatch_row(1), mismatch_row(25))
    run.watch.append(ALARM)
    return run


def test_it_reaches_the_page(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    page = write_report(run).read_text(encoding="utf-8")
    assert 'id="mismatch"' in page and 'data-chart="agreement"' in page and "replay is on: native" in page
    assert "collapse" in page and read_run(run).alarms == [ALARM]


def test_the_command_prints_one_screen_or_one_object_and_writes_nothing(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    shown = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["report", str(run.path), "--mismatch"])
    assert shown.exit_code == 0
    for words in ("Step 25", "with replay", "F(1.1)", "floor", "replay is on", "24 bytes"):
        assert words in shown.stdout
    assert len(shown.stdout.splitlines()) <= 48 and max(map(len, shown.stdout.splitlines())) <= 100
    told = CliRunner().invoke(app, ["report", str(run.path), "--mismatch", "--json"])
    found = json.loads(told.stdout)
    assert found["direction"] == "KL(sampler || trainer)" and [row["step"] for row in found["measured"]] == [
        1,
        25,
    ]
    last = found["measured"][-1]["arms"]
    assert last["replay"]["k3"] < last["native"]["k3"] and found["alarms"][0]["step"] == 44
    assert not run.report.exists()


@pytest.mark.parametrize("more", [["--json"], ["--mismatch", "--open"], ["--mismatch", "--out", "x.html"]])
def test_what_does_not_go_together_is_refused_by_name(tmp_path: Path, more: list[str]) -> None:
    refused = CliRunner().invoke(app, ["report", str(new_run(tmp_path).path), *more])
    assert isinstance(refused.exception, ValueError) and more[-1 if len(more) == 1 else 0] in str(
        refused.exception
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (1.789e-5, "1.79e-5"),
        (1e-4, "1e-4"),
        (0.0121, "0.0121"),
        (0.99982, "0.99982"),
        (0.9999999, "1"),
        (1234.5, "1,234"),
        (-1.5, "-1.5"),
    ],
)
def test_figures(value: float | None, text: str) -> None:
    assert figure_text(value) == text
