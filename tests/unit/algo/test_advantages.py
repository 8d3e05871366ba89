from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.algo.advantages import (
    EPS,
    Baseline,
    Pool,
    Scale,
    advantages,
    check_group_size,
    overlong_penalty,
    zero_variance,
)

NAN = math.nan
VALID = [
    (baseline, scale)
    for baseline in Baseline
    for scale in Scale
    if not (baseline is Baseline.NONE and scale is not Scale.NONE)
    and not (baseline is Baseline.BATCH_MEAN and scale is Scale.GROUP)
]


def one(rewards: list[float], baseline: Baseline, scale: Scale) -> list[float]:
    (result,) = advantages([np.array(rewards)], baseline=baseline, scale=scale, batch_pool=Pool.ALL)
    return result.tolist()


def test_group_baselines_by_hand() -> None:
    """Rewards (1, 0, 0, 0): mean 1/4, sample deviation 1/2, the others' means 0 and 1/3."""
    rewards = [1.0, 0.0, 0.0, 0.0]
    assert one(rewards, Baseline.GROUP_MEAN, Scale.NONE) == [0.75, -0.25, -0.25, -0.25]
    assert one(rewards, Baseline.LEAVE_ONE_OUT, Scale.NONE) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert one(rewards, Baseline.GROUP_MEAN, Scale.GROUP) == pytest.approx(
        [a / 0.5001 for a in (0.75, *[-0.25] * 3)]
    )
    assert one(rewards, Baseline.NONE, Scale.NONE) == rewards


def test_batch_scale_by_hand_over_kept_and_over_all_groups() -> None:
    """Differences (1/2, -1/2) and (0, 0): deviation sqrt(1/2) of the first, sqrt(1/6) of all four."""
    rewards = [np.array([1.0, 0.0]), np.array([1.0, 1.0])]
    for pool, std in ((Pool.KEPT, math.sqrt(1 / 2)), (Pool.ALL, math.sqrt(1 / 6))):
        first, second = advantages(rewards, baseline=Baseline.GROUP_MEAN, scale=Scale.BATCH, batch_pool=pool)
        assert first.tolist() == pytest.approx([0.5 / (std + EPS), -0.5 / (std + EPS)])
        assert second.tolist() == [0, 0]


def test_batch_baseline_works_for_groups_of_one() -> None:
    """REINFORCE++: rewards 1, 0, 0, 0 of four prompts are whitened together."""
    rewards = [np.array([r]) for r in (1.0, 0.0, 0.0, 0.0)]
    result = advantages(rewards, baseline=Baseline.BATCH_MEAN, scale=Scale.BATCH, batch_pool=Pool.ALL)
    assert np.concatenate(result).tolist() == pytest.approx([a / 0.5001 for a in (0.75, *[-0.25] * 3)])


def test_zero_variance_groups_are_dropped_only_on_request() -> None:
    rewards = [np.array([1.0, 1.0]), np.array([1.0, 0.0]), np.array([0.3, 0.1 + 0.2])]
    choices = {"baseline": Baseline.GROUP_MEAN, "scale": Scale.NONE}
    kept = advantages(rewards, **choices)
    assert np.abs(np.concatenate([kept[0], kept[2]])).max() < 1e-9
    dropped = advantages(rewards, **choices, drop_zero_variance=True)
    assert [bool(np.isnan(group).all()) for group in dropped] == [True, False, True]


def test_no_verdict_is_excluded_and_never_zero() -> None:
    """A crashed grader's None, taken as 0, would punish its siblings' baseline: it must change nothing."""
    with_gap = one([1.0, NAN, 0.0, 0.0], Baseline.GROUP_MEAN, Scale.GROUP)
    without = one([1.0, 0.0, 0.0], Baseline.GROUP_MEAN, Scale.GROUP)
    assert math.isnan(with_gap.pop(1)) and with_gap == without
    assert all(map(math.isnan, one([1.0, NAN], Baseline.GROUP_MEAN, Scale.NONE)))
    assert all(map(math.isnan, one([NAN, NAN], Baseline.LEAVE_ONE_OUT, Scale.BATCH)))


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, NAN]), min_size=2, max_size=6), min_size=1, max_size=5),
    st.sampled_from(VALID),
    st.floats(-3, 3),
)
def test_laws(rewards: list[list[float]], choice: tuple[Baseline, Scale], shift: float) -> None:
    """Centred, blind to a shift, in the order of the rewards, NaN only for no verdict or a lone one."""
    baseline, scale = choice
    groups = [np.array(group) for group in rewards]
    result = advantages(groups, baseline=baseline, scale=scale, batch_pool=Pool.ALL)
    if baseline is not Baseline.NONE:
        shifted = advantages([g + shift for g in groups], baseline=baseline, scale=scale, batch_pool=Pool.ALL)
        np.testing.assert_allclose(np.concatenate(shifted), np.concatenate(result), atol=1e-9)
    for group, a in zip(groups, result, strict=True):
        has_verdict = ~np.isnan(group)
        grouped = baseline in (Baseline.GROUP_MEAN, Baseline.LEAVE_ONE_OUT)
        lone = grouped and has_verdict.sum() < 2
        assert np.array_equal(np.isnan(a), ~has_verdict | lone)
        if grouped and not lone:
            assert abs(np.nansum(a)) < 1e-9
        order = np.argsort(group[has_verdict], kind="stable")
        assert (np.diff(a[has_verdict][order]) >= -1e-12).all() or lone
        assert np.nanmax(np.abs(a), initial=0) < 1e3  # no choice turns equal rewards into 1 / EPS


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8))
def test_leave_one_out_equals_its_definition(rewards: list[float]) -> None:
    expected = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(one(rewards, Baseline.LEAVE_ONE_OUT, Scale.NONE), expected, atol=1e-12)


def test_zero_variance() -> None:
    assert zero_variance(np.array([1.0, 1.0, NAN])) and zero_variance(np.array([NAN, 1.0]))
    assert not zero_variance(np.array([1.0, 0.0]))


def test_overlong_penalty_by_hand() -> None:
    """DAPO: free up to 16, falling over the last 4 tokens to -factor at 20."""
    lengths = np.array([1, 16, 17, 18, 20, 25])
    penalty = overlong_penalty(lengths, max_tokens=20, buffer=4, factor=0.5)
    assert penalty.tolist() == [0, 0, -0.125, -0.25, -0.5, -0.5]
    assert overlong_penalty(lengths, max_tokens=20, buffer=0).tolist() == [0] * 6
    with pytest.raises(ValueError, match="overlong buffer is 21"):
        overlong_penalty(lengths, max_tokens=20, buffer=21)


def test_refusals() -> None:
    for baseline, scale in ((Baseline.GROUP_MEAN, Scale.NONE), (Baseline.LEAVE_ONE_OUT, Scale.BATCH)):
        with pytest.raises(ValueError, match="group size is 1"):
            check_group_size(1, baseline, scale)
    with pytest.raises(ValueError, match="drops all groups"):
        check_group_size(1, Baseline.BATCH_MEAN, Scale.BATCH, drop_zero_variance=True)
    check_group_size(1, Baseline.BATCH_MEAN, Scale.BATCH)
    with pytest.raises(ValueError, match="infinite"):
        one([1.0, math.inf], Baseline.GROUP_MEAN, Scale.NONE)
    for baseline, scale in {(b, s) for b in Baseline for s in Scale} - set(VALID):
        with pytest.raises(ValueError, match="but scale is"):
            one([1.0, 0.0], baseline, scale)
    with pytest.raises(ValueError, match="batch_pool is 'kept'"):
        advantages([np.ones(2)], baseline=Baseline.BATCH_MEAN, scale=Scale.BATCH)
