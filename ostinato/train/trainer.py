"""The policy trainer: a Batch in, one or several optimizer steps, a report out.

    for each minibatch (one optimizer step):
        for each microbatch:   tokens -> decoder -> hidden[rows] -> logprobs -> loss -> backward
        refuse, or clip -> AdamW

The trainer does not know how advantages were computed. Weights are normalised over the whole step before they
get here, so microbatch losses just add up, and splitting a batch differently changes memory, not results.
Three policies take part, all at the sampling temperature:

    behaviour   what the engine sampled from: ``Microbatch.logprobs``
    old         the trainer before its first optimizer step on this batch
    new         the trainer now

A decoupled algorithm anchors its ratio at old (new / old is exactly 1 in the first minibatch) and corrects
for old / behaviour, the sampler-trainer mismatch, with a weight. Others anchor it at behaviour ("bypass").

With replay (R3, arXiv 2510.11370) old and new take the experts that the batch carries, in every minibatch and
in what a checkpointed layer recomputes; the reference policy chooses its own. Carried experts are compared
with the trainer's before training on them (``train.replay_guard``): those of all minibatches before the first
optimizer step where old is computed ahead, otherwise those of each minibatch before its own step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.algo.algorithms import Algorithm, Reference
from ostinato.config import TrainerSection
from ostinato.failure import NamedFailure
from ostinato.model.base import Base
from ostinato.model.flops import Work
from ostinato.model.lora import Adapters
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.peft_io import compute_base_fingerprint
from ostinato.train.inputs import Inputs, as_inputs
from ostinato.train.leaves import WholeLeaves, load_state_tensors, state_tensors, trained_parameters
from ostinato.train.local import LocalPasses
from ostinato.train.optimizer import build_optimizer, clip_gradients, lr_factor, set_lr
from ostinato.train.passes import Backend, ScoreOptions, batch_objective, copy_reference
from ostinato.train.replay_guard import ReplayGuard
from ostinato.train.teacher import Teacher
from ostinato.train.totals import Totals, measure_staleness, measure_support
from ostinato.types import Batch, Microbatch, StepReport

MAX_REFUSED = 5  # optimizer steps in a row


class TrainingStopped(NamedFailure):
    """Too many optimizer steps in a row had a loss or a gradient that was not finite."""


class PolicyTrainer:
    """Trains ``adapters`` on a frozen decoder, or with ``adapters=None`` the decoder's own parameters.

    ``settings``: of the optimizer, of replay and its gate (``ReplayGuard``), and of ``recompute`` (keep
    one activation per layer, recompute the rest in backward).
    ``temperature``: the sampler's, so that log-probabilities are of the distribution that was sampled from.
    ``measure_every``: see ``ReplayGuard``. ``ops``: arithmetic that has gradients, such as
    ``model.native.Kernels.training``.

    ``teacher`` gives ``teacher_logprobs`` to an algorithm with ``needs_teacher``. ``between`` is called
    before every microbatch, and may do work of others in this thread.

    An optimizer step whose loss or gradient is not finite is refused: nothing is updated, the report names
    the samples of the microbatches at fault, ``on_refused`` is called with each, and training goes on.

    ``backend``: for a model spread over ranks (``train.layouts.sharded_trainer``); decoder and adapters are
    then the first of the parts on this rank. All ranks make the same calls with the same batches at the same
    time, decide the same and report the same; adapters and tensors are complete on the first rank only.

    Raises ValueError for settings that cannot work together, before any work.
    """

    def __init__(
        self,
        decoder: Base,
        adapters: Adapters | None,
        algorithm: Algorithm,
        *,
        settings: TrainerSection,
        temperature: float = 1.0,
        measure_every: int = 0,
        on_refused: Callable[[Microbatch], None] | None = None,
        ops: Ops = TORCH_OPS,
        backend: Backend | None = None,
        teacher: Teacher | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        if adapters is None and algorithm.needs_reference:
            raise ValueError(
                f"algo.kl_coef is {algorithm.kl_coef}, but full-parameter training keeps no reference policy "
                "to measure from; set it to 0 or train an adapter"
            )
        self._decoder, self._adapters, self._algorithm, self._teacher = decoder, adapters, algorithm, teacher
        self._settings, self._on_refused = settings, on_refused
        self._backend = backend or Backend(
            passes=LocalPasses(
                decoder,
                adapters,
                reference=copy_reference(adapters, algorithm),
                ops=ops,
                temperature=temperature,
                recompute=settings.recompute,
                entropy_grad=algorithm.needs_entropy,
                between=between,
            ),
            leaves=WholeLeaves(trained_parameters(decoder, adapters)),
            fingerprint=lambda: compute_base_fingerprint(decoder),
        )
        self._passes, self._leaves = self._backend.passes, self._backend.leaves
        self._named = self._leaves.named
        for leaf in self._named.values():
            leaf.requires_grad_()  # adapters read from a file do not yet
        vectors = {id(leaf) for name, leaf in self._named.items() if len(self._leaves.shapes[name]) < 2}
        self._optimizer = build_optimizer(self._named.values(), settings, lambda leaf: id(leaf) in vectors)
        self._steps = 0  # calls of step(): what the schedule reads
        self._refused_in_a_row = self._num_rows = 0
        self._flops = decoder.flops(adapters.spec if adapters else None)
        self._guard = ReplayGuard(
            decoder.config,
            self._passes,
            self._flops,
            device=decoder.device,
            replay=settings.replay,
            threshold=settings.replay_threshold,
            measure_every=measure_every,
            owner=self._backend.owner,
        )

    @property
    def progress(self) -> float:
        """Passes over microbatches so far, which grow while the trainer works."""
        return self._passes.progress + (self._teacher.progress if self._teacher else 0.0)

    @torch.no_grad()
    def adapters(self) -> Adapters | None:
        """A copy to publish, unchanged by later steps. None where all parameters are trained: the policy is
        the decoder itself or, where that is spread over ranks, the mirror, which is updated here."""
        whole_tensors = self._leaves.whole({name: leaf.detach() for name, leaf in self._named.items()})
        if self._adapters is not None:
            # tensors from other ranks came through host memory
            return self._adapters.copy_leaves(whole_tensors, self._decoder.config).to(self._decoder.device)
        if self._backend.mirror is not None:
            for name, parameter in self._backend.mirror.named_parameters():
                if name in whole_tensors:
                    parameter.copy_(whole_tensors[name])
        return None

    def step(self, batch: Batch) -> StepReport:
        """Train on ``batch``: an optimizer step for each of its minibatches.

        A minibatch's loss is scaled by their number, so the mean over minibatches is the loss of the batch.
        Metrics are means over trained tokens; ``num_rows`` counts all forward rows since the run began.
        ``routing/*`` compares carried experts with the trainer's own, and says how uneven they are
        (``train.totals.measure_balance``); ``routing/coverage``: the share of forward rows that carry any.
        With a bypass algorithm the mismatch and the routing of a later minibatch include what the earlier
        ones changed. ``passes/*``: FLOPs besides training's own pass, in forwards of the batch
        (``Totals.passes``); ``passes/measure``: those of ``measure``.

        Raises:
            TrainingStopped: the last ``MAX_REFUSED`` optimizer steps were all refused.
            ValueError: the batch has no microbatch.
            algo.routing.Misaligned: carried experts are not those of these tokens, or of any tokens at all.
                No weight has changed, except that a bypass algorithm sees a later minibatch only after it
                trained on the earlier ones; ``steps_taken`` then says on how many.
        """
        if not batch.microbatches:
            raise ValueError("the batch has no microbatch; skip the step when no sample is left to train on")
        admitted = self._guard.admit(batch, self._steps)
        batch, mismatch_row = admitted.batch, admitted.mismatch
        lr = self._settings.lr * lr_factor(self._settings, self._steps)
        set_lr(self._optimizer, lr)
        minibatches = [
            [self._guard.inputs(microbatch) for microbatch in minibatch] for minibatch in batch.minibatches
        ]
        num_minibatches, inputs = len(minibatches), [*chain(*minibatches)]
        if self._algorithm.is_decoupled:  # in the first minibatch old equals new: no weight has changed
            minibatches[1:] = [self._add_old(minibatch) for minibatch in minibatches[1:]]
        unjudged = [(part, part.counts) for part in chain(*minibatches) if part.counts is not None]
        totals, norms, refused_parts = Totals(unjudged=unjudged), [], []
        totals.extra_flops = self._price(part for part in chain(*minibatches) if part.old is not None)
        for minibatch in minibatches:
            norm, at_fault = self._update(minibatch, batch.num_samples, num_minibatches, totals)
            norms.append(norm)
            refused_parts += [at_fault] if at_fault else []
            self._refused_in_a_row = self._refused_in_a_row + 1 if at_fault else 0
        self._steps += 1
        self._num_rows += batch.num_tokens + batch.num_context_tokens
        metrics = totals.metrics(batch.num_tokens) | measure_staleness(batch) | measure_support(batch)
        metrics |= {
            "grad_norm": sum(norms) / num_minibatches,
            "learning_rate": lr,
            "num_rows": float(self._num_rows),
            "optimizer_steps": float(num_minibatches - len(refused_parts)),
            "refused_steps": float(len(refused_parts)),
        }
        metrics |= {
            "passes/measure": mismatch_row["passes"] if mismatch_row else 0.0,
            **totals.passes(self._price(inputs)),
        }
        metrics |= self._guard.metrics(batch, totals) | self._passes.metrics()
        metrics |= self._teacher.metrics() if self._teacher else {}
        report = self._report(metrics, [microbatch for at_fault in refused_parts for microbatch in at_fault])
        return replace(report, mismatch=mismatch_row, note=admitted.note)

    def measure(self, batch: Batch, *, floor: bool = True) -> dict[str, Any]:
        """See ``ReplayGuard.measure``."""
        return self._guard.measure(batch, floor=floor)

    def score(self, batch: Batch) -> list[np.ndarray]:
        """Log-probabilities [R] of the targets of each microbatch, at the sampling temperature, under the
        current policy, which chooses its own experts. Does not train."""
        parts = [
            as_inputs(microbatch, self._decoder.device, moe=False, replay=False)
            for microbatch in batch.microbatches
        ]
        scored = self._passes.score(parts, ScoreOptions(as_trained=False))
        return [scores.logprobs.float().cpu().numpy() for scores in scored if scores.logprobs is not None]

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer moments: what a checkpoint holds (``train.state``)."""
        return state_tensors(self._leaves, self._optimizer)

    def counters(self) -> dict[str, int]:
        """Counters that a checkpoint of this trainer holds besides ``tensors``."""
        return {
            "steps": self._steps,
            "refused_in_a_row": self._refused_in_a_row,
            "num_rows": self._num_rows,
        }

    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        """Restore, bit for bit, the state that ``tensors`` and ``counters`` returned, under any layout.

        Raises ValueError naming the first parameter that is missing, unknown or of another shape.
        """
        load_state_tensors(self._leaves, self._optimizer, tensors)
        self._steps, self._num_rows = counters["steps"], counters["num_rows"]
        self._refused_in_a_row = counters["refused_in_a_row"]

    def identity(self) -> dict[str, str]:
        """Facts that must be the same to resume from a checkpoint: model, its frozen weights, adapter."""
        base = "" if self._adapters is None else self._backend.fingerprint()
        return identity_of(self._decoder, self._adapters, base)

    def _price(self, parts: Iterable[Inputs]) -> float:
        """FLOPs of one forward of ``parts``."""
        return self._flops.forward(sum((part.work for part in parts), Work()))

    def _add_old(self, parts: Sequence[Inputs]) -> list[Inputs]:
        """The parts with ``old``, and with counts of the trainer's own experts before any weight changes."""
        scored = self._passes.score(parts, ScoreOptions())
        return [
            replace(part, old=scores.logprobs, counts=scores.counts)
            for part, scores in zip(parts, scored, strict=True)
        ]

    def _add_reference(self, parts: Sequence[Inputs]) -> list[Inputs]:
        """The parts with ``reference``: scored by ``algo.kl_reference``, choosing its own experts."""
        unrouted = [replace(part, routing=None, carried=None) for part in parts]
        scored = self._passes.score(unrouted, ScoreOptions(reference=True, as_trained=False))
        return [replace(part, reference=scores.logprobs) for part, scores in zip(parts, scored, strict=True)]

    def _update(
        self, minibatch: Sequence[Inputs], num_samples: int, scale: int, totals: Totals
    ) -> tuple[float, list[Microbatch]]:
        """Take one optimizer step, or refuse it if the loss or a gradient is not finite. Returns the gradient
        norm before clipping and the microbatches of a refused step that are at fault: those that are not
        finite alone or, if each of them is finite alone, all. Raises Misaligned as ``ReplayGuard.judge``
        decides. Gradients are cleared in any case."""
        norm, is_finite_step = self._accumulate(minibatch, num_samples, scale, totals)
        faulty_microbatches = []
        if is_finite_step:
            if (misaligned := self._guard.judge(totals, scale)) is not None:
                self._optimizer.zero_grad()
                raise misaligned
            clip_gradients(self._collect_gradients(), norm, self._settings.max_grad_norm)
            self._optimizer.step()
            totals.steps_taken += 1
        else:  # one by one, to find those at fault: costs time only in steps that are lost anyway
            totals.unjudged = [judgement for judgement in totals.unjudged if judgement[0] not in minibatch]
            retry_totals = Totals()
            checked_parts = [
                (part, self._accumulate([part], num_samples, scale, retry_totals)[1]) for part in minibatch
            ]
            faulty_microbatches = [
                part.source
                for part, is_finite in checked_parts
                if not is_finite or all(other_is_finite for _, other_is_finite in checked_parts)
            ]
            totals.extra_flops += retry_totals.extra_flops
            totals.repeated_flops += self._price(minibatch)
        self._optimizer.zero_grad()
        return norm, faulty_microbatches

    def _accumulate(
        self, minibatch: Sequence[Inputs], num_samples: int, scale: int, totals: Totals
    ) -> tuple[float, bool]:
        """Compute the gradients of a minibatch from zero, and add its sums and FLOPs to ``totals``. Returns
        (their norm, whether they and the loss are finite)."""
        self._optimizer.zero_grad()
        parts = minibatch
        if self._algorithm.needs_reference:
            parts = self._add_reference(minibatch)
            is_base = self._algorithm.kl_reference is Reference.BASE
            cost = self._flops.base if is_base else self._flops.forward
            totals.extra_flops += sum(cost(part.work) for part in minibatch)
        if self._teacher is not None:
            parts, flops = self._teacher.score(parts)
            totals.extra_flops += flops
        outcomes = self._passes.train(parts, batch_objective(self._algorithm, num_samples), scale)
        for part, outcome in zip(minibatch, outcomes, strict=True):
            totals.add(part, outcome)
        loss = torch.stack([outcome.loss for outcome in outcomes]).sum()
        norm, loss = torch.stack([self._leaves.reduce().double(), loss.double()]).tolist()
        return norm, math.isfinite(norm) and math.isfinite(loss)

    def _collect_gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._named.values() if parameter.grad is not None]

    def _report(self, metrics: dict[str, float], at_fault: Sequence[Microbatch]) -> StepReport:
        """The report of a step; calls ``on_refused`` for each microbatch ``at_fault``. Raises TrainingStopped
        after too many refused steps in a row."""
        if not at_fault:
            return StepReport(metrics=metrics)
        uids = tuple(uid for microbatch in at_fault for uid in microbatch.uids)
        if self._on_refused is not None:
            for microbatch in at_fault:
                self._on_refused(microbatch)
        if self._refused_in_a_row >= MAX_REFUSED:
            raise TrainingStopped(
                f"{self._refused_in_a_row} optimizer steps in a row had a loss or gradient that is not "
                f"finite, the last with samples {', '.join(uids)}; look at these samples and lower trainer.lr"
            )
        num_refused, num_taken = metrics["refused_steps"], metrics["optimizer_steps"]
        skipped = (
            f"{num_refused:.0f} of {num_refused + num_taken:.0f} optimizer steps were refused: "
            f"loss {metrics['loss']:g}, gradient norm {metrics['grad_norm']:g}"
        )
        return StepReport(metrics=metrics, skipped=skipped, uids=uids)


def identity_of(decoder: Base, adapters: Adapters | None, base: str) -> dict[str, str]:
    """Facts that must be the same to resume: model, fingerprint ``base`` of its frozen weights, adapter."""
    config = decoder.config
    shape = f"{config.num_layers} layers of {config.hidden_size}, vocabulary {config.vocab_size}"
    model = f"{config.model_type} in {decoder.dtype}, {shape}"
    if adapters is None:
        return {"model": model, "adapter": "none, all parameters are trained"}
    return {"model": model, "base": base, "adapter": str(adapters.spec)}
