"""How old tokens may be, by a forecast of the KL: by hand, never beyond the limit, and resumed to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_loop import Bench, as_saved, deterministic

from ostinato.config import Recipe
from ostinato.launch.checks import check
from ostinato.pipeline.drift import Drift, Measured

RULE = Drift(limit=1e-3, staleness=0, minibatches=8)


def found(kl: float, age: float) -> dict[str, float]:
    return {"sampling/kl_k3": kl, "staleness/mean": age}


def test_a_course_by_hand() -> None:
    """Numerics are measured first, then two minibatches; then as many as the slope has room for."""
    assert RULE.chosen(()) == (0, 1)
    seen = RULE.after((), found(2e-5, 0.0))
    assert seen == (2e-5,) and RULE.chosen(seen) == (0, 2)
    seen = RULE.after(seen, found(1.2e-4, 0.5))  # 2e-4 nats per update: an age of 5
    assert seen == pytest.approx((2e-5, 2e-4)) and RULE.chosen(seen) == (0, 6)
    seen = RULE.after(seen, found(2e-5 + 2.5 * 3.2e-3, 2.5))  # the mean of logarithms
    assert seen == pytest.approx((2e-5, 8e-4)) and RULE.chosen(seen) == (0, 2)
    assert RULE.after(seen, {"sampling/kl_k3": 1.0}) == seen
    steep: Measured = (2e-5, 1.05e-3)
    assert RULE.chosen(steep) == (0, 1)
    assert RULE.chosen(RULE.after(steep, found(4e-5, 0.0))) == (0, 2), "in time it is tried again"


@given(
    limit=st.floats(1e-6, 1),
    slope=st.floats(0, 1),
    staleness=st.integers(0, 9),
    minibatches=st.integers(1, 9),
)
def test_the_oldest_tokens_stay_under_the_limit(
    limit: float, slope: float, staleness: int, minibatches: int
) -> None:
    rule = Drift(limit=limit, staleness=staleness, minibatches=minibatches)
    k, m = rule.chosen(rule.after((0.0,), found(slope, 1.0)))
    assert 0 <= k <= staleness and 1 <= m <= minibatches
    assert (k + 1) * m - 1 == 0 or ((k + 1) * m - 1) * slope <= limit * (1 + 1e-9)
    assert (k + 1) * (m + 1) - 1 > limit / max(slope, 1e-12) - 1 or m == minibatches  # and no fewer than that
    least = Drift(limit=limit, staleness=9, minibatches=minibatches, least=2).chosen((0.0, 2 * limit))
    assert least == (2, 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_has_fewer_minibatches_and_less_staleness_than_it_may(tmp_path: Path, overlap: bool) -> None:
    rule = Drift(limit=1e-3, staleness=3, minibatches=4, least=int(overlap))
    bench = Bench(tmp_path, steps=9, drift=rule, staleness=3, minibatches=4, overlap=overlap)
    bench.trainer.slope = 4e-4  # nats per update: an age of 2
    bench.run()
    assert [row["drift/staleness"] for row in bench.rows[1:]] == [2.0] * 8
    assert all(row["staleness/max"] <= 3 for row in bench.rows)


def test_a_resumed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    rule = Drift(limit=1e-3, staleness=3, minibatches=4)
    usual: dict[str, Any] = {
        "drift": rule,
        "staleness": 3,
        "minibatches": 4,
        "checkpoint_every": 3,
        "steps": 8,
    }
    whole = Bench(tmp_path, keep=9, **usual)
    whole.trainer.slope = 4e-4
    whole.run()
    part = Bench(tmp_path, keep=9, **usual, **as_saved(whole, 0))
    part.trainer.slope = 4e-4
    part.run()
    assert [deterministic(row) for row in part.rows] == [deterministic(row) for row in whole.rows[3:]]


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"trainer": {"drift": 1e-3}}, "nothing to limit"),
        ({"trainer": {"drift": 1e-3, "minibatches": 2}, "algo": {"anchor": "trainer"}}, "algo.anchor"),
    ],
)
def test_what_a_limit_does_not_go_with_is_refused(keys: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        check(Recipe.parse(keys))
