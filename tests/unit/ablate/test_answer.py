"""What an ablation may say of runs that died, saturated, answered other questions or never began."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept_rows import LAWS, kept_row

from ostinato.ablate import answer, commands
from ostinato.ablate import jobs as jobs_of
from ostinato.ablate.commands import Study, Telling
from ostinato.ablate.jobs import Job, State, plan
from ostinato.ablate.kept import Measure, acted, prompts, read_kept, write_kept
from ostinato.axis import Axis
from ostinato.cli.app import main
from ostinato.observe.report.reading import read_run
from ostinato.run import RunFolder
from ostinato.scaling.ablation import REFERENCE

OTHER = "CISPO -> DAPO clip"


def rows_of(*arms: str, seeds: int = 2) -> list[dict[str, Any]]:
    return [kept_row(arm, seed, LAWS[arm]) for arm in arms for seed in range(seeds)]


def cut(row: dict[str, Any], n: int) -> dict[str, Any]:
    """The run as it was after ``n`` evaluations."""
    compute = {axis: each[:n] for axis, each in row["compute"].items()}
    return row | {"score": row["score"][:n], "stderr": row["stderr"][:n], "compute": compute, "ended": False}


def flat(row: dict[str, Any], at: float, noise: float = 0.004) -> dict[str, Any]:
    drawn = np.random.default_rng(row["seed"]).standard_normal(len(row["score"]))
    return row | {"score": [at + noise * each for each in drawn]}


def told(rows: Sequence[dict[str, Any]]) -> Mapping[str, Any]:
    return answer.answer(answer.compared(rows, Axis.FLOPS)).result


# -- the same questions


def test_an_edited_file_of_prompts_is_seen(tmp_path: Path) -> None:
    """Comparability was a hash of what the recipe says. Between two arms data.jsonl was edited: the recipe
    said the same, and the difference of their scores was put down to how the arms sample."""
    run = RunFolder(tmp_path)
    for step, found in ((0, "aaaaaaaaaaaa"), (8, "aaaaaaaaaaaa")):
        run.eval.append({"step": step, "set": "eval", "split": "eval", "prompts": found})
    run.eval.append({"step": 8, "set": "hard", "split": "eval", "prompts": "bbbbbbbbbbbb"})
    assert (prompts(run, "eval"), prompts(run, "hard")) == ("aaaaaaaaaaaa", "bbbbbbbbbbbb")
    rows = rows_of(REFERENCE, OTHER)
    rows[3]["prompts"] = "cccccccccccc"  # of the last seed alone
    with pytest.raises(ValueError, match="held-out sets do not compare"):
        told(rows)
    run.eval.append({"step": 16, "set": "eval", "split": "eval"})
    assert prompts(run, "eval") == ""  # not known to be one set
    rows[3]["prompts"] = ""
    with pytest.raises(ValueError, match="seed 1 does not say on which held-out prompts"):
        told(rows)


def test_other_rewards_do_not_compare() -> None:
    rows = rows_of(REFERENCE, OTHER)
    rows[2]["judged"] = '{"functions": ["close"]}'
    with pytest.raises(ValueError, match="scores of different rewards do not compare"):
        told(rows)


def test_seeds_that_sample_otherwise_are_named_one_by_one() -> None:
    """The last seed of an arm spoke for all of them."""
    rows = rows_of(REFERENCE, OTHER)
    rows[2]["held_out"] = "cool"
    rows[3]["unmeasured"] = 2
    notes = " ".join(told(rows)["notes"])
    assert f"{OTHER}, seed 1: 2 evaluations without a score are left out." in notes
    assert f"{OTHER}, seed 0: held-out prompts are answered otherwise than by the recipe, seed 0" in notes


# -- runs that died, and runs that saturated


@pytest.mark.parametrize(("n", "shown"), [(3, " at 7.5e11"), (8, " at 2e12")])
def test_a_run_that_died_early_does_not_pull_the_others_down(n: int, shown: str) -> None:
    """The score of every arm was that at the compute which all had reached: one run that was killed after
    three evaluations put all arms side by side at a tenth of their compute."""
    rows = [*rows_of(REFERENCE, OTHER), cut(kept_row("a | pipe", 0, LAWS["a | pipe"]), n)]
    found = told(rows)
    arms = {arm["arm"]: arm for arm in found["arms"]}
    end = rows[0]["compute"]["flops"][-1]
    assert found["common_compute"] == arms[REFERENCE]["reached_at"] == end
    assert arms[REFERENCE]["reached"]["median"] == pytest.approx(0.59, abs=0.01)
    dead = arms["a | pipe"]
    assert dead["reached_at"] == rows[-1]["compute"]["flops"][-1]
    assert dead["reached"]["median"] == pytest.approx(float(np.mean(rows[-1]["score"][-1:])), abs=0.06)
    lines = answer.answer(answer.compared(rows, Axis.FLOPS)).tables[0].rows
    assert [line[5].endswith(shown) for line in lines] == [False, False, True]


def test_saturated_arms_are_not_said_to_have_the_same_steepness() -> None:
    """Flat at 0.6 from the first evaluation on, curves have no B. "No difference seen" was said of B and
    C_mid too, which had not been asked."""
    rows = [flat(row, 0.6) for row in rows_of(REFERENCE, OTHER)]
    arm = told(rows)["arms"][1]
    assert arm["verdict"] == "no difference in A seen; B not known"
    assert set(arm["lower"]) == {"A"}


# -- what acted


def test_parts_that_never_act_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cap that is never reached can only ever show "no difference seen": the table says so."""
    rows = rows_of(REFERENCE, OTHER)
    rows[0]["acted"]["interrupt/rate"] = 0.04  # the other seed has 0.02
    rows[1]["acted"]["cispo_clip_ratio"] = 1e-5
    for row in rows[2:]:
        row["acted"] = {"clip_ratio/region_mean": 0.0}
    path = tmp_path / "runs.jsonl"
    write_kept(path, rows)
    with pytest.raises(SystemExit) as done:
        main(["ablate", str(path), "--json", "-"])
    assert done.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["arms"][1]["acted"] == [{"clip_ratio/region_mean": 0.0}] * 2
    acted = answer.answer(answer.compared(rows, Axis.FLOPS)).tables[-1]
    assert list(acted.head) == ["capped", "clipped", "interrupted", "updates old"]
    assert [tuple(cells) for _, *cells in acted.rows] == [("<0.01%", "-", "3.00%", "8"), ("-", "0", "-", "-")]


def test_what_acted_is_the_mean_over_steps_and_the_last_of_what_adds_up(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step, share in ((1, 1.0), (2, 0.5)):
        row = {"step": step, "groups/left_share": share, "interrupt/rate": share / 10}
        run.metrics.append(row | ({"cispo_clip_ratio": 0.2} if step == 2 else {}))  # step 1 was empty
    found = acted(read_run(run))
    assert found == {
        "groups/left_share": 0.5,
        "interrupt/rate": pytest.approx(0.075),
        "cispo_clip_ratio": 0.2,
    }
    (tmp_path / "metrics.jsonl").unlink()
    assert acted(read_run(run)) == {}


# -- what is asked for


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            Measure(metric="reward"),
            "keeps scores of metric pass@1, and reward is asked for; use --metric pass@1",
        ),
        (Measure(split="hard"), "keeps scores of split eval, and hard is asked for"),
        (Measure(low=-1.0), "keeps scores of low 0.0, and -1.0 is asked for"),
    ],
)
def test_kept_scores_are_those_that_are_asked_for(asked: Measure, message: str, tmp_path: Path) -> None:
    """--metric and --split were read and ignored where the source is a file of kept runs."""
    path = tmp_path / "runs.jsonl"
    write_kept(path, rows_of(REFERENCE))
    with pytest.raises(ValueError, match=message):
        read_kept(path, asked)


# -- where runs failed


@pytest.mark.parametrize("surviving", [[], ["no-fp32-head-s0"]])
def test_why_runs_failed_is_said_where_nothing_can_be_told(
    surviving: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where all runs failed, or those of the recipe, the answer was "no run folder to read" with exit code
    2, as if the user had mistyped a path; why they failed was lost."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[trainer]\nsteps = 7\n[ablate.arms]\n"no fp32 head" = ["model.fp32_head=true"]\n')
    jobs = plan(recipe, [], seeds=(0,), out=tmp_path)

    def failed(job: Job) -> State:
        what = "done" if job.folder.name in surviving else "failed"
        return State(job=job, what=what, error="" if what == "done" else "no signal")

    def collected(folders: Sequence[Path], measure: Measure) -> Any:
        if not folders:
            raise ValueError("there is no run folder to read; name a folder that holds runs")
        return [kept_row("no fp32 head", 0, LAWS[OTHER])], []

    monkeypatch.setattr(jobs_of, "run", lambda *_: [failed(job) for job in jobs])
    monkeypatch.setattr(commands, "collect", collected)
    code = commands.run(str(recipe), [], Study(seeds=1, out=tmp_path), Telling())
    said = capsys.readouterr().out
    assert code == 1
    assert "recipe-s0 failed: no signal." in said
    why = "no run of 'the recipe' is there" if surviving else "no run has come to its end"
    assert f"Nothing can be told: {why}" in said
