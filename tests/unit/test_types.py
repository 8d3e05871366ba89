"""The nouns: what holds arrays has a brief repr."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.types import Completion, Group, Prompt, Stop, Support, Trajectory, Turn


def group(num_tokens: int, kind: type[np.ndarray] = np.ndarray) -> Group:
    tokens = np.arange(num_tokens, dtype=np.int32).view(kind)
    zeros = np.zeros(num_tokens, np.float32).view(kind)
    completion = Completion(
        tokens=tokens, logprobs=zeros, versions=tokens, stop=Stop.EOS, text="word " * num_tokens
    )
    turn = Turn(context=tokens, completion=completion)
    trajectory = Trajectory(turns=(turn,), stop=Stop.EOS, seed=(1, 2))
    return Group(prompt=Prompt(uid="p", text="?"), trajectories=(trajectory,) * 16, step=3)


class Loud(np.ndarray):
    """An array that breaks when it is printed."""

    def __repr__(self) -> str:
        raise AssertionError("an array was printed")


def test_asyncio_run_prints_no_array_when_it_ends() -> None:
    """Half of a rollout's Python time was once spent on printing it. ``asyncio.run`` ends by asking
    ``signal`` for its handler, and ``signal`` formats that (the main task in it, and the task's result) for
    the message of an exception that it throws away: thousands of array reprs for a result of 16 groups."""

    async def played() -> list[Group]:
        return [group(3, Loud)] * 2

    assert len(asyncio.run(played())) == 2


KEPT = st.lists(st.sets(st.integers(0, 9), max_size=5).map(sorted), max_size=12)


@settings(max_examples=50, deadline=None)
@given(kept=KEPT, size=st.integers(1, 5), seed=st.integers(0, 99))
def test_a_support_is_a_ragged_list_of_ids(kept: list[list[int]], size: int, seed: int) -> None:
    def listed(support: Support) -> list[list[int]]:
        return [ids.tolist() for ids in np.split(support.ids, np.cumsum(support.counts))[:-1]]

    support = Support.of([np.array(ids, np.int32) for ids in kept])
    assert (len(support), support.counts.dtype, support.ids.dtype) == (len(kept), np.int32, np.int32)
    assert listed(support) == kept
    pieces = support.split(size)
    assert [listed(piece) for piece in pieces] == [kept[i : i + size] for i in range(0, len(kept), size)]
    if pieces:
        assert listed(Support.concatenate([*pieces, Support.whole(2)])) == [*kept, [], []]
    rng = np.random.default_rng(seed)
    some = np.flatnonzero(rng.random(len(kept)) < 0.5)
    assert listed(support.take(some)) == [kept[i] for i in some]
    tokens = rng.integers(0, 10, len(kept))
    wanted = [not ids or token in ids for ids, token in zip(kept, tokens.tolist(), strict=True)]
    assert support.holds(tokens).tolist() == wanted


def test_a_support_whose_counts_do_not_add_up_is_refused() -> None:
    with pytest.raises(ValueError, match="has 2 ids where its counts add up to 3"):
        Support(counts=np.array([1, 2], np.int32), ids=np.array([4, 5], np.int32))
