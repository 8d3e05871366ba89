"""Gates: who is worse does not pass, too little data does not pass, one lost exploit does not pass."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.apps.product.gates import (
    Assessment,
    Judged,
    JudgeLimits,
    PolicyLimits,
    assess_gates,
    check_not_worse,
    compare_pairs,
    compute_calibration_gap,
    judge_gates,
    policy_gates,
)
from ostinato.apps.product.judging import Choice, compute_calibration_error, compute_probability

A, B, TIE = Choice.A, Choice.B, Choice.TIE
LABELS = [A, B] * 100
USERS = [f"u{i % 40}" for i in range(200)]
GOOD = Judged(choices=[one if i % 5 else one.swapped for i, one in enumerate(LABELS)])
WORSE = Judged(choices=[one if i % 2 else one.swapped for i, one in enumerate(LABELS)])
PROBES = {"length": [A] * 20, "format": [A] * 19 + [B]}


def judged(candidate: Judged = GOOD, current: Judged | None = GOOD, **changes: object) -> Assessment:
    given = {"users": USERS, "bank": {"verbose": A}, "probes": PROBES}
    return judge_gates(candidate, current, LABELS, **{**given, **changes})  # type: ignore[arg-type]


def test_the_same_judge_passes_and_says_why() -> None:
    found = judged()
    assert found.passed and not found.failed
    assert found.figures["accuracy/gap"] == 0 and found.figures["consistency/share"] == 1
    assert all(one.startswith("passed: ") for one in found.reasons)


@pytest.mark.parametrize(
    ("changes", "name", "says"),
    [
        ({"candidate": WORSE}, "accuracy", "to the current judge"),
        ({"candidate": WORSE, "current": None}, "accuracy", "to an accuracy of 0.5"),
        ({"users": ["one"] * 200}, "accuracy", "1 users or rows, fewer than 20"),
        ({"bank": {"verbose": A, "flattery": B}}, "bank", "does not win 1 of 2 known exploits: flattery"),
        ({"bank": {"rubric": Choice.INCONSISTENT}}, "bank", "rubric"),
        ({"bank": {"rubric": TIE}}, "bank", "rubric"),
        ({"probes": {"length": [B] * 3 + [A] * 17}}, "length", "15.0% of 20 probes"),
        ({"probes": {"format": []}}, "format", "no probe was judged"),
    ],
)
def test_each_gate_stops_its_fault_and_no_other(changes: dict[str, object], name: str, says: str) -> None:
    found = judged(**changes)  # type: ignore[arg-type]
    assert not found.passed and found.failed == (name,)
    assert found.reasons[0].startswith(f"failed: {name}: ") and says in found.reasons[0]


def test_who_cannot_decide_or_always_says_first_is_stopped() -> None:
    undecided = replace(GOOD, choices=[Choice.INCONSISTENT] * 30 + list(GOOD.choices[30:]))
    found = judged(undecided)
    assert "consistency" in found.failed and found.figures["consistency/share"] == 0.85
    first = Judged(choices=[Choice.INCONSISTENT] * 200)
    assert {"accuracy", "consistency"} <= {*judged(first, None).failed}


@given(st.dictionaries(st.text(max_size=3), st.sampled_from(list(Choice)), max_size=6))
def test_no_candidate_that_loses_a_known_exploit_passes(bank: dict[str, Choice]) -> None:
    assert judged(bank=bank).passed == all(one is A for one in bank.values())


def test_overconfidence_is_stopped() -> None:
    draw = np.random.default_rng(0)
    odds = draw.normal(0, 1.5, 200)
    labels = [A if one else B for one in draw.random(200) < compute_probability(odds)]
    choices = [A if one > 0 else B for one in odds]
    current = Judged(choices=choices, probabilities=compute_probability(odds))
    sure = Judged(choices=choices, probabilities=compute_probability(6 * odds))
    given = {"users": USERS, "bank": {}, "probes": {}}
    assert judge_gates(current, current, labels, **given).passed  # type: ignore[arg-type]
    found = judge_gates(sure, current, labels, **given)  # type: ignore[arg-type]
    assert found.failed == ("calibration",)


def test_the_calibration_gap_equals_its_slow_twin() -> None:
    """The slow one draws the same users, copies their rows and calculates both errors on the copies."""
    draw = np.random.default_rng(1)
    one, other, truth = draw.random(60), draw.random(60), (draw.random(60) < 0.5).astype(float)
    users = np.array([f"u{i % 7}" for i in range(60)])
    gap, low, high = compute_calibration_gap(one, other, truth, list(users), draws=50, seed=3)
    assert gap == pytest.approx(
        compute_calibration_error(one, truth) - compute_calibration_error(other, truth)
    )
    slow, names = [], np.unique(users)
    for counts in np.random.default_rng(3).multinomial(7, np.full(7, 1 / 7), size=50):
        rows = np.concatenate(
            [np.tile(np.flatnonzero(users == name), n) for name, n in zip(names, counts, strict=True)]
        )
        slow.append(
            compute_calibration_error(one[rows], truth[rows])
            - compute_calibration_error(other[rows], truth[rows])
        )
    assert (low, high) == pytest.approx(tuple(np.quantile(slow, [0.05, 0.95])))


def test_the_paired_error_by_hand() -> None:
    one, other = np.array([1.0, 0, 1, 1]), np.array([0.0, 0, 1, 0])
    gap, error, many = compare_pairs(one, other)
    assert (gap, many) == (0.5, 4)
    assert error == pytest.approx(np.std(one - other, ddof=1) / 2)
    gap, error, many = compare_pairs(one, other, ["a", "a", "b", "b"])
    sums = [0.5 - 0.5, -0.5 + 0.5]
    assert many == 2 and error == pytest.approx(math.sqrt(2 * sum(s * s for s in sums)) / 4)
    assert compare_pairs(np.ones(3), 0.5, ["a"] * 3)[1] == math.inf


def test_a_policy_worse_by_the_margin_passes_in_at_most_one_of_twenty_gates() -> None:
    """40 users of 5 correlated rows; a candidate that is worse by exactly the margin."""
    draw, passed, runs = np.random.default_rng(2), 0, 400
    users = [f"u{i // 5}" for i in range(200)]
    for _ in range(runs):
        own = np.repeat(draw.normal(0, 0.2, 40), 5)
        difference = own + draw.normal(0, 0.3, 200) - 0.03
        passed += check_not_worse("x", compare_pairs(difference, 0.0, users), 0.03, 20).passed
    assert passed / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


def test_a_policy_needs_its_ability_its_panel_and_its_budget() -> None:
    ability, panel = {"sums": (0.01, 0.01, 100)}, [A] * 30 + [B] * 10 + [TIE] * 10
    found = policy_gates(ability, panel, 0.2)
    assert found.passed and found.figures["panel/gap"] == pytest.approx(0.2)
    for changed, name in (
        (policy_gates({"sums": (-0.05, 0.01, 100)}, panel, 0.2), "ability sums"),
        (policy_gates({}, panel, 0.2), "ability"),
        (policy_gates(ability, [Choice.UNREADABLE] * 40, 0.2), "panel"),
        (policy_gates(ability, [], 0.2), "panel"),
        (policy_gates(ability, panel, 0.6), "kl"),
        (policy_gates(ability, panel, math.nan), "kl"),
    ):
        assert changed.failed == (name,)
    assert policy_gates(ability, panel, 0.6, limits=PolicyLimits(kl=1.0)).passed


def test_nothing_measured_is_no_pass() -> None:
    assert not assess_gates([]).passed
    found = judge_gates(Judged(choices=[]), None, [], bank={}, probes={}, limits=JudgeLimits())
    assert not found.passed and {*found.failed} == {"accuracy", "consistency"}
    with pytest.raises(ValueError, match="not finite"):
        compare_pairs(np.array([math.nan]), 0.5)
    with pytest.raises(ValueError, match="clusters has 1 names for 2 rows"):
        compare_pairs(np.ones(2), 0.5, ["a"])
