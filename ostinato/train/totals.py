"""Sums over the microbatches of a training step, and metrics of its batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ostinato.algo.offpolicy import Mismatch, mismatch_metrics
from ostinato.model.config import MoEConfig
from ostinato.parallel.load import expert_loads, measure_imbalance, nominal_ranks
from ostinato.parallel.placement import place_contiguously
from ostinato.train.inputs import Inputs
from ostinato.train.passes import Outcome
from ostinato.types import Batch


@dataclass(slots=True)
class Totals:
    """Sums over the microbatches of a step, kept on the device until the step is over."""

    loss: list[Tensor] = field(default_factory=list)
    stats: list[Mapping[str, Tensor]] = field(default_factory=list)  # sums over tokens
    mismatches: list[Mismatch] = field(default_factory=list)
    unjudged: list[tuple[Inputs, Tensor]] = field(default_factory=list)  # with gate.count_rows
    judged: list[tuple[Inputs, Tensor]] = field(default_factory=list)
    steps_taken: int = 0
    extra_flops: float = 0.0  # of forwards for old log-probabilities, the reference, the teacher and the gate
    repeated_flops: float = 0.0  # of what ran forward and backward again: the forward's only

    def add(self, part: Inputs, outcome: Outcome) -> None:
        """Add a microbatch. The counts of its experts become ``unjudged``, unless they were computed
        ahead."""
        self.loss.append(outcome.loss)
        self.stats.append(outcome.stats)
        self.mismatches.append(outcome.mismatch)
        if part.counts is None and outcome.counts is not None:
            self.unjudged.append((part, outcome.counts))

    def passes(self, forward: float) -> dict[str, float]:
        """FLOPs besides those of training's own pass, in units of the ``forward`` FLOPs of the batch.
        passes/extra: of forwards alone. passes/repeated, if there are any: of forwards that ran again, each
        with its backward, to name the samples of a refused step."""
        repeated_metric = {"passes/repeated": self.repeated_flops / forward} if self.repeated_flops else {}
        return {"passes/extra": self.extra_flops / forward} | repeated_metric

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """The loss, the mismatch, and stats as means over the ``num_tokens`` of the step."""
        names = list(self.stats[0])
        sums = torch.stack(
            [torch.stack([stats[name].float() for name in names]) for stats in self.stats]
        ).sum(0)
        means = {name: value / num_tokens for name, value in zip(names, sums.tolist(), strict=True)}
        mismatch_of_step = mismatch_metrics(self.mismatches)
        return {"loss": torch.stack(self.loss).sum().item(), **means, **mismatch_of_step}


def measure_staleness(batch: Batch) -> dict[str, float]:
    """Mean and maximum over tokens of the optimizer steps between sampling and training: for every policy
    version as many as this batch has minibatches, plus n for minibatch n."""
    minibatches = batch.minibatches
    ages = np.concatenate(
        [len(minibatches) * part.staleness + n for n, parts in enumerate(minibatches) for part in parts]
    )
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}


def measure_support(batch: Batch) -> dict[str, float]:
    """Mean number of ids in recorded supports, per token that has one, and their bytes per trained token:
    four for an id, four for a count."""
    supports = [microbatch.support for microbatch in batch.microbatches if microbatch.support is not None]
    num_restricted = sum(int(np.count_nonzero(recorded_support.counts)) for recorded_support in supports)
    if not num_restricted:
        return {}
    ids = sum(len(recorded_support.ids) for recorded_support in supports)
    num_bytes = sum(
        recorded_support.ids.nbytes + recorded_support.counts.nbytes for recorded_support in supports
    )
    return {
        "sampling/support_mean": ids / num_restricted,
        "sampling/support_bytes": num_bytes / batch.num_tokens,
    }


def measure_balance(batch: Batch, moe: MoEConfig, owner: np.ndarray | None = None) -> dict[str, float]:
    """Imbalance with which the experts that the batch carries would load the ranks (``parallel.load``), layer
    by layer of every microbatch, since ranks wait for each other there; empty if it carries none. ``owner``
    [L, E]: the rank that keeps an expert; None: contiguous blocks of experts on ``nominal_ranks`` ranks."""
    routes = [microbatch.experts for microbatch in batch.microbatches if microbatch.experts is not None]
    if not routes:
        return {}
    loads = np.concatenate([expert_loads(ids, moe.num_experts) for ids in routes])
    if not loads.any():  # the batch carries routes, all unknown
        return {}
    if owner is None:
        owner = place_contiguously(len(moe.layers), moe.num_experts, nominal_ranks(moe.num_experts))
    return measure_imbalance(loads, np.tile(owner, (len(routes), 1)), int(owner.max()) + 1).metrics
