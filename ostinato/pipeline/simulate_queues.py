"""What waits in a simulated pipeline: the placements of ``rollout.schedule``, kept up to date event by event.

A placement of the pool sees everything whenever anything happens; that costs the square of what there is.
Here a round is placed once with the same functions, and whoever then gets room takes the head of a queue:
the same answers in the same places (a test compares them).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ostinato.history.lengths import Lengths
from ostinato.pipeline.simulate_sampler import Sampler
from ostinato.pipeline.simulate_traces import Stream
from ostinato.rollout.schedule import Policy, lanes, spread


class Answers:
    """All answers by number: siblings follow each other, groups are in the order of the stream.

    Predictions are made when a group is admitted, from what has ended by then; with ``oracle`` they are true.
    """

    def __init__(self, stream: Stream, *, oracle: bool) -> None:
        self.stream, self.oracle, self.size = stream, oracle, stream.lengths.shape[1]
        self.length: list[int] = stream.lengths.reshape(-1).tolist()
        context = np.repeat(stream.prompts, self.size).reshape(-1)
        self.positions: list[int] = (context + stream.lengths.reshape(-1) + 1).tolist()  # when it has ended
        self.round: list[int] = []  # of each admitted group
        self.predicted: list[float] = []  # of each admitted answer
        self._prompts: list[int] = stream.prompts.tolist()
        self._totals: list[int] = stream.lengths.sum(axis=1).tolist()
        self._past = Lengths()
        self._cut = np.zeros(self.size, bool)
        for uid, lengths in stream.history.items():
            self._past.observe(uid, lengths.tolist(), [False] * len(lengths))

    def prompt(self, group: int) -> int:
        return self._prompts[group]

    def tokens(self, group: int) -> int:
        return self._totals[group]

    def admit(self, group: int, round: int) -> None:
        self.round.append(round)
        first = group * self.size
        if self.oracle:
            self.predicted += [float(n) for n in self.length[first : first + self.size]]
        else:
            mean = self._past.mean(self.stream.uids[group])
            self.predicted += [mean if math.isfinite(mean) else 1.0] * self.size

    def ended(self, group: int) -> None:
        if not self.oracle:
            self._past.observe(self.stream.uids[group], self.stream.lengths[group].tolist(), self._cut.tolist())

    def to_go(self, answer: int) -> float:
        """Predicted tokens of an answer that has not begun; see ``schedule.remaining``."""
        return max(1.0, self.predicted[answer])


class Queue(Protocol):
    def admit(self, groups: range) -> list[Sampler]:
        """Place a round: those that begin with something, which is in their ``coming``."""
        ...

    def more(self, sampler: Sampler) -> list[int]:
        """What a sampler begins with that has room."""
        ...


def queue(policy: Policy, answers: Answers, samplers: Sequence[Sampler]) -> Queue:
    if policy in (Policy.STATIC, Policy.HISTOPIPE):
        return Dealt(policy, answers, samplers)
    return Central(policy, answers, samplers)


class Central:
    """One queue for all: least-loaded, longest-first."""

    def __init__(self, policy: Policy, answers: Answers, samplers: Sequence[Sampler]) -> None:
        self._by_length = policy is Policy.LONGEST_FIRST
        self._answers, self._samplers = answers, samplers
        self._waiting: list[tuple[int, float, int]] = []  # heap of (round, minus tokens to go, answer)

    def admit(self, groups: range) -> list[Sampler]:
        one, size = self._answers, self._answers.size
        for group in groups:
            for answer in range(group * size, (group + 1) * size):
                order = -one.to_go(answer) if self._by_length else 0.0
                heapq.heappush(self._waiting, (one.round[group], order, answer))
        open = [sampler for sampler in self._samplers if sampler.has < sampler.cost.slots]
        free = [sampler.cost.slots - sampler.has for sampler in open]
        now = [heapq.heappop(self._waiting)[2] for _ in range(min(sum(free), len(self._waiting)))]
        sizes = [one.to_go(answer) if self._by_length else 1.0 for answer in now]
        for answer, at in zip(now, spread(sizes, [self._load(s) for s in open], free), strict=True):
            open[at].coming.append(answer)
        return [sampler for sampler in open if sampler.coming]

    def more(self, sampler: Sampler) -> list[int]:
        free = min(sampler.cost.slots - sampler.has, len(self._waiting))
        return [heapq.heappop(self._waiting)[2] for _ in range(free)]

    def _load(self, sampler: Sampler) -> float:
        if not self._by_length:
            return float(sampler.has)
        length, predicted, passes = self._answers.length, self._answers.predicted, sampler.passes
        running = (max(1.0, predicted[a] - length[a] + end - passes) for end, a in sampler.ending)
        return sum(running) + sum(self._answers.to_go(a) for a in sampler.coming)


class Dealt:
    """A queue for each: static, histopipe."""

    def __init__(self, policy: Policy, answers: Answers, samplers: Sequence[Sampler]) -> None:
        self._policy, self._answers, self._samplers = policy, answers, samplers
        self._waiting: list[deque[int]] = [deque() for _ in samplers]

    def admit(self, groups: range) -> list[Sampler]:
        size = self._answers.size
        for group, at in zip(groups, self._deal(groups), strict=True):
            self._waiting[at].extend(range(group * size, (group + 1) * size))
        for sampler in self._samplers:
            sampler.coming += self.more(sampler)
        return [sampler for sampler in self._samplers if sampler.coming]

    def more(self, sampler: Sampler) -> list[int]:
        mine = self._waiting[sampler.id]
        return [mine.popleft() for _ in range(min(sampler.cost.slots - sampler.has, len(mine)))]

    def _deal(self, groups: range) -> list[int]:
        if self._policy is Policy.STATIC:
            return [group % len(self._samplers) for group in groups]
        size, predicted, round = self._answers.size, self._answers.predicted, self._answers.round
        slots = [sampler.cost.slots for sampler in self._samplers]
        places: list[int] = []
        for step in sorted({round[group] for group in groups}):
            some = [group for group in groups if round[group] == step]
            each = np.array(predicted[some[0] * size : (some[-1] + 1) * size]).reshape(-1, size)
            means = np.maximum(each, 1.0).mean(axis=1)
            places += lanes(means, size, slots, self._samplers[0].cost.pass_s, step)
        return places


__all__ = ["Answers", "Queue", "queue"]
