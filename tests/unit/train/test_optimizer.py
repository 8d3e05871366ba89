"""AdamW against its formula, schedules, clipping, and state that survives bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.train.optimizer import (
    OptimizerSettings,
    Schedule,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    load_optimizer_tensors,
    lr_factor,
    optimizer_tensors,
)


def leaves(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(3, 4, generator=generator).requires_grad_(),
        "experts": torch.randn(2, 3, 4, generator=generator).requires_grad_(),
        "vector": torch.randn(5, generator=generator).requires_grad_(),
    }


def descend(optimizer: torch.optim.Optimizer, named: dict[str, torch.Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for leaf in named.values():
        leaf.grad = torch.randn(leaf.shape, generator=generator)
    optimizer.step()


def test_two_steps_follow_the_formula() -> None:
    config = OptimizerSettings(lr=0.1, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.2)
    named = leaves()
    optimizer = build_optimizer(named.values(), config)
    expected = {name: leaf.detach().double().clone() for name, leaf in named.items()}
    m = {name: torch.zeros_like(value) for name, value in expected.items()}
    v = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in (1, 2):
        descend(optimizer, named, step)
        for name, leaf in named.items():
            assert leaf.grad is not None
            gradient = leaf.grad.double()
            m[name] = 0.9 * m[name] + 0.1 * gradient
            v[name] = 0.95 * v[name] + 0.05 * gradient.square()
            decay = 0.0 if name == "vector" else 0.2
            update = (m[name] / (1 - 0.9**step)) / ((v[name] / (1 - 0.95**step)).sqrt() + 1e-6)
            expected[name] = expected[name] * (1 - 0.1 * decay) - 0.1 * update
    for name, leaf in named.items():
        torch.testing.assert_close(leaf.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


def test_state_round_trip_is_bitwise() -> None:
    config = OptimizerSettings(lr=0.1, weight_decay=0.1)
    named, copies = leaves(), leaves()
    one, two = build_optimizer(named.values(), config), build_optimizer(copies.values(), config)
    descend(one, named, 0)
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(one, named).items()}
    with torch.no_grad():
        for name, leaf in copies.items():
            leaf.copy_(named[name])
    load_optimizer_tensors(two, copies, saved)
    for step in (1, 2):
        descend(one, named, step)
        descend(two, copies, step)
    assert all(torch.equal(named[name], copies[name]) for name in named)
    after, twin = optimizer_tensors(one, named), optimizer_tensors(two, copies)
    assert all(torch.equal(after[name], twin[name]) for name in after)
    assert not torch.equal(saved["matrix.exp_avg"], after["matrix.exp_avg"]), "the saved state was not copied"


@settings(max_examples=40, deadline=None)
@given(
    schedule=st.sampled_from(Schedule),
    warmup=st.integers(0, 20),
    length=st.integers(1, 200),
    step=st.integers(0, 300),
)
def test_schedules_never_stall_in_warmup_and_never_leave_0_1(
    schedule: Schedule, warmup: int, length: int, step: int
) -> None:
    config = OptimizerSettings(lr=1.0, schedule=schedule, warmup_steps=warmup, total_steps=warmup + length)
    factor = lr_factor(config, step)
    assert 0 <= factor <= 1
    if step < config.total_steps:
        assert factor > 0
    if step < warmup:
        assert factor == pytest.approx((step + 1) / warmup)
    elif schedule == Schedule.CONSTANT:
        assert factor == 1
    else:
        assert lr_factor(config, step + 1) <= factor
        assert lr_factor(config, config.total_steps) == pytest.approx(0, abs=1e-12)


def test_clipping_by_hand() -> None:
    gradients = [torch.tensor([3.0]), torch.tensor([[0.0, 4.0]])]
    assert gradient_norm(gradients) == 5
    clip_gradients(gradients, norm=5.0, max_norm=1.0)
    torch.testing.assert_close(gradients[0], torch.tensor([0.6]))
    torch.testing.assert_close(gradients[1], torch.tensor([[0.0, 0.8]]))
    untouched = [gradient.clone() for gradient in gradients]
    clip_gradients(gradients, norm=1.0, max_norm=1.0)
    assert all(torch.equal(one, two) for one, two in zip(gradients, untouched, strict=True))


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("lr", {"lr": 0.0}),
        ("lr", {"lr": math.nan}),
        ("betas", {"betas": (0.9, 1.0)}),
        ("eps", {"eps": 0.0}),
        ("weight_decay", {"weight_decay": -0.1}),
        ("max_grad_norm", {"max_grad_norm": 0.0}),
        ("warmup_steps", {"warmup_steps": -1}),
        ("schedule", {"schedule": "square"}),
        ("total_steps", {"schedule": Schedule.COSINE, "warmup_steps": 5, "total_steps": 5}),
    ],
)
def test_bad_settings_name_the_field(field: str, options: dict) -> None:
    with pytest.raises(ValueError, match=rf"^trainer\.{field} is "):
        OptimizerSettings(**{"lr": 1e-3, **options})
