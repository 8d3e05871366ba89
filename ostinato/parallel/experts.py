"""A mixture whose experts are kept by several ranks: rows travel to the experts, and their results back.

    own rows --a copy for each rank that keeps an expert of theirs--> all-to-all --> rows for the experts here
        --a copy for each expert--> grouped products --weighted sum of each row's copies--> partial sums
    all-to-all back --> one partial sum of each rank that a row was sent to --added up--> own rows

A row goes to a rank once, however many of its experts are there, and one partial sum comes back: with K of E
experts over n ranks that is n (1 - (1 - 1/n)^K) copies of a row instead of K where routing is even. Its ids
and weights go along. Nothing is dropped and there is no capacity: splits are as uneven as the routing.

Rows are added up in the order of ranks and, on a rank, of slots, whatever the device; no sum depends on which
thread was first. Every rank makes the same collectives in the same order, forward and backward, also one that
no rank sends a row to.

T rows, D model, K experts per token, E experts, n ranks, S copies, R rows received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ostinato.model.moe import ExpertLora, experts, mixture
from ostinato.model.weights import Weight
from ostinato.parallel.collectives import Collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParallel:
    """``Ops.experts`` of a rank that keeps a part of the experts: call it with own rows x [T, D],
    slots [T, K], weights [T, K] and the weights and factors that are kept here.

    A slot is the place of an expert in the list of all experts, ordered by rank (``placement.number_slots``).
    Of contiguous experts it is the expert's number. ``tensor``: the number of ranks of axis "t" that each
    keep a part of an expert's width; rows of all of them are gathered first.

    Its twin on one rank is ``model.moe.experts``. Factors that all ranks have (those of shared_outer) get the
    gradient of the rows that passed here; the sum over ranks is the trainer's.
    """

    links: Collectives
    tensor: int = 1

    def __call__(
        self,
        x: Tensor,
        slots: Tensor,
        weights: Tensor,
        gate_up: Weight,
        down: Weight,
        lora: ExpertLora | None = None,
    ) -> Tensor:
        if self.tensor == 1:
            return self._run_routed(x, slots, weights, gate_up, down, lora)
        rows, slots, weights = (self.links.all_gather(part, "t") for part in (x, slots, weights))
        return self.links.reduce_scatter(self._run_routed(rows, slots, weights, gate_up, down, lora), "t")

    def _run_routed(
        self,
        x: Tensor,
        slots: Tensor,
        weights: Tensor,
        gate_up: Weight,
        down: Weight,
        lora: ExpertLora | None,
    ) -> Tensor:
        """Send own rows to the ranks of their experts, and add up the results that come back [T, D]."""
        ranks, num_local = self.links.size("e"), gate_up.shape[0]
        if ranks == 1:
            return experts(x, slots, weights, gate_up, down, lora)
        owner = slots // num_local
        copies = Copies.to_ranks(owner, ranks)
        send_counts = torch.bincount(copies.destination, minlength=ranks)
        one_per_rank = [1] * ranks
        receive_counts = self.links.all_to_all(send_counts, one_per_rank, one_per_rank, "e")
        send_splits, receive_splits = send_counts.tolist(), receive_counts.tolist()

        def travel(rows: Tensor) -> Tensor:
            return self.links.all_to_all(rows, send_splits, receive_splits, "e")

        local_ids = slots.index_select(0, copies.row) - num_local * copies.destination.unsqueeze(1)
        local_ids = travel(torch.where((local_ids >= 0) & (local_ids < num_local), local_ids, -1).int())
        rows, received_weights = travel(copies.spread(x)), travel(copies.spread(weights))
        partial_sums = _run_local_experts(rows, local_ids, received_weights, gate_up, down, lora)
        return copies.collect(self.links.all_to_all(partial_sums, receive_splits, send_splits, "e"))


def _run_local_experts(
    x: Tensor, local_ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight, lora: ExpertLora | None
) -> Tensor:
    """Weighted sums [R, D] of the outputs of this rank's experts for rows x [R, D]. ``local_ids`` [R, K]: the
    index of each expert here, -1 where it is elsewhere."""
    num_local = gate_up.shape[0]
    row, column = (local_ids >= 0).nonzero(as_tuple=True)
    copies = Copies.of(row, local_ids[row, column].long(), len(x))
    # weight of every copy, in the order of copies
    copy_weights = weights.flatten().index_select(
        0, (row * local_ids.shape[1] + column).index_select(0, copies.order)
    )
    ends = torch.bincount(copies.destination, minlength=num_local).cumsum(0).to(torch.int32)
    return mixture(
        x, ends, copies.spread, lambda rows: copies.collect(rows, copy_weights), gate_up, down, lora
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copies:
    """S copies of R rows, in the order of where they go; a destination gets a row once at most.

    Two rows, the first to destinations 1 and 2, the second to 1::

        row          0 1 0
        destination  1 1 2
        turns        [0 1] [2]      the first copy of each row, then the second ones
    """

    row: Tensor  # [S] int64: the row of each copy
    destination: Tensor  # [S] int64, ascending
    order: Tensor  # [S] int64: the index of each copy among the pairs that it was made from
    turns: tuple[Tensor, ...]  # indices of copies; no row is twice in a turn, whose order has no effect then
    rows: int  # R

    @classmethod
    def of(cls, row: Tensor, destination: Tensor, rows: int) -> Copies:
        """Copies from S pairs (row, destination), in any order, of ``rows`` rows."""
        order = destination.argsort(stable=True)
        row = row.index_select(0, order)
        by_row = row.argsort(stable=True)
        copies_of_row = torch.bincount(row, minlength=rows)
        first_copy = copies_of_row.cumsum(0) - copies_of_row
        turn_of_copy = torch.arange(len(row), device=row.device) - first_copy.index_select(
            0, row.index_select(0, by_row)
        )
        num_turns = int(copies_of_row.max()) if len(row) else 0
        turns = tuple(by_row[turn_of_copy == n] for n in range(num_turns))
        return cls(
            row=row, destination=destination.index_select(0, order), order=order, turns=turns, rows=rows
        )

    @classmethod
    def to_ranks(cls, owner: Tensor, ranks: int) -> Copies:
        """One copy of each row for every rank among the owners [T, K] of its experts."""
        is_owner = owner.new_zeros(len(owner), ranks, dtype=torch.bool).scatter_(1, owner, True)
        row, rank = is_owner.nonzero(as_tuple=True)
        return cls.of(row, rank, len(owner))

    def spread(self, x: Tensor) -> Tensor:
        """Copy rows [R, ...] to [S, ...]."""
        return _Spread.apply(x, self)  # type: ignore[return-value]

    def collect(self, copies: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the copies [S, N] of each row to [R, N], weighted with [S], in fp32 at least."""
        return _Collect.apply(copies, weights, self)  # type: ignore[return-value]

    def sum(self, copies: Tensor, weights: Tensor | None = None) -> Tensor:
        """``collect`` without gradients."""
        wide_dtype = torch.promote_types(copies.dtype, torch.float32)
        total = copies.new_zeros(self.rows, *copies.shape[1:], dtype=wide_dtype)
        for places in self.turns:
            part = copies.index_select(0, places).to(wide_dtype)
            if weights is not None:
                part *= weights.index_select(0, places).to(copies.dtype).to(wide_dtype).unsqueeze(1)
            total.index_add_(0, self.row.index_select(0, places), part)
        return total.to(copies.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return x.index_select(0, copies.row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.sum(grad), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, copies: Copies) -> Tensor:
        ctx.copies = copies
        ctx.save_for_backward(*((rows, weights) if weights is not None else ()))
        return copies.sum(rows, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        row_grads = grad.index_select(0, ctx.copies.row)
        if not (saved_tensors := ctx.saved_tensors):  # read once: under checkpointing a second read fails
            return row_grads, None, None
        rows, weights = saved_tensors
        wide_dtype = torch.promote_types(rows.dtype, torch.float32)
        grad_weights = (row_grads.to(wide_dtype) * rows.to(wide_dtype)).sum(dim=-1).to(weights.dtype)
        return row_grads * weights.to(row_grads.dtype).unsqueeze(1), grad_weights, None
