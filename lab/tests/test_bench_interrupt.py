"""What the bench of forced interruption counts, and that its arms have equal limits."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lab.interrupt import (
    ADDED,
    ARMS,
    CUT,
    INTERRUPTED,
    LONG,
    SEED_MOE,
    Interrupt,
    answered,
    facts,
    overrides,
    summed,
)
from ostinato.config import Recipe
from ostinato.run import RunFolder


def step(truncated: float, reward: float, sampled: float, put_in: float = 0.0) -> dict[str, Any]:
    return {
        "completions/clipped_ratio": truncated,
        "interrupt/rate": put_in / 10,
        "reward": reward,
        "tokens/sampled": sampled,
        "tokens/injected": put_in,
        "rollout/trajectories": 10.0,
    }


def score(value: float, **more: float) -> dict[str, Any]:
    return {
        "pass@1": value,
        "stderr": 0.02,
        "completions/mean_length": 15.0,
        **step(0.0, 0.0, 150.0),
        **more,
    }


def a_run(path: Path) -> RunFolder:
    folder = RunFolder.create(path / "run", "")
    folder.metrics.append(*(step(0.5 if n < 10 else 0.1, n / 20, 100.0, 5.0) for n in range(20)))
    folder.eval.append(score(0.2), score(0.6, **{"interrupt/answered": 0.9}))
    return folder


def test_a_run_comes_to_its_means_and_its_last_score(tmp_path: Path) -> None:
    found = facts(a_run(tmp_path))
    assert (found["steps"], found["before"], found["score"], found["score_error"]) == (20, 0.2, 0.6, 0.02)
    assert found["truncated_all"] == pytest.approx(0.3)
    assert (found["truncated_first"], found["truncated_last"]) == pytest.approx((0.5, 0.1))
    assert (found["sampled_tokens"], found["put_in_tokens"], found["tokens_all"]) == (2000, 100, 10)
    assert found["reward_last"] == pytest.approx(14.5 / 20) and found["ended_then"] == 0.9


def test_arms_are_means_over_seeds_and_save_tokens_against_the_first(tmp_path: Path) -> None:
    one = facts(a_run(tmp_path))
    runs = [
        {"arm": arm, "seed": seed} | one | {"score": value, "sampled_tokens": tokens}
        for arm, tokens in ((LONG, 4000.0), (CUT, 3000.0))
        for seed, value in enumerate((0.4, 0.5, 0.6))
    ]
    long, cut = summed(runs)
    assert (long["tokens_saved"], cut["tokens_saved"], cut["seeds"]) == (0, 0.25, 3)
    assert cut["score"] == pytest.approx(0.5) and cut["score_error"] == pytest.approx(0.1 / math.sqrt(3))
    assert summed(runs[:1])[0]["score_error"] == 0.02  # of one seed: what its problems leave open


def test_an_answer_that_nobody_told_to_end_has_no_figure_of_how_it_ended() -> None:
    assert math.isnan(answered(score(0.5))["ended_then"])
    assert answered(score(0.5, **{"tokens/injected": 3.0}))["put_in"] == 0.3


def test_both_tight_arms_have_the_same_limit() -> None:
    recipes = {arm: Recipe.load("quickstart", *overrides(SEED_MOE, arm)) for arm in ARMS}
    assert recipes[LONG].rollout.max_tokens == SEED_MOE.long
    assert recipes[CUT].rollout.max_tokens == SEED_MOE.limit() == 24
    rollout = recipes[INTERRUPTED].rollout
    assert (rollout.interrupt_phrase, rollout.think_end) == (SEED_MOE.phrase, SEED_MOE.think_end)
    assert rollout.interrupt_after[1] + 1 + rollout.answer_tokens == 24  # the phrase is one token
    assert not recipes[CUT].rollout.interrupt_after
    added = recipes[ADDED].rollout  # every token of the cut arm, and a word to those that it truncates
    assert (added.interrupt_after, added.answer_tokens) == ((24, 24), rollout.answer_tokens)


def test_the_table_has_a_row_for_every_arm(tmp_path: Path) -> None:
    base = [{"model": "m", "arm": arm} | answered(score(0.5)) for arm in ARMS]
    runs = [{"arm": arm, "seed": 0} | facts(a_run(tmp_path / arm)) for arm in ARMS]
    settings = {"held_out": 8, "recipe": "quickstart", "steps": 20, "seeds": (0,)}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(
        Interrupt.table({"base": base, "arms": summed(runs), "settings": settings, "limits": {"m": 24}})
    )
    text = console.export_text()
    assert all(text.count(arm) >= 2 for arm in ARMS) and "0.200 -> 0.600" in text
    assert Interrupt().quick().steps == 3
