"""Where a fit begins: what is left out, why, and that it is said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.scaling.curve import Sigmoid
from ostinato.scaling.cut import auto_cut
from ostinato.scaling.plan import simulated
from ostinato.scaling.series import Series, series

SCALERL = Sigmoid(R0=0.4, A=0.61, B=1.92, C_mid=2542.0)


def run(last: float = 12_700, n: int = 20, seed: int = 0) -> Series:
    return simulated(SCALERL, np.linspace(last / n, last, n), sd=0.0045, seed=seed)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000))
def test_a_curve_that_is_a_sigmoid_from_the_start_is_mostly_kept_whole(seed: int) -> None:
    """One in twenty of simulated ones loses its first evaluations; none loses more than a few."""
    whole = run(seed=seed)
    assert auto_cut(whole).first <= whole.compute[4]


def test_an_early_phase_that_is_no_sigmoid_is_left_out() -> None:
    whole = run(n=30)
    early = whole.compute < 2500
    slow = np.where(early, 0.4 + 0.1 * (whole.score - 0.4), whole.score)
    found = auto_cut(series("slow", whole.compute, slow, R0=0.4))
    assert 2000 < found.first < 4000 and found.stable
    assert "from compute" in found.reason and "it stays" in found.reason
    tried = {one.first: one for one in found.sweep}
    assert tried[found.first].moved <= 3 < found.sweep[0].moved


def test_the_first_epoch_is_left_out_where_the_rise_comes_after_it() -> None:
    whole = run()
    found = auto_cut(whole, epoch=1500)
    assert found.first == whole.between(first=1500).compute[0]
    assert "the first epoch (up to compute 1500) is left out" in found.reason
    later = auto_cut(whole, epoch=1500, least=2000)
    assert later.first == whole.between(first=2000).compute[0]


@pytest.mark.parametrize(
    ("epoch", "said"),
    [
        (None, "the length of an epoch is not known"),
        (100.0, "has no evaluation"),
        (4000.0, "holds half of the gain"),
        (6000.0, "the run is 2.1 epochs long, too short to leave the first out"),
    ],
)
def test_an_epoch_that_is_kept_is_told_why(epoch: float | None, said: str) -> None:
    """An epoch with C_mid in it: our own small runs reach half of their gain within it. Without the rise, B
    came from the prior alone, and a run that had been identified was provisional."""
    whole = run()
    found = auto_cut(whole, epoch=epoch)
    assert found.first == whole.compute[0] and said in found.reason


def test_short_and_unidentified_runs_are_fitted_whole() -> None:
    few, short = run(n=4), run(last=2500)
    assert auto_cut(few).first == few.compute[0] and "too few" in auto_cut(few).reason
    assert auto_cut(short).first == short.compute[0]
    assert auto_cut(short).sweep == () and "not identified" in auto_cut(short).reason
    with pytest.raises(ValueError, match="no evaluation at compute 99999 or later; use a smaller --cut"):
        auto_cut(short, least=99_999)
