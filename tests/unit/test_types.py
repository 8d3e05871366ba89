"""The nouns: what holds arrays is told briefly."""

from __future__ import annotations

import asyncio

import numpy as np

from ostinato.types import Completion, Group, Prompt, Stop, Trajectory, Turn


def group(num_tokens: int, kind: type[np.ndarray] = np.ndarray) -> Group:
    tokens = np.arange(num_tokens, dtype=np.int32).view(kind)
    zeros = np.zeros(num_tokens, np.float32).view(kind)
    completion = Completion(
        tokens=tokens, logprobs=zeros, versions=tokens, stop=Stop.EOS, text="word " * num_tokens
    )
    turn = Turn(context=tokens, completion=completion)
    trajectory = Trajectory(turns=(turn,), stop=Stop.EOS, seed=(1, 2))
    return Group(prompt=Prompt(uid="p", text="?"), trajectories=(trajectory,) * 16, step=3)


def test_a_repr_says_how_much_there_is_and_not_all_of_it() -> None:
    one = group(900)
    assert "trajectories=<16 Trajectory>" in repr(one) and "step=3" in repr(one)
    (trajectory, *_), completion = one.trajectories, one.trajectories[0].turns[0].completion
    assert "turns=<1 Turn>" in repr(trajectory)
    assert "tokens=int32[900]" in repr(completion) and "experts=None" in repr(completion)
    assert all(len(repr(value)) < 500 for value in (one, trajectory, completion))


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
