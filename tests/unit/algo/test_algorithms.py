from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ostinato.algo import losses
from ostinato.algo.advantages import Baseline, Pool, Scale, advantages
from ostinato.algo.algorithms import BOUNDS, NAMED, Algorithm, Loss, algorithm, policy_loss
from ostinato.algo.offpolicy import Correction, importance_weights
from ostinato.algo.pack import Aggregation


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
        (
            "cispo",
            {"epsilon_high": 5},
            "algo.epsilon_high is not a key; TRL's epsilon_high is ratio_cap here",
        ),
        ("grpo", {"loss": "cispo", "epsilon_high": 5}, "TRL's epsilon_high is ratio_cap here"),
        ("cispo", {"epsilon": 0.2}, "TRL's epsilon does nothing in CISPO"),
        ("dapo", {"epsilon_high": 0.28}, "TRL's epsilon_high is clip_high here"),
        ("grpo", {"epsilon": 0.2}, "TRL's epsilon is clip_low and clip_high here"),
        ("grpo", {"epsilon_low": 0.2}, "TRL's epsilon_low is clip_low here"),
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
        (
            "grpo",
            {"correction_high": 3},
            "algo.correction_high has no effect because algo.correction is 'none'",
        ),
        (
            "grpo",
            {"correction": "token_truncate", "correction_low": 0.5},
            "algo.correction_low has no effect because algo.correction is 'token_truncate'",
        ),
        ("grpo", {"baseline": "none"}, "algo.baseline is 'none' but scale is 'group'"),
        ("grpo", {"anchor": "old"}, "algo.anchor is 'old'; known: auto, trainer"),
        (
            "grpo",
            {"anchor": "trainer", "correction": "token_mask"},
            "algo.anchor has no effect because algo.correction is 'token_mask'; remove it or change that",
        ),
        (
            "grpo",
            {"anchor": "trainer", "correction_high": 3},
            "algo.correction_high has no effect because algo.correction is 'none'",
        ),
        ("rloo", {"anchor": "trainer"}, "algo.anchor has no effect because algo.loss is 'reinforce'"),
    ],
)
def test_refusals(name: str, overrides: dict[str, Any], message: str) -> None:
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
    assert tis.decoupled and not algorithm("grpo").decoupled
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
    assert ignoring.decoupled and ignoring.correction is Correction.NONE
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


def test_every_named_algorithm_makes_advantages() -> None:
    rewards = [np.array([1.0, 0.0, 0.0]), np.array([1.0, 1.0, 1.0])]
    for name in NAMED:
        chosen = algorithm(name)
        first, second = advantages(
            rewards,
            baseline=chosen.baseline,
            scale=chosen.scale,
            batch_pool=chosen.batch_pool,
            drop_zero_variance=chosen.drop_zero_variance,
        )
        assert first[0] > first[1] == first[2]
        assert np.isnan(second).all() == chosen.drop_zero_variance
