"""``ostinato data`` and rows that are too long: what will be trained on is said before it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ostinato.cli.data import data
from ostinato.config import Recipe
from ostinato.launch.inputs import find_overlong, read_prompts
from ostinato.model.named import find_model_folder
from ostinato.render import Renderer


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Ten sums, as GSM8K writes answers; the last is long."""
    lines = [{"question": f"{k} + 1?", "answer": f"One more.\n#### {k + 1}"} for k in range(9)]
    lines.append({"question": "word " * 300, "answer": "#### 0"})
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.slow
def test_a_file_is_shown_with_the_rewards_that_can_read_its_answers(
    rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data(str(rows), ["task.params.holdout=0.2", "rollout.max_tokens=100"], model="", row=2)
    shown = capsys.readouterr().out
    renderer = Renderer(find_model_folder("asset:seed-moe"))
    recipe = Recipe.load({}, f"task.source={rows}", "task.n_train=0", "task.params.holdout=0.2")
    second = read_prompts(recipe, "train", None)[1]
    tokens = renderer.prompt(second).tolist()
    assert f"{second.where}, {len(tokens)} tokens" in shown and str(tokens) in shown
    assert "8 to train on" in shown and "held out     2" in shown and "too long     1" in shown
    assert "numeric: 1 or more to the own answer of 8 of 8" in shown
    assert "code_tests" not in shown, "it has no verdict on rows without tests"


def test_a_recipe_is_shown_with_its_own_rewards(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = rows.with_name("mine.toml")
    file.write_text(f'[task]\nsource = "{rows.name}"\nn_train = 0\n[reward]\nfunctions = ["numeric"]\n')
    data(str(file), ["task.overlong=filter"], model="", row=1)
    shown = capsys.readouterr().out
    assert "held out     none" in shown and "too long     1, left out" in shown
    assert "reward       numeric" in shown and "math_verify" not in shown


def test_rows_that_are_too_long_are_left_out_or_refused(rows: Path) -> None:
    renderer = Renderer(find_model_folder("asset:seed-moe"))
    recipe = Recipe.load({}, f"task.source={rows}", "task.overlong=filter", "rollout.max_tokens=100")
    read = read_prompts(recipe, "train", None)
    assert [row.where for row in find_overlong(recipe, read, renderer, 256, {"": {}})] == [read[-1].where]
    refusing = Recipe.load({}, f"task.source={rows}", "rollout.max_tokens=100")
    with pytest.raises(ValueError, match=r'row 10 of .* task.overlong = "filter"'):
        find_overlong(refusing, read, renderer, 256, {"": {}})
