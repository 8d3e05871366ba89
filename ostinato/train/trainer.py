"""The policy trainer: a Batch in, one or several optimizer steps, a report out.

    for each minibatch (one optimizer step):
        for each microbatch:   tokens -> decoder -> hidden[rows] -> logprobs -> loss -> backward
        refuse, or clip -> AdamW

The trainer is blind to whatever wrote the advantages. Weights are normalised over the whole step before they
get here, so the losses of microbatches just add, and cutting a batch differently changes memory, not results.
Three policies take part, all at the sampling temperature:

    behaviour   what the engine sampled from: ``Microbatch.logprobs``
    old         the trainer before its first optimizer step on this batch
    new         the trainer now

A decoupled algorithm anchors its ratio at old (new / old is exactly 1 in the first minibatch) and corrects
for old / behaviour, the sampler-trainer mismatch, with a weight. Others anchor it at behaviour ("bypass").

With replay (R3, arXiv 2510.11370) old and new take the experts that the batch carries, in every minibatch and
in what a checkpointed layer recomputes; the reference policy chooses its own. Carried experts are compared
with the trainer's before anything is learned from them (``train.gate``): of all minibatches before the first
optimizer step where old is computed ahead, otherwise of each before its own. Now and then a whole batch is
scored both ways (``train.measure``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ostinato.algo.algorithms import Algorithm, policy_loss
from ostinato.algo.logprobs import Matmul, chunked_logprobs, linear_logprobs
from ostinato.algo.mismatch import Decision, decide
from ostinato.algo.offpolicy import importance_weights, mismatch
from ostinato.algo.routing import THRESHOLD
from ostinato.model.decoder import Decoder
from ostinato.model.flops import FlopModel, Work
from ostinato.model.lora import Adapters
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.packed import PackedAttention
from ostinato.model.peft_io import base_fingerprint
from ostinato.train.gate import agreement, coverage, refusal, row_counts, unreplayable, without_routes
from ostinato.train.inputs import Inputs, otherwise_packed
from ostinato.train.measure import Scored, mismatch_row, watching
from ostinato.train.optimizer import (
    OptimizerSettings,
    build_optimizer,
    clip_gradients,
    gradient_norm,
    load_optimizer_tensors,
    lr_factor,
    optimizer_tensors,
    set_lr,
)
from ostinato.train.totals import Totals, staleness, support
from ostinato.types import Batch, Microbatch, StepReport


class TrainingStopped(RuntimeError):
    """Too many optimizer steps in a row had a loss or a gradient that was not finite."""


class PolicyTrainer:
    """Trains ``adapters`` on a frozen decoder, or with ``adapters=None`` the decoder's own parameters.

    ``temperature``: the sampler's, so that log-probabilities are of the distribution that was sampled from.
    ``recompute``: keep one activation per layer, recompute the rest in backward. ``ops``: arithmetic that has
    gradients, such as ``model.native.Kernels.training``.

    ``replay``: MoE layers use the experts that the batch carries; "auto": where the mismatch calls for it
    (``algo.mismatch.decide``). Unless it is False, a sequence whose experts agree with the trainer's own in
    less than ``replay_threshold``, beyond chance, refuses the batch; 0 refuses none. ``measure_every`` steps,
    from the first on, a row of mismatch.jsonl is measured and reported; 0 is never, but for the first step
    with "auto".

    An optimizer step whose loss or gradient is not finite is refused: nothing is updated, the report names
    the samples of the microbatches at fault, ``on_refused`` gets each of these, and training goes on.

    Raises ValueError for settings that cannot work together, before any work.
    """

    def __init__(
        self,
        decoder: Decoder,
        adapters: Adapters | None,
        algorithm: Algorithm,
        *,
        optimizer: OptimizerSettings,
        temperature: float = 1.0,
        replay: bool | Literal["auto"] = True,
        replay_threshold: float = THRESHOLD,
        measure_every: int = 0,
        recompute: bool = False,
        max_refused: int = 3,
        on_refused: Callable[[Microbatch], None] | None = None,
        ops: Ops = TORCH_OPS,
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"rollout.temperature is {temperature}; training needs a positive temperature")
        if max_refused < 1:
            raise ValueError(f"trainer.max_refused_in_a_row is {max_refused}; use at least 1")
        if not 0 <= replay_threshold <= 1:
            raise ValueError(f"trainer.replay_threshold is {replay_threshold}; use a share of ids, 0 to 1")
        if measure_every < 0:
            raise ValueError(f"log.mismatch_every is {measure_every}; use a number of steps, or 0 for never")
        if adapters is None and algorithm.needs_reference:
            raise ValueError(
                f"algo.kl_coef is {algorithm.kl_coef}, but full-parameter training keeps no reference policy "
                "to measure from; set it to 0 or train an adapter"
            )
        self._decoder, self._adapters, self._algorithm = decoder, adapters, algorithm
        self._settings, self._temperature = optimizer, temperature
        self._replay, self._threshold, self._measure_every = replay, replay_threshold, measure_every
        self._replaying = replay is True  # now; "auto" is decided before anything is trained
        self._recompute, self._ops = recompute, ops
        self._max_refused, self._on_refused = max_refused, on_refused
        self._named = trained_parameters(decoder, adapters)
        for leaf in self._named.values():
            leaf.requires_grad_()  # adapters read from a file come without
        self._optimizer = build_optimizer(self._named.values(), optimizer)
        self._steps = 0  # calls of step(): what the schedule reads
        self._refused_in_a_row = 0
        self._num_rows = 0
        self.progress = 0.0  # passes over microbatches: grows while it works
        self._flops = FlopModel.of(decoder.config, adapters.spec if adapters else None)
        self._missing = ""  # what was said last of experts that a batch should have carried

    def adapters(self) -> Adapters | None:
        """A copy to publish, which later steps leave alone; None where the decoder itself is the policy."""
        return None if self._adapters is None else self._adapters.detach_copy()

    def step(self, batch: Batch) -> StepReport:
        """Train on ``batch``: an optimizer step for each of its minibatches.

        A minibatch's loss is scaled by their number, so the mean over minibatches is the loss of the batch.
        Metrics are means over trained tokens; ``num_rows`` counts all forward rows since the run began.
        ``routing/*`` compares carried experts with the trainer's own; ``routing/coverage``: the share of
        forward rows that carry any. With a bypass algorithm the mismatch and the routing of a later minibatch
        include what the earlier ones changed. ``passes/*``: FLOPs beside training's own pass, in forwards of
        the batch (``Totals.passes``); ``passes/measure``: those of ``measure``.

        Raises:
            TrainingStopped: the last ``max_refused`` optimizer steps were all refused.
            algo.routing.Misaligned: carried experts are not those of these tokens, or of no tokens at all. No
                weight was changed; but a bypass algorithm sees a later minibatch only after the earlier ones
                were learned from, and then ``steps_taken`` says how many.
        """
        if not batch.microbatches:
            raise ValueError("the batch has no microbatch; skip the step when no sample is left to train on")
        batch, missing = self._replayable(batch)
        row, decided = self._measured(batch)
        lr = self._settings.lr * lr_factor(self._settings, self._steps)
        set_lr(self._optimizer, lr)
        minibatches = [[self._inputs(one) for one in minibatch] for minibatch in batch.minibatches]
        deals, inputs = len(minibatches), [*chain(*minibatches)]
        if self._algorithm.decoupled:  # the first minibatch is its own old policy: nothing has changed yet
            minibatches[1:] = [[self._with_old(part) for part in minibatch] for minibatch in minibatches[1:]]
        ahead = [(part, part.counts) for part in chain(*minibatches) if part.counts is not None]
        totals, norms, refused = Totals(unjudged=ahead), [], []
        totals.extra_flops = self._price(part for part in chain(*minibatches) if part.old is not None)
        for minibatch in minibatches:
            norm, at_fault = self._update(minibatch, batch.num_samples, deals, totals)
            norms.append(norm)
            refused += [at_fault] if at_fault else []
            self._refused_in_a_row = self._refused_in_a_row + 1 if at_fault else 0
        self._steps += 1
        self._num_rows += batch.num_tokens + batch.num_context_tokens
        metrics = totals.metrics(batch.num_tokens) | staleness(batch) | support(batch)
        metrics |= {
            "grad_norm": sum(norms) / deals,
            "learning_rate": lr,
            "num_rows": float(self._num_rows),
            "optimizer_steps": float(deals - len(refused)),
            "refused_steps": float(len(refused)),
        }
        metrics |= {"passes/measure": row["passes"] if row else 0.0, **totals.passes(self._price(inputs))}
        metrics |= self._routing(batch, totals)
        report = self._report(metrics, [microbatch for at_fault in refused for microbatch in at_fault])
        return replace(report, mismatch=row, note=" ".join(filter(None, (missing, decided))))

    def measure(self, batch: Batch, *, floor: bool = True) -> dict[str, Any]:
        """A row of mismatch.jsonl but for its step: the batch scored natively and, where it carries experts,
        with these; with ``floor`` also natively once more, packed otherwise (see ``train.measure``).

        With temperature, head and forward of training, so the arm that is in use is what the step's own
        ``sampling/*`` says while no weight has moved. Changes nothing.
        """
        started = time.perf_counter()
        parts = [self._inputs(microbatch) for microbatch in batch.microbatches]
        moe = self._decoder.config.moe
        usable = moe is not None and not unreplayable(batch.microbatches, moe)
        scored = [self._scored(part, floor, replay=usable) for part in parts]
        row = mismatch_row(scored, moe.layers if moe else ())
        decision = self._decision(row["arms"], len(batch.minibatches))
        row |= {"replay": decision.on, "decision": decision.reason}
        work = sum((one.work for one in scored), Work())
        row["passes"] = self._flops.forward(work) / self._price(parts)
        return row | {"seconds": time.perf_counter() - started}

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer moments by name, not copied: what a checkpoint holds."""
        parameters = {f"parameters.{name}": tensor.detach() for name, tensor in self._named.items()}
        moments = optimizer_tensors(self._optimizer, self._named)
        return parameters | {f"optimizer.{name}": tensor for name, tensor in moments.items()}

    def counters(self) -> dict[str, int]:
        """The rest of a checkpoint of this trainer."""
        return {
            "steps": self._steps,
            "refused_in_a_row": self._refused_in_a_row,
            "num_rows": self._num_rows,
            "replaying": int(self._replaying),
        }

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        """Go back, bit for bit, to where `tensors` and `counters` were taken.

        Raises ValueError naming the first parameter that is missing, unknown or of another shape.
        """
        saved = _under("parameters.", tensors)
        for name in sorted(saved.keys() | self._named.keys()):
            have = tuple(saved[name].shape) if name in saved else "nothing"
            want = tuple(self._named[name].shape) if name in self._named else "nothing"
            if have != want:
                raise ValueError(
                    f"the checkpoint has {have} for parameter {name}, this run trains {want}; "
                    "resume with the recipe that it was made with"
                )
        for name, parameter in self._named.items():
            parameter.copy_(saved[name])
        load_optimizer_tensors(self._optimizer, self._named, _under("optimizer.", tensors))
        self._steps, self._num_rows = counters["steps"], counters["num_rows"]
        self._refused_in_a_row = counters["refused_in_a_row"]
        if self._replay == "auto":  # decided in a step that measured, which may not come again soon
            self._replaying = bool(counters.get("replaying", True))

    def identity(self) -> dict[str, str]:
        """What must be the same to resume from a checkpoint: the model, its frozen weights, the adapter."""
        config = self._decoder.config
        shape = f"{config.num_layers} layers of {config.hidden_size}, vocabulary {config.vocab_size}"
        model = f"{config.model_type} in {self._decoder.dtype}, {shape}"
        if self._adapters is None:
            return {"model": model, "adapter": "none, all parameters are trained"}
        return {"model": model, "base": base_fingerprint(self._decoder), "adapter": str(self._adapters.spec)}

    def _inputs(self, microbatch: Microbatch) -> Inputs:
        def tensor(array: np.ndarray, dtype: type) -> Tensor:
            return torch.from_numpy(array.astype(dtype)).to(self._decoder.device)

        experts = microbatch.experts if self._decoder.num_moe_layers else None
        carried = None if experts is None else tensor(experts, np.int16)
        return Inputs(
            source=microbatch,
            tokens=tensor(microbatch.tokens, np.int64),
            positions=tensor(microbatch.positions, np.int64),
            segments=microbatch.segments,
            rows=tensor(microbatch.rows, np.int64),
            targets=tensor(microbatch.targets, np.int64),
            behaviour=tensor(microbatch.logprobs, np.float32),
            advantages=tensor(microbatch.advantages, np.float32),
            weights=tensor(microbatch.weights, np.float32),
            sample_idx=tensor(microbatch.sample_idx, np.int64),
            carried=carried,
            routing=carried if self._replaying else None,
        )

    def _price(self, parts: Iterable[Inputs]) -> float:
        """FLOPs of one forward of ``parts``."""
        return self._flops.forward(sum((part.work for part in parts), Work()))

    def _with_old(self, part: Inputs) -> Inputs:
        """With ``old``, from the very forward that training runs: without gradients a layer may multiply
        in another order, and a ratio that should be 1 would be 1 within rounding. The same pass shows the
        trainer's own experts before any weight has moved."""
        hidden, native = self._forward(part, self._adapters, part.routing)
        with torch.no_grad():  # detached: a head computes the slopes of hidden states that need a gradient
            old = self._logprobs(hidden.detach(), part, want_entropy=False)[0]
        return replace(part, old=old, counts=_counts(part, native))

    def _forward(
        self, part: Inputs, adapters: Adapters | None, routing: Tensor | None, ops: Ops | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [R, D] of the rows that predict a target, and the experts that the model would choose
        for all rows, [T, moe_layers, top_k]."""
        self.progress += 1
        hidden, native = self._decoder(
            part.tokens,
            part.positions,
            PackedAttention(part.segments),
            adapters=adapters,
            routing=routing,
            routing_checked=True,  # once for the batch: ``_replayable``
            ops=ops or self._ops,
            recompute=self._recompute and torch.is_grad_enabled(),
        )
        return hidden[part.rows], native

    def _logprobs(self, hidden: Tensor, part: Inputs, *, want_entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probabilities [R] of the targets and the entropy [R] (NaN where it is not wanted)."""
        head = self._decoder.head_weight
        options: dict[str, Any] = {
            "support": part.source.support,  # what was sampled from, whichever policy is scored
            "temperature": self._temperature,
            "want_entropy": want_entropy,
        }
        if head.requires_grad:
            return chunked_logprobs(hidden, part.targets, self._decoder.logits, **options)
        options["entropy_grad"] = want_entropy and self._algorithm.needs_entropy
        matmul_nt, matmul_nn = head_products(self._decoder, self._ops)
        options |= {"matmul_nt": matmul_nt, "matmul_nn": matmul_nn}
        return linear_logprobs(hidden, head, part.targets, **options)

    def _backward(self, part: Inputs, num_samples: int, scale: int, totals: Totals) -> None:
        """Add a microbatch's gradients and measurements to what is there; its graph is gone on return."""
        algorithm = self._algorithm
        hidden, native = self._forward(part, self._adapters, part.routing)
        if part.counts is None and (counts := _counts(part, native)) is not None:
            totals.unjudged.append((part, counts))
        logprobs, entropy = self._logprobs(hidden, part, want_entropy=True)
        old = logprobs.detach() if part.old is None else part.old
        weights = None
        if algorithm.decoupled:
            weights = importance_weights(
                old - part.behaviour,
                part.sample_idx,
                num_samples,
                algorithm.correction,
                low=algorithm.correction_low,
                high=algorithm.correction_high,
            )
        terms = policy_loss(
            algorithm,
            logprobs,
            old if algorithm.decoupled else part.behaviour,
            part.advantages,
            part.weights,
            part.sample_idx,
            num_samples=num_samples,
            correction=weights,
            ref_logprobs=self._reference(part) if algorithm.needs_reference else None,
            entropy=entropy if algorithm.needs_entropy else None,
        )
        (terms.total * scale).backward()
        totals.loss.append(terms.total.detach())
        totals.stats.append({"entropy": entropy.detach().sum(), **terms.stats})
        totals.mismatches.append(mismatch(old, part.behaviour, correction=weights))
        totals.extra_flops += self._flops.base(part.work) if algorithm.needs_reference else 0.0

    @torch.no_grad()
    def _reference(self, part: Inputs) -> Tensor:
        """The base policy's log-probabilities: the same model without adapters, choosing its own experts."""
        return self._logprobs(self._forward(part, None, None)[0], part, want_entropy=False)[0]

    def _update(
        self, minibatch: Sequence[Inputs], num_samples: int, scale: int, totals: Totals
    ) -> tuple[float, list[Microbatch]]:
        """One optimizer step: the gradient norm before clipping, and the microbatches that had it refused."""
        norm, finite = self._accumulate(minibatch, num_samples, scale, totals)
        at_fault = []
        if finite:
            self._gate(totals, scale)
            clip_gradients(self._gradients(), norm, self._settings.max_grad_norm)
            self._optimizer.step()
            totals.steps_taken += 1
        else:  # one by one, to name them: paid only by steps that are lost anyway
            totals.unjudged = [one for one in totals.unjudged if one[0] not in minibatch]
            again = Totals()
            alone = [(part, self._accumulate([part], num_samples, scale, again)[1]) for part in minibatch]
            at_fault = [part.source for part, fine in alone if not fine or all(ok for _, ok in alone)]
            totals.extra_flops += again.extra_flops
            totals.repeated_flops += self._price(minibatch)
        self._optimizer.zero_grad()
        return norm, at_fault

    def _accumulate(
        self, minibatch: Sequence[Inputs], num_samples: int, scale: int, totals: Totals
    ) -> tuple[float, bool]:
        """Gradients of a minibatch from nothing: their norm, and whether they and the loss are finite."""
        self._optimizer.zero_grad()
        before = len(totals.loss)
        for part in minibatch:
            self._backward(part, num_samples, scale, totals)
        loss = torch.stack(totals.loss[before:]).sum()
        norm, loss = torch.stack([gradient_norm(self._gradients()).double(), loss.double()]).tolist()
        return norm, math.isfinite(norm) and math.isfinite(loss)

    def _gate(self, totals: Totals, deals: int) -> None:
        """Before an optimizer step: are the carried experts that nobody has judged those of their tokens?

        Once weights have moved since they were chosen, on this batch or on those before an older one, another
        choice may be their doing. Then only routes are refused that would agree if they were put right: those
        of a neighbour, of other layers, of another sequence.
        """
        fresh, totals.unjudged = totals.unjudged, []
        totals.judged += fresh
        moe = self._decoder.config.moe
        if not fresh or moe is None or self._replay is False:
            return
        seen = agreement([(part.source, counts) for part, counts in fresh], moe.top_k)
        at_fault = seen.at_fault(self._threshold)
        if not at_fault.any():
            return
        totals.extra_flops += sum(self._flops.forward(replace(part.work, logits=0)) for part, _ in fresh)
        # natively: below a layer that was misled, choices are not the model's own any more
        with torch.no_grad():
            natives = [self._forward(part, self._adapters, None)[1] for part, _ in fresh]
        chosen = [
            (part.source, native.cpu().numpy())
            for (part, _), native in zip(fresh, natives, strict=True)
            if native is not None
        ]
        found = refusal(seen, chosen, self._threshold, steps=(totals.steps_taken, deals))
        moved = totals.steps_taken or seen.ages[at_fault].min() > 0
        if not moved or found.diagnosis.best >= self._threshold:
            self._optimizer.zero_grad()
            raise found

    def _routing(self, batch: Batch, totals: Totals) -> dict[str, float]:
        """Metrics of a mixture of experts."""
        moe = self._decoder.config.moe
        if moe is None:
            return {}
        share, counted = coverage(batch.microbatches), [(one.source, counts) for one, counts in totals.judged]
        found = {"routing/coverage": share, "routing/replay": float(self._replaying and share > 0)}
        return found | agreement(counted, moe.top_k).metrics if counted else found

    def _replayable(self, batch: Batch) -> tuple[Batch, str]:
        """The batch, and what is new about the experts that it carries, in one sentence. Those that no model
        could replay refuse it; where none are to be replayed, they are left out."""
        moe, sentence = self._decoder.config.moe, ""
        if moe is None:
            return batch, ""
        if (found := unreplayable(batch.microbatches, moe)) is not None:
            if self._replay is not False:
                raise found
            batch = without_routes(batch)
            sentence = f"the batch carries routes that cannot be replayed: {found.diagnosis.detail}"
        elif self._replaying and not coverage(batch.microbatches):
            sentence = "replay is on, but the batch carries no experts: the trainer chooses its own"
        news, self._missing = sentence if sentence != self._missing else "", sentence
        return batch, news

    def _measured(self, batch: Batch) -> tuple[dict[str, Any] | None, str]:
        """The row of a step that measures, and what a person should know: that replay was switched."""
        every, auto = self._measure_every, self._replay == "auto"
        due = self._steps % every == 0 if every else auto and self._steps == 0
        if not due:
            return None, ""
        row = self.measure(batch, floor=self._steps == 0)  # the floor of a run hardly moves, and costs most
        news = auto and (self._steps == 0 or row["replay"] != self._replaying)
        self._replaying = row["replay"] if auto else self._replaying
        return row, row["decision"] if news else ""

    def _decision(self, arms: Mapping[str, Any], minibatches: int) -> Decision:
        if self._replay == "auto" and "replay" in arms:
            native, replay = arms["native"], arms["replay"]
            return decide(native, replay, minibatches=minibatches, on=self._replaying)
        if "replay" not in arms:
            return Decision(on=False, reason="replay is off: the batch carries no experts to replay")
        word = "on" if self._replaying else "off"
        return Decision(on=self._replaying, reason=f"replay is {word}, as trainer.replay says")

    def _scored(self, part: Inputs, floor: bool, *, replay: bool) -> Scored:
        """One microbatch in up to three ways. With gradients on, as in ``_with_old`` and for its reason."""

        def logprobs(hidden: Tensor) -> np.ndarray:
            with torch.no_grad():
                return self._logprobs(hidden.detach(), part, want_entropy=False)[0].cpu().numpy()

        gaps: list[Tensor] = []
        hidden, chosen = self._forward(part, self._adapters, None, watching(self._ops, gaps))
        native, replayed, again, work = logprobs(hidden), None, None, part.work
        del hidden  # and with it all activations
        if part.carried is not None and replay:
            replayed = logprobs(self._forward(part, self._adapters, part.carried)[0])
            work += part.work
        if floor:
            passes = [*otherwise_packed(part)]
            work = sum((one.work for one in passes), work)
            again = logprobs(
                torch.cat([self._forward(one, self._adapters, None)[0].detach() for one in passes])
            )
        return Scored(
            source=part.source,
            work=work,
            native=native,
            replay=replayed,
            floor=again,
            chosen=None if chosen is None else chosen.cpu().numpy(),
            margins=torch.stack(gaps, dim=1).cpu().numpy() if gaps else None,
        )

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._named.values() if parameter.grad is not None]

    def _report(self, metrics: dict[str, float], at_fault: Sequence[Microbatch]) -> StepReport:
        if not at_fault:
            return StepReport(metrics=metrics)
        uids = tuple(uid for microbatch in at_fault for uid in microbatch.uids)
        if self._on_refused is not None:
            for microbatch in at_fault:
                self._on_refused(microbatch)
        if self._refused_in_a_row >= self._max_refused:
            raise TrainingStopped(
                f"{self._refused_in_a_row} optimizer steps in a row had a loss or gradient that is not "
                f"finite, the last with samples {', '.join(uids)}; look at these samples and lower trainer.lr"
            )
        refused, taken = metrics["refused_steps"], metrics["optimizer_steps"]
        skipped = (
            f"{refused:.0f} of {refused + taken:.0f} optimizer steps were refused: "
            f"loss {metrics['loss']:g}, gradient norm {metrics['grad_norm']:g}"
        )
        return StepReport(metrics=metrics, skipped=skipped, uids=uids)


def trained_parameters(decoder: Decoder, adapters: Adapters | None) -> dict[str, Tensor]:
    """The leaves that a trainer updates, by name. Raises ValueError where they are not what was asked for."""
    if adapters is not None:
        if any(parameter.requires_grad for parameter in decoder.parameters()):
            raise ValueError(
                "the decoder is trainable beside its adapters; call decoder.trainable(False) or pass none"
            )
        pairs = adapters.tensors.items()
        return {f"{name}.{part}": leaf for name, pair in pairs for part, leaf in zip("AB", pair, strict=True)}
    named: dict[str, Tensor] = {
        name: parameter for name, parameter in decoder.named_parameters() if parameter.requires_grad
    }
    if not named:
        raise ValueError("nothing is trainable; pass adapters or call decoder.trainable(True)")
    if decoder.dtype.itemsize < 4:
        raise ValueError(
            f"model.dtype is {decoder.dtype}, in which small updates of full-parameter training "
            "round away; use float32 or train an adapter"
        )
    return named


def head_products(decoder: Decoder, ops: Ops) -> tuple[Matmul, Matmul] | tuple[None, None]:
    """The two products of `linear_logprobs` for a frozen head, the logits as ``Decoder.logits`` has them.

    None twice means both in fp32, the weight widened once: what torch can do for an FP32 head over bf16
    weights. Native products multiply in bf16 and sum in fp32, which is as exact and several times faster.
    """
    head = decoder.head_weight
    if head.dtype.itemsize >= 4 or (decoder.fp32_head and ops.gemm is TORCH_OPS.gemm):
        return None, None
    out_dtype = torch.float32 if decoder.fp32_head else None

    def logits(hidden_nD: Tensor, head_VD: Tensor) -> Tensor:
        return ops.gemm.nt(hidden_nD, head_VD, None, out_dtype)

    def slopes(logit_slopes_nV: Tensor, head_VD: Tensor) -> Tensor:
        return ops.gemm.nn(logit_slopes_nV.to(head_VD.dtype), head_VD)

    return logits, slopes


def _counts(part: Inputs, native: Tensor | None) -> Tensor | None:
    return None if native is None or part.carried is None else row_counts(native, part.carried)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose name starts with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


__all__ = ["PolicyTrainer", "TrainingStopped", "head_products", "trained_parameters"]
