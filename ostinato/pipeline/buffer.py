"""The buffer of rollouts: decides which groups are admitted, trained on and waited for.

Groups are admitted while fewer than (k + 1) N are in flight (playing, being graded, waiting or being trained
on), for a staleness of k and N prompts per step; so N more are admitted whenever a step has ended (the
capacity rule of AReaL, arXiv 2505.24298, section 5.1). A group admitted after f finished steps must be
trained on after f + k of them at the latest. That is its deadline: no token of it is then older than k.

    finished steps      0        1        2        3               k = 2, with overlap
    admitted          a b c      d        e        f               a, b, c ...: N groups each
    deadline          2 2 2      3        4        5
    trained on          a        b        c        d               the N of a b c that have ended first

Without overlap the trainer waits until every admitted group has ended, and takes the oldest. With overlap it
takes the N groups with the earliest deadlines among those that have ended, unless that leaves more groups
than the steps up to some deadline can train on. Then it waits for these groups: nothing is dropped, and there
is no bias against long answers. Throttling alone would not bound the lag: an answer may take longer than k
steps.

``AdmissionRule`` is pure; ``RolloutBuffer`` owns the tasks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ostinato.pipeline.spool import Spool, make_address
from ostinato.protocols import Tasks
from ostinato.rollout.rollout import (
    RolloutContext,
    RolloutRequest,
    RolloutResult,
    end_tasks,
    list_verdicts,
    rollout_group,
)
from ostinato.types import Group

MOST_NAMED = 5  # groups that a sentence names


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Places in the stream. A step trains on ``batch``, in stream order; if it must first wait for
    ``awaited``, ``batch`` is empty. Both are empty if no group is in flight."""

    batch: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRule:
    """The rule of the module docstring for a run of ``steps`` steps of ``prompts`` groups."""

    prompts: int
    staleness: int
    steps: int
    overlap: bool = False

    def count_room(self, admissions: Sequence[Admission], finished: int) -> int:
        """Return how many groups may be admitted after ``finished`` steps beside ``admissions`` in flight.
        Without overlap it is 0 until all of these have ended, and at most ``prompts``."""
        if not self.overlap and not all(admission.ended for admission in admissions):
            return 0  # a round is played when the round before it has ended
        room = min(self.staleness + 1, self.steps - finished) * self.prompts - len(admissions)
        return max(0, room if self.overlap else min(room, self.prompts))

    def find_round(self, outstanding: int, finished: int) -> int:
        """Return the step that trains on a group that has ``outstanding`` groups before it, if nothing
        intervenes."""
        return finished + 1 + outstanding // self.prompts

    def find_deadline(self, admission: Admission) -> int:
        """Return the number of finished steps after which a group can be trained on for the last time."""
        return admission.step + self.staleness

    def choose(self, admissions: Sequence[Admission], finished: int) -> Selection:
        """Choose the batch of the step after ``finished`` steps from the groups in flight, ``admissions``."""
        unended, num_wanted = (
            [admission for admission in admissions if not admission.ended],
            min(self.prompts, len(admissions)),
        )
        if not self.overlap:
            return (
                Selection(awaited=_list_places(unended))
                if unended
                else Selection(batch=_list_places(admissions)[:num_wanted])
            )
        ended = (admission for admission in admissions if admission.ended)
        batch = set(
            sorted(ended, key=lambda admission: (self.find_deadline(admission), admission.place))[:num_wanted]
        )
        other_admissions = [admission for admission in admissions if admission not in batch]
        awaited_admissions = [
            admission for admission in self._find_overdue(other_admissions, finished) if not admission.ended
        ]
        if awaited_admissions or len(batch) < num_wanted:
            return Selection(awaited=_list_places(awaited_admissions or unended))
        return Selection(batch=_list_places(batch))

    def _find_overdue(self, admissions: Sequence[Admission], finished: int) -> list[Admission]:
        """Return the groups that are due by the first deadline by which more are due than the steps up to it
        can train on; empty if there is no such deadline."""
        order = sorted(admissions, key=self.find_deadline)
        for i, admission in enumerate(order):
            if self.find_deadline(admission) < finished + 1 + i // self.prompts:
                return [
                    other for other in order if self.find_deadline(other) <= self.find_deadline(admission)
                ]
        return []

    def find_too_old(self, admissions: Sequence[Admission], finished: int) -> tuple[int, ...]:
        """Return places of the groups that no step would reach by their deadline. There are none unless the
        recipe was changed before a resume."""
        late_admissions: list[Admission] = []
        num_before = 0  # with overlap a late group is played again after the others, in lockstep before them
        for admission in sorted(
            admissions, key=lambda admission: (admission.step if self.overlap else 0, admission.place)
        ):
            if is_late := self.find_deadline(admission) < finished + num_before // self.prompts:
                late_admissions.append(admission)
            num_before += not (is_late and self.overlap)
        return _list_places(late_admissions)


def _list_places(admissions: Iterable[Admission]) -> tuple[int, ...]:
    return tuple(sorted(admission.place for admission in admissions))


@dataclass(slots=True, kw_only=True)
class _GroupState:
    """The state of a group in flight."""

    admission: Admission
    since: float  # ``time.perf_counter`` at which its stage began
    stage: str = "playing"
    task: asyncio.Task[RolloutResult] | None = None
    played: RolloutResult | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The groups of a step, in the order of the stream."""

    batch: Sequence[RolloutResult]
    num_admitted: int  # groups from the stream, since the step before
    num_anew: int  # groups of an earlier process that another policy plays again, since the step before


@dataclass(kw_only=True)
class RolloutBuffer:
    """Admits groups and returns batches of them. ``cursor`` is the next place in the stream, ``retired`` the
    uids of prompts removed from it; ``leaving`` returns the uids to remove, given the groups that have ended
    (None: nothing is removed). ``on_progress`` is called when a group has its last token and when it ends."""

    rule: AdmissionRule
    rounds: Rounds
    cursor: int
    retired: Sequence[str]
    leaving: Callable[[Sequence[Group], Sequence[str]], Sequence[str]] | None = None
    on_progress: Callable[[], None] = lambda: None
    _groups: dict[int, _GroupState] = field(default_factory=dict)  # by place; without those in training
    _training: Sequence[Admission] = ()
    _lost_admissions: list[Admission] = field(default_factory=list)  # of an earlier process, to play again
    _new_results: dict[int, RolloutResult] = field(default_factory=dict)  # by place
    _unjudged_results: dict[int, RolloutResult] = field(
        default_factory=dict
    )  # their prompts may still be retired
    _has_ended: asyncio.Event = field(default_factory=asyncio.Event)  # a group has ended
    _num_admitted: int = 0
    _num_anew: int = 0

    def recall(self, ahead: Sequence[Admission], finished: int, version: int) -> list[Admission]:
        """Restore from the spool the groups that an earlier process had in flight. Groups that it does not
        have, or that would be too old by now, are returned and kept: they are played again by a later
        policy."""
        late_places = self.rule.find_too_old(ahead, finished)
        for admission in ahead:
            now = time.perf_counter()
            result = (
                None if admission.place in late_places else self.rounds.recall(admission, version, since=now)
            )
            if result is None:
                self._lost_admissions.append(admission._replace(ended=False))
                continue
            self._groups[admission.place] = _GroupState(
                admission=admission._replace(ended=True), since=now, stage="ready", played=result
            )
            if not admission.ended:  # it is in no row of the ledger yet
                self._new_results[admission.place] = self._unjudged_results[admission.place] = result
        return list(self._lost_admissions)

    @property
    def ahead(self) -> list[Admission]:
        """The groups in flight that are not being trained on, in stream order."""
        return sorted(
            [*self._lost_admissions, *self._list_admissions()], key=lambda admission: admission.place
        )

    @property
    def running(self) -> int:
        return sum(item.played is None for item in self._groups.values())

    @property
    def ready(self) -> int:
        return len(self._groups) - self.running

    @property
    def addresses(self) -> list[str]:
        """Spool addresses of the groups being trained on."""
        return [self.rounds.address(admission) for admission in self._training]

    @property
    def is_dry(self) -> bool:
        """Whether no group is in flight and every prompt has left the stream."""
        return not self.ahead and not self.rounds.places(self.cursor, self._retired_uids, 1)

    async def batch(self, finished: int, version: int) -> TrainBatch:
        """Admit groups to the policy ``version`` and wait, until there is a batch for the step after
        ``finished`` steps; then its groups count as in training, and the counts of admissions start anew.
        Raises the error of a group whose task has failed."""
        while True:
            self._collect_ended()
            self._raise_failure()
            self.admit(finished, version)
            choice = self.rule.choose(self._list_admissions(), finished)
            if not choice.awaited:
                return self._take_batch(choice)
            await self._has_ended.wait()

    def admit(self, finished: int, version: int) -> None:
        """Admit as many groups as there is room for and start them, lost ones first, after retiring solved
        prompts."""
        while room := self.rule.count_room([*self._training, *self._list_admissions()], finished):
            self._retire_solved()
            new_admissions = self._readmit_lost(room, finished, version) or self._admit_next(
                room, finished, version
            )
            if not new_admissions:
                return
            for admission in new_admissions:
                self._start_group(admission)

    def take_fresh(self) -> list[RolloutResult]:
        """Return the groups that have ended since the last call, in stream order, and retire the prompts
        that they solve. Their cost is charged to the row of this step."""
        self._collect_ended()
        self._retire_solved()
        results, self._new_results = self._new_results, {}
        return [results[place] for place in sorted(results)]

    def end_step(self) -> None:
        """Record that the step has ended: its groups are no longer in flight."""
        self._training = ()

    async def drain(self) -> None:
        """Wait until every running group has ended and is in the spool. Raises the error of a group that
        fails."""
        while self.running:
            await self._has_ended.wait()
            self._collect_ended()
            self._raise_failure()

    async def close(self) -> None:
        """End all running tasks."""
        await end_tasks(self._list_tasks())

    def describe_waiting(self) -> str:
        """Name the groups that have waited longest, each with its stage and its seconds in that stage."""
        running = [item for item in self._groups.values() if item.played is None]
        running.sort(key=lambda item: item.since)
        now, uid = time.perf_counter(), self.rounds.find_uid
        labels = [f"{uid(item.admission)} ({item.stage} for {now - item.since:.0f} s)" for item in running]
        suffix = f" and {len(labels) - MOST_NAMED} more" if len(labels) > MOST_NAMED else ""
        return ", ".join(labels[:MOST_NAMED]) + suffix or "nothing"

    # ---- internals

    @property
    def _retired_uids(self) -> Sequence[str]:
        return () if self.leaving is None else self.retired

    def _list_admissions(self) -> list[Admission]:
        return [item.admission for item in self._groups.values()]

    def _list_tasks(self) -> list[asyncio.Task[RolloutResult]]:
        return [item.task for item in self._groups.values() if item.task is not None]

    def _collect_ended(self) -> None:
        """Take the results of tasks that have ended without an error, and clear the event that announces
        them."""
        self._has_ended.clear()
        for place, item in self._groups.items():
            if (
                item.task is not None
                and item.task.done()
                and not (item.task.cancelled() or item.task.exception() is not None)
            ):
                item.played = self._new_results[place] = self._unjudged_results[place] = item.task.result()
                item.task, item.admission, item.stage = None, item.admission._replace(ended=True), "ready"

    def _raise_failure(self) -> None:
        """Raise the error of a group whose task has failed or was cancelled."""
        for task in self._list_tasks():
            if task.done():
                task.result()

    def _retire_solved(self) -> None:
        """Retire the prompts that the unjudged results show to be solved for good; these count as judged
        then."""
        groups = [self._unjudged_results.pop(place).group for place in sorted(self._unjudged_results)]
        if self.leaving is not None and groups:
            self.retired = (*self.retired, *self.leaving(groups, self.retired))

    def _readmit_lost(self, room: int, finished: int, version: int) -> list[Admission]:
        """Admit up to ``room`` lost groups again: noise and place stay, and their age counts from the new
        policy."""
        admissions, self._lost_admissions = self._lost_admissions[:room], self._lost_admissions[room:]
        self._num_anew += sum(admission.version != version for admission in admissions)
        return [admission._replace(step=finished, version=version, ended=False) for admission in admissions]

    def _admit_next(self, room: int, finished: int, version: int) -> list[Admission]:
        """Make new admissions from the stream, and advance the cursor; none if every prompt has left the
        stream."""
        places = self.rounds.places(self.cursor, self._retired_uids, room)
        num_before = len(self._groups) + len(self._training) + len(self._lost_admissions)
        new_admissions = [
            Admission(self.rule.find_round(num_before + i, finished), place, finished, version)
            for i, place in enumerate(places)
        ]
        if new_admissions:
            self.cursor = places[-1] + 1
            self._num_admitted += len(new_admissions)
        return new_admissions

    def _start_group(self, admission: Admission) -> None:
        state = self._groups[admission.place] = _GroupState(admission=admission, since=time.perf_counter())

        def on_generated() -> None:
            state.stage, state.since = "grading", time.perf_counter()
            self.on_progress()

        async def play_group() -> RolloutResult:
            result = await self.rounds.play(admission, since=state.since, generated=on_generated)
            self.on_progress()
            return result

        state.task = asyncio.create_task(play_group())
        state.task.add_done_callback(lambda task: self._has_ended.set())

    def _take_batch(self, choice: Selection) -> TrainBatch:
        batch = [self._groups.pop(place) for place in choice.batch]
        self._training = [item.admission for item in batch]
        train_batch = TrainBatch(
            batch=[item.played for item in batch if item.played is not None],
            num_admitted=self._num_admitted,
            num_anew=self._num_anew,
        )
        self._num_admitted, self._num_anew = 0, 0
        return train_batch


def find_places(tasks: Tasks, cursor: int, count: int, retired: Collection[str]) -> list[int]:
    """Return the next ``count`` indices of the stream from ``cursor`` on whose prompts (by uid) are not
    ``retired``.

    The next cursor is the last index plus 1. Empty if no prompt is left: 2 ``tasks.epoch`` places in a row
    contain every prompt. If fewer are left than are requested, a prompt comes once in each epoch, so more
    than once in a step.
    """
    if not retired:
        return list(range(cursor, cursor + count))
    indices, index, last_index = list[int](), cursor, cursor
    while len(indices) < count:
        if tasks.prompt(index).uid not in retired:
            last_index = index
            indices.append(index)
        elif index - last_index >= 2 * tasks.epoch:
            return []
        index += 1
    return indices


def find_solved(
    groups: Sequence[Group], *, share: float, solved_at: float, retired: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the uids, in order, of prompts to retire: at least two members of the group have a verdict, and
    at least ``share`` of these a reward of ``solved_at`` or more. Those in ``retired`` are left out."""
    uids: dict[str, None] = {}  # a set that keeps its order
    for group in groups:
        values = list_verdicts(group)
        rewards = values[np.isfinite(values)]
        is_solved = len(rewards) >= 2 and (rewards >= solved_at).mean() >= share
        if is_solved and group.prompt.uid not in retired:
            uids[group.prompt.uid] = None
    return tuple(uids)


class Admission(NamedTuple):
    """Identifies a group, and its age. A checkpoint has one for each group in flight."""

    round: int  # the step that trains on it if nothing intervenes; a part of its seed
    place: int  # of its prompt in the stream; no place is taken twice
    step: int  # the number of finished steps when it was admitted
    version: int  # of the policy that was published then
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Plays groups of ``group_size``, ``prompts`` in a round."""

    tasks: Tasks
    stage: RolloutContext
    spool: Spool
    prompts: int
    group_size: int
    seed: int
    staleness: int = 0

    def places(self, cursor: int, retired: Iterable[str], count: int = 0) -> list[int]:
        """Return stream indices of the next ``count`` prompts (0: a round of them), without ``retired`` ones;
        empty when all have left."""
        return find_places(self.tasks, cursor, count or self.prompts, frozenset(retired))

    async def play(
        self, admission: Admission, *, since: float, generated: Callable[[], None] = lambda: None
    ) -> RolloutResult:
        """Play the group and store it in the spool, or take it from there, with ``since`` as its times.
        ``generated`` is called when the last answer is sampled and only the verdict is missing; not for a
        group of the spool."""
        result = self.recall(admission, admission.version, since=since)
        if result is not None:
            return result
        ask = self._make_request(admission)
        played = await rollout_group(self.stage, ask, generated)
        self.spool.put(self.address(admission), played.group, last_step=admission.step + self.staleness + 1)
        return played

    def recall(self, admission: Admission, version: int, *, since: float) -> RolloutResult | None:
        """Take the group, as an earlier process played it, from the spool, which returns it once. None if
        the spool does not have it, or if it has tokens of a policy later than ``version``, which does not
        exist in this run, or not yet."""
        return self.spool.take(self.address(admission), self._make_request(admission), since, newest=version)

    def find_uid(self, admission: Admission) -> str:
        """Return the uid of the prompt of an admission."""
        return self.tasks.prompt(admission.place).uid

    def address(self, admission: Admission) -> str:
        return make_address(self._make_request(admission), self.stage, admission.version)

    def _make_request(self, admission: Admission) -> RolloutRequest:
        return RolloutRequest(
            prompt=self.tasks.prompt(admission.place),
            seed=(self.seed, admission.round, admission.place),
            group_size=self.group_size,
            step=admission.round,
        )
