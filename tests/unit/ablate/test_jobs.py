"""``ostinato ablate``: what is run and what not, what is kept, what is told, and what is refused in words."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kept_rows import LAWS, kept_row

from ostinato.ablate.jobs import Job, State, check, plan, run
from ostinato.ablate.kept import collect, ended, read_kept, series_of, write_kept
from ostinato.axis import Axis
from ostinato.cli.app import main
from ostinato.config import Recipe
from ostinato.lock import locked
from ostinato.scaling.ablation import REFERENCE

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


def ostinato(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


# -- what is run


def test_the_plan_is_every_arm_with_every_seed_and_one_change(recipe: Path, tmp_path: Path) -> None:
    jobs = plan(recipe, ["trainer.lr=0.01"], seeds=(3, 4), out=tmp_path / "out")
    names = [job.folder.name for job in jobs]
    assert names == [
        f"{arm}-s{seed}" for seed in (3, 4) for arm in ("recipe", "no-fp32-head", "cispo-dapo-clip")
    ]
    assert {job.recipe.seed for job in jobs} == {3, 4}
    assert {job.recipe.trainer.lr for job in jobs} == {0.01}
    assert [job.recipe.model.fp32_head for job in jobs[:3]] == [False, True, False]
    assert [job.recipe.algo.name for job in jobs[:3]] == ["grpo", "grpo", "dapo"]
    one = plan(recipe, [], seeds=(0,), arms=["no fp32 head"], out=tmp_path)
    assert [job.arm for job in one] == [REFERENCE, "no fp32 head"]


def test_workers_share_the_threads(recipe: Path, tmp_path: Path) -> None:
    def threads(*overrides: str, workers: int) -> object:
        return plan(recipe, overrides, seeds=(0,), out=tmp_path, workers=workers)[0].recipe.engine.threads

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
        plan(path, [], seeds=(0,), out=tmp_path)


def test_a_folder_of_another_recipe_is_not_gone_on_with(recipe: Path, tmp_path: Path) -> None:
    jobs = plan(recipe, [], seeds=(0,), out=tmp_path / "out")
    run(jobs, 3, ignore, command=child("exit 1"), pause=short)
    check(jobs)
    check(plan(recipe, ["engine.threads=1"], seeds=(0,), out=tmp_path / "out"))
    with pytest.raises(ValueError, match=r"recipe-s0 is a run of another recipe \(trainer.lr differs\)"):
        check(plan(recipe, ["trainer.lr=0.5"], seeds=(0,), out=tmp_path / "out"))


def test_an_arm_without_an_algorithm_is_refused_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[ablate.arms]\n"x" = ["algo.name=nope"]')
    with pytest.raises(ValueError, match=r"arm 'x': .*nope"):
        check(plan(path, [], seeds=(0,), out=tmp_path))


# -- children, by shell scripts in place of runs

DONE = """echo '{"step":7}' >> $0/metrics.jsonl; echo '{"event":"end","why":"done"}' >> $0/ledger.jsonl"""


def child(script: str) -> Any:
    return lambda folder: ["/bin/sh", "-c", script, str(folder)]


def short() -> None:
    time.sleep(0.01)


def ignore(states: Sequence[State]) -> None:
    pass


def jobs_of(recipe: Path, out: Path) -> list[Job]:
    return plan(recipe, [], seeds=(0,), out=out)


def test_runs_that_have_ended_are_not_run_again(recipe: Path, tmp_path: Path) -> None:
    jobs = jobs_of(recipe, tmp_path)
    seen: list[list[str]] = []
    first = run(
        jobs, 2, lambda states: seen.append([s.what for s in states]), command=child(DONE), pause=short
    )
    assert [(state.what, state.step) for state in first] == [("done", 7)] * 3
    assert max(each.count("running") for each in seen) <= 2
    assert all(Recipe.load(job.folder / "recipe.toml").trainer.steps == 7 for job in jobs)
    again = run(jobs, 2, ignore, command=child("exit 9"), pause=short)
    assert [state.what for state in again] == ["done"] * 3


def test_a_run_that_fails_is_named_kept_and_gone_on_with(recipe: Path, tmp_path: Path) -> None:
    jobs = jobs_of(recipe, tmp_path)
    broken = f'case $0 in *fp32*) echo "ostinato: no signal" >&2; exit 1;; *) {DONE};; esac'
    states = run(jobs, 1, ignore, command=child(broken), pause=short)
    assert [state.what for state in states] == ["done", "failed", "done"]
    assert states[1].error == "no signal"
    states = run(jobs, 1, ignore, command=child(DONE), pause=short)
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
        assert ended(tmp_path) is wanted
    log.write_text(json.dumps({"event": "end", "why": "done"}) + '\n{"event":"st')  # a torn row after it
    assert ended(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_lets_the_children_save(recipe: Path, tmp_path: Path, number: signal.Signals) -> None:
    """SIGTERM or SIGHUP of the parent is passed on to every child, which is waited for."""
    script = "trap 'echo saved > $0/saved; exit 143' TERM; echo > $0/ready; while :; do sleep 0.02; done"
    jobs = jobs_of(recipe, tmp_path)

    def stop_when_ready(states: Sequence[State]) -> None:
        if all((job.folder / "ready").exists() for job in jobs[:2]):
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        run(jobs, 2, stop_when_ready, command=child(script), pause=short)
    assert [(job.folder / "saved").exists() for job in jobs] == [True, True, False]
    assert signal.getsignal(number) is before


def test_two_never_train_into_one_folder(recipe: Path, tmp_path: Path) -> None:
    """A killed parent leaves its children at work, and another ablation would train beside them."""
    jobs = jobs_of(recipe, tmp_path)[:1]
    jobs[0].folder.mkdir(parents=True)
    with locked(jobs[0].folder):
        (state,) = run(jobs, 1, ignore, command=child(DONE), pause=short)
    assert state.what == "failed" and f"is in use by process {os.getpid()} on" in state.error
    assert not (jobs[0].folder / "train.log").exists()
    assert run(jobs, 1, ignore, command=child(DONE), pause=short)[0].what == "done"


# -- what is kept and told


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
    assert ostinato("ablate", *[named.get(each, each) for each in arguments]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert message in said[0]


def test_a_line_gives_its_series_back(kept: Path) -> None:
    row = read_kept(kept)[0]
    one = series_of(row, Axis.STEPS)
    assert (one.name, one.axis, one.R0) == ("the recipe, seed 0", Axis.STEPS, 0.3)
    np.testing.assert_array_equal(one.compute, row["compute"]["steps"])
    with pytest.raises(ValueError, match="no run folder"):
        collect([])
