"""A loss of a user's own: weighted and corrected as ours, refused before any work where it cannot be one."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from ostinato.algo.algorithms import algorithm, policy_loss
from ostinato.algo.own_loss import OwnLoss, load_loss
from ostinato.config import Recipe

PPO = """
import torch

def ppo(new_logprobs, old_logprobs, advantages, *, sample_idx, num_samples):
    ratio = (new_logprobs - old_logprobs).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return loss, {"own/far_mean": ((ratio - 1).abs() > 0.2).float()}

def mean(new_logprobs, old_logprobs, advantages, **_):
    return new_logprobs.mean()

def constant(new_logprobs, old_logprobs, advantages, **_):
    return advantages

def broken(new_logprobs, old_logprobs, advantages, **_):
    return new_logprobs / undefined
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "losses.py"
    path.write_text(PPO)
    return path


def test_ppo_by_hand_is_the_clipped_loss(file: Path) -> None:
    own = algorithm("dapo", loss=f"{file}:ppo", kl_coef=0.1)
    ours = algorithm("dapo", clip_high=0.2, kl_coef=0.1)
    gradients, totals = [], []
    for chosen in (own, ours):
        generator = torch.Generator().manual_seed(3)
        new = (-2 * torch.rand(50, generator=generator)).requires_grad_()
        old, ref = (-2 * torch.rand(50, generator=generator) for _ in range(2))
        advantages, weights, correction = (torch.randn(50, generator=generator) for _ in range(3))
        idx = torch.arange(50) // 10
        terms = policy_loss(
            chosen, new, old, advantages, weights, idx, num_samples=5, correction=correction, ref_logprobs=ref
        )
        terms.total.backward()
        gradients.append(new.grad)
        totals.append(terms)
    assert torch.equal(gradients[0], gradients[1]) and totals[0].total == totals[1].total
    assert "own/far_mean" in totals[0].stats and "kl" in totals[0].stats


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("mean", "one value per token"),
        ("constant", "without a gradient"),
        ("broken", "NameError"),
        ("no", "has no 'no'"),
    ],
)
def test_what_is_no_loss_is_refused_before_any_work(file: Path, name: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        algorithm("grpo", loss=f"{file}:{name}")


def test_keys_of_our_losses_have_no_effect_beside_it(file: Path) -> None:
    with pytest.raises(ValueError, match="clip_low has no effect"):
        algorithm("grpo", loss=f"{file}:ppo", clip_low=0.1)


def test_it_travels_by_its_name(file: Path) -> None:
    """To the rows of a run, to ranks and to workers; a recipe beside it names it by a relative path."""
    chosen = algorithm("grpo", loss=f"{file}:ppo")
    assert json.loads(json.dumps(asdict(chosen)))["loss"] == f"{file}:ppo"
    for loss in (copy.deepcopy(chosen.loss), pickle.loads(pickle.dumps(chosen.loss))):
        assert isinstance(loss, OwnLoss) and loss == chosen.loss and loss.function.__name__ == "ppo"
    assert load_loss(f"{file}:ppo") is chosen.loss, "the file is run once"
    recipe = file.with_name("mine.toml")
    recipe.write_text('[algo]\nloss = "losses.py:ppo"\n')
    assert Recipe.load(recipe).algo.overrides == {"loss": f"{file}:ppo"}
