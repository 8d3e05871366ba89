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
from ostinato.algo.logprobs import chunked_logprobs, linear_logprobs
from ostinato.algo.mismatch import Decision, decide
from ostinato.algo.offpolicy import importance_weights, mismatch
from ostinato.algo.routing import THRESHOLD
from ostinato.model.decoder import Decoder
from ostinato.model.flops import FlopModel, Work
from ostinato.model.lora import Adapters
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.packed import PackedAttention
from ostinato.model.peft_io import base_fingerprint
from ostinato.train.gate import agreement, coverage, refusal, unreplayable, without_routes
from ostinato.train.heads import head_products
from ostinato.train.inputs import Inputs
from ostinato.train.leaves import WholeLeaves, trained_parameters
from ostinato.train.measure import mismatch_row, scored
from ostinato.train.optimizer import (
    MOMENTS,
    OptimizerSettings,
    build_optimizer,
    clip_gradients,
    load_optimizer_tensors,
    lr_factor,
    optimizer_tensors,
    set_lr,
)
from ostinato.train.passes import How, InTurn, Objective, Outcome, Ranks, Scores
from ostinato.train.totals import Totals, balance, staleness, support
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

    ``ranks``: of a model that lies on several (``train.sharded.sharded_trainer``); decoder and adapters are
    then the first of the parts that this one has. All ranks make the same calls with the same batches at the
    same time, decide the same and report the same; adapters and tensors are complete on the first.

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
        ranks: Ranks | None = None,
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
        self._ranks = ranks or Ranks(
            passes=InTurn(self._forward, self._logprobs, adapters, ops),
            leaves=WholeLeaves(trained_parameters(decoder, adapters)),
            fingerprint=lambda: base_fingerprint(decoder),
        )
        self._passes, self._leaves = self._ranks.passes, self._ranks.leaves
        self._named = self._leaves.named
        for leaf in self._named.values():
            leaf.requires_grad_()  # adapters read from a file come without
        vectors = {id(leaf) for name, leaf in self._named.items() if len(self._leaves.shapes[name]) < 2}
        self._optimizer = build_optimizer(self._named.values(), optimizer, lambda leaf: id(leaf) in vectors)
        self._steps = 0  # calls of step(): what the schedule reads
        self._refused_in_a_row = 0
        self._num_rows = 0
        self._flops = FlopModel.of(decoder.config, adapters.spec if adapters else None)
        self._missing = ""  # what was said last of experts that a batch should have carried

    @property
    def progress(self) -> float:
        """Passes over microbatches: grows while it works."""
        return self._passes.progress

    @torch.no_grad()
    def adapters(self) -> Adapters | None:
        """A copy to publish, which later steps leave alone. None where all parameters are trained: the policy
        is the decoder itself or, where that lies on several ranks, the mirror, brought up to date here."""
        whole = self._leaves.whole({name: leaf.detach() for name, leaf in self._named.items()})
        if self._adapters is not None:
            names = dict.fromkeys(name.rpartition(".")[0] for name in whole)
            pairs = {name: (whole[f"{name}.A"].clone(), whole[f"{name}.B"].clone()) for name in names}
            # what came from other ranks came through host memory
            return Adapters(self._adapters.spec, pairs, self._decoder.config).to(self._decoder.device)
        if self._ranks.mirror is not None:
            for name, parameter in self._ranks.mirror.named_parameters():
                if name in whole:
                    parameter.copy_(whole[name])
        return None

    def step(self, batch: Batch) -> StepReport:
        """Train on ``batch``: an optimizer step for each of its minibatches.

        A minibatch's loss is scaled by their number, so the mean over minibatches is the loss of the batch.
        Metrics are means over trained tokens; ``num_rows`` counts all forward rows since the run began.
        ``routing/*`` compares carried experts with the trainer's own, and says how uneven they are
        (``train.totals.balance``); ``routing/coverage``: the share of
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
            minibatches[1:] = [self._with_old(minibatch) for minibatch in minibatches[1:]]
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
        metrics |= self._routing(batch, totals) | self._passes.metrics()
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
        found = scored(self._passes, parts, floor=floor, replay=usable)
        row = mismatch_row(found, moe.layers if moe else ())
        decision = self._decision(row["arms"], len(batch.minibatches))
        row |= {"replay": decision.on, "decision": decision.reason}
        work = sum((one.work for one in found), Work())
        row["passes"] = self._flops.forward(work) / self._price(parts)
        return row | {"seconds": time.perf_counter() - started}

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer moments by name, of the whole model: what a checkpoint holds. Not copied
        where they are here; on other ranks than the one that drives the run, none."""
        parameters = self._leaves.whole({name: leaf.detach() for name, leaf in self._named.items()})
        found = {f"parameters.{name}": tensor for name, tensor in parameters.items()}
        state = optimizer_tensors(self._optimizer, self._named)
        for moment in MOMENTS:
            own = {name: state[key] for name in self._named if (key := f"{name}.{moment}") in state}
            found |= {f"optimizer.{name}.{moment}": one for name, one in self._leaves.whole(own).items()}
        return found

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
        """Go back, bit for bit, to where `tensors` and `counters` were taken, by whichever ranks.

        Raises ValueError naming the first parameter that is missing, unknown or of another shape.
        """
        saved, shapes = _under("parameters.", tensors), self._leaves.shapes
        for name in sorted(saved.keys() | shapes.keys()):
            have = tuple(saved[name].shape) if name in saved else "nothing"
            want = shapes.get(name, "nothing")
            if have != want:
                raise ValueError(
                    f"the checkpoint has {have} for parameter {name}, this run trains {want}; "
                    "resume with the recipe that it was made with"
                )
        moments, own = _under("optimizer.", tensors), {}
        for name, parameter in self._named.items():
            parameter.copy_(self._leaves.own(name, saved[name]))
            keys = {f"{name}.{moment}" for moment in MOMENTS} & moments.keys()
            own |= {key: self._leaves.own(name, moments[key]) for key in keys}
        load_optimizer_tensors(self._optimizer, self._named, own)
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
        return {"model": model, "base": self._ranks.fingerprint(), "adapter": str(self._adapters.spec)}

    def _inputs(self, microbatch: Microbatch) -> Inputs:
        def tensor(array: np.ndarray, dtype: type) -> Tensor:
            return torch.from_numpy(array.astype(dtype)).to(self._decoder.device)

        experts = microbatch.experts if self._decoder.config.moe else None
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

    def _with_old(self, parts: Sequence[Inputs]) -> list[Inputs]:
        """With ``old``. The same passes show the trainer's own experts before any weight has moved."""
        found = self._passes.score(parts, How())
        return [
            replace(part, old=one.logprobs, counts=one.counts) for part, one in zip(parts, found, strict=True)
        ]

    def _with_reference(self, parts: Sequence[Inputs]) -> list[Inputs]:
        """With those of the base policy: the same model without adapters, choosing its own experts."""
        free = [replace(part, routing=None, carried=None) for part in parts]
        found = self._passes.score(free, How(adapted=False, as_trained=False))
        return [replace(part, reference=one.logprobs) for part, one in zip(parts, found, strict=True)]

    def _forward(
        self, part: Inputs, adapters: Adapters | None, routing: Tensor | None, ops: Ops | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [R, D] of the rows that predict a target, and the experts that the model would choose
        for all rows, [T, moe_layers, top_k]."""
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
        # not hidden[rows]: the first tokens of siblings share a row, and the backward of indexing sums such
        # rows by atomics, in the order in which threads come; that of index_select in the order of rows
        return hidden.index_select(0, part.rows), native

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

    def _objective(self, num_samples: int) -> Objective:
        """The loss of a microbatch, and what it says of itself, as a function of its scores."""
        algorithm = self._algorithm

        def objective(part: Inputs, scores: Scores) -> Outcome:
            logprobs, entropy, weights = scores.logprobs, scores.entropy, None
            assert logprobs is not None and entropy is not None
            old = logprobs.detach() if part.old is None else part.old
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
                ref_logprobs=part.reference,
                entropy=entropy if algorithm.needs_entropy else None,
            )
            return Outcome(
                loss=terms.total,
                stats={"entropy": entropy.detach().sum(), **terms.stats},
                mismatch=mismatch(old, part.behaviour, correction=weights),
                counts=scores.counts,
            )

        return objective

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
        parts = minibatch
        if self._algorithm.needs_reference:
            parts = self._with_reference(minibatch)
            totals.extra_flops += sum(self._flops.base(part.work) for part in minibatch)
        outcomes = self._passes.train(parts, self._objective(num_samples), scale)
        for part, outcome in zip(minibatch, outcomes, strict=True):
            totals.add(part, outcome)
        loss = torch.stack([outcome.loss for outcome in outcomes]).sum()
        norm, loss = torch.stack([self._leaves.reduce().double(), loss.double()]).tolist()
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
        alone = [replace(part, routing=None) for part, _ in fresh]
        natives = self._passes.score(alone, How(as_trained=False, logprobs=False, native=True))
        chosen = [
            (part.source, one.native.cpu().numpy())
            for (part, _), one in zip(fresh, natives, strict=True)
            if one.native is not None
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
        found |= balance(batch, moe, self._ranks.owner)
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


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose name starts with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


__all__ = ["PolicyTrainer", "TrainingStopped", "head_products", "trained_parameters"]
