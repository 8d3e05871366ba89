"""How the microbatches of an optimizer step go through the model.

The trainer decides what is asked and what is learned from it; ``Passes`` are who computes: ``InTurn`` a
process that has all of the model, one microbatch after the other; ``train.sharded`` the ranks of a layout.
Whoever it is, every process gets the same answers, in the order of the microbatches, and all decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ostinato.algo.offpolicy import Mismatch
from ostinato.model.config import MoEConfig
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.moe import margins
from ostinato.model.ops import Ops
from ostinato.train.gate import row_counts
from ostinato.train.inputs import Inputs
from ostinato.train.leaves import Leaves


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """What a microbatch got. Without a gradient, but for those that an ``Objective`` is given in training."""

    logprobs: Tensor | None  # [R] of the targets
    entropy: Tensor | None = None  # [R] of their distributions; in training only
    counts: Tensor | None = None  # [3, T] gate.row_counts, where the batch carries experts
    native: Tensor | None = None  # [T, L_moe, K], the experts that the model itself chooses
    margins: Tensor | None = None  # [T, L_moe], model.moe.margins


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What a microbatch is worth: its loss, and sums of measurements over its tokens, without gradient."""

    loss: Tensor  # with a gradient until its backward is done
    stats: Mapping[str, Tensor]
    mismatch: Mismatch
    counts: Tensor | None  # as in ``Scores``

    def detached(self) -> Outcome:
        return replace(self, loss=self.loss.detach())


Objective = Callable[[Inputs, Scores], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """Which policy scores, how exactly, and what it tells.

    ``as_trained``: by the very forward that training runs, recorded for a backward that never comes. Without
    gradients a layer may multiply in another order, and a ratio that should be 1 would be 1 within rounding.
    """

    adapted: bool = True  # False: the base
    as_trained: bool = True
    logprobs: bool = True
    native: bool = False
    margins: bool = False


class Passes(Protocol):
    """Experts are replayed where ``Inputs.routing`` says so."""

    @property
    def progress(self) -> float:
        """Passes over microbatches: grows while there is work."""
        ...

    def train(self, parts: Sequence[Inputs], objective: Objective, scale: float) -> list[Outcome]:
        """Forward and backward of every microbatch: adds the gradients of ``scale`` times the losses."""
        ...

    def score(self, parts: Sequence[Inputs], how: How) -> list[Scores]:
        """Forward alone."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the work since the last call took beside the work itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """What the ranks that have a model between them do together, from the seat of one of them."""

    passes: Passes
    leaves: Leaves
    fingerprint: Callable[[], str]  # of the frozen weights of the whole model
    owner: np.ndarray | None = None  # [MoE layers, experts]: the expert rank that keeps an expert; None: one
    mirror: Decoder | None = None  # where all parameters are trained: the whole of it, for samplers to read


class Forward(Protocol):
    def __call__(
        self, part: Inputs, adapters: Adapters | None, routing: Tensor | None, ops: Ops | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [R, D] of the rows that predict a target, and native experts [T, L_moe, K]."""
        ...


class Head(Protocol):
    def __call__(self, hidden: Tensor, part: Inputs, *, want_entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probabilities [R] of the targets and the entropy [R] (NaN where it is not wanted)."""
        ...


class InTurn:
    """``Passes`` of a process that has all of the model."""

    def __init__(self, forward: Forward, head: Head, adapters: Adapters | None, ops: Ops) -> None:
        self._forward, self._head, self._adapters, self._ops = forward, head, adapters, ops
        self.progress = 0.0

    def train(self, parts: Sequence[Inputs], objective: Objective, scale: float) -> list[Outcome]:
        return [self._trained(part, objective, scale) for part in parts]

    def score(self, parts: Sequence[Inputs], how: How) -> list[Scores]:
        return [self._scored(part, how) for part in parts]

    def metrics(self) -> dict[str, float]:
        return {}

    def _trained(self, part: Inputs, objective: Objective, scale: float) -> Outcome:
        """The graph of a microbatch is gone on return."""
        self.progress += 1
        hidden, native = self._forward(part, self._adapters, part.routing)
        logprobs, entropy = self._head(hidden, part, want_entropy=True)
        scores = Scores(logprobs=logprobs, entropy=entropy, counts=counted(part, native))
        outcome = objective(part, scores)
        (outcome.loss * scale).backward()
        return outcome.detached()

    def _scored(self, part: Inputs, how: How) -> Scores:
        self.progress += 1
        gaps: list[Tensor] = []
        ops = watching(self._ops, gaps) if how.margins else self._ops
        with torch.set_grad_enabled(how.as_trained):
            hidden, native = self._forward(part, self._adapters if how.adapted else None, part.routing, ops)
        logprobs = None
        if how.logprobs:
            with (
                torch.no_grad()
            ):  # detached: a head computes the slopes of hidden states that need a gradient
                logprobs, _ = self._head(hidden.detach(), part, want_entropy=False)
        return Scores(
            logprobs=logprobs,
            counts=counted(part, native),
            native=native if how.native else None,
            margins=torch.stack(gaps, dim=1) if gaps else None,
        )


def counted(part: Inputs, native: Tensor | None) -> Tensor | None:
    """Of carried experts against native ones; None where there is nothing to compare."""
    return None if native is None or part.carried is None else row_counts(native, part.carried)


def watching(ops: Ops, into: list[Tensor]) -> Ops:
    """``ops`` whose ``route`` also appends the margin [T] of every MoE layer that is passed."""

    def route(
        logits: Tensor, moe: MoEConfig, bias: Tensor | None = None, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        into.append(margins(logits.detach(), moe, bias))
        return ops.route(logits, moe, bias, given)

    return replace(ops, route=route)


__all__ = ["How", "InTurn", "Objective", "Outcome", "Passes", "Ranks", "Scores", "counted", "watching"]
