"""Length predictions, the laws of a conditional, shrunk quantile."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.history.lengths import ALL, OWN, PRIOR, Lengths

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
