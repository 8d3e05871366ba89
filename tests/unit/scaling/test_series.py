"""Evaluations over compute: what is read, and what is refused in words."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from small_ledger import a_step, killed_and_resumed, start

from ostinato.apps.scaling.series import read_csv, read_run, require_comparable, series
from ostinato.every import Axis
from ostinato.run import RunFolder

C, R = [1.0, 2.0, 3.0], [0.5, 0.55, 0.6]


@pytest.mark.parametrize(
    ("compute", "score", "sentence"),
    [
        ([1, 3, 2], R, "unsorted: compute falls from 3 to 2 at evaluation 3"),
        ([1, 2, 2], R, r"compute 2 twice \(evaluations 2 and 3\)"),
        ([1, math.nan, 3], R, "compute nan and score 0.55 in row 2; leave the row out"),
        ([-1, 2, 3], R, "compute -1 at evaluation 1; use positive"),
        (C, [0.5, 0.55, math.nan], "score nan in row 3"),
        (C, [40.0, 55.0, 60.0], "score 40 at evaluation 1; scores lie in .*percentages: .* high=100"),
        (C, [0.5, -0.55, 0.6], "score -0.55 at evaluation 2; scores lie in .* low=-1, high=1"),
        (C, [0.5, 0.55, 60], "score 60 at evaluation 3"),
        (C, R[:2], "3 computes for 2 scores"),
    ],
)
def test_bad_series_are_refused_in_words(compute: list[float], score: list[float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
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
    ("text", "sentence"),
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
def test_bad_csv_is_refused_in_words(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        read_csv(write(tmp_path / "x.csv", text), compute="hours", score="score", R0=0.4)


# ---- run folders


def a_run(path: Path, steps: int = 40, every: int = 10) -> RunFolder:
    run = RunFolder.create(path, "name = 'x'\n")
    run.ledger.append(start(1, 0.0, loading=0.0))
    for step in range(steps + 1):
        if step:
            run.ledger.append(a_step(1, step, 10.0 * step))
        if step % every == 0:
            row = {"step": step, "split": "eval", "n": 90, "samples": 4, "excluded": 10}
            run.eval.append(row | {"pass@1": 0.25 + step / 100, "reward": step / 50 - 0.5})
    return run


@pytest.mark.parametrize(
    ("axis", "per_step"),
    [
        *((Axis.STEPS, 1), (Axis.HOURS, 1 / 360), (Axis.TOKENS, 100), (Axis.FLOPS, 3500)),
        *((Axis.DEVICE_HOURS, 1 / 360), (Axis.MONEY, 2 / 360)),
    ],
)
def test_a_run_by_every_axis_of_its_ledger(tmp_path: Path, axis: Axis, per_step: float) -> None:
    one = read_run(a_run(tmp_path / "run").path, axis)
    np.testing.assert_allclose(one.compute, per_step * np.array([10, 20, 30, 40]))
    np.testing.assert_allclose(one.score, [0.35, 0.45, 0.55, 0.65])
    assert (one.R0, one.held_out, one.axis) == (0.25, "eval, 100 prompts", axis)
    assert one.R0_stderr == pytest.approx(math.sqrt(0.25 * 0.75 / 360), rel=0.01)


def test_what_a_run_does_not_have_is_named(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with pytest.raises(ValueError, match="no evaluation of split 'test'"):
        read_run(run.path, split="test")
    with pytest.raises(ValueError, match="has no pass@9 at step 0"):
        read_run(run.path, metric="pass@9")
    run.eval.append({"step": 50, "split": "eval", "n": 90, "samples": 4, "pass@1": 0.7})
    with pytest.raises(ValueError, match="evaluated after step 50, which its ledger lacks"):
        read_run(run.path)


def test_an_evaluation_without_a_score_is_left_out_and_counted(tmp_path: Path) -> None:
    """One pass@1 of null, of an evaluation whose graders had failed, made all of the run unreadable."""
    run = a_run(tmp_path / "run")
    rows = [row | ({"pass@1": None} if row["step"] == 20 else {}) for row in run.eval.rows()]
    run.eval.path.unlink()
    run.eval.append(*rows)
    one = read_run(run.path, Axis.STEPS)
    assert (one.compute.tolist(), one.unmeasured) == ([10, 30, 40], 1)
    assert (len(one.between(first=35)), one.between(first=35).unmeasured) == (1, 1)
    run.eval.path.unlink()
    run.eval.append(*[row | ({"pass@1": None} if row["step"] == 0 else {}) for row in rows])
    with pytest.raises(ValueError, match="has no pass@1 at step 0"):
        read_run(run.path)


def test_errors_are_those_of_the_answers_to_these_prompts(tmp_path: Path) -> None:
    """Where the run has measured them; where all answers agree, one more might have erred."""
    run = a_run(tmp_path / "run", steps=20)
    spread = {"answer_stderr": 0.011, "reward_answer_stderr": 0.02}
    rows = [row | spread for row in run.eval.rows()]
    rows[-1] |= {"answer_stderr": 0.0, "reward_answer_stderr": None}
    run.eval.path.unlink()
    run.eval.append(*rows)
    one, reward = read_run(run.path), read_run(run.path, metric="reward", low=-1, high=1)
    assert one.R0_stderr == 0.011 and one.stderr is not None
    assert one.stderr.tolist() == pytest.approx([0.011, 1 / 362])
    assert reward.stderr is not None  # halved, as the reward is
    assert reward.stderr.tolist() == pytest.approx([0.01, math.sqrt(0.25 * 0.45 / 90) / 1], rel=0.35)


def test_sets_have_names_and_hashes(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", steps=20)
    rows = list(run.eval.rows())
    run.eval.path.unlink()
    for row in rows:
        main = {"set": "eval", "held_out": "0123456789ab", "weights": "int8"}
        run.eval.append(row | main, row | {"set": "code", "held_out": "ba9876543210", "pass@1": 0.1})
    run.eval.append(
        rows[-1] | {"set": "eval", "held_out": "0123456789ab", "weights": "model", "exported": True}
    )
    assert (read_run(run.path).held_out, len(read_run(run.path))) == (
        "0123456789ab",
        2,
    )  # the exported one apart
    assert read_run(run.path, split="code").score.tolist() == [0.1, 0.1]
    with pytest.raises(ValueError, match="'0123456789ab' and run on 'ba9876543210'; scores of different"):
        require_comparable(read_run(run.path), read_run(run.path, split="code"))
    run.eval.append(rows[-1] | {"set": "eval", "held_out": "another", "weights": "int8", "step": 21})
    run.ledger.append(a_step(1, 21, 210.0))
    with pytest.raises(ValueError, match="scored on another eval set at step 21 than before"):
        read_run(run.path)


def test_another_sampler_in_the_middle_is_refused_in_words(tmp_path: Path) -> None:
    """Resumed with engine.weights=model after int8, a run lost all evaluations that followed without a word:
    6 of 12 were left, `watch` saw no new one, and forecasts of the loop took half of the compute for all."""
    run = a_run(tmp_path / "run")
    rows = list(run.eval.rows())
    run.eval.path.unlink()
    run.eval.append(*(row | {"weights": "int8" if row["step"] < 30 else "model"} for row in rows))
    sentence = (
        "run run was scored with engine.weights 'model' at step 30 and with 'int8' before; scores of diff"
    )
    with pytest.raises(ValueError, match=sentence):
        read_run(run.path)


def test_a_price_that_no_recipe_had(tmp_path: Path) -> None:
    """A run that began without a price could never be counted in money: its sessions keep their terms."""
    run = RunFolder.create(tmp_path / "run", "name = 'x'\n")
    run.ledger.append(*killed_and_resumed(price=0.0))
    for step in range(4):
        run.eval.append({"step": step, "split": "eval", "n": 9, "pass@1": step / 10})
    with pytest.raises(
        ValueError, match="session 1 of the run has no price: give it one with --price-per-dev"
    ):
        read_run(run.path, Axis.MONEY)
    hours = read_run(run.path, Axis.DEVICE_HOURS).compute
    first = 44 / 3600  # device-hours of the session without a price; the other has had one of 3
    money = read_run(run.path, Axis.MONEY, price=2.0).compute
    np.testing.assert_allclose(money[-1], 2 * first + 3 * (hours[-1] - first))


def test_a_resumed_run_is_read_with_all_that_it_cost(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", "name = 'x'\n")
    run.ledger.append(*killed_and_resumed())
    for step in range(4):
        run.eval.append({"step": step, "split": "eval", "n": 9, "pass@1": step / 10})
    assert read_run(run.path).compute.tolist() == [3500, 13_000, 16_500]


def test_the_mark_that_spreadsheets_put_before_a_header_is_no_part_of_a_name(tmp_path: Path) -> None:
    """Excel writes "CSV UTF-8" with a byte order mark: there was "no column 'compute'; its columns are
    compute, score"."""
    path = tmp_path / "run.csv"
    path.write_text("compute,score\n0,0.4\n10,0.5\n", encoding="utf-8-sig")
    (found,) = read_csv(path, compute="compute", score="score")
    assert (found.R0, found.score.tolist()) == (0.4, [0.5])
