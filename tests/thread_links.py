"""``Links`` between threads of one process: the obvious twin of collectives, fast enough for hypothesis.

    results = on_threads(4, lambda links: ...)      # by rank

A collective lays what each rank has on a table, waits for all and reads what the others laid there. Ranks are
on one axis or, with ``tensor``, on a grid: axis "t" runs fastest, "e" over the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
WAIT_S = 60.0


class Table:
    """What all ranks see."""

    def __init__(self, ranks: int) -> None:
        self._places: list[Any] = [None] * ranks
        self._barrier = threading.Barrier(ranks)

    def exchange(self, rank: int, value: T) -> list[T]:
        """What every rank laid down, by rank."""
        self._places[rank] = value
        self._barrier.wait(WAIT_S)
        found = list(self._places)
        self._barrier.wait(WAIT_S)
        return found

    def abort(self) -> None:
        self._barrier.abort()


class ThreadLinks:
    """The part of ``parallel.collectives.Links`` that experts need, for one rank of several threads."""

    def __init__(self, table: Table, rank: int, ranks: int, tensor: int) -> None:
        self._table, self._rank = table, rank
        column, row = rank % tensor, rank // tensor
        self._axes = {
            "t": (column, [row * tensor + other for other in range(tensor)]),
            "e": (row, [other * tensor + column for other in range(ranks // tensor)]),
        }

    def size(self, axis: str) -> int:
        return len(self._axes[axis][1])

    def place(self, axis: str) -> int:
        return self._axes[axis][0]

    def gather(self, x: Tensor, axis: str) -> Tensor:
        return self._join(x, axis)

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int], axis: str) -> Tensor:
        return _Apply.apply(x, lambda y: self._swap(y, sent, axis), lambda y: self._swap(y, received, axis))

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        return _Apply.apply(x, lambda y: self._join(y, axis), lambda y: self._sum_part(y, axis))

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        return _Apply.apply(x, lambda y: self._sum_part(y, axis), lambda y: self._join(y, axis))

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        return _Apply.apply(x, lambda y: self._sum(y, axis), lambda y: y)

    def _seen(self, value: T, axis: str) -> list[T]:
        everything = self._table.exchange(self._rank, value)
        return [everything[other] for other in self._axes[axis][1]]

    def _swap(self, x: Tensor, sent: Sequence[int], axis: str) -> Tensor:
        pieces = self._seen(x.split(list(sent)), axis)
        return torch.cat([piece[self.place(axis)] for piece in pieces]).clone()

    def _join(self, x: Tensor, axis: str) -> Tensor:
        return torch.cat(self._seen(x, axis))

    def _sum(self, x: Tensor, axis: str) -> Tensor:
        return torch.stack(self._seen(x, axis)).sum(0)

    def _sum_part(self, x: Tensor, axis: str) -> Tensor:
        return self._sum(x, axis).chunk(self.size(axis))[self.place(axis)].clone()


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Any:
        ctx.back = back
        return there(x.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.back(grad.contiguous()), None, None


def on_threads(ranks: int, work: Callable[[Any], T], *, tensor: int = 1) -> list[T]:
    """``work(links)`` of every rank at once; the first error of any of them."""
    table, results, errors = Table(ranks), [None] * ranks, list[BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadLinks(table, rank, ranks, tensor))  # type: ignore[call-overload]
        except BaseException as error:
            errors.append(error)
            table.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:  # the one that broke the barrier, not those that waited there
        raise next((one for one in errors if not isinstance(one, threading.BrokenBarrierError)), errors[0])
    return results  # type: ignore[return-value]
