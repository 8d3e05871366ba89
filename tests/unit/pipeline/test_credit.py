"""Credit assignment: every sampled token is trained on or wasted under one name; weights add up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion, episode
from nouns import group_of as group

from ostinato.algo.algorithms import algorithm
from ostinato.pipeline.credit import Credit, assign
from ostinato.rollout.health import sampled_tokens
from ostinato.types import Group, Stop, Trajectory


def member(reward: float | None, length: int = 4, stop: Stop = Stop.EOS, routed: bool = False) -> Trajectory:
    routes = [np.zeros((rows, 1, 1), np.int16) if routed else None for rows in (length, 2)]
    return episode(completion(length, stop=stop, experts=routes[0], prompt_experts=routes[1]), reward=reward)


def credit(groups: Sequence[Group], name: str, **overrides: object) -> Credit:
    return assign(groups, algorithm(name, **overrides), min_verdicts=2, answer_tokens=10)


def test_advantages_reach_the_tokens() -> None:
    made = credit([group(member(1, 2), member(0, 4))], "dr_grpo")
    assert [sample.advantages.tolist() for sample in made.samples] == [[0, 0, 0.5, 0.5], [0, 0] + [-0.5] * 4]
    assert [weight.tolist() for weight in made.weights] == [[0, 0, 0.05, 0.05], [0, 0] + [0.05] * 4]
    assert not made.wasted_tokens and not made.dropped_groups


def test_the_names_of_the_waste() -> None:
    made = credit(
        [
            group(member(1, 1), member(0, 2), member(0, 3, Stop.LENGTH)),
            group(member(1, 4), member(0, 5), member(None, 6), member(None, 7, Stop.ERROR)),
            group(member(1, 8), member(1, 9)),
            group(member(1, 10), member(None, 11)),
            group(member(0, 12, Stop.ERROR), member(0, 13, Stop.ERROR)),
        ],
        "grpo",
        drop_zero_variance=True,
        mask_truncated=True,
    )
    assert [sample.uid for sample in made.samples] == ["p#0", "p#1", "p#0", "p#1"]
    assert made.wasted_tokens == {
        "truncated": 3,
        "no_verdict": 6,
        "failed": 7 + 12 + 13,
        "zero_variance": 17,
        "too_few_verdicts": 21,
    }
    assert made.dropped_groups == {"zero_variance": 1, "too_few_verdicts": 1, "too_few_episodes": 1}


def test_a_truncated_member_is_part_of_the_baseline_though_not_trained_on() -> None:
    made = credit([group(member(1), member(0), member(0, 4, Stop.LENGTH))], "dr_grpo", mask_truncated=True)
    assert [sample.advantages[-1] for sample in made.samples] == pytest.approx([2 / 3, -1 / 3])


def test_overlong_answers_pay_before_they_are_compared() -> None:
    """DAPO's soft punishment over the last 2 of 10 tokens: rewards 1, 0.5, 0 from equal verdicts."""
    made = credit([group(member(1, 8), member(1, 9), member(1, 10))], "dapo")
    assert [sample.uid for sample in made.samples] == ["p#0", "p#2"]
    assert [sample.advantages[-1] for sample in made.samples] == pytest.approx([1, -1], abs=1e-3)
    assert made.wasted_tokens == {"zero_advantage": 9}


def test_the_length_penalty_of_scalerl_is_for_solved_answers_alone() -> None:
    """Eq. 9, L_max 10, L_cache 4: rewards of 1 fall by 1/4 a token from 6 on, those of -1 stay."""
    answers = [member(1, 6), member(1, 8), member(1, 12), member(-1, 8), member(-1, 12)]
    options = {"overlong_buffer": 0.4, "scale": "none", "aggregation": "sample"}
    wanted = np.array([1, 0.5, 0, -1, -1])
    made = credit([group(*answers)], "dapo", overlong_scope="solved", **options)
    assert [sample.advantages[-1] for sample in made.samples] == pytest.approx(wanted - wanted.mean())
    everyone = np.array([1, 0.5, 0, -1.5, -2])
    made = credit([group(*answers)], "dapo", **options)
    assert [sample.advantages[-1] for sample in made.samples] == pytest.approx(everyone - everyone.mean())


def test_groups_without_variance_keep_their_share_of_the_denominator() -> None:
    """Plain GRPO averages over all samples; skipping those without gradient must not amplify the others."""
    mixed = group(member(1), member(0))
    alone, beside = credit([mixed], "grpo"), credit([mixed, group(member(1), member(1))], "grpo")
    assert len(beside.samples) == 2 and beside.wasted_tokens == {"zero_advantage": 8}
    for a, b in zip(alone.weights, beside.weights, strict=True):
        np.testing.assert_allclose(b, a / 2)


def test_with_a_kl_term_a_zero_advantage_still_has_a_gradient() -> None:
    made = credit([group(member(1), member(1))], "grpo", kl_coef=0.1)
    assert len(made.samples) == 2 and not made.wasted_tokens


def test_samples_without_routes_are_left_out_beside_routed_ones() -> None:
    made = credit([group(member(1, routed=True), member(0))], "grpo")
    assert [sample.uid for sample in made.samples] == ["p#0"] and made.wasted_tokens == {"no_routes": 4}


OUTCOMES = st.tuples(
    st.sampled_from([0.0, 1.0, 0.5, None]),
    st.integers(1, 9),
    st.sampled_from([Stop.EOS, Stop.LENGTH, Stop.ERROR]),
)


@settings(max_examples=50, deadline=None)
@given(
    outcomes=st.lists(st.lists(OUTCOMES, min_size=2, max_size=4), min_size=1, max_size=4),
    name=st.sampled_from(["grpo", "dapo", "cispo", "rloo", "reinforce_pp", "gspo"]),
    mask_truncated=st.booleans(),
)
def test_tokens_are_conserved(outcomes: list, name: str, mask_truncated: bool) -> None:
    groups = [group(*(member(*outcome) for outcome in members)) for members in outcomes]
    made = credit(groups, name, mask_truncated=mask_truncated)
    trained = sum(int(sample.loss_mask.sum()) for sample in made.samples)
    sampled = sum(sampled_tokens(t) for g in groups for t in g.trajectories)
    assert trained + made.wasted_tokens.total() == sampled
    assert all(np.isfinite(sample.advantages).all() for sample in made.samples)
    assert sum(weight.sum() for weight in made.weights) <= 1 + 1e-9
    for sample, weight in zip(made.samples, made.weights, strict=True):
        assert (weight[~sample.loss_mask] == 0).all()
