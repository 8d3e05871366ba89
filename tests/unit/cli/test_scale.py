"""``ostinato scale``: what is asked comes out, what may not be told does not, mistakes are one sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scale_files import SCALERL, answered, evaluations, new_run, scale, write_csv

from ostinato.scaling.curve import Sigmoid
from ostinato.scaling.reading import amount

FASTER = Sigmoid(R0=0.4, A=0.52, B=1.92, C_mid=1200.0)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5 C_mid: identified."""
    one = evaluations(12_700)
    return write_csv(tmp_path_factory.mktemp("csv") / "long.csv", one.compute.tolist(), one.score.tolist())


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one C_mid: nothing may be told."""
    one = evaluations(2542, n=8)
    return write_csv(tmp_path_factory.mktemp("csv") / "short.csv", one.compute.tolist(), one.score.tolist())


# -- one curve


@pytest.mark.slow
def test_a_fit_tells_intervals_beside_other_laws(
    long: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file = tmp_path / "fit.json"
    assert scale("fit", long, "--json", json_file) == 0
    text, found = capsys.readouterr().out, json.loads(json_file.read_text())
    assert found["standing"] == "identified" and found["evaluations"] == 20
    assert found["A"]["low"] < 0.61 < found["A"]["high"]
    assert found["least_squares"]["A"] == pytest.approx(0.61, abs=0.01)
    assert {law["form"] for law in found["laws"]} == {
        *("sigmoid-posterior", "sigmoid", "sigmoid-free-R0", "power-law", "log-error"),
    }
    assert "device-hours" in text


def test_a_curve_that_is_not_identified_has_no_median_and_says_why(
    short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = answered(capsys, "fit", short)
    assert code == 0 and found["standing"] == "not identified" and "C_mid" in found["reason"]
    for name in ("A", "B", "C_mid"):
        assert found[name]["median"] is None and found[name]["low"] < found[name]["high"]
    assert found["least_squares"] is None and found["laws"] == [] and found["by_cutoff"] == []
    code, found = answered(capsys, "forecast", short, "--at", "100k", "--target", "0.5")
    assert found["at"][0]["score"]["median"] is None and found["at"][0]["score"]["low"] is not None
    assert found["targets"] == [{"target": 0.5, "probability": None, "compute": None}]


def test_a_forecast_and_the_compute_for_a_target(long: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = answered(
        capsys, "forecast", long, "--at", "20k", "--at", "1e5", "--target", "0.6", "--target", "0.9"
    )
    assert code == 0
    for one in found["at"]:
        truth = float(SCALERL.score(one["compute"]))
        assert one["score"]["low"] < truth < one["score"]["high"]
        assert one["measured"]["low"] < one["score"]["low"]
    near, far = found["targets"]
    assert near["compute"]["low"] < float(SCALERL.compute_for(0.6)) < (near["compute"]["high"] or math.inf)
    assert far["probability"] == 0 and far["compute"]["median"] is None  # infinite
    assert scale("forecast", long, "--target", "0.9") == 0
    assert "never" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "least", "code", "action"),
    [("14k", 0.05, 10, "stop"), ("100k", 1e-4, 0, "continue"), ("20k", 0.006, 20, "undecided")],
)
def test_decisions_have_exit_codes(
    long: Path, budget: str, least: float, code: int, action: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found_code, found = answered(capsys, "decide", long, "--budget", budget, "--min-gain", least)
    assert (found_code, found["action"], found["exit_code"]) == (code, action, code)


# -- two runs


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two series in one file."""
    path = tmp_path_factory.mktemp("csv") / "both.csv"
    runs = {"slow": evaluations(12_700), "fast": evaluations(12_700, curve=FASTER)}
    rows = [
        f"{name},{C},{R}\n" for name, one in runs.items() for C, R in zip(one.compute, one.score, strict=True)
    ]
    path.write_text("recipe,compute,score\n" + "".join(rows))
    return path


def test_two_series_of_a_file_compare(both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = answered(capsys, "compare", both, "--by", "recipe", "--R0", 0.4)
    first, second = found["arms"]
    assert code == 0 and [first["arm"], second["arm"]] == ["slow", "fast"]
    assert second["A_less"]["median"] == pytest.approx(-0.09, abs=0.01)
    assert second["verdict"] == "moves A (down)" and first["verdict"] == "-"
    _, found = answered(
        capsys, "compare", both, "--by", "recipe", "--R0", 0.4, "--series", "fast", "--series", "slow"
    )
    assert found["arms"][1]["verdict"] == "moves A (up)"
    assert scale("compare", both, "--by", "recipe", "--R0", 0.4) == 0
    assert "less that of slow" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_is_given_twice_is_refused(long: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would pass for a seed that agrees."""
    assert scale("compare", long, long) == 2
    assert "keep one of these runs" in capsys.readouterr().err


# -- the books


@pytest.mark.slow
def test_a_ledger_that_a_kill_has_torn_is_read_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "run")
    with run.ledger.path.open("ab") as file:
        file.write(b'{"event": "step", "step": 21, "sec')
    for command in (("ledger",), ("fit", "--axis", "flops")):
        assert scale(command[0], run.path, *command[1:]) == 0
        assert "torn by a kill and is not counted" in capsys.readouterr().out
    _, found = answered(capsys, "fit", run.path)
    assert found["evaluations"] == 20
    code, found = answered(capsys, "ledger", run.path)
    assert code == 0 and found["runs"][0]["steps"] == 20


@pytest.mark.slow
def test_a_run_folder_is_fitted_over_its_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path / "run")
    code, found = answered(capsys, "forecast", run.path, "--at", "100T")
    assert code == 0 and found["axis"] == "flops" and found["window"] == [1e12, 20e12]
    assert found["held_out"] == "eval, 1000 prompts"


# -- mistakes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fit", "nowhere"], "neither a run folder nor a CSV file"),
        (["fit", "LONG", "--cut", "many"], "--cut is 'many'; write a positive number"),
        (["fit", "LONG", "--until", "-3"], "--until is '-3'; write a positive number"),
        (["fit", "LONG", "--cut", "20k"], "none of it between --cut and --until"),
        (["fit", "LONG", "--score", "reward"], "no column 'reward'; its columns are compute, score"),
        (["fit", "LONG", "--series", "x"], "--series is 'x', and "),
        (["fit", "LONG", "--split", "test"], "--split is given, but "),
        (["fit", "LONG", "--until", "1.5k"], "3 parameters need as many"),
        (["forecast", "LONG"], "give --at a compute or --target a score"),
        (["forecast", "LONG", "--target", "62"], "--target is 62; use a score between 0 and 1"),
        (["decide", "LONG", "--budget", "1k"], "budget is 1000 and 12700 of it are spent"),
        (["compare", "LONG"], "has one series; name another run, or two series of a file"),
        (["ledger", "nowhere"], "holds no recipe.toml"),
    ],
)
def test_user_errors_are_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, long: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale(*(str(long) if word == "LONG" else word for word in arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ostinato: ") and captured.err.count("\n") == 1
    assert sentence in captured.err


def test_a_broken_ledger_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = new_run(tmp_path / "run")
    lines = run.ledger.path.read_text().splitlines(keepends=True)
    run.ledger.path.write_text("".join([*lines[:3], "not json\n", *lines[3:]]))
    for command in ("fit", "ledger"):
        assert scale(command, run.path) == 2
        assert "line 4 of" in capsys.readouterr().err


def test_what_belongs_to_a_csv_is_refused_for_a_run(
    tmp_path: Path, long: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "run")
    assert scale("fit", run.path, "--R0", 0.4) == 2
    assert "--R0 is given, but" in capsys.readouterr().err
    assert scale("compare", run.path, long) == 2  # flops and GPU-hours
    assert "read both with the same axis" in capsys.readouterr().err


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-6, 1e24), st.sampled_from(["", "k", "M", "G", "T", "P", "E"]))
def test_amounts(value: float, letter: str) -> None:
    factor = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}[letter]
    assert amount(f"{value!r}{letter}", "--at") == factor * value
