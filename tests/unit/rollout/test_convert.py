"""Trajectory -> Sample: every token is kept as it was, and every array describes the token at its place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.rollout.convert import make_samples
from ostinato.types import NO_EXPERT, Completion, Group, Prompt, Stop, Support, Trajectory, Turn

TURNS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4)


def route(tokens: np.ndarray, start: int) -> np.ndarray:
    """[T, 2, 1] routes that name the absolute position of each token."""
    places = np.arange(start, start + len(tokens), dtype=np.int16)
    return np.stack([places, places + 1000], axis=1)[:, :, None]


def trajectory(lengths: list[tuple[int, int]], *, seed: int = 0, routed: bool = True) -> Trajectory:
    """Turns of (context, answer) lengths with distinct tokens and, as engines give them, the routes of the
    whole history before each answer and no route for the last token of it."""
    turns, position = [], 0
    for number, (context_len, answer_len) in enumerate(lengths):
        context = np.arange(position, position + context_len, dtype=np.int32)
        answer = np.arange(position + context_len, position + context_len + answer_len, dtype=np.int32)
        experts = route(answer, position + context_len)
        experts[-1] = NO_EXPERT
        completion = Completion(
            tokens=answer,
            logprobs=-answer.astype(np.float32),
            versions=np.full(answer_len, number, np.int32),
            stop=Stop.EOS,
            experts=experts if routed else None,
            prompt_experts=route(np.arange(position + context_len), 0) if routed else None,
        )
        turns.append(Turn(context=context, completion=completion))
        position += context_len + answer_len
    return Trajectory(turns=tuple(turns), stop=Stop.EOS, seed=(0, 1, 0, seed))


def group(*trajectories: Trajectory) -> Group:
    return Group(prompt=Prompt(uid="p", text="p"), trajectories=trajectories, step=1)


def test_the_worked_example() -> None:
    """Prompt P P, answer A A, tool reply R, answer B: the table in the docstring of Sample."""
    (sample,) = make_samples(group(trajectory([(2, 2), (1, 1)])), 7, np.array([0.5]))
    assert sample.tokens.tolist() == [0, 1, 2, 3, 4, 5]
    assert sample.loss_mask.tolist() == [False, False, True, True, False, True]
    assert sample.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0.5]
    assert sample.logprobs.tolist() == [0, 0, -2, -3, 0, -5]
    assert sample.versions.tolist() == [-1, -1, 0, 0, -1, 1]
    assert (sample.group, sample.prompt_len, sample.uid) == (7, 2, "p#0")


@settings(max_examples=40, deadline=None)
@given(lengths=TURNS, advantage=st.floats(-3, 3, width=32))
def test_token_identity_masks_and_alignment(lengths: list[tuple[int, int]], advantage: float) -> None:
    played = trajectory(lengths)
    (sample,) = make_samples(group(played), 0, np.array([advantage]))
    done_ = np.concatenate([turn.completion.tokens for turn in played.turns])
    heard = np.concatenate([turn.context for turn in played.turns])
    assert len(sample.tokens) == len(done_) + len(heard)
    np.testing.assert_array_equal(sample.tokens[sample.loss_mask], done_)
    np.testing.assert_array_equal(sample.tokens[~sample.loss_mask], heard)
    np.testing.assert_array_equal(sample.logprobs, np.where(sample.loss_mask, -sample.tokens, 0))
    np.testing.assert_array_equal(sample.advantages, np.where(sample.loss_mask, advantage, 0))
    np.testing.assert_array_equal(sample.versions == -1, ~sample.loss_mask)
    assert sample.prompt_len == lengths[0][0] and not sample.loss_mask[: sample.prompt_len].any()
    assert sample.experts is not None
    np.testing.assert_array_equal(sample.experts[:-1], route(sample.tokens, 0)[:-1])
    assert (sample.experts[-1] == NO_EXPERT).all()


def test_the_route_that_a_token_was_sampled_through_wins() -> None:
    """A later turn may recompute earlier tokens (evicted cache) and route them otherwise. Log-probabilities
    came from the first pass: its routes are replayed, but for the token that it could not route."""
    played = trajectory([(1, 2), (1, 1)])
    second = played.turns[1].completion
    assert second.prompt_experts is not None
    second.prompt_experts[:] = 77
    (sample,) = make_samples(group(played), 0, np.array([1.0]))
    assert sample.experts is not None
    assert sample.experts[:, 0, 0].tolist() == [0, 1, 77, 77, NO_EXPERT]


@settings(max_examples=30, deadline=None)
@given(lengths=TURNS, data=st.data())
def test_turns_may_hand_out_only_the_routes_that_are_new(
    lengths: list[tuple[int, int]], data: st.DataObject
) -> None:
    """From any row up to that of the last answer's last token, which no record has yet."""
    played, turns, known = trajectory(lengths), [], 0
    for turn in played.turns:
        prompt = turn.completion.prompt_experts
        assert prompt is not None
        start = data.draw(st.integers(0, known - 1)) if known else 0
        known = len(prompt) + len(turn.completion.tokens)
        turns.append(replace(turn, completion=replace(turn.completion, prompt_experts=prompt[start:])))
    (full,), (part,) = (
        make_samples(group(one), 0, np.ones(1)) for one in (played, replace(played, turns=tuple(turns)))
    )
    np.testing.assert_array_equal(part.experts, full.experts)  # type: ignore[arg-type]


def test_a_part_without_routes_means_no_routes() -> None:
    assert make_samples(group(trajectory([(2, 2)], routed=False)), 0, np.array([1.0]))[0].experts is None
    played = trajectory([(2, 2), (1, 1)])
    hole = played.turns[0].completion
    assert hole.experts is not None
    mixed = Trajectory(
        turns=(played.turns[0], trajectory([(2, 2), (1, 1)], routed=False).turns[1]), stop=Stop.EOS, seed=(0,)
    )
    assert make_samples(group(mixed), 0, np.array([1.0]))[0].experts is None
    hole.experts[0] = NO_EXPERT
    assert played.turns[1].completion.prompt_experts is not None
    played.turns[1].completion.prompt_experts[2] = NO_EXPERT
    assert make_samples(group(played), 0, np.array([1.0]))[0].experts is None
    first, second = trajectory([(2, 2), (1, 1)]).turns
    assert second.completion.prompt_experts is not None
    late = replace(second.completion, prompt_experts=second.completion.prompt_experts[4:])
    gap = Trajectory(turns=(first, replace(second, completion=late)), stop=Stop.EOS, seed=(0,))
    assert (
        make_samples(group(gap), 0, np.array([1.0]))[0].experts is None
    )  # no record has the answer's last token


def test_supports_are_merged_over_turns_and_context_is_free() -> None:
    """P P A A R B, the first answer drawn from recorded ids, the second from the whole vocabulary."""
    played = trajectory([(2, 2), (1, 1)])
    assert make_samples(group(played), 0, np.array([1.0]))[0].support is None
    first, second = played.turns
    kept = Support.of([np.array(ids, np.int32) for ids in ([1, 2], [0, 3, 9])])
    drawn = Turn(context=first.context, completion=replace(first.completion, support=kept))
    mixed = Trajectory(turns=(drawn, second), stop=Stop.EOS, seed=(0,))
    (sample,) = make_samples(group(mixed), 0, np.array([1.0]))
    assert sample.support is not None
    assert sample.support.counts.tolist() == [0, 0, 2, 3, 0, 0]
    assert sample.support.ids.tolist() == [1, 2, 0, 3, 9]


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        make_samples(group(trajectory([(1, 1)])), 0, np.zeros(2))
    with pytest.raises(ValueError, match="no turns"):
        make_samples(group(Trajectory(turns=(), stop=Stop.ERROR, seed=())), 0, np.zeros(1))
