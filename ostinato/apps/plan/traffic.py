"""Bytes that a rank sends in a step, by collective and axis, in closed form.

By the convention of ``parallel.collectives``: a ring's gather or reduction of B bytes over n ranks sends
B (n - 1) / n, an all-reduce twice that; in all-to-all and point to point only bytes to others count.

    t    rows of a context slice are gathered before products with cut outputs, and partial sums are scattered
         after products with cut inputs: twice per layer, each the other's backward
    e    a row goes once to every rank with an expert of the row, with its ids and weights, and a partial
         sum comes back; the expected value for even routing without replacement
    c    queries, keys and values in one exchange before attention, its output in another
    p    the residual stream of own rows, and its gradient
    f    the matrices of a layer are gathered while it runs, and gradients of all parameters are scattered
    ...  gradients of parameters that several ranks keep are summed once per optimizer step

Backward sends what forward sends, the other way. The traffic that is left out is small: counts of rows, norms
of gradients, padding. A test (tests/e2e/test_comm_bytes.py) counts real steps and compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ostinato.model.config import ModelConfig
from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.activations import CHUNK
from ostinato.parallel.elements import (
    chunk_layers,
    gradient_sums,
    is_moe,
    layer_elements,
    layers_by_kind,
    table_size,
)
from ostinato.parallel.layout import Layout
from ostinato.parallel.load import distinct_ranks

ID, WEIGHT = 4.0, 4.0  # sent bytes of an expert's id, and of its weight or a log-probability


class Sent(NamedTuple):
    """The messages of a rank: calls, and bytes of all calls together."""

    calls: float
    bytes: float


Traffic = Mapping[tuple[str, str], Sent]  # by (operation, axis)


def added(parts: Iterable[Traffic], times: float = 1.0) -> Traffic:
    """Return the sum of the parts, multiplied by ``times``."""
    sums: dict[tuple[str, str], Sent] = {}
    for part in parts:
        for key, (calls, size) in part.items():
            message = sums.get(key, Sent(0.0, 0.0))
            sums[key] = Sent(message.calls + calls * times, message.bytes + size * times)
    return sums


def ring(operation: str, axis: str, ranks: int, size: float, calls: float = 1.0) -> Traffic:
    """Return the traffic of gathers or reductions of ``size`` bytes in all; an all-reduce is one of each."""
    passes = 2.0 if operation == "all_reduce" else 1.0
    return {(operation, axis): Sent(calls, passes * size * (ranks - 1) / ranks)} if ranks > 1 else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A model under a layout. Widths are bytes of a number.

    Rows are those of a microbatch of a data rank, over all its context and tensor ranks.
    """

    config: ModelConfig
    adapter: AdapterSpec | None
    layout: Layout
    width: float  # of an activation
    weight: float = 2.0  # of base weights that are gathered over f
    gradient: float = 4.0

    def layer(self, rows: float, *, moe: bool, backward: bool = False) -> Traffic:
        """Return the traffic of a layer's forward, or of its backward."""
        c, t, config = self.layout.context, self.layout.tensor, self.config
        row = config.hidden_size * self.width
        mixture = config.moe if moe else None
        entries = 1 + (mixture is None or self._has_shared_mlp)
        parts = [
            ring(operation, "t", t, entries * rows / c * row, entries)
            for operation in ("all_gather", "reduce_scatter")
        ]
        if c > 1:
            values = config.num_heads + config.num_kv_heads
            values = values * (config.head_dim + config.v_head_dim)  # q and out, k and v
            parts.append({("all_to_all", "c"): Sent(2, rows / c * values * self.width * (c - 1) / c / t)})
        if mixture is not None:
            parts += self._exchange_experts(rows, mixture.num_experts, mixture.top_k, backward)
        # Bytes of a layer's matrices that are in pieces over f: all but those of routed experts.
        elements = layer_elements(self.config, self.adapter, self.layout, moe=moe)
        gathered_bytes = (elements.matrices + elements.routers) * self.weight
        parts.append(
            ring("all_gather", "f", self.layout.shard, 0 if backward else gathered_bytes, not backward)
        )
        if backward and self.adapter is None:
            parts.append(ring("reduce_scatter", "f", self.layout.shard, gathered_bytes))
        return added(parts)

    @property
    def _has_shared_mlp(self) -> bool:
        """Whether every layer has an MLP that is cut over t."""
        return self.config.moe is None or self.config.moe.shared_intermediate_size > 0

    def _exchange_experts(self, rows: float, experts: int, top_k: int, backward: bool) -> list[Traffic]:
        layout, row = self.layout, self.config.hidden_size * self.width
        parts = list[Traffic]()
        if layout.expert_tensor > 1:  # ids are 8 bytes here; only weights have a gradient
            extra_bytes = top_k * (WEIGHT if backward else 2 * ID + WEIGHT)
            forward_bytes, return_bytes = (row, row + extra_bytes) if backward else (row + extra_bytes, row)
            slice_ = rows / layout.context
            parts.append(ring("all_gather", "t", layout.tensor, slice_ * forward_bytes, 1 if backward else 3))
            parts.append(
                ring("reduce_scatter", "t", layout.tensor, slice_ * return_bytes, 2 if backward else 1)
            )
        if layout.expert > 1:
            rank_rows = rows / (layout.context if layout.expert_tensor > 1 else layout.row_shards)
            spread = distinct_ranks(experts, top_k, layout.expert)
            copies = rank_rows * spread * (layout.expert - 1) / layout.expert
            size = copies * (2 * row + top_k * (WEIGHT if backward else ID + WEIGHT))
            parts.append({("all_to_all", "e"): Sent(3 if backward else 5, size)})
        return parts

    def embed(self, rows: float, *, backward: bool = False) -> Traffic:
        """Return the traffic of the embedding; its backward where the embedding is trained."""
        size = rows / self.layout.context * self.config.hidden_size * self.width
        return ring("all_gather" if backward else "reduce_scatter", "t", self.layout.tensor, size)

    def head(self, rows: float, targets: float, *, backward: bool) -> Traffic:
        """Return the traffic of the log-probabilities of ``targets`` over a cut vocabulary. Hidden states of
        the slice are gathered, maxima and three sums of its targets are reduced, and the results of the
        slices are combined. A trained head computes its logits once more in backward."""
        c, t = self.layout.context, self.layout.tensor
        size, passes = rows / c * self.config.hidden_size * self.width, 1 + (backward and not self.adapter)
        calls = 2 * -(-targets // (c * CHUNK)) * passes
        parts = [
            ring("all_gather", "t", t, size),
            ring("all_reduce", "t", t, targets / c * 4 * WEIGHT * passes, calls),
            ring("all_reduce", "c", c, targets * 2 * WEIGHT),
        ]
        return added([*parts, *([ring("reduce_scatter", "t", t, size)] if backward else [])])

    def pass_on(self, rows: float) -> Traffic:
        """Return the traffic of a residual stream, or its gradient, to the next stage."""
        if self.layout.pipeline == 1:
            return {}
        rank_rows = rows / self.layout.row_shards
        return {("send_recv", "p"): Sent(1, rank_rows * self.config.hidden_size * self.width)}

    def microbatch(
        self, rows: float, targets: float, *, stage: int, backward: bool, recompute: bool = False
    ) -> Traffic:
        """Return the traffic of a microbatch on a rank of a stage: forward and, in training, backward."""
        layout, parts = self.layout, list[Traffic]()
        for moe, number in layers_by_kind(self.config, layout, stage).items():
            parts.append(added([self.layer(rows, moe=moe)], number * (1 + (backward and recompute))))
            if backward:
                parts.append(added([self.layer(rows, moe=moe, backward=True)], number))
        is_first, is_last = stage == 0, stage == layout.pipeline - 1
        num_passes = layout.virtual * (1 + backward) - is_last - (backward and is_first)
        parts.append(added([self.pass_on(rows)], num_passes))
        if backward and recompute:  # a chunk's last sum is not computed again where no norm reads it
            ends = [chunk[-1] for chunk in chunk_layers(self.config, layout, stage)][
                : layout.virtual - is_last
            ]
            sums = sum(self._has_shared_mlp or not is_moe(self.config, layer) for layer in ends)
            parts.append(added([self.embed(rows)], -sums))
        parts += [self.embed(rows)] if is_first else []
        if is_first and backward and self.adapter:  # nothing below the first layer is trained
            parts.append(added([self.embed(rows)], -1))
        elif is_first and backward:
            parts.append(self.embed(rows, backward=True))
        parts += [self.head(rows, targets, backward=backward)] if is_last else []
        return added(parts)

    def scores(self, rows: float, targets: float, *, backward: bool) -> Traffic:
        """Return the traffic of sending log-probabilities of all targets, and in training entropies, to all
        ranks. A mixture also sends three counts a row that compare its experts with the sampler's."""
        size = targets * WEIGHT * (1 + backward) + rows * 24.0 * (self.config.moe is not None)
        return ring("all_reduce", "all", self.layout.world, size)

    def update(self, stage: int) -> Traffic:
        """Return the traffic of gradient sums, once per optimizer step; tied tables are summed over the first
        and the last stage."""
        layout, is_tied = self.layout, self.config.tie_embeddings and not self.adapter
        ranks = {
            "s": layout.stage_ranks,
            "dc": layout.data * layout.context,
            "dcf": layout.data // layout.shard * layout.context,
            "r": layout.expert_replicas,
            "t": layout.tensor,
        }
        sums = gradient_sums(self.config, self.adapter, layout, stage)
        parts = [
            ring("all_reduce", axis, ranks[axis], values * self.gradient)
            for axes, values in sums.items()
            for axis in axes
        ]
        if is_tied and layout.pipeline > 1 and stage in (0, layout.pipeline - 1):
            parts.append({("send_recv", "p"): Sent(1, table_size(self.config, layout) * self.gradient)})
        return added(parts)
