"""Plans where and in which order answers are sampled: pure functions from jobs and workers to a plan.

    least-loaded    one queue in the order of the stream; the worker with the fewest answers takes the next
                    group
    longest-first   one queue, in each round the longest prediction first; the worker with the least predicted
                    work takes the next group
    histopipe       prompts ranked by predicted length and dealt along the line of workers, short to long in
                    odd rounds and long to short in even rounds; long ones get more workers (RhymeRL,
                    2508.18588)

histopipe assigns all jobs at once, and the workers queue them; the others keep jobs without room in the
shared queue. A round goes before the next: with a bounded staleness it is due earlier. Predictions come from
``history.lengths``; a prediction of inf (unknown) is replaced by the mean of the known ones.
docs/histopipe.md compares the three.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import numpy as np

from ostinato.protocols import Job, Placement, Starts, Worker

RANKS = 2  # ranking groups of histopipe: more ranks were worse in every simulation (docs/histopipe.md)
READ_SHARE = 0.02  # prompt tokens that may be prefilled again for balance, per sampled token


class Policy(StrEnum):
    """Names in a recipe: ``pipeline.placement``."""

    LEAST_LOADED = "least-loaded"
    LONGEST_FIRST = "longest-first"
    HISTOPIPE = "histopipe"


def find_placement(name: str) -> Placement:
    """Return the placement of this name. Raises ValueError for another name."""
    policies: dict[Policy, Placement] = {
        Policy.LEAST_LOADED: place_least_loaded,
        Policy.LONGEST_FIRST: place_longest_first,
        Policy.HISTOPIPE: place_in_lanes,
    }
    return policies[Policy(name)]


def place_least_loaded(waiting: Sequence[Job], workers: Sequence[Worker]) -> Starts:
    """Place jobs in the order of the stream, each on the worker with the fewest answers."""
    sorted_jobs = sorted(waiting, key=_make_stream_key)
    loads = [float(len(worker.jobs)) for worker in workers]
    return _fill(sorted_jobs, predict_remaining(sorted_jobs).tolist(), workers, loads, count=True)


def place_longest_first(waiting: Sequence[Job], workers: Sequence[Worker]) -> Starts:
    """Place jobs, the longest of a round first, each on the worker with the fewest predicted tokens left."""
    sorted_jobs, sizes = sort_by_length(waiting)
    loads = [float(predict_remaining(worker.jobs).sum()) for worker in workers]
    return _fill(sorted_jobs, sizes, workers, loads)


def place_in_lanes(waiting: Sequence[Job], workers: Sequence[Worker]) -> Starts:
    """Deal each waiting round along the line of workers (``assign_lanes``), in alternating directions. Jobs
    that began earlier (a later turn, an answer whose worker was lost) go home if there is room, else to the
    worker with the least load."""
    if not workers:
        return ()
    line = sorted(workers, key=lambda worker: worker.id)
    new_jobs = [job for job in waiting if job.home is None and not job.generated]
    starts = list[tuple[int, int]]()
    for step, jobs in itertools.groupby(sorted(new_jobs, key=_make_stream_key), key=lambda job: job.step):
        starts += _assign_round(list(jobs), line, step)
    old_jobs = [job for job in waiting if job.home is not None or job.generated]
    sorted_jobs, sizes = sort_by_length(old_jobs)
    loads = [float(predict_remaining(worker.jobs).sum()) for worker in workers]
    starts += _fill(sorted_jobs, sizes, workers, loads)
    return tuple(starts)


def _assign_round(jobs: Sequence[Job], line: Sequence[Worker], step: int) -> list[tuple[int, int]]:
    """Return (job, worker) for the jobs of a round."""
    groups = [list(group) for _, group in itertools.groupby(jobs, key=lambda job: job.place)]
    lengths = predict_remaining(job for group in groups for job in group)
    ends = np.cumsum([len(group) for group in groups])
    means = np.array([part.mean() for part in np.split(lengths, ends[:-1])])
    siblings = len(jobs) / len(groups)
    places = assign_lanes(means, siblings, [worker.slots for worker in line], line[0].pass_s, step)
    return [(job.id, line[place].id) for place, group in zip(places, groups, strict=True) for job in group]


def assign_lanes(
    means: np.ndarray,
    siblings: float,
    slots: Sequence[int],
    pass_s: Callable[[int, float], float],
    step: int,
    ranks: int = RANKS,
) -> list[int]:
    """Return the place in the line of workers [W] for each group of a round.

    means: [P] predicted tokens of an answer of each group; siblings: answers in a group; slots: [W]; step:
    odd rounds go from short to long along the line, even rounds from long to short.
    """
    order = np.argsort(means, kind="stable")
    ranks = min(ranks, len(slots), len(means))
    chunks = np.array_split(order, ranks)
    counts = count_tier_workers(
        [float(siblings * means[chunk].sum()) for chunk in chunks],
        [float(means[chunk[-1]]) for chunk in chunks],
        [round(siblings * len(chunk)) for chunk in chunks],
        min(slots),
        len(slots),
        pass_s,
    )
    line = list(range(len(slots)))
    if step % 2 == 0:
        line.reverse()
    places, first_worker = [0] * len(means), 0
    for chunk, count in zip(chunks, counts, strict=True):
        workers, first_worker = line[first_worker : first_worker + count], first_worker + count
        heap = [(0.0, n) for n in range(count)]
        for group in chunk[::-1].tolist():  # the longest first, each to the least loaded worker
            load, n = heap[0]
            heapq.heapreplace(heap, (load + float(means[group]), n))
            places[group] = workers[n]
    return places


def count_tier_workers(
    tokens: Sequence[float],
    longest: Sequence[float],
    answers: Sequence[int],
    slots: int,
    workers: int,
    pass_s: Callable[[int, float], float],
) -> list[int]:
    """Return the number of workers of each ranking group, short to long: at least 1, ``workers`` in all.

    Target completion times are linear in rank; the first, as a share of the last, is that of equal numbers
    of workers. Then the times of rank i and of rank R - 1 - i have the same sum for every i, and two rounds
    in opposite directions end together on all workers. The smallest last time that the workers allow is
    searched for.

    tokens, longest, answers: [R] of each group, predicted. Raises ValueError with fewer workers than groups.
    """
    if workers < len(tokens):
        raise ValueError(f"{len(tokens)} ranking groups for {workers} workers; use at most as many")

    def compute_seconds(i: int, count: int) -> float:
        batch = max(1, min(slots, math.ceil(answers[i] / count)))
        context = longest[i] / 2
        pass_seconds = pass_s(batch, batch * context)
        return pass_seconds * max(longest[i], tokens[i] / count / batch)

    def count_workers(last_end: float) -> list[int]:
        """Return, for each rank, the fewest workers with which it ends by its share of ``last_end``; workers
        + 1 if all of them do not suffice."""
        candidates = range(1, workers + 1)
        return [
            1
            + bisect_left(
                candidates, True, key=lambda n, i=i, end=last_end * share: compute_seconds(i, n) <= end
            )
            for i, share in enumerate(shares)
        ]

    last_rank = len(tokens) - 1
    equal_count = max(1, workers // len(tokens))
    first_share = min(
        1.0, compute_seconds(0, equal_count) / max(compute_seconds(last_rank, equal_count), 1e-12)
    )
    shares = [
        first_share + (1 - first_share) * (i / last_rank if last_rank else 1.0) for i in range(last_rank + 1)
    ]
    # in the time ``high`` a worker for each rank suffices
    low, high = 0.0, 1.001 * max(compute_seconds(i, 1) / share for i, share in enumerate(shares))
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(count_workers(middle)) <= workers else (middle, high)
    counts = [min(count, workers) for count in count_workers(high)]
    while sum(counts) > workers:  # a batch that is not divided evenly may take longer with a worker more
        counts[counts.index(max(counts))] -= 1
    for _ in range(workers - sum(counts)):  # workers left over go where the target is missed most
        rank = max(range(len(counts)), key=lambda i: (compute_seconds(i, counts[i]) / shares[i], i))
        counts[rank] += 1
    return counts


def sort_by_length(jobs: Sequence[Job]) -> tuple[list[Job], list[float]]:
    """Sort jobs by round, then by predicted tokens left, the longest first; return (jobs, these tokens)."""
    sizes = predict_remaining(jobs).tolist()
    keys = [(job.step, -size, job.place, job.id) for job, size in zip(jobs, sizes, strict=True)]
    order = sorted(range(len(jobs)), key=keys.__getitem__)
    return [jobs[i] for i in order], [sizes[i] for i in order]


def predict_remaining(jobs: Iterable[Job]) -> np.ndarray:
    """Return predicted tokens left [J], at least 1; without a prediction, the mean of the others, or 1 if
    there is none."""
    tokens = np.array([job.predicted - job.generated for job in jobs], np.float64)
    is_known = np.isfinite(tokens)
    tokens[~is_known] = tokens[is_known].mean() if is_known.any() else 1.0
    return np.maximum(tokens, 1.0)


def _make_stream_key(job: Job) -> tuple[int, int, int]:
    return job.step, job.place, job.id


def _fill(
    sorted_jobs: Sequence[Job],
    sizes: Sequence[float],
    workers: Sequence[Worker],
    loads: Sequence[float],
    *,
    count: bool = False,
) -> tuple[tuple[int, int], ...]:
    """Return (job, worker). Jobs whose home has room go home. Then, while there is room, the least loaded
    worker takes siblings.

    It takes a piece of a group that it has, whose prompt is in its cache. If there is none, it takes one of
    a group that no worker has or of which a whole piece waits, and if there is none, of any group: to
    prefill a prompt again costs less than idling. Of several groups the first is taken.
    """
    assignees = {
        worker.id: _Assignee(worker, load, count) for worker, load in zip(workers, loads, strict=True)
    }
    starts = list[tuple[int, int]]()
    groups = dict[tuple[int, int], deque[tuple[int, Job, float]]]()
    for place, (job, size) in enumerate(zip(sorted_jobs, sizes, strict=True)):
        if job.home is not None and job.home in assignees and assignees[job.home].room:
            starts.append(assignees[job.home].take(job, size))
        else:
            groups.setdefault(_make_group_key(job), deque()).append((place, job, size))
    num_holders = Counter(group for worker in assignees.values() for group in worker.has)
    heap = [(worker.load, id) for id, worker in assignees.items() if worker.room]
    heapq.heapify(heap)
    while heap and groups:
        worker = assignees[heapq.heappop(heap)[1]]
        pieces = {group: compute_piece_size(jobs[0][1].prompt, jobs[0][2]) for group, jobs in groups.items()}
        held_groups = [group for group in groups if group in worker.has]
        open_groups = [
            group for group, jobs in groups.items() if not num_holders[group] or len(jobs) >= pieces[group]
        ]
        group = min(held_groups or open_groups or groups, key=lambda group: groups[group][0][0])
        num_holders[group] += group not in worker.has
        waiting = groups[group]
        for _ in range(min(pieces[group], worker.room, len(waiting))):
            starts.append(worker.take(*waiting.popleft()[1:]))
        if not waiting:
            del groups[group]
        if worker.room:
            heapq.heappush(heap, (worker.load, worker.id))
    return tuple(starts)


class _Assignee:
    """A worker while jobs are assigned to it."""

    def __init__(self, worker: Worker, load: float, count: bool) -> None:
        self.id, self.load = worker.id, load
        self.room = max(0, worker.slots - len(worker.jobs))  # histopipe may deal more jobs than slots
        self.count = count  # answers are the load, not their tokens
        self.has = {_make_group_key(job) for job in worker.jobs}

    def take(self, job: Job, size: float) -> tuple[int, int]:
        """Add the job to load and groups, and return (job, worker)."""
        self.load += 1.0 if self.count else size
        self.room -= 1
        self.has.add(_make_group_key(job))
        return job.id, self.id


def compute_piece_size(prompt: int, tokens: float) -> int:
    """Return how many siblings of ``tokens`` predicted tokens each go to a worker together, so that
    prefilling their prompt (``prompt`` tokens, once) is at most READ_SHARE of the sampled tokens."""
    return max(1, math.ceil(prompt / (READ_SHARE * max(1.0, tokens))))


def _make_group_key(job: Job) -> tuple[int, int]:
    return job.step, job.place
