"""Pipeline schedules played, timed and counted: what ``parallel.schedule`` promises, found the slow way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.parallel.schedule import (
    Action,
    Compute,
    Deadlock,
    Receive,
    Schedule,
    Seconds,
    Send,
    _check_schedule,
    _describe_next,
    _find_dependencies,
    _walk,
    order_computes,
    unit_seconds,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Of a schedule, in the unit of the seconds that it was given."""

    seconds: float  # from the first action to the last
    busy: tuple[float, ...]  # by rank

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait, 0 to 1."""
        return 1 - sum(self.busy) / (self.seconds * len(self.busy))


def timing(
    name: Schedule | str,
    *,
    ranks: int,
    virtual: int = 1,
    parts: int,
    seconds: Seconds = unit_seconds,
    transfer: float = 0.0,
) -> Timing:
    """How long a schedule takes where computations take ``seconds`` and what is sent is there ``transfer``
    later, while its sender goes on. Stages and microbatches may differ: ``seconds`` is called for each
    computation. Raises ValueError as ``orders`` does."""
    busy, last = [0.0] * ranks, 0.0
    order = order_computes(name, ranks=ranks, virtual=virtual, parts=parts)
    for rank, _, start, end in _walk(order, seconds, transfer):
        busy[rank] += end - start
        last = max(last, end)
    return Timing(seconds=last, busy=tuple(busy))


def bubble(*, ranks: int, virtual: int = 1, parts: int) -> float:
    """The share of time in which ranks wait, all stages alike: (P - 1) / (V M + P - 1).

    arXiv 2104.04473 sections 2.2.1 and 2.2.2, as a share of the whole step and not of its ideal. Exact for
    V = 1 or M >= P, whether M is a multiple of P or not; else a lower bound (``timing`` is exact).
    """
    _check_schedule(Schedule.FORWARD, ranks, virtual, parts)
    return (ranks - 1) / (virtual * parts + ranks - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The most that a rank holds at a time while it goes through its list."""

    in_flight: int  # pairs of (chunk, microbatch) with a forward behind them and a backward before them
    waiting: int  # tensors from other ranks that nothing has used yet, announced ones among them


def peaks(listed: Sequence[Action]) -> Peaks:
    """Of one rank's actions: the slow twin of ``in_flight``, by counting."""
    training = any(isinstance(action, Compute) and not action.is_forward for action in listed)
    flying = most_flying = most_waiting = 0
    waiting: set[Compute] = set()
    for action in listed:
        if isinstance(action, Receive):
            waiting.add(action.compute)
            most_waiting = max(most_waiting, len(waiting))
        elif isinstance(action, Compute):
            waiting.discard(_input(action))
            flying += action.is_forward
            most_flying = max(most_flying, flying)  # during a backward its activations are still there
            flying -= not (action.is_forward and training)
    return Peaks(in_flight=most_flying, waiting=most_waiting)


def rendezvous(lists: Sequence[Sequence[Action]]) -> None:
    """Play the lists where nothing is buffered: a send waits for its receive, a receive for its send, and
    both must name the same tensor. The proof that a schedule ends on every transport.

    Raises Deadlock when no rank can go on, ValueError where a rank computes from what it does not have yet.
    """
    ranks, place = len(lists), [0] * len(lists)
    have: list[set[Compute]] = [set() for _ in lists]
    chunks = 1 + max(action.chunk for listed in lists for action in listed if isinstance(action, Compute))
    moved = True
    while moved:
        moved = False
        for rank, listed in enumerate(lists):
            while place[rank] < len(listed):
                action = listed[place[rank]]
                if isinstance(action, Compute):
                    missing = [one for one in _find_dependencies(action, chunks) if one not in have[rank]]
                    if missing:
                        raise ValueError(f"rank {rank} runs the {action} before it has the {missing[0]}")
                    have[rank].add(action)
                else:
                    other = action.receiver if isinstance(action, Send) else action.source
                    if not _meets(rank, action, lists[other], place[other]):
                        break
                    have[action.receiver if isinstance(action, Send) else rank].add(action.compute)
                    place[other] += 1
                place[rank] += 1
                moved = True
    if any(place[rank] < len(lists[rank]) for rank in range(ranks)):
        ahead = zip(lists, place, strict=True)
        raise Deadlock([_describe_next(listed, at) for listed, at in ahead])


def _meets(rank: int, action: Send | Receive, theirs: Sequence[Action], at: int) -> bool:
    """Does the other end stand at the other half of this transfer?"""
    if at >= len(theirs):
        return False
    if isinstance(action, Send):
        return theirs[at] == Receive(action.compute, rank)
    return theirs[at] == Send(action.compute, rank)


def _input(compute: Compute) -> Compute:
    """What makes the tensor that a computation takes, if anything does."""
    return Compute(compute.direction, compute.chunk - (1 if compute.is_forward else -1), compute.part)
