"""Losses by hand, by finite differences in fp64, and by the laws that join them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ostinato.algo import losses
from ostinato.algo.losses import LossTerms

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
