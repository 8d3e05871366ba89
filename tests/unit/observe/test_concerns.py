"""What a run has come to and what is wrong with it: the first screen of page and terminal, from rows."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_run import golden, rows_of, score
from hypothesis import given, settings
from hypothesis import strategies as st
from mismatch_rows import mismatch_row, routing_metrics
from small_ledger import killed_and_resumed
from typer.testing import CliRunner

from ostinato.algo.algorithms import algorithm
from ostinato.cli.app import app
from ostinato.config import Recipe, dump_toml
from ostinato.lock import LOCK
from ostinato.observe.concerns import Level, concerns, count_faults, steps_text, unsolved
from ostinato.observe.costs import cost_tables
from ostinato.observe.figures import (
    commands,
    compare_scores,
    figures,
    progress,
    status,
    subtract_runs,
    tabulate,
)
from ostinato.observe.gap import compare_arms, describe_gap, summarise_gap
from ostinato.observe.ledger import summary
from ostinato.observe.mismatch import arm
from ostinato.observe.rows import RunRows
from ostinato.run import RunFolder, to_json
from ostinato.tables import Table


def row(step: int, **values: Any) -> dict[str, Any]:
    """Metrics of a healthy step; ``tokens__sampled`` stands for "tokens/sampled"."""
    healthy = {
        "reward": 0.5,
        "reward_std": 0.4,
        "frac_reward_zero_std": 0.1,
        "entropy": 1.0,
        "grad_norm": 1.0,
    }
    healthy |= {"completions/clipped_ratio": 0.01, "rollout/trajectories": 16.0, "rollout/groups": 4.0}
    healthy |= {"sampling/kl_k3": 1e-8, "sampling/ess": 1.0, "tokens/sampled": 100.0, "tokens/trained": 80.0}
    return {"step": step, **healthy, **{name.replace("__", "/"): value for name, value in values.items()}}


def cells(table: Table) -> dict[str, list[str]]:
    """By the names of the lines."""
    return {name.partition("\n")[0]: some for name, *some in table.rows}


GAINED = [score(0, 0.3), score(40, 0.7)]


# ---- figures


def test_the_ten_numbers_have_units_and_what_they_are_compared_with() -> None:
    rows = [row(step, reward=step / 40, tokens_per_s=10.0 * step) for step in range(1, 41)]
    found = {
        one.name: one for one in figures(rows_of(metrics=rows, evals=GAINED, ledger=killed_and_resumed()))
    }
    assert len(found) == 10
    first = found["Held-out pass@1"]
    assert first.value.startswith("0.700 [") and first.tone == "good"
    assert "before training 0.300 [0.245, 0.362], change +0.400 [+0.313, +0.478]" in first.note
    reward = found["Training reward"]
    assert reward.value == "0.963" and reward.note.endswith("in the first tenth 0.062")
    assert "step 40" in first.note and found["Steps"].value == "40"  # a stopped run is at another step
    assert found["Steps"].note == "of 40 planned; started 2 times; 2 done twice"
    assert found["Tokens"].note == "sampled; 52% of them trained on"
    assert found["Cost"].value == "0.12 USD" and "device-hours" in found["Cost"].note
    assert found["Speed"].value == "385" and "in the first tenth 25" in found["Speed"].note
    assert [one.value for one in figures(rows_of())][:5] == ["-"] * 5


def test_seconds_of_a_step_stand_beside_its_cpu_seconds() -> None:
    """A loaded machine made a run look 2.5 times dearer than it was, and nothing said so."""
    rows = [row(step, step_time=16.0 + step, time__cpu_s=8.0) for step in (1, 2, 3)]
    note = next(one.note for one in figures(rows_of(metrics=rows)) if one.name == "Steps")
    assert note == "of 3 planned; 18.0 s a step, with 8 CPU seconds of its process"


def test_rewards_of_zero_and_one_have_one_interval_and_no_second() -> None:
    for reward, lines in ((0.7, 0), (0.71, 1)):
        rows = [
            score(0, 0.3, reward=0.3, reward_stderr=0.03),
            score(9, 0.7, reward=reward, reward_stderr=0.03),
        ]
        data = rows_of(evals=rows)
        shown = next(one for one in figures(data) if one.name == "Held-out reward")
        assert ("[" in shown.value) == bool(lines) == ("mean reward" in cells(compare_scores(data)))
        assert lines or shown.value == "as pass@1"


def test_two_runs_are_subtracted_by_prompt_where_the_prompts_are_the_same() -> None:
    each = [[[4, 0], [4, 2], [4, 4], [4, 1]], [[4, 1], [4, 4], [4, 4], [4, 2]]]
    scored = [score(9, 0.5, prompts="p", held_out="a", each=some) for some in each]
    runs = [rows_of(evals=[row], path=Path(name)) for name, row in zip("ab", scored, strict=True)]
    error = 1.959964 * np.std([0.25, 0.5, 0, 0.25], ddof=1) / 2
    interval = f"[{0.25 - error:+.3f}, {0.25 + error:+.3f}]"
    sentence = f"b less a, pass@1 after steps 9 and 9: +0.250 {interval} (paired by 4 prompts, 95 %)."
    assert list(subtract_runs(runs)) == [sentence]
    other = rows_of(evals=[scored[1] | {"prompts": "q"}], path=Path("c"))
    assert "not scored on the same held-out prompts" in next(subtract_runs([runs[0], other]))
    table = cells(tabulate(*runs))
    assert table["Held-out pass@1"] == ["0.500 [0.442, 0.558]"] * 2 and tabulate(*runs).head == ["a", "b"]


def test_a_run_that_ended_while_its_score_rose_is_advised_to_go_on() -> None:
    for last, is_advised in ((0.7, True), (0.31, False)):
        data = rows_of(metrics=[row(step) for step in range(1, 41)], evals=[score(0, 0.3), score(40, last)])
        advice = [command for _, command in commands(data)]
        assert ("ostinato resume no-run trainer.steps=80" in advice) == is_advised


def test_the_table_of_scores_names_k_tasks_and_what_is_missing() -> None:
    more = {"pass@k": 0.8, "k": 4, "pass@k_stderr": 0.02, "completions/mean_length": 12.5}
    tasks = [{"tasks": {"sums": score(0, some)}} for some in (0.2, 0.6)]
    evals = [score(0, 0.4) | tasks[0], score(20, 0.5, **more) | tasks[1]]
    table = compare_scores(rows_of(evals=evals, metrics=[{"step": 1, "tasks/sums/share": 0.75}]))
    lines = cells(table)
    assert lines["pass@4"] == ["not measured", "0.800 [0.758, 0.836]", ""]
    assert (
        lines["answer length"][:2] == ["not measured", "12.5"] and lines["mean reward"][1] == "not measured"
    )
    assert lines["sums, pass@1"][2].startswith("+0.400")
    assert any(name.endswith("75% of all groups of training") for name, *_ in table.rows)


def test_faults_are_counted_with_their_steps() -> None:
    rows = [row(1, rewards__exact__mean=0.5, rewards__exact__timeout=3.0)]
    rows.append(row(2, faults__env=2.0))
    lines = cells(count_faults(rows_of(metrics=rows)))
    assert (lines["fault: env"][0], lines["fault: env"][2]) == ("2", "2")
    assert (
        lines["event: rewards/exact/timeout"] == ["3", "", "1"] and "event: rewards/exact/mean" not in lines
    )
    assert lines["episodes failed"][0] == lines["steps refused"][0] == "0"
    assert steps_text([1, 2, 3, 7, 8, 10, 20, 21]) == "1 to 3, 7, 8, 10 and 2 more up to 21"


def test_the_tables_of_a_ledger_by_hand() -> None:
    tables = cost_tables({"run": summary(killed_and_resumed())})
    found = {(table.title, name): value[0] for table in tables for name, value in cells(table).items()}
    assert found["Device time, pool local", "sample"] == "44.0 s   27.5%"  # of 1 x 48 + 4 x 28
    assert found["Wall clock", "loading"] == "12.0 s   15.8%"
    assert found["Tokens", "not trained: unused"] == "100   25.0%"
    assert found["Compute", "bill"] == "0.12 USD" and found["Compute", "restarts"] == "1"
    assert found["Evaluation, in no compute", "FLOPs"] == "400       -"


# ---- concerns


def test_a_healthy_run_has_none() -> None:
    assert concerns(rows_of(metrics=[row(step) for step in range(1, 41)], evals=GAINED)) == []


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"frac_reward_zero_std": 0.7, "solved_none": 0.6}, "look", "70% of groups had equal rewards"),
        ({"time__reward_share": 0.8}, "look", "waited for rewards 80% of their time"),
        ({"refused_step": 1.0}, "bad", "4 steps were refused"),
        ({"empty_step": 1.0}, "look", "(step 37 to 40)"),
        ({"sampling__kl_k3": 0.02, "tokens__trained": 1e3}, "look", "0.02 nats per token at step 40"),
        ({"sampling__ess": 0.5, "tokens__trained": 1e3}, "look", "fell to 50%"),
        ({"rollout__failed": 4.0}, "bad", "16 of 640 answers failed"),
        ({"draft__seconds_saved": -1.0, "time__rollout_s": 10.0}, "look", "rollouts 10% longer"),
    ],
)
def test_each_names_figure_and_step(change: dict[str, float], level: str, words: str) -> None:
    rows = [row(step, **(change if step > 36 else {})) for step in range(1, 41)]
    (found,) = concerns(rows_of(metrics=rows, evals=GAINED))
    assert found.level == level and words in found.text and found.about


def test_drafts_that_cost_no_more_than_their_estimate_errs_raise_no_alarm() -> None:
    """5 % of one step was a warning, and the steps before had gained as much."""
    saved = [0.6, -0.7, 0.5, -0.6, 0.4, -0.5, 0.3, -1.0]
    rows = [row(n + 1, draft__seconds_saved=one, time__rollout_s=10.0) for n, one in enumerate(saved)]
    assert concerns(rows_of(metrics=rows, evals=GAINED)) == []


def test_a_mean_over_few_tokens_raises_no_alarm() -> None:
    """The report of a healthy first run began with "Sampler and trainer disagree": k3 of 40 tokens was
    0.0033, which one token at another expert explains. Steps of few tokens are judged together."""
    rows = [row(n, tokens__trained=40.0, sampling__kl_k3=0.0033 if n == 7 else 1e-4) for n in range(1, 41)]
    assert concerns(rows_of(metrics=rows, evals=GAINED)) == []
    many = [row(n, tokens__trained=40.0, sampling__kl_k3=0.0033, sampling__ess=0.5) for n in range(1, 41)]
    assert len(concerns(rows_of(metrics=many, evals=GAINED))) == 2


def test_a_short_run_whose_sampler_computes_another_model_says_so() -> None:
    """0.27 nats in 128 tokens are no five flipped experts; nothing was said below 718 tokens."""
    wrong = [row(n, tokens__trained=64.0, sampling__kl_k3=0.27) for n in (1, 2)]
    assert any("disagree" in concern.text for concern in concerns(rows_of(metrics=wrong)))
    one = [row(n, tokens__trained=64.0, sampling__kl_k3=0.011 * (n == 1)) for n in (1, 2)]
    assert not any("disagree" in concern.text for concern in concerns(rows_of(metrics=one)))


def test_the_most_serious_comes_first() -> None:
    alarm = {"step": 44, "since": 40, "rule": "tail", "collapse": True, "sentence": "F(2) is 0.15"}
    failed = {"step": 2, "part": "train", "function": "graded", "count": 16, "detail": "KeyError"}
    evals = [score(0, 0.3), score(20, 0.8), score(40, 0.4)]
    found = concerns(rows_of(metrics=[row(1)], evals=evals, watch=[alarm], failed_rewards=[failed]))
    assert "peaked at step 20" in found[0].text and "The run collapsed at step 44: F(2)" in found[1].text
    assert found[2].level == Level.LOOK and "graded gave no verdict to 16 answers" in found[2].text


def test_what_is_missing_to_a_solved_answer_can_be_seen() -> None:
    """ "The highest reward was 2, and an answer is solved from 2 on": it was 1.998."""
    sentence = unsolved([score(0, 0.0, 0.0, reward=1.0, reward_max=1.998, solved_at=1.999999)])
    assert "1.998" in sentence and "from 2 on" in sentence


# ---- state


def test_a_run_goes_on_dies_and_is_taken_up_again(tmp_path: Path) -> None:
    run = golden(tmp_path / "run", 3, ended=False)
    assert status(RunRows(run).read())["tone"] == "live"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    holder = {"pid": ended.pid, "host": socket.gethostname(), "since": "noon"}
    (run.path / LOCK).write_text(json.dumps(holder))
    dead = status(RunRows(run).read())
    assert dead["tone"] == "bad" and f"ostinato resume {run.path}" in dead["text"]
    (run.path / LOCK).write_text(json.dumps({"pid": os.getpid(), "host": "another", "since": "noon"}))
    assert status(RunRows(run).read())["tone"] == "open"
    run.ledger.append({"event": "end", "session": 1, "at": time.time(), "step": 3, "why": "collapsed"})
    assert status(RunRows(run).read()) == {
        "tone": "bad",
        "text": "stopped: the policy collapsed, after step 3",
    }
    empty = RunFolder.create(tmp_path / "empty", dump_toml(Recipe()))
    assert status(RunRows(empty).read())["text"] == "has not begun yet"


@pytest.mark.parametrize(("why", "ended"), [("spent", True), ("interrupted", False)])
def test_a_run_that_has_spent_its_budget_is_finished(why: str, ended: bool) -> None:
    """The reports of `ostinato compare` said "Not finished: 24 of 1000000 steps", of runs that had spent
    exactly what they were given."""
    recipe = {"trainer": {"steps": 10**6, "budget": "48 steps", "until": 1.0}}
    ledger = [{"event": "end", "session": 1, "at": 2.0, "step": 24, "why": why}]
    evals = [score(0, 0.3), score(24, 0.7)]
    data = rows_of(metrics=[row(24)], evals=evals, recipe=recipe)
    data.logs["ledger"] = [*ledger]
    assert [one.level for one in concerns(data)] == ([] if ended else ["note"])
    assert progress(data) == {"step": 24, "of": None, "share": 0.5, "left": None}


# ---- sampler against trainer


def measured(*rows: Mapping[str, Any], **more: Any) -> RunRows:
    metrics = [{"step": step, "reward": 0.5, **routing_metrics(step)} for step in (1, 40, 80)]
    plain = [json.loads(to_json(one)) for one in rows]  # as it comes back from the disk: NaN is null
    return rows_of(**{"metrics": metrics, "recipe": {}, **more}, mismatch=plain)


def test_the_arms_by_hand() -> None:
    """Two answers of two tokens; replay halves each log ratio."""
    logs = [math.log(1.2), -math.log(1.2), math.log(3), 0.0]
    native = arm(logs, [0, 0, 1, 1])  # pyright: ignore
    half = arm([0.5 * value for value in logs], [0, 0, 1, 1])  # pyright: ignore
    table = compare_arms(measured({"step": 3, "arms": {"native": native, "replay": half}}, metrics=()))[0]
    lines = {name: [cell.partition("\n")[0] for cell in some] for name, some in cells(table).items()}
    assert table.head == ["native\nits own experts", "with replay\nthe sampler's experts"]
    assert lines["largest |log r|"] == ["1.1", "0.549"] and lines["F(1.1)"] == ["0.75", "0.25"]
    assert lines["F(2)"] == lines["TIS would cut"] == ["0.25", "0"] and lines["IcePop would mask"] == [
        "0",
        "0",
    ]


def test_the_last_measurement_stands_beside_the_floor_of_the_first() -> None:
    data = measured(mismatch_row(1), mismatch_row(25), mismatch_row(75, growth=2))
    arms, beside = compare_arms(data)
    assert arms.title == "Step 75" and len(arms.head) == 3
    assert "Step 75" in describe_gap(data) and describe_gap(data).count("[") == 2
    facts = cells(beside)
    assert facts["routes of a token"][0].startswith("24 bytes")
    assert "the gate requires 90%" in facts["experts in common"][0]
    off = cells(compare_arms(measured(mismatch_row(1), recipe={"trainer": {"replay": False}}))[1])
    assert "the gate" not in off["experts in common"][0]  # it was claimed of runs that replay nothing
    dense = compare_arms(measured(mismatch_row(1, dense=True), metrics=[{"step": 1}]))
    assert [name.partition("\n")[0] for name in dense[0].head] == ["native", "floor"]
    assert "mismatch.jsonl has no rows" in describe_gap(measured())


def test_the_correction_is_told_with_the_run_s_own_bounds() -> None:
    def corrected(**keys: Any) -> str:
        starts = [{"algorithm": json.loads(to_json(asdict(algorithm("grpo", **keys))))}]
        rows = [{"step": 80, "sampling/masked": 0.01, "sampling/truncated": 0.02}]
        (*_, beside) = compare_arms(measured(mismatch_row(1), starts=starts, metrics=rows))
        return cells(beside).get("correction of the ratio", [""])[0].replace("\n", "; ")

    assert corrected() == ""
    assert corrected(correction="token_mask", correction_high=3).startswith(
        "token_mask, outside 0.5 to 3; 1%"
    )
    assert corrected(correction="token_truncate").startswith("token_truncate, above 2; 2%")


def test_replay_that_makes_it_worse_is_a_warning() -> None:
    """Routes shifted by one raise k3 from 1e-5 to 0.1 (reference pilot), while everything else looks fine."""
    swapped = mismatch_row(25)
    assert not [one for one in concerns(measured(swapped)) if one.level is Level.BAD]
    swapped["arms"] = {"native": swapped["arms"]["replay"], "replay": swapped["arms"]["native"]}
    assert any("misaligned" in one.text for one in concerns(measured(swapped)) if one.level is Level.BAD)
    assert any(
        "25.0% of the rows" in one.text for one in concerns(measured(mismatch_row(25) | {"coverage": 0.75}))
    )


WHOLE = to_json(mismatch_row(1))
damaged = st.recursive(
    st.none() | st.booleans() | st.floats(-1e3, 1e3) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["k3", "0", "share"]), inner),
    max_leaves=6,
)


@settings(max_examples=25)
@given(st.data())
def test_a_damaged_row_loses_what_is_damaged_and_no_more(draw: st.DataObject) -> None:
    """Any value of a row may be of another version of the program, or of a disk that lies."""
    one = json.loads(WHOLE)
    for where in (one["arms"]["native"], one["routers"]["layers"][0], one["routers"], one):
        for key in draw.draw(st.lists(st.sampled_from(sorted(where)), max_size=3)):
            if key != "step":
                where[key] = draw.draw(damaged)
    data = measured(one)
    assert describe_gap(data) and to_json(summarise_gap(data)) and concerns(data) is not None
    assert compare_arms(data) is not None


# ---- the command


def test_the_command_prints_the_same_ten_numbers_and_the_gap_alone(tmp_path: Path) -> None:
    run = golden(tmp_path / "run")
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["report", str(run.path)])
    assert shown.exit_code == 0, shown.output
    for one in figures(RunRows(run).read()):
        assert one.name in shown.stdout and one.value.split()[0] in shown.stdout
    assert "Looked at: truncation " in shown.stdout and ", entropy " in shown.stdout
    assert "ostinato serve" in shown.stdout and "The run collapsed" in shown.stdout and run.report.exists()
    run.report.unlink()
    shown = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["report", str(run.path), "--mismatch"])
    for words in ("Step 8", "with replay", "F(1.1)", "floor", "24 bytes"):
        assert words in shown.stdout
    reported = CliRunner().invoke(app, ["report", str(run.path), "--mismatch", "--json"])
    found = json.loads(reported.stdout)
    numbers = json.loads(CliRunner().invoke(app, ["report", str(run.path), "--json"]).stdout)["runs"][0]
    assert [one["name"] for one in numbers["state"]["figures"]] == [
        one.name for one in figures(RunRows(run).read())
    ]
    assert "truncation 0." in numbers["state"]["looked_at"] and "rows" not in numbers
    assert [one["step"] for one in found["measured"]] == [1, 8] and found["alarms"][0]["step"] == 9
    assert not run.report.exists()


@pytest.mark.parametrize(
    "more",
    [
        ["--json", "--live"],
        ["--json", "--out", "x"],
        ["--mismatch", "--open"],
        ["--mismatch", "--out", "x.html"],
        ["--live", "--out", "x"],
    ],
)
def test_what_does_not_go_together_is_refused_by_name(tmp_path: Path, more: list[str]) -> None:
    refused = CliRunner().invoke(app, ["report", str(golden(tmp_path / "run", 1).path), *more])
    assert isinstance(refused.exception, ValueError) and more[0] in str(refused.exception)
