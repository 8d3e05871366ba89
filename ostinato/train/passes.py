"""Passes of the microbatches of an optimizer step through the model: the interface of its two backends.

``train.local`` computes in one process, one microbatch after the other; ``train.sharded`` on the ranks of a
layout. Both return identical results on every rank, in the order of the microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ostinato.algo.algorithms import Algorithm, Reference, policy_loss
from ostinato.algo.logprobs import Matmul
from ostinato.algo.offpolicy import Mismatch, importance_weights, mismatch
from ostinato.model.base import Base
from ostinato.model.config import MoEConfig
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.moe import compute_routing_margins
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.train.gate import count_rows
from ostinato.train.inputs import Inputs
from ostinato.train.leaves import Leaves


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """The scores of a microbatch, without gradients except those given to an ``Objective`` in training."""

    logprobs: Tensor | None  # [R] of the targets
    entropy: Tensor | None = None  # [R] of their distributions; in training only
    counts: Tensor | None = None  # [3, T] gate.count_rows, where the batch carries experts
    native: Tensor | None = None  # [T, L_moe, K], the experts that the model itself chooses
    margins: Tensor | None = None  # [T, L_moe], model.moe.margins


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """The loss of a microbatch, and sums of measurements over its tokens without gradients."""

    loss: Tensor  # with a gradient until its backward is done
    stats: Mapping[str, Tensor]
    mismatch: Mismatch
    counts: Tensor | None  # as in ``Scores``

    def detach(self) -> Outcome:
        return replace(self, loss=self.loss.detach())


Objective = Callable[[Inputs, Scores], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """The policy that scores, its forward, and the results that are returned.

    ``as_trained``: by the exact forward of training, recorded as if for a backward. Without gradients a layer
    may multiply in another order, and a ratio that should be 1 would be 1 only up to rounding.
    """

    reference: bool = False  # by the policy from which the KL is measured: the base, or the start
    as_trained: bool = True
    logprobs: bool = True
    native: bool = False
    margins: bool = False


class Passes(Protocol):
    """Passes over microbatches. Experts are replayed where ``Inputs.routing`` has them."""

    @property
    def progress(self) -> float:
        """Number of passes over microbatches so far, which grows during work."""
        ...

    def train(self, parts: Sequence[Inputs], objective: Objective, scale: float) -> list[Outcome]:
        """Run forward and backward of every microbatch, and add the gradients of ``scale`` times the
        losses."""
        ...

    def score(self, parts: Sequence[Inputs], options: ScoreOptions) -> list[Scores]:
        """Run the forward of every microbatch, and return its scores."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of the overhead since the last call (traffic, padding)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Backend:
    """The compute backend of a trainer: one process, or this rank of those that hold a model together."""

    passes: Passes
    leaves: Leaves
    fingerprint: Callable[[], str]  # of the frozen weights of the whole model
    owner: np.ndarray | None = None  # [MoE layers, experts]: the expert rank that keeps an expert; None: one
    mirror: Decoder | None = None  # where all parameters are trained: a whole model for samplers


def copy_reference(adapters: Adapters | None, algorithm: Algorithm) -> Adapters | None:
    """A copy of the adapters if the KL of the run is measured from its start; else None."""
    is_start = algorithm.needs_reference and algorithm.kl_reference is Reference.START
    return adapters.detach_copy() if adapters is not None and is_start else None


def compare_routing(part: Inputs, native: Tensor | None) -> Tensor | None:
    """``count_rows`` of carried experts against native ones; None where there is nothing to compare."""
    return None if native is None or part.carried is None else count_rows(native, part.carried)


def watch_routers(ops: Ops, margins_by_layer: list[Tensor]) -> Ops:
    """``ops`` whose ``route`` also appends the margins [T] of every MoE layer to ``margins_by_layer``."""

    def route(
        logits: Tensor, moe: MoEConfig, bias: Tensor | None = None, routing: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        margins_by_layer.append(compute_routing_margins(logits.detach(), moe, bias))
        return ops.route(logits, moe, bias, routing)

    return replace(ops, route=route)


def choose_head_products(decoder: Base, ops: Ops) -> tuple[Matmul, Matmul] | tuple[None, None]:
    """The two products of `linear_logprobs` for a frozen head, with logits as in ``Decoder.logits``.

    (None, None) means both in fp32, the weight cast once: what torch can do on a CPU for an FP32 head over
    bf16 weights. Native products, and those of a GPU, multiply in bf16 and sum in fp32, which is as exact and
    several times faster. Log-probabilities by ``Ops.score`` are of the sampler's own logits.
    """
    head = decoder.head_weight
    assert head is not None, "logits that are more than a product have no products of their own"
    is_gpu_head = head.is_cuda and head.dtype == decoder.dtype
    widens_weight = decoder.fp32_head and ops.gemm is TORCH_OPS.gemm and not is_gpu_head
    if (head.dtype.itemsize >= 4 or widens_weight) and ops.score is None:
        return None, None
    out_dtype = torch.float32 if decoder.fp32_head else None

    def multiply_logits(hidden_nD: Tensor, head_VD: Tensor) -> Tensor:
        return ops.gemm.nt(hidden_nD, head_VD, None, out_dtype)

    def multiply_slopes(logit_slopes_nV: Tensor, head_VD: Tensor) -> Tensor:
        return ops.gemm.nn(logit_slopes_nV.to(decoder.dtype), head_VD)

    return multiply_logits, multiply_slopes


def batch_objective(algorithm: Algorithm, num_samples: int) -> Objective:
    """The objective for microbatches of a batch of ``num_samples``. A decoupled algorithm anchors its ratio
    at the old policy (without ``old``, the one that is trained) and corrects for the mismatch of old and
    behaviour; others anchor it at behaviour."""

    def objective(part: Inputs, scores: Scores) -> Outcome:
        logprobs, entropy, weights = scores.logprobs, scores.entropy, None
        assert logprobs is not None and entropy is not None
        old_logprobs = logprobs.detach() if part.old is None else part.old
        if algorithm.is_decoupled:
            weights = importance_weights(
                old_logprobs - part.behaviour,
                part.sample_idx,
                num_samples,
                algorithm.correction,
                low=algorithm.correction_low,
                high=algorithm.correction_high,
            )
        terms = policy_loss(
            algorithm,
            logprobs,
            old_logprobs if algorithm.is_decoupled else part.behaviour,
            part.advantages,
            part.weights,
            part.sample_idx,
            num_samples=num_samples,
            correction=weights,
            ref_logprobs=part.reference,
            teacher_logprobs=part.teacher,
            entropy=entropy if algorithm.needs_entropy else None,
        )
        return Outcome(
            loss=terms.total,
            stats={"entropy": entropy.detach().sum(), **terms.stats},
            mismatch=mismatch(old_logprobs, part.behaviour, correction=weights),
            counts=scores.counts,
        )

    return objective
