"""Losses as sums over tokens, as Tinker defines them; a client of the training API chooses one by name.

Every argument is [R], one entry per token: log p under the policy that learns (with gradient), and the
client's ``logprobs`` (q, of the policy that sampled), ``advantages`` A and ``weights`` w. Nothing is divided
and nothing is averaged: any averaging is up to the client, in A or w. With r = p / q:

    cross_entropy         -sum w log p
    importance_sampling   -sum r A
    ppo                   -sum min(r A, clip(r, low, high) A)              low 0.8, high 1.2
    cispo                 -sum sg(clip(r, low, high)) A log p              low 0, high 4
    dro                   -sum (A log p - beta / 2 (log p - log q)^2)      beta 0.05

The bounds are absolute, and may be given for each token (``clip_low_threshold``, ``clip_high_threshold``).

Supervised and preference losses are ``cross_entropy`` once their weights are known, so neither depends on how
rows are packed:

    supervised    w = 1 / assistant tokens of the step
    preferences   w = -d loss / d log pi(answer), the same for all tokens of an answer: it is positive for the
                  chosen one, and comes from a pass without gradients
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.algo.offpolicy import bounded_exp

Values = Mapping[str, Tensor]
BOUNDS = ("clip_low_threshold", "clip_high_threshold")


def cross_entropy(logprobs: Tensor, values: Values) -> Tensor:
    """-sum w log p. It also serves a client's own loss, with weights -d loss / d log p."""
    return -(values["weights"] * logprobs).sum()


def importance_sampling(logprobs: Tensor, values: Values) -> Tensor:
    """-sum r A: REINFORCE corrected for the policy that sampled."""
    return -(_compute_ratio(logprobs, values) * values["advantages"]).sum()


def ppo(logprobs: Tensor, values: Values) -> Tensor:
    """The clipped surrogate (arXiv 1707.06347, eq. 7)."""
    ratio, advantages = _compute_ratio(logprobs, values), values["advantages"]
    return -torch.minimum(ratio * advantages, _clip_ratio(ratio, values) * advantages).sum()


def cispo(logprobs: Tensor, values: Values) -> Tensor:
    """MiniMax-M1, arXiv 2506.13585: a bounded weight, and every token keeps its gradient."""
    return -(
        _clip_ratio(_compute_ratio(logprobs, values).detach(), values) * values["advantages"] * logprobs
    ).sum()


def dro(logprobs: Tensor, values: Values) -> Tensor:
    """Direct reward optimisation (arXiv 2405.19107): a quadratic penalty instead of a ratio."""
    penalty = 0.5 * values["beta"] * (logprobs - values["logprobs"]).square()
    return -(values["advantages"] * logprobs - penalty).sum()


def _compute_ratio(logprobs: Tensor, values: Values) -> Tensor:
    """p / q [R], bounded."""
    return bounded_exp(logprobs - values["logprobs"])


def _clip_ratio(ratio: Tensor, values: Values) -> Tensor:
    """The ratio [R] within the bounds of each token."""
    low, high = (values[name] for name in BOUNDS)
    return torch.minimum(torch.maximum(ratio, low), high)


@dataclass(frozen=True, slots=True)
class _LossForm:
    """A loss function with the names of what it reads."""

    function: Callable[[Tensor, Values], Tensor]
    needed: tuple[str, ...]  # of every row
    settings: Mapping[str, float]  # with their defaults
    optional: tuple[str, ...] = ()  # of a row: instead of a setting, or of 1


_POLICY = ("logprobs", "advantages")
_FORMS: Mapping[str, _LossForm] = {
    "cross_entropy": _LossForm(cross_entropy, (), {}, ("weights",)),
    "importance_sampling": _LossForm(importance_sampling, _POLICY, {}),
    "ppo": _LossForm(ppo, _POLICY, dict(zip(BOUNDS, (0.8, 1.2), strict=True)), BOUNDS),
    "cispo": _LossForm(cispo, _POLICY, dict(zip(BOUNDS, (0.0, 4.0), strict=True)), BOUNDS),
    "dro": _LossForm(dro, _POLICY, {"beta": 0.05}),
}
NAMES = tuple(_FORMS)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss by name, with all of its settings."""

    name: str
    settings: Mapping[str, float]

    def __call__(self, logprobs: Tensor, values: Values) -> Tensor:
        """The sum over the tokens, a scalar. ``values``: those that ``needed`` and ``optional`` name, [R]
        each."""
        all_values = {key: logprobs.new_full((), value) for key, value in self.settings.items()}
        all_values |= {key: torch.ones_like(logprobs) for key in self.optional if key not in all_values}
        return _FORMS[self.name].function(logprobs, {**all_values, **values})

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the values that every row must have besides its targets."""
        return _FORMS[self.name].needed

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of values that a row may have: bounds instead of the settings, weights instead of 1."""
        return _FORMS[self.name].optional


def token_loss(name: str, settings: Mapping[str, float | str] | None = None) -> TokenLoss:
    """The loss called ``name``, with ``settings`` in place of its defaults. Raises ValueError for an unknown
    name or setting, for a value that is not a number from 0, and for bounds in the wrong order."""
    if name not in _FORMS:
        raise ValueError(f"loss_fn is {name!r}; this server computes {', '.join(NAMES)}")
    all_settings = dict(_FORMS[name].settings)
    for key, value in (settings or {}).items():
        if key not in all_settings:
            names = ", ".join(all_settings) or "none"
            raise ValueError(f"loss_fn_config has {key!r}; the settings of {name} are: {names}")
        if isinstance(value, str) or not math.isfinite(value) or value < 0:
            raise ValueError(f"loss_fn_config has {key} = {value!r}; use a number from 0")
        all_settings[key] = float(value)
    if BOUNDS[0] in all_settings and all_settings[BOUNDS[0]] > all_settings[BOUNDS[1]]:
        low, high = (all_settings[bound] for bound in BOUNDS)
        raise ValueError(f"loss_fn_config has the bounds {low:g} to {high:g}; give the lower one first")
    return TokenLoss(name, all_settings)


def mean_weights(masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Weights [L] float32 of each row: 1 / trained tokens of all rows where trained, else 0."""
    count = sum(int(mask.sum()) for mask in masks)
    return [(mask / max(1, count)).astype(np.float32) for mask in masks]


def dpo(logprobs: np.ndarray, reference: np.ndarray, beta: float) -> tuple[np.ndarray, ...]:
    """DPO with the sigmoid loss (arXiv 2305.18290, eq. 7). ``logprobs`` and ``reference``: [P, 2], log pi of
    the chosen and the rejected answer, summed over its tokens. Returns (loss [P], rewards beta log(pi /
    reference) [P, 2], slopes d loss / d log pi [P, 2])."""
    rewards = beta * (logprobs - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    chosen_slope = beta * np.exp(-np.logaddexp(0.0, margins))  # beta sigmoid(-margin)
    return np.logaddexp(0.0, -margins), rewards, np.stack([-chosen_slope, chosen_slope], axis=1)
