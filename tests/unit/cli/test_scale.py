"""``ostinato scale``: what is requested comes out, what may not be reported does not, mistakes are one
sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from commands import ended
from hypothesis import given
from hypothesis import strategies as st
from small_ledger import a_step, killed_and_resumed, start

from ostinato.apps.scaling.curve import Sigmoid
from ostinato.apps.scaling.reading import parse_amount
from ostinato.apps.scaling.series import Series, simulate_series
from ostinato.run import RunFolder

SCALERL = Sigmoid(R0=0.4, A=0.61, B=1.92, C_mid=2542.0)


def scale(*arguments: object) -> int:
    return ended(Path(), "scale", *map(str, arguments))


def answered(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    """(exit code, the JSON object), which is all that is printed, by a parser that takes no NaN."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} is not JSON")

    code = scale(*arguments, "--json", "-")
    return code, json.loads(capsys.readouterr().out, parse_constant=refuse)


def evaluations(last: float, n: int = 20, curve: Sigmoid = SCALERL, seed: int = 0) -> Series:
    return simulate_series(curve, np.linspace(last / n, last, n), seed=seed)


def write_csv(path: Path, compute: Sequence[float], score: Sequence[float], R0: float = 0.4) -> Path:
    rows = "".join(f"{C},{R}\n" for C, R in zip(compute, score, strict=True))
    path.write_text(f"compute,score\n0,{R0}\n{rows}")
    return path


WORK = {
    "tokens": {"prefilled": 10, "sampled": 100, "trained": 50, "dropped": {"truncated": 50}},
    "flops": {"sample": 4 * 10**11, "train": 6 * 10**11, "measure": 0},
}


def new_run(path: Path, last: float = 20.0, truncated: float = 0.0, task: str = "") -> RunFolder:
    """20 steps of 1e12 FLOPs each, evaluated before and after every one."""
    run = RunFolder.create(path, f"[trainer]\nsteps = 20\n{task}")
    truth = Sigmoid(R0=0.4, A=0.61, B=1.9, C_mid=4.0)
    row = {"split": "eval", "n": 1000, "samples": 16}
    run.eval.append({**row, "step": 0, "pass@1": 0.4, "seconds": 2.0})
    run.ledger.append(start(1, 1000.0, price=0.0, loading=0.0))
    for step in range(1, int(last) + 1):
        run.write(step, {"completions/clipped_ratio": truncated})
        run.ledger.append(a_step(1, step, 1000.0 + 10.0 * step, **WORK))
        run.eval.append({**row, "step": step, "pass@1": float(truth.score(step)), "seconds": 1.0})
    return run


FASTER = Sigmoid(R0=0.4, A=0.52, B=1.92, C_mid=1200.0)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5 C_mid: identified."""
    one = evaluations(12_700)
    return write_csv(tmp_path_factory.mktemp("csv") / "long.csv", one.compute.tolist(), one.score.tolist())


# -- one curve


@pytest.mark.slow
def test_a_fit_tells_intervals_and_whether_a_line_predicts_better(
    long: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_file = tmp_path / "fit.json"
    assert scale("fit", long, "--json", json_file) == 0
    text, found = capsys.readouterr().out, json.loads(json_file.read_text())
    assert found["standing"] == "identified" and found["evaluations"] == 20
    assert found["A"]["low"] < 0.61 < found["A"]["high"]
    assert found["least_squares"]["A"] == pytest.approx(0.61, abs=0.01)
    assert found["rival"] is None, "a sigmoid is predicted better by one than by a line in ln C"
    assert "device-hours" in text


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


# -- the accounts


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
        (
            ["fit", "LONG", "--until", "1.5k"],
            "2 of the 5 evaluations that a curve takes, in the window and after training began; train with",
        ),
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


def test_what_belongs_to_a_csv_is_refused_for_a_run(
    tmp_path: Path, long: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "run")
    assert scale("fit", run.path, "--R0", 0.4) == 2
    assert "--R0 is given, but" in capsys.readouterr().err
    assert scale("compare", run.path, long) == 2  # flops and GPU-hours
    assert "read both with the same axis" in capsys.readouterr().err


@given(st.floats(1e-6, 1e24), st.sampled_from(["", "k", "M", "G", "T", "P", "E"]))
def test_amounts(value: float, letter: str) -> None:
    factor = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}[letter]
    assert parse_amount(f"{value!r}{letter}", "--at") == factor * value


# ---- ``ostinato scale`` on curves that carry little: strict JSON, and nothing that looks like a forecast


C = np.linspace(500, 10_000, 20)
NOISE = evaluations(10_000).score - SCALERL.score(C)
CURVES: Mapping[str, tuple[np.ndarray, np.ndarray]] = {
    "flat": (C, 0.4 + NOISE),
    "falling": (C, np.linspace(0.4, 0.3, 20) + NOISE),
    "collapsing": (C, SCALERL.score(C) + NOISE - np.maximum(0, C - 7500) * 2e-5),
    "three": (C[[5, 10, 19]], SCALERL.score(C[[5, 10, 19]])),
    "short": (C / 5, SCALERL.score(C / 5) + NOISE),
    "steep": (C, np.where(C < 700, 0.45, 0.6) + NOISE),
    "plateau": (C, 0.6 + NOISE),
    "long": (1.3 * C, SCALERL.score(1.3 * C) + NOISE),
}


@pytest.fixture(scope="module")
def csv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of each curve."""
    folder = tmp_path_factory.mktemp("curves")
    for name, (compute, score) in CURVES.items():
        write_csv(folder / f"{name}.csv", compute.tolist(), score.tolist())
    return folder


def reported(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The JSON object of a command that is no error."""
    code, found = answered(capsys, *arguments)
    assert code in (0, 10, 20)
    return found


COMMANDS = (
    ("fit",),
    ("forecast", "--at", "1e5", "--target", "0.5", "--target", "0.99"),
    ("decide", "--budget", "50k"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", CURVES)
def test_every_answer_is_strict_json(name: str, csv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, *options in COMMANDS:
        assert reported(capsys, command, csv / f"{name}.csv", *options)["series"] == name
    other = "short" if name == "long" else "long"
    compared = reported(capsys, "compare", csv / f"{name}.csv", csv / f"{other}.csv")
    assert [arm["arm"] for arm in compared["arms"]] == [name, other]


# ---- ``ostinato scale ledger``: what runs have cost, side by side


def run_of(path: Path, *rows: dict[str, Any]) -> RunFolder:
    run = RunFolder.create(path, "[trainer]\nsteps = 3\n")
    run.ledger.append(*rows)
    return run


def test_one_run_in_words_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run", *killed_and_resumed())
    assert scale("ledger", run.path) == 0
    text = capsys.readouterr().out
    for words in (
        "run: 3 steps, started twice",
        "not trained: unused",
        "6.0 s",
        "27.5%",
        "16.5 k",
        "restarts",
    ):
        assert words in text
    assert scale("ledger", run.path, "--json", "-") == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert sum(found["flops"].values()) == 16_500
    assert found["compute"]["flops"] == 16_500
    assert found["pools"]["local"]["lost"] == 6.0 and found["evaluation"]["flops"] == 400


@pytest.mark.parametrize(
    ("rows", "output"),
    [
        ([], "run run has no row in ledger.jsonl; it has finished no step yet"),
        ([{"step": 1, "wall_s": 2.0}], "line 1 of "),
    ],
)
def test_what_cannot_be_added_up_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]], output: str
) -> None:
    assert scale("ledger", run_of(tmp_path / "run", *rows).path) == 2
    captured = capsys.readouterr()
    assert output in captured.err and captured.err.count("\n") == 1 and captured.out == ""
