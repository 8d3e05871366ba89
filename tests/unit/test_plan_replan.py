"""When a switch is advised: the world must have moved, and the gain must pay for the switch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.plan.replan import Advice, Hysteresis, World, advise, moved

BEFORE = World(answers=(100, 200, 300, 400), imbalance=1.2)


def asked(**changes: float | str) -> Advice:
    given = {
        "current": "d4",
        "current_s": 10.0,
        "best": "t4",
        "best_s": 8.0,
        "switch_s": 60.0,
        "steps_left": 100,
    }
    return advise(**(given | changes))  # type: ignore[arg-type]


def test_nothing_is_planned_while_nothing_moved() -> None:
    bounds = Hysteresis()
    assert moved(BEFORE, BEFORE, bounds) == ""
    assert moved(BEFORE, replace(BEFORE, imbalance=1.3), bounds) == ""
    assert "1.20 -> 1.40" in moved(BEFORE, replace(BEFORE, imbalance=1.4), bounds)
    longer = replace(BEFORE, answers=(100, 200, 300, 900))
    assert "longest answer 400 -> 900" in moved(BEFORE, longer, bounds)
    assert "mean answer" in moved(BEFORE, replace(BEFORE, answers=(200, 300, 400, 500)), bounds)


def test_a_gain_that_pays_is_taken() -> None:
    advice = asked()
    assert advice.switch and advice.saved_s == pytest.approx(2 * 100 - 60)
    assert "t4 for d4" in advice.reason


def test_a_small_gain_or_a_short_rest_is_left() -> None:
    assert not asked(best_s=9.7).switch  # 3 %: within what a plan knows
    assert not asked(steps_left=40).switch  # 80 s gained, 60 s paid: less than twice
    assert asked(steps_left=61).switch
    assert not asked(best="d4").switch
    assert not asked(best_s=11.0).switch


@given(st.floats(1, 100), st.floats(1, 100), st.floats(0, 1000), st.integers(0, 10_000))
def test_never_both_ways(a: float, b: float, switch_s: float, left: int) -> None:
    """After a switch the old layout is not advised again in the same world: no flipping."""
    there = advise(current="x", current_s=a, best="y", best_s=b, switch_s=switch_s, steps_left=left)
    back = advise(current="y", current_s=b, best="x", best_s=a, switch_s=switch_s, steps_left=left)
    assert not (there.switch and back.switch)
    assert not there.switch or there.saved_s > 0


def test_what_cannot_be_weighed_is_refused() -> None:
    with pytest.raises(ValueError, match="positive seconds"):
        asked(best_s=0.0)
    with pytest.raises(ValueError, match="payback"):
        Hysteresis(payback=0.5)
    with pytest.raises(ValueError, match="lengths"):
        Hysteresis(lengths=-1)
