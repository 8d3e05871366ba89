"""Recipes: what is read, what is refused, and with which sentence; the page of all keys."""

from __future__ import annotations

import dataclasses
import re
import string
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.algo.algorithms import Algorithm, algorithm
from ostinato.apps.scaling.arms.jobs import plan_jobs
from ostinato.config import Recipe, dump_toml, find_recipe, override
from ostinato.config.fields import comments_of
from ostinato.config.reference import algorithm_keys, reference
from ostinato.other_names import OTHER_NAMES


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        Recipe.parse(tree)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_packaged_recipes_load(repository: Path) -> None:
    files = sorted((repository / "recipes").glob("*.toml"))
    assert len(files) >= 2
    for file in files:
        assert Recipe.load(file).name == file.stem
        assert find_recipe(file.stem) == file


def test_the_arms_on_mismatch_are_recipes(repository: Path, tmp_path: Path) -> None:
    jobs = plan_jobs(repository / "recipes/arms/collapse.toml", (), seeds=[10], out=tmp_path)
    rules = {job.arm: algorithm(job.recipe.algo.name, **job.recipe.algo.overrides) for job in jobs}
    assert {arm for arm, one in rules.items() if not one.is_decoupled} == {"the recipe", "bypass"}


def test_dotted_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[trainer]\nsteps = 7\nlr = 1e-3\n[task.params]\ndigits = 2\n")
    recipe = Recipe.load(
        file,
        "trainer.steps=9",
        "model.path=smollm2-135m",  # a bare string
        'adapter.targets=["attn"]',
        "engine.native=false",
        "task.params.family=sum",
        "algo.clip_high=0.28",
    )
    assert (recipe.trainer.steps, recipe.trainer.lr) == (9, 1e-3)
    assert (recipe.model.path, recipe.adapter.targets, recipe.engine.native) == (
        "smollm2-135m",
        ("attn",),
        False,
    )
    assert recipe.task.params == {"digits": 2, "family": "sum"}
    assert recipe.algo.overrides == {"clip_high": 0.28}
    assert recipe.name == "mine"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3", 3),
        ("true", True),
        ('"a b"', "a b"),
        ("a b", "a b"),
        ("2024-01-01", "2024-01-01"),
        ("[1, 2]", [1, 2]),
        ("gym:basic_arithmetic", "gym:basic_arithmetic"),
        ("1\nx = 2", "1\nx = 2"),
        ("", ""),
    ],
)
def test_override_values_are_toml_or_bare_strings(text: str, value: Any) -> None:
    assert override({}, [f"a.b={text}"]) == {"a": {"b": value}}


@pytest.mark.parametrize("text", ["trainer.steps", "=3", "trainer.=3", ".steps=3"])
def test_malformed_override(text: str) -> None:
    with pytest.raises(ValueError, match=r"not of the form section\.key=value"):
        override({}, [text])


PHRASE = "rollout.interrupt_after=[8, 8]; rollout.answer_tokens=8"
HARD = "eval.downstream.hard.source=x"
TWO_MARKS = "reward.functions=['exact', 'numeric']; task.mix=[{name='a', rewards=['exact']}, {name='b'}]"


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        # keys and types
        ("algo.clip_hi=3", "algo.clip_hi is not a key; did you mean 'clip_high'?"),
        ("trainer.stesp=3", "trainer.stesp is not a key of a recipe; did you mean trainer.steps?"),
        ("name=../../x", "name is '../../x', which is no name for the folder of a run"),
        ("trainer.group_size=3", "trainer.group_size is not a key of a recipe; group_size of other trainers"),
        ("trainer.temperature=1", "trainer.temperature is not a key of a recipe; did you mean rollout.temp"),
        ("model.device=mps", 'model.device is \'mps\'; use "auto", "cpu", "cuda"'),
        ("seed=99999999999999999999", "seed is 99999999999999999999; use a number below"),
        ("trainer.learning_rate=1e-5", "trainer.learning_rate is not a key of a recipe; learning_rate of"),
        ("num_generations=8", "num_generations is not a key of a recipe; num_generations of other"),
        ("trainer.steps='3'", "trainer.steps is '3'; use a whole number"),
        ("trainer.steps=0", "trainer.steps is 0; use 1 or more"),
        ("trainer.lr=nan", "trainer.lr is nan; use a finite number"),
        ("trainer.replay=some", "trainer.replay is 'some'; use true, false or \"shuffled\""),
        ("trainer=3", "trainer is 3; use a section of keys"),
        ("adapter.kind=loar", "adapter.kind is 'loar'; use one of 'lora', 'full'"),
        ("adapter.targets=attn", "adapter.targets is 'attn'; use a list in brackets"),
        ("engine.threads=0", "engine.threads is 0; use \"auto\" or a whole number of 1 or more"),
        ("reward.solved_at=all", "reward.solved_at is 'all'; use \"full\" or a number"),
        ("task.params=3", "task.params is 3; use a table"),
        # one field against another
        ("rollout.interrupt_after=[48, 32]; rollout.answer_tokens=8", "rollout.interrupt_after is [48, 32]"),
        ("rollout.interrupt_after=[8, 8]", "rollout.answer_tokens is 0 with rollout.interrupt_after"),
        ("rollout.answer_tokens=8", "rollout.answer_tokens is 8 without rollout.interrupt_after"),
        (f"{PHRASE}; rollout.interrupt_phrase=''", 'rollout.interrupt_phrase is "" with rollout.interrupt'),
        (f"{PHRASE}; rollout.stop=['time is']", "rollout.interrupt_phrase holds 'time is', one of rollout"),
        ("trainer.replay=false; trainer.replay_threshold=0.95", "trainer.replay_threshold is 0.95 with tra"),
        ("model.storage=bfloat16; adapter.kind=full", 'model.storage is "bfloat16" with adapter.kind "full"'),
        ("model.storage=bfloat16; parallel.layout=d2", "model.storage is \"bfloat16\" with parallel.layout"),
        ("model.storage=int8; adapter.kind=full", 'model.storage is "int8" with adapter.kind "full"'),
        ("model.storage=int8; parallel.layout=d2", 'model.storage is "int8" with parallel.layout'),
        ("model.storage=int8; engine.weights=int8", 'model.storage is "int8" with engine.weights "int8"'),
        ("model.storage=int8; engine.backend=vllm", 'model.storage is "int8" with engine.backend "vllm"'),
        # several tasks
        ("task.mix=[{name='a', weight=0}]", "task.mix[0].weight is 0; use a number above 0.0"),
        ("task.mix=[{weight=1}]", "task.mix[0].name is missing; every task.mix section names its own"),
        ("task.mix=[{name='a b'}]", "task.mix has the name 'a b'; use letters, digits"),
        ("task.mix=[{name='a'}, {name='a'}]", "task.mix has the name 'a' twice; give each task its own"),
        ("task.n_train=5; task.mix=[{name='a'}]", "task.n_train is 5 beside task.mix, whose tasks have th"),
        ("task.mix=[{name='a', rewards=['env']}]", "task.mix.a.rewards has 'env', which is none of reward.f"),
        ("task.mix=[{name='a', source='seeds'}]", "task.mix.a.source is for an environment, and task.mix.a."),
        ("task.mix=[{name='a', max_turns=2}]", "task.mix.a.max_turns is 2 but task.mix.a.tools is empty"),
        (TWO_MARKS, "reward.solved_at is \"full\", which is a reward of 2 for the task 'b' and of 1 for 'a'"),
        (f"{HARD}; eval.downstream.hard.task=a", "eval.downstream.hard.task is 'a'; use one of the tasks"),
        # what is evaluated, and what is foretold
        ("eval.every=2 parsecs", "eval.every is '2 parsecs'; use a number of steps, or"),
        ("eval.temperature=0.0; eval.start_factor=4", "eval.start_factor is 4 with eval.temperature 0"),
        ("eval.downstream.hard.n=3", "eval.downstream.hard.source is missing; every eval.downstream section"),
        (f"{HARD}; eval.downstream.hard.every=soon", "eval.downstream.hard.every is 'soon'; use a number"),
        (f"{HARD}; eval.downstream.hard.k=2; eval.temperature=0.0", "eval.downstream.hard.k is 2 with eval"),
        ("eval.downstream.eval.source=x", "eval.downstream.eval has the name of the main"),
        ("forecast.axis=money", 'forecast.axis is "money" without a price'),
        ("forecast.stop=true; forecast.enabled=false", "forecast.stop is true with forecast.enabled false"),
        ("forecast.stop=true; eval.every=0", "forecast.stop is true, but no scores come"),
    ],
)  # fmt: skip
def test_a_fault_is_one_sentence_with_field_value_and_mend(overrides: str, sentence: str) -> None:
    assert refusal(override({}, overrides.split("; "))).startswith(sentence)


def test_keys_of_other_trainers_lead_to_keys_that_there_are() -> None:
    """TRL's names (``num_generations``, ``learning_rate``, ``r``) got the list of all keys and no hint."""
    known = {f"algo.{key}" for key, *_ in algorithm_keys()}
    known |= {
        f"{name}.{key}"
        for name, field in Recipe.model_fields.items()
        for key in getattr(field.annotation, "model_fields", ())
    }
    assert {key for ours in OTHER_NAMES.values() for key in re.findall(r"[a-z]+\.[a-z_]+", ours)} <= known


def test_all_names_of_another_trainer_are_told_at_once() -> None:
    """A script for TRL was put right one name a run: "... (and 2 more in this recipe)"."""
    sentence = refusal(
        {"trainer": {"learning_rate": 1e-5, "total_training_steps": 9, "lr": "x"}, "num_generations": 8}
    )
    assert all(name in sentence for name in ("is trainer.lr", "is trainer.steps", "is rollout.group_size"))
    assert sentence.endswith("(and 1 more in this recipe)")


@pytest.mark.parametrize(
    ("tree", "fields"),
    [
        ({"reward": {"weights": [1.0, 2.0]}}, ["reward.weights", "reward.functions"]),
        ({"reward": {"functions": []}}, ["reward.functions"]),
        ({"reward": {"functions": ["exact", "exact"]}}, ["reward.functions", "names one twice"]),
        (
            {"reward": {"functions": ["code_tests"], "isolation": "off"}},
            ["reward.isolation", "code_tests"],
        ),
        ({"trainer": {"betas": [0.9]}}, ["trainer.betas"]),
        ({"trainer": {"betas": [0.9, 1.0]}}, ["trainer.betas"]),
        ({"trainer": {"steps": 5, "warmup_steps": 5, "schedule": "cosine"}}, ["trainer.warmup_steps"]),
        ({"trainer": {"minibatches": 257}}, ["trainer.minibatches", "rollout.prompts_per_step"]),
        ({"pipeline": {"staleness": 100}}, ["pipeline.staleness is 100", "100 trainer.steps"]),
        ({"rollout": {"stop": ["", "END"]}}, ["rollout.stop"]),
        ({"task": {"max_turns": 3}}, ["task.max_turns", "task.tools"]),
        ({"task": {"tools": ["calculator"]}}, ["task.tools", "task.max_turns"]),
        ({"eval": {"k": 4, "temperature": 0.0}}, ["eval.k", "eval.temperature"]),
    ],
)
def test_cross_field_faults_name_both_fields(tree: dict[str, Any], fields: list[str]) -> None:
    sentence = refusal(tree)
    assert all(field in sentence for field in fields)


def test_a_mixture_is_read_and_written_back() -> None:
    text = """
    [[task.mix]]
    name = "sums"
    params = {digits = 2}
    weight = 2
    rewards = ["exact"]
    [[task.mix]]
    name = "guess"
    source = "seeds"
    env = "ostinato.env.games:GuessNumber"
    max_turns = 4
    rewards = ["env"]
    [reward]
    functions = ["exact", "env"]
    weights = [0.5, 0.5]
    """
    recipe = Recipe.parse(tomllib.loads(text))
    assert list(recipe.task.by_name) == ["sums", "guess"] and list(Recipe().task.by_name) == [""]
    assert recipe.judges("guess").functions == ("env",) and recipe.judges("guess").full_marks == 0.5
    assert Recipe.parse(tomllib.loads(dump_toml(recipe))) == recipe


def test_a_typo_is_named_first_and_the_rest_is_counted() -> None:
    sentence = refusal({"seed": -1, "trainer": {"stesp": 1, "lr": "x"}})
    assert sentence.startswith("trainer.stesp is not a key")
    assert sentence.endswith("(and 2 more in this recipe)")


def test_files_that_are_missing_or_not_toml(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist; did you mean quickstart"):
        Recipe.load("quikstart.toml")
    with pytest.raises(ValueError, match="does not exist; give a TOML file"):
        Recipe.load(tmp_path / "zzz.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[trainer\nsteps = 3")
    with pytest.raises(ValueError, match=r"is not valid TOML.*line 1"):
        Recipe.load(broken)


KEYS = st.text(string.printable + "\u00e9\u4e2d", min_size=1, max_size=8)
SCALARS = st.one_of(
    st.integers(-(2**62), 2**62), st.floats(allow_nan=False, allow_infinity=False), st.booleans()
)
VALUES = st.recursive(
    SCALARS | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.slow
@given(
    params=st.dictionaries(KEYS, VALUES, max_size=4),
    lr=st.floats(1e-12, 1e3),
    prompt=st.text(max_size=40),
    steps=st.integers(1, 10**9),
    clip=st.floats(0, 10),
)
def test_dump_and_parse_are_inverse(
    params: dict[str, Any], lr: float, prompt: str, steps: int, clip: float
) -> None:
    recipe = Recipe.parse(
        {
            "task": {"params": params, "system_prompt": prompt},
            "trainer": {"lr": lr, "steps": steps},
            "algo": {"name": "dapo", "clip_high": clip},
            "engine": {"threads": 2},
        }
    )
    assert Recipe.parse(tomllib.loads(dump_toml(recipe))) == recipe


def test_what_is_no_utf8_on_the_command_line_is_refused(tmp_path: Path) -> None:
    """Bytes of an argument become halves of surrogate pairs, and the run ended where recipe.toml was written,
    its folder left behind."""
    (tmp_path / "tiny.toml").write_text("")
    with pytest.raises(ValueError, match=r"'task.source' is '\\udcff.jsonl', which is not UTF-8"):
        Recipe.load(tmp_path / "tiny.toml", "task.source=\udcff.jsonl")


def test_a_recipe_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text("[trainer]\nsteps = " + "[" * 100_000)
    with pytest.raises(ValueError, match="not valid TOML: nested deeper"):
        Recipe.load(tmp_path / "deep.toml")


# ---- docs/recipe.md is what ``config.reference`` writes; the keys of ``[algo]`` are those of ``Algorithm``


PAGE = Path(__file__).parents[3] / "docs" / "recipe.md"


def test_the_page_is_generated() -> None:
    fix = "run: python -m ostinato.config.reference > docs/recipe.md"
    assert PAGE.read_text(encoding="utf-8") == reference(), fix


def test_keys_and_defaults_of_algo_are_those_of_the_class() -> None:
    read = {name: tomllib.loads(f"x = {default}")["x"] for name, _, default, _ in algorithm_keys()}
    real = {field.name: field.default for field in dataclasses.fields(Algorithm)}
    assert read == {name: value for name, value in real.items() if name not in ("name", "overridden")}


def test_a_comment_belongs_to_the_field_of_its_line() -> None:
    source = "class A:\n  x: int = 1  # first # part\n  y: str = (\n    'z'\n  )  # last line\n  z: int = 0\n"
    assert comments_of(source) == {"A": {"x": "first # part", "y": "last line", "z": ""}}
