"""recipes/rl_loop.py is the documentation of the loop, so it has to run, and to learn."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ostinato.algo.algorithms import algorithm

RECIPE = Path(__file__).parents[2] / "recipes" / "rl_loop.py"


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rl_loop", RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rl_loop"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["grpo", "dapo", "cispo", "gspo", "rloo", "reinforce_pp"])
def test_a_random_mixture_of_experts_learns_to_say_even_numbers(recipe: ModuleType, name: str) -> None:
    steps = 4 if name == "gspo" else 12  # a clip of 4e-3 is for models that move in small steps
    run = recipe.train(recipe.even_numbers(), steps=steps, prompts=8, group_size=8, algorithm=algorithm(name))
    rows = asyncio.run(run)
    assert rows[0]["reward"] == pytest.approx(0.5, abs=0.1)
    assert rows[-1]["reward"] > (0.8 if steps == 12 else 0.5)


def test_the_packaged_model_takes_the_same_steps(recipe: ModuleType) -> None:
    if not (recipe.SEED_MOE / "config.json").is_file():
        pytest.skip("seed-moe is not packaged")
    task = recipe.arithmetic(recipe.SEED_MOE)
    rows = asyncio.run(recipe.train(task, steps=2, prompts=4, group_size=4, algorithm=algorithm("grpo")))
    assert all(0 <= row["reward"] <= 1 for row in rows)
