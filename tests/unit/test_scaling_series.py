"""Evaluations over compute: what is read, and what is refused in words."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ostinato.run import RunFolder
from ostinato.scaling.series import Axis, read_csv, read_run, require_comparable, series

C, R = [1.0, 2.0, 3.0], [0.5, 0.55, 0.6]


def test_the_evaluation_at_0_is_R0() -> None:
    one = series("run", [0, *C], [0.4, *R], stderr=[0.01, 0.02, 0.02, 0.02])
    assert (one.R0, one.R0_stderr, len(one)) == (0.4, 0.01, 3)
    assert one.compute.tolist() == C


def test_rewards_are_mapped_to_scores() -> None:
    one = series("run", [0, *C], [-0.2, *(2 * r - 1 for r in R)], stderr=[0.02] * 4, low=-1, high=1)
    assert pytest.approx(0.4) == one.R0
    np.testing.assert_allclose(one.score, R)
    assert one.stderr is not None
    np.testing.assert_allclose(one.stderr, 0.01)
    assert series("run", C, R, R0=-1, low=-1, high=1).R0 == 0


@pytest.mark.parametrize(
    ("compute", "score", "said"),
    [
        ([1, 3, 2], R, "unsorted: compute falls from 3 to 2 at evaluation 3"),
        ([1, 2, 2], R, r"compute 2 twice \(evaluations 2 and 3\)"),
        ([1, math.nan, 3], R, "compute nan and score 0.55 in row 2; leave the row out"),
        ([-1, 2, 3], R, "compute -1 at evaluation 1; use positive"),
        (C, [0.5, 0.55, math.nan], "score nan in row 3"),
        (C, [0.5, -0.55, 0.6], "score -0.55 at evaluation 2; scores lie in .* low=-1, high=1"),
        (C, [0.5, 0.55, 60], "score 60 at evaluation 3"),
        (C, R[:2], "3 computes for 2 scores"),
    ],
)
def test_bad_series_are_refused_in_words(compute: list[float], score: list[float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        series("run", compute, score, R0=0.4)


def test_R0_is_needed_and_has_to_be_a_score() -> None:
    with pytest.raises(ValueError, match="no evaluation at compute 0; give R0"):
        series("run", C, R)
    with pytest.raises(ValueError, match=r"score 1\.4 before training"):
        series("run", C, R, R0=1.4)
    with pytest.raises(ValueError, match="standard error"):
        series("run", C, R, R0=0.4, stderr=[0.1, -0.1, 0.1])
    with pytest.raises(ValueError, match="use low below high"):
        series("run", C, R, R0=0.4, low=1, high=0)


def test_runs_that_do_not_compare_are_refused() -> None:
    one = series("one", C, R, R0=0.4, held_out="math")
    require_comparable(one, series("two", C, R, R0=0.4, held_out="math"))
    with pytest.raises(ValueError, match="one counts compute in gpu-hours and two in steps"):
        require_comparable(one, series("two", C, R, R0=0.4, held_out="math", axis=Axis.STEPS))
    with pytest.raises(ValueError, match="'math' and two on 'code'"):
        require_comparable(one, series("two", C, R, R0=0.4, held_out="code"))


def test_windows() -> None:
    one = series("run", C, R, R0=0.4, stderr=[0.1, 0.2, 0.3])
    kept = one.between(2, 3)
    assert kept.compute.tolist() == [2, 3]
    assert kept.stderr is not None and kept.stderr.tolist() == [0.2, 0.3]


# ---- CSV


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_several_series_in_one_file(tmp_path: Path) -> None:
    text = "# where it is from\nrun,h,score,se\na,1,0.5,0.1\nb,2,0.4,0.1\na,2,0.6,0.2\n"
    a, b = read_csv(
        write(tmp_path / "x.csv", text), compute="h", score="score", stderr="se", by=["run"], R0=0.3
    )
    assert (a.name, a.compute.tolist(), a.score.tolist()) == ("a", [1, 2], [0.5, 0.6])
    assert a.stderr is not None and a.stderr.tolist() == [0.1, 0.2]
    assert (b.name, len(b)) == ("b", 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h,score\n1,0.5\n", "no column 'hours'; its columns are h, score"),
        ("hours,score\n", "no rows below its header"),
        ("", "no column 'hours'"),
        ("# c\nhours,score\n1,0.5\n2,\n", "line 4 of .* has '' in column score"),
        ("hours,score\n1,half\n", "line 2 of .* has 'half' in column score"),
        ("hours,score\n2,0.5\n1,0.5\n", "unsorted"),
        ("hours,score\n1,nan\n", "score nan in row 1"),
    ],
)
def test_bad_csv_is_refused_in_words(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_csv(write(tmp_path / "x.csv", text), compute="hours", score="score", R0=0.4)


# ---- run folders


def a_run(path: Path, steps: int = 40, every: int = 10) -> RunFolder:
    run = RunFolder.create(path, "name = 'x'\n")
    for step in range(steps + 1):
        if step:
            tokens, flops = {"sampled": 100.0}, {"useful": 3e9, "wasted": 1e9}
            run.ledger.append({"step": step, "wall_s": 36.0, "tokens": tokens, "flops": flops})
        if step % every == 0:
            row = {"step": step, "split": "eval", "n": 90, "samples": 4, "excluded": 10}
            run.eval.append(row | {"pass@1": 0.25 + step / 100, "reward": step / 50 - 0.5})
    return run


@pytest.mark.parametrize(
    ("axis", "per_step"), [(Axis.STEPS, 1), (Axis.HOURS, 0.01), (Axis.TOKENS, 100), (Axis.FLOPS, 4e9)]
)
def test_a_run_by_every_axis_of_its_ledger(tmp_path: Path, axis: Axis, per_step: float) -> None:
    one = read_run(a_run(tmp_path / "run").path, axis)
    np.testing.assert_allclose(one.compute, per_step * np.array([10, 20, 30, 40]))
    np.testing.assert_allclose(one.score, [0.35, 0.45, 0.55, 0.65])
    assert (one.R0, one.held_out, one.axis) == (0.25, "eval, 100 prompts", axis)
    assert one.R0_stderr == pytest.approx(math.sqrt(0.25 * 0.75 / 360), rel=0.01)


def test_a_torn_ledger_line_is_left_out(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with run.ledger.path.open("ab") as file:
        file.write(b'{"step":41,"wall_s":36.')  # killed in the middle of a line
    assert len(read_run(run.path)) == 4


def test_rewards_of_a_run(tmp_path: Path) -> None:
    one = read_run(a_run(tmp_path / "run").path, metric="reward", low=-1, high=1)
    assert one.R0 == 0.25
    np.testing.assert_allclose(one.score, [0.35, 0.45, 0.55, 0.65])
    assert one.stderr is not None
    assert one.stderr[0] == pytest.approx(math.sqrt(0.35 * 0.65 / 360), rel=0.01)


def test_what_a_run_does_not_have_is_said(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with pytest.raises(ValueError, match="no evaluation of split 'test'"):
        read_run(run.path, split="test")
    with pytest.raises(ValueError, match="has no gpu-hours; use steps or hours"):
        read_run(run.path, Axis.GPU_HOURS)
    with pytest.raises(ValueError, match="has no pass@9 at step 0"):
        read_run(run.path, metric="pass@9")
    run.eval.append({"step": 50, "split": "eval", "n": 90, "samples": 4, "pass@1": 0.7})
    with pytest.raises(ValueError, match="evaluated after step 50, which its ledger lacks"):
        read_run(run.path)
