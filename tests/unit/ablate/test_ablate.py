"""``ostinato ablate``: what is run, kept and shown, what may be reported, and what is refused in words."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import ended as exit_code

from ostinato.apps.scaling.ablation import REFERENCE
from ostinato.apps.scaling.arms import answer, commands
from ostinato.apps.scaling.arms import jobs as jobs_of
from ostinato.apps.scaling.arms.commands import Output, Study
from ostinato.apps.scaling.arms.jobs import Job, State, check_jobs, plan_jobs, run_jobs
from ostinato.apps.scaling.arms.kept import (
    Measure,
    build_series,
    collect_lines,
    has_own_end,
    measure_acts,
    read_kept,
    read_prompts_hash,
    write_kept,
)
from ostinato.apps.scaling.curve import Sigmoid
from ostinato.apps.scaling.series import simulate_series
from ostinato.cli.app import main
from ostinato.config import Recipe, dump_toml
from ostinato.every import Axis
from ostinato.lock import hold_lock
from ostinato.observe.rows import RunRows
from ostinato.run import RunFolder

LAWS = {
    REFERENCE: Sigmoid(R0=0.3, A=0.6, B=1.9, C_mid=1e12),
    "CISPO -> DAPO clip": Sigmoid(R0=0.3, A=0.5, B=1.9, C_mid=1e12),
    "a | pipe": Sigmoid(R0=0.3, A=0.6, B=1.9, C_mid=1e12),
}


def kept_row(arm: str, seed: int, law: Sigmoid, n: int = 24) -> dict[str, Any]:
    compute = np.linspace(2.5e11, 6e12, n)
    one = simulate_series(law, compute, sd=0.003, rho=0.3, seed=sum(map(ord, arm)) + seed)
    return {
        "arm": arm,
        "seed": seed,
        "overrides": [],
        "held_out": "0123456789ab",
        "prompts": "ba9876543210",
        "judged": '{"functions": ["exact"]}',
        "split": "eval",
        "metric": "pass@1",
        "low": 0.0,
        "high": 1.0,
        "R0": 0.3,
        "R0_stderr": 0.002,
        "score": one.score.tolist(),
        "stderr": [0.004] * n,
        "unmeasured": 0,
        "compute": {"flops": compute.tolist(), "steps": list(range(8, 8 * n + 1, 8))},
        "ended": True,
        "acted": {"cispo_clip_ratio": 0.0, "interrupt/rate": 0.02, "staleness/mean": 8.0},
    }


RECIPE = """
[trainer]
steps = 7
[ablate.arms]
"no fp32 head" = ["model.fp32_head=true"]
"CISPO -> DAPO clip" = ["algo.name=dapo"]
"""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept") / "runs.jsonl"
    write_kept(path, [kept_row(arm, seed, law) for arm, law in LAWS.items() for seed in range(2)])
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    return path


# -- what is run


def test_the_plan_is_every_arm_with_every_seed_and_one_change(recipe: Path, tmp_path: Path) -> None:
    jobs = plan_jobs(recipe, ["trainer.lr=0.01"], seeds=(3, 4), out=tmp_path / "out")
    names = [job.folder.name for job in jobs]
    assert names == [
        f"{arm}-s{seed}" for seed in (3, 4) for arm in ("recipe", "no-fp32-head", "cispo-dapo-clip")
    ]
    assert {job.recipe.seed for job in jobs} == {3, 4}
    assert {job.recipe.trainer.lr for job in jobs} == {0.01}
    assert [job.recipe.model.fp32_head for job in jobs[:3]] == [False, True, False]
    assert [job.recipe.algo.name for job in jobs[:3]] == ["grpo", "grpo", "dapo"]
    one = plan_jobs(recipe, [], seeds=(0,), arms=["no fp32 head"], out=tmp_path)
    assert [job.arm for job in one] == [REFERENCE, "no fp32 head"]


def test_workers_share_the_threads(recipe: Path, tmp_path: Path) -> None:
    def threads(*overrides: str, workers: int) -> object:
        return plan_jobs(recipe, overrides, seeds=(0,), out=tmp_path, workers=workers)[
            0
        ].recipe.engine.threads

    assert threads(workers=1) == "auto"
    assert threads(workers=1000) == 1
    assert threads("engine.threads=3", workers=1000) == 3


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ("", "has no arms"),
        ('[ablate.arms]\n"x" = ["trainer.steps=100"]', "changes nothing"),
        ('[ablate.arms]\n"x" = ["seed=7"]', "changes nothing"),
        ('[ablate.arms]\n"x" = ["trainer.stepz=3"]', "arm 'x': trainer.stepz"),
        ('[ablate.arms]\n"->" = ["seed=1"]', "would be empty"),
        ('[ablate.arms]\n"a b" = ["trainer.steps=3"]\n"A-B" = ["trainer.steps=4"]', "that of 'a b'"),
        ('[ablate.arms]\n"recipe" = ["trainer.steps=3"]', "that of 'the recipe'"),
    ],
)
def test_arms_that_cannot_be_are_refused(tmp_path: Path, arms: str, message: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(arms)
    with pytest.raises(ValueError, match=message):
        plan_jobs(path, [], seeds=(0,), out=tmp_path)


def test_a_folder_of_another_recipe_is_not_gone_on_with(recipe: Path, tmp_path: Path) -> None:
    jobs = plan_jobs(recipe, [], seeds=(0,), out=tmp_path / "out")
    run_jobs(jobs, 3, ignore, command=child("exit 1"), pause=short)
    check_jobs(jobs)
    check_jobs(plan_jobs(recipe, ["engine.threads=1"], seeds=(0,), out=tmp_path / "out"))
    begun = plan_jobs(recipe, ["model.dtype=float32"], seeds=(0,), out=tmp_path / "out")[0].recipe
    (jobs[0].folder / "recipe.toml").write_text(dump_toml(begun))
    check_jobs(
        plan_jobs(recipe, ["model.dtype=auto"], seeds=(0,), out=tmp_path / "out")
    )  # what a run writes of "auto"
    with pytest.raises(ValueError, match=r"recipe-s0 is a run of another recipe \(trainer.lr differs\)"):
        check_jobs(plan_jobs(recipe, ["trainer.lr=0.5"], seeds=(0,), out=tmp_path / "out"))


def test_an_arm_without_an_algorithm_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[ablate.arms]\n"x" = ["algo.name=nope"]')
    with pytest.raises(ValueError, match=r"arm 'x': .*nope"):
        check_jobs(plan_jobs(path, [], seeds=(0,), out=tmp_path))


# -- children, by shell scripts in place of runs

DONE = """echo '{"step":7}' >> $0/metrics.jsonl; echo '{"event":"end","why":"done"}' >> $0/ledger.jsonl"""


def child(script: str) -> Any:
    return lambda folder: ["/bin/sh", "-c", script, str(folder)]


def short() -> None:
    time.sleep(0.01)


def ignore(states: Sequence[State]) -> None:
    pass


def some_jobs(recipe: Path, out: Path) -> list[Job]:
    return plan_jobs(recipe, [], seeds=(0,), out=out)


def test_runs_that_have_ended_are_not_run_again(recipe: Path, tmp_path: Path) -> None:
    jobs = some_jobs(recipe, tmp_path)
    seen: list[list[str]] = []
    first = run_jobs(
        jobs, 2, lambda states: seen.append([s.what for s in states]), command=child(DONE), pause=short
    )
    assert [(state.what, state.step) for state in first] == [("done", 7)] * 3
    assert max(each.count("running") for each in seen) <= 2
    assert all(Recipe.load(job.folder / "recipe.toml").trainer.steps == 7 for job in jobs)
    again = run_jobs(jobs, 2, ignore, command=child("exit 9"), pause=short)
    assert [state.what for state in again] == ["done"] * 3


def test_a_run_that_stopped_for_now_goes_on(recipe: Path, tmp_path: Path) -> None:
    (one, *_), ran = some_jobs(recipe, tmp_path), list[int]()
    script = """echo "$1" >> $0/until; n=$(grep -c . $0/until)
        echo '{"event":"end","why":"spent"}' >> $0/ledger.jsonl
        echo '{"spent":{"steps":'$((3 * n - 2))'}}' >> $0/eval.jsonl"""
    for until in (1 / 8, 1 / 2, 1 / 8, 1 / 2):
        trainer = one.recipe.trainer.model_copy(update={"budget": 8, "until": until})
        job = replace(one, recipe=one.recipe.model_copy(update={"trainer": trainer}))
        check_jobs([job])
        assert run_jobs([job], 1, ignore, command=child(script), pause=short)[0].what == "done"
        ran.append(len((job.folder / "until").read_text().split()))
    assert ran == [1, 2, 2, 2] and "trainer.until=0.5" in (job.folder / "until").read_text()


def test_a_run_that_fails_is_named_kept_and_gone_on_with(recipe: Path, tmp_path: Path) -> None:
    jobs = some_jobs(recipe, tmp_path)
    broken = f'case $0 in *fp32*) echo "ostinato: no signal" >&2; exit 1;; *) {DONE};; esac'
    states = run_jobs(jobs, 1, ignore, command=child(broken), pause=short)
    assert [state.what for state in states] == ["done", "failed", "done"]
    assert states[1].error == "no signal"
    states = run_jobs(jobs, 1, ignore, command=child(DONE), pause=short)
    assert [state.what for state in states] == ["done"] * 3


def test_an_interrupted_run_has_not_ended(tmp_path: Path) -> None:
    log = tmp_path / "ledger.jsonl"
    for why, wanted in (
        ("interrupted", False),
        ("terminated", False),
        ("failed: OSError", False),
        ("solved", True),
    ):
        log.write_text(json.dumps({"event": "end", "why": why}) + "\n")
        assert has_own_end(tmp_path) is wanted
    log.write_text(json.dumps({"event": "end", "why": "done"}) + '\n{"event":"st')  # a torn row after it
    assert has_own_end(tmp_path)


def test_ctrl_c_lets_the_children_save(recipe: Path, tmp_path: Path) -> None:
    """SIGTERM of the parent is passed on to every child, which is waited for."""
    script = "trap 'echo saved > $0/saved; exit 143' TERM; echo > $0/ready; while :; do sleep 0.02; done"
    jobs = some_jobs(recipe, tmp_path)

    def stop_when_ready(states: Sequence[State]) -> None:
        if all((job.folder / "ready").exists() for job in jobs[:2]):
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run_jobs(jobs, 2, stop_when_ready, command=child(script), pause=short)
    assert [(job.folder / "saved").exists() for job in jobs] == [True, True, False]
    assert signal.getsignal(signal.SIGTERM) is before


def test_two_never_train_into_one_folder(recipe: Path, tmp_path: Path) -> None:
    """A killed parent leaves its children at work, and another ablation would train beside them."""
    jobs = some_jobs(recipe, tmp_path)[:1]
    jobs[0].folder.mkdir(parents=True)
    with hold_lock(jobs[0].folder):
        (state,) = run_jobs(jobs, 1, ignore, command=child(DONE), pause=short)
    assert state.what == "failed" and f"is in use by process {os.getpid()} on" in state.error
    assert not (jobs[0].folder / "train.log").exists()
    assert run_jobs(jobs, 1, ignore, command=child(DONE), pause=short)[0].what == "done"


# -- what is kept and shown


def test_what_is_kept_is_written_again_byte_for_byte(kept: Path, tmp_path: Path) -> None:
    write_kept(tmp_path / "again.jsonl", read_kept(kept))
    assert (tmp_path / "again.jsonl").read_bytes() == kept.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart"], "add --leave-one-out"),
        (["quickstart", "--leave-one-out"], "has no arms"),
        (["KEPT", "--leave-one-out"], "only fitted"),
        (["KEPT", "trainer.steps=3"], "only fitted"),
        (["RUN", "RUN"], "two run folders are compared by: ostinato report "),
        (["KEPT", "--axis", "miles"], "--axis is 'miles'"),
        (["KEPT", "--axis", "money"], "does not count money"),
        (["nope"], "'nope' does not exist"),
        (["nope.jsonl"], "nope.jsonl is not there"),
        (["EMPTY"], "no run folder"),
        (["BROKEN"], "line 1 of"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], message: str, kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.jsonl").write_text('{"step": 1}\n')
    named = {"KEPT": str(kept), "EMPTY": str(tmp_path), "BROKEN": str(tmp_path / "broken.jsonl")}
    if "RUN" in arguments:
        named["RUN"] = str(RunFolder.create(tmp_path / "run", "").path)
    assert exit_code(tmp_path, "ablate", *[str(named.get(each, each)) for each in arguments]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert message in errors[0]


def test_a_line_gives_its_series_back(kept: Path) -> None:
    row = read_kept(kept)[0]
    one = build_series(row, Axis.STEPS)
    assert (one.name, one.axis, one.R0) == ("the recipe, seed 0", Axis.STEPS, 0.3)
    np.testing.assert_array_equal(one.compute, row["compute"]["steps"])
    with pytest.raises(ValueError, match="no run folder"):
        collect_lines([])


# ---- what an ablation may report of runs that died, saturated, answered other questions or never began


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


def result_of(rows: Sequence[dict[str, Any]]) -> Mapping[str, Any]:
    return answer.build_answer(answer.compare_runs(rows, Axis.FLOPS)).result


# -- the same questions


def test_an_edited_file_of_prompts_is_seen(tmp_path: Path) -> None:
    """Comparability was a hash of what the recipe says. Between two arms data.jsonl was edited: the recipe
    was the same, and the difference of their scores was put down to how the arms sample."""
    run = RunFolder(tmp_path)
    for step, found in ((0, "aaaaaaaaaaaa"), (8, "aaaaaaaaaaaa")):
        run.eval.append({"step": step, "set": "eval", "split": "eval", "prompts": found})
    run.eval.append({"step": 8, "set": "hard", "split": "eval", "prompts": "bbbbbbbbbbbb"})
    assert (read_prompts_hash(run, "eval"), read_prompts_hash(run, "hard")) == (
        "aaaaaaaaaaaa",
        "bbbbbbbbbbbb",
    )
    rows = rows_of(REFERENCE, OTHER)
    rows[3]["prompts"] = "cccccccccccc"  # of the last seed alone
    with pytest.raises(ValueError, match="held-out sets do not compare"):
        result_of(rows)
    run.eval.append({"step": 16, "set": "eval", "split": "eval"})
    assert read_prompts_hash(run, "eval") == ""  # not known to be one set
    rows[3]["prompts"] = ""
    with pytest.raises(ValueError, match="seed 1 does not say on which held-out prompts"):
        result_of(rows)


def test_other_rewards_do_not_compare() -> None:
    rows = rows_of(REFERENCE, OTHER)
    rows[2]["judged"] = '{"functions": ["close"]}'
    with pytest.raises(ValueError, match="scores of different rewards do not compare"):
        result_of(rows)


def test_seeds_that_sample_otherwise_are_named_one_by_one() -> None:
    """The last seed of an arm spoke for all of them."""
    rows = rows_of(REFERENCE, OTHER)
    rows[2]["held_out"] = "cool"
    rows[3]["unmeasured"] = 2
    notes = " ".join(result_of(rows)["notes"])
    assert f"{OTHER}, seed 1: 2 evaluations without a score are left out." in notes
    assert f"{OTHER}, seed 0: held-out prompts are answered otherwise than by the recipe, seed 0" in notes


# -- runs that died, and runs that saturated


@pytest.mark.parametrize(("n", "shown"), [(3, " at 7.5e11"), (8, " at 2e12")])
def test_a_run_that_died_early_does_not_pull_the_others_down(n: int, shown: str) -> None:
    """The score of every arm was that at the compute which all had reached: one run that was killed after
    three evaluations put all arms side by side at a tenth of their compute."""
    rows = [*rows_of(REFERENCE, OTHER), cut(kept_row("a | pipe", 0, LAWS["a | pipe"]), n)]
    found = result_of(rows)
    arms = {arm["arm"]: arm for arm in found["arms"]}
    end = rows[0]["compute"]["flops"][-1]
    assert found["common_compute"] == arms[REFERENCE]["reached_at"] == end
    assert arms[REFERENCE]["reached"]["median"] == pytest.approx(0.59, abs=0.01)
    dead = arms["a | pipe"]
    assert dead["reached_at"] == rows[-1]["compute"]["flops"][-1]
    assert dead["reached"]["median"] == pytest.approx(float(np.mean(rows[-1]["score"][-1:])), abs=0.06)
    lines = answer.build_answer(answer.compare_runs(rows, Axis.FLOPS)).tables[0].rows
    assert [line[5].endswith(shown) for line in lines] == [False, False, True]


def test_saturated_arms_are_not_reported_to_have_the_same_steepness() -> None:
    """Flat at 0.6 from the first evaluation on, curves have no B. "No difference seen" was reported of B and
    C_mid too, which had not been tested."""
    rows = [flat(row, 0.6) for row in rows_of(REFERENCE, OTHER)]
    arm = result_of(rows)["arms"][1]
    assert arm["verdict"] == "no difference in A seen; B not known"
    assert set(arm["lower"]) == {"A"}


# -- what acted


def test_parts_that_never_act_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    acted = answer.build_answer(answer.compare_runs(rows, Axis.FLOPS)).tables[-1]
    assert list(acted.head) == ["capped", "clipped", "interrupted", "updates old"]
    assert [tuple(cells) for _, *cells in acted.rows] == [("<0.01%", "-", "3.00%", "8"), ("-", "0", "-", "-")]


def test_what_acted_is_the_mean_over_steps_and_the_last_of_what_adds_up(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step, share in ((1, 1.0), (2, 0.5)):
        row = {"step": step, "groups/left_share": share, "interrupt/rate": share / 10}
        run.metrics.append(row | ({"cispo_clip_ratio": 0.2} if step == 2 else {}))  # step 1 was empty
    found = measure_acts(RunRows(run).read())
    assert found == {
        "groups/left_share": 0.5,
        "interrupt/rate": pytest.approx(0.075),
        "cispo_clip_ratio": 0.2,
    }
    (tmp_path / "metrics.jsonl").unlink()
    assert measure_acts(RunRows(run).read()) == {}


# -- scores that were not kept


@pytest.mark.parametrize(
    ("measure", "message"),
    [
        (Measure(metric="reward"), "keeps scores of metric pass@1, and reward is given; use --metric pass@1"),
        (Measure(split="hard"), "keeps scores of split eval, and hard is given"),
        (Measure(low=-1.0), "keeps scores of low 0.0, and -1.0 is given"),
    ],
)
def test_kept_scores_are_those_that_are_named(measure: Measure, message: str, tmp_path: Path) -> None:
    """--metric and --split were read and ignored where the source is a file of kept runs."""
    path = tmp_path / "runs.jsonl"
    write_kept(path, rows_of(REFERENCE))
    with pytest.raises(ValueError, match=message):
        read_kept(path, measure)


# -- where runs failed


@pytest.mark.parametrize("surviving", [[], ["no-fp32-head-s0"]])
def test_why_runs_failed_is_printed_where_nothing_can_be_compared(
    surviving: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where all runs failed, or those of the recipe, the answer was "no run folder to read" with exit code
    2, as if the user had mistyped a path; why they failed was lost."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[trainer]\nsteps = 7\n[ablate.arms]\n"no fp32 head" = ["model.fp32_head=true"]\n')
    jobs = plan_jobs(recipe, [], seeds=(0,), out=tmp_path)

    def failed(job: Job) -> State:
        what = "done" if job.folder.name in surviving else "failed"
        return State(job=job, what=what, error="" if what == "done" else "no signal")

    def collected(folders: Sequence[Path], measure: Measure) -> Any:
        if not folders:
            raise ValueError("there is no run folder to read; name a folder that holds runs")
        return [kept_row("no fp32 head", 0, LAWS[OTHER])], []

    monkeypatch.setattr(jobs_of, "run_jobs", lambda *_: [failed(job) for job in jobs])
    monkeypatch.setattr(commands, "collect_lines", collected)
    code = commands.run_recipe(str(recipe), [], Study(seeds=1, out=tmp_path), Output())
    output = capsys.readouterr().out
    assert code == 1
    assert "recipe-s0 failed: no signal." in output
    why = "no run of 'the recipe' is there" if surviving else "no run has come to its end"
    assert f"Nothing can be compared: {why}" in output
