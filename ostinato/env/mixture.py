"""Mix several tasks into one stream by weight: the task of each place, and the place in that task.

Places step around a circle by the golden ratio, and each task has an arc as long as its share: in every
stretch of the stream the share of each task is close to its weight (a low-discrepancy sequence). All
arithmetic is in integers modulo 2^64, and the result is a function of (seed, index) alone:

    place     0  1  2  3  4  5  6  7  8  9        weights 2 and 1, seed 0
    prompt    a0 a1 b0 a2 b1 a3 a4 b2 a5 a6       of the task's own stream
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from ostinato.protocols import Tasks
from ostinato.types import Prompt

CIRCLE = 1 << 64
STEP = 0x9E3779B97F4A7C15  # CIRCLE / golden ratio
SLACK = 16  # places; in any stretch, a task falls short of its share by less than 2 SLACK


def compute_arcs(weights: Sequence[float]) -> list[int]:
    """Return the end of each task's arc on a circle of length CIRCLE. The first arc begins at 0."""
    total, ends, cumulative = sum(map(Fraction, weights)), list[int](), Fraction(0)
    for weight in weights:
        cumulative += Fraction(weight)
        ends.append(round(CIRCLE * cumulative / total))
    return ends


def locate_place(seed: int, ends: Sequence[int], index: int) -> tuple[int, int]:
    """Return (task number, place in that task's own stream) of place ``index`` in a mixture whose arcs have
    these ``ends``. The task is that whose arc contains start + index * STEP. Its own place is the number of
    earlier places on the same arc."""
    task = bisect_right(ends, (_hash_start(seed) + index * STEP) % CIRCLE)
    return task, count_task_places(seed, ends, task, index)


def count_task_places(seed: int, ends: Sequence[int], task: int, count: int) -> int:
    """Return how many of the first ``count`` places belong to ``task``. Points below c on the circle are
    counted by a sum: x mod m < c exactly where floor(x / m) is greater by 1 than floor((x - c) / m)."""
    begin = ends[task - 1] if task else 0
    # CIRCLE is added so that no number is negative; it adds the same to both sums
    end_sum, begin_sum = (_sum_floors(count, _hash_start(seed) + CIRCLE - end) for end in (ends[task], begin))
    return begin_sum - end_sum


def _hash_start(seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"mixture/{seed}".encode()).digest()[:8], "big")


def _sum_floors(count: int, start: int) -> int:
    """Return the sum of floor((STEP * i + start) / CIRCLE) over i below ``count``, by Euclid's algorithm."""
    total, a, b, m = (
        0,
        STEP,
        start,
        CIRCLE,
    )  # the sum so far, and that of floor((a * i + b) / m) is to be added
    while True:
        total += count * (count - 1) // 2 * (a // m) + count * (b // m)
        a, b = a % m, b % m
        max_value = a * count + b
        if max_value < m:
            return total
        count, b, a, m = max_value // m, max_value % m, m, a


def compute_shares(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the share of all places of each task, by name."""
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def count_places(weights: Mapping[str, float], seed: int, n: int) -> dict[str, int]:
    """Return how many of the first ``n`` places each task has, at least 1 each."""
    ends = compute_arcs(list(weights.values()))
    return {name: max(1, count_task_places(seed, ends, number, n)) for number, name in enumerate(weights)}


class Mixture:
    """Implements protocols.Tasks: the streams of ``parts`` by name, mixed by their ``weights``.

    It has no state, so a resumed run continues the stream by its index alone.
    """

    def __init__(self, parts: Mapping[str, Tasks], weights: Mapping[str, float], *, seed: int) -> None:
        self._parts, self._seed = [parts[name] for name in weights], seed
        self._ends, self._shares = (
            compute_arcs(list(weights.values())),
            list(compute_shares(weights).values()),
        )

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def epoch(self) -> int:
        parts = zip(self._parts, self._shares, strict=True)
        return max(math.ceil((part.epoch + SLACK) / share) for part, share in parts)

    def prompt(self, index: int) -> Prompt:
        task, place = locate_place(self._seed, self._ends, index)
        return self._parts[task].prompt(place)


def label_prompts(prompts: Sequence[Prompt], task: str) -> list[Prompt]:
    """Label the prompts with ``task``, also in their uids, since two tasks may have the same prompt. With an
    empty name the prompts stay as they are."""
    return (
        [replace(prompt, uid=f"{task}/{prompt.uid}", task=task) for prompt in prompts] if task else [*prompts]
    )
