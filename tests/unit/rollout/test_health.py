"""Health of the signal: hand-computed figures, and the unbiased pass@k."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion, episode
from nouns import group_of as group

from ostinato.rollout.health import (
    compute_health,
    compute_pass_at_k,
    compute_task_metrics,
    count_prefilled_tokens,
)
from ostinato.types import Reward, Stop, Trajectory


def member(
    reward: float | None, length: int = 2, stop: Stop = Stop.EOS, error: str = "", reason: str = ""
) -> Trajectory:
    verdict = None if stop is Stop.ERROR else Reward(value=reward, reason=reason, parts={"exact": reward})
    return episode(completion(length, stop=stop, cached_tokens=1), 3, reward=verdict, error=error)


def test_tasks_of_a_mixture_by_hand() -> None:
    groups = [group(member(1), member(0)), group(member(1), member(1)), group(member(0), member(0))]
    assert not compute_task_metrics(groups, 1.0)
    mixed = [
        replace(one, prompt=replace(one.prompt, task=task)) for one, task in zip(groups, "aab", strict=True)
    ]
    assert compute_task_metrics(mixed, 1.0) == {
        "tasks/a/share": pytest.approx(2 / 3),
        "tasks/a/reward": 0.75,
        "tasks/a/pass@1": 0.75,
        "tasks/a/frac_reward_zero_std": 0.5,
        "tasks/b/share": pytest.approx(1 / 3),
        "tasks/b/reward": 0.0,
        "tasks/b/pass@1": 0.0,
        "tasks/b/frac_reward_zero_std": 1.0,
    }


def test_by_hand() -> None:
    figures = compute_health(
        [
            group(member(1, 2), member(0, 4), member(0, 6, Stop.LENGTH), member(0, 4)),
            group(*[member(1, 3)] * 4),
            group(*[member(0, 1)] * 3, member(None, 1, reason="timeout: 10 s")),
            group(*[member(None, 5, Stop.ERROR, error="env: RuntimeError: x")] * 4),
        ]
    )
    assert figures["reward"] == pytest.approx(5 / 11)
    assert figures["reward_std"] == pytest.approx(math.sqrt(5 / 11 * 6 / 11 * 11 / 10))
    assert figures["reward_group_std"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert figures["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert figures["rewards/exact/mean"] == pytest.approx(5 / 11)
    assert [figures[f"solved_{name}"] for name in ("none", "some", "all")] == pytest.approx([1 / 3] * 3)
    assert figures["pass@1"] == pytest.approx((0.25 + 1 + 0) / 3)
    assert figures["k"] == 3  # the smallest judged group
    assert figures["pass@k"] == pytest.approx((0.75 + 1 + 0) / 3)
    assert figures["headroom"] == pytest.approx(0.5 / 3)
    assert figures["completions/mean_length"] == pytest.approx((16 + 12 + 4) / 12)
    assert (figures["completions/min_length"], figures["completions/max_length"]) == (1, 6)
    assert figures["completions/clipped_ratio"] == pytest.approx(1 / 12)
    assert figures["completions/max_terminated_length"] == 4
    assert (figures["rollout/trajectories"], figures["rollout/failed"], figures["rollout/no_verdict"]) == (
        16,
        4,
        1,
    )
    assert figures["tokens/sampled"] == 16 + 12 + 4 + 20
    assert figures["tokens/context"] == 16 * 3 and figures["tokens/prefilled"] == 16 * 2
    assert figures["faults/env"] == 4 and figures["faults/timeout"] == 1


def test_nothing_played_is_nan_and_not_zero() -> None:
    figures = compute_health([])
    for name in (
        "reward",
        "reward_std",
        "reward_group_std",
        "pass@1",
        "pass@k",
        "completions/mean_length",
        "completions/min_length",
    ):
        assert math.isnan(figures[name]), name
    assert figures["rollout/groups"] == 0


def test_prefill_counts_what_the_cache_did_not_hold() -> None:
    """Turn 0: 3 of prompt, 1 cached. Turn 1: history 3 + 2 + 3 = 8, of which 1 is recorded as cached."""
    twice = Trajectory(turns=member(1).turns * 2, stop=Stop.EOS, seed=(0,))
    assert count_prefilled_tokens(twice) == 2 + 7


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 7), data=st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    outcomes = [1] * c + [0] * (n - c)
    subsets = list(itertools.combinations(outcomes, k))
    assert compute_pass_at_k(n, c, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))
