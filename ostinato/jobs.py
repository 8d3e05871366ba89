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
