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

The lists cannot deadlock, however little the transport buffers. ``list_actions`` puts all computations in one
global order, and adds every transfer at its place in that order to the lists of both ends. Of the transfers
that have not happened, the first in that order has nothing before it at either end. So it can always happen,
even if every send blocks until it is received (tests play that), and both ends exchange the same in the same
order. A receive is listed where the sender begins the computation: it is posted early, and its end is awaited
where the result is needed.

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
    """Send the output of ``compute`` to another rank: a residual stream forward, its gradient backward."""

    compute: Compute
    receiver: int

    def __str__(self) -> str:
        return f"to send the {self.compute} to rank {self.receiver}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Receive the output of ``compute`` from the rank that computes it."""

    compute: Compute
    source: int

    def __str__(self) -> str:
        return f"to receive the {self.compute} from rank {self.source}"


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


def order_computes(
    name: Schedule | str, *, ranks: int, virtual: int = 1, parts: int
) -> tuple[tuple[Compute, ...], ...]:
    """The computations of each rank, in order.

    Raises ValueError for sizes below 1, for an unknown name, and for "1f1b" with several chunks per rank.
    """
    schedule = _check_schedule(name, ranks, virtual, parts)
    groups = _group_parts(ranks, virtual, parts)
    forwards = [
        (chunk_of_rank, part) for group in groups for chunk_of_rank in range(virtual) for part in group
    ]
    backwards = [
        (chunk_of_rank, part)
        for group in groups
        for chunk_of_rank in reversed(range(virtual))
        for part in group
    ]
    computes_by_rank = []
    for rank in range(ranks):
        forwards_of_rank = [
            Compute(Pass.FORWARD, chunk_of_rank * ranks + rank, part) for chunk_of_rank, part in forwards
        ]
        backwards_of_rank = [
            Compute(Pass.BACKWARD, chunk_of_rank * ranks + rank, part) for chunk_of_rank, part in backwards
        ]
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


def list_actions(
    name: Schedule | str, *, ranks: int, virtual: int = 1, parts: int
) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank, in order: its computations, and its transfers from and to other ranks.

    Between chunks on one rank (P = 1) nothing is sent. Raises ValueError as ``order_computes`` does.
    """
    actions_by_rank: list[list[Action]] = [[] for _ in range(ranks)]
    for rank, compute, _, _ in _walk(
        order_computes(name, ranks=ranks, virtual=virtual, parts=parts), unit_seconds
    ):
        actions_by_rank[rank].append(compute)
        next_compute = _find_successor(compute, ranks * virtual)
        if next_compute is not None and (receiver := next_compute.chunk % ranks) != rank:
            actions_by_rank[rank].append(Send(compute, receiver))
            actions_by_rank[receiver].append(Receive(compute, rank))
    return tuple(map(tuple, actions_by_rank))


def count_in_flight(name: Schedule | str, *, rank: int, ranks: int, virtual: int = 1, parts: int) -> int:
    """The largest number of (chunk, microbatch) pairs whose activations a rank keeps at a time; 1 for
    "forward". Raises ValueError as ``order_computes`` does.

    One pair is 1 / (P V) of all layers: for 1f1b P - rank microbatches of a stage, for interleaved on rank 0
    1 + (P - 1) / (P V) times what 1f1b keeps there (arXiv 2104.04473 section 2.2.2).
    """
    if _check_schedule(name, ranks, virtual, parts) is Schedule.FORWARD:
        return 1
    return min(virtual * parts, _count_ahead(rank, ranks, virtual, parts) + 1)


def _check_schedule(name: Schedule | str, ranks: int, virtual: int, parts: int) -> Schedule:
    """The schedule ``name``. Raises ValueError as ``order_computes`` does."""
    for dimension, size in {"ranks": ranks, "virtual": virtual, "parts": parts}.items():
        if size < 1:
            raise ValueError(f"a pipeline schedule was requested with {dimension} {size}; use at least 1")
    if name not in tuple(Schedule):
        raise ValueError(f"the pipeline schedule is {name!r}; use one of {', '.join(Schedule)}")
    if name == Schedule.ONE_F_ONE_B and virtual > 1:
        raise ValueError(f"the schedule 1f1b was requested with {virtual} chunks per rank; use interleaved")
    return Schedule(name)


def _group_parts(ranks: int, virtual: int, parts: int) -> list[range]:
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
    group_size = len(_group_parts(ranks, virtual, parts)[0])
    return min(virtual * parts, 2 * (ranks - 1 - rank) + (virtual - 1) * group_size)


def _find_dependencies(compute: Compute, chunks: int) -> tuple[Compute, ...]:
    """Computations, on any rank, whose results ``compute`` needs."""
    chunk, part = compute.chunk, compute.part
    if compute.is_forward:
        return (Compute(Pass.FORWARD, chunk - 1, part),) if chunk else ()
    forward = Compute(Pass.FORWARD, chunk, part)
    return (forward,) if chunk == chunks - 1 else (forward, Compute(Pass.BACKWARD, chunk + 1, part))


def _find_successor(compute: Compute, chunks: int) -> Compute | None:
    """The computation that takes the output of ``compute``; None at the end of the model."""
    chunk = compute.chunk + (1 if compute.is_forward else -1)
    return Compute(compute.direction, chunk, compute.part) if 0 <= chunk < chunks else None


def _describe_next(rank_actions: Sequence[Action], index: int) -> str:
    """The action at index ``index`` of a rank, in words."""
    return str(rank_actions[index]) if index < len(rank_actions) else "for nothing, it is done"


def _walk(
    order: Sequence[Sequence[Compute]], seconds: Seconds, transfer: float = 0.0
) -> Iterator[tuple[int, Compute, float, float]]:
    """Yield (rank, computation, start, end) in order of start. Each rank begins its next computation as soon
    as it is free and has the results that this needs.

    Raises Deadlock if computations are left that no rank can begin.
    """
    ranks, chunks = len(order), 1 + max(compute.chunk for computes in order for compute in computes)
    next_index, free_at = [0] * ranks, [0.0] * ranks
    end_by_compute: dict[Compute, float] = {}
    queue: list[tuple[float, int]] = []

    def queue_next(rank: int) -> None:
        """Queue the next computation of a rank, with its start, if all that it needs has been computed."""
        if next_index[rank] == len(order[rank]):
            return
        dependencies = _find_dependencies(order[rank][next_index[rank]], chunks)
        if all(dependency in end_by_compute for dependency in dependencies):
            arrivals = [
                end_by_compute[dependency] + (transfer if dependency.chunk % ranks != rank else 0.0)
                for dependency in dependencies
            ]
            heapq.heappush(queue, (max(free_at[rank], *arrivals) if arrivals else free_at[rank], rank))

    for rank in range(ranks):
        queue_next(rank)
    while queue:
        start, rank = heapq.heappop(queue)
        compute = order[rank][next_index[rank]]
        end_by_compute[compute] = free_at[rank] = end = start + seconds(compute)
        next_index[rank] += 1
        yield rank, compute, start, end
        queue_next(rank)
        next_compute = _find_successor(compute, chunks)
        if next_compute is None or (receiver := next_compute.chunk % ranks) == rank:
            continue
        if (
            next_index[receiver] < len(order[receiver])
            and order[receiver][next_index[receiver]] == next_compute
        ):
            queue_next(receiver)
    if len(end_by_compute) < sum(map(len, order)):
        pending = zip(order, next_index, strict=True)
        raise Deadlock([_describe_next(computes, index) for computes, index in pending])
