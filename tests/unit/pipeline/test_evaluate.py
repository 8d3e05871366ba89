"""Evaluation: the same noise every time, nothing failed scored 0; reward functions that fail."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.fake_engine import FakeEngine
from small_loop import Bench, IsRight, LoopState

from ostinato.every import Axis, Every, spent_in_steps
from ostinato.pipeline.evaluate import (
    Evaluation,
    compute_answer_error,
    compute_mean_and_error,
    digest_evaluation,
    digest_prompts,
    evaluate_groups,
    is_due,
)
from ostinato.pipeline.failed import RewardFails
from ostinato.rollout.rollout import RolloutContext
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
        answer = [trajectory.turns[0].completion.tokens[0] for trajectory in group.trajectories]
        return [Reward(value=None if mute else float(token == 1), reason="mute") for token in answer]


def uniform(adapters: Any, request: Request, answer: Sequence[int]) -> np.ndarray:
    return np.zeros(2)


def stage() -> RolloutContext:
    return RolloutContext(
        engine=FakeEngine(uniform),
        env=Once,
        grader=SaysOne(),
        sampling=Sampling(max_tokens=9, temperature=0.5),
        context_limit=64,
    )


def prompts(n: int) -> list[Prompt]:
    return [Prompt(uid=f"p{i}", text=str(i)) for i in range(n)]


def row(evaluation: Evaluation, step: int = 3) -> dict[str, Any]:
    return asyncio.run(evaluate_groups(stage(), evaluation, step))[0]


@pytest.mark.slow
def test_a_fair_coin() -> None:
    """128 prompts, 4 tosses each: pass@1 is 1/2, pass@2 is 3/4, errors are those of means over prompts."""
    figures = row(Evaluation(split="eval", prompts=prompts(128), sampling=SAMPLING, samples=4, k=2))
    assert (figures["step"], figures["split"], figures["n"], figures["k"]) == (3, "eval", 128, 2)
    assert figures["pass@1"] == pytest.approx(0.5, abs=3 * figures["stderr"])
    assert figures["stderr"] == pytest.approx(0.25 / math.sqrt(128), rel=0.2)
    assert figures["pass@k"] == pytest.approx(0.75, abs=3 * figures["pass@k_stderr"])
    assert figures["reward"] == figures["pass@1"]
    assert figures["completions/mean_length"] == 1  # the evaluation's sampling, not the stage's


def test_a_mixture_has_a_score_per_task() -> None:
    mixed = [replace(one, task="ab"[i % 4 == 3]) for i, one in enumerate(prompts(64))]
    evaluation = Evaluation(split="eval", prompts=mixed, sampling=SAMPLING, samples=4)
    figures = row(evaluation)
    tasks = figures["tasks"]
    assert (list(tasks), tasks["a"]["n"], tasks["b"]["n"]) == (["a", "b"], 48, 16)
    assert (48 * tasks["a"]["pass@1"] + 16 * tasks["b"]["pass@1"]) / 64 == pytest.approx(figures["pass@1"])
    alone = row(replace(evaluation, prompts=mixed[:3]))["tasks"]["a"]  # the first three are of task a
    assert alone["n"] == 3 and "tasks" not in row(replace(evaluation, prompts=prompts(4)))


def test_the_answers_that_are_shown_have_the_right_one_beside_them() -> None:
    asked = [replace(prompts(1)[0], columns={"answer": 7}), replace(prompts(2)[1], columns={})]
    shown = row(Evaluation(split="eval", prompts=asked, sampling=SAMPLING))["answers"]
    assert shown[0]["answer"] == "7" and "answer" not in shown[1]


def test_common_random_numbers() -> None:
    evaluation = Evaluation(split="eval", prompts=prompts(32), sampling=SAMPLING, seed=5)
    first, second = row(evaluation, step=0), row(evaluation, step=100)
    for figures in (first, second):  # NaN is not equal to itself
        assert math.isnan(figures.pop("answer_stderr")) and math.isnan(figures.pop("reward_answer_stderr"))
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


# ---- two standard errors


@given(st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=5), min_size=1, max_size=6))
def test_the_error_for_these_prompts_by_hand(answers: list[list[float]]) -> None:
    """Its twin in plain Python: the variance of a mean of independent means, each variance unbiased."""
    variance = 0.0
    for values in answers:
        mean = sum(values) / len(values)
        unbiased = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        variance += unbiased / len(values) / len(answers) ** 2
    assert compute_answer_error([np.array(values) for values in answers]) == pytest.approx(
        math.sqrt(variance)
    )


@pytest.mark.parametrize(("shape", "seed"), [((0.5, 0.5), 1), ((2.0, 2.0), 2), ((8.0, 1.0), 3)])
def test_which_spread_the_two_errors_estimate(shape: tuple[float, float], seed: int) -> None:
    """40 prompts whose pass rates are Beta(a, b), 8 answers each, 2,000 times. With the prompts fixed the
    score spreads as ``answer_stderr`` says, with fresh prompts as ``stderr`` says, and that is more."""
    rng = np.random.default_rng(seed)
    rates = rng.beta(*shape, size=40)
    fixed = rng.random((2000, 40, 8)) < rates[:, None]
    fresh = rng.random((2000, 40, 8)) < rng.beta(*shape, size=(2000, 40, 1))
    within = np.sqrt(
        np.mean([compute_answer_error(list(answers.astype(float))) ** 2 for answers in fixed[::10]])
    )
    over = np.sqrt(
        np.mean([compute_mean_and_error(answers.mean(1).tolist())[1] ** 2 for answers in fresh[::10]])
    )
    assert within == pytest.approx(fixed.mean((1, 2)).std(), rel=0.05)
    assert over == pytest.approx(fresh.mean((1, 2)).std(), rel=0.05)
    assert within < 0.9 * over


# ---- before training, and by name


def test_the_score_before_training_has_the_later_answers_among_its_own() -> None:
    """Common random numbers: with an unchanged policy, the first k answers of each prompt at step 0 are those
    of every later evaluation."""
    measure = Evaluation(split="eval", prompts=prompts(16), sampling=SAMPLING, samples=2, k=2, start_factor=4)

    def answer(step: int) -> tuple[dict[str, Any], list[list[int]]]:
        found, groups = asyncio.run(evaluate_groups(stage(), measure, step))
        return found, [[int(t.turns[0].completion.tokens[0]) for t in group.trajectories] for group in groups]

    (first, before), (later, after) = answer(0), answer(7)
    assert (first["samples"], later["samples"], first["k"], later["k"]) == (8, 2, 2, 2)
    assert [answers[:2] for answers in before] == after
    assert first["held_out"] == later["held_out"]
    assert first["answer_stderr"] < later["answer_stderr"]


def test_sets_have_noise_of_their_own() -> None:
    one, other = (
        row(Evaluation(split="eval", name=name, prompts=prompts(32), sampling=SAMPLING, samples=4))
        for name in ("eval", "hard")
    )
    assert (one["set"], other["set"]) == ("eval", "hard")
    assert one["pass@1"] != other["pass@1"]


MEASURE = Evaluation(split="eval", prompts=prompts(4), sampling=SAMPLING, samples=2, k=2)


@pytest.mark.parametrize(
    "change",
    [
        {"prompts": prompts(3)},
        {"prompts": prompts(4)[::-1]},
        {"prompts": [*prompts(3), Prompt(uid="p3", text="other")]},
        {"prompts": [*prompts(3), Prompt(uid="p3", text="3", columns={"answer": 7})]},
        {"sampling": Sampling(max_tokens=2)},
        {"sampling": Sampling(max_tokens=1, temperature=0.5)},
        {"k": 1},
        {"solved_at": 0.5},
        {"rules": "another reward"},
    ],
    ids=str,
)
def test_what_changes_the_expected_score_changes_its_name(change: dict[str, Any]) -> None:
    assert digest_evaluation(replace(MEASURE, **change)) != digest_evaluation(MEASURE)


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 8},
        {"seed": 9},
        {"start_factor": 4},
        {"name": "hard"},
        {"weights": "int8"},
        {"every": Every(amount=3)},
        {"sampling": Sampling(max_tokens=1, stop_tokens=(5,))},
    ],
    ids=str,
)
def test_what_does_not_change_it_does_not(change: dict[str, Any]) -> None:
    assert digest_evaluation(replace(MEASURE, **change)) == digest_evaluation(MEASURE)
    assert len(digest_evaluation(MEASURE)) == 12 and int(digest_evaluation(MEASURE), 16)


def test_the_prompts_have_a_name_of_their_own() -> None:
    """An arm that samples, answers or is judged by other rules has another held-out name, and what it is
    scored on could not be distinguished from other prompts."""
    others: list[dict[str, Any]] = [
        {"sampling": Sampling(max_tokens=2, temperature=0.5)},
        {"rules": "another reward"},
        {"k": 1, "samples": 8, "solved_at": 0.5},
    ]
    for change in others:
        assert digest_prompts(replace(MEASURE, **change)) == digest_prompts(MEASURE)
    changed = [*prompts(3), Prompt(uid="p3", text="3", columns={"answer": 7})]
    assert digest_prompts(replace(MEASURE, prompts=changed)) != digest_prompts(MEASURE)
    assert row(MEASURE)["prompts"] == digest_prompts(MEASURE) != row(MEASURE)["held_out"]


# ---- when


@given(
    st.lists(st.floats(0.01, 50), min_size=1, max_size=40), st.floats(0.1, 100), st.sets(st.integers(1, 40))
)
def test_a_schedule_in_compute(costs: list[float], amount: float, skipped: set[int]) -> None:
    """Steps of any cost. Without interruptions, a set is scored after exactly the steps in which another
    multiple of the amount was passed; an evaluation that was left out is made after the next step."""
    measure = replace(MEASURE, every=Every(amount=amount, unit=Axis.TOKENS))

    def scored(skipped: set[int]) -> list[int]:
        last, total, found = None, 0.0, []
        for step, cost in enumerate(costs, start=1):
            total += cost
            now = spent_in_steps(step, {"total/sampled_tokens": total})
            if step not in skipped and is_due(measure, now, last, ended=False):
                found.append(step)
                last = {"step": step, "spent": now}
                assert not is_due(measure, now, last, ended=True)  # never twice
        return found

    sums = np.cumsum([0.0, *costs])
    crossed = [step for step in range(1, len(sums)) if sums[step] // amount > sums[step - 1] // amount]
    assert scored(set()) == crossed
    made_up = scored(skipped)
    for step in crossed:
        later = next((n for n in range(step, len(sums)) if n not in skipped), None)
        assert later is None or later in made_up


# ---- reward functions that fail: what ends a run, what is kept and reported of the others


TRACE = "Traceback (most recent call last):\n  File \"/rewards.py\", line 3, in graded\nKeyError: 'gold'"
REASON = "raised: KeyError: 'gold' (rewards.py:3)"


class Failing(IsRight):
    """Raises for the groups whose number ``at`` names, in the order in which they are graded."""

    def __init__(self, at: Any) -> None:
        super().__init__()
        self.at, self.graded = at, 0

    async def grade(self, group: Group) -> list[Reward]:
        number, self.graded = self.graded, self.graded + 1
        rewards = await super().grade(group)
        if not self.at(number):
            return rewards
        reason = REASON.replace("raised: ", "raised: graded: ", 1)
        failed = {"graded": f"{REASON}\n{TRACE}"}
        return [Reward(value=None, reason=reason, parts={"graded": None}, failed=failed) for _ in rewards]


def test_a_reward_that_fails_for_all_of_the_first_evaluation_ends_the_run(tmp_path: Path) -> None:
    """It ran to its end, wrote an adapter and returned 0; the cause was reported once, without file or
    line."""
    bench = Bench(tmp_path, grader=Failing(lambda number: True))
    with pytest.raises(RewardFails) as caught:
        bench.run()
    assert str(caught.value) == (
        "reward graded gave no verdict to any of the 32 answers of the evaluation of the set eval at step 0 "
        f"({REASON}); fix it"
    )
    assert caught.value.__notes__ == [f"{TRACE}\nprompt e7, completion '1 6'"]
    assert not bench.rows and not bench.saved and not list(bench.folder.eval.rows())
    (row,) = bench.folder.failed.rows()
    assert (row["step"], row["part"], row["count"], row["of"], row["stopped"]) == (0, "eval", 32, 32, True)
    again = Bench(tmp_path, steps=1)
    again.run()
    assert [row["step"] for row in again.folder.eval.rows()] == [0, 1], "fixed, it is scored after all"
    assert not list(again.folder.failed.rows())


def test_a_reward_that_fails_later_is_counted_and_its_last_traceback_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, grader=Failing(lambda number: number in (3, 8, 9)), steps=2)
    bench.run()
    rows = list(bench.folder.failed.rows())
    assert [(row["step"], row["part"], row["count"], row["of"]) for row in rows] == [
        (0, "eval", 4, 32),
        (1, "train", 16, 32),
    ]
    assert rows[1]["function"] == "graded" and rows[1]["trace"] == TRACE
    assert rows[1]["detail"] == REASON and not rows[1]["stopped"]
    reported = [note for note in caplog.messages if "reported once" in note]
    assert reported == [
        "step 0: raised: graded: KeyError: 'gold' (rewards.py:3) (reported once; faults/raised counts them)"
    ]
    assert TRACE in caplog.messages
    later = Bench(tmp_path, state=LoopState(step=0), steps=1)
    later.folder.truncate_after(0)
    assert [row["step"] for row in later.folder.failed.rows()] == [0]
