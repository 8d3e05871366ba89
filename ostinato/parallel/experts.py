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

    A slot is the place of an expert when all that ranks keep stands in a row (``placement.slots``); where
    they are contiguous, it is the expert's number. ``tensor``: ranks of axis "t" that each keep a part of an
    expert's width; rows of all of them are gathered first.

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
            return self._routed(x, slots, weights, gate_up, down, lora)
        rows, slots, weights = (self.links.all_gather(part, "t") for part in (x, slots, weights))
        return self.links.reduce_scatter(self._routed(rows, slots, weights, gate_up, down, lora), "t")

    def _routed(
        self,
        x: Tensor,
        slots: Tensor,
        weights: Tensor,
        gate_up: Weight,
        down: Weight,
        lora: ExpertLora | None,
    ) -> Tensor:
        """Own rows to wherever their experts are and back."""
        ranks, kept = self.links.size("e"), gate_up.shape[0]
        if ranks == 1:
            return experts(x, slots, weights, gate_up, down, lora)
        owner = slots // kept
        out = Copies.to_ranks(owner, ranks)
        sent = torch.bincount(out.destination, minlength=ranks)
        one_each = [1] * ranks
        received = self.links.all_to_all(sent, one_each, one_each, "e")
        there, here = sent.tolist(), received.tolist()

        def travel(rows: Tensor) -> Tensor:
            return self.links.all_to_all(rows, there, here, "e")

        local = slots.index_select(0, out.row) - kept * out.destination.unsqueeze(1)
        local = travel(torch.where((local >= 0) & (local < kept), local, -1).int())
        rows, scale = travel(out.spread(x)), travel(out.spread(weights))
        partial = _own_experts(rows, local, scale, gate_up, down, lora)
        return out.collect(self.links.all_to_all(partial, here, there, "e"))


def _own_experts(
    x: Tensor, local: Tensor, weights: Tensor, gate_up: Weight, down: Weight, lora: ExpertLora | None
) -> Tensor:
    """[R, D]: what the experts here add to rows x [R, D]. local [R, K]: which of them, -1: elsewhere."""
    kept = gate_up.shape[0]
    row, column = (local >= 0).nonzero(as_tuple=True)
    copies = Copies.of(row, local[row, column].long(), len(x))
    # of every copy its weight, in the order of copies
    scale = weights.flatten().index_select(0, (row * local.shape[1] + column).index_select(0, copies.order))
    ends = torch.bincount(copies.destination, minlength=kept).cumsum(0).to(torch.int32)
    return mixture(x, ends, copies.spread, lambda rows: copies.collect(rows, scale), gate_up, down, lora)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copies:
    """S copies of R rows, in the order of where they go; a destination gets a row once at most.

    Two rows, the first to destinations 1 and 2, the second to 1::

        row          0 1 0
        destination  1 1 2
        turns        [0 1] [2]      the first copy of each row, then the second ones
    """

    row: Tensor  # [S] int64: of which row
    destination: Tensor  # [S] int64, ascending
    order: Tensor  # [S] int64: the place of each copy in what it was made of
    turns: tuple[Tensor, ...]  # of places in S; within a turn no row comes twice, so its order is free
    rows: int  # R

    @classmethod
    def of(cls, row: Tensor, destination: Tensor, rows: int) -> Copies:
        """From S pairs (row, destination), in any order."""
        order = destination.argsort(stable=True)
        row = row.index_select(0, order)
        by_row = row.argsort(stable=True)
        per_row = torch.bincount(row, minlength=rows)
        first = per_row.cumsum(0) - per_row
        turn = torch.arange(len(row), device=row.device) - first.index_select(0, row.index_select(0, by_row))
        most = int(per_row.max()) if len(row) else 0
        turns = tuple(by_row[turn == n] for n in range(most))
        return cls(
            row=row, destination=destination.index_select(0, order), order=order, turns=turns, rows=rows
        )

    @classmethod
    def to_ranks(cls, owner: Tensor, ranks: int) -> Copies:
        """Of each row one for every rank among the owners [T, K] of its experts."""
        named = owner.new_zeros(len(owner), ranks, dtype=torch.bool).scatter_(1, owner, True)
        row, rank = named.nonzero(as_tuple=True)
        return cls.of(row, rank, len(owner))

    def spread(self, x: Tensor) -> Tensor:
        """[R, ...] -> [S, ...]."""
        return _Spread.apply(x, self)  # type: ignore[return-value]

    def collect(self, copies: Tensor, weights: Tensor | None = None) -> Tensor:
        """[S, N] -> [R, N]: the sum of the copies of each row, weighted with [S]; fp32 sums at least."""
        return _Collect.apply(copies, weights, self)  # type: ignore[return-value]

    def summed(self, copies: Tensor, weights: Tensor | None = None) -> Tensor:
        """``collect`` of values."""
        wide = torch.promote_types(copies.dtype, torch.float32)
        total = copies.new_zeros(self.rows, *copies.shape[1:], dtype=wide)
        for places in self.turns:
            part = copies.index_select(0, places).to(wide)
            if weights is not None:
                part *= weights.index_select(0, places).to(copies.dtype).to(wide).unsqueeze(1)
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
        return ctx.copies.summed(grad), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, copies: Copies) -> Tensor:
        ctx.copies = copies
        ctx.save_for_backward(*((rows, weights) if weights is not None else ()))
        return copies.summed(rows, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        spread = grad.index_select(0, ctx.copies.row)
        if not (saved := ctx.saved_tensors):  # requested once: under checkpointing it cannot be again
            return spread, None, None
        rows, weights = saved
        wide = torch.promote_types(rows.dtype, torch.float32)
        grad_weights = (spread.to(wide) * rows.to(wide)).sum(dim=-1).to(weights.dtype)
        return spread * weights.to(spread.dtype).unsqueeze(1), grad_weights, None
