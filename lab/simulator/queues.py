"""What waits in a simulated pipeline: the placements of ``rollout.schedule``, kept up to date event by event.

A placement of the pool sees everything whenever anything happens; that costs the square of what there is.
Here a round is placed once with the same functions, and the worker that then has room takes the head of a
queue: the same answers in the same places (a test compares them).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from lab.simulator.policies import Policy
from lab.simulator.sampler import Sampler
from lab.simulator.traces import Stream
from ostinato.history.lengths import Lengths
from ostinato.rollout.schedule import lanes, piece


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
        for uid, lengths in stream.history.items():
            self._past.observe(uid, lengths.tolist())

    def prompt(self, group: int) -> int:
        return self._prompts[group]

    def tokens(self, group: int) -> int:
        return self._totals[group]

    def admit(self, group: int, step: int) -> None:
        self.round.append(step)
        first = group * self.size
        if self.oracle:
            self.predicted += [float(n) for n in self.length[first : first + self.size]]
        else:
            mean = self._past.mean(self.stream.uids[group])
            whole = round(mean) if math.isfinite(mean) else 1  # sums of whole numbers have no order
            self.predicted += [float(whole)] * self.size

    def ended(self, group: int) -> None:
        if not self.oracle:
            self._past.observe(self.stream.uids[group], self.stream.lengths[group].tolist())

    def to_go(self, answer: int) -> float:
        """Predicted tokens of an answer that has not begun; see ``schedule.remaining``."""
        return max(1.0, self.predicted[answer])


class Queue(Protocol):
    def admit(self, groups: range) -> list[Sampler]:
        """Place a round: those that begin with something, which is in their ``coming``."""
        ...

    def more(self, sampler: Sampler) -> None:
        """Put into its ``coming`` what a sampler begins with that has room."""
        ...

    def ended(self, sampler: Sampler, answer: int) -> None:
        """Hear that it has room again."""
        ...


def queue(policy: Policy, answers: Answers, samplers: Sequence[Sampler], ahead: int) -> Queue:
    """``ahead``: answers that a sampler is given for each that it decodes."""
    if policy in (Policy.STATIC, Policy.HISTOPIPE):
        return Dealt(policy, answers, samplers, ahead)
    return Central(policy, answers, samplers, ahead)


class Central:
    """One queue for all, of groups: least-loaded, longest-first. See ``schedule._fill``."""

    def __init__(self, policy: Policy, answers: Answers, samplers: Sequence[Sampler], ahead: int) -> None:
        self._by_length = policy is Policy.LONGEST_FIRST
        self._answers, self._samplers, self._ahead = answers, samplers, ahead
        self._dealt: list[deque[int]] = [deque() for _ in samplers]  # behind what a sampler decodes
        self._left: dict[int, deque[int]] = {}  # answers of a group that wait
        self._order: list[tuple[int, float, int]] = []  # heap of ``_key``, where entries may be of before
        self._closed: list[tuple[int, float, int]] = []  # the same, of groups that their holders go on with
        self._has = [Counter[int]() for _ in samplers]  # answers of each group, by who has them
        self._mine: list[set[int]] = [set() for _ in samplers]  # of these groups, those that wait; or did
        self._holders = Counter[int]()  # samplers that have answers of a group

    def admit(self, groups: range) -> list[Sampler]:
        size = self._answers.size
        for group in groups:
            answers = range(group * size, (group + 1) * size)
            self._left[group] = deque(sorted(answers, key=self._rank))
            heapq.heappush(self._order, self._key(group))
        open = [sampler for sampler in self._samplers if self._room(sampler)]
        heap = [(self._load(sampler), sampler.id) for sampler in open] if self._left else []
        heapq.heapify(heap)
        while heap and self._left:
            load, id = heapq.heappop(heap)
            sampler = self._samplers[id]
            for answer in self._take(sampler):
                load += self._answers.to_go(answer) if self._by_length else 1.0
            if self._room(sampler):
                heapq.heappush(heap, (load, id))
        for sampler in open:
            self._fill(sampler)
        return [sampler for sampler in open if sampler.coming]

    def more(self, sampler: Sampler) -> None:
        while self._left and self._room(sampler):
            self._take(sampler)
        self._fill(sampler)

    def _room(self, sampler: Sampler) -> int:
        return self._ahead * sampler.cost.slots - sampler.has - len(self._dealt[sampler.id])

    def _fill(self, sampler: Sampler) -> None:
        _begin(sampler, self._dealt[sampler.id])

    def ended(self, sampler: Sampler, answer: int) -> None:
        group, has = answer // self._answers.size, self._has[sampler.id]
        has[group] -= 1
        if not has[group]:
            del has[group]
            self._holders[group] -= 1
            if not self._holders[group]:
                del self._holders[group]
                if group in self._left:
                    heapq.heappush(self._order, self._key(group))

    def _take(self, sampler: Sampler) -> list[int]:
        """Siblings of one group."""
        has, mine = self._has[sampler.id], self._mine[sampler.id]
        mine -= {group for group in mine if group not in self._left or group not in has}
        group = min(map(self._key, mine))[2] if mine else self._first()
        waiting = self._left[group]
        most = min(self._piece(group), self._room(sampler), len(waiting))
        consumed = [waiting.popleft() for _ in range(most)]
        self._dealt[sampler.id] += consumed
        self._holders[group] += group not in has
        has[group] += len(consumed)
        if waiting:
            mine.add(group)
            heapq.heappush(self._order, self._key(group))
        else:
            del self._left[group]
        return consumed

    def _first(self) -> int:
        """The first group that anybody may begin with; else the first that waits."""
        while self._order:
            key = heapq.heappop(self._order)
            group = key[2]
            if group in self._left and key == self._key(group):
                if not self._holders[group] or len(self._left[group]) >= self._piece(group):
                    return group
                heapq.heappush(self._closed, key)
        while True:
            key = heapq.heappop(self._closed)
            if key[2] in self._left and key == self._key(key[2]):
                return key[2]

    def _piece(self, group: int) -> int:
        return piece(self._answers.prompt(group), self._answers.to_go(self._left[group][0]))

    def _key(self, group: int) -> tuple[int, float, int]:
        return self._answers.round[group], self._rank(self._left[group][0]), group

    def _rank(self, answer: int) -> float:
        return -self._answers.to_go(answer) if self._by_length else 0.0

    def _load(self, sampler: Sampler) -> float:
        if not self._by_length:
            return float(sampler.has + len(self._dealt[sampler.id]))
        length, predicted, passes = self._answers.length, self._answers.predicted, sampler.passes
        running = (max(1.0, predicted[a] - length[a] + end - passes) for end, a in sampler.ending)
        return sum(running) + sum(map(self._answers.to_go, (*sampler.coming, *self._dealt[sampler.id])))


class Dealt:
    """A queue for each: static, histopipe."""

    def __init__(self, policy: Policy, answers: Answers, samplers: Sequence[Sampler], ahead: int) -> None:
        self._policy, self._answers, self._samplers, self._ahead = policy, answers, samplers, ahead
        self._waiting: list[deque[int]] = [deque() for _ in samplers]

    def admit(self, groups: range) -> list[Sampler]:
        size = self._answers.size
        for group, at in zip(groups, self._deal(groups), strict=True):
            self._waiting[at].extend(range(group * size, (group + 1) * size))
        for sampler in self._samplers:
            self.more(sampler)
        return [sampler for sampler in self._samplers if sampler.coming]

    def more(self, sampler: Sampler) -> None:
        _begin(sampler, self._waiting[sampler.id])

    def ended(self, sampler: Sampler, answer: int) -> None:
        pass

    def _deal(self, groups: range) -> list[int]:
        if self._policy is Policy.STATIC:
            return [group % len(self._samplers) for group in groups]
        size, predicted, round = self._answers.size, self._answers.predicted, self._answers.round
        slots = [self._ahead * sampler.cost.slots for sampler in self._samplers]
        places: list[int] = []
        for step in sorted({round[group] for group in groups}):
            some = [group for group in groups if round[group] == step]
            each = np.array(predicted[some[0] * size : (some[-1] + 1) * size]).reshape(-1, size)
            means = np.maximum(each, 1.0).mean(axis=1)
            places += lanes(means, size, slots, self._samplers[0].cost.pass_s, step)
        return places


def _begin(sampler: Sampler, dealt: deque[int]) -> None:
    """Of what it was dealt, as many as there is room for in its batch."""
    sampler.coming += [dealt.popleft() for _ in range(min(sampler.cost.slots - sampler.has, len(dealt)))]
