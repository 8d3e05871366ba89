"""The schedule of continuous batching, against a plain one that goes a step at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.plan.decode import dealt, decode_seconds, occupancy


def plain(lengths: list[int], seats: int) -> list[tuple[int, float]]:
    """(sequences, mean tokens that they have said, in the middle of the step) of every decode step."""
    waiting, running, steps = list(lengths), list[list[int]](), []
    while waiting or running:
        while waiting and len(running) < seats:
            running.append([waiting.pop(0), 0])
        steps.append((len(running), float(np.mean([said for _, said in running])) + 0.5))
        for seat in running:
            seat[1] += 1
        running = [seat for seat in running if seat[1] < seat[0]]
    return steps


answers = st.lists(st.integers(1, 30), min_size=1, max_size=24)


@given(answers, st.integers(1, 26))
def test_equals_the_plain_schedule(lengths: list[int], seats: int) -> None:
    rooms, steps = occupancy(lengths, seats), plain(lengths, seats)
    assert rooms.longest == len(steps)
    assert rooms.tokens == sum(lengths) == sum(n for n, _ in steps)
    said = decode_seconds(rooms, lambda sequences, said: sequences * said)
    assert said == pytest.approx(sum(n * mean for n, mean in steps))


@given(answers, st.integers(1, 26))
def test_more_seats_never_take_more_steps_than_one_after_the_other(lengths: list[int], seats: int) -> None:
    longest = occupancy(lengths, seats).longest
    assert max(lengths) <= longest <= sum(lengths)
    assert occupancy(lengths, len(lengths)).longest == max(lengths)


def test_who_has_the_longest_answer_is_dealt_like_all_others_but_for_it() -> None:
    sample = tuple(range(1, 1001))
    lengths = dealt(sample, number=512, replicas=8)
    assert len(lengths) == 64 and max(lengths) >= 999
    assert np.mean(lengths) == pytest.approx(500.5, rel=0.01)
    assert lengths == dealt(sample, number=512, replicas=8)
    assert list(lengths) != sorted(lengths)
    assert dealt(sample, number=1, replicas=1) == (500,)
    assert dealt((7,), number=9, replicas=2) == (7,) * 5


@pytest.mark.parametrize(("lengths", "seats"), [([], 1), ([3], 0), ([0], 1)])
def test_nothing_to_decode_is_refused(lengths: list[int], seats: int) -> None:
    with pytest.raises(ValueError, match="at least 1 of each"):
        occupancy(lengths, seats)
