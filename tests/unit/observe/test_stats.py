"""Intervals of held-out scores, and numbers as text."""

from __future__ import annotations

import pytest
from golden_run import score
from hypothesis import given
from hypothesis import strategies as st

from ostinato.observe.stats import difference, estimate, wilson
from ostinato.tables import format_figure, format_seconds, format_si


def test_intervals_of_shares_stay_inside_zero_and_one() -> None:
    assert wilson(0.0, 0.0, 64) == (0.0, pytest.approx(0.0566, abs=1e-4))  # 3.84 / (64 + 3.84)
    assert wilson(1.0, 0.0, 64) == (pytest.approx(0.9434, abs=1e-4), 1.0)
    assert wilson(0.5, 0.05, 256) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert wilson(0.5, 0.0, 0) is None


@given(st.floats(0, 1), st.floats(0, 0.5), st.floats(0, 1), st.floats(0, 0.5))
def test_the_interval_of_a_change_contains_it(a: float, a_error: float, b: float, b_error: float) -> None:
    old, new = (estimate(score(0, v, e), "pass@1") for v, e in ((a, a_error), (b, b_error)))
    assert old is not None and new is not None
    change = difference(old, new)
    if change.interval is not None:
        assert change.interval[0] <= change.value <= change.interval[1]


def test_words_for_numbers() -> None:
    seconds = (8.21, 59.97, 245, 12_000, 187_200)
    words = ["8.2 s", "1 min 00 s", "4 min 05 s", "3 h 20 min", "2 d 04 h"]
    assert [format_seconds(s) for s in seconds] == words
    assert [format_si(v) for v in (812, 999.9, 81_234, 1.234e15)] == ["812", "1 k", "81.2 k", "1.23 P"]
    figures = (None, 0.0, 1.789e-5, 1e-4, 0.0121, 0.99982, 0.9999999, 1234.5, -1.5)
    words = ["-", "0", "1.79e-5", "1e-4", "0.0121", "0.99982", "1", "1,234", "-1.5"]
    assert [format_figure(value) for value in figures] == words
