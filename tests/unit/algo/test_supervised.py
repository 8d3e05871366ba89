"""Weights of supervised tokens and of preferences: by hand on few tokens, and against autograd."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.algo.token_losses import dpo, mean_weights

LOGPROBS = st.lists(st.tuples(*[st.floats(-300, 0)] * 4), min_size=1, max_size=6)


def test_weights_are_one_over_the_tokens_of_all_rows() -> None:
    one, two = mean_weights([np.array([False, True]), np.array([False, False, True, True, True])])
    assert one.tolist() == [0, 0.25] and two.tolist() == [0, 0, 0.25, 0.25, 0.25]


def test_a_pair_by_hand() -> None:
    """Chosen 2 above its reference and rejected 1 below, beta 0.5: a margin of 1.5."""
    loss, rewards, slopes = dpo(np.array([[-3.0, -7.0]]), np.array([[-5.0, -6.0]]), 0.5)
    assert rewards.tolist() == [[1.0, -0.5]]
    assert math.isclose(loss[0], math.log(1 + math.exp(-1.5)))
    assert np.allclose(slopes, [[-0.5 / (1 + math.exp(1.5)), 0.5 / (1 + math.exp(1.5))]])


def test_before_training_every_pair_costs_log_two() -> None:
    same = np.array([[-3.0, -7.0], [-100.0, -1.0]])
    loss, rewards, slopes = dpo(same, same, 0.1)
    assert np.allclose(loss, math.log(2)) and np.allclose(slopes, [[-0.05, 0.05]] * 2)
    assert not rewards.any()


@given(pairs=LOGPROBS, beta=st.floats(0.01, 2))
def test_loss_and_slopes_are_those_of_autograd(pairs: list[tuple[float, ...]], beta: float) -> None:
    drawn = np.array(pairs)
    policy = torch.tensor(drawn[:, :2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(drawn[:, 2:], dtype=torch.float64)
    logits = (policy - reference)[:, 0] - (policy - reference)[:, 1]
    losses = -torch.nn.functional.logsigmoid(beta * logits)  # TRL's sigmoid loss
    losses.sum().backward()
    loss, _, slopes = dpo(drawn[:, :2], drawn[:, 2:], beta)
    assert np.allclose(loss, losses.detach().numpy(), rtol=1e-9, atol=1e-12)
    assert policy.grad is not None
    assert np.allclose(slopes, policy.grad.numpy(), atol=1e-12)
