"""The losses of the training API against their definitions, token by token."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ostinato.algo.token_losses import NAMES, token_loss

LOGP = [-0.1, -2.0, -0.7, -1.5, -12.0]
Q = [-0.4, -0.5, -0.7, -3.0, -1.0]
A = [1.0, -2.0, 0.5, 1.5, -1.0]
W = [1.0, 0.0, -0.5, 2.0, 0.25]


def plain(name: str, low: float, high: float, beta: float, k: int, logp: Tensor) -> Tensor:
    """The loss of token k, as the documentation of Tinker writes it."""
    ratio = torch.exp(logp - Q[k])
    match name:
        case "cross_entropy":
            return -W[k] * logp
        case "importance_sampling":
            return -ratio * A[k]
        case "ppo":
            return -torch.min(ratio * A[k], torch.clamp(ratio, low, high) * A[k])
        case "cispo":
            return -torch.clamp(ratio, low, high).detach() * logp * A[k]
    return -(logp * A[k] - 0.5 * beta * (logp - Q[k]) ** 2)


SETTINGS = {"ppo": {"clip_low_threshold": 0.7}, "cispo": {"clip_high_threshold": 1.1}, "dro": {"beta": 0.3}}
FULL = {"ppo": (0.8, 1.2, 0.0), "cispo": (0.0, 4.0, 0.0), "dro": (0.0, 0.0, 0.05)}


def given(name: str) -> dict[str, Tensor]:
    kept = {"weights": W} if name == "cross_entropy" else {"logprobs": Q, "advantages": A}
    return {key: torch.tensor(values, dtype=torch.float64) for key, values in kept.items()}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_sums_and_gradients_are_those_of_the_definitions(name: str, own: bool) -> None:
    low, high, beta = FULL.get(name, (0.0, 0.0, 0.0))
    settings = SETTINGS.get(name, {}) if own else {}
    low, high = settings.get("clip_low_threshold", low), settings.get("clip_high_threshold", high)
    logp = torch.tensor(LOGP, dtype=torch.float64, requires_grad=True)
    twin = torch.tensor(LOGP, dtype=torch.float64, requires_grad=True)
    loss = token_loss(name, settings)(logp, given(name))
    beta = settings.get("beta", beta)
    wanted = torch.stack([plain(name, low, high, beta, k, twin[k]) for k in range(len(LOGP))]).sum()
    loss.backward()
    wanted.backward()
    assert torch.allclose(loss, wanted, rtol=1e-12, atol=0)
    assert logp.grad is not None and twin.grad is not None
    assert torch.allclose(logp.grad, twin.grad, rtol=1e-12, atol=0)


def test_bounds_may_be_given_for_each_token() -> None:
    logp = torch.tensor(LOGP[:3])
    values = {"logprobs": torch.tensor(Q[:3]), "advantages": torch.tensor(A[:3])}
    each = {"clip_low_threshold": torch.tensor([0.8, 0.1, 1.0]), "clip_high_threshold": torch.full((3,), 1.2)}
    apart = [
        token_loss("ppo", {"clip_low_threshold": float(each["clip_low_threshold"][k])})(
            logp[k : k + 1], {name: one[k : k + 1] for name, one in values.items()}
        )
        for k in range(3)
    ]
    assert torch.equal(token_loss("ppo")(logp, {**values, **each}), apart[0] + apart[1] + apart[2])


def test_weights_are_ones_where_none_are_given() -> None:
    assert float(token_loss("cross_entropy")(torch.tensor([-1.0, -2.0]), {})) == 3.0


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("stable_reinforce", {}, "loss_fn is 'stable_reinforce'; this server computes cross_entropy"),
        ("ppo", {"beta": 1.0}, "loss_fn_config has 'beta'; the settings of ppo are: clip_low_threshold"),
        ("cross_entropy", {"beta": 1.0}, "are: none"),
        ("dro", {"beta": math.nan}, "beta = nan; use a number from 0"),
        ("dro", {"beta": "x"}, "beta = 'x'"),
        ("ppo", {"clip_low_threshold": 2.0}, "bounds 2 to 1.2; give the lower one first"),
    ],
)
def test_what_there_is_not_is_refused(name: str, settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        token_loss(name, settings)
