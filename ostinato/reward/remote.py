"""``protocols.Grader`` over several workers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ostinato.observe.timeline import Kind, Span
from ostinato.protocols import Grader
from ostinato.types import Group, Reward, Trajectory
from ostinato.workers.remote import Remote


class CountingGrader(Grader, Protocol):
    counters: Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedGroup:
    """The reply of a worker for a group."""

    rewards: list[Reward]
    counts: Mapping[str, int]  # those that the worker has not reported before
    span: Span


class GraderServer:
    """Grades groups on the worker, and reports counts and the time that it took."""

    def __init__(self, grader: CountingGrader, name: str) -> None:
        self._grader, self._name, self._reported_counts = grader, name, Counter[str]()
        self._span_end = 0.0  # the end of the last span, by time.time()
        self.progress = 0.0  # groups

    async def ready(self) -> None:
        """Return when the worker handles calls."""

    async def grade(self, group: Group) -> GradedGroup:
        """Grade a group, count it in ``progress``, and report all counts that are new."""
        start = time.time()
        rewards = await self._grader.grade(group)
        self.progress += 1
        totals = Counter(self._grader.counters)
        counts, self._reported_counts = totals - self._reported_counts, totals
        start, self._span_end = max(start, self._span_end), time.time()  # groups overlap, spans do not
        span = Span(worker=self._name, kind=Kind.GRADE, start=start, stop=self._span_end, amount=len(rewards))
        return GradedGroup(rewards=rewards, counts=counts, span=span)


class GraderLink:
    """Implements protocols.Grader and Timed over ``workers``: the least busy worker grades the next group.

    ``within_s`` limits the time from one graded group of a worker to the next. Raises WorkerLost if a worker
    is lost: the run ends with an error, and its groups are graded again when it is resumed.
    """

    def __init__(self, workers: Sequence[Remote], *, within_s: float) -> None:
        self.counters: Counter[str] = Counter()
        self._workers, self._within_s, self._start_time = workers, within_s, time.time()
        self._num_running = [0] * len(workers)  # groups of each
        self._spans: list[Span] = []

    async def ready(self) -> None:
        """Wait until every worker is built. Errors of building one are raised here, before any group."""
        await asyncio.gather(*(worker.call("ready", within_s=self._within_s) for worker in self._workers))

    async def grade(self, group: Group) -> list[Reward]:
        """Return one Reward per trajectory, in order; add the counts and the span of the worker to those of
        the link."""
        index = min(range(len(self._workers)), key=self._num_running.__getitem__)
        self._num_running[index] += 1
        try:
            result: GradedGroup = await self._workers[index].call(
                "grade", strip_routes(group), within_s=self._within_s
            )
        finally:
            self._num_running[index] -= 1
        self.counters.update(result.counts)
        self._spans.append(result.span)
        return result.rewards

    def take_spans(self) -> Sequence[Span]:
        """Return the spans since the last call, and forget them."""
        spans, self._spans = self._spans, []
        return spans

    def status(self) -> list[dict[str, Any]]:
        """Return one row per worker, in the format of ``EnginePool.status``."""
        state = {"state": "serving", "since": self._start_time, "cause": ""}
        pairs = zip(self._workers, self._num_running, strict=True)
        return [{"worker": worker.name, "running": running, **state} for worker, running in pairs]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()


def strip_routes(group: Group) -> Group:
    """Return a group without routes and supports, on which no verdict depends; text and tokens stay."""

    def strip_trajectory(trajectory: Trajectory) -> Trajectory:
        nones = {"experts": None, "prompt_experts": None, "support": None, "edges": None}
        turns = [replace(turn, completion=replace(turn.completion, **nones)) for turn in trajectory.turns]
        return replace(trajectory, turns=tuple(turns))

    return replace(
        group, trajectories=tuple(strip_trajectory(trajectory) for trajectory in group.trajectories)
    )
