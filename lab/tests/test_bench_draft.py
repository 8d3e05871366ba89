"""The draft benches: ratios, medians, published methods as rules; small, every part of them runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_drafts import emitted, running

from lab import draft, epochs
from lab.arms import Oracle, best_depth
from lab.draft import Arm, Measured
from lab.harness import measured
from ostinato.config import Recipe
from ostinato.types import Request, Sampling


def row(arm: Arm = Arm.OURS, seconds: float = 1.0, **changes: Any) -> Measured:
    fields: dict[str, Any] = {
        "batch": 8,
        "round": 0,
        "epoch": 1,
        "step": 1,
        "drafting_s": 0.0,
        "index_s": 0.0,
    }
    fields |= {"tokens": 100, "passes": 50, "drafted": 80, "accepted": 60, "mismatches": 0}
    return Measured(arm=arm, seconds=seconds, **(fields | changes))


def request(seed: int = 0, length: int = 3) -> Request:
    return Request(tokens=np.arange(length, dtype=np.int32), sampling=Sampling(), seed=(seed,), uid="a")


# ---- bench draft


def test_a_steps_seconds_are_the_median_of_its_rounds() -> None:
    """Summed per round first, one disturbed step would spoil its whole round."""
    seconds = {(1, 0): 1.0, (1, 1): 9.0, (1, 2): 1.2, (2, 0): 9.0, (2, 1): 2.0, (2, 2): 2.2}
    rows = [row(seconds=value, step=step, round=round_) for (step, round_), value in seconds.items()]
    assert draft.rollout_s(rows) == pytest.approx(1.2 + 2.2)


def test_every_arm_is_compared_at_its_best_batch() -> None:
    def entry(batch: int, off: float, ours: float) -> dict[str, Any]:
        arms = [{"name": "off", "total": {"rollout_s": off}}, {"name": "ours", "total": {"rollout_s": ours}}]
        return {"batch": batch, "arms": arms}

    best = draft.best([entry(64, 4.0, 3.0), entry(16, 6.0, 2.5)])
    assert best["off"] == {"batch": 64, "rollout_s": 4.0, "speedup": 1.0}
    assert best["ours"] == {"batch": 16, "rollout_s": 2.5, "speedup": 1.6}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("task.n_train=30", "task.n_train is 30"),
        ("adapter.kind=full", "adapter.kind is"),
        ('rollout.stop=["."]', "rollout.stop is"),
    ],
)
def test_a_recipe_that_cannot_be_replayed_is_named(override: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        epochs.check(Recipe.load("quickstart", override))


# ---- the oracle, and who holds the place


@given(
    left=st.lists(st.integers(-1, 9), min_size=1, max_size=5),
    costs=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=30),
)
def test_the_oracle_drafts_as_deep_as_pays(left: list[int], costs: list[float]) -> None:
    seconds = 1.0 + np.cumsum(costs)

    def speed(counts: np.ndarray) -> float:
        return (len(left) + counts.sum()) / seconds[counts.sum()]

    counts = best_depth(np.array(left), seconds)
    allowed = [np.clip(left, 0, depth) for depth in range(33)]
    fits = [speed(other) for other in allowed if other.sum() < len(seconds)]
    assert counts.sum() < len(seconds) and speed(counts) == pytest.approx(max(fits))


def test_the_oracle_follows_what_is_said() -> None:
    truth = {(0,): np.array([5, 6, 7, 8]), (1,): np.array([9])}
    oracle = Oracle(truth)
    handles = np.array([oracle.open(request(0)), oracle.open(request(1))])
    cheap = np.ones(20)
    first = oracle.propose(running(0, 1, room=4, seconds=cheap))
    assert first.counts.tolist() == [3, 0]  # the pass itself gives the last token
    assert first.tokens.tolist() == [5, 6, 7]
    oracle.observe(emitted(handles[0], [5, 6]))
    oracle.observe(emitted(handles[1], [9], ended=True))
    then = oracle.propose(running(0, room=2, seconds=cheap))
    assert then.counts.tolist() == [1] and then.tokens.tolist() == [7]


# ---- the bench of drafts, small: every part of it runs, and drafts change no token


ASSET = "asset:seed-moe"


def quiet(line: str) -> None:
    pass


SMALL = (
    *("rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_tokens=12"),
    *("trainer.warmup_steps=0", "engine.kv_memory_mb=32", "model.dtype=float32"),
)


def test_every_arm_draws_the_tokens_of_plain_decoding() -> None:
    plan = draft.Draft(prompts=4, overrides=SMALL, batches=(8, 2), epochs=2, rounds=1)
    result = measured(plan, quiet)
    assert result["mismatches"] == 0 and result["compared"] == 8 * 4 * 2 * len(draft.Arm)
    assert [epoch["epoch"] for epoch in result["epochs"]] == [1, 2]
    by_name = {entry["name"]: entry for entry in result["baselines"]}
    assert by_name["oracle"]["total"]["acceptance"] == 1.0
    assert by_name["off"]["total"]["tokens_per_pass"] == 1.0
    draft.Draft.table(result)
