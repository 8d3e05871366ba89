"""Drafts in a run: what is remembered, what is counted, and that neither can change a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import nouns
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.pipeline.draft_metrics import CONTEXT, Likeness, counts, course, pasts
from ostinato.types import (
    Completion,
    Group,
    Prompt,
    Reward,
    Stop,
    Trajectory,
    Turn,
)


def completion(tokens: Sequence[int], **changes: Any) -> Completion:
    size = len(tokens)
    probs = {"logprobs": np.full(size, np.log(0.25), np.float32), "edges": np.full(size, 0.5, np.float32)}
    return nouns.completion(tokens, **{**probs, "passes": size, **changes})


def group(uid: str, *answers: Completion, step: int = 1) -> Group:
    """Siblings of one turn each, rewarded 0, 1, 2 ..."""
    played = (nouns.episode(said, reward=float(k), stop=Stop.EOS) for k, said in enumerate(answers))
    return nouns.group_of(*played, uid=uid, step=step)


# -- what is remembered


def test_each_turn_is_kept_behind_the_end_of_all_before_it() -> None:
    """Two turns: the second's context is the end of prompt, first answer and reply together."""
    prompt, reply = np.arange(100, 120, dtype=np.int32), np.array([7, 8], np.int32)
    turns = (
        Turn(context=prompt, completion=completion([1, 2, 3])),
        Turn(context=reply, completion=completion([4, 5])),
    )
    episode = Trajectory(turns=turns, stop=Stop.EOS, seed=(0,), reward=Reward(value=0.5))
    kept, num_skipped = pasts([Group(prompt=Prompt(uid="a", text="?"), trajectories=(episode,), step=1)])
    first, second = kept["a"]
    whole = [*prompt, 1, 2, 3, 7, 8]
    assert first.context.tolist() == prompt[-CONTEXT:].tolist() and first.tokens.tolist() == [1, 2, 3]
    assert second.context.tolist() == whole[-CONTEXT:] and second.tokens.tolist() == [4, 5]
    assert first.probs.tolist() == pytest.approx([0.25] * 3) and first.edges.tolist() == [0.5] * 3
    assert (first.reward, second.reward, num_skipped) == (0.5, 0.5, 0)


def test_what_cannot_be_searched_by_noise_is_counted_and_left_out() -> None:
    """Another engine tells no edges, and the numbers of a failed answer may be broken."""
    groups = [group("a", completion([1]), completion([2], edges=None), completion([3], stop=Stop.ERROR))]
    kept, num_skipped = pasts(groups)
    assert [past.tokens.tolist() for past in kept["a"]] == [[1]] and num_skipped == 2


# -- what is counted


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)), max_size=6))
def test_counts_are_sums_over_answers(sizes: list[tuple[int, int, int]]) -> None:
    answers = [completion([0] * (p + a), passes=p, drafted=a + wrong, accepted=a) for p, a, wrong in sizes]
    row = counts([group("a", *answers)])
    passes, accepted, wrong = (sum(size[i] for size in sizes) for i in range(3))
    assert row["tokens/drafted"] == accepted + wrong and row["tokens/accepted"] == accepted
    if passes:
        assert row["draft/tokens_per_pass"] == pytest.approx((passes + accepted) / passes)
        assert row["draft/drafted_per_pass"] == pytest.approx((accepted + wrong) / passes)
    else:
        assert np.isnan(row["draft/tokens_per_pass"])
    if accepted + wrong:
        assert row["draft/acceptance"] == pytest.approx(accepted / (accepted + wrong))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 400))
def test_a_course_is_short_and_keeps_the_mean(num_passes: int, most: int) -> None:
    trace = [(i, 2 * i, 3) for i in range(num_passes)]
    points = course(trace, most)
    assert len(points) == min(most, num_passes)
    if num_passes <= most:
        assert points == [[i, 2 * i, 3] for i in range(num_passes)]


def test_likeness_is_told_when_prompts_return() -> None:
    """Lengths 1, 2, 3 and then 2, 4, 6: the same order; half of the new tokens have been there."""
    likeness, past = Likeness(), dict[str, list[np.ndarray]]()
    first = [group(uid, completion(list(range(n)))) for n, uid in enumerate("abc", start=1)]
    assert likeness.compare(first, lambda uid: past.get(uid, [])) == {}
    past |= {"a": [np.array([0])], "b": [np.array([0, 1])], "c": [np.array([0, 1, 2])]}
    again = [group(uid, completion(list(range(2 * n)))) for n, uid in enumerate("abc", start=1)]
    found = likeness.compare(again, lambda uid: past[uid])
    assert found["draft/reuse"] == pytest.approx(0.5)
    assert found["draft/length_rank_correlation"] == pytest.approx(1.0)
    assert found["draft/length_rank_moved"] == 0.0
