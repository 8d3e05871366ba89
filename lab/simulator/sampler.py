"""One simulated sampler: a batch that decodes, in closed form between two events."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of a pass of b sequences that attend to s positions in all: ``base[b] + attended_s * s``."""

    base: tuple[float, ...]  # [slots + 1]; the first is not used
    attended_s: float = 0.0  # of a position
    prefill_s: float = 0.0  # of a token of a prompt, or of one whose keys and values are computed again

    @classmethod
    def of(
        cls,
        rows: Sequence[tuple[float, float]],
        *,
        slots: int,
        attended_s: float = 0.0,
        prefill_s: float = 0.0,
    ) -> Cost:
        """From (sequences, seconds) at knots, as ``engine.cost.CostTable.rows`` has them: linear between two
        knots, and beyond the last with the last slope."""
        at, seconds = (np.array(column, np.float64) for column in zip(*rows, strict=True))
        batches = np.arange(slots + 1)
        base = np.interp(batches, at, seconds)
        if len(at) > 1:
            slope = (seconds[-1] - seconds[-2]) / (at[-1] - at[-2])
            base += np.maximum(0.0, batches - at[-1]) * slope
        return cls(base=tuple(base.tolist()), attended_s=attended_s, prefill_s=prefill_s)

    @property
    def slots(self) -> int:
        """Most sequences that are decoded together."""
        return len(self.base) - 1

    def pass_s(self, batch: int, attended: float) -> float:
        return self.base[min(batch, self.slots)] + self.attended_s * attended

    def span(self, batch: int, attended: float, passes: int) -> float:
        """Seconds of ``passes`` passes, the first of which attends to ``attended`` positions."""
        grown = passes * attended + batch * (passes * (passes - 1) / 2)
        return passes * self.base[batch] + self.attended_s * grown

    def passes(self, batch: int, attended: float, seconds: float) -> int:
        """The least number of passes that take at least ``seconds``: the next end of a pass."""
        if seconds <= 1e-12:
            return 0
        square = self.attended_s * batch / 2
        linear = self.base[batch] + self.attended_s * attended - square
        root = 2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds))
        return max(1, math.ceil(root - 1e-9))


class Sampler:
    """Its clock stands at the end of its latest pass that anybody had to know of."""

    __slots__ = (
        "attended",
        "batch",
        "busy_s",
        "coming",
        "cost",
        "ending",
        "halted",
        "id",
        "passes",
        "pause_s",
        "stamp",
        "time",
        "tokens",
        "version",
        "version_sum",
    )

    def __init__(self, id: int, cost: Cost) -> None:
        self.id, self.cost = id, cost
        self.time = self.busy_s = self.attended = 0.0
        self.passes = self.batch = self.tokens = self.stamp = self.version = 0
        self.version_sum = 0  # over all passes so far, of the version that each was made with
        self.ending: list[tuple[int, int]] = []  # heap of (pass in which it ends, answer)
        self.coming: list[int] = []  # answers that begin at the end of this pass
        self.pause_s = 0.0  # at the end of this pass
        self.halted = False

    @property
    def has(self) -> int:
        return self.batch + len(self.coming)

    def advance(self, passes: int) -> None:
        if passes:
            seconds = self.cost.span(self.batch, self.attended, passes)
            self.time += seconds
            self.busy_s += seconds
            self.passes += passes
            self.attended += self.batch * passes
            self.tokens += self.batch * passes
            self.version_sum += self.version * passes

    def settle(self, now: float) -> None:
        """On to the first end of a pass that is not before ``now``; an idle one is there at once."""
        if self.time < now:
            if self.batch and not self.halted:
                self.advance(self.cost.passes(self.batch, self.attended, now - self.time))
            else:
                self.time = now

    def to_next_end(self) -> None:
        if self.ending:
            self.advance(self.ending[0][0] - self.passes)

    def next_event(self) -> float | None:
        """When it next has something to tell."""
        if self.halted or not self.ending:
            return None
        return self.time + self.cost.span(self.batch, self.attended, self.ending[0][0] - self.passes)

    def ended(self, attended: Sequence[int]) -> list[int]:
        """The answers that end with this pass; ``attended``: positions of each answer when it has ended."""
        done = []
        while self.ending and self.ending[0][0] == self.passes:
            done.append(heapq.heappop(self.ending)[1])
            self.batch -= 1
            self.attended -= attended[done[-1]]
        return done

    def begin(self, answers: Iterable[tuple[int, int, int]], prefill: int) -> None:
        """Take in (answer, prompt, tokens to go), whose ``prefill`` tokens are read before the next pass."""
        for answer, prompt, tokens in answers:
            heapq.heappush(self.ending, (self.passes + tokens, answer))
            self.batch += 1
            self.attended += prompt + 1
        self._spend(prefill * self.cost.prefill_s)

    def recompute(self) -> None:
        """All keys and values of what runs."""
        self._spend(self.attended * self.cost.prefill_s)

    def _spend(self, seconds: float) -> None:
        self.time += seconds
        self.busy_s += seconds
