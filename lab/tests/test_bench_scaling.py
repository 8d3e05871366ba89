"""``ostinato bench scaling``: JSON, refusals, and published and simulated runs that it is right of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab import scaling as bench
from lab.backtest import SCALERL, summary
from lab.harness import tell
from ostinato.apps.scaling.curve import MEASURED
from ostinato.apps.scaling.gates import Flag, assess
from ostinato.apps.scaling.posterior import posterior
from ostinato.apps.scaling.series import simulate_series
from ostinato.run import to_json


def test_what_is_not_a_number_is_null(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A share of the run that no curve of --points reached wrote NaN, which no other parser reads."""
    result = {"all": summary([]).median_width, "curves": 0}

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    for target in (Path("-"), tmp_path / "bench.json"):
        tell(result, lambda _: "", str(target))
    for text in (capsys.readouterr().out, (tmp_path / "bench.json").read_text()):
        found = json.loads(text.strip(), parse_constant=refuse)
        assert found == {"all": None, "curves": 0}


def test_points_that_nothing_can_be_tested_on_are_refused(tmp_path: Path) -> None:
    points = tmp_path / "points.csv"
    points.write_text("figure,series,gpu_hours,pass_rate\na,b,1600,0.5\na,b,2000,0.55\n")
    with pytest.raises(ValueError, match=r"none of the 1 curves of .* nothing can be tested"):
        bench.Scaling(points=points).measure(lambda _: None)


# ---- published runs and simulated ones: would the forecasts have been right?


def test_the_bars_of_the_bench_hold() -> None:
    """Half of the run foretells its end in 85 % of the published curves and more, at a median width of 0.06
    at most; 88 to 96 % of 500 simulated curves are covered; oracles are those that are known."""
    result = bench.Scaling(rounds=1).measure(lambda _: None)
    assert [name for name, held in result["held"].items() if not held and not name.endswith("_s")] == []
    reported = next(entry["reported"] for entry in result["by_fraction"] if entry["fraction"] == 0.5)
    assert reported["coverage"] >= 0.9
    assert result["synthetic"]["default"]["coverage"] >= 0.9  # wider by design
    assert json.loads(to_json(result))["coverage"] == result["coverage"]
    assert bench.Scaling.table(result).row_count == 12


def test_healthy_runs_seldom_look_fallen() -> None:
    """Forty evaluations, 150 times: one run in a hundred at most."""
    tails = 0
    for seed in range(150):
        run = simulate_series(
            SCALERL, np.linspace(1500, 20_000, 40), sd=MEASURED.floor, rho=MEASURED.rho, seed=seed
        )
        tails += Flag.TAIL in assess(posterior(run, draws=512, cells=(24, 48))).flags
    assert tails / 150 <= 0.01
