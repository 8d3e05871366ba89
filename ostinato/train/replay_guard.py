"""Which experts a step replays, and whether it may train on them.

admit      before a step: refuses a batch with routes that no model could replay, and at intervals measures
           the mismatch
judge      before each optimizer step: refuses carried experts that are not those of their tokens
metrics    after the step
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from ostinato.algo.routing import THRESHOLD, Misaligned
from ostinato.model.base import Facts
from ostinato.model.flops import FlopModel, Work
from ostinato.train.gate import (
    drop_routes,
    find_unreplayable,
    make_refusal,
    measure_agreement,
    measure_coverage,
)
from ostinato.train.inputs import Inputs, as_inputs
from ostinato.train.measure import mismatch_row, score_parts
from ostinato.train.passes import Passes, ScoreOptions
from ostinato.train.totals import Totals, measure_balance
from ostinato.types import Batch, Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A batch that may be trained on."""

    batch: Batch
    mismatch: dict[str, Any] | None  # a row of mismatch.jsonl without its step
    note: str  # a message for the user; "" for none


class ReplayGuard:
    """``replay``: MoE layers use the experts that the batch carries; "shuffled", a control: those of the row
    half a microbatch away, without a gate. With True the batch is refused if the experts of a sequence agree
    with the trainer's own in less than ``threshold``, beyond chance; 0 refuses none. Every ``measure_every``
    steps a row of mismatch.jsonl is measured; 0 is never. ``owner`` [L, E]: the rank that keeps an expert.
    """

    def __init__(
        self,
        config: Facts,
        passes: Passes,
        flops: FlopModel,
        *,
        device: torch.device,
        replay: bool | Literal["shuffled"] = True,
        threshold: float = THRESHOLD,
        measure_every: int = 0,
        owner: np.ndarray | None = None,
    ) -> None:
        self._moe, self._passes, self._flops, self._device = config.moe, passes, flops, device
        self._replay, self._threshold, self._measure_every = replay, threshold, measure_every
        self._owner = owner
        self._last_note = ""  # the last note on experts that a batch should have carried

    def inputs(self, microbatch: Microbatch) -> Inputs:
        """The tensors of a microbatch, with the routes that this step replays."""
        if self._replay == "shuffled" and microbatch.experts is not None:
            half_rows = len(microbatch.experts) // 2
            microbatch = replace(microbatch, experts=np.roll(microbatch.experts, half_rows, axis=0))
        return as_inputs(microbatch, self._device, moe=self._moe is not None, replay=bool(self._replay))

    def admit(self, batch: Batch, step: int) -> Admitted:
        """Check a batch before training step number ``step``, and measure it at every ``measure_every``th
        step. Without replay, routes that cannot be replayed are removed from the batch; with it they raise
        ``Misaligned``."""
        batch, note = self._check_routes(batch)
        interval, row = self._measure_every, None
        if interval and step % interval == 0:
            floor = step == 0 and self._moe is not None  # it costs most, and hardly changes
            row = self.measure(batch, floor=floor)
        return Admitted(batch=batch, mismatch=row, note=note)

    def measure(self, batch: Batch, *, floor: bool = True) -> dict[str, Any]:
        """A row of mismatch.jsonl without its step: the batch scored natively and, where it carries experts,
        with these; with ``floor`` natively once more, packed differently (see ``train.measure``).

        Uses the temperature, head and forward of training, so the arm in use equals the step's own
        ``sampling/*`` as long as no weight has changed. Changes nothing.
        """
        started = time.perf_counter()
        parts = [self.inputs(microbatch) for microbatch in batch.microbatches]
        can_replay = self._moe is not None and not find_unreplayable(batch.microbatches, self._moe)
        results = score_parts(self._passes, parts, floor=floor, replay=can_replay)
        row = mismatch_row(results, self._moe.layers if self._moe else ())
        row["replay"] = "replay" in row["arms"] and bool(self._replay)
        work = sum((result.work for result in results), Work())
        single_pass_work = sum((part.work for part in parts), Work())
        row["passes"] = self._flops.forward(work) / self._flops.forward(single_pass_work)
        return row | {"seconds": time.perf_counter() - started}

    def judge(self, totals: Totals, num_minibatches: int) -> Misaligned | None:
        """The error to raise before an optimizer step if carried experts that have not been judged are not
        those of their tokens; None if they are, or without replay. ``totals`` counts them as judged, and the
        FLOPs of the native pass that a suspicion costs.

        If weights have changed since the experts were chosen, the trainer may choose others for that reason.
        Then routes are refused only if they would agree when corrected: those of a neighbouring token, of
        other layers, or of another sequence.
        """
        unjudged, totals.unjudged = totals.unjudged, []
        totals.judged += unjudged
        if not unjudged or self._moe is None or self._replay in (False, "shuffled"):
            return None
        agreements = measure_agreement([(part.source, counts) for part, counts in unjudged], self._moe.top_k)
        is_faulty = agreements.find_faulty(self._threshold)
        if not is_faulty.any():
            return None
        totals.extra_flops += sum(self._flops.forward(replace(part.work, logits=0)) for part, _ in unjudged)
        # natively: after a layer with wrong experts, later choices are no longer the model's own
        native_parts = [replace(part, routing=None) for part, _ in unjudged]
        native_scores = self._passes.score(
            native_parts, ScoreOptions(as_trained=False, logprobs=False, native=True)
        )
        native_choices = [
            (part.source, scores.native.cpu().numpy())
            for (part, _), scores in zip(unjudged, native_scores, strict=True)
            if scores.native is not None
        ]
        steps = (totals.steps_taken, num_minibatches)
        error = make_refusal(agreements, native_choices, self._threshold, steps=steps)
        weights_changed = totals.steps_taken or agreements.ages[is_faulty].min() > 0
        return error if not weights_changed or error.diagnosis.fixed_overlap >= self._threshold else None

    def metrics(self, batch: Batch, totals: Totals) -> dict[str, float]:
        """Metrics ``routing/*`` of a mixture of experts after its step; empty for a dense model."""
        moe = self._moe
        if moe is None:
            return {}
        share, counted = (
            measure_coverage(batch.microbatches),
            [(part.source, counts) for part, counts in totals.judged],
        )
        metrics = {"routing/coverage": share, "routing/replay": float(bool(self._replay) and share > 0)}
        metrics |= measure_balance(batch, moe, self._owner)
        return metrics | measure_agreement(counted, moe.top_k).metrics if counted else metrics

    def _check_routes(self, batch: Batch) -> tuple[Batch, str]:
        """The batch, and a note on the experts that it carries or lacks, "" if there is none or if it is that
        of the last batch. Experts that no model could replay raise ``Misaligned`` or, without replay, are
        removed."""
        if self._moe is None:
            return batch, ""
        note = ""
        if (error := find_unreplayable(batch.microbatches, self._moe)) is not None:
            if self._replay is not False:
                raise error
            batch = drop_routes(batch)
            note = f"the batch carries routes that cannot be replayed: {error.diagnosis.detail}"
        elif self._replay and not measure_coverage(batch.microbatches):
            note = "replay is on, but the batch carries no experts: the trainer chooses its own"
        new_note, self._last_note = note if note != self._last_note else "", note
        return batch, new_note
