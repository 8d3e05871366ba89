"""``ostinato new``: what it writes is read, checked and trained by the other commands as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.cli.new import MACHINES, new
from ostinato.config import Recipe
from ostinato.config.reference import find_keys
from ostinato.launch.inputs import prepare_inputs


def write_rows(folder: Path, **row: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "question": f"{k}?"}) + "\n" for k in range(10)))
    return path


@pytest.mark.parametrize(
    ("row", "reward"),
    [
        ({"answer": "One more. #### 7"}, "numeric"),
        ({"answer": "\\frac{1}{2} + x"}, "math_verify"),
        ({"answer": "Paris"}, "exact"),
    ],
)
def test_rows_choose_the_reward_that_reads_their_answers(
    tmp_path: Path, row: dict[str, str], reward: str
) -> None:
    if reward == "math_verify":
        pytest.importorskip("math_verify")
    rows = write_rows(tmp_path, **row)
    new(tmp_path / "mine.toml", task="", model="asset:seed-moe", machine="laptop", rows=str(rows))
    recipe = Recipe.load(tmp_path / "mine.toml", "model.dtype=float32")
    assert recipe.reward.functions == (reward,) and recipe.task.source == str(rows)
    with prepare_inputs(recipe, training=True) as inputs:
        assert len(inputs.train_prompts) == 9 and len(inputs.eval_prompts) == 1
        assert inputs.train_prompts[0].messages, "a text is what a user says"


@pytest.mark.parametrize("task", ["own", "env"])
def test_a_reward_and_an_environment_to_change_stand_beside_it(tmp_path: Path, task: str) -> None:
    rows = write_rows(tmp_path, answer="7") if task == "own" else ""
    new(tmp_path / "a" / "mine.toml", task=task, model="asset:seed-moe", machine="laptop", rows=str(rows))
    recipe = Recipe.load(tmp_path / "a" / "mine.toml", "model.dtype=float32")
    with prepare_inputs(recipe, training=True) as inputs:
        assert inputs.train_prompts
    with pytest.raises(ValueError, match=r"mine.toml exists; give the recipe another name"):
        new(tmp_path / "a" / "mine.toml", task=task, model="", machine="", rows=str(rows))
    (beside,) = (tmp_path / "a").glob("*.py")
    beside.write_text(f"{beside.read_text()}# mine")
    new(tmp_path / "a" / "other.toml", task=task, model="", machine="", rows=str(rows))
    assert beside.read_text().endswith("# mine"), "it was refused because of the file that it needs"


@pytest.mark.parametrize("machine", MACHINES)
def test_machines_have_their_sizes(tmp_path: Path, machine: str) -> None:
    new(tmp_path / "mine.toml", task="rows", model="asset:seed-moe", machine=machine, rows="arithmetic")
    recipe = Recipe.load(tmp_path / "mine.toml")
    assert recipe.rollout.group_size == MACHINES[machine][1] and recipe.trainer.steps == MACHINES[machine][3]


def test_answers_that_no_reward_reads_are_named(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match="--task own"):
        new(tmp_path / "mine.toml", task="", model="asset:seed-moe", machine="laptop", rows=str(rows))
    assert not (tmp_path / "mine.toml").exists()


def test_keys_are_found_by_name_and_by_description() -> None:
    assert [line.split()[0] for line in find_keys("chat_template")] == ["model.chat_template_kwargs"]
    assert len(list(find_keys(""))) > 150
    assert list(find_keys("num_generations")) == [
        "num_generations of other trainers is rollout.group_size here"
    ]
    with pytest.raises(ValueError, match="no key"):
        list(find_keys("stesp"))
