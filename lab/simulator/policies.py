"""Placements that are simulated: those of ``rollout.schedule``, and that of verl."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from ostinato.protocols import Job, Placement, Starts, Worker
from ostinato.rollout import schedule


class Policy(StrEnum):
    STATIC = "static"  # prompt i to worker i mod W in the order of the stream, whatever its length
    LEAST_LOADED = "least-loaded"
    LONGEST_FIRST = "longest-first"
    HISTOPIPE = "histopipe"


def placement(policy: Policy) -> Placement:
    return static if policy is Policy.STATIC else schedule.placement(policy)


def static(waiting: Sequence[Job], workers: Sequence[Worker]) -> Starts:
    """All at once, round robin by place."""
    ids = sorted(worker.id for worker in workers)
    ordered = sorted(waiting, key=lambda job: (job.step, job.place, job.id))
    return tuple((job.id, ids[job.place % len(ids)]) for job in ordered) if ids else ()
