"""``ostinato plan --against RUN``: what the run has become is read from the run, and the advice is kept
there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ostinato.cli.app import app
from ostinato.cli.plan_again import problem_now, steps_of
from ostinato.cli.plan_asked import Options, ask
from ostinato.parallel.layout import Layout
from ostinato.plan.imbalance import straggler
from ostinato.plan.problem import Phase, Setup
from ostinato.plan.replan import World
from ostinato.run import RunFolder

ASKED = ["plan", "qwen3-8b", "--gpus", "4xH100-80", "--prompts", "32", "--max-answer", "8192"]


def planned(folder: Path) -> RunFolder:
    run = RunFolder.create(folder, 'name = "planned"\n')
    done = CliRunner().invoke(app, [*ASKED, "--answer-tokens", "512", "--record", str(folder)])
    assert done.exit_code == 0, done.output
    return run


def step(run: RunFolder, number: int, lengths: list[int]) -> None:
    run.write(number, {"step_time": 1.0})
    run.trajectories.append(*({"step": number, "turns": [{"tokens": [1] * n}]} for n in lengths))


def asked(run: RunFolder) -> str:
    done = CliRunner().invoke(app, [*ASKED, "--against", str(run.path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_run_that_is_as_it_was_planned_stays(tmp_path: Path) -> None:
    run = planned(tmp_path / "run")
    answers = json.loads((run.path / "plan.json").read_text())["world"]["answers"]
    step(run, 1, answers)
    assert "stay: lengths and expert loads are still those of the plan" in asked(run)


def test_longer_answers_are_weighed_and_the_advice_is_kept(tmp_path: Path) -> None:
    run = planned(tmp_path / "run")
    step(run, 1, [int(n) for n in np.linspace(2000, 8000, 16)])
    told = asked(run)
    assert told.startswith(("stay: ", "switch: ")) and "mean answer" in told
    (row,) = run.replan.rows()
    assert row["step"] == 1 and row["reason"] in told.replace("\n", " ")


def test_a_run_without_a_plan_or_a_step_is_refused(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", 'name = "x"\n')
    with pytest.raises(ValueError, match="plan the run first"):
        asked(run)
    with pytest.raises(ValueError, match="no step yet"):
        asked(planned(tmp_path / "other"))


MOE = ["plan", "qwen3-30b-a3b", "--gpus", "8xH100-80", "--prompts", "32", "--max-answer", "8192"]
MOE += ["--answer-tokens", "512", "--train-layout", "d8e8"]


def uneven(folder: Path, ranks: int, factor: float) -> RunFolder:
    """A run planned over 8 expert ranks, one step of which was measured over ``ranks``."""
    run = RunFolder.create(folder, 'name = "planned"\n\n[trainer]\nsteps = 40\n')
    done = CliRunner().invoke(app, [*MOE, "--record", str(folder)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    run.write(10, {"routing/straggler": factor, "routing/straggler_ranks": float(ranks)})
    return run


def test_an_imbalance_over_other_ranks_is_not_compared(tmp_path: Path) -> None:
    run = uneven(tmp_path / "run", ranks=4, factor=3.0)
    done = CliRunner().invoke(app, [*MOE, "--against", str(run.path)], catch_exceptions=False)
    assert "stay: lengths and expert loads are still those of the plan" in done.output


def test_a_measured_imbalance_enters_the_prices(tmp_path: Path) -> None:
    run = uneven(tmp_path / "run", ranks=8, factor=3.0)
    done = CliRunner().invoke(app, [*MOE, "--against", str(run.path)], catch_exceptions=False)
    assert "expert load max/mean" in done.output and "-> 3.00" in done.output
    plan = json.loads((run.path / "plan.json").read_text())
    asked = ask("qwen3-30b-a3b", "8xH100-80", Options())
    before = problem_now(asked.problem, plan, World(answers=(512,), imbalance=plan["world"]["imbalance"]))
    after = problem_now(asked.problem, plan, World(answers=(512,), imbalance=3.0))
    setup = Setup(layout=Layout.parse("d8e8"), microbatch=16384)
    slow, fast = (asked.clock.phase(one, Phase.TRAIN, setup)["imbalance"] for one in (after, before))
    assert straggler(after.imbalance, 128, 8).mean == pytest.approx(3.0, rel=0.01)
    assert slow > 3 * fast


def test_the_rest_is_that_of_the_run(tmp_path: Path) -> None:
    run = uneven(tmp_path / "run", ranks=8, factor=3.0)
    assert steps_of(run, otherwise=1000) == 40
    assert steps_of(RunFolder.create(tmp_path / "other", 'name = "x"\n'), otherwise=1000) == 1000
