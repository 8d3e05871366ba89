"""What one rank sends in a training step, message by message: the plan's ``collectives.Traffic``.

``Steps`` follows the trainer's rules (``train.sharded``): microbatch n is data rank n mod d's; rows are
padded to a multiple of c t; where microbatches of several data ranks meet, the others pass padding when they
do not come out even; every rank sends all the results of its microbatches; gradients are summed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ostinato.apps.plan.comm import Message, Sent, Talk, Traffic, layers_of, ring, times, total
from ostinato.apps.plan.leaves import gathered_values, gradient_messages
from ostinato.apps.plan.parts import is_moe
from ostinato.apps.plan.problem import Arrangement, Phase, Problem, Recompute, Setup
from ostinato.apps.plan.training import load_of
from ostinato.model.config import ModelConfig
from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """``rows`` through the layers, ``targets`` of the loss, ``here`` of them predicted by rows of this rank's
    context slice (None: an even part); ``carried``: with the sampler's experts, which are compared with the
    trainer's. ``remote``: by place of an MoE layer, how many copies of rows a rank sent to
    other expert ranks and got from them; None: what even routing would."""

    rows: float
    targets: float
    here: float | None = None
    carried: bool = False
    remote: Mapping[int, tuple[float, float]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Optimizer steps of one rank of a layout. Widths are bytes of one number."""

    config: ModelConfig
    adapter: AdapterSpec | None
    layout: Layout
    rank: int = 0
    compute: float = 4.0
    weight: float = 4.0  # of base weights that are gathered over f
    gradient: float = 4.0
    score: float = 4.0  # of log-probabilities
    recompute: bool = False

    @property
    def talk(self) -> Talk:
        return Talk(config=self.config, layout=self.layout, width=self.compute)

    def step(self, parts: Sequence[Microbatch]) -> list[Message]:
        """One optimizer step on ``parts``, the microbatches of all data ranks in order."""
        found = [message for part in self._mine(parts) for message in self.microbatch(part)]
        return found + self.shared(parts) + self.update()

    def scored(self, parts: Sequence[Microbatch]) -> list[Message]:
        """Old log-probabilities of ``parts``."""
        found = [message for part in self._mine(parts) for message in self.microbatch(part, backward=False)]
        return found + self.shared(parts, columns=1)

    def _mine(self, parts: Sequence[Microbatch]) -> list[Microbatch]:
        mine = [part for n, part in enumerate(parts) if n % self.layout.data == self._data]
        missing = -(-len(parts) // self.layout.data) - len(mine) if self.layout.couples_microbatches else 0
        return mine + [Microbatch(rows=0, targets=0)] * missing

    def microbatch(self, part: Microbatch, backward: bool = True) -> list[Message]:
        """Forward and backward of one microbatch of this rank; one of no rows is padding alone."""
        layout, talk = self.layout, self.talk
        rows = max(1, -(-part.rows // layout.row_shards)) * layout.row_shards
        stage, found = layout.coords(self.rank).pipeline, list[Message]()
        spans = layout.chunk_layers(self.config.num_layers)
        for chunk in layout.chunks_of(stage):
            first, last = chunk == 0, chunk == layout.chunks - 1
            found += talk.embed(rows) if first else []
            if self.adapter is None and backward and first:
                found += talk.embed_back(rows)
            passed = talk.pass_on(rows)
            found += passed * ((not last) + (backward and not first))
            for layer in spans[chunk]:
                ends = not last and layer == spans[chunk][-1]
                found += self._layer(layer, rows, part, backward, ends)
            if last and part.rows:
                passes = 2 if backward and self.adapter is None else 1
                found += talk.head(part.targets, rows, part.here, passes)
            elif last and backward:
                found += talk.idle_head(rows)
            if last and backward:
                found += talk.head_back(rows)
        return found

    def _layer(self, layer: int, rows: float, part: Microbatch, backward: bool, ends: bool) -> list[Message]:
        kind, talk = layers_of(self.config, self.adapter)[layer], self.talk
        remote = None if part.remote is None else part.remote.get(layer)
        gathered = self._gathered(layer)
        found = talk.forward(kind, rows, remote) + gathered
        if backward and kind.after:
            found += talk.again(kind, rows, remote, ends=ends) + gathered if self.recompute else []
            found += talk.backward(kind, rows, remote)
            if self.adapter is None:
                found += [one._replace(operation="reduce_scatter") for one in gathered]
        return found

    def _gathered(self, layer: int) -> list[Message]:
        values = gathered_values(self.config, self.layout, moe=is_moe(self.config, layer))
        return ring("all_gather", "f", self.layout.shard, values * self.weight)

    def shared(self, parts: Sequence[Microbatch], columns: int = 2) -> list[Message]:
        """Log-probabilities of all targets to all ranks, in training entropies too, and how experts
        compare."""
        scores = columns * sum(part.targets for part in parts) * self.score
        counts = 3 * 8.0 * sum(part.rows for part in parts if part.carried)
        ranks = self.layout.world
        return ring("all_reduce", "all", ranks, scores) + (
            ring("all_reduce", "all", ranks, counts) if counts else []
        )

    def update(self) -> list[Message]:
        """Sums of gradients, and their norm."""
        stage = self.layout.coords(self.rank).pipeline
        return gradient_messages(self.config, self.adapter, self.layout, stage, self.gradient)

    @property
    def _data(self) -> int:
        return self.layout.coords(self.rank).data


def traffic(problem: Problem, phase: Phase, setup: Setup, rank: int = 0) -> dict[tuple[str, str], Sent]:
    """What a rank sends in one RL step by (operation, axis): of training, or of old log-probabilities."""
    precision, updates = problem.precision, problem.work.updates
    steps = Steps(
        config=problem.config,
        adapter=problem.adapter,
        layout=setup.layout,
        rank=rank,
        compute=precision.compute.num_bytes,
        weight=precision.base.num_bytes,
        gradient=precision.gradient.num_bytes,
        recompute=setup.recompute == Recompute.FULL,
    )
    load = load_of(problem, setup)
    part = Microbatch(rows=load.rows, targets=load.logits, carried=problem.config.moe is not None)
    train = phase == Phase.TRAIN
    number = updates if train else updates - 1
    if not number:
        return {}
    everyone = steps.shared([part], columns=2 if train else 1)
    found = times(steps.microbatch(part, backward=train), number * load.number)
    found += times(everyone, number * load.number * setup.layout.data)
    return total(found + (times(steps.update(), number) if train else []))


def step_traffic(problem: Problem, arrangement: Arrangement, rank: int = 0) -> Traffic:
    """What a rank of the trainer sends in one RL step: training, and old log-probabilities. Publishes,
    checkpoints and measurements send besides."""
    phases = (Phase.TRAIN, Phase.LOGPROBS)
    found = [traffic(problem, phase, arrangement.setup(phase), rank) for phase in phases]
    return {
        key: Sent(*(sum(values) for values in zip(*(one[key] for one in found if key in one), strict=True)))
        for key in dict.fromkeys(key for one in found for key in one)
    }
