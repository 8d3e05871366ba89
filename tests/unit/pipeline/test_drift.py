"""How old tokens may be, by a forecast of the KL: by hand, never beyond the limit, and resumed to the bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nouns import sample_of
from small_loop import Bench, as_saved, deterministic

from ostinato.algo.pack import pack
from ostinato.config import Recipe
from ostinato.launch.checks import check
from ostinato.pipeline.drift import Drift, Measured, ages, passed

RULE = Drift(limit=1e-3, staleness=0, minibatches=8)


def found(kl: float, age: float) -> dict[str, float]:
    return {"sampling/kl_k3": kl, "staleness/mean": age}


def test_a_course_by_hand() -> None:
    """Numerics are measured first, then two minibatches; then as many as the slope has room for."""
    assert RULE.chosen((), ()) == (0, 1)
    seen = RULE.after((), found(2e-5, 0.0))
    assert seen == (2e-5,) and RULE.chosen(seen, [1]) == (0, 2)
    seen = RULE.after(seen, found(1.2e-4, 0.5))  # 2e-4 nats per update: an age of 5
    assert seen == pytest.approx((2e-5, 2e-4)) and RULE.chosen(seen, [2]) == (0, 6)
    seen = RULE.after(seen, found(2e-5 + 2.5 * 3.2e-3, 2.5))  # the mean of logarithms
    assert seen == pytest.approx((2e-5, 8e-4)) and RULE.chosen(seen, [6]) == (0, 2)
    for nothing in ({"sampling/kl_k3": 1.0}, found(1.0, 1.0) | {"refused_steps": 1.0}, found(math.nan, 1.0)):
        assert RULE.after(seen, nothing) == seen
    assert RULE.after((), found(1.0, 2.0)) == ()  # what is numerics of it is not known yet
    steep: Measured = (2e-5, 1.05e-3)
    assert RULE.chosen(steep, []) == (0, 1)
    assert RULE.chosen(RULE.after(steep, found(4e-5, 0.0)), []) == (0, 2), "in time it is tried again"


def test_one_reading_below_the_floor_does_not_lift_the_limit() -> None:
    """The logarithm of a slope of nothing once counted as any other: three steps had the most there is."""
    seen = RULE.after((2e-5, 1e-3), found(1e-5, 1.0))
    assert seen == pytest.approx((2e-5, 5e-4)) and RULE.chosen(seen, []) == (0, 3)
    assert RULE.after((2e-5,), found(1e-5, 0.5)) == pytest.approx((2e-5, 1e-5))
    still = RULE.after((0.0,), found(0.0, 1.0))  # exact numerics, and a first update that moves nothing
    assert RULE.after(still, found(1e-3, 1.0)) == (0.0, 1e-3), "a slope of 0 once stayed 0 for ever"


@given(
    limit=st.floats(1e-6, 1),
    slope=st.floats(1e-9, 1),
    staleness=st.integers(0, 9),
    minibatches=st.integers(1, 9),
    updates=st.lists(st.integers(1, 9), max_size=9),
)
def test_the_oldest_tokens_stay_under_the_limit(
    limit: float, slope: float, staleness: int, minibatches: int, updates: list[int]
) -> None:
    k, m = Drift(limit=limit, staleness=staleness, minibatches=minibatches).chosen((0.0, slope), updates)
    oldest = passed(updates, staleness)[k] + m - 1
    assert 0 <= k <= staleness and 1 <= m <= minibatches
    assert oldest == 0 or oldest * slope <= limit * (1 + 1e-9)
    assert m == minibatches or (oldest + 1) * slope > limit * (1 - 1e-9)  # no fewer than it allows
    kept = Drift(limit=limit, staleness=9, minibatches=minibatches, least=2).chosen((0.0, 2 * limit), updates)
    assert kept[0] >= 2


def test_ages_count_the_optimizer_steps_that_there_were() -> None:
    """Eight minibatches and then one: tokens of the policy before are 8 updates old, and not 1."""
    sample = sample_of(5, 2, versions=np.array([0, 0, 4, 3, 2], np.int32))
    batch = pack([sample], [np.ones(len(sample.tokens))], tokens_per_microbatch=64, version=4)
    assert ages(batch, [2, 8]) == {"staleness/mean": pytest.approx((0 + 8 + 10) / 3), "staleness/max": 10.0}
    assert ages(batch, [8]) == {"staleness/mean": pytest.approx((0 + 8 + 9) / 3), "staleness/max": 9.0}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_has_fewer_minibatches_and_less_staleness_than_it_may(tmp_path: Path, overlap: bool) -> None:
    rule = Drift(limit=1e-3, staleness=3, minibatches=1, least=int(overlap))
    bench = Bench(tmp_path, steps=9, drift=rule, staleness=3, overlap=overlap)
    bench.trainer.slope = 4e-4  # nats per update: an age of 2
    bench.run()
    assert [row["drift/staleness"] for row in bench.rows[1:]] == [2.0] * 8
    assert all(row["staleness/max"] <= 2 for row in bench.rows) and bench.rows[-1]["staleness/max"] >= 1


def test_a_resumed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    rule = Drift(limit=1e-3, staleness=0, minibatches=4)
    usual: dict[str, Any] = {"drift": rule, "minibatches": 4, "checkpoint_every": 3, "steps": 8}
    whole = Bench(tmp_path, keep=9, **usual)
    whole.trainer.slope = 4e-4
    whole.run()
    part = Bench(tmp_path, keep=9, **usual, **as_saved(whole, 0))
    part.trainer.slope = 4e-4
    part.run()
    assert [deterministic(row) for row in part.rows] == [deterministic(row) for row in whole.rows[3:]]
    assert {row["drift/minibatches"] for row in whole.rows} == {2.0, 3.0}


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"trainer": {"drift": 1e-3}}, "nothing to limit"),
        ({"trainer": {"drift": 1e-3}, "pipeline": {"overlap": True, "staleness": 1}}, "overlap needs a step"),
        ({"trainer": {"drift": 1e-3, "minibatches": 2}, "algo": {"anchor": "trainer"}}, "algo.anchor"),
    ],
)
def test_what_a_limit_does_not_go_with_is_refused(keys: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        check(Recipe.parse(keys))
