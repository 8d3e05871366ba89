"""The passes of a process that has all of the model: one microbatch after the other."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ostinato.algo.logprobs import Vocabulary, chunked_logprobs, linear_logprobs
from ostinato.model.base import Base
from ostinato.model.lora import Adapters, Factors, Prepared
from ostinato.model.ops import Ops
from ostinato.train.halve import halve, merge_outcomes, merge_scores
from ostinato.train.inputs import Inputs
from ostinato.train.passes import (
    Objective,
    Outcome,
    ScoreOptions,
    Scores,
    choose_head_products,
    compare_routing,
    watch_routers,
)

logger = logging.getLogger(__name__)
T = TypeVar("T", Outcome, Scores)


class LocalPasses:
    """``train.passes.Passes`` of one process. ``entropy_grad``: the loss needs the entropy's gradient.
    ``reference``: adapters of the reference policy; None: the base.
    ``vocabulary``: the part of it that the head of ``decoder`` computes, None: the whole.
    ``splits``: a microbatch that does not fit the device is computed by halves, whose losses are added.
    ``between`` is called before every microbatch."""

    def __init__(
        self,
        decoder: Base,
        adapters: Adapters | None,
        *,
        reference: Adapters | None = None,
        ops: Ops,
        temperature: float,
        recompute: bool,
        entropy_grad: bool,
        splits: bool = True,
        between: Callable[[], None] = lambda: None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self._decoder, self._adapters, self._ops = decoder, adapters, ops
        self._temperature, self._recompute, self._entropy_grad = temperature, recompute, entropy_grad
        self._vocabulary = vocabulary
        self._splits, self._is_adding, self._reference = splits, False, reference
        self._too_large_rows, self._num_halved, self._between = sys.maxsize, 0, between
        self.progress = 0.0

    def train(self, parts: Sequence[Inputs], objective: Objective, scale: float) -> list[Outcome]:
        """See ``Passes.train``; the gradients of adapters are complete after the last microbatch."""
        factors = Factors(self._adapters, self._decoder.dtype) if self._adapters else None

        def work(part: Inputs) -> Outcome:
            return self._train_part(part, objective, scale, factors)

        outcomes = [self._run_within_memory(part, work, merge_outcomes, factors) for part in parts]
        if factors:
            factors.backward()
        return outcomes

    def score(self, parts: Sequence[Inputs], options: ScoreOptions) -> list[Scores]:
        """See ``Passes.score``."""
        adapters = self._reference if options.reference else self._adapters
        with torch.set_grad_enabled(options.as_trained):
            prepared = adapters.prepare(self._decoder.dtype) if adapters else None

        def work(part: Inputs) -> Scores:
            return self._score_part(part, options, prepared)

        return [self._run_within_memory(part, work, merge_scores) for part in parts]

    def metrics(self) -> dict[str, float]:
        """``halved_microbatches``: how often since the last call the device was too small and a part was
        halved; empty if it never was. The count starts again."""
        halved, self._num_halved = self._num_halved, 0
        return {"halved_microbatches": float(halved)} if halved else {}

    def _run_within_memory(
        self,
        part: Inputs,
        work: Callable[[Inputs], T],
        merge: Callable[[Sequence[tuple[Tensor, T]]], T],
        factors: Factors | None = None,
    ) -> T:
        """The result of ``work`` for the part. If the device is too small for it, or was too small for a part
        that was no larger, it is computed by halves, with a warning, and ``merge`` joins their results.

        Raises torch's error for a single sequence, without ``splits``, and in a backward that adds to the
        gradients of a model's own parameters.
        """
        self._between()
        both_halves = halve(part) if len(part.tokens) >= self._too_large_rows else None
        if both_halves is None:
            try:
                return work(part)
            except torch.OutOfMemoryError:
                is_single = len(np.unique(part.source.sample_idx)) < 2
                if not self._splits or is_single or self._is_adding:
                    raise
                if factors:
                    factors.drop()
            # here the error is freed, whose frames held the activations: not yet in the except clause
            gc.collect()
            torch.cuda.empty_cache()
            self._too_large_rows = len(part.tokens)
            both_halves = halve(part)
            assert both_halves is not None
            logger.warning(
                f"the device is full: a microbatch of {len(part.tokens)} rows is computed by halves; lower "
                "trainer.tokens_per_microbatch, or set trainer.recompute=true"
            )
        self._num_halved += 1
        return merge(
            [(half.rows, self._run_within_memory(half.inputs, work, merge, factors)) for half in both_halves]
        )

    def _train_part(
        self, part: Inputs, objective: Objective, scale: float, factors: Factors | None
    ) -> Outcome:
        """Forward and backward of a microbatch; its graph is freed on return."""
        self.progress += 1
        self._is_adding = False
        hidden, native = self.forward(part, factors and factors.prepared)
        logprobs, entropy = self.logprobs(hidden, part, want_entropy=True)
        scores = Scores(logprobs=logprobs, entropy=entropy, counts=compare_routing(part, native))
        outcome = objective(part, scores)
        self._is_adding = factors is None  # what a failed backward has added to gradients cannot be undone
        (outcome.loss * scale).backward()
        self._is_adding = False
        if factors:
            factors.add()
        return outcome.detach()

    def _score_part(self, part: Inputs, options: ScoreOptions, prepared: Prepared | None) -> Scores:
        """Forward of a microbatch alone, with what ``options`` asks for."""
        self.progress += 1
        margins_by_layer: list[Tensor] = []
        ops = watch_routers(self._ops, margins_by_layer) if options.margins else self._ops
        with torch.set_grad_enabled(options.as_trained):
            hidden, native = self.forward(part, prepared, ops)
        logprobs = None
        if options.logprobs:
            with torch.no_grad():  # else the head would compute the gradients of the states
                logprobs, _ = self.logprobs(hidden.detach(), part, want_entropy=False)
        return Scores(
            logprobs=logprobs,
            counts=compare_routing(part, native),
            native=native if options.native else None,
            margins=torch.stack(margins_by_layer, dim=1) if margins_by_layer else None,
        )

    def forward(
        self, part: Inputs, adapters: Adapters | Prepared | None, ops: Ops | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [R, D] of the rows that predict a target, and the experts that the model would choose
        for all rows, [T, moe_layers, top_k]."""
        hidden, native = self._decoder(
            part.tokens,
            part.positions,
            (ops or self._ops).attention(part.segments),
            adapters=adapters,
            routing=part.routing,
            routing_checked=True,  # once for the batch: ``ReplayGuard``
            ops=ops or self._ops,
            recompute=self._recompute and torch.is_grad_enabled(),
        )
        # Not hidden[rows]: the first tokens of siblings share a row. The backward of indexing sums such rows
        # with atomics, in no fixed order; that of index_select sums in the order of rows.
        return hidden.index_select(0, part.rows), native

    def logprobs(self, hidden: Tensor, part: Inputs, *, want_entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probabilities [R] of the targets and the entropy [R] (NaN where it is not wanted)."""
        head = self._decoder.head_weight
        options: dict[str, Any] = {
            "support": part.source.support,  # what was sampled from, whichever policy is scored
            "temperature": self._temperature,
            "want_entropy": want_entropy,
            "vocabulary": self._vocabulary,
        }
        if head is None or head.requires_grad:
            return chunked_logprobs(hidden, part.targets, self._decoder.logits, **options)
        options["entropy_grad"] = want_entropy and self._entropy_grad
        options["matmul_nt"], options["matmul_nn"] = choose_head_products(self._decoder, self._ops)
        options["score"], options["head"] = self._ops.score, self._ops.head
        return linear_logprobs(hidden, head, part.targets, **options)
