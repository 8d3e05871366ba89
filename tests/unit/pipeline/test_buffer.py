"""The rule of the feed by itself: whatever ends first and whatever is killed, nothing too old is trained
on."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.pipeline.buffer import Admission, AdmissionRule, Selection


class World:
    """Groups by place. A move lets one end, perhaps kills one (the policy of now plays it anew), or
    trains."""

    def __init__(self, rule: AdmissionRule, seed: int, kills: float = 0.0) -> None:
        self.rule, self.random, self.kills = rule, random.Random(seed), kills
        self.held: dict[int, Admission] = {}
        self.finished = self.admitted = 0
        self.trained: list[tuple[Admission, ...]] = []

    def admit(self) -> None:
        while room := self.rule.count_room(list(self.held.values()), self.finished):
            for _ in range(room):
                round = self.rule.find_round(len(self.held), self.finished)
                self.held[self.admitted] = Admission(round, self.admitted, self.finished, self.finished)
                self.admitted += 1

    def move(self) -> Selection:
        self.admit()
        choice = self.rule.choose(list(self.held.values()), self.finished)
        if choice.awaited:
            assert not choice.batch
            assert all(not self.held[place].ended for place in choice.awaited)
            self.somebody_ends()
        else:
            self.train(choice)
        return choice

    def somebody_ends(self) -> None:
        running = [place for place, one in self.held.items() if not one.ended]
        place = self.random.choice(running)
        self.held[place] = self.held[place]._replace(ended=True)
        if self.random.random() < self.kills:
            place = self.random.choice(list(self.held))
            anew = self.held[place]._replace(step=self.finished, version=self.finished, ended=False)
            self.held[place] = anew

    def train(self, choice: Selection) -> None:
        self.trained.append(tuple(self.held.pop(place) for place in choice.batch))
        self.finished += 1

    def run(self) -> None:
        while self.finished < self.rule.steps:
            self.move()
            done = sum(map(len, self.trained))
            assert self.admitted == done + len(self.held)


def ages(world: World) -> list[int]:
    return [step - one.step for step, batch in enumerate(world.trained) for one in batch]


RULES = st.builds(
    AdmissionRule,
    prompts=st.integers(1, 4),
    staleness=st.integers(0, 4),
    steps=st.integers(1, 9),
    overlap=st.just(True),
)


@settings(max_examples=150, deadline=None)
@given(RULES, st.integers(0, 10**6), st.sampled_from([0.0, 0.2, 0.7]))
def test_no_group_is_too_old_whatever_ends_first_and_whoever_is_killed(
    rule: AdmissionRule, seed: int, kills: float
) -> None:
    """And every batch has its N groups, of which each was trained on once; nothing is dropped."""
    world = World(rule, seed, kills)
    world.run()
    assert max(ages(world)) <= rule.staleness
    assert all(len(batch) == rule.prompts and all(one.ended for one in batch) for batch in world.trained)
    places = [one.place for batch in world.trained for one in batch]
    assert sorted(places) == list(range(rule.steps * rule.prompts))


@given(RULES, st.integers(0, 10**6))
def test_who_is_late_is_waited_for_and_nobody_else(rule: AdmissionRule, seed: int) -> None:
    """As N groups are admitted after each step and (k + 1) N are on their way, a batch is the whole round
    that was admitted k steps before, but for the first k + 1 steps, which share what was admitted at the
    start."""
    world = World(rule, seed)
    while world.finished < rule.steps:
        world.admit()
        held, finished = dict(world.held), world.finished
        choice = world.move()
        if finished > rule.staleness and choice.awaited:
            due = {place for place, one in held.items() if world.rule.find_deadline(one) == finished}
            assert set(choice.awaited) <= due
    assert ages(world) == [
        min(step, rule.staleness) for step in range(rule.steps) for _ in range(rule.prompts)
    ]


@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 9), st.integers(0, 10**6))
def test_without_overlap_it_is_in_lockstep(prompts: int, staleness: int, steps: int, seed: int) -> None:
    """The twin: step s trains on places (s - 1) N to s N - 1, and round r is admitted when round r - 1 has
    ended and at most k steps before its own."""
    world = World(AdmissionRule(prompts=prompts, staleness=staleness, steps=steps), seed)
    while world.finished < steps:
        before = world.admitted
        running = sum(not one.ended for one in world.held.values())
        world.move()
        assert world.admitted - before in (0, prompts) and not (running and world.admitted > before)
    for step, batch in enumerate(world.trained):
        assert [one.place for one in batch] == list(range(step * prompts, (step + 1) * prompts))
        assert {one.round for one in batch} == {step + 1}
        assert {one.step for one in batch} == {max(0, step - staleness)}


def held(*groups: tuple[int, int, bool]) -> list[Admission]:
    """(place, finished steps when it was admitted, has it ended?)."""
    return [Admission(1, place, step, step, ended) for place, step, ended in groups]


def test_a_batch_by_hand() -> None:
    """k = 1, two groups a step. After one step place 1 is due; 2 and 3 are not, and have ended."""
    rule = AdmissionRule(prompts=2, staleness=1, steps=9, overlap=True)
    some = held((1, 0, False), (2, 1, True), (3, 1, True))
    assert rule.choose(some, 1) == Selection(awaited=(1,))
    assert rule.count_room(some, 1) == 1  # of four
    assert rule.choose(held((1, 0, True), (2, 1, False), (3, 1, True)), 1) == Selection(batch=(1, 3))


def overdue_slow(rule: AdmissionRule, left: Sequence[Admission], finished: int) -> set[int]:
    """By counting, deadline after deadline."""
    for steps in range(rule.staleness + 1):
        due = [one for one in left if rule.find_deadline(one) <= finished + steps]
        if len(due) > steps * rule.prompts:
            return {one.place for one in due}
    return set()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12), st.integers(1, 3), st.integers(0, 4)
)
def test_overdue_against_the_slow_twin(groups: list[tuple[int, bool]], prompts: int, staleness: int) -> None:
    finished = 4
    some = held(*((place, min(finished, step), ended) for place, (step, ended) in enumerate(groups)))
    some = [one for one in some if one.step + staleness >= finished]
    rule = AdmissionRule(prompts=prompts, staleness=staleness, steps=99, overlap=True)
    order = sorted((one for one in some if one.ended), key=lambda one: (one.step, one.place))
    batch = [one.place for one in order[:prompts]]
    left = [one for one in some if one.place not in batch]
    running = {one.place for one in some if not one.ended}
    late = overdue_slow(rule, left, finished) & running
    choice = rule.choose(some, finished)
    if late or len(batch) < min(prompts, len(some)):
        assert set(choice.awaited) == (late or running)
    else:
        assert choice == Selection(batch=tuple(sorted(batch)))


@pytest.mark.parametrize(
    ("staleness", "prompts", "late"), [(2, 2, ()), (1, 2, (0, 1)), (0, 2, (0, 1, 2, 3)), (2, 1, (1, 3))]
)
def test_a_changed_recipe_finds_who_is_too_old(staleness: int, prompts: int, late: Sequence[int]) -> None:
    """Two rounds of two were admitted after one and after two steps; three are finished. With less staleness,
    or fewer groups a step, some would wait too long, one behind the other."""
    some = held((0, 1, True), (1, 1, True), (2, 2, True), (3, 2, True))
    rule = AdmissionRule(prompts=prompts, staleness=staleness, steps=9, overlap=True)
    assert rule.find_too_old(some, 3) == late
