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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.algo.offpolicy import bounded_exp

Values = Mapping[str, Tensor]
BOUNDS = ("clip_low_threshold", "clip_high_threshold")


def cross_entropy(logprobs: Tensor, given: Values) -> Tensor:
    """-sum w log p. It also serves a client's own loss, with weights -d loss / d log p."""
    return -(given["weights"] * logprobs).sum()


def importance_sampling(logprobs: Tensor, given: Values) -> Tensor:
    """REINFORCE corrected for the policy that sampled."""
    return -(_ratio(logprobs, given) * given["advantages"]).sum()


def ppo(logprobs: Tensor, given: Values) -> Tensor:
    """The clipped surrogate (arXiv 1707.06347, eq. 7)."""
    ratio, advantages = _ratio(logprobs, given), given["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, given) * advantages).sum()


def cispo(logprobs: Tensor, given: Values) -> Tensor:
    """MiniMax-M1, arXiv 2506.13585: a bounded weight, and every token keeps its gradient."""
    return -(_clip(_ratio(logprobs, given).detach(), given) * given["advantages"] * logprobs).sum()


def dro(logprobs: Tensor, given: Values) -> Tensor:
    """Direct reward optimisation (arXiv 2405.19107): a quadratic penalty instead of a ratio."""
    penalty = 0.5 * given["beta"] * (logprobs - given["logprobs"]).square()
    return -(given["advantages"] * logprobs - penalty).sum()


def _ratio(logprobs: Tensor, given: Values) -> Tensor:
    return bounded_exp(logprobs - given["logprobs"])


def _clip(ratio: Tensor, given: Values) -> Tensor:
    low, high = (given[name] for name in BOUNDS)
    return torch.minimum(torch.maximum(ratio, low), high)


@dataclass(frozen=True, slots=True)
class _Form:
    function: Callable[[Tensor, Values], Tensor]
    needed: tuple[str, ...]  # of every row
    settings: Mapping[str, float]  # with their defaults
    optional: tuple[str, ...] = ()  # of a row: instead of a setting, or of 1


_POLICY = ("logprobs", "advantages")
_FORMS: Mapping[str, _Form] = {
    "cross_entropy": _Form(cross_entropy, (), {}, ("weights",)),
    "importance_sampling": _Form(importance_sampling, _POLICY, {}),
    "ppo": _Form(ppo, _POLICY, dict(zip(BOUNDS, (0.8, 1.2), strict=True)), BOUNDS),
    "cispo": _Form(cispo, _POLICY, dict(zip(BOUNDS, (0.0, 4.0), strict=True)), BOUNDS),
    "dro": _Form(dro, _POLICY, {"beta": 0.05}),
}
NAMES = tuple(_FORMS)


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss by name, with all of its settings."""

    name: str
    settings: Mapping[str, float]

    def __call__(self, logprobs: Tensor, given: Values) -> Tensor:
        """The sum over the tokens, a scalar. ``given``: what ``needed`` and ``optional`` name, [R] each."""
        full = {key: logprobs.new_full((), value) for key, value in self.settings.items()}
        full |= {key: torch.ones_like(logprobs) for key in self.optional if key not in full}
        return _FORMS[self.name].function(logprobs, {**full, **given})

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of the values that every row must have besides its targets."""
        return _FORMS[self.name].needed

    @property
    def optional(self) -> tuple[str, ...]:
        """Names of values that a row may have: bounds instead of the settings, weights instead of 1."""
        return _FORMS[self.name].optional


def token_loss(name: str, settings: Mapping[str, float | str] | None = None) -> TokenLoss:
    """The loss called ``name``. Raises ValueError for an unknown name or setting, and for a bad value."""
    if name not in _FORMS:
        raise ValueError(f"loss_fn is {name!r}; this server computes {', '.join(NAMES)}")
    full = dict(_FORMS[name].settings)
    for key, value in (settings or {}).items():
        if key not in full:
            known = ", ".join(full) or "none"
            raise ValueError(f"loss_fn_config has {key!r}; the settings of {name} are: {known}")
        if isinstance(value, str) or not math.isfinite(value) or value < 0:
            raise ValueError(f"loss_fn_config has {key} = {value!r}; use a number from 0")
        full[key] = float(value)
    if BOUNDS[0] in full and full[BOUNDS[0]] > full[BOUNDS[1]]:
        low, high = (full[bound] for bound in BOUNDS)
        raise ValueError(f"loss_fn_config has the bounds {low:g} to {high:g}; give the lower one first")
    return TokenLoss(name, full)
