"""Another layout is advised where answers have other lengths and the gain pays for the switch: then
``parallel.replan`` ends the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ostinato.cli.app import app
from ostinato.config import Recipe, dump_toml
from ostinato.model.named import model_folder
from ostinato.plan.again import Replanner, advise, moved
from ostinato.run import RunFolder

BEFORE = (100, 200, 300, 400)


def gained(best_s: float = 8.0, best: str = "t4", left: int = 100) -> bool:
    return advise("d4", 10.0, best, best_s, left, switch_s=60.0)[0]


def test_nothing_is_planned_while_nothing_moved() -> None:
    assert moved(BEFORE, BEFORE) == ""
    assert "longest answer 400 -> 900" in moved(BEFORE, (100, 200, 300, 900))
    assert "mean answer" in moved(BEFORE, (200, 300, 400, 500))


def test_a_small_gain_or_a_short_rest_is_left() -> None:
    assert "t4 for d4" in advise("d4", 10.0, "t4", 8.0, 100, switch_s=60.0)[1]
    assert gained()
    assert not gained(best_s=9.7)  # 3 %: within what a plan knows
    assert not gained(left=40)  # 80 s gained, 60 s paid: less than twice
    assert gained(left=61)
    assert not gained(best="d4")
    assert not gained(best_s=11.0)


@given(st.floats(1, 100), st.floats(1, 100), st.floats(0, 1000), st.integers(0, 10_000))
def test_never_both_ways(a: float, b: float, switch_s: float, left: int) -> None:
    """After a switch the old layout is not advised again in the same world: no flipping."""
    there, _ = advise("x", a, "y", b, left, switch_s)
    back, _ = advise("y", b, "x", a, left, switch_s)
    assert not (there and back)


MODEL = str(model_folder("asset:seed-moe"))
LONG = ["plan", MODEL, "--gpus", "2xcpu", "--base", "fp32", "--engine", "local", "--share", "two"]
LONG += ["--prompts", "64", "--prompt-tokens", "32", "--answer-tokens", "200", "--max-answer", "256"]
WORDS = ("trainer.steps=100000", "trainer.checkpoint_every=2", "parallel.replan=true")
WORDS += ("rollout.prompts_per_step=64", "rollout.group_size=8")


def shortened(tmp_path: Path, *words: str, step_s: float = 2.0) -> RunFolder:
    """A run under d2f2, its plan for answers of 200 tokens, whose own have 16."""
    recipe = Recipe.load("quickstart", *WORDS, "parallel.layout=d2f2", *words)
    run = RunFolder.create(tmp_path / "run", dump_toml(recipe))
    done = CliRunner().invoke(app, [*LONG, "--record", str(run.path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    file = run.path / "plan.json"
    found = json.loads(file.read_text())
    found["layouts"] |= {"train": "d2f2", "logprobs": "d2f2"}
    file.write_text(json.dumps(found))
    for number in range(1, 5):
        run.trajectories.append({"step": number, "turns": [{"tokens": [1] * 16}]})
        run.write(number, {"step_time": step_s})
    return run


def last(run: RunFolder) -> str:
    return [*run.replan.rows()][-1]["reason"]


def test_a_run_ends_for_a_better_layout_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = shortened(tmp_path)
    hook = Replanner(run)
    assert hook(4)
    found = json.loads((run.path / "plan.json").read_text())
    after = found["layouts"]["train"]
    assert after != "d2f2" and found["step"] == 4 and set(found["answers"]) == {16}
    assert hook.command.startswith(f"ostinato resume {run.path} parallel.layout={after} trainer.")
    changed = Recipe.load(run.recipe, *hook.command.split()[3:])
    assert changed.parallel.layout == after
    # resumed as it was, it stays; under the better layout, it has what it was planned for
    assert not Replanner(run)(6) and f"trains under d2f2 and its plan is of {after}" in last(run)
    run.recipe.write_text(dump_toml(changed))
    assert not Replanner(run)(6) and "still those of the plan" in last(run)


def test_what_is_gained_is_a_share_of_measured_steps(tmp_path: Path) -> None:
    """A plan that is off by a thousand had promised hours to a run of seconds."""
    run = shortened(tmp_path, step_s=0.0001)
    assert not Replanner(run)(4) and "less than 2 times the 300 s of the switch" in last(run)
    assert not Replanner(run)(4)  # and nothing is searched for twice
    assert [*run.replan.rows()][-1]["answers"] == []


def test_a_plan_that_was_held_to_its_layout_is_weighed_against_all(tmp_path: Path) -> None:
    """Made with --train-layout it was the best of one for ever."""
    run = shortened(tmp_path)
    said = json.loads((run.path / "plan.json").read_text())
    said["asked"]["options"]["train_layout"] = "d2f2"
    (run.path / "plan.json").write_text(json.dumps(said))
    assert Replanner(run)(4)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"asked": {"model": "/gone", "gpus": "2xcpu", "options": {}}}, "/gone"),
        ({"asked": {}}, "nothing could be weighed"),
        ({"layouts": {"train": "d2"}}, "trains under d2f2 and its plan is of d2"),
        ({"lacking": None}, "nothing could be weighed"),
    ],
)
def test_what_cannot_be_weighed_changes_nothing(
    tmp_path: Path, change: dict[str, object], sentence: str
) -> None:
    run = shortened(tmp_path)
    said = json.loads((run.path / "plan.json").read_text()) | change
    (run.path / "plan.json").write_text(json.dumps(said))
    assert not Replanner(run)(4) and sentence in last(run)


def test_a_run_of_other_groups_or_without_a_plan_stays(tmp_path: Path) -> None:
    run = shortened(tmp_path, "rollout.group_size=4")
    assert not Replanner(run)(4) and "64 prompts of 4 answers, its plan 64 of 8" in last(run)
    (run.path / "plan.json").unlink()
    assert not Replanner(run)(4) and "plan the run first" in last(run)
