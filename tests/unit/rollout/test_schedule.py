"""Placements: every answer once, equal workers alike, nothing overfull, tiers feasible."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.protocols import Job, Worker
from ostinato.rollout.schedule import (
    Policy,
    assign_lanes,
    count_tier_workers,
    find_placement,
    predict_remaining,
)

LENGTHS = st.one_of(st.floats(1, 5000), st.just(math.inf))


def affine(batch: int, attended: float) -> float:
    return 1.0 + 0.1 * batch + 1e-5 * attended


@st.composite
def waits(draw: st.DrawFn, first: int = 0, most: int = 30) -> list[Job]:
    """Answers to prompts of up to three rounds, in any order; siblings are predicted alike."""
    groups = draw(st.lists(st.tuples(st.integers(1, 3), LENGTHS, st.integers(1, 4)), max_size=most // 4))
    jobs = [
        Job(id=0, step=step, place=place, predicted=predicted, prompt=7)
        for place, (step, predicted, siblings) in enumerate(groups)
        for _ in range(siblings)
    ]
    jobs = [replace(job, id=first + i) for i, job in enumerate(jobs)]
    return draw(st.permutations(jobs)) if jobs else []


@st.composite
def teams(draw: st.DrawFn, busy: bool = True) -> list[Worker]:
    slots = draw(st.integers(1, 12))
    made = []
    for id in range(draw(st.integers(1, 6))):
        held = draw(waits(first=1000 * (id + 1), most=16)) if busy else []
        had = [replace(job, generated=draw(st.integers(0, 3000))) for job in held]  # they may queue there
        made.append(Worker(id=id, slots=slots, jobs=tuple(had), pass_s=affine))
    return made


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(Policy), waits(), teams() | teams(busy=False))
def test_every_answer_is_placed_once_or_waits(policy: Policy, waiting: list[Job], team: list[Worker]) -> None:
    plan = find_placement(policy)(waiting, team)
    assert len({job for job, _ in plan}) == len(plan)
    assert {job for job, _ in plan} <= {job.id for job in waiting}
    assert {worker for _, worker in plan} <= {worker.id for worker in team}
    if policy is Policy.HISTOPIPE:  # it deals all that is new at once, and the workers queue
        assert any(worker.jobs for worker in team) or len(plan) == len(waiting)
        return
    got = Counter(worker for _, worker in plan)
    room = {worker.id: max(0, worker.slots - len(worker.jobs)) for worker in team}
    assert all(got[id] <= most for id, most in room.items())
    assert len(plan) == min(sum(room.values()), len(waiting)), "no call waits while there is room"


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(Policy), waits(), teams(), st.randoms(use_true_random=False))
def test_the_order_in_which_workers_and_answers_are_told_changes_nothing(
    policy: Policy, waiting: list[Job], team: list[Worker], chance: random.Random
) -> None:
    """Ties go to the lowest id: a pool that lists its workers in another order plans the same. Of two workers
    with nothing to do the one that was listed first had taken over answers of a third."""
    place = find_placement(policy)
    others, shuffled = chance.sample(team, len(team)), chance.sample(waiting, len(waiting))
    assert place(shuffled, others) == place(waiting, team)


@settings(max_examples=30, deadline=None)
@given(waits(), st.integers(1, 6))
def test_equal_workers_are_loaded_alike_whatever_they_are_called(waiting: list[Job], count: int) -> None:
    for policy in Policy:
        loads = []
        for ids in (range(count), range(50, 50 + count)):
            team = [Worker(id=id, slots=40, pass_s=affine) for id in ids]
            starts = find_placement(policy)(waiting, team)
            loads.append(sorted(Counter(worker for _, worker in starts).values()))
        assert loads[0] == loads[1]


def test_a_later_turn_goes_back_to_where_its_prefix_is() -> None:
    team = [Worker(id=id, slots=4) for id in range(3)]
    turn = Job(id=1, step=1, place=0, home=2)
    for policy in (Policy.LEAST_LOADED, Policy.LONGEST_FIRST, Policy.HISTOPIPE):
        assert find_placement(policy)([turn], team) == ((1, 2),)
        full = [*team[:2], replace(team[2], jobs=tuple(Job(id=9 + i, step=1, place=9) for i in range(4)))]
        assert find_placement(policy)([turn], full) == ((1, 0),)
        assert find_placement(policy)([turn], team[:2]) == ((1, 0),), "its home is lost"


def test_siblings_stay_together_while_others_wait() -> None:
    """A prompt is read once where its siblings are; on a CPU reading is as dear as sampling, and a queue of
    single answers was slower than none (docs/histopipe.md). A divided group costs less than idling."""
    team = [Worker(id=id, slots=4) for id in range(2)]
    known = {"prompt": 30, "predicted": 40.0}
    waiting = [Job(id=10 * place + n, step=1, place=place, **known) for place in range(4) for n in range(3)]
    place = find_placement("least-loaded")
    first = place(waiting, team)
    assert first == ((0, 0), (1, 0), (2, 0), (10, 1), (11, 1), (12, 1), (20, 0), (30, 1))
    now = [
        Worker(id=0, slots=4, jobs=(waiting[0], waiting[6])),  # 1 and 2 have ended
        Worker(id=1, slots=4, jobs=(*waiting[3:6], waiting[9])),
    ]
    left = [job for job in waiting if job.id not in dict(first)]
    assert place(left, now) == ((21, 0), (22, 0)), "its own siblings"
    assert place(left[2:], now) == ((31, 0), (32, 0)), "another's, rather than nothing"
    long = [replace(job, predicted=4000.0) for job in waiting]
    spread = [0, 1, 0, 1, 0, 1, 0, 1]
    assert [worker for _, worker in place(long, team)] == spread, "where answers dwarf their prompt"


def test_the_longest_are_begun_first_but_no_round_before_an_earlier_one() -> None:
    waiting = [
        Job(id=i, step=step, place=i, predicted=tokens)
        for i, (step, tokens) in enumerate([(2, 900.0), (1, 100.0), (1, 300.0), (2, 50.0), (1, 200.0)])
    ]
    plan = find_placement("longest-first")(waiting, [Worker(id=0, slots=4)])
    assert [job for job, _ in plan] == [2, 4, 1, 0]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to give ``parts`` at least one each of ``total``."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(1, 500), min_size=1, max_size=3), st.integers(0, 6), st.integers(1, 20))
def test_tiers_meet_linear_targets_as_well_as_any_division_of_the_workers(
    means: list[float], spare: int, slots: int
) -> None:
    longest, workers = sorted(means), len(means) + spare
    tokens = [16 * mean for mean in longest]

    def seconds(i: int, count: int) -> float:
        batch = max(1, min(slots, math.ceil(16 / count)))
        return affine(batch, batch * longest[i] / 2) * max(longest[i], tokens[i] / count / batch)

    last, equal = len(means) - 1, workers // len(means)
    first = min(1.0, seconds(0, equal) / seconds(last, equal))
    shares = [first + (1 - first) * (i / last if last else 1.0) for i in range(last + 1)]

    def missed(counts: Sequence[int]) -> float:
        return max(seconds(i, count) / shares[i] for i, count in enumerate(counts))

    counts = count_tier_workers(tokens, longest, [16] * len(means), slots, workers, affine)
    assert min(counts) >= 1
    assert sum(counts) == workers
    assert missed(counts) <= 1.01 * min(map(missed, compositions(workers, len(means))))


def test_who_is_dealt_more_than_it_has_room_for_ends_no_plan() -> None:
    """Those that deal at once leave queues with the workers. Their room was negative, which is true in
    Python, and the plan looked for an answer to fill it without end."""
    full = tuple(Job(id=10 + i, step=1, place=i) for i in range(5))
    team = [Worker(id=0, slots=2, jobs=full), Worker(id=1, slots=2, jobs=full[:2])]
    waiting = [Job(id=0, step=1, place=9, home=0), Job(id=1, step=1, place=9, generated=3)]
    for policy in (Policy.HISTOPIPE, Policy.LEAST_LOADED, Policy.LONGEST_FIRST):
        assert find_placement(policy)(waiting, team) == ()


def test_a_first_round_of_which_nothing_is_known_is_dealt() -> None:
    """Two ranking groups for two workers, and the search for their tiers had missed one each by rounding."""
    team = [Worker(id=id, slots=16) for id in range(2)]
    waiting = [Job(id=8 * place + n, step=1, place=place) for place in range(24) for n in range(8)]
    starts = find_placement("histopipe")(waiting, team)
    assert Counter(worker for _, worker in starts) == {0: 96, 1: 96}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.1, 50), min_size=16, max_size=16),
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.integers(0, 9),
)
def test_tiers_divide_the_workers_whatever_passes_cost(
    costs: list[float], answers: list[int], spare: int
) -> None:
    """Measured times of a pass need not grow with its batch."""
    longest = [float(10 * (i + 1)) for i in range(len(answers))]
    tokens = [n * most / 2 for n, most in zip(answers, longest, strict=True)]
    workers = len(answers) + spare
    counts = count_tier_workers(
        tokens, longest, answers, 16, workers, lambda batch, attended: costs[batch - 1]
    )
    assert min(counts) >= 1
    assert sum(counts) == workers


def test_more_ranking_groups_than_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="3 ranking groups for 2 workers"):
        count_tier_workers([1.0] * 3, [1.0] * 3, [1] * 3, 4, 2, affine)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.floats(1, 100), st.floats(0, 50), st.integers(1, 30), st.randoms())
def test_forth_and_back_leave_no_bubble_where_times_are_linear(
    ranks: int, first: float, more: float, step: int, chance: random.Random
) -> None:
    """z_i + z_(G-1-i) is the same for every rank i: after two rounds all workers end together (section 3 of
    RhymeRL, arXiv 2508.18588)."""
    times = [first + more * rank for rank in range(ranks)]
    chance.shuffle(times)
    ends = [0.0] * ranks
    for now in (step, step + 1):
        places = assign_lanes(
            np.array(times), 1.0, [1] * ranks, lambda batch, attended: 1.0, now, ranks=ranks
        )
        assert sorted(places) == list(range(ranks))
        for group, worker in enumerate(places):
            ends[worker] += times[group]
    assert max(ends) == pytest.approx(min(ends))


def test_what_is_not_known_is_taken_to_be_as_the_rest() -> None:
    jobs = [Job(id=0, step=1, place=0, predicted=100.0, generated=40), Job(id=1, step=1, place=1)]
    assert predict_remaining(jobs).tolist() == [60.0, 60.0]
    assert predict_remaining(jobs[1:]).tolist() == [1.0]
