"""The time that a run says it will take, before its first step: arithmetic on timed passes, no clock."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ostinato.config import Recipe
from ostinato.engine.local import LocalEngine
from ostinato.every import NEVER, Every
from ostinato.launch.expect import Lengths, Pace, expected, paced
from ostinato.launch.loop import new_flops
from ostinato.launch.trainer import new_adapters, new_trainer
from ostinato.model.config import read_config
from ostinato.model.hf import load_model
from ostinato.model.named import model_folder
from ostinato.pipeline.evaluate import Evaluation
from ostinato.types import Prompt, Sampling

LENGTH = Lengths(prompt=10, answer=40)
PACE = Pace(rows=(1, 4, 8), seconds=(0.01, 0.04, 0.08), trained_row=0.001, max_batch=8)  # 10 ms a row


def recipe(**trainer: Any) -> Recipe:
    sizes = {"prompts_per_step": 2, "group_size": 4, "max_tokens": 40}
    tree = {"model": {"dtype": "float32"}, "adapter": {"rank": 4}, "rollout": sizes, "trainer": trainer}
    return Recipe.parse(tree)


def evaluation(every: Every = NEVER, factor: int = 1) -> Evaluation:
    prompts = [Prompt(uid=str(number), text="1 + 1") for number in range(4)]
    return Evaluation(
        split="eval", prompts=prompts, sampling=Sampling(), every=every, start_factor=factor, samples=1
    )


def test_passes_in_proportion_to_rows_make_the_time_of_a_rollout_that_of_its_tokens() -> None:
    """However many answers go on at once: 8 of 40 tokens, and 20 of which 8 fit."""
    for answers in (8, 20):
        found = PACE.sampling(2, answers, LENGTH, mean=40.0)
        assert found == pytest.approx(0.01 * (2 * 10 + answers * 40))
    shorter = PACE.sampling(2, 8, LENGTH, mean=10.0)
    assert shorter == pytest.approx(0.01 * (20 + 8 * 10), rel=0.1), "even lengths up to twice the mean"


def test_a_run_is_its_steps_and_its_evaluations() -> None:
    flops = new_flops(recipe(), read_config(model_folder("asset:seed-moe")), None)
    found = expected(PACE, recipe(steps=10), LENGTH, flops, [evaluation(Every(amount=4.0), factor=3)])
    rows = 2 * 10 + 8 * 40
    assert found.step[1] == pytest.approx(0.01 * rows + 0.001 * rows)
    once = 0.01 * (4 * 10 + 4 * 40)
    assert found.evaluations[1] == pytest.approx((3 + 2 + 1) * once), "before, at 4 and 8, at the end"
    assert found.total[1] == pytest.approx(10 * found.step[1] + found.evaluations[1])
    assert found.total[0] < found.total[1] and found.answers == (10, 40)
    later = expected(PACE, recipe(steps=10), LENGTH, flops, [evaluation()], done=8)
    assert later.steps == 2 and later.evaluations[1] == pytest.approx(once), "none before what goes on"
    assert "2 steps of 1.1 to 3.7 s" in str(expected(PACE, recipe(steps=2), LENGTH, flops, []))


def test_what_is_timed_changes_neither_engine_nor_trainer() -> None:
    """The weights, the optimizer and the random numbers of a run do not depend on whether it was timed."""
    asked = recipe(steps=4)
    decoder = load_model(model_folder("asset:seed-moe"))
    adapters = new_adapters(asked, decoder)
    engine, trainer = LocalEngine(decoder, kv_memory_mb=16), new_trainer(asked, decoder, adapters)
    before = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    counters = trainer.counters()
    short = Lengths(prompt=3, answer=6)
    pace = paced(engine, trainer, asked, short, new_flops(asked, decoder.config, adapters))
    assert pace.rows == (1, 2, 8) and min(*pace.seconds, pace.trained_row) > 0
    assert trainer.counters() == counters
    after = trainer.tensors()
    assert before.keys() == after.keys()
    assert all(np.array_equal(tensor, after[name].detach()) for name, tensor in before.items())
    assert engine.counters.steps == 0 and not any(leaf.grad is not None for leaf in decoder.parameters())
