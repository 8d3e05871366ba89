"""The stream of prompts: who is solved leaves for good, and nobody else notices."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion, episode, group_of

from ostinato.env.tasks import Rows
from ostinato.pipeline.stream import places, solved_for_good
from ostinato.types import Group, Prompt

PROMPTS = 7
NAMES = [f"p{n}" for n in range(PROMPTS)]


def rows(seed: int) -> Rows:
    return Rows([Prompt(uid=name, text="?") for name in NAMES], seed=seed)


def places_slow(tasks: Rows, cursor: int, count: int, retired: Sequence[str]) -> list[int]:
    """The twin: write out many epochs, strike out who has left, and read on from the cursor."""
    epochs = 2 + cursor // PROMPTS + count * PROMPTS
    written = [(index, tasks.prompt(index).uid) for index in range(epochs * PROMPTS)]
    return [index for index, uid in written if index >= cursor and uid not in retired][:count]


gone = st.lists(st.sampled_from(NAMES), unique=True, max_size=PROMPTS)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 9), cursor=st.integers(0, 30), count=st.integers(1, 6), retired=gone)
def test_places_against_the_slow_twin(seed: int, cursor: int, count: int, retired: list[str]) -> None:
    assert places(rows(seed), cursor, count, retired) == places_slow(rows(seed), cursor, count, retired)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 9), count=st.integers(1, 5), leaving=st.lists(gone, max_size=6))
def test_who_left_never_comes_again_and_the_others_keep_their_order(
    seed: int, count: int, leaving: list[list[str]]
) -> None:
    """Steps of ``count`` prompts, after each of which some leave; all that is carried is cursor and names."""
    tasks, cursor, retired, walked = rows(seed), 0, [], []
    for names in leaving:
        step = places(tasks, cursor, count, retired)
        if not step:
            break
        assert len(step) == count and not {tasks.prompt(index).uid for index in step} & set(retired)
        walked += step
        cursor = step[-1] + 1
        retired += [name for name in names if name not in retired]
    assert walked == sorted(set(walked))  # no place twice: no prompt twice in an epoch
    passed = set(range(cursor)) - set(walked)
    assert {tasks.prompt(index).uid for index in passed} <= set(retired)


def test_nobody_left_is_an_empty_step() -> None:
    """From the second place of an epoch to the last but one of the next, more places than an epoch has may be
    of prompts that left, though one is there yet: only twice as many prove that nobody is."""
    seed, late = next(  # first in epoch 0 and last in epoch 1
        (seed, first)
        for seed in range(100)
        if (first := rows(seed).prompt(0).uid) == rows(seed).prompt(2 * PROMPTS - 1).uid
    )
    others = [name for name in NAMES if name != late]
    assert places(rows(seed), 1, 1, others) == [2 * PROMPTS - 1]
    assert places(rows(seed), 3, 2, NAMES) == []


def group(uid: str, rewards: Sequence[float | None]) -> Group:
    return group_of(*(episode(completion(1), reward=value) for value in rewards), uid=uid)


@pytest.mark.parametrize(
    ("rewards", "leaves"),
    [
        ([1.0] * 9 + [-1.0], True),  # 0.9 is enough, in any count
        ([1.0] * 18 + [0.0] * 2, True),
        ([1.0] * 14 + [0.0] * 2, False),  # 0.875
        ([1.0, 1.0, None], True),  # of those with a verdict
        ([1.0, None, None], False),  # one is no rate
        ([0.5, 0.5], False),
        ([], False),
    ],
)
def test_nine_of_ten_are_solved_for_good(rewards: list[float | None], leaves: bool) -> None:
    assert solved_for_good([group("a", rewards)], share=0.9, solved_at=1.0) == ("a",) * leaves


def test_each_leaves_once_and_in_order() -> None:
    groups = [group(uid, [1.0, 1.0]) for uid in "bacb"]
    assert solved_for_good(groups, share=0.9, solved_at=1.0, retired={"c"}) == ("b", "a")
