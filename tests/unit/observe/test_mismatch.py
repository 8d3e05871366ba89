"""Sampler against trainer: its figures against twins, the report, the command."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mismatch_rows import mismatch_row, routing_metrics
from nouns import run_data, sample_of
from reference.plain_pack import pad
from typer.testing import CliRunner

from ostinato.algo.algorithms import algorithm
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.algo.routing import never_written, part_sums, sequence_spans
from ostinato.cli.app import app
from ostinato.config import Recipe, dump_toml
from ostinato.observe.mismatch import TAUS, arm, pearson, routers
from ostinato.observe.report import write_report
from ostinato.observe.report.charts import Chart, Section, to_plain
from ostinato.observe.report.concerns import Level, concerns
from ostinato.observe.report.facts import Line, Table, figure_text, marked_steps, milestones
from ostinato.observe.report.mismatch import mismatch_section, summary
from ostinato.observe.report.reading import RunData, read_run
from ostinato.run import RunFolder, to_json
from ostinato.types import NO_EXPERT, Sample

LAYERS, TOP_K, EXPERTS = 3, 2, 8


def ids_of(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.random((rows, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.int16)


def naive_arm(log_ratio: np.ndarray, owner: np.ndarray) -> dict[str, float]:
    """One token and one sequence at a time."""
    tokens = [float(value) for value in log_ratio]
    sequences = [[value for value, i in zip(tokens, owner, strict=True) if i == own] for own in set(owner)]
    ratios = [math.exp(value) for value in tokens]
    count = len(tokens)
    return {
        "k3": sum(math.exp(value) - 1 - value for value in tokens) / count,
        "abs_mean": sum(map(abs, tokens)) / count,
        "abs_max": max(map(abs, tokens)),
        "ess": sum(ratios) ** 2 / (count * sum(ratio**2 for ratio in ratios)),
        "F(1.5)": sum(max(ratio, 1 / ratio) > 1.5 for ratio in ratios) / count,
        "truncated": sum(ratio > 2 for ratio in ratios) / count,
        "masked": sum(not 0.5 <= ratio <= 5 for ratio in ratios) / count,
        "sequence": sum(len(one) for one in sequences if math.exp(sum(one)) > 3) / count,
    }


@given(tokens=st.integers(1, 60), sequences=st.integers(1, 8), scale=st.sampled_from([0.01, 0.5, 2.0]))
def test_an_arm_is_what_its_definitions_say(tokens: int, sequences: int, scale: float) -> None:
    rng = np.random.default_rng(tokens * 10 + sequences)
    log_ratio, owner = scale * rng.standard_normal(tokens), rng.integers(0, sequences, tokens) * 3
    found, twin = arm(log_ratio, owner, bootstrap=50), naive_arm(log_ratio, owner)
    flat = {
        **found,
        "F(1.5)": dict(found["tails"])[1.5],
        "truncated": found["masked"]["token_truncate"],
        "masked": found["masked"]["token_mask"],
        "sequence": found["masked"]["sequence_mask"],
    }
    for name, value in twin.items():
        assert flat[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    assert found["tokens"] == tokens and found["sequences"] == len(set(owner.tolist()))
    assert [tau for tau, _ in found["tails"]] == list(TAUS)
    for below in ([share for _, share in found["cdf"]], [-share for _, share in found["tails"]]):
        assert below == sorted(below)
    reported = {name: value for name, value in found.items() if name not in ("k3_low", "k3_high")}
    assert json.loads(json.dumps(reported)) == reported, "plain numbers"
    assert math.isnan(found["k3_low"]) == math.isnan(found["k3_high"]) == (found["sequences"] < 5)


def test_policies_that_agree_have_nothing_to_report() -> None:
    same = arm(np.zeros(50), np.arange(50) // 5)
    names = ("k3", "k3_low", "k3_high", "abs_mean", "abs_max")
    assert all(same[name] == 0 for name in names)
    assert same["ess"] == 1
    assert all(share == 0 for _, share in same["tails"]) and all(share == 1 for _, share in same["cdf"])
    with pytest.raises(ValueError, match="at least one token"):
        arm(np.zeros(0), np.zeros(0))


def test_a_ratio_beyond_all_bounds_stays_finite() -> None:
    wild = arm(np.array([900.0, -900.0, 0.0]), np.array([0, 1, 2]))
    unknown = {"k3_low", "k3_high"}  # of three sequences
    assert all(math.isfinite(wild[name]) for name in wild.keys() - unknown if isinstance(wild[name], float))
    assert wild["ess"] <= 1


def test_the_interval_is_of_sequences_and_covers() -> None:
    """Tokens of a sequence deviate together: an interval over tokens would be far too narrow. Of 100 batches
    it misses the true mean in about 5, or somewhat more since it is made from a finite sample."""
    rng, missed = np.random.default_rng(0), 0
    common = 0.1 * rng.standard_normal(200_000)
    truth = float((np.expm1(common) - common).mean())
    owner = np.repeat(np.arange(100), 10)
    for batch in range(100):
        found = arm(np.repeat(0.1 * rng.standard_normal(100), 10), owner, bootstrap=300, seed=batch)
        missed += not found["k3_low"] <= truth <= found["k3_high"]
    assert 1 <= missed <= 15
    assert arm(common[:500], owner[:500]) == arm(common[:500], owner[:500]), "the seed decides"


def test_few_sequences_have_no_interval() -> None:
    """One sequence had an interval without width, low = k3 = high, and the report claimed of two such that
    their intervals do not overlap."""
    log_ratio = 0.1 * np.random.default_rng(0).standard_normal(40)
    for count, known in ((1, False), (4, False), (5, True)):
        found = arm(log_ratio, np.arange(40) % count, bootstrap=50)
        assert math.isfinite(found["k3_low"]) == math.isfinite(found["k3_high"]) == known


def test_siblings_are_drawn_together() -> None:
    """Answers to one prompt deviate together; taken as independent, 8 of each of 20 prompts gave an interval
    that looked as if there were 160."""
    rng = np.random.default_rng(0)
    prompts = np.repeat(np.arange(20), 80)
    log_ratio = np.repeat(0.3 * rng.standard_normal(20), 80) + 0.01 * rng.standard_normal(1600)
    sequences = np.repeat(np.arange(160), 10)
    alone, together = arm(log_ratio, sequences), arm(log_ratio, sequences, clusters=prompts)
    widths = [one["k3_high"] - one["k3_low"] for one in (alone, together)]
    assert widths[1] > 2 * widths[0]
    assert together == alone | {name: together[name] for name in ("k3_low", "k3_high")}
    assert arm(log_ratio, prompts)["k3_low"] == together["k3_low"]


@given(seed=st.integers(0, 999), tokens=st.integers(2, 50))
def test_pearson_is_numpys(seed: int, tokens: int) -> None:
    a, b = np.random.default_rng(seed).standard_normal((2, tokens))
    assert pearson(a, b) == pytest.approx(float(np.corrcoef(a, b)[0, 1]))
    assert pearson(a, 2 * a - 1) == pytest.approx(1)
    assert math.isnan(pearson(a, np.ones(tokens)))


@given(seed=st.integers(0, 999), rows=st.integers(1, 40))
def test_routers_are_compared_one_by_one(seed: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    native, recorded = ids_of(rng, rows), ids_of(rng, rows)
    same = rng.random(rows) < 0.6
    recorded[same] = native[same][..., ::-1]  # the order of the K does not count
    recorded[rng.random(rows) < 0.2] = NO_EXPERT
    margins = rng.random((rows, LAYERS))
    found = routers(native, recorded, margins, layers=(1, 2, 5))
    known = [t for t in range(rows) if recorded[t, 0, 0] != NO_EXPERT]
    pairs = [(t, i, set(native[t, i]) & set(recorded[t, i])) for t in known for i in range(LAYERS)]
    flips = [(t, i) for t, i, common in pairs if len(common) < TOP_K]
    if not known:
        assert math.isnan(found["differ"])
        return
    assert found["differ"] == pytest.approx(len(flips) / len(pairs))
    assert found["tokens_differ"] == pytest.approx(len({t for t, _ in flips}) / len(known))
    assert found["overlap"] == pytest.approx(np.mean([len(common) / TOP_K for *_, common in pairs]))
    assert found["margin_median"] == pytest.approx(np.median([margins[t, i] for t, i, _ in pairs]))
    if flips:
        assert found["margin_flip_median"] == pytest.approx(np.median([margins[t, i] for t, i in flips]))
    assert [layer["layer"] for layer in found["layers"]] == [1, 2, 5]
    assert np.mean([layer["differ"] for layer in found["layers"]]) == pytest.approx(found["differ"])


def samples_of(rng: np.random.Generator, groups: int) -> list[Sample]:
    """Siblings of a common prompt; answers of one token, which have no row of their own, are among them."""
    samples = []
    for group in range(groups):
        prompt = rng.integers(0, 50, size=rng.integers(1, 6))
        for sibling in range(rng.integers(1, 5)):
            answer = rng.integers(0, 50, size=rng.choice([1, 1, 2, 5, 9]))
            tokens = np.concatenate([prompt, answer]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            if len(answer) > 4:
                mask[len(prompt) + 1 : len(prompt) + 3] = False
            uid = f"{group}#{sibling}"
            samples.append(sample_of(tokens, len(prompt), loss_mask=mask, group=group, uid=uid))
    return samples


@given(seed=st.integers(0, 9999), budget=st.sampled_from([1, 12, 40, 500]), shared=st.booleans())
def test_the_rows_of_a_sequence_are_found_in_a_microbatch(seed: int, budget: int, shared: bool) -> None:
    """Its answer and its prompt, whatever else uses that: together the inputs of that sample. An answer
    begins behind the row that predicts its first token, also where the sequence has a segment for itself."""
    rng = np.random.default_rng(seed)
    samples = samples_of(rng, groups=4)
    weights = aggregation_weights(samples, Aggregation.TOKEN)
    by_uid = {sample.uid: sample for sample in samples}
    packed = pack(samples, weights, tokens_per_microbatch=budget, share_prompts=shared)
    for microbatch in (*packed.microbatches, *pad(samples, weights).microbatches):
        spans = sequence_spans(microbatch)
        assert spans.shape == (len(microbatch.uids), 4)
        places = np.arange(len(microbatch.tokens))
        sums = part_sums(np.stack([places, np.ones_like(places)]), spans)
        for i, (uid, (start, stop, first, last)) in enumerate(zip(microbatch.uids, spans, strict=True)):
            rows = np.r_[first:last, start:stop]
            inputs = by_uid[uid].tokens[: len(rows)]
            np.testing.assert_array_equal(microbatch.tokens[rows], inputs)
            np.testing.assert_array_equal(microbatch.positions[rows], np.arange(len(rows)))
            assert len(rows) >= np.flatnonzero(by_uid[uid].loss_mask)[-1]
            assert last - first == by_uid[uid].prompt_len
            assert sums[:, i].sum(axis=-1).tolist() == [rows.sum(), len(rows)]
            assert sums[1, i].tolist() == [stop - start, last - first]


def test_a_buffer_that_nobody_filled_is_seen() -> None:
    routes = ids_of(np.random.default_rng(0), 6)
    assert not never_written(routes)
    assert not never_written(np.full_like(routes, NO_EXPERT))
    routes[4, 1] = 0
    assert never_written(routes)
    assert not never_written(np.zeros((6, LAYERS, 1), np.int16)), "one expert of one is a choice"


def test_lowest_sequence_is_what_the_gate_judges() -> None:
    rng = np.random.default_rng(0)
    native = ids_of(rng, 200)
    recorded = native.copy()
    recorded[100:] = ids_of(rng, 100)
    spans = np.array([[0, 100, 0, 0], [100, 200, 0, 0]])
    found = routers(native, recorded, np.ones((200, LAYERS)), spans=spans)
    assert found["lowest_sequence"] == pytest.approx(2 * found["overlap"] - 1)
    found = routers(native, recorded, np.ones((200, LAYERS)), spans=np.array([[190, 200, 0, 100]]))
    assert found["lowest_sequence"] == 1, "30 routers are too few to say anything by themselves"


# ---- the section on sampler against trainer, the same in a terminal and as JSON, and what the watch reported


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
    metrics = [{"step": step, "reward": 0.5, **routing_metrics(step)} for step in (1, 40, 80)]
    usual = {"recipe": {"trainer": {"steps": 80}}, "metrics": metrics}
    return run_data(**{**usual, "mismatch": [plain(row) for row in rows], **changes})


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
    assert facts["Experts in training"].value == "the sampler's, replayed"
    assert "the gate requires 90%" in facts["Experts in common"].note


@pytest.mark.parametrize(("replay", "gated"), [(True, True), (False, False)])
def test_no_gate_is_told_of_where_nothing_is_replayed(replay: bool, gated: bool) -> None:
    """With replay off the report claimed that the gate requires 90 % and refuses less."""
    section = mismatch_section(data(mismatch_row(1), recipe={"trainer": {"replay": replay}}))
    (common,) = (fact for fact in section.facts if fact.name == "Experts in common")
    chart = charts(section)["agreement"]
    reported = ["the gate" in common.note, "the gate" in chart.note, chart.mark is not None]
    assert reported == [gated] * 3


def test_too_few_answers_have_no_interval() -> None:
    row = plain(mismatch_row(1) | {"step": 3})
    for one in row["arms"].values():
        one |= {"k3_low": None, "k3_high": None}
    section = mismatch_section(data(row))
    assert not any("[" in cell for cell in k3_line(section)[1:])
    assert all("\n[" in cell for cell in k3_line(mismatch_section(data(mismatch_row(1))))[1:3])
    assert "[" not in section.lead


def test_the_correction_is_told_with_the_run_s_own_bounds() -> None:
    def reported(**keys: Any) -> list[str]:
        starts = [{"algorithm": plain(asdict(algorithm("grpo", **keys)))}]
        rows = [{"step": 80, "sampling/masked": 0.01, "sampling/truncated": 0.02}]
        facts = mismatch_section(data(mismatch_row(1), starts=starts, metrics=rows)).facts
        return [f"{fact.value} ({fact.note})" for fact in facts if fact.name == "Correction of the ratio"]

    assert reported() == []
    assert reported(correction="token_mask") == [
        "token_mask, outside 0.5 to 5 (1% of the tokens of the last step)"
    ]
    assert reported(correction="token_mask", correction_high=3)[0].startswith(
        "token_mask, outside 0.5 to 3 (1%"
    )
    assert reported(correction="token_truncate")[0].startswith("token_truncate, above 2 (2%")


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

    def output(row: Mapping[str, Any]) -> list[str]:
        found = concerns(data(row))
        return [one.text for one in found if one.level is Level.BAD and "Replay made" in one.text]

    row = mismatch_row(25)
    assert not output(row)
    row["arms"] = {"native": row["arms"]["replay"], "replay": row["arms"]["native"]}
    assert "misaligned" in output(row)[0]


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
    (output,) = (one for one in concerns(sign) if "stability watch" in one.text)
    assert output.level is Level.LOOK


def new_run(path: Path) -> RunFolder:
    run = RunFolder.create(path / "run", dump_toml(Recipe()))
    run.write(1, {"reward": 0.5, **routing_metrics(1)})
    run.mismatch.append(mismatch_row(1), mismatch_row(25))
    run.watch.append(ALARM)
    return run


def test_it_reaches_the_page(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    page = write_report(run).read_text(encoding="utf-8")
    assert 'id="mismatch"' in page and 'data-chart="agreement"' in page
    assert "collapse" in page and read_run(run).alarms == [ALARM]


def test_the_command_prints_one_screen_or_one_object_and_writes_nothing(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    shown = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["report", str(run.path), "--mismatch"])
    assert shown.exit_code == 0
    for words in ("Step 25", "with replay", "F(1.1)", "floor", "24 bytes"):
        assert words in shown.stdout
    assert len(shown.stdout.splitlines()) <= 48 and max(map(len, shown.stdout.splitlines())) <= 100
    reported = CliRunner().invoke(app, ["report", str(run.path), "--mismatch", "--json"])
    found = json.loads(reported.stdout)
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
