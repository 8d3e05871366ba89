"""Detectors: quiet runs stay quiet at the nominal rate, planted drifts are found."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.apps.product.detectors import (
    Cusum,
    exchange_rate,
    measure_divergence,
    standardise,
    watch_rate,
)
from ostinato.observe.stats import STAKES, Alarm, Bets, grow_wealth

STEPS = 1000
ALPHA = 0.05


def at_most(alarms: int, runs: int, nominal: float) -> bool:
    """Within three standard errors above the nominal rate, which a right detector exceeds once in 700."""
    return alarms / runs <= nominal + 3 * math.sqrt(nominal * (1 - nominal) / runs)


def first_alarms(x: np.ndarray, alpha: float = ALPHA) -> np.ndarray:
    """[runs] the step of each run's alarm, inf without, for observations [runs, steps, n]: many ``Bets``."""
    wealth = np.zeros((len(x), len(STAKES)))
    found = np.full(len(x), math.inf)
    for step in range(x.shape[1]):
        wealth = np.minimum(grow_wealth(wealth, step, np.clip(x[:, step], -1, 1)), 1e100)
        evidence = alpha * (wealth.mean(-1) + 1 / (1 + math.log1p(step + 1)))
        found = np.where((evidence >= 1) & (found == math.inf), step + 1, found)
    return found


def quiet(draw: np.random.Generator, kind: str, runs: int, n: int) -> np.ndarray:
    shape = (runs, STEPS, n)
    if kind == "normal":
        return draw.normal(0, 0.25, shape)
    if kind == "coin":  # the worst that is fair: all or nothing
        return np.where(draw.random(shape) < 0.5, 1.0, -1.0)
    if kind == "skewed":  # rarely 1, mostly a little below 0
        return np.where(draw.random(shape) < 0.1, 1.0, -1 / 9)
    spread = np.where(np.arange(STEPS) % 100 < 50, 0.05, 0.4)  # volatile at times
    return draw.standard_normal(shape) * spread[:, None]


@pytest.mark.parametrize("kind", ["normal", "coin", "skewed", "volatile"])
def test_quiet_bets_alarm_at_most_at_the_nominal_rate_over_1000_steps(kind: str) -> None:
    alarms = np.isfinite(first_alarms(quiet(np.random.default_rng(0), kind, 400, 4)))
    assert at_most(int(alarms.sum()), 400, ALPHA)


@given(st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=3), max_size=8))
def test_the_wealth_is_a_mixture_over_starts(steps: list[list[float]]) -> None:
    """The slow twin keeps a bettor for every start and stake."""
    state = Bets(name="x", alpha=1e-9)
    for x in steps:
        state, _ = state.update(x)
    reserve = [1 / (1 + math.log1p(t)) for t in range(len(steps) + 1)]
    total = reserve[-1]
    for start in range(len(steps)):
        for stake in STAKES:
            won = math.prod(1 + stake * one for x in steps[start:] for one in x)
            total += (reserve[start] - reserve[start + 1]) / len(STAKES) * won
    assert state.evidence / state.alpha == pytest.approx(total)


@given(st.integers(0, 20), st.lists(st.floats(0, 50), min_size=len(STAKES), max_size=len(STAKES)))
def test_a_fair_coin_leaves_the_expected_wealth_as_it_was(at: int, wealth: list[float]) -> None:
    """The supermartingale, exactly: the mean over both sides."""
    before = np.array(wealth)
    after = [grow_wealth(before, at, np.array([side])) for side in (1.0, -1.0)]
    reserve = [1 / (1 + math.log1p(t)) for t in (at, at + 1)]
    mean = (after[0].mean() + after[1].mean()) / 2 + reserve[1]
    assert mean == pytest.approx(before.mean() + reserve[0])


def test_the_fast_runs_of_these_tests_are_bets() -> None:
    draw = np.random.default_rng(3)
    x = draw.normal(0.15, 0.25, (5, 80, 4))
    for run, expected in zip(x, first_alarms(x), strict=True):
        state, alarm = Bets(name="x", alpha=ALPHA), None
        for step in run:
            state, now = state.update(step)
            alarm = alarm or now
        assert alarm is not None and alarm.at == expected and alarm.evidence >= 1 and state.alarmed


def hacked(draw: np.random.Generator, runs: int, onset: int, n: int = 16) -> np.ndarray:
    """Proxy and gold over a reference policy of 20 steps ago: both gain until ``onset``; then the proxy gains
    on and gold loses what the proxy gains. Rewards of a prompt have a deviation of 1, the gain is 0.5."""
    steps = np.arange(STEPS // 2)[:, None]
    proxy = 0.5 + draw.standard_normal((runs, len(steps), n))
    gold = np.where(steps < onset, 0.5, -0.5) + draw.standard_normal((runs, len(steps), n))
    return standardise(measure_divergence(proxy, gold, rate=1.0), scale=math.hypot(0.5, 1.0))


@pytest.mark.parametrize(("onset", "within"), [(0, 12), (100, 16), (400, 18)])
def test_a_proxy_that_leaves_gold_behind_is_found_within_so_many_steps(onset: int, within: int) -> None:
    """16 prompts a step, effect 0.75 / 1.12 deviations: the length of the quiet time before costs little."""
    found = first_alarms(hacked(np.random.default_rng(1), 100, onset), alpha=0.01)
    assert (found > onset).mean() >= 0.99  # nothing while both gain
    delays = found - onset
    assert np.quantile(delays, 0.95) <= within


def test_a_policy_that_learns_what_it_should_is_left_alone() -> None:
    draw = np.random.default_rng(2)
    x = hacked(draw, 200, onset=STEPS)
    assert np.isfinite(first_alarms(x)).sum() == 0


def test_the_exchange_rate_is_that_of_quiet_answers() -> None:
    """A judge in units ten times as large promises no more gold."""
    draw = np.random.default_rng(4)
    gold = draw.normal(size=4000)
    proxy = 10 * gold + draw.normal(size=4000)
    assert exchange_rate(proxy, gold) == pytest.approx(0.1, rel=0.05)
    assert exchange_rate(-proxy, gold) == 0
    assert measure_divergence(np.array([10.0]), np.array([1.0]), 0.1) == pytest.approx([-0.5])
    with pytest.raises(ValueError, match="same for all"):
        exchange_rate(np.ones(3), gold[:3])


def test_bets_count_what_they_cut_and_refuse_what_is_not_finite() -> None:
    state, _ = Bets(name="x", alpha=ALPHA).update([0.1, 3.0])
    assert state.clipped == 1 and state.at == 1
    with pytest.raises(ValueError, match="x: an observation is not finite"):
        state.update([math.nan])
    with pytest.raises(ValueError, match="scale is 0"):
        standardise(np.ones(2), 0)
    huge, alarm = state.update(np.ones(5000))
    assert alarm is not None and math.isfinite(huge.evidence)
    assert huge.update([1.0]) == (huge, None)


def test_a_quiet_rate_alarms_at_most_at_the_nominal_rate_over_1000_steps() -> None:
    """Even at its baseline exactly, which ``watch_rate`` puts above what was seen."""
    draw, runs = np.random.default_rng(7), 1500
    start = watch_rate("questions", 10, 1000, rate=ALPHA)
    assert start.baseline > 0.01
    drifted = 1 / (1 + (1 / start.baseline - 1) / 2)
    level, alarmed = np.zeros(runs), np.zeros(runs, bool)
    for _ in range(STEPS):
        k = draw.binomial(32, start.baseline, runs)
        up, down = math.log(drifted / start.baseline), math.log((1 - drifted) / (1 - start.baseline))
        level = np.maximum(0, level + k * up + (32 - k) * down)
        alarmed |= level >= start.threshold
    assert at_most(int(alarmed.sum()), runs, ALPHA)


def drifting(state: Cusum, course: list[tuple[float, float]]) -> Alarm | None:
    for one in course:
        state, alarm = state.update(one)
        if alarm:
            return alarm
    return None


def test_a_drift_of_a_counter_is_found_within_so_many_steps() -> None:
    """Questions that triple from 5 %, from step 200 on, 32 answers a step: within 25 steps in 19 of 20 runs,
    and 0 before in at least as many."""
    delays = list[int]()
    for seed in range(40):
        draw = np.random.default_rng(seed)
        state = watch_rate("questions", int(draw.binomial(1600, 0.05)), 1600)
        course = [(float(draw.binomial(32, 0.05 if t < 200 else 0.15)), 32.0) for t in range(300)]
        alarm = drifting(state, course)
        assert alarm is not None
        delays.append(alarm.at - 200)
    assert np.mean([0 < one <= 25 for one in delays]) >= 0.95


def test_an_alarm_says_since_when() -> None:
    state = watch_rate("failed", 0, 100)
    alarm, step = None, 0
    while alarm is None:
        step += 1
        state, alarm = state.update((0.0 if step <= 10 else 8.0, 8.0))
    assert "since observation 10" in alarm.sentence and state.since == 10


@pytest.mark.parametrize(
    "call",
    [
        lambda: watch_rate("x", 0, 0),
        lambda: watch_rate("x", 1, 10).update((9.0, 8.0)),
    ],
)
def test_bad_counters_are_refused_by_name(call: object) -> None:
    with pytest.raises(ValueError, match=r"^x: "):
        call()  # type: ignore[operator]
