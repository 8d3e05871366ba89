"""Leave-one-out: intervals hold with two seeds, verdicts follow the rule, what is no curve is not ranked."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import least_squares

from ostinato.apps.scaling.ablation import (
    REFERENCE,
    SPREAD,
    Ablation,
    Arm,
    Run,
    Verdict,
    ablate,
    condition_on_ceiling,
    decide_verdict,
    draw_spread,
    pool_seeds,
)
from ostinato.apps.scaling.curve import Sigmoid, score, whiten
from ostinato.apps.scaling.posterior import posterior
from ostinato.apps.scaling.series import Series, simulate_series

RECIPE = Sigmoid(R0=0.3, A=0.6, B=1.9, C_mid=1000.0)
SCALE = SPREAD["A"]


def curve(law: Sigmoid, seed: int, last: float = 6000.0) -> Series:
    return simulate_series(law, np.linspace(last / 25, last, 25), sd=0.003, rho=0.3, seed=seed)


def runs(arms: dict[str, Sigmoid], seeds: int = 2) -> list[Run]:
    return [
        Run(arm=name, seed=seed, series=curve(law, 100 * number + seed))
        for number, (name, law) in enumerate(arms.items())
        for seed in range(seeds)
    ]


@pytest.fixture(scope="module")
def found() -> Ablation:
    arms = {
        REFERENCE: RECIPE,
        "lower": replace(RECIPE, A=0.5),
        "slower": replace(RECIPE, C_mid=1800.0),
        "flatter": replace(RECIPE, B=1.1),
        "same": RECIPE,
    }
    broken = replace(curve(RECIPE, 9), score=np.linspace(0.3, 0.1, 25))
    collapsed = [Run(arm="collapsed", seed=seed, series=broken) for seed in range(2)]
    return ablate([*runs(arms), *collapsed])


def arm(found: Ablation, name: str) -> Arm:
    return next(each for each in found.arms if each.name == name)


def test_the_choice_that_lowers_the_ceiling_is_found(found: Ablation) -> None:
    one = arm(found, "lower")
    assert (one.verdict, one.moves) == (Verdict.MOVES_A, ("A",))
    assert one.lower["A"] > 0.99
    assert one.A_less is not None
    assert one.A_less.low < -0.1 < one.A_less.high
    assert one.B_shared is None  # at the recipe's ceiling it would be another curve


def test_no_difference_is_seen_where_there_is_none(found: Ablation) -> None:
    one = arm(found, "same")
    assert (one.verdict, one.moves) == (Verdict.NONE, ())
    assert one.A_less is not None
    assert one.A_less.low < 0 < one.A_less.high


def test_a_collapsed_arm_shows_what_it_reached_and_nothing_else(found: Ablation) -> None:
    one = arm(found, "collapsed")
    assert one.verdict is Verdict.NOT_RANKED
    assert "seed 0" in one.reason
    assert (one.A, one.B, one.C_mid, one.A_less, dict(one.lower)) == (None, None, None, None, {})
    assert one.reached is not None
    assert one.reached.low < 0.13 < one.reached.high


def test_nobody_is_ranked_against_a_recipe_that_is_not_identified() -> None:
    short = [Run(arm=REFERENCE, seed=seed, series=curve(RECIPE, seed, last=900.0)) for seed in range(2)]
    long = runs({"other": RECIPE})
    found = ablate([*short, *(replace(run, seed=run.seed) for run in long)])
    assert found.shared_A is None
    assert arm(found, "other").A is not None  # its own curve may be reported
    assert arm(found, "other").verdict is Verdict.NOT_RANKED
    assert "not identified" in arm(found, "other").reason
    assert found.common == 6000.0
    assert [each.reached_at for each in found.arms] == [900.0, 6000.0]


def test_runs_that_have_not_ended_are_held_up_to_nobody() -> None:
    """The common compute is that of runs which have ended and are ranked; without such, of those that have
    ended, or else of all."""
    long, short = curve(RECIPE, 0), curve(RECIPE, 1, last=900.0)

    def common(*each: tuple[Series, bool]) -> float:
        some = [Run(arm=REFERENCE, seed=at, series=s, ended=ended) for at, (s, ended) in enumerate(each)]
        return ablate(some).common

    assert common((long, True), (short, False)) == 6000.0
    assert common((short, True), (curve(RECIPE, 2, last=800.0), False)) == 900.0
    assert common((short, False), (curve(RECIPE, 2, last=800.0), False)) == 800.0


def test_the_draws_of_two_runs_know_nothing_of_each_other() -> None:
    """Posteriors drawn with one seed go up and down together: differences of two runs had half of their
    error. Runs of an ablation have seeds of their own."""
    found = ablate(runs({REFERENCE: RECIPE, "same": RECIPE}, seeds=1))
    one, other = (each.posteriors[0].A for each in found.arms)
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.05
    one, other = (posterior(curve(RECIPE, seed), seed=0).A for seed in (0, 100))
    assert np.corrcoef(one, other)[0, 1] > 0.3  # why


@pytest.mark.parametrize(
    ("lower", "apart", "verdict", "moves"),
    [
        ({"A": 0.999, "B": 0.5, "C_mid": 0.5}, -0.05, Verdict.MOVES_A, ("A",)),
        ({"A": 0.001, "B": 0.0, "C_mid": 0.5}, 0.01, Verdict.MOVES_A, ("A",)),
        ({"A": 0.9}, -0.03, Verdict.UNSETTLED, ()),
        ({"A": 0.6}, -0.01, Verdict.HALF_NONE, ()),
        ({"A": 0.6, "B": 0.9, "C_mid": 0.1}, -0.01, Verdict.NONE, ()),
        ({"A": 0.6, "B": 0.999, "C_mid": 0.0}, 0.0, Verdict.MOVES_EFFICIENCY, ("B", "C_mid")),
        ({"A": 0.6, "B": 0.993, "C_mid": 0.007}, 0.0, Verdict.NONE, ()),  # beyond 1 %, not beyond half of it
    ],
)
def test_the_rule(lower: dict[str, float], apart: float, verdict: Verdict, moves: tuple[str, ...]) -> None:
    assert decide_verdict(lower, apart, tail=0.01) == (verdict, moves)


# -- between seeds


def by_hand(tau: float, groups: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """ln of the density of ln tau, term by term: the means of a group are marginalised over their centre by
    adding up normal densities along a line."""
    log_p = math.log(tau)
    for means, errors in groups:
        v = tau**2 + errors**2
        at = np.linspace(-3, 3, 20_001)
        each = -0.5 * ((means[:, None] - at) ** 2 / v[:, None]).sum(0) - 0.5 * np.log(v).sum()
        log_p += math.log(np.exp(each).sum())
    return log_p


def test_the_spread_is_its_twin_by_hand() -> None:
    groups = [
        (np.array([0.60, 0.63]), np.array([0.01, 0.02])),
        (np.array([0.50, 0.51, 0.56]), np.array([0.01, 0.01, 0.015])),
    ]
    tau = np.geomspace(SCALE / 20, SCALE * 20, 300)
    log_p = np.array([by_hand(each, groups) for each in tau])
    mass = np.cumsum(np.exp(log_p - log_p.max()))
    wanted = np.interp(np.array([0.1, 0.5, 0.9]) * mass[-1], mass, tau)
    drawn = np.quantile(draw_spread(groups, SCALE, np.random.default_rng(0), 40_000), [0.1, 0.5, 0.9])
    np.testing.assert_allclose(drawn, wanted, rtol=0.04)


@given(
    shift=st.floats(-1, 1),
    factor=st.floats(0.1, 10),
    means=st.lists(st.floats(0.4, 0.6), min_size=2, max_size=5),
)
def test_the_spread_moves_with_the_scale_and_not_with_the_place(
    shift: float, factor: float, means: list[float]
) -> None:
    x, errors = np.array(means), np.full(len(means), 0.01)
    plain = draw_spread([(x, errors)], SCALE, np.random.default_rng(0), 50)
    moved = draw_spread(
        [(factor * (x + shift), factor * errors)], factor * SCALE, np.random.default_rng(0), 50
    )
    np.testing.assert_allclose(moved, factor * plain, rtol=1e-6)


@pytest.mark.parametrize("tau", [0.006, 0.012, 0.05])
def test_intervals_of_two_seeds_hold(tau: float) -> None:
    """Nine arms with two seeds each, many times over, whose own errors are as small as stated or as large."""
    rng, hits = np.random.default_rng(1), []
    for _ in range(100):
        errors = rng.uniform(0.004, 0.012, (9, 2))
        means = 0.6 + tau * rng.standard_normal((9, 2)) + errors * rng.standard_normal((9, 2))
        drawn = draw_spread(list(zip(means, errors, strict=True)), SCALE, rng, 1000)
        for mean, error in zip(means, errors, strict=True):
            seeds = [{"A": m + e * rng.standard_normal(1000)} for m, e in zip(mean, error, strict=True)]
            some = [each | {"B": each["A"], "C_mid": each["A"]} for each in seeds]
            m = pool_seeds(some, dict.fromkeys(SPREAD, drawn), rng)["A"]
            low, high = np.quantile(m, [0.05, 0.95])
            hits.append(low <= 0.6 <= high)
    assert 0.87 <= np.mean(hits) <= 0.97


def test_slopes_at_a_common_ceiling_are_those_of_a_refit() -> None:
    series = curve(RECIPE, 3)
    known = posterior(series)
    for ceiling in (0.59, 0.6, 0.61):

        def left(log: np.ndarray, A: float = ceiling) -> np.ndarray:
            fitted = score(series.compute, series.R0, A, *np.exp(log))
            return whiten(series.score - fitted, known.sd, known.noise.rho)

        B, C_mid = np.exp(least_squares(left, np.log([2.0, 1000.0])).x)
        held = condition_on_ceiling(known, ceiling)
        assert math.exp(held["B"].mean()) == pytest.approx(B, rel=0.04)
        assert math.exp(held["C_mid"].mean()) == pytest.approx(C_mid, rel=0.04)
        assert held["B"].std() < np.log(known.B).std()
