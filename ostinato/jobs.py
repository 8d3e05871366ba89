"""Who is to be sampled where: the nouns between what runs the samplers (``engine.pool``) and the schedules
(``rollout.schedule``), which know nothing of each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def one_second(batch: int, attended: float) -> float:
    """A pass of unknown duration."""
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One answer that is to be sampled, or is being sampled."""

    id: int
    step: int  # the round that it belongs to
    place: int  # of its prompt in the stream: siblings share step and place
    predicted: float = math.inf  # tokens of the whole answer; inf: unknown
    prompt: int = 0  # tokens of context
    generated: int = 0  # tokens that it has
    home: int | None = None  # the worker that has its beginning in its cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A living sampler and what it has to do."""

    id: int
    slots: int  # sequences that it decodes together
    jobs: tuple[Job, ...] = ()  # all that it has, running or queued there
    pass_s: Callable[[int, float], float] = one_second  # (batch, positions attended in all) -> seconds


Starts = tuple[tuple[int, int], ...]  # (job, worker) in the order to start; the others wait centrally
Placement = Callable[[Sequence[Job], Sequence[Worker]], Starts]
"""(jobs that wait, living workers) -> starts. Pure; called whenever jobs have come or ended, or workers
have."""


def least_loaded(waiting: Sequence[Job], workers: Sequence[Worker]) -> Starts:
    """Siblings together, in the order in which they wait, to the worker with the most free slots; a group
    that fits nowhere whole is divided."""
    free = {worker.id: worker.slots - len(worker.jobs) for worker in workers}
    groups: dict[tuple[int, int], list[Job]] = {}
    for job in waiting:
        groups.setdefault((job.step, job.place), []).append(job)
    starts: list[tuple[int, int]] = []
    for group in groups.values():
        left = list(group)
        while left and (room := max(free.values(), default=0)) > 0:
            home = left[0].home
            best = next(worker for worker, slots in free.items() if slots == room)
            if home is not None and free.get(home, 0) >= len(left):
                best = home
            now, left = left[: free[best]], left[free[best] :]
            free[best] -= len(now)
            starts += [(job.id, best) for job in now]
    return tuple(starts)
