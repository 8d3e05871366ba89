"""``protocols.Grader`` over several workers: a group goes to the one with the fewest, and is never lost.

A worker that dies or hangs is replaced and the group is judged once more, elsewhere where there is another.
What fails twice has no verdict, by name: a fault is not a reward of 0.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ostinato.cluster.remote import Remote, WorkerGone
from ostinato.protocols import Grader
from ostinato.timeline import Kind, Span
from ostinato.types import Group, Reward, Trajectory

FAULT = "grader_lost"  # the name of a verdict that could not be had


class GradersLost(RuntimeError):
    """Graders were lost again and again, and no group was judged in between."""


class Counting(Grader, Protocol):
    counters: Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """What a worker sends back for a group."""

    rewards: list[Reward]
    counts: Mapping[str, int]  # new since the last group
    span: Span


class GraderServer:
    """The worker's side: grades, counts, tells the time that it took."""

    def __init__(self, grader: Counting, name: str) -> None:
        self._grader, self._name, self._told = grader, name, Counter[str]()
        self._until = 0.0  # which it has said that it was busy

    async def grade(self, group: Group) -> Graded:
        start = time.time()
        rewards = await self._grader.grade(group)
        now = Counter(self._grader.counters)
        new, self._told = now - self._told, now
        start, self._until = max(start, self._until), time.time()  # groups overlap, spans do not
        span = Span(worker=self._name, kind=Kind.GRADE, start=start, stop=self._until, amount=len(rewards))
        return Graded(rewards=rewards, counts=new, span=span)


class GraderLink:
    """Implements protocols.Grader and Timed over ``count`` workers that ``spawn`` makes, by number.

    ``within_s`` bounds one group; of what waits in a worker, ``slots`` are graded at once. After
    ``max_restarts`` losses without a group in between it raises GradersLost, which names the last cause.
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
        self._max_restarts, self._in_a_row = max_restarts, 0
        self._workers = [spawn(index) for index in range(count)]
        self._waiting = [0] * count
        self._since, self._causes = [time.time()] * count, [""] * count
        self._spans: list[Span] = []

    async def grade(self, group: Group) -> list[Reward]:
        """One Reward per trajectory, in order."""
        asked, causes, index = without_routes(group), list[str](), -1
        while len(causes) < 2:
            index = self._least_busy(index)
            try:
                graded = await self._ask(index, asked)
            except WorkerGone as gone:
                causes.append(str(gone))
                continue
            self._in_a_row = 0
            self.counters.update(graded.counts)
            self._spans.append(graded.span)
            return graded.rewards
        return [Reward(value=None, reason=f"{FAULT}: {'; then '.join(causes)}")] * len(group.trajectories)

    def _least_busy(self, but: int) -> int:
        """Of all workers, but for one where there are others."""
        return min(range(len(self._workers)), key=lambda index: (index == but, self._waiting[index]))

    async def _ask(self, index: int, group: Group) -> Graded:
        worker = self._workers[index]
        rounds = 1 + self._waiting[index] // self._slots
        self._waiting[index] += 1
        try:
            return await worker.call("grade", group, within_s=rounds * self._within_s)
        except WorkerGone as gone:
            if self._workers[index] is worker:  # others that waited for it find it replaced
                self._replace(index, gone)
            raise
        finally:
            self._waiting[index] -= 1

    def _replace(self, index: int, cause: WorkerGone) -> None:
        self._in_a_row += 1
        self.counters["workers/restarts"] += 1
        if self._in_a_row > self._max_restarts:
            raise GradersLost(
                f"{self._in_a_row} graders in a row were lost without a group judged in between, at last: "
                f"{cause}; look at the reward functions and at cluster.max_restarts"
            ) from cause
        self._workers[index].kill()
        self._workers[index] = self._spawn(index)
        self._since[index], self._causes[index] = time.time(), str(cause)

    def take_spans(self) -> Sequence[Span]:
        taken, self._spans = self._spans, []
        return taken

    def status(self) -> list[dict[str, Any]]:
        """A row for each worker, as those of ``EnginePool.status``."""
        rows = zip(self._workers, self._waiting, self._since, self._causes, strict=True)
        return [
            {"worker": worker.name, "state": "serving", "since": since, "running": waiting, "cause": cause}
            for worker, waiting, since, cause in rows
        ]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()


def without_routes(group: Group) -> Group:
    """What a verdict may depend on: words and tokens, not the experts they came about by."""

    def lean(trajectory: Trajectory) -> Trajectory:
        heavy = {"experts": None, "prompt_experts": None, "support": None, "edges": None}
        turns = [replace(turn, completion=replace(turn.completion, **heavy)) for turn in trajectory.turns]
        return replace(trajectory, turns=tuple(turns))

    return replace(group, trajectories=tuple(lean(one) for one in group.trajectories))


__all__ = ["FAULT", "Graded", "GraderLink", "GraderServer", "GradersLost", "without_routes"]
