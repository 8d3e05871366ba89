"""Where relative paths of a recipe begin: at its file, on the command line at the shell's folder."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ostinato.apps.scaling.arms.compare import read_arms
from ostinato.config import Recipe, check_files, dump_toml, find_recipe
from ostinato.config.fields import PathKind, make_absolute

ROOT = Path(__file__).parents[3]
PACKAGED = sorted(file.stem for file in (ROOT / "recipes").glob("*.toml"))


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a recipe's files, and another folder, the current one, with files of the same names."""
    for folder in ("project", "shell"):
        for name in ("rows.jsonl", "rewards.py", "agent.py", "shop.py"):
            (tmp_path / folder / name).parent.mkdir(exist_ok=True)
            (tmp_path / folder / name).write_text("")
        (tmp_path / folder / "seeds" / "small").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "shell")
    return tmp_path / "project"


def written(folder: Path, keys: dict[str, Any]) -> Path:
    file = folder / "mine.toml"
    file.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()))
    return file


@pytest.mark.parametrize(
    ("key", "value", "known"),
    [
        ("task.source", "rows.jsonl", "{}/rows.jsonl"),
        ("model.path", "seeds/small", "{}/seeds/small"),
        ("model.path", "./seeds", "{}/seeds"),
        ("adapter.path", "seeds/./small/..", "{}/seeds"),
        ("teacher.adapter", "seeds", "{}/seeds"),
        ("task.env", "shop.py:Shop", "{}/shop.py:Shop"),
        ("task.agent", "agent.py:agent", "{}/agent.py:agent"),
        ("task.tools", ["shop.py:price", "calculator"], ["{}/shop.py:price", "calculator"]),
        ("task.agent_command", ["python", "agent.py"], ["python", "{}/agent.py"]),
        ("reward.functions", ["rewards.py:fine"], ["{}/rewards.py:fine"]),
        (
            "reward.functions",
            ["judge:seeds/small@12,http://h/v1#m"],
            ["judge:{}/seeds/small@12,http://h/v1#m"],
        ),
        ("engine.python", "venv/bin/python", "{}/venv/bin/python"),
        ("parallel.placement", "seeds/small", "{}/seeds/small"),
        ("forgetting.source", "rows.jsonl", "{}/rows.jsonl"),
    ],
)
def test_a_path_in_a_recipe_begins_at_its_file(apart: Path, key: str, value: Any, known: Any) -> None:
    """`ostinato train ../p1/mine.toml` looked for the rows of the recipe in the shell's folder, and packaged
    recipes worked in the root of the repository only. On the command line the same text is the shell's."""
    beside = {"task.tools": {"task.max_turns": 2}, "engine.python": {"engine.backend": "vllm"}}.get(key, {})
    for recipe, folder in (
        (Recipe.load(written(apart, {key: value, **beside})), apart),
        (Recipe.load(written(apart, beside), f"{key}={json.dumps(value)}"), apart.parent / "shell"),
    ):
        section, name = key.split(".")
        expected = json.loads(json.dumps(known).replace("{}", str(folder)))
        assert recipe.model_dump(mode="json")[section][name] == expected
        run = apart.parent / "elsewhere" / "runs" / "mine-1" / "recipe.toml"  # as a run folder has it, moved
        run.parent.mkdir(parents=True, exist_ok=True)
        run.write_text(dump_toml(recipe))
        assert Recipe.load(run) == recipe == Recipe.parse(tomllib.loads(dump_toml(recipe)))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((PathKind.ROWS, text) for text in ("arithmetic", "gym:a.b", "hf:x/y", "seeds", "", "arithmatic")),
        *((PathKind.MODEL, text) for text in ("asset:seed-moe", "smollm2-135m", "Qwen/Qwen3-8B", "")),
        *((PathKind.CODE, text) for text in ("calculator", "package.module:Class", "remote", "")),
        *((PathKind.REWARD, text) for text in ("exact", "env", "judge:Qwen/Qwen3-8B", "judge:http://h#m")),
        *((PathKind.RECIPE, text) for text in ("quickstart", "scalerl")),
        (PathKind.PROGRAM, "python3.11"),
        (PathKind.WORD, "python"),
        (PathKind.FILE, ""),
        (PathKind.FILE, "/nowhere/adapter"),
    ],
)
def test_names_stay_names(tmp_path: Path, kind: PathKind, text: str) -> None:
    assert make_absolute(kind, text, tmp_path) == text


def test_a_model_of_the_current_folder_does_not_stand_in_for_one_beside_the_recipe(apart: Path) -> None:
    """ "seeds/tiny" has the form of a hub name: where it is missing beside the recipe, and a folder of that
    name lies in the shell's folder, the recipe must not get that other model."""
    (apart.parent / "shell" / "seeds" / "tiny").mkdir()
    recipe = Recipe.load(written(apart, {"model.path": "seeds/tiny"}))
    with pytest.raises(ValueError, match=rf"model\.path is '{apart}/seeds/tiny'"):
        check_files(recipe)


def test_sections_in_lists_and_by_name(apart: Path) -> None:
    mix = [{"name": "a", "source": "rows.jsonl", "rewards": ["rewards.py:fine"]}]
    file = written(apart, {"reward.functions": ["rewards.py:fine"], "eval.downstream.x.source": "rows.jsonl"})
    file.write_text(
        file.read_text() + '[[task.mix]]\nname = "a"\nsource = "rows.jsonl"\nrewards = ["rewards.py:fine"]'
    )
    recipe = Recipe.load(file)
    assert recipe.task.mix[0].source == str(apart / mix[0]["source"]) == recipe.eval.downstream["x"].source
    assert recipe.task.mix[0].rewards == (f"{apart}/rewards.py:fine",) == recipe.reward.functions


def test_overrides_of_arms_begin_at_their_file(apart: Path) -> None:
    file = written(apart, {})
    file.write_text(
        '[ablate.arms]\n"b" = ["task.source=rows.jsonl", "trainer.lr=1e-3", "task.tools=[\'shop.py:f\']"]'
    )
    source, rate, tools = Recipe.load(file).ablate.arms["b"]
    assert Recipe.load(file, source).task.source == f"{apart}/rows.jsonl"
    assert (rate, tools) == ("trainer.lr=1e-3", f'task.tools=["{apart}/shop.py:f"]')

    arms = apart / "arms.toml"
    arms.write_text(
        'recipe = "mine.toml"\n[arms.x]\nmodel = "seeds/small"\noverrides = ["adapter.path=seeds"]'
    )
    found = read_arms(arms)
    assert (found.recipe, found.arms["x"].model) == (str(file), f"{apart}/seeds/small")
    assert found.arms["x"].overrides == (f'adapter.path="{apart}/seeds"',)


@pytest.mark.parametrize("key", ["task.source", "adapter.path", "task.agent", "reward.functions"])
def test_a_missing_file_is_named_with_where_it_was_looked_for(apart: Path, key: str) -> None:
    value: Any = {"task.agent": "no.py:f", "reward.functions": ["no.py:f"]}.get(key, "no.jsonl")
    with pytest.raises(ValueError, match=rf"{key} is '{apart}/no\."):
        check_files(Recipe.load(written(apart, {key: value})))


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_recipes_find_their_files_from_any_folder(apart: Path, name: str) -> None:
    """price_agent, guess_agent and pydantic_agent named "recipes/...py", which is there in a clone only."""
    assert apart.is_dir()
    recipe = find_recipe(name)
    text, of_users = recipe.read_text(), list[str]()
    if re.search(r'^source = "\w+\.jsonl"', text, re.MULTILINE):
        of_users += ["task.source=arithmetic"]
    if "judge:JUDGE" in text:
        of_users += ['reward.functions=["exact"]']
    check_files(Recipe.load(recipe, *of_users))
