"""Which experts a step replays, and whether anything may be learned from them.

admit      before a step: routes that no model could replay refuse the batch; now and then the mismatch is
           measured, and with "auto" decides on replay
judge      before each optimizer step: are the carried experts those of their tokens?
metrics    after the step
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from ostinato.algo.mismatch import Decision, decide
from ostinato.algo.routing import THRESHOLD, Misaligned
from ostinato.model.config import ModelConfig
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
    mismatch: dict[str, Any] | None  # a row of mismatch.jsonl but for its step
    note: str  # news for a person; "" for none


class ReplayGuard:
    """``replay``: MoE layers use the experts that the batch carries; "auto": where the mismatch calls for it
    (``algo.mismatch.decide``); "shuffled", a control: those of the row half a microbatch on, without a gate.
    With True and "auto", a sequence whose experts agree with the trainer's own in less than ``threshold``,
    beyond chance, refuses the batch; 0 refuses none. Every ``measure_every`` steps a row of mismatch.jsonl is
    measured; 0 is never, but for the first step with "auto". ``owner`` [L, E]: the rank that keeps an expert.

    Raises ValueError for a setting that is out of bounds.
    """

    def __init__(
        self,
        config: ModelConfig,
        passes: Passes,
        flops: FlopModel,
        *,
        device: torch.device,
        replay: bool | Literal["auto", "shuffled"] = True,
        threshold: float = THRESHOLD,
        measure_every: int = 0,
        owner: np.ndarray | None = None,
    ) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"trainer.replay_threshold is {threshold}; use a share of ids, 0 to 1")
        if measure_every < 0:
            raise ValueError(f"log.mismatch_every is {measure_every}; use a number of steps, or 0 for never")
        self._moe, self._passes, self._flops, self._device = config.moe, passes, flops, device
        self._replay, self._threshold, self._measure_every = replay, threshold, measure_every
        self._owner = owner
        self.replaying = replay in (True, "shuffled")  # now; "auto" is decided before anything is trained
        self._missing = ""  # the last note on experts that a batch should have carried

    def inputs(self, microbatch: Microbatch) -> Inputs:
        """As tensors, with the routes that this step replays."""
        if self._replay == "shuffled" and microbatch.experts is not None:
            half = len(microbatch.experts) // 2
            microbatch = replace(microbatch, experts=np.roll(microbatch.experts, half, axis=0))
        return as_inputs(microbatch, self._device, moe=self._moe is not None, replay=self.replaying)

    def admit(self, batch: Batch, step: int) -> Admitted:
        """Before training step number ``step``. Raises ``Misaligned`` for routes that cannot be replayed."""
        batch, missing = self._replayable(batch)
        row, decided = self._measured(batch, step)
        return Admitted(batch=batch, mismatch=row, note=" ".join(filter(None, (missing, decided))))

    def measure(self, batch: Batch, *, floor: bool = True) -> dict[str, Any]:
        """A row of mismatch.jsonl but for its step: the batch scored natively and, where it carries experts,
        with these; with ``floor`` also natively once more, packed otherwise (see ``train.measure``).

        With temperature, head and forward of training, so the arm that is in use is what the step's own
        ``sampling/*`` says while no weight has moved. Changes nothing.
        """
        started = time.perf_counter()
        parts = [self.inputs(microbatch) for microbatch in batch.microbatches]
        usable = self._moe is not None and not unreplayable(batch.microbatches, self._moe)
        found = scored(self._passes, parts, floor=floor, replay=usable)
        row = mismatch_row(found, self._moe.layers if self._moe else ())
        decision = self._decision(row["arms"], len(batch.minibatches))
        row |= {"replay": decision.on, "decision": decision.reason}
        work = sum((one.work for one in found), Work())
        own = sum((part.work for part in parts), Work())
        row["passes"] = self._flops.forward(work) / self._flops.forward(own)
        return row | {"seconds": time.perf_counter() - started}

    def judge(self, totals: Totals, num_minibatches: int) -> Misaligned | None:
        """Before an optimizer step: what refuses it where carried experts that were not judged yet are not
        those of their tokens.

        Once weights have moved since they were chosen, on this batch or on those before an older one, another
        choice may be their doing. Then only routes are refused that would agree if they were put right: those
        of a neighbour, of other layers, of another sequence.
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
        # natively: below a layer that was misled, choices are not the model's own any more
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
        found = {"routing/coverage": share, "routing/replay": float(self.replaying and share > 0)}
        found |= balance(batch, moe, self._owner)
        return found | agreement(counted, moe.top_k).metrics if counted else found

    def restore(self, replaying: bool) -> None:
        """Go on as a checkpoint was; "auto" is decided in steps that measure, and the next may be far."""
        if self._replay == "auto":
            self.replaying = replaying

    def _replayable(self, batch: Batch) -> tuple[Batch, str]:
        """The batch, and what is new about the experts that it carries, in one sentence. Those that no model
        could replay refuse it; where none are to be replayed, they are left out."""
        if self._moe is None:
            return batch, ""
        sentence = ""
        if (found := unreplayable(batch.microbatches, self._moe)) is not None:
            if self._replay is not False:
                raise found
            batch = without_routes(batch)
            sentence = f"the batch carries routes that cannot be replayed: {found.diagnosis.detail}"
        elif self.replaying and not coverage(batch.microbatches):
            sentence = "replay is on, but the batch carries no experts: the trainer chooses its own"
        news, self._missing = sentence if sentence != self._missing else "", sentence
        return batch, news

    def _measured(self, batch: Batch, step: int) -> tuple[dict[str, Any] | None, str]:
        """The row of a step that measures, and a note where replay was switched."""
        every, auto = self._measure_every, self._replay == "auto"
        due = step % every == 0 if every else auto and step == 0
        if not due:
            return None, ""
        row = self.measure(batch, floor=step == 0 and self._moe is not None)  # it costs most, hardly moves
        news = auto and (step == 0 or row["replay"] != self.replaying)
        self.replaying = row["replay"] if auto else self.replaying
        return row, row["decision"] if news else ""

    def _decision(self, arms: Mapping[str, Any], minibatches: int) -> Decision:
        if self._replay == "auto" and "replay" in arms:
            return decide(arms["native"], arms["replay"], minibatches=minibatches, on=self.replaying)
        if "replay" not in arms:
            return Decision(on=False, reason="replay is off: the batch carries no experts to replay")
        word = "on" if self.replaying else "off"
        return Decision(on=self.replaying, reason=f"replay is {word}, as trainer.replay says")
