"""When a run has collapsed, and that the arms of the study are recipes."""

from __future__ import annotations

from pathlib import Path

from lab.collapse import collapse_step
from ostinato.ablate.jobs import plan
from ostinato.algo.algorithms import algorithm


def test_a_collapse_lasts_for_twenty_steps_or_to_the_end() -> None:
    assert collapse_step([0.2, 0.6, 0.7] * 10) is None
    assert collapse_step([0.8] * 10 + [0.0] * 15 + [0.8] * 20) is None, "it came back"
    assert collapse_step([0.8] * 10 + [0.0] * 30) == collapse_step([0.8] * 10 + [0.0] * 8) == 13
    assert collapse_step([0.8] * 10 + [0.0] * 4) is None, "too late to say"


def test_the_arms_are_recipes(repository: Path, tmp_path: Path) -> None:
    jobs = plan(repository / "recipes/arms/collapse.toml", (), seeds=[10], out=tmp_path)
    rules = {job.arm: algorithm(job.recipe.algo.name, **job.recipe.algo.overrides) for job in jobs}
    assert len(rules) == 8
    assert {arm for arm, one in rules.items() if not one.decoupled} == {"the recipe", "bypass"}
