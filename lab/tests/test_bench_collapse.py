from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import collapse_page as page
import collapse_stats as stats
import numpy as np
import pytest
import torch
from collapse import (
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
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.paired import wilson
from ostinato.algo.algorithms import Loss
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
    low, high = wilson(5, 5)
    assert (round(low, 4), high) == (0.5655, 1.0)
    low, high = wilson(1, 10)
    assert (round(low, 4), round(high, 4)) == (0.0179, 0.4042)
    assert wilson(0, 0) == (0.0, 1.0)


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


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-64, 64).filter(bool), min_size=1, max_size=8))
def test_few_pairs_cannot_say_much(differences: list[int]) -> None:
    """With n pairs p is no less than 2 / 2^n, and that only where all have one sign."""
    mean, p = stats.paired(differences)
    least = 2 / 2 ** len(differences)
    assert least <= p <= 1
    assert (p == least) == (len({difference > 0 for difference in differences}) == 1)
    assert stats.paired([-difference for difference in differences]) == (-mean, p)


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


SEEDS = range(5)


def rows_of_study() -> list[dict[str, Any]]:
    return [
        line(arm, dose, seed, lives=dose == "bf16" or arm == "R3")
        for seed in SEEDS
        for dose in ("bf16", "noise:2")
        for arm in ("none", "R3")
    ]


def save(rows: list[dict[str, Any]], file: Path) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return save(rows_of_study(), tmp_path / "runs.jsonl")


def test_the_page_tells_the_primary_comparison(study: Path, tmp_path: Path) -> None:
    page.write(page.read(study), tmp_path / "docs", seeds=SEEDS)
    text = (tmp_path / "docs" / "page.md").read_text()
    assert "All 5 seeds (0 to 4) are there for `none`, `R3` at every dose." in text
    assert "collapses in at least half of its runs is **noise:2**" in text
    assert "5 of 5 runs of `R3` survive and 0 of 5 of `none`" in text
    assert "two-sided p = 0.00794" in text
    assert "| none | 5/5 (0.57 to 1.00) | 0/5 (0.00 to 0.43) |" in text
    assert "| R3 | noise:2 | 5 | +0.750 | 0 | 5 | 0.0625 |" in text
    assert "| R3 | bf16 | 5 | +0.000 | 0 | 0 | 1 |" in text
    for name in ("survival.svg", "reward.svg"):
        assert "<path" in (tmp_path / "docs" / name).read_text()


@pytest.mark.parametrize(
    ("arm", "dose", "interim"),
    [("R3", "noise:2", True), ("none", "noise:2", True), ("none", "bf16", True), ("R3", "bf16", False)],
)
def test_a_p_is_interim_while_a_missing_run_could_change_it(arm: str, dose: str, interim: bool) -> None:
    """The page had called its p of four seeds the result of a study of five. A run of R3 at a dose that is
    not compared changes nothing; one of none at a lower dose could make that the dose of the comparison."""
    rows = [page.brief(row) for row in rows_of_study()]
    left = [row for row in rows if (row["arm"], row["dose"], row["seed"]) != (arm, dose, 3)]
    assert ("interim p" in page.primary_comparison(left, "R3", "none", SEEDS)) is interim


def test_a_cell_with_fewer_seeds_says_so(study: Path) -> None:
    rows = page.read(study)
    left = [row for row in rows if row["seed"] < (2 if row["dose"] == "noise:2" else 5)]
    cell = page.cell_of(left, "R3", "noise:2")
    assert page.final(cell, left, len(SEEDS)) == "0.750 ± 0.000 n=2 (+0.000)"
    assert page.final(page.cell_of(rows, "R3", "noise:2"), left, len(SEEDS)) == "0.750 ± 0.000 (+0.000)"
    alone = [row for row in rows if row["dose"] != "bf16" or row["seed"] == 0]
    assert page.final(page.cell_of(alone, "none", "noise:2"), alone, 5) == "0.000 ± 0.000 (-0.750 of 1)"
    told = page.complete(left, SEEDS)
    assert told.startswith("All 5 seeds (0 to 4) are there for `none`, `R3` at bf16. The other 2 cells have")


def test_a_run_that_falls_at_the_very_end_has_not_kept_its_score() -> None:
    """At noise:2 runs of none fell so late that the registered rule counted them as survivors."""
    rows = [page.brief(row) for row in rows_of_study()]
    late = [
        {**row, "collapsed": None} if (row["arm"], row["dose"]) == ("none", "noise:2") else row
        for row in rows
    ]
    assert page.survived(page.cell_of(late, "none", "noise:2")).startswith("5/5")
    table = page.kept_table(late, "none")
    assert "end at 0.375 or more" in table and "Not registered" in table
    assert "| none | 5/5 (0.57 to 1.00) | 0/5 (0.00 to 0.43) |" in table
    assert page.kept_table(page.cell_of(rows, "R3", "bf16"), "none") == ""


def test_shuffled_routes_are_no_measure_of_replay() -> None:
    rows = [page.brief(row) for row in (line("R3", "bf16", 0, True), line("shuffled", "bf16", 0, True))]
    assert "| bf16 | 1 |" in page.measured_table(rows)
    assert page.measured_table(rows[1:]) == ""


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
def test_differences_are_over_the_seeds_that_both_have(pairs: list[tuple[int, int]]) -> None:
    mine, other = (
        [{"seed": seed, "after": {"clean": seed + 10 * i}} for seed in {pair[i] for pair in pairs}]
        for i in (0, 1)
    )
    shared = {a for a, _ in pairs} & {b for _, b in pairs}
    assert page.differences(mine, other) == [-10] * len(shared)
    assert page.differences(other, mine) == [10] * len(shared)


def test_a_run_that_is_there_twice_counts_once(study: Path, tmp_path: Path) -> None:
    """Two workers went on from copies of one file, whose lines were then in both; and what both had run anew
    differed in its seconds, so that `sort -u` kept it twice."""
    once, again = page.read(study), rows_of_study()
    both = save([*rows_of_study(), *({**row, "seconds": 31.0} for row in again)], tmp_path / "both.jsonl")
    assert page.read(both) == once


def test_what_people_wrote_stays_and_the_data_makes_the_same_page(study: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "page.md").write_text(f"# Ours\n\n{page.BEGIN}\nold\n{page.END}\n\nlimits\n")
    page.write(page.read(study), docs, seeds=SEEDS)
    first = (docs / "page.md").read_bytes()
    assert first.startswith(b"# Ours\n") and first.endswith(b"\nlimits\n") and b"\nold\n" not in first
    page.write(page.read(docs / "collapse.jsonl"), docs, seeds=SEEDS)
    assert (docs / "page.md").read_bytes() == first


def test_a_study_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no finished run yet"):
        page.read(tmp_path / "none.jsonl")


def test_a_dense_control_stands_beside_the_study(study: Path, tmp_path: Path) -> None:
    dense = [page.brief(line("none", dose, seed, True)) for dose in ("bf16", "int4") for seed in SEEDS]
    page.write(page.read(study), tmp_path / "docs", dense=dense, seeds=SEEDS)
    control = (tmp_path / "docs" / "page.md").read_text().partition("### Dense control")[2]
    assert "10 runs of a dense model that starts at 0.250" in control
    assert "| none | 0.750 ± 0.000 | 0.750 ± 0.000 (+0.000) |" in control and "minus" not in control
