"""How the microbatches of an optimizer step go through the model: the interface of its two backends.

``train.local`` computes in one process, one microbatch after the other; ``train.sharded`` on the ranks of a
layout. Both return identical results on every rank, in the order of the microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from ostinato.algo.offpolicy import Mismatch
from ostinato.model.config import MoEConfig
from ostinato.model.decoder import Decoder
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
class ScoreOptions:
    """Which policy scores, by which forward, and what is returned.

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

    def score(self, parts: Sequence[Inputs], options: ScoreOptions) -> list[Scores]:
        """Forward alone."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the work since the last call took beside the work itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Backend:
    """What computes for a trainer: one process, or the ranks that hold a model together, as one of them."""

    passes: Passes
    leaves: Leaves
    fingerprint: Callable[[], str]  # of the frozen weights of the whole model
    owner: np.ndarray | None = None  # [MoE layers, experts]: the expert rank that keeps an expert; None: one
    mirror: Decoder | None = None  # where all parameters are trained: the whole of it, for samplers to read


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


__all__ = ["Backend", "Objective", "Outcome", "Passes", "ScoreOptions", "Scores", "counted", "watching"]
