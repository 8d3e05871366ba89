"""``ostinato bench scaling``: what it prints is JSON, and what cannot be tested is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lab import scaling as bench
from lab.backtest import settlement, summary
from lab.harness import tell


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


@pytest.mark.slow
def test_an_undecided_run_is_told_when_it_will_be_decided() -> None:
    found = settlement(6)
    assert 0 < found.told <= found.undecided <= 6 and found.decided >= 0.5 and found.right == 1
