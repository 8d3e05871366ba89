"""Factors from measured steps: right where measurements tell terms apart, 1 where nothing does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.plan.calibrate import (
    Calibration,
    Observation,
    calibrate,
    errors,
    keep,
    kept,
    kept_file,
)
from ostinato.plan.time import Efficiency, Roofline

TRUE = {"train/products": 1.8, "train/tensor": 0.6, "train/launch": 1.2}


def steps(number: int, noise: float = 0.0, seed: int = 0) -> list[Observation]:
    """Configurations in which terms have other shares, measured with ``noise``."""
    rng = np.random.default_rng(seed)
    found = []
    for index in range(number):
        terms = {name: float(s) for name, s in zip(TRUE, rng.uniform(0.1, 3.0, 3), strict=True)}
        seconds = sum(s * TRUE[name] for name, s in terms.items()) * float(
            np.exp(noise * rng.standard_normal())
        )
        found.append(Observation(name=str(index), terms=terms, seconds=seconds))
    return found


def test_terms_that_differ_are_told_apart() -> None:
    fitted = calibrate(steps(200))
    for name, factor in TRUE.items():
        assert fitted.factors[name] == pytest.approx(factor, rel=0.02)
    assert fitted.median < 0.01 and fitted.observations == 200


def test_what_was_fitted_holds_elsewhere() -> None:
    fitted = calibrate(steps(20, noise=0.05))
    assert errors(steps(50, seed=1), fitted.factors)[0] < 0.05
    assert errors(steps(50, seed=1), {})[0] > 0.1


@given(st.floats(0.2, 5.0))
def test_one_step_alone_moves_its_terms_alike(times: float) -> None:
    one = Observation(name="a", terms={"x": 3.0, "y": 1.0}, seconds=4.0 * times)
    fitted = calibrate([one])
    assert fitted.factors == pytest.approx({"x": times, "y": times})


def test_factors_are_kept_by_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = kept_file("2 cores of a kind")
    assert file.is_relative_to(tmp_path) and file != kept_file("another")
    assert kept(file) is None
    keep(calibrate(steps(8)), file)
    assert kept(file) == calibrate(steps(8))
    stale = json.loads(file.read_text()) | {"efficiency": {"warp": 0.5}}
    file.write_text(json.dumps(stale))
    assert kept(file) is None  # a field that there is not any more
    del stale["efficiency"]
    file.write_text(json.dumps(stale))
    assert kept(file) is None  # with which efficiencies its terms were made is not known
    file.write_text("{}")
    assert kept(file) is None


def test_a_clock_of_what_was_measured() -> None:
    """Factors of messages become their latency and bandwidth, the others multiply their terms."""
    factors = {"train/products": 2.0, "train/calls": 3.0, "train/bytes": 4.0}
    found = Calibration(
        factors=factors, median=0.1, worst=0.3, observations=9, efficiency={"latency": 1e-3, "ahead": False}
    )
    clock, plain = Roofline.measured(found), Efficiency()
    assert clock.factors == {"train/products": 2.0}
    assert clock.efficiency.latency == pytest.approx(3e-3) and not clock.efficiency.ahead
    assert clock.efficiency.links == pytest.approx(plain.links / 4)
    assert clock.spread["train"] == pytest.approx(0.15)
