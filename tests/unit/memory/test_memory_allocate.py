"""Allocation against every choice there is, and water-filling against all whole numbers of tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.apps.memory.keep import COMPRESSIBILITY, allocate, compute_utility

blocks = st.lists(
    st.tuples(st.floats(0.01, 10), st.integers(1, 40), st.sets(st.integers(1, 40), max_size=4)),
    min_size=1,
    max_size=5,
)


def water_filling(scores: list[float], wholes: list[int], room: float) -> np.ndarray:
    """[n] float64: b = clip(tau ln(s / (level tau)), 0, whole), with the water level at which they add up to
    ``room`` (bisection), or all of every block where there is room for it. No feasible b is worth more."""
    s, n = np.asarray(scores, np.float64), np.asarray(wholes, np.float64)
    tau = COMPRESSIBILITY * np.maximum(n, 1)
    if n.sum() <= room:
        return n

    def filled(log_level: float) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.clip(tau * (np.log(s / tau) - log_level), 0, n)

    with np.errstate(divide="ignore"):
        slopes = np.log(s / tau)
    real = slopes[np.isfinite(slopes)]
    if not len(real):
        return np.zeros(len(n))
    low, high = float((slopes - n / tau)[np.isfinite(slopes)].min()), float(real.max())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if filled(middle).sum() > room else (low, middle)
    return filled(high)


def worth(scores: list[float], wholes: list[int], tokens: list[int]) -> float:
    return float(sum(compute_utility(s, n, b) for s, n, b in zip(scores, wholes, tokens, strict=True)))


@given(blocks, st.integers(0, 120))
def test_levels_are_worth_as_much_as_the_best_of_all_choices(found, room: int) -> None:
    scores, wholes = [one[0] for one in found], [one[1] for one in found]
    options = [[*sorted(one[2], reverse=True), 0] for one in found]
    chosen = [mine[k] for mine, k in zip(options, allocate(scores, wholes, options, room), strict=True)]
    best = max(worth(scores, wholes, list(each)) for each in itertools.product(*options) if sum(each) <= room)
    assert sum(chosen) <= room
    assert worth(scores, wholes, chosen) == pytest.approx(best, rel=1e-12, abs=1e-12)


@given(blocks, st.integers(0, 60))
def test_water_filling_is_the_optimum_within_a_token_of_each_block(found, room: int) -> None:
    scores, wholes = [one[0] for one in found][:3], [min(one[1], 12) for one in found][:3]
    filled = water_filling(scores, wholes, room)
    assert (filled >= 0).all() and (filled <= np.array(wholes) + 1e-9).all() and filled.sum() <= room + 1e-6
    whole_numbers = [list(range(n, -1, -1)) for n in wholes]
    exact = allocate(scores, wholes, whole_numbers, room)
    tokens = [mine[k] for mine, k in zip(whole_numbers, exact, strict=True)]
    mine = worth(scores, wholes, filled.tolist())
    assert mine >= worth(scores, wholes, tokens) - 1e-6  # a relaxation of the same problem
    assert np.abs(filled - np.array(tokens)).max() <= len(
        wholes
    )  # rounding moves a token of each other block


@given(blocks, st.integers(0, 120), st.integers(0, 4), st.floats(1.01, 5))
def test_more_importance_never_means_fewer_tokens(found, room: int, which: int, factor: float) -> None:
    scores, wholes = [one[0] for one in found], [one[1] for one in found]
    options = [[*sorted(one[2], reverse=True), 0] for one in found]
    which %= len(found)
    before = options[which][allocate(scores, wholes, options, room)[which]]
    scores[which] *= factor
    after = options[which][allocate(scores, wholes, options, room)[which]]
    gain = float(compute_utility(scores[which], wholes[which], before)) - float(
        compute_utility(scores[which], wholes[which], after)
    )
    assert after >= before or gain < 1e-9  # beyond the length of the whole a token is worth next to nothing


def test_a_block_that_cannot_go_is_refused() -> None:
    with pytest.raises(ValueError, match="each needs a 0"):
        allocate([1.0], [4], [[4, 2]], 3)
