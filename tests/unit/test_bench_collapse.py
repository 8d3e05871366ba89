from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.algo.algorithms import Loss
from ostinato.bench import collapse_page as page
from ostinato.bench import collapse_stats as stats
from ostinato.bench.collapse import (
    ARMS,
    PARTS,
    Job,
    Setting,
    finished,
    gaussian,
    jobs,
    noisy_route,
    shuffled_routes,
)
from ostinato.model.config import MoEConfig
from ostinato.model.moe import route
from ostinato.types import Batch, Microbatch, Segment

shares = st.floats(0, 1, allow_nan=False)


# ---- what is varied


def test_only_the_bypass_corrects_by_its_anchor() -> None:
    """The arm "none" has to ignore the mismatch. Anchored at the sampler it would correct for it."""
    assert {name for name, arm in ARMS.items() if not arm.algorithm.decoupled} == {"bypass"}
    assert {name for name, arm in ARMS.items() if arm.replay} == {"R3", "R3+TIS", "shuffled"}
    assert ARMS["GSPO"].algorithm.loss is Loss.SEQUENCE_CLIPPED


def test_a_row_errs_alike_in_every_batch() -> None:
    logits = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    noise = gaussian(logits)
    torch.testing.assert_close(gaussian(logits[7:9]), noise[7:9], rtol=0, atol=0)
    assert not torch.equal(gaussian(logits + 1e-6), noise)


def test_the_noise_is_standard_normal_and_independent_over_rows_and_experts() -> None:
    noise = gaussian(torch.randn(20_000, 8, generator=torch.Generator().manual_seed(1))).double()
    assert abs(noise.mean()) < 0.01 and abs(noise.std() - 1) < 0.01
    assert abs((noise.pow(4)).mean() - 3) < 0.1
    neighbours = (noise[1:] * noise[:-1]).mean(), (noise[:, 1:] * noise[:, :-1]).mean()
    assert max(map(abs, neighbours)) < 0.01


def test_noise_moves_the_choice_and_none_moves_nothing() -> None:
    moe = MoEConfig(num_experts=16, top_k=2, intermediate_size=8, layers=(0,))
    logits = torch.randn(200, 16, generator=torch.Generator().manual_seed(2))
    clean = route(logits, moe)
    for mine, theirs in zip(noisy_route(route, 0.0)(logits, moe), clean, strict=True):
        assert torch.equal(mine, theirs)
    moved = [(noisy_route(route, sigma)(logits, moe)[0] != clean[0]).float().mean() for sigma in (0.1, 1.0)]
    assert 0 < moved[0] < moved[1] < 1


def batch(routes: np.ndarray | None) -> Batch:
    length, ones = 6, np.ones(3, np.float32)
    micro = Microbatch(
        tokens=np.arange(length, dtype=np.int32),
        positions=np.arange(length, dtype=np.int32),
        segments=(Segment(start=0, stop=length),),
        rows=np.arange(3, dtype=np.int32),
        targets=np.arange(3, dtype=np.int32),
        logprobs=-ones,
        advantages=ones,
        weights=ones / 3,
        sample_idx=np.zeros(3, np.int32),
        staleness=np.zeros(3, np.int32),
        uids=("a",),
        experts=routes,
    )
    return Batch(microbatches=(micro,), num_samples=1, num_tokens=3, num_context_tokens=3)


def test_shuffled_routes_are_all_there_and_none_in_its_place() -> None:
    routes = np.arange(6 * 2 * 2, dtype=np.int16).reshape(6, 2, 2)
    moved = shuffled_routes(batch(routes)).microbatches[0].experts
    assert moved is not None
    assert not (moved == routes).any()
    assert sorted(moved.ravel()) == sorted(routes.ravel())
    assert shuffled_routes(batch(None)).microbatches[0].experts is None


# ---- the queue


def test_a_study_that_is_stopped_is_balanced_and_the_primary_comparison_comes_first() -> None:
    queue = jobs(PARTS, range(5))
    primary = [job for job in queue if job.arm in ("none", "R3")]
    assert queue[: len(primary)] == primary
    assert [job.seed for job in primary] == sorted(job.seed for job in primary)
    assert len(set(queue)) == len(queue)


def test_an_unknown_arm_is_named() -> None:
    with pytest.raises(ValueError, match="--arms has 'R2'; use some of none, R3"):
        jobs(((["R2"], ["bf16"]),), [0])


@pytest.mark.parametrize("dose", ["int5", "int8:2", "noise", "noise:x", "noise:0", "noise:-1", "noise:nan"])
def test_an_unknown_dose_is_named_before_any_work(dose: str) -> None:
    with pytest.raises(ValueError, match=f"--doses has '{dose}'; use bf16, int8, int4 or noise:SIGMA"):
        jobs(((["none"], ["bf16", dose]),), [0])


def test_runs_of_another_setting_do_not_count_as_done(tmp_path: Path) -> None:
    file, mine = tmp_path / "runs.jsonl", Setting()
    assert finished(file, mine) == set()
    rows = [
        {"arm": "none", "dose": "bf16", "seed": 0, "setting": mine.hash},
        {"arm": "none", "dose": "bf16", "seed": 1, "setting": Setting(lr=1.0).hash},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert finished(file, mine) == {Job(arm="none", dose="bf16", seed=0)}


# ---- when a run has collapsed


def test_a_fall_that_lasts_is_a_collapse_and_a_dip_is_not() -> None:
    up, down = [0.8] * 20, [0.0] * 25
    assert stats.collapse_step([*up, *down]) == 23  # the mean of five is below half with the third zero
    assert stats.collapse_step([*up, *[0.0] * 10, *up]) is None
    assert stats.collapse_step([*up, *[0.0] * 6]) is None  # three means below half at the end: too few
    assert stats.collapse_step([*up, *[0.0] * 7]) == 23  # five: nobody saw it come back


@settings(max_examples=40, deadline=None)
@given(st.lists(shares, max_size=60), st.floats(0.1, 10))
def test_the_unit_of_the_reward_does_not_matter(reward: list[float], unit: float) -> None:
    scaled = [value * 2.0 ** round(unit) for value in reward]  # powers of two: exact
    assert stats.collapse_step(scaled) == stats.collapse_step(reward)


@settings(max_examples=40, deadline=None)
@given(st.lists(shares, max_size=60))
def test_what_only_rises_has_not_collapsed(reward: list[float]) -> None:
    assert stats.collapse_step(sorted(reward)) is None


def test_steps_without_training_do_not_end_a_mismatch() -> None:
    assert stats.mismatch_step([0.2, 0.2, None, 0.2, None, 0.2, 0.2]) == 1
    assert stats.mismatch_step([0.2, 0.2, 0.05, 0.2, 0.2, 0.2, 0.2]) is None


# ---- how sure that is


def test_wilson_against_published_values() -> None:
    low, high = stats.wilson(5, 5)
    assert (round(low, 4), high) == (0.5655, 1.0)
    low, high = stats.wilson(1, 10)
    assert (round(low, 4), round(high, 4)) == (0.0179, 0.4042)
    assert stats.wilson(0, 0) == (0.0, 1.0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_fisher_against_the_sum_over_all_tables(a: int, b: int, c: int, d: int) -> None:
    mine = stats.fisher((a, a + b), (c, c + d))
    weights = {
        x: math.comb(a + b, x) * math.comb(c + d, a + c - x) for x in range(a + c + 1) if a + c - x >= 0
    }
    exact = sum(w for w in weights.values() if w <= weights[a]) / math.comb(a + b + c + d, a + c)
    assert mine == pytest.approx(exact)
    assert mine == pytest.approx(stats.fisher((c, c + d), (a, a + b)))


def test_fisher_tastes_tea() -> None:
    """Fisher 1935: three of four cups each way, one-sided 17/70, two-sided 34/70."""
    assert stats.fisher((3, 4), (1, 4)) == pytest.approx(34 / 70)


def test_signs_are_flipped_in_all_ways() -> None:
    assert stats.paired([1.0, 1.0, 1.0]) == (1.0, 2 / 8)
    assert stats.paired([1.0, -1.0]) == (0.0, 1.0)


def test_survival_falls_where_runs_end() -> None:
    assert stats.survival([None, 3, 3, 5], 10) == [(0, 1.0), (3, 0.5), (5, 0.25), (10, 0.25)]


# ---- the page


def line(arm: str, dose: str, seed: int, lives: bool) -> dict[str, Any]:
    reward = [0.8] * 20 + [0.7 if lives else 0.0] * 40
    score = 0.75 if lives else 0.0
    tails = [[1.1, 0.01]]
    arms = {"native": {"k3": 1e-3, "tails": tails}, "replay": {"k3": 5e-4, "tails": tails}}
    return {
        "arm": arm,
        "dose": dose,
        "seed": seed,
        "setting": "abc",
        "ended": "done",
        "before": {"sampler": 0.25, "clean": 0.25},
        "after": {"sampler": score, "clean": score},
        "seconds": 30.0,
        "steps": {"reward": reward, stats.TAIL: [0.0] * 60, "k3": [1e-3] * 60},
        "measured": [{"step": 1, "arms": arms, "differ": 0.05}],
    }


@pytest.fixture
def study(tmp_path: Path) -> Path:
    rows = [
        line(arm, dose, seed, lives=dose == "bf16" or arm == "R3")
        for seed in range(5)
        for dose in ("bf16", "noise:2")
        for arm in ("none", "R3")
    ]
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_the_page_tells_the_primary_comparison(study: Path, tmp_path: Path) -> None:
    page.write(page.read(study), tmp_path / "docs")
    text = (tmp_path / "docs" / "collapse.md").read_text()
    assert "collapses in at least half of its runs is **noise:2**" in text
    assert "5 of 5 runs of `R3` survive and 0 of 5 of `none`" in text
    assert "p = 0.00794" in text
    assert "| none | 5/5 (0.57 to 1.00) | 0/5 (0.00 to 0.43) |" in text
    for name in ("collapse-survival.svg", "collapse-reward.svg"):
        assert "<polyline" in (tmp_path / "docs" / name).read_text()


def test_what_people_wrote_stays_and_the_data_makes_the_same_page(study: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "collapse.md").write_text(f"# Ours\n\n{page.BEGIN}\nold\n{page.END}\n\nlimits\n")
    page.write(page.read(study), docs)
    first = (docs / "collapse.md").read_bytes()
    assert first.startswith(b"# Ours\n") and first.endswith(b"\nlimits\n") and b"\nold\n" not in first
    page.write(page.read(docs / "data" / "collapse.jsonl"), docs)
    assert (docs / "collapse.md").read_bytes() == first


def test_a_study_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no finished run yet"):
        page.read(tmp_path / "none.jsonl")
