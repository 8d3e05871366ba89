"""The passes of a process that has all of the model: one microbatch after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ostinato.algo.logprobs import chunked_logprobs, linear_logprobs
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.ops import Ops
from ostinato.train.inputs import Inputs
from ostinato.train.passes import Objective, Outcome, ScoreOptions, Scores, counted, head_products, watching


class LocalPasses:
    """``train.passes.Passes`` of one process. ``entropy_grad``: the loss needs the entropy's gradient."""

    def __init__(
        self,
        decoder: Decoder,
        adapters: Adapters | None,
        *,
        ops: Ops,
        temperature: float,
        recompute: bool,
        entropy_grad: bool,
    ) -> None:
        self._decoder, self._adapters, self._ops = decoder, adapters, ops
        self._temperature, self._recompute, self._entropy_grad = temperature, recompute, entropy_grad
        self.progress = 0.0

    def train(self, parts: Sequence[Inputs], objective: Objective, scale: float) -> list[Outcome]:
        return [self._trained(part, objective, scale) for part in parts]

    def score(self, parts: Sequence[Inputs], options: ScoreOptions) -> list[Scores]:
        return [self._scored(part, options) for part in parts]

    def metrics(self) -> dict[str, float]:
        return {}

    def _trained(self, part: Inputs, objective: Objective, scale: float) -> Outcome:
        """Forward and backward of a microbatch; its graph is freed on return."""
        self.progress += 1
        hidden, native = self.forward(part, self._adapters)
        logprobs, entropy = self.logprobs(hidden, part, want_entropy=True)
        scores = Scores(logprobs=logprobs, entropy=entropy, counts=counted(part, native))
        outcome = objective(part, scores)
        (outcome.loss * scale).backward()
        return outcome.detached()

    def _scored(self, part: Inputs, options: ScoreOptions) -> Scores:
        self.progress += 1
        gaps: list[Tensor] = []
        ops = watching(self._ops, gaps) if options.margins else self._ops
        with torch.set_grad_enabled(options.as_trained):
            hidden, native = self.forward(part, self._adapters if options.adapted else None, ops)
        logprobs = None
        if options.logprobs:
            with torch.no_grad():  # detached, else the head would compute the gradients of the states
                logprobs, _ = self.logprobs(hidden.detach(), part, want_entropy=False)
        return Scores(
            logprobs=logprobs,
            counts=counted(part, native),
            native=native if options.native else None,
            margins=torch.stack(gaps, dim=1) if gaps else None,
        )

    def forward(
        self, part: Inputs, adapters: Adapters | None, ops: Ops | None = None
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
        # not hidden[rows]: the first tokens of siblings share a row, and the backward of indexing sums such
        # rows with atomics, in no fixed order; that of index_select sums in the order of rows
        return hidden.index_select(0, part.rows), native

    def logprobs(self, hidden: Tensor, part: Inputs, *, want_entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probabilities [R] of the targets and the entropy [R] (NaN where it is not wanted)."""
        head = self._decoder.head_weight
        options: dict[str, Any] = {
            "support": part.source.support,  # what was sampled from, whichever policy is scored
            "temperature": self._temperature,
            "want_entropy": want_entropy,
        }
        if head.requires_grad:
            return chunked_logprobs(hidden, part.targets, self._decoder.logits, **options)
        options["entropy_grad"] = want_entropy and self._entropy_grad
        options["matmul_nt"], options["matmul_nn"] = head_products(self._decoder, self._ops)
        options["score"] = self._ops.score
        return linear_logprobs(hidden, head, part.targets, **options)
