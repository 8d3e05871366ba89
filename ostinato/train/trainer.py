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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.algo.algorithms import Algorithm, policy_loss
from ostinato.algo.logprobs import Matmul, chunked_logprobs, linear_logprobs
from ostinato.algo.offpolicy import Mismatch, importance_weights, mismatch, mismatch_metrics
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.packed import PackedAttention
from ostinato.model.peft_io import base_fingerprint
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
from ostinato.types import Batch, Microbatch, StepReport


class TrainingStopped(RuntimeError):
    """Too many optimizer steps in a row had a loss or a gradient that was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """A Microbatch as tensors on the trainer's device. ``old`` is set where it was computed ahead."""

    source: Microbatch
    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    rows: Tensor  # [R] int64
    targets: Tensor  # [R] int64
    behaviour: Tensor  # [R] fp32
    advantages: Tensor  # [R] fp32
    weights: Tensor  # [R] fp32
    sample_idx: Tensor  # [R] int64
    routing: Tensor | None  # [T, moe_layers, top_k] int16, to replay
    old: Tensor | None = None  # [R] fp32


@dataclass(slots=True)
class Totals:
    """What the microbatches of a step add up to, left on the device until the step is over."""

    loss: list[Tensor] = field(default_factory=list)
    stats: list[Mapping[str, Tensor]] = field(default_factory=list)  # sums over tokens
    mismatches: list[Mismatch] = field(default_factory=list)

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """The loss, the mismatch, and stats as means over the ``num_tokens`` of the step."""
        names = list(self.stats[0])
        sums = torch.stack(
            [torch.stack([stats[name].float() for name in names]) for stats in self.stats]
        ).sum(0)
        means = {name: value / num_tokens for name, value in zip(names, sums.tolist(), strict=True)}
        return {"loss": torch.stack(self.loss).sum().item(), **means, **mismatch_metrics(self.mismatches)}


class PolicyTrainer:
    """Trains ``adapters`` on a frozen decoder, or with ``adapters=None`` the decoder's own parameters.

    ``minibatches``: optimizer steps per batch; microbatches are dealt to them like cards. ``temperature``:
    the sampler's, so that log-probabilities are of the distribution that was sampled from. ``replay``: MoE
    layers use the experts that the batch carries. ``recompute``: keep one activation per layer, recompute the
    rest in backward. ``ops``: arithmetic that has gradients, such as ``model.native.Kernels.training``.

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
        minibatches: int = 1,
        replay: bool = True,
        recompute: bool = False,
        max_refused: int = 3,
        on_refused: Callable[[Microbatch], None] | None = None,
        ops: Ops = TORCH_OPS,
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"rollout.temperature is {temperature}; training needs a positive temperature")
        if minibatches < 1:
            raise ValueError(f"trainer.minibatches is {minibatches}; use at least 1")
        if max_refused < 1:
            raise ValueError(f"trainer.max_refused_in_a_row is {max_refused}; use at least 1")
        if adapters is None and algorithm.needs_reference:
            raise ValueError(
                f"algo.kl_coef is {algorithm.kl_coef}, but full-parameter training keeps no reference policy "
                "to measure from; set it to 0 or train an adapter"
            )
        self._decoder, self._adapters, self._algorithm = decoder, adapters, algorithm
        self._settings, self._temperature, self._minibatches = optimizer, temperature, minibatches
        self._replay, self._recompute, self._ops = replay, recompute, ops
        self._max_refused, self._on_refused = max_refused, on_refused
        self._named = trained_parameters(decoder, adapters)
        for leaf in self._named.values():
            leaf.requires_grad_()  # adapters read from a file come without
        self._optimizer = build_optimizer(self._named.values(), optimizer)
        self._steps = 0  # calls of step(): what the schedule reads
        self._refused_in_a_row = 0
        self._num_rows = 0

    def adapters(self) -> Adapters | None:
        """A copy to publish, which later steps leave alone; None where the decoder itself is the policy."""
        return None if self._adapters is None else self._adapters.detach_copy()

    def step(self, batch: Batch) -> StepReport:
        """Train on ``batch``: ``minibatches`` optimizer steps (at most one per microbatch).

        A minibatch's loss is scaled by their number, so the mean over minibatches is the loss of the batch.
        Metrics are means over trained tokens; ``num_rows`` counts all forward rows since the run began.
        With a bypass algorithm the mismatch of a later minibatch includes what the earlier ones changed.

        Raises:
            TrainingStopped: the last ``max_refused`` optimizer steps were all refused.
        """
        if not batch.microbatches:
            raise ValueError("the batch has no microbatch; skip the step when no sample is left to train on")
        lr = self._settings.lr * lr_factor(self._settings, self._steps)
        set_lr(self._optimizer, lr)
        deals = min(self._minibatches, len(batch.microbatches))
        inputs = [self._inputs(microbatch) for microbatch in batch.microbatches]
        minibatches = [inputs[deal::deals] for deal in range(deals)]
        if self._algorithm.decoupled:  # the first minibatch is its own old policy: nothing has changed yet
            minibatches[1:] = [[self._with_old(part) for part in minibatch] for minibatch in minibatches[1:]]
        totals, norms, refused = Totals(), [], []
        for minibatch in minibatches:
            norm, at_fault = self._update(minibatch, batch.num_samples, deals, totals)
            norms.append(norm)
            refused += [at_fault] if at_fault else []
            self._refused_in_a_row = self._refused_in_a_row + 1 if at_fault else 0
        self._steps += 1
        self._num_rows += batch.num_tokens + batch.num_context_tokens
        metrics = totals.metrics(batch.num_tokens) | _staleness(batch)
        metrics |= {
            "grad_norm": sum(norms) / deals,
            "learning_rate": lr,
            "num_rows": float(self._num_rows),
            "optimizer_steps": float(deals - len(refused)),
            "refused_steps": float(len(refused)),
        }
        return self._report(metrics, [microbatch for at_fault in refused for microbatch in at_fault])

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

        routing = microbatch.experts if self._replay and self._decoder.num_moe_layers else None
        return Inputs(
            source=microbatch,
            tokens=tensor(microbatch.tokens, np.int64),
            positions=tensor(microbatch.positions, np.int64),
            rows=tensor(microbatch.rows, np.int64),
            targets=tensor(microbatch.targets, np.int64),
            behaviour=tensor(microbatch.logprobs, np.float32),
            advantages=tensor(microbatch.advantages, np.float32),
            weights=tensor(microbatch.weights, np.float32),
            sample_idx=tensor(microbatch.sample_idx, np.int64),
            routing=None if routing is None else tensor(routing, np.int16),
        )

    def _with_old(self, part: Inputs) -> Inputs:
        """With ``old``, from the very forward that training runs: without gradients a layer may multiply
        in another order, and a ratio that should be 1 would be 1 within rounding."""
        hidden = self._hidden(part, self._adapters, part.routing)
        with torch.no_grad():
            return replace(part, old=self._logprobs(hidden, part, want_entropy=False)[0])

    def _hidden(self, part: Inputs, adapters: Adapters | None, routing: Tensor | None) -> Tensor:
        """Hidden states [R, D] of the rows that predict a target."""
        hidden, _ = self._decoder(
            part.tokens,
            part.positions,
            PackedAttention(part.source.segments),
            adapters=adapters,
            routing=routing,
            ops=self._ops,
            recompute=self._recompute and torch.is_grad_enabled(),
        )
        return hidden[part.rows]

    def _logprobs(self, hidden: Tensor, part: Inputs, *, want_entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probabilities [R] of the targets and the entropy [R] (NaN where it is not wanted)."""
        head = self._decoder.head_weight
        options: dict[str, Any] = {"temperature": self._temperature, "want_entropy": want_entropy}
        if head.requires_grad:
            return chunked_logprobs(hidden, part.targets, self._decoder.logits, **options)
        options["entropy_grad"] = want_entropy and self._algorithm.needs_entropy
        matmul_nt, matmul_nn = head_products(self._decoder, self._ops)
        options |= {"matmul_nt": matmul_nt, "matmul_nn": matmul_nn}
        return linear_logprobs(hidden, head, part.targets, **options)

    def _backward(self, part: Inputs, num_samples: int, scale: int, totals: Totals) -> None:
        """Add a microbatch's gradients and measurements to what is there; its graph is gone on return."""
        algorithm = self._algorithm
        hidden = self._hidden(part, self._adapters, part.routing)
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

    @torch.no_grad()
    def _reference(self, part: Inputs) -> Tensor:
        """The base policy's log-probabilities: the same model without adapters, choosing its own experts."""
        return self._logprobs(self._hidden(part, None, None), part, want_entropy=False)[0]

    def _update(
        self, minibatch: Sequence[Inputs], num_samples: int, scale: int, totals: Totals
    ) -> tuple[float, list[Microbatch]]:
        """One optimizer step: the gradient norm before clipping, and the microbatches that had it refused."""
        norm, finite = self._accumulate(minibatch, num_samples, scale, totals)
        at_fault = []
        if finite:
            clip_gradients(self._gradients(), norm, self._settings.max_grad_norm)
            self._optimizer.step()
        else:  # one by one, to name them: paid only by steps that are lost anyway
            alone = [(part, self._accumulate([part], num_samples, scale, Totals())[1]) for part in minibatch]
            at_fault = [part.source for part, fine in alone if not fine or all(ok for _, ok in alone)]
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


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose name starts with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _staleness(batch: Batch) -> dict[str, float]:
    """Policy versions between sampling and training, over tokens."""
    staleness = np.concatenate([microbatch.staleness for microbatch in batch.microbatches])
    return {"staleness/mean": float(staleness.mean()), "staleness/max": float(staleness.max())}


__all__ = ["PolicyTrainer", "TrainingStopped", "head_products", "trained_parameters"]
