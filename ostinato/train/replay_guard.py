"""Which experts a step replays, and whether it may train on them.

admit      before a step: routes that no model could replay refuse the batch; now and then the mismatch is
           measured
judge      before each optimizer step: are the carried experts those of their tokens?
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
from ostinato.train.gate import agreement, coverage, refusal, unreplayable, without_routes
from ostinato.train.inputs import Inputs, as_inputs
from ostinato.train.measure import mismatch_row, scored
from ostinato.train.passes import Passes, ScoreOptions
from ostinato.train.totals import Totals, balance
from ostinato.types import Batch, Microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
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
        self._missing = ""  # the last note on experts that a batch should have carried

    def inputs(self, microbatch: Microbatch) -> Inputs:
        """As tensors, with the routes that this step replays."""
        if self._replay == "shuffled" and microbatch.experts is not None:
            half = len(microbatch.experts) // 2
            microbatch = replace(microbatch, experts=np.roll(microbatch.experts, half, axis=0))
        return as_inputs(microbatch, self._device, moe=self._moe is not None, replay=bool(self._replay))

    def admit(self, batch: Batch, step: int) -> Admitted:
        """Before training step number ``step``. Raises ``Misaligned`` for routes that cannot be replayed."""
        batch, note = self._replayable(batch)
        every, row = self._measure_every, None
        if every and step % every == 0:
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
        usable = self._moe is not None and not unreplayable(batch.microbatches, self._moe)
        found = scored(self._passes, parts, floor=floor, replay=usable)
        row = mismatch_row(found, self._moe.layers if self._moe else ())
        row["replay"] = "replay" in row["arms"] and bool(self._replay)
        work = sum((one.work for one in found), Work())
        own = sum((part.work for part in parts), Work())
        row["passes"] = self._flops.forward(work) / self._flops.forward(own)
        return row | {"seconds": time.perf_counter() - started}

    def judge(self, totals: Totals, num_minibatches: int) -> Misaligned | None:
        """Before an optimizer step: the error to raise where carried experts that were not judged yet are not
        those of their tokens, else None.

        Once weights have changed since the experts were chosen, by this batch or by earlier ones, that may be
        why the trainer chooses others. Then routes are refused only if they would agree once corrected: those
        of a neighbouring token, of other layers, of another sequence.
        """
        fresh, totals.unjudged = totals.unjudged, []
        totals.judged += fresh
        if not fresh or self._moe is None or self._replay in (False, "shuffled"):
            return None
        seen = agreement([(part.source, counts) for part, counts in fresh], self._moe.top_k)
        at_fault = seen.at_fault(self._threshold)
        if not at_fault.any():
            return None
        totals.extra_flops += sum(self._flops.forward(replace(part.work, logits=0)) for part, _ in fresh)
        # natively: after a layer with wrong experts, later choices are no longer the model's own
        alone = [replace(part, routing=None) for part, _ in fresh]
        natives = self._passes.score(alone, ScoreOptions(as_trained=False, logprobs=False, native=True))
        chosen = [
            (part.source, one.native.cpu().numpy())
            for (part, _), one in zip(fresh, natives, strict=True)
            if one.native is not None
        ]
        steps = (totals.steps_taken, num_minibatches)
        found = refusal(seen, chosen, self._threshold, steps=steps)
        moved = totals.steps_taken or seen.ages[at_fault].min() > 0
        return found if not moved or found.diagnosis.best >= self._threshold else None

    def metrics(self, batch: Batch, totals: Totals) -> dict[str, float]:
        """``routing/*`` of a mixture of experts, after its step."""
        moe = self._moe
        if moe is None:
            return {}
        share, counted = coverage(batch.microbatches), [(one.source, counts) for one, counts in totals.judged]
        found = {"routing/coverage": share, "routing/replay": float(bool(self._replay) and share > 0)}
        found |= balance(batch, moe, self._owner)
        return found | agreement(counted, moe.top_k).metrics if counted else found

    def _replayable(self, batch: Batch) -> tuple[Batch, str]:
        """The batch, and one sentence if there is something new about the experts that it carries. Experts
        that no model could replay raise ``Misaligned``; without replay, they are left out instead."""
        if self._moe is None:
            return batch, ""
        sentence = ""
        if (found := unreplayable(batch.microbatches, self._moe)) is not None:
            if self._replay is not False:
                raise found
            batch = without_routes(batch)
            sentence = f"the batch carries routes that cannot be replayed: {found.diagnosis.detail}"
        elif self._replay and not coverage(batch.microbatches):
            sentence = "replay is on, but the batch carries no experts: the trainer chooses its own"
        news, self._missing = sentence if sentence != self._missing else "", sentence
        return batch, news
