"""All communication of ranks while they compute, counted: calls, bytes, seconds.

A collective here is a plain function of tensors, differentiable where a backward pass goes through it.
Bytes are what one rank sends: of a ring for gathers and reductions of a whole of B bytes over n ranks,
B (n - 1) / n (twice that for an all-reduce); for all-to-all and point to point what goes to others.

Axes are those of ``layout.Layout.group``. On an axis of one rank nothing is called and nothing counted.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ostinato.parallel.layout import Coords, Layout

AXES = ("d", "t", "p", "c", "f", "e", "r", "s", "dc", "dcf", "rows", "all")


class Mesh:
    """The place of this rank in a layout, and a process group for each axis with several ranks.

    Made on all ranks together, since torch makes groups together: every distinct set of ranks is one group.
    ``timeout_s`` bounds every collective; None: torch's 30 minutes. Raises ValueError where the ranks that
    were started are not those of the layout.
    """

    def __init__(
        self, layout: Layout, device: torch.device | str = "cpu", *, timeout_s: float | None = None
    ) -> None:
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if num_ranks != layout.world:
            raise ValueError(
                f"layout {layout} is for {layout.world} ranks, but {num_ranks} were started; start "
                f"{layout.world}, or choose another layout"
            )
        self.layout = layout
        self.device = torch.device(device)
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.coords: Coords = layout.coords(self.rank)
        self._ranks = {axis: layout.group(axis, self.rank) for axis in AXES}
        groups: dict[tuple[int, ...], Any] = {}
        # given to each group: a new one does not inherit the timeout of the default group
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        for axis in AXES:
            for rank in range(layout.world):
                ranks = layout.group(axis, rank)
                if len(ranks) > 1 and ranks not in groups:
                    # in the order given, so that a place on the axis is a rank of the group
                    groups[ranks] = dist.new_group(list(ranks), timeout=timeout)
        self._groups = {axis: groups.get(ranks) for axis, ranks in self._ranks.items()}

    def group(self, axis: str) -> Any:
        """The process group of an axis; None where this rank is alone on it."""
        return self._groups[axis]

    def size(self, axis: str) -> int:
        return len(self._ranks[axis])

    def place(self, axis: str) -> int:
        return self._ranks[axis].index(self.rank)

    def peer(self, axis: str, place: int) -> int:
        """The global rank at a place of an axis."""
        return self._ranks[axis][place]


# torch 2.13 has new names for these, and warns of the old ones
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(slots=True)
class Traffic:
    """Counts of what this rank has sent, by (operation, axis)."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    # with the time of waiting for other ranks
    seconds: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    num_ended: int = 0  # collectives and transfers since the rank began: grows while bytes flow

    def take(self) -> Traffic:
        """Return the counts, and start from zero again; ``num_ended`` goes on."""
        taken = Traffic(self.calls, self.bytes, self.seconds)
        self.calls, self.bytes, self.seconds = Counter(), Counter(), defaultdict(float)
        return taken

    def metrics(self) -> dict[str, float]:
        """comm/bytes/<operation>/<axis> (sent by this rank) and comm/seconds/..., for metrics.jsonl."""
        counters = (("calls", self.calls), ("bytes", self.bytes), ("seconds", self.seconds))
        return {
            f"comm/{quantity}/{op}/{axis}": float(value)
            for quantity, counter in counters
            for (op, axis), value in counter.items()
        }


@dataclass(frozen=True, slots=True)
class Pending:
    """A tensor that is being sent or received."""

    tensor: Tensor
    work: Any
    traffic: Traffic
    axis: str

    def wait(self) -> Tensor:
        """Wait until the tensor has been sent, or received, count the time, and return it."""
        start = time.perf_counter()
        self.work.wait()
        self.traffic.seconds["send_recv", self.axis] += time.perf_counter() - start
        self.traffic.num_ended += 1
        return self.tensor


class Collectives:
    """The collectives of one rank, over the groups of its mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.traffic = Traffic()

    def size(self, axis: str) -> int:
        return self._mesh.size(axis)

    def place(self, axis: str) -> int:
        return self._mesh.place(axis)

    @property
    def progress(self) -> int:
        """Number of collectives and transfers that have ended, which grows during a long exchange."""
        return self.traffic.num_ended

    # ---- rows (dimension 0), differentiable

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        """Join [n, ...] of each rank to [size n, ...], in the order of ranks. Backward sums and scatters."""
        return x if self.size(axis) == 1 else _Gather.apply(x, self, axis)  # type: ignore[return-value]

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        """Sum [size n, ...] over the ranks, and return this rank's [n, ...] of it. Backward gathers."""
        return x if self.size(axis) == 1 else _Scatter.apply(x, self, axis)  # type: ignore[return-value]

    def all_reduce(self, x: Tensor, axis: str) -> Tensor:
        """The sum over an axis, on all of its ranks. Each computes the same from it, so the backward is the
        identity (Megatron's g, arXiv 1909.08053 section 3)."""
        return x if self.size(axis) == 1 else _Sum.apply(x, self, axis)  # type: ignore[return-value]

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int], axis: str) -> Tensor:
        """Exchange rows with every rank, in the order of ranks: x [sum(sent), ...] -> [sum(received), ...].
        Backward exchanges the other way."""
        if self.size(axis) == 1:
            return x
        return _Exchange.apply(x, self, tuple(sent), tuple(received), axis)  # type: ignore[return-value]

    # ---- not differentiable

    def gather(self, x: Tensor, axis: str) -> Tensor:
        """``all_gather`` without gradients."""
        n = self.size(axis)
        if n == 1:
            return x
        x = x.contiguous()
        out = x.new_empty(n * x.shape[0], *x.shape[1:])
        whole_bytes = out.nbytes
        self._run("all_gather", axis, whole_bytes * (n - 1) // n, lambda g: _all_gather(out, x, group=g))
        return out

    def scatter(self, x: Tensor, axis: str) -> Tensor:
        """``reduce_scatter`` without gradients."""
        n = self.size(axis)
        if n == 1:
            return x
        x = x.contiguous()
        out = x.new_empty(x.shape[0] // n, *x.shape[1:])
        self._run("reduce_scatter", axis, x.nbytes * (n - 1) // n, lambda g: _reduce_scatter(out, x, group=g))
        return out

    def sum_(self, x: Tensor, axis: str) -> Tensor:
        """Sum ``x`` over an axis, in place, and return it."""
        return self._reduce_in_place(x, axis, dist.ReduceOp.SUM)

    def max_(self, x: Tensor, axis: str) -> Tensor:
        """Replace ``x`` by its maximum over an axis, in place, and return it."""
        return self._reduce_in_place(x, axis, dist.ReduceOp.MAX)

    def exchange(self, x: Tensor, sent: Sequence[int], received: Sequence[int], axis: str) -> Tensor:
        """``all_to_all`` without gradients."""
        if self.size(axis) == 1:
            return x
        x = x.contiguous()
        out = x.new_empty(sum(received), *x.shape[1:])
        row_bytes = x[:1].nbytes if len(x) else 0
        own_rows = sent[self.place(axis)]
        self._run(
            "all_to_all",
            axis,
            (sum(sent) - own_rows) * row_bytes,
            lambda g: dist.all_to_all_single(out, x, list(received), list(sent), group=g),
        )
        return out

    def send(self, x: Tensor, axis: str, to: int) -> Pending:
        """Send ``x`` to the rank at place ``to`` of an axis, without waiting; x must not change
        before the send has ended."""
        x = x.contiguous()
        self.traffic.calls["send_recv", axis] += 1
        self.traffic.bytes["send_recv", axis] += x.nbytes
        work = dist.isend(x, self._mesh.peer(axis, to), group=self._mesh.group(axis))
        return Pending(x, work, self.traffic, axis)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, axis: str, source: int) -> Pending:
        """Receive a tensor from the rank at place ``source`` of an axis, without waiting."""
        x = torch.empty(*shape, dtype=dtype, device=self._mesh.device)
        work = dist.irecv(x, self._mesh.peer(axis, source), group=self._mesh.group(axis))
        return Pending(x, work, self.traffic, axis)

    def _reduce_in_place(self, x: Tensor, axis: str, op: Any) -> Tensor:
        n = self.size(axis)
        if n > 1:
            sent_bytes = 2 * x.nbytes * (n - 1) // n
            self._run("all_reduce", axis, sent_bytes, lambda g: dist.all_reduce(x, op, group=g))
        return x

    def _run(self, operation: str, axis: str, sent_bytes: int, collective: Callable[[Any], Any]) -> None:
        """Run a collective on the group of ``axis``, and count it with the ``sent_bytes`` bytes."""
        start = time.perf_counter()
        collective(self._mesh.group(axis))
        key = (operation, axis)
        self.traffic.calls[key] += 1
        self.traffic.bytes[key] += sent_bytes
        self.traffic.seconds[key] += time.perf_counter() - start
        self.traffic.num_ended += 1


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Collectives, axis: str) -> Tensor:
        ctx.links, ctx.axis = links, axis
        return links.gather(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.links.scatter(grad, ctx.axis), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Collectives, axis: str) -> Tensor:
        ctx.links, ctx.axis = links, axis
        return links.scatter(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.links.gather(grad, ctx.axis), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, links: Collectives, axis: str) -> Tensor:
        return links.sum_(x.clone(memory_format=torch.contiguous_format), axis)  # x belongs to the graph

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, links: Collectives, sent: tuple[int, ...], received: tuple[int, ...], axis: str
    ) -> Tensor:
        ctx.links, ctx.sent, ctx.received, ctx.axis = links, sent, received, axis
        return links.exchange(x, sent, received, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.links.exchange(grad, ctx.received, ctx.sent, ctx.axis), None, None, None, None


def all_gather_ragged(
    links: Collectives,
    shapes: Sequence[Sequence[int]],
    own: Mapping[int, Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Tensors of these shapes on all ranks: the sums, over all ranks, of their own tensors. ``own``: those of
    this rank, by index; missing ones count as zeros. So a tensor of one rank arrives unchanged, and several
    ranks may each give a part of a tensor's values, with zeros elsewhere. All ranks call it together."""
    sizes = [prod(shape) for shape in shapes]
    all_values = torch.zeros(sum(sizes), dtype=dtype, device=device)
    views = [flat_part.view(*shape) for flat_part, shape in zip(all_values.split(sizes), shapes, strict=True)]
    for index, values in own.items():
        views[index].copy_(values)
    if len(all_values):
        links.sum_(all_values, "all")
    return views
