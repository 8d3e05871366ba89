"""``protocols.Grader`` over several workers: a group goes to the least loaded one, and is never lost.

A worker gets no more groups than it grades at once, so no waiting group is lost with it. Of the groups that
it was grading, the oldest is the suspect: the others go to workers with room, and the suspect is graded once
more, alone, on another worker if there is one. If that fails too it gets no verdict, with a named reason: a
fault is not a reward of 0.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ostinato.observe.timeline import Kind, Span
from ostinato.protocols import Grader
from ostinato.types import Group, Reward, Trajectory
from ostinato.workers.lost import Restarts, WorkerLost
from ostinato.workers.remote import Remote

FAULT = "grader_lost"  # the reason of a missing verdict begins with this


class Counting(Grader, Protocol):
    counters: Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """What a worker sends back for a group."""

    rewards: list[Reward]
    counts: Mapping[str, int]  # new since the last group
    span: Span


class GraderServer:
    """The worker's side: grades, counts, and reports the time taken."""

    def __init__(self, grader: Counting, name: str) -> None:
        self._grader, self._name, self._reported = grader, name, Counter[str]()
        self._until = 0.0  # the end of the last span, by time.time()

    async def ready(self) -> None:
        """Returns as soon as the worker can handle calls."""

    async def grade(self, group: Group) -> Graded:
        start = time.time()
        rewards = await self._grader.grade(group)
        now = Counter(self._grader.counters)
        new, self._reported = now - self._reported, now
        start, self._until = max(start, self._until), time.time()  # groups overlap, spans do not
        span = Span(worker=self._name, kind=Kind.GRADE, start=start, stop=self._until, amount=len(rewards))
        return Graded(rewards=rewards, counts=new, span=span)


@dataclass(kw_only=True, eq=False)
class _Place:
    """One worker, for as long as it lives."""

    worker: Remote
    free: int  # how many more groups it can grade at the moment
    running: list[Group] = field(default_factory=list)  # the oldest first
    suspect: Group | None = None  # the group suspected of the loss, if it was lost
    since: float = field(default_factory=time.time)
    cause: str = ""  # why its predecessor was lost


class GraderLink:
    """Implements protocols.Grader and Timed over ``count`` workers; ``spawn`` makes one, given its number.

    ``within_s`` limits the time of one group; a worker grades ``slots`` groups at once. After
    ``max_restarts`` losses with no group graded in between it raises WorkerLost with the last cause.
    """

    def __init__(
        self,
        spawn: Callable[[int], Remote],
        count: int,
        *,
        within_s: float,
        slots: int = 1,
        max_restarts: int = 5,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._spawn, self._within_s, self._slots = spawn, within_s, slots
        self._restarts = Restarts(most=max_restarts)
        self._places = [_Place(worker=spawn(index), free=slots) for index in range(count)]
        self._suspects = 0  # groups that wait for a worker without others
        self._turns: list[asyncio.Future[None]] = []  # one for each group that waits for room
        self._spans: list[Span] = []

    async def ready(self) -> None:
        """Wait until every worker is built; errors of building one are raised here, before any group."""
        await asyncio.gather(*(self._built(index) for index in range(len(self._places))))

    async def _built(self, index: int) -> None:
        while True:
            place = self._places[index]
            try:
                return await place.worker.call("ready", within_s=self._within_s)
            except WorkerLost as gone:
                self._replace(index, place, gone)

    async def grade(self, group: Group) -> list[Reward]:
        """One Reward per trajectory, in order."""
        lean, causes, index = without_routes(group), list[str](), -1
        while len(causes) < 2:
            index = await self._room(index, alone=bool(causes))
            place, num_slots = self._places[index], self._slots if causes else 1
            try:
                graded = await self._call(place, lean, num_slots)
            except WorkerLost as gone:
                self._replace(index, place, gone)
                if place.suspect is lean:
                    causes.append(str(gone))
                continue
            self._restarts.worked()
            self.counters.update(graded.counts)
            self._spans.append(graded.span)
            return graded.rewards
        return [Reward(value=None, reason=f"{FAULT}: {'; then '.join(causes)}")] * len(group.trajectories)

    async def _room(self, but: int, *, alone: bool) -> int:
        """The index of the worker with the fewest groups, if possible not ``but``. A group that must be
        graded ``alone`` gets a worker with no groups, and goes first."""
        self._suspects += alone
        try:
            while not (found := self._with_room(alone)):
                self._turns.append(asyncio.get_running_loop().create_future())
                await self._turns[-1]
        finally:
            self._suspects -= alone
            if alone:
                self._wake()
        return min(found, key=lambda index: (index == but, -self._places[index].free))

    def _with_room(self, alone: bool) -> list[int]:
        if self._suspects and not alone:
            return []
        needed = self._slots if alone else 1
        return [index for index, place in enumerate(self._places) if place.free >= needed]

    def _wake(self) -> None:
        turns, self._turns = self._turns, []
        for turn in turns:
            if not turn.done():
                turn.set_result(None)

    async def _call(self, place: _Place, group: Group, num_slots: int) -> Graded:
        place.free -= num_slots
        place.running.append(group)
        try:
            return await place.worker.call("grade", group, within_s=self._within_s)
        except WorkerLost:
            if place.suspect is None:
                place.suspect = place.running[0]
            raise
        finally:
            place.running.remove(group)
            place.free += num_slots
            self._wake()

    def _replace(self, index: int, lost: _Place, cause: WorkerLost) -> None:
        if self._places[index] is not lost and not cause.final:  # another of its groups has replaced it
            return
        self.counters["workers/restarts"] += 1
        self._restarts.lose(cause, "a group judged", "the reward functions")
        lost.worker.kill()
        self._places[index] = _Place(worker=self._spawn(index), free=self._slots, cause=str(cause))
        self._wake()

    def take_spans(self) -> Sequence[Span]:
        spans, self._spans = self._spans, []
        return spans

    def status(self) -> list[dict[str, Any]]:
        """One row per worker, in the format of ``EnginePool.status``."""
        return [
            {
                "worker": place.worker.name,
                "state": "serving",
                "since": place.since,
                "running": len(place.running),
                "cause": place.cause,
            }
            for place in self._places
        ]

    def close(self) -> None:
        for place in self._places:
            place.worker.kill()


def without_routes(group: Group) -> Group:
    """The group with only what a verdict may depend on: text and tokens, not routes or supports."""

    def stripped(trajectory: Trajectory) -> Trajectory:
        heavy = {"experts": None, "prompt_experts": None, "support": None, "edges": None}
        turns = [replace(turn, completion=replace(turn.completion, **heavy)) for turn in trajectory.turns]
        return replace(trajectory, turns=tuple(turns))

    return replace(group, trajectories=tuple(stripped(one) for one in group.trajectories))
