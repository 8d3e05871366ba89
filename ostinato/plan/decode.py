"""How long sampling takes that ends with its longest answer: continuous batching over a sample of lengths.

Which sequence runs when follows from lengths and seats alone, counted in decode steps; what a step costs only
says how long that is. So the schedule is made once (``occupancy``), and priced by whatever is known of the
hardware. The plain twin, a step at a time, is in the tests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Occupancy:
    """Runs of decode steps between which nobody comes or goes."""

    steps: Floats  # [n] how many steps
    sequences: Floats  # [n] how many sequences each of them decodes
    said: Floats  # [n] tokens that these have said on average, in the middle of the run

    @property
    def tokens(self) -> float:
        """All that are decoded."""
        return float((self.steps * self.sequences).sum())

    @property
    def longest(self) -> float:
        """Decode steps from the first to the last."""
        return float(self.steps.sum())


def occupancy(lengths: Sequence[int], seats: int) -> Occupancy:
    """Of one replica that decodes ``lengths`` in this order, at most ``seats`` at once: whoever ends makes
    room for the next. Raises ValueError without a seat or a length."""
    if seats < 1 or not len(lengths) or min(lengths) < 1:
        raise ValueError(
            f"{len(lengths)} lengths and {seats} seats; use at least 1 of each, of 1 token or more"
        )
    length = np.asarray(lengths, np.float64)
    start = np.zeros(len(length))
    ends = list(map(float, length[:seats]))
    heapq.heapify(ends)
    for index in range(seats, len(length)):
        start[index] = heapq.heappop(ends)
        heapq.heappush(ends, start[index] + length[index])
    stop = start + length
    events, place = np.unique(np.concatenate([start, stop]), return_inverse=True)
    begun, ended = place[: len(length)], place[len(length) :]
    num = len(events)
    sequences = np.cumsum(np.bincount(begun, minlength=num) - np.bincount(ended, minlength=num))[:-1]
    starts = np.cumsum(
        np.bincount(begun, weights=start, minlength=num) - np.bincount(ended, weights=start, minlength=num)
    )[:-1]
    middle = (events[:-1] + events[1:]) / 2
    return Occupancy(
        steps=np.diff(events), sequences=sequences.astype(np.float64), said=middle - starts / sequences
    )


def dealt(answers: Sequence[int], number: int, replicas: int) -> tuple[int, ...]:
    """The part of one replica of ``number`` answers, of the distribution that ``answers`` is a sample of:
    that of the one with the longest answer, for all others wait for it.

    Its lengths are evenly spaced quantiles, the last of them that of the longest of all ``number``. They come
    in an order that mixes long and short, as a batch does, and the same one each time.
    """
    share = max(1, -(-number // replicas))
    ordered = np.sort(np.asarray(answers, np.int64))
    places = (np.arange(share) + 0.5) / share
    places[-1] = max(places[-1], (number - 0.5) / number)
    lengths = ordered[np.ceil(places * len(ordered)).astype(np.int64) - 1]
    stride = next(n for n in range(max(1, int(share * 0.618)), share + 1) if np.gcd(n, share) == 1)
    return tuple(int(n) for n in lengths[np.arange(share) * stride % share])


def decode_seconds(rooms: Occupancy, step: Callable[[Floats, Floats], Floats]) -> float:
    """Seconds of a schedule, where ``step(sequences, said)`` is that of one decode step."""
    return float((rooms.steps * step(rooms.sequences, rooms.said)).sum())


__all__ = ["Occupancy", "dealt", "decode_seconds", "occupancy"]
