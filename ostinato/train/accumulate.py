"""One adapter that is trained call by call: gradients add up until ``optim_step``.

    forward_backward(rows, loss), forward_backward(rows, loss), ..., optim_step(settings)

It is for callers that write the loop themselves: the training API (``serve.tinker``), supervised and
preference recipes. Rows come with targets, weights and a loss; they are packed into microbatches, siblings
share the rows of their prompt, and they go through the passes of ``PolicyTrainer`` (``train.local``). Losses
are sums, so splitting rows into calls and packing them change gradients only by rounding; the same calls in
the same order give the same bits. Several accumulators may share one frozen base.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ostinato.algo.logprobs import CHUNK
from ostinato.algo.offpolicy import Mismatch
from ostinato.algo.pack import pack
from ostinato.algo.routing import sequence_spans
from ostinato.algo.token_losses import BOUNDS, TokenLoss
from ostinato.config import TrainerSection
from ostinato.model.base import Base
from ostinato.model.lora import Adapters
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.train.inputs import Inputs, as_inputs
from ostinato.train.leaves import WholeLeaves, load_state_tensors, state_tensors, trained_parameters
from ostinato.train.local import LocalPasses
from ostinato.train.optimizer import build_optimizer, clip_gradients
from ostinato.train.passes import Outcome, ScoreOptions, Scores
from ostinato.types import Microbatch, Sample, Segment

TOKENS_PER_MICROBATCH = 2048
MAX_LR, MIN_EPS = 1e3, 1e-30  # with these, and MOST_NORM, AdamW makes no number that is not finite
MAX_NORM = 1e18  # of gradients: their squares are added in fp32
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A sequence with what its loss needs. Position t predicts ``targets[t]``, one token or K of them."""

    tokens: np.ndarray  # [N] int32
    targets: np.ndarray  # [N] or [N, K] int64
    values: Mapping[str, np.ndarray] = field(default_factory=dict)  # by name, shaped as targets, fp32

    def __post_init__(self) -> None:
        if not len(self.tokens):
            raise ValueError("has no tokens; give at least one")
        if self.targets.ndim not in (1, 2) or len(self.targets) != len(self.tokens):
            shape = list(self.targets.shape)
            raise ValueError(f"has target_tokens of shape {shape} for {len(self.tokens)} tokens of input")
        for name, values in self.values.items():
            if values.shape != self.targets.shape:
                want, have = list(self.targets.shape), list(values.shape)
                raise ValueError(f"has {name} of shape {have} where target_tokens has {want}")
            if not np.isfinite(values).all():
                raise ValueError(f"has a number in {name} that is not finite")

    @property
    def prompt_len(self) -> int:
        """Tokens before the first target with non-zero values, which siblings may share; all if none has."""
        weightings = [values for name, values in self.values.items() if name not in BOUNDS]
        is_weighted = [values.reshape(len(self.tokens), -1).any(1) for values in weightings]
        first_targets = (
            np.flatnonzero(np.logical_or.reduce(is_weighted)) if is_weighted else np.zeros(1, np.int64)
        )
        return int(first_targets[0]) + 1 if len(first_targets) else len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """The result of a call: per row the log-probabilities of its targets, shaped like them, and the loss."""

    logprobs: list[np.ndarray]
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    """One step of AdamW (arXiv 1711.05101, algorithm 2). ``max_grad_norm`` 0: nothing is clipped."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0

    def __post_init__(self) -> None:
        numbers = {"learning_rate": self.lr, "eps": self.eps, "weight_decay": self.weight_decay}
        for name, value in {**numbers, "grad_clip_norm": self.max_grad_norm}.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}; use a number from 0")
        if self.lr > MAX_LR:
            raise ValueError(f"learning_rate is {self.lr}; use {MAX_LR:g} at most")
        if self.eps < MIN_EPS:  # in fp32 a parameter without gradients would become 0 / 0
            raise ValueError(f"eps is {self.eps}; use at least {MIN_EPS:g}")
        if self.lr * self.weight_decay > 1:
            raise ValueError(
                f"weight_decay is {self.weight_decay}, which at learning_rate {self.lr} takes more than the "
                "weights; lower one of them"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"beta1 and beta2 are {self.betas}; use numbers in [0, 1)")


class NotFinite(ValueError):
    """Scores or gradients that are not finite: nothing was learned from them, and they were cleared."""


class Accumulator:
    """Trains ``adapters`` in place on a frozen ``decoder``; None: the decoder's own parameters. Calls must
    come one after another, in one thread."""

    def __init__(
        self,
        decoder: Base,
        adapters: Adapters | None,
        *,
        ops: Ops = TORCH_OPS,
        tokens_per_microbatch: int = TOKENS_PER_MICROBATCH,
        recompute: bool = False,
    ) -> None:
        self.decoder, self._adapters, self._budget = decoder, adapters, tokens_per_microbatch
        self._passes = LocalPasses(
            decoder, adapters, ops=ops, temperature=1.0, recompute=recompute, entropy_grad=False, splits=False
        )
        self._leaves = WholeLeaves(trained_parameters(decoder, adapters))
        for leaf in self._leaves.named.values():
            leaf.requires_grad_()
        self._optimizer = build_optimizer(self._leaves.named.values(), TrainerSection())
        self.steps = 0  # of the optimizer

    @property
    def adapters(self) -> Adapters:
        """The trained adapters. There are none where the decoder's own parameters are trained."""
        assert self._adapters is not None
        return self._adapters

    def forward_backward(self, rows: Sequence[Row], loss: TokenLoss) -> Scored:
        """Add the gradients of the loss. Raises ValueError naming the first row that cannot be learned from,
        before any work, and NotFinite for scores that are not finite; the gradients are then those from
        before."""
        return run_to_end(self.pieces(rows, loss, learn=True))

    def forward(self, rows: Sequence[Row], loss: TokenLoss) -> Scored:
        """Score rows without gradients; log-probabilities equal those of ``forward_backward`` bit for bit,
        and so do the errors that it raises."""
        return run_to_end(self.pieces(rows, loss, learn=False))

    def pieces(self, rows: Sequence[Row], loss: TokenLoss, *, learn: bool) -> Generator[None, None, Scored]:
        """``forward_backward`` or ``forward``, one microbatch per iteration: the thread may do other work in
        between, but none on this adapter. An error restores the gradients from before the call; NotFinite is
        one, of scores."""
        check_rows(rows, loss, self.decoder.config.vocab_size, self.decoder.config.max_positions)
        logprobs_by_row: dict[int, np.ndarray] = {}
        total = 0.0
        leaves = self._leaves.named.values()
        saved_gradients = (
            [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves] if learn else []
        )
        try:
            for part in pack_rows(rows, self._budget, self.decoder):
                logprobs, value = self._learn_part(part, loss) if learn else self._score_part(part, loss)
                total += value
                logprobs_by_row |= part.split(logprobs)
                yield
            if not all(np.isfinite(result).all() for result in (total, *logprobs_by_row.values())):
                raise NotFinite(
                    "log-probabilities or loss are not finite; load a state that was saved before"
                )
        except Exception:
            for leaf, grad in zip(leaves, saved_gradients, strict=True) if learn else ():
                leaf.grad = grad
            raise
        return Scored(logprobs=[logprobs_by_row[index] for index in range(len(rows))], loss=total)

    def _learn_part(self, part: Part, loss: TokenLoss) -> tuple[Tensor, float]:
        """Add the gradients of a part's loss. Returns (log-probabilities [R], loss)."""
        detached_logprobs: list[Tensor] = []

        def objective(inputs: Inputs, scores: Scores) -> Outcome:
            assert scores.logprobs is not None
            logprobs = scores.logprobs.index_select(0, part.places)
            detached_logprobs.append(logprobs.detach())
            unmeasured = Mismatch(0, {}, {})  # comparing with the sampler's is up to the client
            return Outcome(loss=loss(logprobs, part.values), stats={}, mismatch=unmeasured, counts=None)

        (outcome,) = self._passes.train([part.inputs], objective, 1.0)
        return detached_logprobs[0], float(outcome.loss)

    def _score_part(self, part: Part, loss: TokenLoss) -> tuple[Tensor, float]:
        """(log-probabilities [R], loss) of a part, without gradients."""
        (scores,) = self._passes.score([part.inputs], ScoreOptions())
        assert scores.logprobs is not None
        logprobs = scores.logprobs.index_select(0, part.places)
        return logprobs, float(loss(logprobs, part.values))

    def optim_step(self, settings: Adam) -> dict[str, float]:
        """Take one step on the accumulated gradients, clear them, and return metrics. Without gradients no
        parameter changes, but the step counts.

        Raises NotFinite if their norm is not finite or over ``MAX_NORM``; they are cleared then, too.
        """
        gradients = [leaf.grad for leaf in self._leaves.named.values() if leaf.grad is not None]
        norm = float(self._leaves.reduce()) if gradients else 0.0
        if not norm <= MAX_NORM:
            self._optimizer.zero_grad()
            raise NotFinite(
                f"the gradient norm is {norm}; nothing was learned, send rows with smaller values"
            )
        if settings.max_grad_norm:
            clip_gradients(gradients, norm, settings.max_grad_norm)
        for group in self._optimizer.param_groups:
            decay = settings.weight_decay if group["params"][0].ndim > 1 else 0.0  # vectors: none
            group.update(lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=decay)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.steps += 1
        return {"grad_norm": norm, "learning_rate": settings.lr}

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and optimizer moments, not copied: what a checkpoint holds (``train.state``)."""
        return state_tensors(self._leaves, self._optimizer)

    def restore(self, tensors: Mapping[str, Tensor], *, optimizer: bool = True) -> None:
        """Restore, bit for bit, the state saved in ``tensors``, and clear the gradients; without
        ``optimizer`` its moments start from zero. Raises ValueError for the tensors of another adapter."""
        if not optimizer:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}
        load_state_tensors(self._leaves, self._optimizer, tensors)
        self._optimizer.zero_grad()


def run_to_end(work: Generator[None, None, T]) -> T:
    """Run a generator to its end and return its return value."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def check_rows(rows: Sequence[Row], loss: TokenLoss, vocab_size: int, context: int) -> None:
    """Raise ValueError naming the first row that ``loss`` or the model cannot take."""
    for index, row in enumerate(rows):
        missing = [name for name in loss.needed if name not in row.values]
        unread = sorted(row.values.keys() - {*loss.needed, *loss.optional})
        if missing:
            raise ValueError(f"datum {index} has no {missing[0]}, which {loss.name} needs")
        if unread:
            raise ValueError(f"datum {index} has {unread[0]}, which {loss.name} does not read; leave it out")
        if row.values.keys() != rows[0].values.keys():
            raise ValueError(f"datum {index} has other inputs than datum 0; give all the same")
        if len(row.tokens) > context:
            raise ValueError(f"datum {index} has {len(row.tokens)} tokens and the context is {context}")
        for name, ids in (("input", row.tokens), ("target_tokens", row.targets)):
            if ids.min() < 0 or ids.max() >= vocab_size:
                token = ids.min() if ids.min() < 0 else ids.max()
                raise ValueError(f"datum {index} has the token {token} in {name}; use 0 to {vocab_size - 1}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """A microbatch of rows. Its R targets are scored at U places: a pair of row and target that siblings
    share is scored once."""

    inputs: Inputs  # of U targets
    places: Tensor  # [R] int64, into the U
    values: Mapping[str, Tensor]  # [R] each
    shapes: Mapping[int, tuple[int, ...]]  # of the targets of each row, in the order of R

    def split(self, flat: Tensor) -> dict[int, np.ndarray]:
        """``flat`` [R] by index of the row, in the shape of its targets."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = np.split(flat.cpu().numpy(), np.cumsum(sizes)[:-1])
        return {
            index: part.reshape(shape)
            for part, (index, shape) in zip(parts, self.shapes.items(), strict=True)
        }


def pack_rows(rows: Sequence[Row], tokens_per_microbatch: int, decoder: Base) -> Iterator[Part]:
    """The rows in microbatches of at most ``tokens_per_microbatch``, first-fit-decreasing, prompts shared."""
    samples = [_make_sample(row, index) for index, row in enumerate(rows)]
    weights = [sample.loss_mask.astype(np.float64) for sample in samples]
    batch = pack(samples, weights, tokens_per_microbatch=tokens_per_microbatch)
    for microbatch in batch.microbatches:
        yield _make_part(microbatch, rows, decoder)


def _make_sample(row: Row, index: int) -> Sample:
    """A sample for ``pack``: the row and a dummy token, which alone is trained, so that ``pack`` lays out all
    tokens of the row."""
    length = len(row.tokens) + 1
    mask = np.arange(length) == length - 1
    return Sample(
        tokens=np.append(row.tokens, 0).astype(np.int32),
        loss_mask=mask,
        logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        group=0,  # siblings are recognised by the tokens of their prompt
        prompt_len=row.prompt_len,
        uid=str(index),
    )


def _make_part(microbatch: Microbatch, rows: Sequence[Row], decoder: Base) -> Part:
    """The part of a packed microbatch: its (row, target) pairs without repetition, and all values."""
    row_indices = [int(uid) for uid in microbatch.uids]
    spans = sequence_spans(microbatch).tolist()
    predictors, targets = [], []
    for index, (start, stop, prompt_start, prompt_stop) in zip(row_indices, spans, strict=True):
        input_rows = np.concatenate([np.arange(prompt_start, prompt_stop), np.arange(start, stop)])
        row_targets = rows[index].targets.reshape(len(input_rows), -1)
        predictors.append(np.repeat(input_rows, row_targets.shape[1]))
        targets.append(row_targets.reshape(-1))
    pairs = np.stack([np.concatenate(predictors), np.concatenate(targets)], axis=1)
    unique, places = np.unique(pairs, axis=0, return_inverse=True)
    zeros = np.zeros(len(unique), np.float32)
    deduplicated = replace(
        microbatch,
        rows=unique[:, 0].astype(np.int32),
        targets=unique[:, 1].astype(np.int32),
        logprobs=zeros,
        advantages=zeros,
        weights=zeros,
        sample_idx=zeros.astype(np.int32),
        staleness=zeros.astype(np.int32),
    )
    device = decoder.device

    def join_values(name: str) -> Tensor:
        flat = [rows[index].values[name].reshape(-1) for index in row_indices]
        return torch.from_numpy(np.concatenate(flat).astype(np.float32)).to(device)

    values = {
        name: join_values(name) for name in rows[row_indices[0]].values
    }  # the same in all rows: checked
    return Part(
        inputs=as_inputs(deduplicated, device, moe=False, replay=False),
        places=torch.from_numpy(places.reshape(-1)).to(device),
        values=values,
        shapes={index: rows[index].targets.shape for index in row_indices},
    )


@torch.no_grad()
def score_prompt(
    decoder: Base, adapters: Adapters | None, tokens: np.ndarray, top: int = 0, ops: Ops = TORCH_OPS
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray] | None]:
    """Log-probabilities [P - 1] of all ``tokens`` [P] but the first, at temperature 1, and the ``top``
    likeliest at each place (ids, log-probabilities [P - 1, top], best first), by the forward of training."""
    num_inputs, device = len(tokens) - 1, decoder.device
    if not num_inputs:
        no_values = np.zeros((0, top))
        return np.zeros(0, np.float32), (
            no_values.astype(np.int32),
            no_values.astype(np.float32),
        ) if top else None
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    attend = ops.attention((Segment(start=0, stop=num_inputs),))
    hidden, _ = decoder(ids[:-1], torch.arange(num_inputs, device=device), attend, adapters=adapters, ops=ops)
    token_logprobs, top_chunks = [], []
    for hidden_chunk, target_chunk in zip(hidden.split(CHUNK), ids[1:].split(CHUNK), strict=True):
        logits = decoder.logits(hidden_chunk, ops=ops).float()
        log_p = torch.log_softmax(logits, dim=-1)
        chunk_logprobs = (
            log_p.gather(1, target_chunk[:, None]).squeeze(1)
            if ops.score is None
            else ops.score(logits, 1.0, target_chunk)
        )
        token_logprobs.append(chunk_logprobs)
        top_chunks.append(log_p.topk(top, dim=-1) if top else None)
    logprobs = torch.cat(token_logprobs).cpu().numpy()
    computed = [chunk for chunk in top_chunks if chunk is not None]
    if not computed:
        return logprobs, None
    values, indices = (torch.cat([chunk[k] for chunk in computed]).cpu().numpy() for k in (0, 1))
    return logprobs, (indices.astype(np.int32), values)
