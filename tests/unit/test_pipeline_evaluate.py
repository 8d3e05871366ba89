"""Evaluation: the same noise every time, errors over prompts, nothing failed scored 0."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ostinato.engine.fake import FakeEngine
from ostinato.pipeline.evaluate import Evaluation, evaluate, mean_and_error
from ostinato.rollout.play import Stage
from ostinato.types import Completion, Group, Prompt, Request, Reward, Sampling

SAMPLING = Sampling(max_tokens=1)


class Once:
    def __init__(self, prompt: Prompt) -> None:
        self._tokens = [int(prompt.text or 0)]

    def start(self) -> np.ndarray:
        return np.array(self._tokens, np.int32)

    async def step(self, completion: Completion) -> None:
        return None


class SaysOne:
    """Right is token 1; prompts named "mute" are never judged."""

    async def grade(self, group: Group) -> list[Reward]:
        mute = group.prompt.uid == "mute"
        said = [trajectory.turns[0].completion.tokens[0] for trajectory in group.trajectories]
        return [Reward(value=None if mute else float(token == 1), reason="mute") for token in said]


def uniform(adapters: Any, request: Request, said: Sequence[int]) -> np.ndarray:
    return np.zeros(2)


def stage() -> Stage:
    return Stage(
        engine=FakeEngine(uniform),
        env=Once,
        grader=SaysOne(),
        sampling=Sampling(max_tokens=9, temperature=0.5),
        context_limit=64,
    )


def prompts(n: int) -> list[Prompt]:
    return [Prompt(uid=f"p{i}", text=str(i)) for i in range(n)]


def row(evaluation: Evaluation, step: int = 3) -> dict[str, Any]:
    return asyncio.run(evaluate(stage(), evaluation, step))


def test_a_fair_coin() -> None:
    """128 prompts, 4 tosses each: pass@1 is 1/2, pass@2 is 3/4, errors are those of means over prompts."""
    figures = row(Evaluation(split="eval", prompts=prompts(128), sampling=SAMPLING, samples=4, k=2))
    assert (figures["step"], figures["split"], figures["n"], figures["k"]) == (3, "eval", 128, 2)
    assert figures["pass@1"] == pytest.approx(0.5, abs=3 * figures["stderr"])
    assert figures["stderr"] == pytest.approx(0.25 / math.sqrt(128), rel=0.2)
    assert figures["pass@k"] == pytest.approx(0.75, abs=3 * figures["pass@k_stderr"])
    assert figures["reward"] == figures["pass@1"]
    assert figures["completions/mean_length"] == 1  # the evaluation's sampling, not the stage's


def test_common_random_numbers() -> None:
    evaluation = Evaluation(split="eval", prompts=prompts(32), sampling=SAMPLING, seed=5)
    first, second = row(evaluation, step=0), row(evaluation, step=100)
    assert {**first, "step": 0, "seconds": 0} == {**second, "step": 0, "seconds": 0}
    other = row(Evaluation(split="eval", prompts=prompts(32), sampling=SAMPLING, seed=6))
    assert other["pass@1"] != first["pass@1"]


def test_the_unjudged_are_excluded_and_not_scored_zero() -> None:
    mixed = [*prompts(8), Prompt(uid="mute", text="1")]
    figures = row(Evaluation(split="eval", prompts=mixed, sampling=SAMPLING, samples=2, k=2))
    assert (figures["n"], figures["excluded"], figures["rollout/no_verdict"], figures["faults/mute"]) == (
        8,
        1,
        2,
        2,
    )
    assert (
        figures["pass@1"]
        == row(Evaluation(split="eval", prompts=mixed[:8], sampling=SAMPLING, samples=2))["pass@1"]
    )


def test_a_mean_of_one_has_no_error() -> None:
    assert mean_and_error([0.5]) == (0.5, pytest.approx(math.nan, nan_ok=True))
    assert all(map(math.isnan, mean_and_error([])))
    assert mean_and_error([0.0, 1.0]) == (0.5, 0.5)


def test_an_evaluation_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eval\.k is 3"):
        Evaluation(split="eval", prompts=prompts(1), sampling=SAMPLING, samples=2, k=3)
    with pytest.raises(ValueError, match=r"eval\.n is 0"):
        Evaluation(split="eval", prompts=[], sampling=SAMPLING)
