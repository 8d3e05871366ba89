"""The buffer of rollouts: which groups are admitted, which are trained on, which the trainer waits for.

Groups of prompts are admitted while those that are on their way (playing, being graded, waiting or being
trained on) are fewer than (k + 1) N, for a staleness of k and N prompts in a step; so they come in rounds of
N whenever a step has ended (the capacity rule of AReaL, arXiv 2505.24298, section 5.1). What was admitted
after f finished steps has to be trained on after f + k of them at the latest: that is its deadline, and no
token of it is older than k then.

    finished steps      0        1        2        3               k = 2, with overlap
    admitted          a b c      d        e        f               a, b, c ...: N groups each
    deadline          2 2 2      3        4        5
    trained on          a        b        c        d               whichever N of a b c have ended first

Without overlap the trainer waits until everything has ended that is admitted, and takes the oldest. With it,
it takes the N groups with the earliest deadlines among those that have ended, unless that would leave more
behind than the steps until some deadline can take. Then it waits for these: nothing is dropped, long answers
are not selected against. Throttling alone would not bound the lag: an answer may take longer than k steps.

``AdmissionRule`` is pure; ``RolloutBuffer`` has the tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ostinato.pipeline.curriculum import Rates
from ostinato.pipeline.rounds import Admission, Rounds
from ostinato.rollout.rollout import RolloutResult, end_tasks
from ostinato.types import Group

MOST_NAMED = 5  # groups, in a sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """By place in the stream: what a step trains on, in the order of the stream; what it has to wait for, and
    then the batch is empty. Both are empty when no group is on the way."""

    batch: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRule:
    """The arithmetic above, for a run of ``steps`` steps of ``prompts`` groups."""

    prompts: int
    staleness: int
    steps: int
    overlap: bool = False

    def room(self, held: Sequence[Admission], finished: int, staleness: int | None = None) -> int:
        """How many groups may be admitted after ``finished`` steps, while ``held`` are on their way, for a
        ``staleness`` of at most that."""
        ahead = self.staleness if staleness is None else staleness
        if not self.overlap and not all(one.ended for one in held):
            return 0  # a round is played when the one before it has ended
        room = min(ahead + 1, self.steps - finished) * self.prompts - len(held)
        return max(0, room if self.overlap else min(room, self.prompts))

    def round(self, outstanding: int, finished: int) -> int:
        """The step that trains on a group if nothing intervenes; ``outstanding`` were admitted before it."""
        return finished + 1 + outstanding // self.prompts

    def deadline(self, one: Admission) -> int:
        """Finished steps after which ``one`` can be trained on for the last time."""
        return one.step + self.staleness

    def choose(self, held: Sequence[Admission], finished: int) -> Selection:
        """Of those on their way, the batch of the step that follows ``finished`` ones."""
        running, size = [one for one in held if not one.ended], min(self.prompts, len(held))
        if not self.overlap:
            return Selection(awaited=_places(running)) if running else Selection(batch=_places(held)[:size])
        ended = (one for one in held if one.ended)
        batch = set(sorted(ended, key=lambda one: (self.deadline(one), one.place))[:size])
        left = [one for one in held if one not in batch]
        awaited = [one for one in self._overdue(left, finished) if not one.ended]
        if awaited or len(batch) < size:
            return Selection(awaited=_places(awaited or running))
        return Selection(batch=_places(batch))

    def _overdue(self, left: Sequence[Admission], finished: int) -> list[Admission]:
        """Who is left behind by a batch, where up to some deadline they are more than the steps until then
        have places for."""
        order = sorted(left, key=self.deadline)
        for i, one in enumerate(order):
            if self.deadline(one) < finished + 1 + i // self.prompts:
                return [other for other in order if self.deadline(other) <= self.deadline(one)]
        return []

    def too_old(self, held: Sequence[Admission], finished: int) -> tuple[int, ...]:
        """Whom no step would reach in time, one step after the other: where a recipe was changed in
        between."""
        late: list[Admission] = []
        before = 0  # in overlap a late one is played anew behind the others, in lockstep in front of them
        for one in sorted(held, key=lambda one: (one.step if self.overlap else 0, one.place)):
            if is_late := self.deadline(one) < finished + before // self.prompts:
                late.append(one)
            before += not (is_late and self.overlap)
        return _places(late)


def _places(some: Iterable[Admission]) -> tuple[int, ...]:
    return tuple(sorted(one.place for one in some))


def _broken(task: asyncio.Task[RolloutResult]) -> bool:
    return task.cancelled() or task.exception() is not None


@dataclass(slots=True, kw_only=True)
class _Held:
    """A group on its way."""

    admission: Admission
    since: float  # ``time.perf_counter``, of its stage
    stage: str = "playing"
    task: asyncio.Task[RolloutResult] | None = None
    played: RolloutResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What a step gets, in the order of the stream."""

    batch: Sequence[RolloutResult]
    num_admitted: int  # from the stream, since the step before
    num_anew: int  # of an earlier process, since then: their policy is gone, and another plays them
    choices: Mapping[str, int] = field(default_factory=dict)  # of the curriculum, since then


@dataclass(kw_only=True)
class RolloutBuffer:
    """Admits groups, and hands out batches of them. ``cursor`` is the place of the stream that comes next,
    which ``retired`` have left; ``leaving`` names those that leave by the groups that have ended (None: no
    prompt ever does). ``on_progress`` is called whenever a group gets on."""

    rule: AdmissionRule
    rounds: Rounds
    cursor: int
    retired: Sequence[str]
    rates: Rates  # that the curriculum of ``rounds`` goes by
    leaving: Callable[[Sequence[Group], Sequence[str]], Sequence[str]] | None = None
    staleness: int | None = None  # of what is admitted now; None: as ``rule`` has it
    on_progress: Callable[[], None] = lambda: None
    _held: dict[int, _Held] = field(default_factory=dict)  # by place; without those that are trained on
    _training: Sequence[Admission] = ()
    _lost: list[Admission] = field(default_factory=list)  # on their way once, to be played anew
    _fresh: dict[int, RolloutResult] = field(default_factory=dict)  # by place
    _unjudged: dict[int, RolloutResult] = field(default_factory=dict)  # may still make their prompts leave
    _news: asyncio.Event = field(default_factory=asyncio.Event)  # a group has ended
    _num_admitted: int = 0
    _num_anew: int = 0
    _choices: Counter[str] = field(default_factory=Counter)

    def recall(self, ahead: Sequence[Admission], finished: int, version: int) -> list[Admission]:
        """Take up what an earlier process had on its way, as far as the spool has it. The others, which are
        returned, are played anew, by the policy of then; and so is what would be too old by now."""
        late = self.rule.too_old(ahead, finished)
        for one in ahead:
            now = time.perf_counter()
            played = None if one.place in late else self.rounds.recall(one, version, since=now)
            if played is None:
                self._lost.append(one._replace(ended=False))
                continue
            self._held[one.place] = _Held(
                admission=one._replace(ended=True), since=now, stage="ready", played=played
            )
            if not one.ended:  # no row of the ledger has it
                self._fresh[one.place] = self._unjudged[one.place] = played
        return list(self._lost)

    @property
    def ahead(self) -> list[Admission]:
        """Who is on the way, and not being trained on."""
        return sorted([*self._lost, *self._admissions()], key=lambda one: one.place)

    @property
    def running(self) -> int:
        return sum(one.played is None for one in self._held.values())

    @property
    def ready(self) -> int:
        return len(self._held) - self.running

    @property
    def addresses(self) -> list[str]:
        """In the spool, of what is being trained on."""
        return [self.rounds.address(one) for one in self._training]

    @property
    def is_dry(self) -> bool:
        """Is no group on the way, and has every prompt left the stream?"""
        return not self.ahead and not self.rounds.places(self.cursor, self._left, 1)

    async def batch(self, finished: int, version: int) -> TrainBatch:
        """What the step after ``finished`` ones trains on; until then groups are admitted to the policy
        ``version``."""
        while True:
            self._hear()
            self._raise()
            self.admit(finished, version)
            choice = self.rule.choose(self._admissions(), finished)
            if not choice.awaited:
                return self._take(choice)
            await self._news.wait()

    def admit(self, finished: int, version: int) -> None:
        """As many as there is room for."""
        while room := self.rule.room([*self._training, *self._admissions()], finished, self.staleness):
            self._judge()
            new = self._again(room, finished, version) or self._next(room, finished, version)
            if not new:
                return
            for one in new:
                self._begin(one)

    def fresh(self) -> list[RolloutResult]:
        """The groups that have ended since the last call, in the order of the stream: the row of a step pays
        for them."""
        self._hear()
        self._judge()
        fresh, self._fresh = self._fresh, {}
        return [fresh[place] for place in sorted(fresh)]

    def trained(self) -> None:
        """The step has ended: what it was given has left."""
        self._training = ()

    async def drain(self) -> None:
        """Let all that is on its way end. What has ended is in the spool."""
        while self.running:
            await self._news.wait()
            self._hear()
            self._raise()

    async def close(self) -> None:
        """Nothing goes on."""
        await end_tasks(self._tasks())

    def waiting(self) -> str:
        """Who has been on the way for longest, doing what since when."""
        running = [one for one in self._held.values() if one.played is None]
        running.sort(key=lambda one: one.since)
        now, uid = time.perf_counter(), self.rounds.uid
        named = [f"{uid(one.admission)} ({one.stage} for {now - one.since:.0f} s)" for one in running]
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        return ", ".join(named[:MOST_NAMED]) + more or "nothing"

    # ---- inside

    @property
    def _left(self) -> Sequence[str]:
        return () if self.leaving is None else self.retired

    def _admissions(self) -> list[Admission]:
        return [one.admission for one in self._held.values()]

    def _tasks(self) -> list[asyncio.Task[RolloutResult]]:
        return [one.task for one in self._held.values() if one.task is not None]

    def _hear(self) -> None:
        """Take in what has ended."""
        self._news.clear()
        for place, one in self._held.items():
            if one.task is not None and one.task.done() and not _broken(one.task):
                one.played = self._fresh[place] = self._unjudged[place] = one.task.result()
                one.task, one.admission, one.stage = None, one.admission._replace(ended=True), "ready"

    def _raise(self) -> None:
        """What a group died of."""
        for task in self._tasks():
            if task.done():
                task.result()

    def _judge(self) -> None:
        """Prompts that the ended groups solve for good leave the stream."""
        groups = [self._unjudged.pop(place).group for place in sorted(self._unjudged)]
        if self.leaving is not None and groups:
            self.retired = (*self.retired, *self.leaving(groups, self.retired))
        if self.rounds.curriculum is not None and groups:
            self.rates = self.rounds.curriculum.measured(self.rates, groups)

    def _again(self, room: int, finished: int, version: int) -> list[Admission]:
        """Of those that were lost: they keep their noise and their place, and are as young as their new
        policy."""
        some, self._lost = self._lost[:room], self._lost[room:]
        self._num_anew += sum(one.version != version for one in some)
        return [one._replace(step=finished, version=version, ended=False) for one in some]

    def _next(self, room: int, finished: int, version: int) -> list[Admission]:
        """From the stream; empty when everybody has left it."""
        places = self.rounds.places(self.cursor, self._left, room, self.rates)
        new = self._following(places, finished, version)
        if new:
            self._choices += self.rounds.choices(self.cursor, places[-1] + 1, self._left, self.rates)
            self.cursor = places[-1] + 1
            self._num_admitted += len(new)
        return new

    def _following(self, places: Sequence[int], finished: int, version: int) -> list[Admission]:
        """Admissions of these places."""
        first = len(self._held) + len(self._training) + len(self._lost)
        return [
            Admission(self.rule.round(first + i, finished), place, finished, version)
            for i, place in enumerate(places)
        ]

    def _begin(self, one: Admission) -> None:
        held = self._held[one.place] = _Held(admission=one, since=time.perf_counter())

        def generated() -> None:
            held.stage, held.since = "grading", time.perf_counter()
            self.on_progress()

        async def play() -> RolloutResult:
            played = await self.rounds.play(one, since=held.since, generated=generated)
            self.on_progress()
            return played

        held.task = asyncio.create_task(play())
        held.task.add_done_callback(lambda task: self._news.set())

    def _take(self, choice: Selection) -> TrainBatch:
        batch = [self._held.pop(place) for place in choice.batch]
        self._training = [one.admission for one in batch]
        train_batch = TrainBatch(
            batch=[one.played for one in batch if one.played is not None],
            num_admitted=self._num_admitted,
            num_anew=self._num_anew,
            choices=self._choices,
        )
        self._num_admitted, self._num_anew, self._choices = 0, 0, Counter()
        return train_batch
