"""``parallel.replan``: what is weighed at a checkpoint, what it is refused for, and what a switch changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ostinato.cli import replanning
from ostinato.cli.app import app
from ostinato.cli.place import read
from ostinato.cli.plan_again import weigh
from ostinato.cli.plan_asked import asked_again
from ostinato.cli.replanning import Replanner, Switch, check, free, overrides, plan_for, worth
from ostinato.config import Recipe, dump_toml
from ostinato.model.config import ModelConfig, read_config
from ostinato.model.named import model_folder
from ostinato.observe.ledger import SteadyClock
from ostinato.routes import routes_to_json
from ostinato.run import RunFolder

MODEL = str(model_folder("asset:seed-moe"))
ASKED = ["plan", MODEL, "--gpus", "2xcpu", "--base", "fp32", "--engine", "local", "--share", "two"]
ASKED += ["--prompts", "64", "--prompt-tokens", "32", "--answer-tokens", "200", "--max-answer", "256"]
LAYERS, EXPERTS = 3, 16
RUN = ("trainer.steps=1000", "trainer.checkpoint_every=2", "log.trajectories_every=1", "parallel.replan=true")
RUN += ("rollout.prompts_per_step=64", "rollout.group_size=8")


def config() -> ModelConfig:
    return read_config(Path(MODEL))


def recipe(*words: str) -> Recipe:
    return Recipe.load("quickstart", *RUN, *words)


def plan(tmp_path: Path, train: str) -> Path:
    """A plan for long answers, under which a run trains with ``train``."""
    file = tmp_path / "asked.json"
    done = CliRunner().invoke(app, [*ASKED, "--record", str(file)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    found["layouts"] |= {"train": train, "logprobs": train}
    file.write_text(json.dumps(found))
    return file


def started(tmp_path: Path, asked: Recipe, rows: int = 4, step_s: float = 2.0) -> RunFolder:
    """A run after ``rows`` steps of short answers, whose first experts are popular."""
    run = RunFolder.create(tmp_path / "run", dump_toml(asked))
    rng = np.random.default_rng(0)
    for step in range(1, rows + 1):
        scores = rng.gumbel(size=(500, LAYERS, EXPERTS)) - np.arange(EXPERTS) / 3
        routes = routes_to_json(np.argsort(-scores, axis=-1)[..., :2].astype(np.int8))
        run.trajectories.append({"step": step, "turns": [{"experts": routes, "tokens": [1] * 16}]})
        run.write(step, {"step_time": step_s, "time/train_s": step_s})
    return run


def replanner(run: RunFolder, asked: Recipe, switch_s: float = 5.0) -> Replanner:
    return Replanner(asked, run, config(), SteadyClock(), switch_s)


def test_experts_move_where_that_pays_for_a_new_session(tmp_path: Path) -> None:
    asked = recipe("parallel.layout=d4e4")
    run = started(tmp_path, asked)
    asking = replanner(run, asked)
    assert asking(4) and asking.switch is not None
    assert asking.switch.overrides == (f'parallel.placement="{run.path}/placement-00000004.json"',)
    placed = read(run.path / "placement-00000004.json", 4)
    assert len(placed) == LAYERS
    assert sorted(expert for rank in placed[0] for expert in rank) == list(range(EXPERTS))
    (row,) = run.replan.rows()
    assert row["switch"] and row["saved_s"] > 2 * 5.0
    assert not replanner(run, asked, switch_s=1e6)(4)
    assert not [*run.replan.rows()][-1]["switch"]


def test_a_placement_is_judged_from_the_one_in_use(tmp_path: Path) -> None:
    """Asked again, the run stays with what it has just moved to."""
    asked = recipe("parallel.layout=d4e4")
    run = started(tmp_path, asked)
    asking = replanner(run, asked)
    assert asking(4) and asking.switch is not None
    moved = recipe("parallel.layout=d4e4", *asking.switch.overrides)
    assert not replanner(run, moved)(4)


def test_a_layout_is_left_for_a_better_one(tmp_path: Path) -> None:
    file = plan(tmp_path, "d2f2")
    asked = recipe("parallel.layout=d2f2", f"parallel.plan={file}")
    run = started(tmp_path, asked)
    found = plan_for(asked, None, None)
    assert found is not None
    replanning.write_plan(run, found)
    asking = replanner(run, asked)
    assert asking(4) and asking.switch is not None and asking.switch.plan is not None
    after = Recipe.load(run.recipe, *asking.switch.overrides)
    assert after.parallel.layout == asking.switch.plan["layouts"]["train"] != "d2f2"
    assert asking.switch.plan["step"] == 4 and set(asking.switch.plan["world"]["answers"]) == {16}
    check(after, config(), plan_for(after, run.path, asking.switch))
    # the world that was searched in is the one that the next checkpoint compares with
    replanning.write_plan(run, asking.switch.plan)
    assert not replanner(run, after)(6)
    assert "still those of the plan" in [*run.replan.rows()][-1]["reason"]


def test_what_is_gained_is_a_share_of_measured_steps(tmp_path: Path) -> None:
    """A plan that is off by a thousand had promised hours to a run of seconds."""
    file = plan(tmp_path, "d2f2")
    asked = recipe("parallel.layout=d2f2", f"parallel.plan={file}")
    run = started(tmp_path, asked, step_s=0.001)
    replanning.write_plan(run, json.loads(file.read_text()))
    assert not replanner(run, asked)(4)
    (row,) = run.replan.rows()
    assert "less than 2 times the 5 s of the switch" in row["reason"]
    assert not replanner(run, asked)(4)  # and nothing is searched for twice
    assert [*run.replan.rows()][-1]["world"] is None


def test_torchruns_ranks_stay_as_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = plan(tmp_path, "d2f2")
    asked = recipe("parallel.layout=d2f2", f"parallel.plan={file}")
    run = started(tmp_path, asked)
    replanning.write_plan(run, json.loads(file.read_text()))
    told = {"RANK": 0, "WORLD_SIZE": 7, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))
    assert not replanner(run, asked)(4)
    assert "nothing that could be gone on by" in [*run.replan.rows()][-1]["reason"]


def test_a_placement_for_other_ranks_is_dropped(tmp_path: Path) -> None:
    file = plan(tmp_path, "d2f2")
    said = json.loads(file.read_text())
    asked = recipe("parallel.layout=d2f2", "parallel.placement=here.json")
    run = started(tmp_path, asked)
    replanning.write_plan(run, said)
    question = asked_again(said["asked"])
    found = weigh(free(question), run, 1.0, lambda one: one.arrangement.train.layout.expert == 2)
    assert found.plan is not None and 'parallel.placement=""' in overrides(asked, question, found.plan)


def test_moving_has_to_pay_twice() -> None:
    assert not worth(10.0, 5.0, 3).switch
    assert worth(10.1, 5.0, 3).switch and worth(10.1, 5.0, 3).saved_s == pytest.approx(5.1)


@pytest.mark.parametrize(
    ("words", "change", "sentence"),
    [
        (("parallel.layout=d2",), None, "with nothing to weigh"),
        (("parallel.layout=d2e2", "log.trajectories_every=10"), None, "log.trajectories_every=1"),
        (("parallel.layout=d2",), {}, 'parallel.layout is "d2" and the plan of the run says "d2f2"'),
        (("parallel.layout=d2f2",), {"asked": {}}, "does not say what was asked"),
        (("parallel.layout=d2f2",), {"placement": "apart"}, "trainer and sampler apart"),
        (("parallel.layout=d2f2", "rollout.group_size=4"), {}, "is of group 8, and the run has 4"),
    ],
)
def test_what_cannot_be_weighed_is_refused(
    tmp_path: Path, words: tuple[str, ...], change: Mapping[str, Any] | None, sentence: str
) -> None:
    said = None if change is None else json.loads(plan(tmp_path, "d2f2").read_text()) | change
    with pytest.raises(ValueError, match=sentence):
        check(recipe(*words), config(), said)


def test_a_run_that_goes_on_is_told_and_not_refused() -> None:
    """Killed between the writing of the plan and of the recipe, it could not be resumed."""
    said: list[str] = []
    assert not check(recipe("parallel.layout=d2"), config(), None, said.append)
    assert said and said[0].startswith("parallel.replan rests: ") and "nothing to weigh" in said[0]


def test_a_plan_of_another_machine_is_refused_before_any_step(tmp_path: Path) -> None:
    """Its model was looked for at the first checkpoint, which ended the run."""
    said = json.loads(plan(tmp_path, "d2f2").read_text())
    said["asked"]["model"] = "/home/me/model"
    with pytest.raises(ValueError, match="/home/me/model"):
        check(recipe("parallel.layout=d2f2"), config(), said)


def test_what_fails_while_it_is_weighed_is_told_and_changes_nothing(tmp_path: Path) -> None:
    file = plan(tmp_path, "d2f2")
    asked = recipe("parallel.layout=d2f2", f"parallel.plan={file}")
    run = started(tmp_path, asked)
    said = json.loads(file.read_text())
    said["asked"]["options"]["answers"] = str(tmp_path / "gone.json")
    replanning.write_plan(run, said)
    assert not replanner(run, asked)(4)
    assert "nothing could be weighed (answers is" in [*run.replan.rows()][-1]["reason"]


def test_the_sampler_stays_where_the_recipe_has_no_layout_for_it(tmp_path: Path) -> None:
    """A switch of the trainer's layout had brought along ranks of the sampler that nobody had weighed."""
    file = plan(tmp_path, "d2f2")
    asked = recipe("parallel.layout=d2f2", f"parallel.plan={file}")
    run = started(tmp_path, asked)
    replanning.write_plan(run, json.loads(file.read_text()))
    asking = replanner(run, asked)
    assert asking(4) and asking.switch is not None
    assert not any(word.startswith("engine.") for word in asking.switch.overrides)


def test_a_plan_that_was_held_to_its_layout_is_weighed_against_all(tmp_path: Path) -> None:
    """Made with --train-layout, as a refusal had advised, it was the best of one for ever."""
    file = plan(tmp_path, "d2f2")
    said = json.loads(file.read_text())
    said["asked"]["options"]["train_layout"] = "d2f2"
    asked = recipe("parallel.layout=d2f2", f"parallel.plan={file}")
    run = started(tmp_path, asked)
    replanning.write_plan(run, said)
    assert replanner(run, asked)(4)


def test_a_switch_that_did_not_come_about_is_asked_again(tmp_path: Path) -> None:
    """Killed before the new session had begun, the resumed run took what it had not done for done."""
    file = plan(tmp_path, "d2f2")
    asked = recipe("parallel.layout=d2f2", f"parallel.plan={file}")
    run = started(tmp_path, asked)
    replanning.write_plan(run, json.loads(file.read_text()))
    assert replanner(run, asked)(4) and replanner(run, asked)(6)


def test_a_refused_switch_is_kept_and_goes_back(tmp_path: Path) -> None:
    file = plan(tmp_path, "d2f2")
    run = started(tmp_path, recipe("parallel.layout=d2f2", f"parallel.plan={file}"))
    replanning.write_plan(run, json.loads(file.read_text()))
    switch = Switch(step=4, overrides=("parallel.layout=d2",), reason="better", plan={"layouts": {}})
    back = switch.back(run).refused(run, MemoryError("no room"))
    assert back.rests and back.plan == json.loads(file.read_text()) and not back.overrides
    assert "could not begin (MemoryError: no room)" in back.told
    (row,) = run.replan.rows()
    assert not row["switch"] and row["reason"] == back.reason


def test_another_plan_that_the_recipe_names_is_taken_up(tmp_path: Path) -> None:
    """``ostinato resume RUN parallel.plan=new.json`` had gone on by the old one."""
    file, new = plan(tmp_path, "d2f2"), tmp_path / "new.json"
    asked = recipe("parallel.layout=d2f2", f"parallel.plan={file}")
    run = started(tmp_path, asked)
    old = json.loads(file.read_text())
    replanning.write_plan(run, old)
    new.write_text(json.dumps(old | {"total": 1.0}))
    assert plan_for(asked, run.path, None) == old
    found = plan_for(Recipe.load(run.recipe, f"parallel.plan={new}"), run.path, None)
    assert found is not None and found["total"] == 1.0


def test_a_damaged_plan_stops_nobody_who_does_not_weigh(tmp_path: Path) -> None:
    """The report tells of it; a run that only resumes had been refused for it."""
    asked = recipe("parallel.layout=d4e4")
    run = started(tmp_path, asked)
    (run.path / "plan.json").write_text("{")
    assert plan_for(recipe("parallel.layout=d4e4", "parallel.replan=false"), run.path, None) is None
    with pytest.raises(ValueError, match=r"plan\.json is no JSON .*--record"):
        plan_for(asked, run.path, None)


def test_the_first_step_tells_what_a_session_takes_to_begin(tmp_path: Path) -> None:
    asked = recipe("parallel.layout=d4e4")
    asking = Replanner(asked, started(tmp_path, asked), config(), SteadyClock())
    assert not asking(0)  # nothing is known yet
    seen: list[float] = []
    asking.watching(lambda row: seen.append(row["step_time"]))({"step_time": 0.25})
    assert seen == [0.25] and asking.switch_s is not None


def test_ranks_without_an_agent_cannot_meet_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match="not started by torchrun"):
        check(recipe("parallel.layout=d2e2"), config(), None)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    check(recipe("parallel.layout=d2e2"), config(), None)


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match="which is no plan"):
        plan_for(recipe(f"parallel.plan={file}"), None, None)


def test_checkpoints_are_where_a_run_goes_on_from() -> None:
    with pytest.raises(ValueError, match="checkpoint_every is 0"):
        recipe("parallel.layout=d2e2", "trainer.checkpoint_every=0")


def test_a_switch_in_words() -> None:
    switch = Switch(step=4, overrides=('parallel.layout="d2"',), reason="shorter answers")
    assert switch.told == 'step 4: shorter answers; on with parallel.layout="d2"'
