"""Advantages, the losses that they weigh, and the algorithms that have both by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ostinato.algo import losses
from ostinato.algo.advantages import (
    EPS,
    Baseline,
    Pool,
    Scale,
    advantages,
    advantages_apart,
    check_group_size,
    has_zero_variance,
    overlong_penalty,
)
from ostinato.algo.algorithms import BOUNDS, NAMED, Algorithm, Loss, algorithm, policy_loss
from ostinato.algo.losses import LossTerms
from ostinato.algo.offpolicy import Correction, importance_weights
from ostinato.algo.pack import Aggregation

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
    assert has_zero_variance(np.array([1.0, 1.0, NAN])) and has_zero_variance(np.array([NAN, 1.0]))
    assert not has_zero_variance(np.array([1.0, 0.0]))


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


# ---- losses by hand, by finite differences in fp64, and by the laws that join them


clipped = partial(losses.clipped, clip_low=0.2, clip_high=0.28)
sequence_clipped = partial(losses.sequence_clipped, clip_low=0.2, clip_high=0.28)
SAMPLE_IDX = torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32)

LossOf = Callable[..., LossTerms]
LOSSES: dict[str, LossOf] = {
    "clipped": clipped,
    "sequence": lambda new, old, a, w, **k: sequence_clipped(new, old, a, w, SAMPLE_IDX, 2, **k),
    "cispo": lambda new, old, a, w, **k: losses.cispo(new, old, a, w, ratio_cap=2.0, **k),
    "reinforce": lambda new, old, a, w, **k: losses.reinforce(new, a, w, **k),
    "kl": lambda new, old, a, w, **k: losses.reference_kl(new, old, w),
}


def tokens(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def problem(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """new (with gradient), old, advantages equal within a sample, weights; ratios in and out of the clip."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(5, dtype=torch.float64, generator=generator) - 0.5
    new = (old + tokens(0.5, -0.1, 0.05, -0.6, 0.3)).requires_grad_()
    return new, old, tokens(1.0, 1.0, -0.5, -0.5, -0.5), tokens(0.25, 0.25, 1 / 6, 1 / 6, 1 / 6)


def test_clipped_by_hand() -> None:
    """Ratios 1.5, 0.5, 1.5, 0.5, A = +1, +1, -1, -1, clip [0.8, 1.28]: only the pessimistic side is cut."""
    new = tokens(1.5, 0.5, 1.5, 0.5).log().requires_grad_()
    weights = tokens(0.1, 0.2, 0.3, 0.4)
    terms = clipped(new, torch.zeros_like(new), tokens(1, 1, -1, -1), weights)
    assert terms.total.item() == pytest.approx(-0.1 * 1.28 - 0.2 * 0.5 + 0.3 * 1.5 + 0.4 * 0.8)
    assert terms.count == 4
    sums = {name: int(value) for name, value in terms.stats.items()}
    assert sums == {"clip_ratio/low_mean": 1, "clip_ratio/high_mean": 1, "clip_ratio/region_mean": 2}
    (grad,) = torch.autograd.grad(terms.total, new)
    assert grad.tolist() == pytest.approx([0, -0.2 * 0.5, 0.3 * 1.5, 0])


def test_gspo_by_hand() -> None:
    """Sample 0, ratios 4 and 1: s = 2, clipped to 1.28 for A = 1; sample 1, one ratio 0.9, A = -1."""
    new = tokens(4.0, 1.0, 0.9).log().requires_grad_()
    sample_idx, weights = torch.tensor([0, 0, 1]), tokens(0.25, 0.25, 0.5)
    terms = sequence_clipped(new, torch.zeros_like(new), tokens(1, 1, -1), weights, sample_idx, 2)
    assert terms.total.item() == pytest.approx(-0.5 * 1.28 + 0.5 * 0.9)
    assert int(terms.stats["clip_ratio/high_mean"]) == 2  # both tokens of the sequence
    inside = sequence_clipped(new, torch.zeros_like(new), tokens(-1, -1, -1), weights, sample_idx, 2)
    (grad,) = torch.autograd.grad(inside.total, new)
    assert grad.tolist() == pytest.approx([0.5, 0.5, 0.45])  # s / |y| to each token of the sequence


def test_cispo_by_hand() -> None:
    """rho = 8 is capped at 5 and keeps its gradient; a negative advantage is capped all the same."""
    new = tokens(8.0, 0.5, 8.0).log().requires_grad_()
    terms = losses.cispo(new, torch.zeros_like(new), tokens(1, 1, -1), tokens(0.5, 0.25, 0.25), ratio_cap=5.0)
    ln8, ln2 = math.log(8), math.log(2)
    assert terms.total.item() == pytest.approx(-0.5 * 5 * ln8 + 0.25 * 0.5 * ln2 + 0.25 * 5 * ln8)
    (grad,) = torch.autograd.grad(terms.total, new)
    assert grad.tolist() == pytest.approx([-2.5, -0.125, 1.25])
    assert int(terms.stats["cispo_clip_ratio"]) == 1  # TRL counts positive advantages only


def test_reinforce_and_kl_by_hand() -> None:
    new = tokens(-1.0, -2.0).requires_grad_()
    weights = tokens(0.5, 0.5)
    assert losses.reinforce(new, tokens(3.0, -1.0), weights).total.item() == pytest.approx(0.5 * 3 - 0.5 * 2)
    kl = losses.reference_kl(new, tokens(-1.0, -2.5), weights)
    per_token = math.exp(-0.5) - 1 + 0.5  # ref - new = -1/2
    assert kl.total.item() == pytest.approx(0.5 * per_token)
    assert kl.stats["kl"].item() == pytest.approx(per_token)


def test_correction_multiplies_the_policy_term() -> None:
    new, old, advantages, weights = problem()
    correction = tokens(0.0, 2.0, 1.0, 0.5, 1.0)
    for name in ("clipped", "sequence", "cispo", "reinforce"):
        corrected = LOSSES[name](new, old, advantages, weights, correction=correction)
        reweighted = LOSSES[name](new, old, advantages, weights * correction)
        assert torch.equal(corrected.total, reweighted.total), name


@pytest.mark.parametrize("name", ["clipped", "sequence", "kl", "reinforce"])
def test_gradients_by_finite_differences(name: str) -> None:
    new, old, advantages, weights = problem()
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, old, advantages, weights).total, (new,))


def test_cispo_gradient_is_that_of_logp_with_a_frozen_weight() -> None:
    """The loss stops the gradient of rho, so finite differences of it are another function: freeze rho."""
    new, old, advantages, weights = problem()
    (grad,) = torch.autograd.grad(LOSSES["cispo"](new, old, advantages, weights).total, new)
    frozen = (new - old).exp().clamp(max=2.0).detach()
    (expected,) = torch.autograd.grad((-weights * frozen * advantages * new).sum(), new)
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("name", ["clipped", "sequence", "cispo", "reinforce"])
def test_on_policy_all_losses_have_the_policy_gradient(name: str) -> None:
    """At rho = 1 (and advantages and weights equal within a sample) each has gradient -w A."""
    _, old, advantages, weights = problem()
    new = old.clone().requires_grad_()
    terms = LOSSES[name](new, old, advantages, weights)
    (grad,) = torch.autograd.grad(terms.total, new)
    torch.testing.assert_close(grad, -weights * advantages, rtol=1e-12, atol=0)
    assert all(int(count) == 0 for count in terms.stats.values())


@given(st.integers(0, 99), st.sampled_from(list(LOSSES)))
def test_microbatches_add_up(seed: int, name: str) -> None:
    """A split between samples changes neither the loss nor the gradient nor the sums: nothing divides."""
    new, old, advantages, weights = problem(seed)
    whole = LOSSES[name](new, old, advantages, weights)
    first, second = slice(0, 2), slice(2, 5)

    def part(rows: slice) -> LossTerms:
        args = (new[rows], old[rows], advantages[rows], weights[rows])
        if name == "sequence":
            return sequence_clipped(*args, SAMPLE_IDX[rows], 2)
        return LOSSES[name](*args)

    parts = [part(first), part(second)]
    assert sum(p.total.item() for p in parts) == pytest.approx(whole.total.item(), abs=1e-12)
    assert sum(p.count for p in parts) == whole.count
    for stat, value in whole.stats.items():
        assert sum(float(p.stats[stat]) for p in parts) == pytest.approx(float(value))
    (grad,) = torch.autograd.grad(whole.total, new)
    (split,) = torch.autograd.grad(parts[0].total + parts[1].total, new)
    torch.testing.assert_close(grad, split)


@pytest.mark.parametrize("name", list(LOSSES))
def test_one_corrupted_token_leaves_the_loss_finite(name: str) -> None:
    new, old, advantages, weights = (x.detach().float() for x in problem())
    old[1], new[4] = -500.0, -500.0
    new.requires_grad_()
    terms = LOSSES[name](new, old, advantages, weights)
    (grad,) = torch.autograd.grad(terms.total, new)
    assert terms.total.isfinite() and grad.isfinite().all()
    assert all(not stat.requires_grad for stat in terms.stats.values())


def arguments() -> tuple[Tensor, ...]:
    new = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    old = new.detach() + torch.tensor([0.5, -0.004, -0.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    return new, old, advantages, torch.full((3,), 1 / 3, dtype=torch.float64), torch.tensor([0, 0, 1])


def test_defaults_of_the_papers() -> None:
    """The vetted settings, written a second time, so that a change of one is seen in a review."""
    expected: dict[str, dict[str, Any]] = {
        "grpo": {"scale": Scale.GROUP, "aggregation": Aggregation.SAMPLE, "clip_low": 0.2, "clip_high": 0.2},
        "dr_grpo": {"scale": Scale.NONE, "aggregation": Aggregation.CONSTANT, "loss": Loss.CLIPPED},
        "dapo": {
            "clip_low": 0.2,
            "clip_high": 0.28,
            "aggregation": Aggregation.TOKEN,
            "overlong_buffer": 0.2,
        },
        "gspo": {"loss": Loss.SEQUENCE_CLIPPED, "aggregation": Aggregation.SAMPLE, "clip_high": 4e-3},
        "cispo": {
            "loss": Loss.CISPO,
            "ratio_cap": 5.0,
            "scale": Scale.BATCH,
            "aggregation": Aggregation.PROMPT,
        },
        "rloo": {"loss": Loss.REINFORCE, "baseline": Baseline.LEAVE_ONE_OUT, "scale": Scale.NONE},
        "reinforce_pp": {"baseline": Baseline.BATCH_MEAN, "scale": Scale.BATCH, "batch_pool": Pool.ALL},
        "reinforce_pp_baseline": {"baseline": Baseline.GROUP_MEAN, "scale": Scale.BATCH},
        "opd": {"loss": Loss.CLIPPED, "aggregation": Aggregation.TOKEN, "teacher_coef": 1, "reward_coef": 0},
    }
    assert expected.keys() == NAMED.keys()
    for name, fields in expected.items():
        chosen = algorithm(name)
        assert (chosen.name, chosen.overridden) == (name, ())
        assert {key: getattr(chosen, key) for key in fields} == fields
        assert (chosen.kl_coef, chosen.entropy_coef, chosen.correction) == (0, 0, Correction.NONE)
        assert chosen.drop_zero_variance == (name in ("dapo", "cispo"))
    assert algorithm("grpo") == Algorithm()


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("gropo", {}, "algo.name is 'gropo'; did you mean 'grpo'?"),
        ("grpo", {"clip_hi": 0.3}, "algo.clip_hi is not a key; did you mean 'clip_high'?"),
        ("cispo", {"epsilon_high": 5}, "algo.epsilon_high is not a key; TRL's epsilon_high is ratio_cap"),
        ("grpo", {"loss": "cispo", "epsilon_high": 5}, "TRL's epsilon_high is ratio_cap here"),
        ("cispo", {"epsilon": 0.2}, "TRL's epsilon does nothing in CISPO"),
        ("dapo", {"epsilon_high": 0.28}, "epsilon_high of other trainers is algo.clip_high here"),
        ("grpo", {"epsilon": 0.2}, "epsilon of other trainers is algo.clip_low and algo.clip_high"),
        ("grpo", {"epsilon_low": 0.2}, "epsilon_low of other trainers is algo.clip_low here"),
        ("grpo", {"num_generations": 8}, "num_generations of other trainers is rollout.group_size here"),
        ("grpo", {"nam": "dapo"}, "algo.nam is not a key; did you mean 'name'?"),
        ("grpo", {"loss": "gspo"}, "algo.loss is 'gspo'; that is an algo.name"),
        ("sequence_clipped", {}, "algo.name is 'sequence_clipped'; that is an algo.loss"),
        ("grpo", {"name": "x"}, "multiple values"),
        ("grpo", {"overridden": ("x",)}, "algo.overridden is not a key"),
        ("grpo", {"aggregation": "tokens"}, "algo.aggregation is 'tokens'; did you mean 'token'?"),
        ("grpo", {"clip_high": "0.3"}, "algo.clip_high is '0.3'; use a number"),
        ("grpo", {"clip_high": True}, "algo.clip_high is True; use a number"),
        ("grpo", {"mask_truncated": 1}, "algo.mask_truncated is 1; use true or false"),
        ("grpo", {"kl_coef": -1}, "algo.kl_coef is -1.0; use a number from 0"),
        ("grpo", {"clip_high": float("nan")}, "algo.clip_high is nan"),
        ("grpo", {"clip_low": 1.5}, "algo.clip_low is 1.5"),
        ("cispo", {"ratio_cap": 0.28}, "algo.ratio_cap is 0.28; use a number from 1"),
        ("dapo", {"overlong_buffer": 4096}, "algo.overlong_buffer is 4096.0; use a share of max_tokens"),
        ("grpo", {"correction": "token_mask", "correction_low": 1.5}, "algo.correction_low is 1.5"),
        ("cispo", {"clip_high": 0.28}, "algo.clip_high has no effect because algo.loss is 'cispo'"),
        ("grpo", {"ratio_cap": 5}, "algo.ratio_cap has no effect because algo.loss is 'clipped'"),
        ("grpo", {"batch_pool": "all"}, "algo.batch_pool has no effect because algo.scale is 'group'"),
        ("grpo", {"overlong_factor": 0.5}, "algo.overlong_factor has no effect"),
        ("grpo", {"correction_high": 3}, "algo.correction_high has no effect because algo.correction is"),
        (
            "grpo",
            {"correction": "token_truncate", "correction_low": 0.5},
            "algo.correction_low has no effect",
        ),
        ("grpo", {"baseline": "none"}, "algo.baseline is 'none' but scale is 'group'"),
        ("grpo", {"anchor": "old"}, "algo.anchor is 'old'; known: auto, trainer"),
        ("grpo", {"anchor": "trainer", "correction": "token_mask"}, "algo.anchor has no effect because"),
        ("grpo", {"anchor": "trainer", "correction_high": 3}, "algo.correction_high has no effect because"),
        ("rloo", {"anchor": "trainer"}, "algo.anchor has no effect because algo.loss is 'reinforce'"),
    ],
)
def test_overrides_that_cannot_be_are_refused(name: str, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        algorithm(name, **overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_policy_loss_dispatches_with_the_algorithms_numbers() -> None:
    new, old, a, w, idx = arguments()
    expected = {
        "grpo": losses.clipped(new, old, a, w, clip_low=0.2, clip_high=0.2),
        "dr_grpo": losses.clipped(new, old, a, w, clip_low=0.2, clip_high=0.2),
        "dapo": losses.clipped(new, old, a, w, clip_low=0.2, clip_high=0.28),
        "gspo": losses.sequence_clipped(new, old, a, w, idx, 2, clip_low=3e-3, clip_high=4e-3),
        "cispo": losses.cispo(new, old, a, w, ratio_cap=5.0),
        "rloo": losses.reinforce(new, a, w),
        "reinforce_pp": losses.clipped(new, old, a, w, clip_low=0.2, clip_high=0.2),
        "reinforce_pp_baseline": losses.clipped(new, old, a, w, clip_low=0.2, clip_high=0.2),
    }
    for name, terms in expected.items():
        got = policy_loss(algorithm(name), new, old, a, w, idx, num_samples=2)
        assert torch.equal(got.total, terms.total), name
        assert (got.count, got.stats.keys()) == (3, terms.stats.keys())


def test_kl_and_entropy_terms_by_hand() -> None:
    new, old, a, w, idx = arguments()
    ref, entropy = old - 0.1, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    plain = policy_loss(algorithm("grpo"), new, old, a, w, idx, num_samples=2)
    both = policy_loss(
        algorithm("grpo", kl_coef=0.1, entropy_coef=0.01),
        *(new, old, a, w, idx),
        num_samples=2,
        ref_logprobs=ref,
        entropy=entropy,
    )
    kl = ((ref - new).exp() - 1 - (ref - new)).mean().item()
    assert both.total.item() == pytest.approx(plain.total.item() + 0.1 * kl - 0.01 * 2.0)
    assert both.stats["kl"].item() == pytest.approx(3 * kl)
    (grad,) = torch.autograd.grad(both.total, entropy)
    assert grad.tolist() == pytest.approx([-0.01 / 3] * 3)


def test_a_coefficient_without_its_tensor_is_refused() -> None:
    args = arguments()
    with pytest.raises(ValueError, match="ref_logprobs is None"):
        policy_loss(algorithm("grpo", kl_coef=0.1), *args, num_samples=2)
    with pytest.raises(ValueError, match="the entropy has no gradient"):
        policy_loss(algorithm("grpo", entropy_coef=0.1), *args, num_samples=2, entropy=torch.ones(3))


@pytest.mark.slow
def test_bypass_and_decoupled_agree_on_the_first_minibatch() -> None:
    """Ratio to the sampler, or ratio 1 to the trainer times the sampler's correction: one gradient.

    Inside the clip and under the cap both are r A grad log p.
    """
    new, _, a, w, idx = arguments()
    sampled = new.detach() - torch.tensor([0.05, -0.1, 0.1], dtype=torch.float64)
    bypass = policy_loss(algorithm("grpo"), new, sampled, a, w, idx, num_samples=2)
    tis = algorithm("grpo", correction="token_truncate")
    assert tis.is_decoupled and not algorithm("grpo").is_decoupled
    correction = importance_weights(
        new - sampled, idx, 2, tis.correction, low=tis.correction_low, high=tis.correction_high
    )
    decoupled = policy_loss(tis, new, new.detach(), a, w, idx, num_samples=2, correction=correction)
    (left,) = torch.autograd.grad(bypass.total, new)
    (right,) = torch.autograd.grad(decoupled.total, new)
    torch.testing.assert_close(left, right)


def test_an_anchor_at_the_trainer_without_a_correction_ignores_the_sampler() -> None:
    """What the literature compares R3 and TIS with: at ratio 1 the gradient is A grad log p, and what the
    sampler thought of the token is nowhere in it."""
    new, sampled, a, w, idx = arguments()
    ignoring = algorithm("grpo", anchor="trainer")
    assert ignoring.is_decoupled and ignoring.correction is Correction.NONE
    weights = importance_weights(new - sampled, idx, 2, ignoring.correction)
    assert weights.tolist() == [1.0, 1.0, 1.0]
    terms = policy_loss(ignoring, new, new.detach(), a, w, idx, num_samples=2, correction=weights)
    (gradient,) = torch.autograd.grad(terms.total, new)
    torch.testing.assert_close(gradient, -a * w)


def test_each_correction_has_the_bounds_of_its_paper() -> None:
    """IcePop without bounds was a mask of [0, 2], which is not IcePop."""
    expected = {"token_truncate": (0, 2), "token_mask": (0.5, 5), "sequence_mask": (0, 3)}
    for name, bounds in expected.items():
        chosen = algorithm("grpo", correction=name)
        assert (chosen.correction_low, chosen.correction_high) == bounds
        assert chosen.overridden == ("correction",)
    mine = algorithm("grpo", correction="token_mask", correction_high=3)
    assert (mine.correction_low, mine.correction_high) == (0.5, 3.0)
    assert mine.overridden == ("correction", "correction_high")
    assert {*BOUNDS} == {*Correction} - {Correction.NONE}
    assert all(low < 1 < high for low, high in BOUNDS.values())


def apart_by_loops(rewards: list[np.ndarray], weights: list[float]) -> list[list[float]]:
    """GDPO one number at a time."""

    def compared(values: list[float]) -> list[float]:
        known = [value for value in values if not math.isnan(value)]
        mean = sum(known) / len(known) if known else math.nan
        spread = math.sqrt(sum((v - mean) ** 2 for v in known) / (len(known) - 1)) if len(known) > 1 else 0
        return [(value - mean) / (spread + 1e-4) for value in values]

    sums: list[list[float]] = []
    for group in rewards:
        columns = [compared(row) for row in group.tolist()]
        sums.append([])
        for terms in zip(*columns, strict=True):
            known = [w * t for w, t in zip(weights, terms, strict=True) if not math.isnan(t)]
            sums[-1].append(sum(known) if known else math.nan)
    flat = iter(compared([value for group in sums for value in group]))
    return [[next(flat) for _ in group] for group in sums]


@given(
    st.integers(1, 3).flatmap(
        lambda k: st.tuples(
            st.lists(st.floats(0.1, 3), min_size=k, max_size=k),
            st.lists(
                st.integers(2, 5).flatmap(
                    lambda g: st.lists(
                        st.lists(st.sampled_from([0.0, 0.5, 1.0, 100.0, math.nan]), min_size=g, max_size=g),
                        min_size=k,
                        max_size=k,
                    )
                ),
                max_size=4,
            ),
        )
    )
)
def test_rewards_apart_equal_their_loops(drawn: tuple[list[float], list[list[list[float]]]]) -> None:
    weights, groups = drawn
    rewards = [np.array(group) for group in groups]
    for made, want in zip(advantages_apart(rewards, weights), apart_by_loops(rewards, weights), strict=True):
        np.testing.assert_allclose(made, want, rtol=1e-6, atol=1e-6)


def test_a_step_of_equal_rewards_has_no_advantage_apart() -> None:
    """Rounding was left: 1e-8, which AdamW makes as large as any other gradient."""
    flat = [np.repeat([[a], [b]], 4, axis=1) for a, b in ((0.1, 0.7), (0.3, 0.9), (0.1, 0.7))]
    assert all((group == 0).all() for group in advantages_apart(flat, [1.0, 1.0]))
