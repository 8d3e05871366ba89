"""A policy loss of a user's own, named by ``algo.loss = "file.py:function"``::

    def loss(new_logprobs, old_logprobs, advantages, *, sample_idx, num_samples):
        return per_token_loss                       # [R], or (it, {"name": values [R]}) with statistics

Arguments are [R], one entry per trained token, as in ``algo.losses``; what it returns is neither weighted nor
averaged: aggregation, the correction of the ratio, k3 and entropy stay those of ``[algo]``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ostinato.objects import load_named


class OwnLoss(str):
    """The name of a loss in a recipe, with its function."""

    function: Callable[..., Any]

    def __new__(cls, spec: str) -> OwnLoss:
        """Load the function at ``spec`` and try it on three tokens. Raises ValueError if there is none, or if
        it raises, is not finite or has no gradient there."""
        loss = super().__new__(cls, spec)
        loss.function = load_named(spec, "algo.loss", nearest="clipped")
        _try_on_tokens(loss)
        return loss

    def __getnewargs__(self) -> tuple[str]:  # pickled and copied by its name
        return (str(self),)

    def __getstate__(self) -> None:  # ``__new__`` loads the function again
        return None

    def terms(
        self,
        new_logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        sample_idx: Tensor,
        num_samples: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss [R] of each token, statistics [R] by name). Raises ValueError for other shapes."""
        result = self.function(
            new_logprobs, old_logprobs, advantages, sample_idx=sample_idx, num_samples=num_samples
        )
        loss, stats = result if isinstance(result, tuple) else (result, {})
        for name, values in {"its loss": loss, **stats}.items():
            if not isinstance(values, Tensor) or values.shape != new_logprobs.shape:
                shape = (
                    list(values.shape) or "a scalar" if isinstance(values, Tensor) else type(values).__name__
                )
                raise ValueError(
                    f"algo.loss {str(self)!r}: {name} is {shape}; return one value per token, "
                    f"{list(new_logprobs.shape)}, neither weighted nor averaged"
                )
        return loss, {name: values.detach() for name, values in stats.items()}


@cache
def load_loss(spec: str) -> OwnLoss:
    """The loss at ``spec``, "file.py:function"; it is loaded and tried once in a process. Raises ValueError
    as ``OwnLoss`` does."""
    return OwnLoss(spec)


def _try_on_tokens(loss: OwnLoss) -> None:
    """Call ``loss`` on three tokens. Raises ValueError if it raises, returns other shapes, is not finite, or
    has no gradient."""
    new_logprobs = torch.tensor([-1.0, -0.5, -2.0], requires_grad=True)
    sample_idx = torch.tensor([0, 0, 1])
    try:
        values, _ = loss.terms(
            new_logprobs, new_logprobs.detach() - 0.1, torch.tensor([1.0, 1.0, -1.0]), sample_idx, 2
        )
    except ValueError:
        raise
    except Exception as error:  # a user's code
        raise ValueError(
            f"algo.loss {str(loss)!r} raised {type(error).__name__}: {error}, on three tokens; it is "
            "called as loss(new_logprobs, old_logprobs, advantages, sample_idx=.., num_samples=..)"
        ) from error
    if not torch.isfinite(values).all():
        raise ValueError(
            f"algo.loss {str(loss)!r} is {values.tolist()} on three tokens; make it finite there"
        )
    if not values.requires_grad:
        raise ValueError(
            f"algo.loss {str(loss)!r} gives a loss without a gradient, so nothing is learned; compute it "
            "from new_logprobs"
        )
