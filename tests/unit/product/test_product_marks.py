"""A judge's blindness to a mark that costs gold is found early, and one that errs at random is left alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.apps.product.detectors import (
    LONGER,
    Bets,
    choose_marks,
    find_marked_side,
    find_marks,
    of_mark,
    standardise,
)

texts = st.text(alphabet="ab1 #", max_size=12)
verdicts = st.sampled_from([1.0, 0.0, -1.0, math.nan])
rows = st.lists(st.tuples(texts, texts, verdicts, st.sampled_from([-1.0, 0.5, math.nan])), max_size=12)


@given(texts, texts, st.sampled_from(["a", "b", "0", "#", LONGER]))
def test_a_side_turns_with_the_order(one: str, other: str, mark: str) -> None:
    assert find_marked_side((one, other), mark) == -find_marked_side((other, one), mark)
    assert find_marked_side((one, one), mark) == 0


def test_numbers_are_no_marks_and_rare_or_common_words_are_not_watched() -> None:
    assert find_marks("Great question! 7+6=13 #### 933") == {"great", "question!", "####", "0"}
    assert find_marks("**7*6=42** 1,000.50 x1") == {"**0**", "0", "x0"}
    given = ["ok 1"] * 90 + ["well now ok 2"] * 9 + ["odd ok 3"]
    assert choose_marks(given) in ([LONGER, "well"], [LONGER, "now"])  # one of what stands together
    assert len(choose_marks((f"w{chr(97 + n % 26)} x" for n in range(260)), max_marks=5)) == 5


@given(rows, st.sampled_from(["a", "#", LONGER]))
def test_observations_equal_their_slow_twin(given: list[tuple[str, str, float, float]], mark: str) -> None:
    slow = []
    for one, other, proxy, gold in given:
        turned = [(one, other, proxy, gold), (other, one, -proxy, -gold)]
        slow += [
            (p, -g) for a, b, p, g in turned if find_marked_side((a, b), mark) == 1 and p == p and g == g
        ]
    proxy, gold = (np.array([row[k] for row in given], float) for k in (2, 3))
    fast = of_mark(proxy, gold, [row[:2] for row in given], mark)
    assert list(zip(*(one.tolist() for one in fast), strict=True)) == slow


def alarm_at(seed: int, share: float, blind: bool, looks: int) -> int:
    """The first of ``looks`` at 128 pairs with an alarm, 0: none. An answer is right (worth 1) or not,
    dressed (worth -0.8) or not. The judge likes the dress, or knows its price and errs in one of five."""
    rng = np.random.default_rng(seed)
    likes = costs = Bets(name="great", alpha=0.02 / 4 / 24)
    for number in range(1, looks + 1):
        right, dressed = rng.random((2, 128)) < 0.4, rng.random((2, 128)) < share
        worth = right - 0.8 * dressed
        liked = right + 2.0 * dressed if blind else worth * np.where(rng.random(128) < 0.2, -1, 1)
        pairs = [("great 1" if a else "1", "great 1" if b else "1") for a, b in dressed.T]
        gold = worth[0] - worth[1] + rng.normal(0, 0.4, 128)
        preferred, lost = of_mark(np.sign(liked[0] - liked[1]), gold, pairs, "great")
        likes, _ = likes.update(preferred)
        costs, _ = costs.update(standardise(lost if preferred.sum() > 0 else lost[:0], 1.0))
        if likes.alarmed and costs.alarmed:
            return number
    return 0


def test_what_a_judge_likes_for_no_reason_is_found_before_it_is_usual() -> None:
    found = [alarm_at(seed, 0.1, blind=True, looks=12) for seed in range(100)]
    assert all(found) and np.quantile(found, 0.95) <= 8


@pytest.mark.slow
def test_a_judge_that_knows_what_it_costs_is_left_alone() -> None:
    assert not any(
        alarm_at(seed, share, blind=False, looks=200) for seed in range(5) for share in (0.03, 0.3)
    )
