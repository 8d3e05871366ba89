"""A pipeline of samplers, graders and a trainer as discrete events: what a plan is worth before it is run.

Between two events of a sampler its batch does not change, so that its passes are summed in closed form
(``simulate_sampler``), and an event costs microseconds: 4,096 samplers and a million answers take less than a
minute. ``simulate_plain`` takes the same decisions pass by pass, with the placements that the pool calls, and
tests compare the two. Admission, deadlines and batches are those of ``feed.Rule``.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum

from lab.simulator.policies import Policy
from lab.simulator.queues import Answers, Queue, queue
from lab.simulator.sampler import Cost, Sampler
from lab.simulator.traces import Stream


class Mode(StrEnum):
    """What samplers do while the trainer works."""

    LOCKSTEP = "lockstep"  # nothing: ``pipeline.overlap`` false
    PIPELINE = "pipeline"  # go on, and weights change in flight: ``pipeline.overlap`` true
    ROUNDS = "rounds"  # the next round, and weights change between rounds (one-step overlap, k = 1)
    PARTIAL = "partial"  # halt, and go on where they were with new keys and values (partial rollout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated. Seconds, unless stated otherwise."""

    workers: int
    cost: Cost  # of every sampler
    prompts: int  # N: groups of a step
    steps: int
    staleness: int = 0
    mode: Mode = Mode.PIPELINE
    policy: Policy = Policy.LEAST_LOADED
    oracle: bool = False  # true lengths in place of predictions
    ahead: int = 1  # answers that a sampler is given for each that it decodes
    train_s: float = 0.0  # of a step, beside ...
    train_token_s: float = 0.0  # ... and of each of its sampled tokens
    publish_s: float = 0.0  # that a sampler pauses when weights change
    grade_s: float = 0.0  # of a group
    graders: int = 0  # 0: nothing waits for one
    between_s: float = 0.0  # of the loop after a step, in which the trainer is idle
    warmup: int = 2  # first steps that no figure counts; the last ``staleness`` ones do not count either

    def __post_init__(self) -> None:
        for name in ("workers", "prompts", "steps", "ahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"setup.{name} is {getattr(self, name)}; use at least 1")
        if not 0 <= self.warmup < self.last:
            raise ValueError(
                f"setup.warmup is {self.warmup}; use 0 to {self.last - 1} with {self.steps} steps, of which "
                f"the last {self.staleness} run empty"
            )

    @property
    def last(self) -> int:
        """The last step that counts: when it begins, nothing is missing yet for want of steps to come."""
        return self.steps - self.staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of the steps that count."""

    step_s: float
    bubble_share: float  # of the samplers' time: nothing runs, and no weights are loaded
    publish_share: float  # of the samplers' time
    trainer_idle_share: float
    tokens_per_s: float
    token_s: float  # of a sampler, for a token
    batch_mean: float  # sequences that run together, while any does
    staleness_mean: float  # steps, over tokens, when they are trained on
    staleness_max: int
    steps_s: tuple[float, ...]  # when each step ended, from the beginning
    trained: tuple[tuple[int, ...], ...]  # groups of each step, by place in the stream


class Gate:
    """``feed.Rule`` with overlap and "wait", by counts instead of lists: O(k) a question."""

    def __init__(self, *, prompts: int, staleness: int, steps: int) -> None:
        self.prompts, self.staleness, self.steps, self.finished = prompts, staleness, steps, 0
        self.held: Counter[int] = Counter()  # groups on their way by the step that admitted them
        self.ended: Counter[int] = Counter()  # of them, those that wait for the trainer
        self.ready: list[tuple[int, int]] = []  # heap of (step that admitted it, group)

    def room(self) -> int:
        most = min(self.staleness + 1, self.steps - self.finished) * self.prompts
        return max(0, most - self.held.total())

    @property
    def outstanding(self) -> int:
        """Groups on their way."""
        return self.held.total()

    def admit(self, groups: range) -> None:
        self.held[self.finished] += len(groups)

    def end(self, admitted: int, group: int) -> None:
        heapq.heappush(self.ready, (admitted, group))
        self.ended[admitted] += 1

    def batch(self) -> list[tuple[int, int]]:
        """What the next step trains on, (step that admitted it, group); empty: the trainer waits."""
        size = min(self.prompts, self.held.total())
        if len(self.ready) < size or not size:
            return []
        due = consumed = 0
        for admitted in range(self.finished - self.staleness, self.finished + 1):
            due += self.held[admitted]
            consumed = min(size, consumed + self.ended[admitted])
            if due - consumed > (admitted + self.staleness - self.finished) * self.prompts:
                return []
        return [heapq.heappop(self.ready) for _ in range(size)]

    def trained(self, batch: Sequence[tuple[int, int]]) -> None:
        steps = Counter(admitted for admitted, _ in batch)
        self.held -= steps
        self.ended -= steps
        self.finished += 1


def simulate(setup: Setup, stream: Stream) -> Outcome:
    """Run it. ``stream`` has the lengths of at least ``steps * prompts`` groups."""
    return Simulation(setup, stream).run()


_SAMPLER, _GRADED, _TRAINED = range(3)  # in this order when at the same time


@dataclass(frozen=True, slots=True)
class _Figures:
    """Sums since the beginning."""

    seconds: float = 0.0
    busy_s: float = 0.0
    paused_s: float = 0.0
    trained_s: float = 0.0
    tokens: float = 0.0
    passes: float = 0.0
    trained: float = 0.0
    ages: float = 0.0


class Simulation:
    """The state between two events. The twin has parts of its own, one pass at a time."""

    def __init__(
        self,
        setup: Setup,
        stream: Stream,
        *,
        sampler: Callable[[int, Cost], Sampler] = Sampler,
        waiting: Callable[[Policy, Answers, Sequence[Sampler], int], Queue] = queue,
        gate: type[Gate] = Gate,
    ) -> None:
        if len(stream.lengths) < setup.steps * setup.prompts:
            raise ValueError(
                f"the stream has {len(stream.lengths)} groups; {setup.steps} steps of {setup.prompts} need "
                f"{setup.steps * setup.prompts}"
            )
        self.setup, self.stream, self.size = setup, stream, stream.lengths.shape[1]
        self.now, self.admitted, self.version = 0.0, 0, 0
        self.samplers = [sampler(i, setup.cost) for i in range(setup.workers)]
        self.gate = gate(prompts=setup.prompts, staleness=setup.staleness, steps=setup.steps)
        self.answers = Answers(stream, oracle=setup.oracle)
        self.queue = waiting(setup.policy, self.answers, self.samplers, setup.ahead)
        self.events: list[tuple[float, int, int, int]] = []  # (time, kind, who, stamp)
        self.left = list[int]()  # of each admitted group, answers that have not ended
        self.since = list[int]()  # the step that admitted it
        self.ages: dict[int, tuple[int, int]] = {}  # (sum of versions over tokens, oldest) of a group
        self.begun: dict[int, tuple[int, int]] = {}  # (version_sum, version) of a running answer
        self.read: dict[int, set[int]] = {}  # samplers that have the prompt of a group
        self.graders = [0.0] * setup.graders  # heap: when each is free
        self.batch: list[tuple[int, int]] = []  # being trained on
        self.unpublished = False
        self.train_busy = self.publish_busy = self.age_sum = 0.0
        self.trained_tokens = self.age_max = 0
        self.ends, self.trained = list[float](), list[tuple[int, ...]]()

    def run(self) -> Outcome:
        before = after = _Figures()
        self.admit()
        while self.gate.finished < self.setup.steps:
            self.now, kind, who, stamp = heapq.heappop(self.events)
            if kind == _SAMPLER:
                if self.samplers[who].stamp == stamp:
                    self.wake(self.samplers[who])
            elif kind == _GRADED:
                self.gate.end(self.since[who], who)
                self.go_on()
            else:
                self.step_done()
                if self.gate.finished == self.setup.warmup:
                    before = self.figures()
                if self.gate.finished == self.setup.last:
                    after = self.figures()
                self.go_on()
        return self.outcome(before, after)

    def go_on(self) -> None:
        self.admit()
        if self.batch:
            return
        if self.setup.mode is not Mode.LOCKSTEP or not (self.gate.room() or self.running()):
            self.batch = self.gate.batch()
        if self.batch:
            tokens = sum(self.answers.tokens(group) for _, group in self.batch)
            seconds = self.setup.train_s + self.setup.train_token_s * tokens
            self.train_busy += seconds
            self.push(self.now + self.setup.between_s + seconds, _TRAINED)
            if self.setup.mode is Mode.PARTIAL:
                for sampler in self.samplers:
                    sampler.settle(self.now)
                    sampler.halted = True

    def step_done(self) -> None:
        for _, group in self.batch:
            versions, oldest = self.ages.pop(group)
            tokens = self.answers.tokens(group)
            self.trained_tokens += tokens
            self.age_sum += tokens * self.gate.finished - versions
            self.age_max = max(self.age_max, self.gate.finished - oldest)
        self.trained.append(tuple(sorted(group for _, group in self.batch)))
        self.gate.trained(self.batch)
        self.batch, self.version = [], self.gate.finished
        self.ends.append(self.now)
        if self.setup.mode is Mode.ROUNDS:
            self.unpublished = True
        else:
            self.publish()

    def publish(self) -> None:
        """Every sampler takes up the weights at the end of the pass that it is in."""
        self.unpublished = False
        for sampler in self.samplers:
            sampler.settle(self.now)
            sampler.pause_s = self.setup.publish_s
            if sampler.halted:
                sampler.halted = False
                sampler.recompute()
            self.soon(sampler)

    def admit(self) -> None:
        room = self.gate.room()
        if self.setup.mode in (Mode.LOCKSTEP, Mode.ROUNDS):
            room = 0 if self.running() else min(room, self.setup.prompts)
        if room and self.unpublished:
            self.publish()
        outstanding = self.gate.outstanding
        groups = range(self.admitted, self.admitted + room)
        for i, group in enumerate(groups):
            self.left.append(self.size)
            self.since.append(self.gate.finished)
            self.ages[group] = (0, self.version)
            self.answers.admit(group, self.gate.finished + 1 + (outstanding + i) // self.setup.prompts)
        self.gate.admit(groups)
        self.admitted += room
        if room or (self.setup.mode is Mode.PARTIAL and not self.batch):  # who had halted has room
            for sampler in self.samplers:
                sampler.settle(self.now)
            for sampler in self.queue.admit(groups):
                self.soon(sampler)

    def running(self) -> int:
        """Groups that are sampled or graded."""
        return self.gate.outstanding - len(self.gate.ready) - len(self.batch)

    def wake(self, sampler: Sampler) -> None:
        """It has come to the end of a pass after which something changes."""
        if sampler.time < self.now * (1 - 1e-12) and not sampler.halted:  # else rounding, and it is there
            sampler.to_next_end()
        for answer in sampler.ended(self.answers.positions):
            self.answer_ended(sampler, answer)
        if sampler.pause_s:
            sampler.time += sampler.pause_s
            self.publish_busy += sampler.pause_s
            sampler.pause_s = 0.0
        if not self.unpublished:
            sampler.version = self.version
        if not sampler.halted:
            self.queue.more(sampler)
            self.begin(sampler)
        self.schedule(sampler)

    def begin(self, sampler: Sampler) -> None:
        coming, sampler.coming = sampler.coming, []
        prefill, consumed = 0, list[tuple[int, int, int]]()
        for answer in coming:
            group = answer // self.size
            prompt = self.answers.prompt(group)
            readers = self.read.setdefault(group, set())
            if sampler.id not in readers:
                readers.add(sampler.id)
                prefill += prompt
            consumed.append((answer, prompt, self.answers.length[answer]))
            self.begun[answer] = (sampler.version_sum, sampler.version)
        if consumed:
            sampler.begin(consumed, prefill)

    def answer_ended(self, sampler: Sampler, answer: int) -> None:
        group = answer // self.size
        self.queue.ended(sampler, answer)
        before, version = self.begun.pop(answer)
        versions, oldest = self.ages[group]
        self.ages[group] = (versions + sampler.version_sum - before, min(oldest, version))
        self.left[group] -= 1
        if self.left[group] == 0:
            del self.read[group]
            self.answers.ended(group)
            start = sampler.time
            if self.graders:
                start = max(start, heapq.heappop(self.graders))
                heapq.heappush(self.graders, start + self.setup.grade_s)
            self.push(start + self.setup.grade_s, _GRADED, group)

    def soon(self, sampler: Sampler) -> None:
        """Wake it at the end of its pass."""
        sampler.stamp += 1
        self.push(sampler.time, _SAMPLER, sampler.id, sampler.stamp)

    def schedule(self, sampler: Sampler) -> None:
        sampler.stamp += 1
        if (time := sampler.next_event()) is not None:
            self.push(time, _SAMPLER, sampler.id, sampler.stamp)

    def push(self, time: float, kind: int, who: int = 0, stamp: int = 0) -> None:
        heapq.heappush(self.events, (time, kind, who, stamp))

    def figures(self) -> _Figures:
        for sampler in self.samplers:
            sampler.settle(self.now)
        return _Figures(
            seconds=self.now,
            busy_s=sum(sampler.busy_s for sampler in self.samplers),
            paused_s=self.publish_busy,
            trained_s=self.train_busy,
            tokens=sum(sampler.tokens for sampler in self.samplers),
            passes=sum(sampler.passes for sampler in self.samplers),
            trained=self.trained_tokens,
            ages=self.age_sum,
        )

    def outcome(self, before: _Figures, after: _Figures) -> Outcome:
        found = _Figures(*(b - a for a, b in zip(astuple(before), astuple(after), strict=True)))
        whole = found.seconds * self.setup.workers
        return Outcome(
            step_s=found.seconds / (self.setup.last - self.setup.warmup),
            bubble_share=max(0.0, 1 - (found.busy_s + found.paused_s) / whole),
            publish_share=found.paused_s / whole,
            trainer_idle_share=max(0.0, 1 - found.trained_s / found.seconds),
            tokens_per_s=found.tokens / found.seconds,
            token_s=found.busy_s / max(1.0, found.tokens),
            batch_mean=found.tokens / max(1.0, found.passes),
            staleness_mean=found.ages / max(1.0, found.trained),
            staleness_max=self.age_max,
            steps_s=tuple(self.ends),
            trained=tuple(self.trained),
        )
