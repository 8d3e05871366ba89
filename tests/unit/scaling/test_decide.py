"""Decisions: go on or stop, reach a target, compare two runs, plan a pilot."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from ostinato.axis import Axis
from ostinato.scaling.compare import compare, last_crossing
from ostinato.scaling.curve import Sigmoid, crossovers
from ostinato.scaling.decide import Action, Terms, decide, forecast, reach, verdict
from ostinato.scaling.plan import MOST, cadence, futures, plan_pilot, simulated
from ostinato.scaling.posterior import Posterior, posterior
from ostinato.scaling.seeds import FLOOR, Z90, spread
from ostinato.scaling.series import series

SCALERL = Sigmoid(R0=0.4, A=0.61, B=1.92, C_mid=2542.0)


def known(last: float, curve: Sigmoid = SCALERL, n: int = 25, seed: int = 0, name: str = "run") -> Posterior:
    return posterior(simulated(curve, np.linspace(last / n, last, n), seed=seed, name=name))


def test_a_saturated_run_stops() -> None:
    found = decide(known(20_000), Terms(budget=40_000, min_gain=0.02))
    assert (found.action, found.action.exit_code, found.settled) == (Action.STOP, 10, None)
    assert found.gain is not None and found.gain.high < 0.02


def test_a_rising_run_goes_on() -> None:
    found = decide(known(8_000, n=40), Terms(budget=80_000, min_gain=0.005))
    assert (found.action, found.action.exit_code) == (Action.CONTINUE, 0)


def test_a_price_that_the_gain_does_not_pay() -> None:
    """A gain of 0.02 to 0.05 for a price of 0.72 was "undecided; measure on": only the least gain stopped."""
    terms = Terms(budget=80_000, min_gain=0.005, price=1e-5)  # 72,000 units have to bring 0.72
    found = decide(known(8_000, n=40), terms, settle=False)
    assert found.action is Action.STOP and "has to bring 0.72" in found.reason
    assert found.gain is not None and terms.min_gain < found.gain.low < found.gain.high < 0.72


@pytest.mark.slow
def test_undecided_tells_when_it_will_be_settled() -> None:
    run = known(8_000, n=20, seed=1)
    found = decide(run, Terms(budget=60_000, min_gain=0.03))
    assert (found.action, found.action.exit_code) == (Action.UNDECIDED, 20)
    assert found.settled is not None and 8_000 < found.settled <= 60_000
    assert "measure on, until compute" in found.reason
    assert decide(run, Terms(budget=60_000, min_gain=0.03), settle=False).settled is None


def test_a_budget_that_is_nearly_spent_is_not_settled_by_spending_it() -> None:
    """With one evaluation to come the answer was "until compute 9000" of a budget of 9000."""
    found = decide(known(8_000, n=8, seed=1), Terms(budget=9_000, min_gain=0.006))
    assert (found.action, found.settled) == (Action.UNDECIDED, None)


def test_futures_are_asked_about_what_is_left_now() -> None:
    """They were asked about what is left by then, which is worth nothing in the end: of 30 runs that were
    told when they would be settled, 25 "stopped" there, 13 of them after a gain that had been worth it."""
    late, terms = known(55_000, n=44), Terms(budget=60_000, min_gain=0.02)
    assert verdict(late, terms) is Action.STOP
    assert verdict(late, terms, since=5_000) is Action.CONTINUE  # 0.044 were to come
    assert verdict(late, terms, since=15_000) is Action.STOP  # and 0.007


def test_a_law_that_foretold_better_and_promises_the_gain_is_no_reason_to_stop() -> None:
    """A score that rises with ln C for good was foretold at 4 times the compute as 0.633 [0.608, 0.665], and
    was 0.708: a sigmoid, refitted, always ends soon."""
    C = np.linspace(1000, 20_000, 20)
    noise = 0.004 * np.random.default_rng(1).standard_normal(20)
    run = posterior(series("log", C, 0.2 + 0.1 * np.log(C / 500) + noise, R0=0.2))
    terms = Terms(budget=40_000, min_gain=0.05)  # and 0.1 ln 2 = 0.069 is to come
    found = decide(run, terms, settle=False)
    assert verdict(run, terms) is Action.STOP and found.action is Action.UNDECIDED
    assert "another law promises 0.05" in found.reason
    assert found.rival.startswith("Another law, sigmoid-free-R0, has foretold this run better")
    assert decide(known(20_000), Terms(budget=40_000, min_gain=0.02)).rival == ""


def test_a_curve_that_is_not_identified_decides_nothing() -> None:
    found = decide(known(2_500, n=10), Terms(budget=3_000, min_gain=0.01), settle=False)
    assert found.action is Action.UNDECIDED


def test_a_curve_that_refutes_the_model_gives_no_number() -> None:
    C = np.linspace(500, 10_000, 20)
    fallen = posterior(series("fallen", C, np.linspace(0.4, 0.3, 20), R0=0.4))
    decision, told = decide(fallen, Terms(budget=20_000)), forecast(fallen, 1e5)
    assert (decision.action, decision.gain, decision.settled) == (Action.UNDECIDED, None, None)
    assert "fallen below where they began" in decision.reason
    assert (told.point, told.score, told.measured) == (None, None, None)


def test_a_spent_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget is 5000 and 20000 of it are spent"):
        decide(known(20_000), Terms(budget=5_000))


def test_forecasts_tell_a_point_only_where_the_curve_is_identified() -> None:
    told, untold = forecast(known(12_000), 1e5), forecast(known(2_500), 1e5)
    assert told.point == pytest.approx(0.61, abs=0.02)
    assert told.score is not None and told.measured is not None
    assert told.measured.width > told.score.width
    assert untold.point is None and untold.score is not None and untold.score.width > 0.1
    assert math.isnan(untold.score.median)


def test_reaching_a_target() -> None:
    run = known(15_000, n=40)
    near, far = reach(run, 0.58), reach(run, 0.75)
    assert near.probability == pytest.approx(1, abs=0.01)
    assert near.compute is not None
    assert near.compute.low <= float(SCALERL.compute_for(0.58)) <= near.compute.high
    assert far.probability == pytest.approx(0, abs=0.01)
    assert far.compute is not None and far.compute.median == math.inf
    assert reach(known(2_500), 0.58).probability is None


# ---- comparisons

LARGE = Sigmoid(R0=0.4, A=0.66, B=1.7, C_mid=6000.0)


def test_the_better_ceiling_wins_though_it_is_behind_now() -> None:
    small, large = known(15_000, name="small"), known(30_000, LARGE, n=30, seed=1, name="large")
    found = compare(small, large, at=5_000)
    assert found.higher_A is not None and found.higher_A < 0.1
    assert found.higher_score is not None and found.higher_score > 0.95
    assert found.crosses is not None and found.crosses > 0.9
    (true,) = crossovers(SCALERL, LARGE, 5_000, 1e6)
    assert found.crossover is not None and found.crossover.low <= true <= found.crossover.high


def test_runs_that_differ_by_seed_alone_are_not_told_apart() -> None:
    one, other = known(20_000, n=40, seed=5), known(20_000, replace(SCALERL, A=0.622), n=40, seed=6)
    with_floor, without = compare(one, other), compare(one, other, floor=0.0)
    assert with_floor.higher_A is not None and without.higher_A is not None
    assert abs(with_floor.higher_A - 0.5) < abs(without.higher_A - 0.5)
    assert with_floor.higher_A > 0.05


def test_a_difference_is_as_uncertain_as_two_independent_runs_make_it() -> None:
    """Both posteriors are drawn with seed 0. Rank by rank their A went up and down together, and the interval
    of a difference came out less than half as wide as two independent runs allow."""
    one, other = known(8_000, n=20, seed=5), known(8_000, n=20, seed=6)
    difference = compare(one, other, floor=0.0).difference
    assert difference is not None
    independent = math.hypot(one.A.std(), other.A.std()) * 2 * 1.645
    assert difference.width == pytest.approx(independent, rel=0.15)


def test_swapping_the_runs_swaps_the_answer() -> None:
    one, other = known(15_000), known(30_000, LARGE, n=30, seed=1)
    there, back = compare(one, other, at=9_000), compare(other, one, at=9_000)
    assert there.higher_A is not None and back.higher_A is not None
    assert there.higher_A == pytest.approx(1 - back.higher_A, abs=0.02)
    assert there.shared is not None and back.shared is not None
    assert pytest.approx(back.shared.B[::-1]) == there.shared.B


def test_slopes_are_compared_at_a_shared_A() -> None:
    steep, slow = known(20_000, n=40), known(20_000, replace(SCALERL, B=1.4), n=40, seed=2)
    shared = compare(steep, slow).shared
    assert shared is not None and shared.B[0] > shared.B[1]
    assert pytest.approx((steep.fit.curve.A + slow.fit.curve.A) / 2) == shared.A


@pytest.mark.parametrize(("tau", "most"), [(0.003, 0.012), (0.03, 0.06)])
def test_own_seeds_tell_how_far_seeds_differ(tau: float, most: float) -> None:
    """Seeds that hardly differ narrow the floor of 0.02, seeds that differ more widen it, and the difference
    of the recipes narrows with their number."""
    rng = np.random.default_rng(0)
    sides = [
        [
            known(15_000, replace(SCALERL, A=A + tau * rng.standard_normal()), seed=10 * at + side)
            for at in range(4)
        ]
        for side, A in enumerate((0.62, 0.60))
    ]
    one, four = compare(sides[0][0], sides[1][0]), compare(*sides)
    assert 0.02 < one.between < 0.025 and four.between < most  # the paper's runs are three
    assert (four.between > 0.02) == (tau > 0.02)
    assert one.difference is not None and four.difference is not None
    assert four.difference.low < 0.02 < four.difference.high
    assert tau > 0.02 or four.difference.width < one.difference.width / 2


def test_one_seed_is_a_side_of_one() -> None:
    one, other = known(15_000), known(15_000, LARGE, seed=1)
    alone, listed = compare(one, other, at=9_000), compare([one], [other], at=9_000)
    assert (alone.higher_A, alone.higher_score) == (listed.higher_A, listed.higher_score)
    assert (alone.seeds, alone.between) == ((1, 1), listed.between)
    assert compare(one, other, floor=0.0).between == 0


def test_seeds_are_counted_as_an_ablation_counts_them() -> None:
    """Comparison and ablation had an estimator each of how far seeds differ, with different answers."""
    sides = [[known(15_000, n=20, seed=2 * at + side) for at in range(2)] for side in range(2)]
    groups = [(np.array([k.A.mean() for k in side]), np.array([k.A.std() for k in side])) for side in sides]
    tau = spread(groups, FLOOR / Z90, np.random.default_rng(0), len(sides[0][0].A))
    assert compare(*sides).between == pytest.approx(Z90 * np.median(tau))


def test_slopes_and_crossings_of_saturated_runs_are_not_told() -> None:
    """Two runs that were flat from their first evaluation on "had" B of 0.83 against 8.00, and a crossing:
    of the prior."""
    C, rng = np.linspace(1000, 20_000, 20), np.random.default_rng(3)
    runs = [
        posterior(series(name, C, level + 0.004 * rng.standard_normal(20), R0=0.2))
        for name, level in (("low", 0.60), ("high", 0.62))
    ]
    found = compare(*runs, at=1e5)
    assert (found.shared, found.crosses, found.crossover) == (None, None, None)
    assert found.reason == "" and found.unknown == "low, high"
    assert found.higher_A is not None and found.higher_score is not None


def test_a_ranking_with_a_run_that_is_not_identified_is_refused() -> None:
    found = compare(known(2_000, name="short"), known(15_000), at=5_000)
    assert (found.higher_A, found.higher_score, found.crosses, found.crossover) == (None, None, None, None)
    assert "short is not identified" in found.reason


def test_runs_that_do_not_compare_are_refused() -> None:
    one, other = known(15_000), known(15_000)
    other = replace(other, series=replace(other.series, axis=Axis.FLOPS))
    with pytest.raises(ValueError, match="counts compute in"):
        compare(one, other)


def test_last_crossing_is_the_last_of_the_curve_s_own() -> None:
    """The twin finds all crossings of two curves by bisection."""
    rng = np.random.default_rng(0)
    first = (np.full(50, 0.4), rng.uniform(0.5, 0.7, 50), rng.uniform(1, 3, 50), rng.uniform(1e3, 1e4, 50))
    second = (np.full(50, 0.4), rng.uniform(0.5, 0.7, 50), rng.uniform(1, 3, 50), rng.uniform(1e3, 1e4, 50))
    found = last_crossing([first], [second], 500, 1e6)
    for at, ours in enumerate(found):
        one, other = (Sigmoid(R0=d[0][at], A=d[1][at], B=d[2][at], C_mid=d[3][at]) for d in (first, second))
        twin = crossovers(one, other, 500, 1e6)
        assert (ours == pytest.approx(twin[-1], rel=0.01)) if twin else math.isnan(ours)


# ---- plans


def test_futures_go_on_as_often_as_so_far() -> None:
    run = known(5_000, n=10)
    assert cadence(run.series) == pytest.approx(500)
    for way in futures(run, 8_000, 3):
        assert len(way) == 16 and way.compute[-1] == pytest.approx(8_000)
        np.testing.assert_array_equal(way.score[:10], run.series.score)


def test_a_budget_in_other_units_is_no_matter_of_memory() -> None:
    """--budget 100M for a run that has spent 8k simulated half a million evaluations: 15 GiB."""
    run = known(8_000, n=40)
    (way,) = futures(run, 1e8, 1)
    C = way.compute[40:]
    assert len(C) <= MOST and C[-1] == pytest.approx(1e8, rel=1e-3)
    np.testing.assert_allclose((C - 8_000) / 200, np.round((C - 8_000) / 200), atol=1e-6)
    np.testing.assert_allclose(np.diff(C[:15]), 200)  # what comes soon is as it would be measured


@pytest.mark.parametrize("budget", [1e24, 1.7e308])
def test_a_budget_beyond_integers_has_futures(budget: float) -> None:
    """--budget 1e24 was a TypeError of numpy, whose integers end at 9e18."""
    run = known(8_000, n=40)
    (way,) = futures(run, budget, 1)
    assert 1 < len(way) - 40 <= MOST and way.compute[-1] <= budget
    assert np.all(np.isfinite(way.compute)) and np.all(np.diff(way.compute) > 0)
    assert np.all((way.score >= 0) & (way.score <= 1))


def test_the_shortest_pilot_gives_the_width() -> None:
    pilot = plan_pilot(SCALERL, 260, 0.06, first=1500, steps=12)
    assert pilot.compute is not None
    assert 2 < pilot.compute / SCALERL.C_mid < 4.5  # "A within 0.02 to 0.03 needs about 3 C_mid"
    widths = [width for _, width in pilot.lengths]
    assert all(after <= 1.1 * before for before, after in pairwise(widths))
    assert plan_pilot(SCALERL, 260, 0.0001, first=1500, steps=3).compute is None
    with pytest.raises(ValueError, match="every is 0"):
        plan_pilot(SCALERL, 0, 0.06)
    with pytest.raises(ValueError, match="width is 2"):
        plan_pilot(SCALERL, 260, 2.0)
    with pytest.raises(ValueError, match=r"every is 1e\+09, less than a 200th of C_mid \(2.5e\+15\)"):
        plan_pilot(replace(SCALERL, C_mid=2.5e15), 1e9, 0.06)
