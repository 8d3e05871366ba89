"""The slow obvious twin of ``simulate``: every pass is an event, every decision is the pool's and the loop's.

Samplers count tokens one by one, whatever waits is placed by ``rollout.schedule`` as the pool has it, and
``feed.Rule`` chooses the batches. The course of events is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lab.simulator.events import Gate, Outcome, Setup, Simulation
from lab.simulator.policies import Policy, placement
from lab.simulator.queues import Answers
from lab.simulator.sampler import Cost, Sampler
from lab.simulator.traces import Stream
from ostinato.pipeline.buffer import AdmissionRule
from ostinato.pipeline.rounds import Admission
from ostinato.protocols import Job, Worker


def simulate_plain(setup: Setup, stream: Stream) -> Outcome:
    """As ``simulate``, for few and short answers."""
    return Simulation(setup, stream, sampler=PlainSampler, waiting=PlainQueue, gate=PlainGate).run()


class PlainSampler(Sampler):
    """Wakes after every pass."""

    def __init__(self, id: int, cost: Cost) -> None:
        super().__init__(id, cost)
        self.to_go: dict[int, int] = {}  # tokens of each running answer
        self.sees: dict[int, int] = {}  # positions that its next token attends to
        self.got: dict[int, int] = {}  # tokens that it has

    def advance(self, passes: int) -> None:
        for _ in range(passes):
            seconds = self.cost.base[self.batch] + self.cost.attended_s * sum(self.sees.values())
            self.time += seconds
            self.busy_s += seconds
            self.passes += 1
            self.tokens += self.batch
            self.version_sum += self.version
            for answer in self.to_go:
                self.to_go[answer] -= 1
                self.sees[answer] += 1
                self.got[answer] += 1

    def settle(self, now: float) -> None:
        while self.time < now - 1e-12 and self.batch and not self.halted:
            self.advance(1)
        self.time = max(self.time, now)

    def to_next_end(self) -> None:
        if all(self.to_go.values()):
            self.advance(1)

    def next_event(self) -> float | None:
        if self.halted or not self.batch:
            return None
        if not all(self.to_go.values()):
            return self.time
        return self.time + self.cost.base[self.batch] + self.cost.attended_s * sum(self.sees.values())

    def ended(self, attended: Sequence[int]) -> list[int]:
        done = sorted(answer for answer, tokens in self.to_go.items() if tokens == 0)
        for answer in done:
            for mine in (self.to_go, self.sees, self.got):
                del mine[answer]
        self.batch -= len(done)
        return done

    def begin(self, answers: Iterable[tuple[int, int, int]], prefill: int) -> None:
        for answer, prompt, tokens in answers:
            self.to_go[answer], self.sees[answer], self.got[answer] = tokens, prompt + 1, 0
            self.batch += 1
        self.time += prefill * self.cost.prefill_s
        self.busy_s += prefill * self.cost.prefill_s

    def recompute(self) -> None:
        self.attended = float(sum(self.sees.values()))
        super().recompute()


class PlainQueue:
    """What waits, as the pool places it."""

    def __init__(self, policy: Policy, answers: Answers, samplers: Sequence[Sampler], ahead: int) -> None:
        self._place, self._answers, self._samplers = placement(policy), answers, samplers
        self._ahead = ahead
        self._waiting: list[int] = []
        self._dealt: list[list[int]] = [[] for _ in samplers]

    def admit(self, groups: range) -> list[Sampler]:
        size = self._answers.size
        self._waiting += range(groups.start * size, groups.stop * size)
        self._follow()
        for sampler in self._samplers:
            self._fill(sampler)
        return [sampler for sampler in self._samplers if sampler.coming]

    def more(self, sampler: Sampler) -> None:
        self._follow()
        self._fill(sampler)

    def ended(self, sampler: Sampler, answer: int) -> None:
        pass

    def _follow(self) -> None:
        jobs = [self._job(answer, 0) for answer in self._waiting]
        workers = [self._worker(sampler) for sampler in self._samplers]
        for answer, at in self._place(jobs, workers):
            self._waiting.remove(answer)
            self._dealt[at].append(answer)

    def _fill(self, sampler: Sampler) -> None:
        free = sampler.cost.slots - sampler.has
        mine = self._dealt[sampler.id]
        sampler.coming += mine[:free]
        self._dealt[sampler.id] = mine[free:]

    def _worker(self, sampler: Sampler) -> Worker:
        assert isinstance(sampler, PlainSampler)
        had = sampler.got | dict.fromkeys([*sampler.coming, *self._dealt[sampler.id]], 0)
        jobs = tuple(self._job(answer, got) for answer, got in had.items())
        slots = self._ahead * sampler.cost.slots
        return Worker(id=sampler.id, slots=slots, jobs=jobs, pass_s=sampler.cost.pass_s)

    def _job(self, answer: int, generated: int) -> Job:
        one, group = self._answers, answer // self._answers.size
        return Job(
            id=answer,
            step=one.round[group],
            place=group,
            predicted=one.predicted[answer],
            prompt=one.prompt(group),
            generated=generated,
        )


class PlainGate(Gate):
    """``feed.Rule`` itself, on lists."""

    def __init__(self, *, prompts: int, staleness: int, steps: int) -> None:
        super().__init__(prompts=prompts, staleness=staleness, steps=steps)
        self.rule = AdmissionRule(prompts=prompts, staleness=staleness, steps=steps, overlap=True)
        self.all: dict[int, Admission] = {}

    @property
    def outstanding(self) -> int:
        return len(self.all)

    def room(self) -> int:
        return self.rule.room([*self.all.values()], self.finished)

    def admit(self, groups: range) -> None:
        for group in groups:
            self.all[group] = Admission(round=0, place=group, step=self.finished, version=self.finished)

    def end(self, admitted: int, group: int) -> None:
        self.ready.append((admitted, group))
        self.all[group] = self.all[group]._replace(ended=True)

    def batch(self) -> list[tuple[int, int]]:
        chosen = set(self.rule.choose([*self.all.values()], self.finished).batch)
        batch = sorted(one for one in self.ready if one[1] in chosen)
        self.ready = [one for one in self.ready if one[1] not in chosen]
        return batch

    def trained(self, batch: Sequence[tuple[int, int]]) -> None:
        for _, group in batch:
            del self.all[group]
        self.finished += 1
