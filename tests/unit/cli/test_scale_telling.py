"""``ostinato scale`` on curves that carry little: strict JSON, and nothing that looks like a forecast."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scale_files import SCALERL, answered, evaluations, new_run, scale, write_csv

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
)


@pytest.mark.slow
@pytest.mark.parametrize("name", CURVES)
def test_every_answer_is_strict_json(name: str, csv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command, *options in COMMANDS:
        assert told(capsys, command, csv / f"{name}.csv", *options)["series"] == name
    other = "short" if name == "long" else "long"
    compared = told(capsys, "compare", csv / f"{name}.csv", csv / f"{other}.csv")
    assert [arm["arm"] for arm in compared["arms"]] == [name, other]


@pytest.mark.parametrize("name", SILENT)
def test_a_curve_that_carries_nothing_tells_no_number(
    name: str, csv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a flat curve the intervals of B and C_mid were those of the prior."""
    fitted = told(capsys, "fit", csv / f"{name}.csv")
    for key in ("A", "B", "C_mid", "least_squares", "C_max_over_C_mid"):
        assert fitted[key] is None
    assert fitted["laws"] == fitted["by_cutoff"] == []
    foretold = told(capsys, "forecast", csv / f"{name}.csv", "--at", "1e5", "--target", "0.6")
    assert foretold["at"] == [{"compute": 1e5, "score": None, "measured": None}]
    assert foretold["targets"] == [{"target": 0.6, "probability": None, "compute": None}]
    decided = told(capsys, "decide", csv / f"{name}.csv", "--budget", "50k")
    assert (decided["action"], decided["gain"], decided["settled"]) == ("undecided", None, None)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "flag"), [("steep", "B at bound"), ("plateau", "B and C_mid not known")])
def test_a_run_that_was_saturated_when_first_evaluated_has_no_C_mid(
    name: str, flag: str, csv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, "fit", csv / f"{name}.csv")
    assert found["standing"] == "identified" and flag in found["flags"]
    assert found["A"]["median"] is not None and found["C_max_over_C_mid"] is None
    assert found["B"]["median"] is found["C_mid"]["median"] is found["least_squares"]["C_mid"] is None
    _, compared = told(capsys, "compare", csv / "long.csv", csv / f"{name}.csv")["arms"]
    assert compared["B"] is compared["C_mid"] is compared["B_shared"] is None
    assert compared["A_less"] is not None and set(compared["lower"]) == {"A"}
    for each in [*found["by_cutoff"], *(law["parameters"] for law in found["laws"])]:
        assert each.get("B") is None and each.get("C_mid") is None


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
