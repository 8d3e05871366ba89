"""``ostinato scale`` on curves that carry little: strict JSON, and nothing that looks like a forecast."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scale_files import SCALERL, answered, evaluations, new_run, scale, write_csv

from ostinato.launch.machine import record_start
from ostinato.scaling.commands import following, has_ended, watched
from ostinato.scaling.curve import Sigmoid
from ostinato.scaling.reading import Reading, read_one
from ostinato.scaling.views import Answer

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
SILENT = ("flat", "falling", "collapsing", "three")


@pytest.fixture(scope="module")
def csv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of each curve."""
    folder = tmp_path_factory.mktemp("curves")
    for name, (compute, score) in CURVES.items():
        write_csv(folder / f"{name}.csv", compute.tolist(), score.tolist())
    return folder


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The JSON object of a command that is no error."""
    code, found = answered(capsys, *arguments)
    assert code in (0, 10, 20)
    return found


COMMANDS = (
    ("fit",),
    ("forecast", "--at", "1e5", "--target", "0.5", "--target", "0.99"),
    ("decide", "--budget", "50k"),
    ("watch",),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", CURVES)
def test_every_answer_is_strict_json(name: str, csv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, *options in COMMANDS:
        assert told(capsys, command, csv / f"{name}.csv", *options)["series"] == name
    other = "short" if name == "long" else "long"
    assert told(capsys, "compare", csv / f"{name}.csv", csv / f"{other}.csv")["names"] == [name, other]


def test_so_are_those_about_curves_that_are_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    curve = ("--R0", 0.4, "--A", 0.61, "--B", 1.92, "--c-mid", 2542)
    assert told(capsys, "simulate", *curve)["A"] == 0.61
    assert told(capsys, "plan-pilot", *curve, "--every", "2k", "--width", 1e-6)["compute"] is None


@pytest.mark.parametrize("name", SILENT)
def test_a_curve_that_carries_nothing_tells_no_number(
    name: str, csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a flat curve the intervals of B and C_mid were those of the prior."""
    page = tmp_path / "page.html"
    fitted = told(capsys, "fit", csv / f"{name}.csv", "--html", page)
    for key in ("A", "B", "C_mid", "least_squares", "C_max_over_C_mid"):
        assert fitted[key] is None
    assert fitted["laws"] == fitted["by_cutoff"] == []
    foretold = told(capsys, "forecast", csv / f"{name}.csv", "--at", "1e5", "--target", "0.6")
    assert foretold["at"] == [{"compute": 1e5, "score": None, "measured": None}]
    assert foretold["targets"] == [{"target": 0.6, "probability": None, "compute": None}]
    decided = told(capsys, "decide", csv / f"{name}.csv", "--budget", "50k")
    assert (decided["action"], decided["gain"], decided["settled"]) == ("undecided", None, None)
    (data,) = re.findall(r'id="chart-data">(.*?)</script>', page.read_text(), re.DOTALL)
    charts = json.loads(data)
    assert list(charts) == ["curve"]
    assert {one["label"] for one in charts["curve"]["series"]} == {"fitted"}


def test_the_page_of_a_run_that_is_too_short_shows_a_band_and_no_best_curve(
    csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    found = told(capsys, "fit", csv / "short.csv", "--html", page)
    assert found["A"]["median"] is None and found["least_squares"] is None
    (data,) = re.findall(r'id="chart-data">(.*?)</script>', page.read_text(), re.DOTALL)
    charts = json.loads(data)
    assert list(charts) == ["curve"]
    assert [one["label"] for one in charts["curve"]["series"]] == ["90 %", "fitted"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flag"), [("steep", "B at bound"), ("plateau", "B and C_mid not known")])
def test_a_run_that_was_saturated_when_first_evaluated_has_no_C_mid(
    name: str, flag: str, csv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, "fit", csv / f"{name}.csv")
    assert found["standing"] == "identified" and flag in found["flags"]
    assert found["A"]["median"] is not None and found["C_max_over_C_mid"] is None
    assert found["B"]["median"] is found["C_mid"]["median"] is found["least_squares"]["C_mid"] is None
    compared = told(capsys, "compare", csv / f"{name}.csv", csv / "long.csv")
    assert compared["shared"] is compared["crosses"] is None and compared["unknown"] == name
    assert compared["higher_A"] is not None
    for each in [*found["by_cutoff"], *(law["parameters"] for law in found["laws"])]:
        assert each.get("B") is None and each.get("C_mid") is None


# -- several seeds


def test_seeds_of_a_side_have_commas_between(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    better = Sigmoid(R0=0.4, A=0.64, B=1.92, C_mid=2542.0)
    files = {}
    for name, curve in (("a", SCALERL), ("b", better)):
        for seed in (0, 1, 2):
            one = evaluations(12_700, curve=curve, seed=10 * seed + (name == "b"))
            file = write_csv(tmp_path / f"{name}{seed}.csv", one.compute.tolist(), one.score.tolist())
            files.setdefault(name, []).append(str(file))
    page = tmp_path / "page.html"
    one = told(capsys, "compare", files["b"][0], files["a"][0])
    three = told(capsys, "compare", ",".join(files["b"]), ",".join(files["a"]), "--html", page)
    assert three["names"] == ["b0 + b1 + b2", "a0 + a1 + a2"] and three["seeds"] == [3, 3]
    assert [run["side"] for run in three["runs"]] == [0, 0, 0, 1, 1, 1]
    assert three["higher_A"] >= one["higher_A"] > 0.85
    width = [found["difference"]["high"] - found["difference"]["low"] for found in (one, three)]
    assert width[1] < 0.7 * width[0] and three["between"] < 0.02 < one["between"]
    assert page.read_text().count('class="whisker"') == 12
    assert scale("compare", files["a"][0], f"{files['b'][0]},nowhere.csv") == 2
    assert "nowhere.csv is neither a run folder nor a CSV" in capsys.readouterr().err


# -- the cut


@pytest.mark.slow
def test_an_automatic_cut_is_told_with_its_sweep(csv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scale("forecast", csv / "long.csv", "--at", "1e5", "--cut", "auto") == 0
    text = capsys.readouterr().out
    assert "Cut: the length of an epoch is not known; over 8 cuts A moves by" in text and "chosen" in text
    found = told(capsys, "fit", csv / "long.csv", "--cut", "auto:2k")
    assert found["window"][0] >= 2000 and found["cut"]["sweep"][0]["first"] == found["window"][0]
    assert told(capsys, "fit", csv / "long.csv")["cut"] is None
    assert told(capsys, "fit", csv / "short.csv", "--cut", "auto")["cut"]["sweep"] == []
    assert scale("fit", csv / "long.csv", "--cut", "automatic") == 2
    assert "write auto, auto:1.5k or a positive number" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (16, "the first epoch (up to compute 2e+12) is left out"),
        (48, "holds half"),
        (80, "is 2.0 epochs long"),
    ],
)
def test_a_recipe_knows_its_epoch(
    prompts: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = f"[task]\nn_train = {prompts}\n[rollout]\nprompts_per_step = 8\n"
    run = new_run(tmp_path / "run", task=task)
    found = told(capsys, "fit", run.path, "--cut", "auto", "--axis", "flops")
    assert said in found["cut"]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("began", "said"),
    [
        ({"train_prompts": 16}, "the first epoch (up to compute 2e+12) is left out"),
        ({}, "an epoch is not known"),
    ],
)
def test_all_rows_of_a_file_are_an_epoch_of_as_many_as_there_were(
    began: dict[str, int], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """task.n_train = 0 stands for every row of the file. It was taken for none at all: "the first epoch (up
    to compute 0)". A run that does not say how many there were has no known epoch."""
    run = new_run(tmp_path / "run", task="[task]\nn_train = 0\n[rollout]\nprompts_per_step = 8\n")
    if began:
        record_start(run, train_prompts=16)
    assert said in told(capsys, "fit", run.path, "--cut", "auto", "--axis", "flops")["cut"]["reason"]


# -- following


def test_following_waits_for_the_first_evaluations(tmp_path: Path) -> None:
    """A run that had just been started ended the watch: it had no evaluation."""
    run = new_run(tmp_path / "run", last=6)
    rows = list(run.eval.rows())
    run.eval.path.unlink()
    assert not has_ended(run)
    said: list[int] = []

    def look() -> Any:
        return watched(read_one(run.path, Reading(cut="2T"), waiting=True)) if len(said) or rows else None

    def say(answer: Answer) -> int:
        said.append(answer.result["evaluations"])
        return 0

    def pause() -> None:
        """Two more evaluations; after the last of them the process takes its leave."""
        run.eval.append(*rows[:2])
        del rows[:2]
        if not rows:
            run.ledger.append({"event": "end", "session": 1, "at": 2000.0, "step": 6, "why": "stopped"})

    looks = iter([None])
    assert (
        following(lambda: next(looks, None) or (look() if run.eval.path.exists() else None), say, pause) == 0
    )
    assert said == [4, 5] and has_ended(run)


def test_following_tells_that_truncation_has_become_an_alarm(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", last=10)
    codes: list[int] = []

    def say(answer: Answer) -> int:
        codes.append(answer.exit_code)
        return answer.exit_code

    def pause() -> None:
        for step in range(11, 21):
            run.write(step, {"completions/clipped_ratio": 0.3})

    assert following(lambda: watched(read_one(run.path, Reading())), say, pause) == 10
    assert codes == [0, 10]


# -- what does not compare


def test_runs_scored_on_different_sets_do_not_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [new_run(tmp_path / name) for name in ("one", "other")]
    for run, held_out in zip(runs, ("0123456789ab", "ba9876543210"), strict=True):
        rows = [row | {"set": "eval", "held_out": held_out} for row in run.eval.rows()]
        run.eval.path.unlink()
        run.eval.append(*rows)
    assert scale("compare", runs[0].path, runs[1].path) == 2
    assert "scores of different held-out sets do not compare" in capsys.readouterr().err
    seeds = f"{runs[0].path},{runs[1].path}"
    assert scale("compare", seeds, runs[0].path) == 2  # nor may they stand on one side
