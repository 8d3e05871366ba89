"""The teacher of on-policy distillation: another policy, which scores the tokens that were sampled.

Teacher         the protocol
LocalTeacher    in this process        train.teacher_at    at an address
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ostinato.model.base import Base
from ostinato.model.flops import FlopModel, Work
from ostinato.model.lora import Adapters
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.train.inputs import Inputs
from ostinato.train.local import LocalPasses
from ostinato.train.passes import Passes, ScoreOptions


class Teacher(Protocol):
    """Another policy, which gives log-probabilities of sampled tokens."""

    @property
    def progress(self) -> float:
        """A number that grows during work."""
        ...

    def score(self, parts: Sequence[Inputs]) -> tuple[list[Inputs], float]:
        """(parts with ``teacher``, its log-probabilities [R] of the targets; the FLOPs spent here)."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the work since the last call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalTeacher:
    """A teacher in this process. A mixture of experts is routed by its own routers."""

    passes: Passes
    flops: FlopModel

    @property
    def progress(self) -> float:
        return self.passes.progress

    def score(self, parts: Sequence[Inputs]) -> tuple[list[Inputs], float]:
        """See ``Teacher.score``: at the sampling temperature, over the recorded support, and by exactly the
        forward that training runs."""
        unrouted = [replace(part, routing=None, carried=None) for part in parts]
        scores_by_part = self.passes.score(unrouted, ScoreOptions())
        scored = [
            replace(part, teacher=scores.logprobs) for part, scores in zip(parts, scores_by_part, strict=True)
        ]
        return scored, self.flops.forward(sum((part.work for part in parts), Work()))

    def metrics(self) -> dict[str, float]:
        return {}


def local_teacher(
    decoder: Base, adapters: Adapters | None, *, temperature: float = 1.0, ops: Ops = TORCH_OPS
) -> LocalTeacher:
    """A teacher in this process. ``decoder`` may be the one that is trained, if its base is frozen. The
    tensors of ``adapters`` are set to require gradients."""
    for pair in adapters.tensors.values() if adapters else ():
        for factor in pair:
            factor.requires_grad_()  # as in training, where a layer may multiply in another order
    passes = LocalPasses(
        decoder, adapters, ops=ops, temperature=temperature, recompute=False, entropy_grad=False
    )
    return LocalTeacher(passes=passes, flops=decoder.flops(adapters.spec if adapters else None))
