"""What may be said of a curve, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lab.scaling import published
from ostinato.scaling.curve import Sigmoid
from ostinato.scaling.decide import forecast
from ostinato.scaling.gates import Assessment, Flag, Standing, assess
from ostinato.scaling.noise import simulate
from ostinato.scaling.plan import simulated
from ostinato.scaling.posterior import posterior
from ostinato.scaling.series import Series, read_csv, series

SCALERL = Sigmoid(R0=0.4, A=0.61, B=1.92, C_mid=2542.0)
C = np.linspace(500, 10_000, 20)


def noise(seed: int = 0, n: int = 20) -> np.ndarray:
    return simulate(np.random.default_rng(seed), 1, n, 0.0042, 0.45)[0]


def has_fallen(found: Assessment) -> bool:
    """From where it began, or from what it had reached."""
    return not {Flag.FALLING, Flag.TAIL}.isdisjoint(found.flags)


def points(name: str) -> Series:
    file = published("scalerl_points.csv")
    by = ("figure", "series")
    found = read_csv(file, compute="gpu_hours", score="pass_rate", by=by, R0=0.4)
    return {one.name: one for one in found}[name].between(first=1500)


def test_a_long_run_is_identified() -> None:
    found = assess(posterior(simulated(SCALERL, C)))
    assert found.standing is Standing.IDENTIFIED
    assert found.A is not None and found.A.low <= 0.61 <= found.A.high
    assert found.ratio == pytest.approx(4, rel=0.2)


def test_between_two_and_three_C_mid_a_forecast_is_provisional() -> None:
    found = assess(posterior(simulated(SCALERL, C * 0.65, seed=4)))
    assert found.standing is Standing.PROVISIONAL
    assert "identify it" in found.reason


@pytest.mark.parametrize("seed", range(5))
def test_short_of_one_and_a_half_C_mid_nothing_is_identified(seed: int) -> None:
    found = assess(posterior(simulated(SCALERL, C * 1.4 * 2542 / 10_000, seed=seed)))
    assert found.standing is Standing.NOT_IDENTIFIED
    assert found.A is not None and found.A.width > 0.1  # told as wide as it is ...
    assert math.isnan(found.A.median)  # ... and without what would look like a forecast


@pytest.mark.parametrize("seed", range(5))
def test_a_flat_curve_is_refused(seed: int) -> None:
    found = assess(posterior(series("flat", C, 0.4 + noise(seed), R0=0.4)))
    assert found.standing is Standing.NOT_IDENTIFIED
    assert "not risen beyond their noise" in found.reason
    assert found.silent and not has_fallen(found)  # its intervals would be those of the prior


def test_a_falling_curve_is_refused_and_has_no_interval() -> None:
    found = assess(posterior(series("falling", C, np.linspace(0.4, 0.3, 20) + noise(), R0=0.4)))
    assert (found.standing, found.A) == (Standing.NOT_IDENTIFIED, None)
    assert Flag.FALLING in found.flags and found.silent


def test_a_collapsing_curve_is_refused_and_has_no_interval() -> None:
    score = SCALERL.score(C) + noise() - np.maximum(0, C - 7500) * 2e-5
    found = assess(posterior(series("collapsing", C, score, R0=0.4)))
    assert (found.standing, found.A) == (Standing.NOT_IDENTIFIED, None)
    assert "below what had been reached" in found.reason


@pytest.mark.parametrize("level", [0.45, 0.42, 0.0])
@pytest.mark.parametrize("fallen", [1, 2, 3])
@pytest.mark.parametrize("n", [8, 10, 12, 20])
def test_a_collapse_at_the_end_is_seen_however_short_the_run(n: int, fallen: int, level: float) -> None:
    """Its own jump was taken for noise: 12 evaluations of which the last 3 had collapsed "had not risen;
    there is no curve yet", and 20 of which the last one had were forecast to end at 0.57."""
    compute = np.linspace(12_700 / n, 12_700, n)
    score = simulated(SCALERL, compute, seed=n).score
    score[-fallen:] = level
    known = posterior(series("collapsed", compute, score, R0=0.4), draws=512, cells=(24, 48))
    found = assess(known)
    assert has_fallen(found) and found.silent and forecast(known, 50_000).point is None
    assert Flag.NO_GAIN not in found.flags  # it had risen
    assert "below" in found.reason


@pytest.mark.parametrize("n", [10, 20, 40])
def test_a_slow_fall_is_seen(n: int) -> None:
    """0.06 lost over the second half of 10 evaluations was a plateau, "stop" and all."""
    compute = np.linspace(1000, 20_000, n)
    score = SCALERL.score(compute) - 0.06 * np.maximum(0, (compute - 8000) / 12_000) + noise(0, n)
    assert Flag.TAIL in assess(posterior(series("falling", compute, score, R0=0.4))).flags


@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_was_saturated_when_first_evaluated_knows_its_ceiling_alone(seed: int) -> None:
    """Least squares had B at its bound in 22 of 30 such runs; in the others the prior's B and C_mid were told
    as if they had been measured."""
    compute, rng = np.linspace(1000, 20_000, 20), np.random.default_rng(seed)
    found = assess(posterior(series("flat", compute, 0.6 + 0.004 * rng.standard_normal(20), R0=0.2)))
    assert Flag.B_UNKNOWN in found.flags and not found.steep
    assert found.standing is Standing.IDENTIFIED and "at least" in found.reason
    assert found.A is not None and found.A.median == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize("n", [8, 20, 40])
def test_a_run_of_5_C_mid_knows_its_steepness(n: int) -> None:
    assert assess(posterior(simulated(SCALERL, np.linspace(0, 12_710, n + 1)[1:], seed=n))).steep
    assert not assess(posterior(simulated(SCALERL, C * 0.25))).steep  # nothing is identified


def test_half_of_a_slow_run_is_refused() -> None:
    """The parameters of an open run (a 1.7B model on GSM8K) whose half leaves A at its bound of 1."""
    truth = Sigmoid(R0=0.555, A=0.838, B=2.14, C_mid=15.2)
    found = assess(posterior(simulated(truth, np.arange(4, 27, 4), sd=0.009)))
    assert found.standing is Standing.NOT_IDENTIFIED


def test_what_is_said_of_published_runs() -> None:
    assert assess(posterior(points("Fig1a ScaleRL-bs2048"))).standing is Standing.IDENTIFIED
    collapsed = assess(posterior(points("Fig2 DeepSeek-GRPO")))
    assert collapsed.standing is Standing.NOT_IDENTIFIED and Flag.TAIL in collapsed.flags
