"""The two observations, on examples made by hand and against brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.history.similarity import length_rank_correlation, rank_shift, token_reuse

EXAMPLES = settings(max_examples=50, deadline=None)
RESPONSES = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=4)


def arrays(*responses: Sequence[int]) -> list[np.ndarray]:
    return [np.array(response, np.int32) for response in responses]


@EXAMPLES
@given(RESPONSES, RESPONSES, st.integers(0, 4))
def test_reuse_is_its_definition(past: list[list[int]], new: list[list[int]], context: int) -> None:
    def grams(responses: list[list[int]]) -> list[tuple[int, ...]]:
        padded = [[-1] * context + response for response in responses]
        return [
            tuple(tokens[at - context : at + 1]) for tokens in padded for at in range(context, len(tokens))
        ]

    seen, asked = set(grams(past)), grams(new)
    reuse = token_reuse(arrays(*past), arrays(*new), context)
    if asked:
        assert reuse == pytest.approx(sum(gram in seen for gram in asked) / len(asked))
    else:
        assert math.isnan(reuse)


def test_rank_correlation() -> None:
    old = {"a": 10.0, "b": 20.0, "c": 30.0, "only old": 5.0}
    assert length_rank_correlation(old, {"a": 1.0, "b": 2.0, "c": 400.0}) == pytest.approx(1)
    assert length_rank_correlation(old, {"c": 1.0, "b": 2.0, "a": 3.0}) == pytest.approx(-1)
    assert length_rank_correlation(old, {"a": 1.0, "b": 1.0, "c": 2.0}) == pytest.approx(0.75**0.5)  # a tie
    assert math.isnan(length_rank_correlation(old, {"a": 1.0}))
    assert math.isnan(length_rank_correlation(old, {"a": 1.0, "b": 1.0}))


def test_rank_shift_is_the_share_that_moved_far() -> None:
    old = {str(index): float(index) for index in range(20)}
    swapped = {**old, "0": 1.0, "1": 0.0}  # by 5 points
    assert rank_shift(old, old) == rank_shift(old, swapped) == 0
    assert rank_shift(old, {**old, "0": 9.5}) == 1 / 20  # one jumps, the nine that it passes move by 5 points
    assert rank_shift(old, swapped, points=4) == 2 / 20
    assert math.isnan(rank_shift(old, {}))
