"""Pipeline schedules: which rank runs which microbatch through which layers, and what it sends when.

The layers are cut into P * V chunks, chunk c is on rank c mod P, and a microbatch visits the ranks V times
round (``Layout.chunks_of``). A schedule is each rank's list of actions, known to all ranks beforehand:

    1f1b         V = 1: P - 1 - rank forwards ahead, then a forward and a backward in turn (PipeDream-Flush,
                 arXiv 2006.09503 section 3.2): rank p keeps P - p microbatches at most, however many come
    interleaved  V > 1: microbatches in groups of P, a group through all chunks of a rank before the next
                 (arXiv 2104.04473 section 2.2): a bubble V times smaller for V times the transfers
    forward      forwards alone, in the order of training, for log-probabilities and measurement

Where microbatches do not come out in groups of P, groups are larger than P and even: 11 over 4 ranks are 6
and 5. (With a smaller group at the end, ranks would wait for each other in a ring: 5 over 4 for V = 3.) Fewer
than P are one group.

Every chunk sees its microbatches in their order, forward and backward, so gradients are summed in one order
whatever the schedule, and that is the order of the plain loop.

What is emitted cannot deadlock, however little the transport buffers. ``actions`` puts all computations in
one global order and every transfer at its place in it, into the lists of both its ends at once. Of the
transfers that have not happened, the first in that order has nothing before it at either end, so it can
always happen, even if every send blocks until it is received (tests play that), and both ends agree
in what they exchange when. A receive stands where the other end begins to compute what is to be received: it
is posted ahead, and waited for where it is needed.

No torch here: a planner reads microbatches in flight from these functions.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Schedule(StrEnum):
    """Names of the schedules; see the module."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    FORWARD = "forward"

    @classmethod
    def training(cls, virtual: int) -> Schedule:
        """The training schedule for ``virtual`` chunks per rank."""
        return cls.INTERLEAVED if virtual > 1 else cls.ONE_F_ONE_B


class Pass(StrEnum):
    """Direction of a pass through a chunk."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Compute:
    """A pass of one microbatch through a chunk of layers. ``part``: its index in the optimizer step."""

    direction: Pass
    chunk: int  # of all P * V
    part: int

    def __str__(self) -> str:
        return f"{self.direction} of microbatch {self.part} through chunk {self.chunk}"

    @property
    def is_forward(self) -> bool:
        return self.direction is Pass.FORWARD


@dataclass(frozen=True, slots=True)
class Send:
    """Send the output of ``of`` to another rank: a residual stream forward, its gradient backward."""

    of: Compute
    to: int

    def __str__(self) -> str:
        return f"to send the {self.of} to rank {self.to}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive the output of ``of`` from the rank that computes it."""

    of: Compute
    source: int

    def __str__(self) -> str:
        return f"to receive the {self.of} from rank {self.source}"


Action = Compute | Send | Receive
Seconds = Callable[[Compute], float]


class Deadlock(RuntimeError):
    """Ranks wait for each other; ``waiting`` says for what, by rank. No schedule of this module causes it."""

    def __init__(self, waiting: Sequence[str]) -> None:
        super().__init__("; ".join(f"rank {rank} waits {what}" for rank, what in enumerate(waiting)))
        self.waiting = tuple(waiting)


def unit_seconds(compute: Compute) -> float:
    """1 for a forward, 2 for a backward: the number of products of a linear map, which in a backward gives
    gradients of input and weight."""
    return 1.0 if compute.is_forward else 2.0


def orders(
    name: Schedule | str, *, ranks: int, virtual: int = 1, parts: int
) -> tuple[tuple[Compute, ...], ...]:
    """The computations of each rank, in order.

    Raises ValueError for sizes below 1, for an unknown name, and for "1f1b" with several chunks per rank.
    """
    schedule = _checked(name, ranks, virtual, parts)
    groups = _groups(ranks, virtual, parts)
    forwards = [(v, part) for group in groups for v in range(virtual) for part in group]
    backwards = [(v, part) for group in groups for v in reversed(range(virtual)) for part in group]
    computes_by_rank = []
    for rank in range(ranks):
        forwards_of_rank = [Compute(Pass.FORWARD, v * ranks + rank, part) for v, part in forwards]
        backwards_of_rank = [Compute(Pass.BACKWARD, v * ranks + rank, part) for v, part in backwards]
        if schedule is Schedule.FORWARD:
            computes_by_rank.append(tuple(forwards_of_rank))
            continue
        num_ahead = _count_ahead(rank, ranks, virtual, parts)
        pairs = zip(forwards_of_rank[num_ahead:], backwards_of_rank, strict=False)
        steady = [compute for pair in pairs for compute in pair]
        computes_by_rank.append(
            (*forwards_of_rank[:num_ahead], *steady, *backwards_of_rank[len(forwards_of_rank) - num_ahead :])
        )
    return tuple(computes_by_rank)


def actions(
    name: Schedule | str, *, ranks: int, virtual: int = 1, parts: int
) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank, in order: its computations, and its transfers from and to other ranks.

    Between chunks on one rank (P = 1) nothing is sent. Raises ValueError as ``orders`` does.
    """
    actions_by_rank: list[list[Action]] = [[] for _ in range(ranks)]
    for rank, compute, _, _ in _walk(orders(name, ranks=ranks, virtual=virtual, parts=parts), unit_seconds):
        actions_by_rank[rank].append(compute)
        next_compute = _after(compute, ranks * virtual)
        if next_compute is not None and (receiver := next_compute.chunk % ranks) != rank:
            actions_by_rank[rank].append(Send(compute, receiver))
            actions_by_rank[receiver].append(Receive(compute, rank))
    return tuple(map(tuple, actions_by_rank))


def in_flight(name: Schedule | str, *, rank: int, ranks: int, virtual: int = 1, parts: int) -> int:
    """Most pairs of (chunk, microbatch) whose activations a rank keeps at a time; of "forward" one.

    One pair is 1 / (P V) of all layers: for 1f1b P - rank microbatches of a stage, for interleaved on rank 0
    1 + (P - 1) / (P V) times what 1f1b keeps there (arXiv 2104.04473 section 2.2.2).
    """
    if _checked(name, ranks, virtual, parts) is Schedule.FORWARD:
        return 1
    return min(virtual * parts, _count_ahead(rank, ranks, virtual, parts) + 1)


def _checked(name: Schedule | str, ranks: int, virtual: int, parts: int) -> Schedule:
    """The schedule ``name``. Raises ValueError as ``orders`` does."""
    for dimension, size in {"ranks": ranks, "virtual": virtual, "parts": parts}.items():
        if size < 1:
            raise ValueError(f"a pipeline schedule was requested with {dimension} {size}; use at least 1")
    if name not in tuple(Schedule):
        raise ValueError(f"the pipeline schedule is {name!r}; use one of {', '.join(Schedule)}")
    if name == Schedule.ONE_F_ONE_B and virtual > 1:
        raise ValueError(f"the schedule 1f1b was requested with {virtual} chunks per rank; use interleaved")
    return Schedule(name)


def _groups(ranks: int, virtual: int, parts: int) -> list[range]:
    """Groups of microbatches, P or a little more, each of which goes through all chunks of a rank before the
    next."""
    if virtual == 1:
        return [range(parts)]
    count = max(1, parts // ranks)
    size, remainder = divmod(parts, count)
    starts = [index * size + min(index, remainder) for index in range(count + 1)]
    return [range(starts[index], starts[index + 1]) for index in range(count)]


def _count_ahead(rank: int, ranks: int, virtual: int, parts: int) -> int:
    """Number of forwards of a rank before its first backward."""
    if virtual == 1:
        return min(parts, ranks - 1 - rank)
    largest = len(_groups(ranks, virtual, parts)[0])
    return min(virtual * parts, 2 * (ranks - 1 - rank) + (virtual - 1) * largest)


def _needs(compute: Compute, chunks: int) -> tuple[Compute, ...]:
    """Computations, on any rank, that ``compute`` needs the results of."""
    chunk, part = compute.chunk, compute.part
    if compute.is_forward:
        return (Compute(Pass.FORWARD, chunk - 1, part),) if chunk else ()
    forward = Compute(Pass.FORWARD, chunk, part)
    return (forward,) if chunk == chunks - 1 else (forward, Compute(Pass.BACKWARD, chunk + 1, part))


def _after(compute: Compute, chunks: int) -> Compute | None:
    """The computation that takes the output of ``compute``; None at the end of the model."""
    chunk = compute.chunk + (1 if compute.is_forward else -1)
    return Compute(compute.direction, chunk, compute.part) if 0 <= chunk < chunks else None


def _next(listed: Sequence[Action], at: int) -> str:
    """The action at index ``at`` of a rank, in words."""
    return str(listed[at]) if at < len(listed) else "for nothing, it is done"


def _walk(
    order: Sequence[Sequence[Compute]], seconds: Seconds, transfer: float = 0.0
) -> Iterator[tuple[int, Compute, float, float]]:
    """(rank, computation, start, end) in order of start, each rank going on as soon as it has what it needs.

    Raises Deadlock when no rank can.
    """
    ranks, chunks = len(order), 1 + max(compute.chunk for listed in order for compute in listed)
    next_index, free_at = [0] * ranks, [0.0] * ranks
    ends: dict[Compute, float] = {}
    ready: list[tuple[float, int]] = []

    def push(rank: int) -> None:
        """Queue the next computation of a rank, with its start, if all that it needs has been computed."""
        if next_index[rank] == len(order[rank]):
            return
        needs = _needs(order[rank][next_index[rank]], chunks)
        if all(need in ends for need in needs):
            arrivals = [
                ends[dependency] + (transfer if dependency.chunk % ranks != rank else 0.0)
                for dependency in needs
            ]
            heapq.heappush(ready, (max(free_at[rank], *arrivals) if arrivals else free_at[rank], rank))

    for rank in range(ranks):
        push(rank)
    while ready:
        start, rank = heapq.heappop(ready)
        compute = order[rank][next_index[rank]]
        ends[compute] = free_at[rank] = end = start + seconds(compute)
        next_index[rank] += 1
        yield rank, compute, start, end
        push(rank)
        next_compute = _after(compute, chunks)
        if next_compute is None or (receiver := next_compute.chunk % ranks) == rank:
            continue
        if (
            next_index[receiver] < len(order[receiver])
            and order[receiver][next_index[receiver]] == next_compute
        ):
            push(receiver)
    if len(ends) < sum(map(len, order)):
        pending = zip(order, next_index, strict=True)
        raise Deadlock([_next(listed, at) for listed, at in pending])
