"""What may be reported of a curve, what is refused, and what is decided by it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lab.scaling import published
from ostinato.apps.scaling.curve import Sigmoid, simulate
from ostinato.apps.scaling.decide import Action, Terms, decide, decide_by_posterior, forecast, reach
from ostinato.apps.scaling.gates import Assessment, Flag, Standing, assess, decide_standing
from ostinato.apps.scaling.posterior import Interval, Posterior, posterior
from ostinato.apps.scaling.series import Series, read_csv, series, simulate_series

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
    found = assess(posterior(simulate_series(SCALERL, C)))
    assert found.standing is Standing.IDENTIFIED
    assert found.A is not None and found.A.low <= 0.61 <= found.A.high
    assert found.ratio == pytest.approx(4, rel=0.2)


def test_between_two_and_three_C_mid_a_forecast_is_provisional() -> None:
    found = assess(posterior(simulate_series(SCALERL, C * 0.65, seed=4)))
    assert found.standing is Standing.PROVISIONAL
    assert "an identified curve lacks" in found.reason


def test_the_reason_names_the_requirement_that_is_missing() -> None:
    """ "reached 3.0 C_mid ...; needs 2 C_mid and 0.15" read as passed, where the width alone had failed."""
    ratios = Interval(low=2.5, median=3.0, high=3.5)
    standing, reason = decide_standing((), ratios, 0.2)
    assert standing is Standing.NOT_IDENTIFIED
    assert reason.endswith("; a provisional forecast lacks a width of at most 0.15")
    _, reason = decide_standing((), Interval(low=1.0, median=1.5, high=2.0), 0.2)
    assert reason.endswith(" lacks at least 2 C_mid and a width of at most 0.15")
    assert decide_standing((), ratios, 0.05)[0] is Standing.IDENTIFIED
    assert decide_standing((Flag.A_AT_BOUND,), ratios, 0.05)[0] is Standing.PROVISIONAL


@pytest.mark.parametrize("seed", range(5))
def test_short_of_one_and_a_half_C_mid_nothing_is_identified(seed: int) -> None:
    found = assess(posterior(simulate_series(SCALERL, C * 1.4 * 2542 / 10_000, seed=seed)))
    assert found.standing is Standing.NOT_IDENTIFIED
    assert found.A is not None and found.A.width > 0.1  # shown as wide as it is ...
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
    score = simulate_series(SCALERL, compute, seed=n).score
    score[-fallen:] = level
    known = posterior(series("collapsed", compute, score, R0=0.4), draws=512, cells=(24, 48))
    found = assess(known)
    assert has_fallen(found) and found.silent and forecast(known, 50_000).score is None
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
    """Least squares had B at its bound in 22 of 30 such runs; in the others the prior's B and C_mid were
    shown as if they had been measured."""
    compute, rng = np.linspace(1000, 20_000, 20), np.random.default_rng(seed)
    found = assess(posterior(series("flat", compute, 0.6 + 0.004 * rng.standard_normal(20), R0=0.2)))
    assert Flag.B_UNKNOWN in found.flags and not found.steep
    assert found.standing is Standing.IDENTIFIED and "at least" in found.reason
    assert found.A is not None and found.A.median == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize("n", [8, 20, 40])
def test_a_run_of_5_C_mid_knows_its_steepness(n: int) -> None:
    assert assess(posterior(simulate_series(SCALERL, np.linspace(0, 12_710, n + 1)[1:], seed=n))).steep
    assert not assess(posterior(simulate_series(SCALERL, C * 0.25))).steep  # nothing is identified


def test_half_of_a_slow_run_is_refused() -> None:
    """The parameters of an open run (a 1.7B model on GSM8K) whose half leaves A at its bound of 1."""
    truth = Sigmoid(R0=0.555, A=0.838, B=2.14, C_mid=15.2)
    found = assess(posterior(simulate_series(truth, np.arange(4, 27, 4), sd=0.009)))
    assert found.standing is Standing.NOT_IDENTIFIED


def test_what_is_said_of_published_runs() -> None:
    assert assess(posterior(points("Fig1a ScaleRL-bs2048"))).standing is Standing.IDENTIFIED
    collapsed = assess(posterior(points("Fig2 DeepSeek-GRPO")))
    assert collapsed.standing is Standing.NOT_IDENTIFIED and Flag.TAIL in collapsed.flags


# ---- decisions: go on or stop, reach a target


def known(last: float, curve: Sigmoid = SCALERL, n: int = 25, seed: int = 0, name: str = "run") -> Posterior:
    return posterior(simulate_series(curve, np.linspace(last / n, last, n), seed=seed, name=name))


def test_a_saturated_run_stops() -> None:
    found = decide(known(20_000), Terms(budget=40_000, min_gain=0.02))
    assert (found.action, found.action.exit_code) == (Action.STOP, 10)
    assert found.gain is not None and found.gain.high < 0.02


def test_a_price_that_the_gain_does_not_pay() -> None:
    """A gain of 0.02 to 0.05 for a price of 0.72 was "undecided; measure on": only the least gain stopped."""
    terms = Terms(budget=80_000, min_gain=0.005, price=1e-5)  # 72,000 units have to bring 0.72
    found = decide(known(8_000, n=40), terms)
    assert found.action is Action.STOP and "has to bring 0.72" in found.reason
    assert found.gain is not None and terms.min_gain < found.gain.low < found.gain.high < 0.72


def test_a_law_that_foretold_better_and_promises_the_gain_is_no_reason_to_stop() -> None:
    """A score that rises with ln C for good was predicted at 4 times the compute as 0.633 [0.608, 0.665], and
    was 0.708: a sigmoid, refitted, always ends soon."""
    C = np.linspace(1000, 20_000, 20)
    noise = 0.004 * np.random.default_rng(1).standard_normal(20)
    run = posterior(series("log", C, 0.2 + 0.1 * np.log(C / 500) + noise, R0=0.2))
    terms = Terms(budget=40_000, min_gain=0.05)  # and 0.1 ln 2 = 0.069 is to come
    found = decide(run, terms)
    assert decide_by_posterior(run, terms) is Action.STOP and found.action is Action.UNDECIDED
    assert "a line in ln C predicts 0.069" in found.reason and "predicted this run better" in found.rival
    assert decide(known(20_000), Terms(budget=40_000, min_gain=0.02)).rival == ""


def test_a_curve_that_refutes_the_model_gives_no_number() -> None:
    C = np.linspace(500, 10_000, 20)
    fallen = posterior(series("fallen", C, np.linspace(0.4, 0.3, 20), R0=0.4))
    decision, shown = decide(fallen, Terms(budget=20_000)), forecast(fallen, 1e5)
    assert (decision.action, decision.gain) == (Action.UNDECIDED, None)
    assert "fallen below where they began" in decision.reason
    assert (shown.score, shown.measured) == (None, None)


def test_forecasts_have_a_point_only_where_the_curve_is_identified() -> None:
    shown, hidden = forecast(known(12_000), 1e5), forecast(known(2_500), 1e5)
    assert shown.score is not None and shown.measured is not None
    assert shown.score.median == pytest.approx(0.61, abs=0.02)
    assert shown.measured.width > shown.score.width
    assert hidden.score is not None and hidden.score.width > 0.1
    assert math.isnan(hidden.score.median)


def test_reaching_a_target() -> None:
    run = known(15_000, n=40)
    near, far = reach(run, 0.58), reach(run, 0.75)
    assert near.probability == pytest.approx(1, abs=0.01)
    assert near.compute is not None
    assert near.compute.low <= float(SCALERL.compute_for(0.58)) <= near.compute.high
    assert far.probability == pytest.approx(0, abs=0.01)
    assert far.compute is not None and far.compute.median == math.inf
    assert reach(known(2_500), 0.58).probability is None
