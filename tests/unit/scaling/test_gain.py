"""Gains of arms: H is what it says, and 90 % intervals hold what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.apps.scaling.gain import (
    Outcomes,
    compute_headroom_gain,
    compute_logit_gain,
    estimate_gains,
    estimate_ratio,
    find_compute_to,
    find_front,
)
from ostinato.rollout.health import compute_pass_at_k

share = st.floats(0.0, 1.0)
P, S, K, EXPERIMENTS, DRAWS = 80, 3, 4, 240, 400


@given(share, share)
def test_h_is_the_relative_reduction_of_the_error(pre: float, post: float) -> None:
    found = compute_headroom_gain(np.array(pre), np.array(post))
    if pre > 1 - 1e-9:
        assert np.isnan(found)
        return
    assert found == pytest.approx(1 - (1 - post) / (1 - pre), abs=1e-6, rel=1e-6)


@given(share, share)
def test_a_logit_gain_is_finite_and_odd(pre: float, post: float) -> None:
    one, back = (
        compute_logit_gain(np.array(pre), np.array(post), 50),
        compute_logit_gain(np.array(post), np.array(pre), 50),
    )
    assert math.isfinite(one) and one == pytest.approx(-back)


def test_an_arm_at_the_ceiling_has_no_h() -> None:
    full = Outcomes(pre=np.ones(4), post=np.ones((2, 4)))
    found = estimate_gains({"full": full}, draws=50)["full"]
    assert math.isnan(found.H.low) and found.raw.low == found.raw.high == 0


def test_ratios_of_pairs_are_geometric_and_one_pair_has_no_interval() -> None:
    found, alone = estimate_ratio([3.0, 300.0], [3.0, 3.0]), estimate_ratio([4.0], [2.0])
    assert found is not None and found.median == pytest.approx(10)
    assert math.log(found.high / 10) == pytest.approx(6.314 * math.log(10), rel=1e-3)  # t of one degree
    assert alone is not None and alone.median == pytest.approx(2) and math.isnan(alone.low)
    assert estimate_ratio([1.0], [0.0]) is estimate_ratio([math.inf], [1.0]) is estimate_ratio([], []) is None


def planted(rng: np.random.Generator, gain: float, problems: np.ndarray) -> Outcomes:
    """Answers of an arm: problems differ, seeds differ by 0.3 in the logit, and answers are drawn."""

    def solved(logits: np.ndarray) -> np.ndarray:
        return rng.binomial(K, 1 / (1 + np.exp(-logits))) / K

    seeds = rng.normal(0, 0.3, (S, 1))
    return Outcomes(pre=solved(problems), post=solved(problems + gain + seeds))


def truth(gain: float) -> tuple[float, float]:
    """Mean score before and after of all problems, with the mean seed."""
    rng = np.random.default_rng(1)
    z = rng.normal(0, 1.2, 200_000)
    after = z + gain + rng.normal(0, 0.3, len(z))
    return float(np.mean(1 / (1 + np.exp(-z)))), float(np.mean(1 / (1 + np.exp(-after))))


def test_the_interval_of_h_holds_it_in_nine_of_ten_experiments() -> None:
    rng, (pre, post) = np.random.default_rng(5), truth(0.8)
    true, held = float(compute_headroom_gain(np.array(pre), np.array(post))), 0
    for n in range(EXPERIMENTS):
        arm = planted(rng, 0.8, rng.normal(0, 1.2, P))
        found = estimate_gains({"arm": arm}, draws=DRAWS, seed=n)["arm"].H
        held += found.low <= true <= found.high
    assert 0.86 <= held / EXPERIMENTS <= 0.94


@pytest.mark.slow
def test_equal_arms_differ_at_the_nominal_rate_alone() -> None:
    """Two arms of one law on the same problems: 0 is in the interval of their difference."""
    rng, held = np.random.default_rng(6), 0
    for n in range(EXPERIMENTS):
        problems = rng.normal(0, 1.2, P)
        arms = {name: planted(rng, 0.8, problems) for name in ("a", "b")}
        less = estimate_gains(arms, draws=DRAWS, seed=n)["b"].less["H"]
        held += less.low <= 0 <= less.high
    assert 0.86 <= held / EXPERIMENTS <= 0.94


def test_pairs_tell_more_than_either_arm() -> None:
    rng = np.random.default_rng(7)
    problems = rng.normal(0, 1.2, P)
    arms = {"a": planted(rng, 0.2, problems), "b": planted(rng, 1.2, problems)}
    found = estimate_gains(arms, draws=DRAWS)
    assert found["a"].less == {} and found["b"].less["raw"].low > 0
    wide = found["a"].post.width + found["b"].post.width
    assert found["b"].less["post"].width < wide
    assert found["b"].raw.median == pytest.approx(float((arms["b"].post.mean(0) - arms["b"].pre).mean()))


def test_compute_to_a_threshold_is_between_its_neighbours() -> None:
    C, score = [1.0, 10.0, 100.0], [0.2, 0.2, 0.6]
    assert find_compute_to(C, score, 0.4) == pytest.approx(10 * math.sqrt(10))
    assert find_compute_to(C, score, 0.7) == math.inf
    assert find_compute_to(C, score, 0.1) == 1.0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_the_front_is_what_nobody_beats(points: list[tuple[int, int]]) -> None:
    found = {points[n] for n in find_front([(float(a), float(b)) for a, b in points])}
    twin = {one for one in points if not any(o != one and o[0] <= one[0] and o[1] >= one[1] for o in points)}
    assert found == twin


def test_compute_pass_at_k_is_the_known_one() -> None:
    assert compute_pass_at_k(4, 1, 2) == pytest.approx(0.5)
