"""Length predictions, the laws of a conditional, shrunk quantile; how alike the answers of two steps are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.history.lengths import ALL, OWN, PRIOR, Lengths
from ostinato.history.similarity import length_rank_correlation, rank_shift, token_reuse

EXAMPLES = settings(max_examples=50, deadline=None)
LENGTHS = st.lists(st.integers(1, 500), max_size=12)


def known(**groups: list[int]) -> Lengths:
    lengths = Lengths()
    for uid, group in groups.items():
        lengths.observe(uid, group)
    return lengths


def slow(own: list[int], everyone: list[int]) -> float:
    """The definition: the least length up to which half of the weight lies."""
    weighted = [(length, 1.0) for length in own] + [(length, PRIOR / len(everyone)) for length in everyone]
    ordered = sorted(weighted)
    reached = np.cumsum([weight for _, weight in ordered])
    return ordered[int(np.searchsorted(reached, 0.5 * reached[-1] - 1e-9))][0]


@EXAMPLES
@given(LENGTHS, LENGTHS)
def test_prediction_is_its_definition(own: list[int], others: list[int]) -> None:
    predicted = known(p=own, q=others).predict("p")
    assert predicted == (slow(own, own + others) if own + others else math.inf)


@EXAMPLES
@given(st.integers(1, OWN))
def test_a_prompt_is_shrunk_towards_all_by_how_little_is_known(count: int) -> None:
    lengths = Lengths()
    lengths.observe("other", [100] * ALL)
    assert lengths.mean("p") == lengths.predict("p") == 100  # unknown: as all of them
    lengths.observe("p", [20] * count)
    everyone = (20 * count + 100 * (ALL - count)) / ALL
    assert lengths.mean("p") == pytest.approx((20 * count + PRIOR * everyone) / (count + PRIOR))
    assert lengths.predict("p") == (20 if count >= PRIOR else 100)  # the median follows the majority


def test_a_newer_policy_displaces_the_older_lengths() -> None:
    lengths = known(p=[10] * OWN)
    lengths.observe("p", [90] * OWN)
    assert lengths.predict("p") == 90 and lengths.mean("p") < 90  # of all prompts, PRIOR remains


@pytest.mark.slow
@EXAMPLES
@given(st.dictionaries(st.text(max_size=3), LENGTHS, max_size=4))
def test_state_comes_back(groups: dict[str, list[int]]) -> None:
    old, new = Lengths(), Lengths()
    for uid, group in groups.items():
        old.observe(uid, group)
    new.restore(old.state())
    assert new.state() == old.state()
    assert all(new.predict(uid) == old.predict(uid) for uid in groups)


@EXAMPLES
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(1, 500), max_size=3)), max_size=8),
    st.data(),
)
def test_what_was_learned_after_a_step_can_be_forgotten(
    steps: list[tuple[str, list[int]]], data: st.DataObject
) -> None:
    """Few enough lengths that none was pushed out: what is left is what there was."""
    kept = data.draw(st.integers(0, len(steps)))
    whole, part = Lengths(), Lengths()
    for step, (uid, group) in enumerate(steps, start=1):
        for lengths in (whole, part) if step <= kept else (whole,):
            lengths.observe(uid, group, step=step)
    whole.forget_after(kept)
    for uid in "abc":
        assert whole.predict(uid) == part.predict(uid) and whole.mean(uid) == part.mean(uid)


# ---- how alike steps are: by hand and against brute force


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

    seen, queried = set(grams(past)), grams(new)
    reuse = token_reuse(arrays(*past), arrays(*new), context)
    if queried:
        assert reuse == pytest.approx(sum(gram in seen for gram in queried) / len(queried))
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
