"""recipes/scalerl.toml says what the paper says, and each of its arms changes what its name says."""

from __future__ import annotations

from typing import Any

import nouns
import numpy as np
import pytest
from small_loop import TEN_A_ROW

from ostinato.algo.advantages import Baseline, Pool, Scale
from ostinato.algo.algorithms import Anchor, Loss
from ostinato.algo.offpolicy import Correction
from ostinato.algo.pack import Aggregation, aggregation_weights, pack
from ostinato.config import Recipe
from ostinato.launch.caveats import caveats
from ostinato.launch.checks import check
from ostinato.launch.loop import new_plan
from ostinato.launch.solved import solved_at
from ostinato.types import Sample

RECIPE = Recipe.load("scalerl")
ARMS = RECIPE.ablate.arms


def leaves(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict) and path == ""
        found |= leaves(value, f"{key}.") if nested else {f"{path}{key}": value}
    return found


def test_it_is_the_papers_recipe() -> None:
    """arXiv 2510.13786, section 4 and appendix A.3; what depends on the size of a model is its own."""
    chosen = check(RECIPE)
    assert (chosen.loss, chosen.ratio_cap, chosen.anchor) == (Loss.CISPO, 5.0, Anchor.AUTO)
    assert (chosen.baseline, chosen.scale) == (Baseline.GROUP_MEAN, Scale.BATCH)
    assert (chosen.aggregation, chosen.batch_pool) == (Aggregation.PROMPT, Pool.KEPT)
    assert chosen.drop_zero_variance and chosen.correction is Correction.NONE
    assert (chosen.kl_coef, chosen.entropy_coef, chosen.overlong_buffer) == (0, 0, 0)
    assert RECIPE.model.fp32_head and RECIPE.rollout.solved_for_good == 0.9
    assert len(RECIPE.rollout.interrupt_after) == 2 and RECIPE.forecast.enabled
    trainer = RECIPE.trainer
    assert (trainer.eps, trainer.weight_decay, trainer.schedule) == (1e-15, 0.01, "constant")
    assert trainer.warmup_steps > 0 and solved_at(RECIPE.reward) == pytest.approx(1, abs=1e-5)


def sample_of(group: int, member: int, length: int) -> Sample:
    """An answer of ``length`` tokens to a prompt of 12."""
    return nouns.sample_of(12 + length, 12, group=group, uid=f"{group}#{member}")


@pytest.mark.parametrize("name", ARMS)
def test_an_arm_changes_what_it_says_and_nothing_else(name: str) -> None:
    arm = Recipe.load("scalerl", *ARMS[name])
    check(arm)
    before, after = leaves(RECIPE.model_dump(mode="json")), leaves(arm.model_dump(mode="json"))
    changed = {key for key in after if before.get(key) != after[key]}
    assert changed == {override.partition("=")[0] for override in ARMS[name]}


def test_the_off_policy_arm_takes_as_many_optimizer_steps_on_as_many_prompts() -> None:
    """Counted on what its trainer is given, not on its keys: their products agreed while one optimizer step
    had 11 prompts and another 29."""
    arm = Recipe.load("scalerl", *ARMS["PPO-off-policy-8"])

    def steps(recipe: Recipe) -> list[int]:
        """Prompts of each optimizer step of a run in which every group is kept."""
        plan, rng = new_plan(recipe, TEN_A_ROW, 44), np.random.default_rng(0)
        samples = [
            sample_of(group, member, length)
            for group in range(plan.prompts_per_step)
            for member, length in enumerate(rng.integers(8, 45, plan.group_size).tolist())
        ]
        weights = aggregation_weights(samples, check(recipe).aggregation)
        budget = plan.tokens_per_microbatch
        batch = pack(samples, weights, tokens_per_microbatch=budget, minibatches=plan.minibatches)
        groups = [{uid.partition("#")[0] for one in each for uid in one.uids} for each in batch.minibatches]
        return plan.steps * [len(each) for each in groups]

    assert steps(arm) == steps(RECIPE) == RECIPE.trainer.steps * [RECIPE.rollout.prompts_per_step]
    warmed = arm.trainer.warmup_steps * arm.trainer.minibatches
    assert RECIPE.trainer.warmup_steps <= warmed < RECIPE.trainer.warmup_steps + arm.trainer.minibatches


def test_what_cannot_be_is_refused_and_what_is_not_corrected_is_said() -> None:
    with pytest.raises(
        ValueError, match=r"rollout\.solved_for_good is 0\.9 with rollout\.group_size 1, and one"
    ):
        Recipe.load("scalerl", "rollout.group_size=1")
    with pytest.raises(
        ValueError, match=r"algo\.overlong_scope has no effect because algo\.overlong_buffer is 0"
    ):
        check(Recipe.load("scalerl", "algo.overlong_scope=solved"))
    stale = Recipe.load("scalerl", "pipeline.staleness=8")
    assert not any("staleness" in line for line in caveats(stale, check(stale)))
    blind = Recipe.load("scalerl", "pipeline.staleness=8", "algo.anchor=trainer")
    assert any("pipeline.staleness is 8, and nothing in" in line for line in caveats(blind, check(blind)))
