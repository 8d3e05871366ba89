"""Detectors: quiet runs stay quiet at the nominal rate, planted drifts are found, states survive a kill."""

from __future__ import annotations

import json
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.observe.bets import STAKES, Alarm, Bets, grown
from ostinato.product.detectors import (
    Cusum,
    Detector,
    Knee,
    disagreement,
    divergence,
    exchange_rate,
    exploitation,
    internalisation_gap,
    misalignment,
    restored,
    run_length,
    saved,
    standardised,
    threshold,
    watch_mean,
    watch_rate,
)

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
        wealth = np.minimum(grown(wealth, step, np.clip(x[:, step], -1, 1)), 1e100)
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
    after = [grown(before, at, np.array([side])) for side in (1.0, -1.0)]
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
    return standardised(divergence(proxy, gold, rate=1.0), scale=math.hypot(0.5, 1.0))


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


def siblings(draw: np.random.Generator, exploit: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """8 groups of 8 answers, rewards in 0 to 1: the judge follows gold, but for the share that has found an
    exploit, which it takes for the best and gold for the worst."""
    groups = np.repeat(np.arange(8), 8)
    gold = draw.random(64)
    proxy = np.clip(gold + 0.2 * draw.standard_normal(64), 0, 1)
    found = draw.random(64) < exploit
    return np.where(found, 1.0, proxy), np.where(found, 0.0, gold), groups


def test_an_exploit_among_siblings_is_found_as_it_spreads() -> None:
    """It grows by 1 % of the answers a step from step 50 on; the alarm comes before it has a third of them,
    and at most at the nominal rate without it."""
    draw = np.random.default_rng(9)
    quiet = [siblings(draw, 0.0) for _ in range(50)]
    p, g = (np.concatenate([one[i] for one in quiet]) for i in (0, 1))
    rate = exchange_rate(p, g)
    scale = float(np.std(np.concatenate([misalignment(*one, rate) for one in quiet])))
    for seed in range(10):
        draw, state, alarm = np.random.default_rng(seed), Bets(name="proxy", alpha=0.01), None
        while alarm is None and state.at < 150:
            share = max(0.0, 0.01 * (state.at - 50))
            state, alarm = state.update(standardised(misalignment(*siblings(draw, share), rate), scale))
        assert alarm is not None and 50 < alarm.at < 83
    state, alarm = Bets(name="proxy", alpha=0.01), None
    for _ in range(300):
        state, alarm = state.update(standardised(misalignment(*siblings(draw, 0.0), rate), scale))
        assert alarm is None


def test_groups_without_spread_are_left_out() -> None:
    found = misalignment(
        np.array([1, 1, 0, 2.0, 5]), np.array([0, 1, 0, 2.0, 5]), np.array([0, 0, 1, 1, 2]), 1.0
    )
    assert found == pytest.approx([0.5 * 2 - 2])


def test_the_exchange_rate_is_that_of_quiet_answers() -> None:
    """A judge in units ten times as large promises no more gold."""
    draw = np.random.default_rng(4)
    gold = draw.normal(size=4000)
    proxy = 10 * gold + draw.normal(size=4000)
    assert exchange_rate(proxy, gold) == pytest.approx(0.1, rel=0.05)
    assert exchange_rate(-proxy, gold) == 0
    assert divergence(np.array([10.0]), np.array([1.0]), 0.1) == pytest.approx([-0.5])
    with pytest.raises(ValueError, match="same for all"):
        exchange_rate(np.ones(3), gold[:3])


def test_bets_count_what_they_cut_and_refuse_what_is_not_finite() -> None:
    state, _ = Bets(name="x", alpha=ALPHA).update([0.1, 3.0])
    assert state.clipped == 1 and state.at == 1
    with pytest.raises(ValueError, match="x: an observation is not finite"):
        state.update([math.nan])
    with pytest.raises(ValueError, match="scale is 0"):
        standardised(np.ones(2), 0)
    huge, alarm = state.update(np.ones(5000))
    assert alarm is not None and json.loads(json.dumps(saved(huge), allow_nan=False))
    assert huge.update([1.0]) == (huge, None)


def test_growing_disagreement_of_an_ensemble_is_found() -> None:
    draw = np.random.default_rng(5)
    state, alarms = Bets(name="variance", alpha=0.01), list[int]()
    for step in range(150):
        wider = 1.0 if step < 100 else 1.6
        now, before = wider * draw.standard_normal((3, 16)), draw.standard_normal((3, 16))
        state, alarm = state.update(standardised(disagreement(now, before), scale=1.8))
        alarms += [alarm.at] if alarm else []
    assert len(alarms) == 1 and 100 < alarms[0] <= 130


def test_exploitation_by_hand() -> None:
    before = np.array([1, 0, 0, 0], bool)
    now = np.array([1, 1, 1, 0], bool)
    panel = np.array([[1, 0, 1, 0], [1, 0, 0, 0]], bool)
    assert exploitation(before, now, panel) == 0.5
    assert exploitation(before, now, panel, np.array([9, 3, 1, 9.0])) == 0.75
    assert math.isnan(exploitation(now, before, panel))
    assert internalisation_gap(np.array([-1.0]), np.array([-1.5])) == 0.5


def over_optimised(draw: np.random.Generator, b: float, looks: int = 100) -> list[tuple[float, float, float]]:
    """Gold d (1 - b ln d) over a KL that grows to 25 nats, measured with an error of 0.1."""
    d = np.linspace(0.05, 5, looks)
    gold = d * (1 - b * np.log(d)) + 0.1 * draw.standard_normal(looks)
    return [(float(x * x), float(y), 0.1) for x, y in zip(d, gold, strict=True)]


def looked(state: Knee, course: list[tuple[float, float, float]]) -> tuple[Knee, Alarm | None]:
    for one in course:
        state, alarm = state.update(one)
        if alarm:
            return state, alarm
    return state, None


def test_the_knee_is_found_behind_the_top_and_not_before() -> None:
    """d (1 - 0.6 ln d) has its top at d = exp(1 / 0.6 - 1) = 1.95, a KL of 3.8 nats. It is called before gold
    has lost a third of its gain."""
    top = math.exp(2 * (1 / 0.6 - 1))
    for seed in range(5):
        course = over_optimised(np.random.default_rng(seed), 0.6)
        state, alarm = looked(Knee(), course)
        assert alarm is not None
        kl = course[alarm.at - 1][0]
        assert kl > top
        gold, best = (math.sqrt(one) * (1 - 0.3 * math.log(one)) for one in (kl, top))
        assert gold > best * 2 / 3
        assert state.knee == pytest.approx(top, rel=0.25)
        values = np.array(course[: alarm.at])
        d = np.sqrt(values[:, 0])
        x = np.stack([d, -d * np.log(d)], 1)
        fit = state.fit()
        assert fit is not None and fit[0] == pytest.approx(np.linalg.lstsq(x, values[:, 1], rcond=None)[0])


def test_flat_and_rising_gold_has_no_knee_at_the_nominal_rate() -> None:
    """100 looks in 1,000 steps; flat gold is the boundary of what counts as quiet."""
    runs, alarms = 150, 0
    for seed in range(runs):
        draw = np.random.default_rng(seed)
        flat = [(kl, 0.1 * draw.standard_normal(), 0.1) for kl, _, _ in over_optimised(draw, 0.0)]
        alarms += looked(Knee(alpha=ALPHA), flat)[1] is not None
    assert at_most(alarms, runs, ALPHA)
    rising = over_optimised(np.random.default_rng(0), 0.0)
    assert looked(Knee(), rising)[1] is None and looked(Knee(), rising)[0].at == 100


def test_a_knee_refuses_what_is_no_measurement() -> None:
    for bad in ((0.0, 1.0, 0.1), (1.0, math.nan, 0.1), (1.0, 1.0, 0.0)):
        with pytest.raises(ValueError, match="kl_knee: KL"):
            Knee().update(bad)
    assert math.isnan(Knee().knee)


def markov_run_length(shift: float, h: float, cells: int = 200) -> float:
    """Brook and Evans (Biometrika 1972): the chain of a CUSUM on a grid, twin of the approximation."""
    edges = np.concatenate(([-math.inf], np.arange(1, cells + 1) * h / cells))
    at = np.concatenate(([0.0], (np.arange(1, cells) + 0.5) * h / cells))
    step = NormalDist(-(shift**2) / 2, shift)
    below = np.array([[step.cdf(edge - one) for edge in edges] for one in at])
    return float(np.linalg.solve(np.eye(cells) - np.diff(below, axis=1), np.ones(cells))[0])


@pytest.mark.parametrize(("shift", "h"), [(1.0, 3.0), (0.5, 4.0), (1.0, 5.0)])
def test_the_run_length_is_that_of_the_chain(shift: float, h: float) -> None:
    assert run_length(shift, h) == pytest.approx(markov_run_length(shift, h), rel=0.06)


@given(st.floats(0.2, 2), st.floats(10, 1e6))
def test_a_threshold_has_the_run_length_that_was_wanted(shift: float, length: float) -> None:
    h = threshold(shift, length)
    assert run_length(shift, h) >= length * 0.999
    assert 0 <= h <= math.log(length) + 1e-9


def test_a_quiet_mean_alarms_at_most_at_the_nominal_rate_over_1000_steps() -> None:
    """With a baseline of 30 quiet steps, an estimate itself. ``level`` is that of many CUSUMs at once."""
    draw, runs = np.random.default_rng(6), 1500
    starts = [watch_mean("length", draw.normal(50, 8, 30).tolist(), rate=ALPHA) for _ in range(runs)]
    base, spread = (np.array([getattr(one, name) for one in starts]) for name in ("baseline", "spread"))
    level, alarmed = np.zeros(runs), np.zeros(runs, bool)
    for _ in range(STEPS):
        z = np.clip((draw.normal(50, 8, runs) - base) / spread, -4, 4)
        level = np.maximum(0, level + z - 0.5)
        alarmed |= level >= starts[0].threshold
    assert at_most(int(alarmed.sum()), runs, ALPHA)


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


def test_drifts_of_counters_are_found_within_so_many_steps() -> None:
    """Length that grows by 2 deviations, and questions that triple from 5 %, from step 200 on, 32 answers a
    step: within 20 and 25 steps in 19 of 20 runs, and 0 before in at least as many."""
    late: list[list[int]] = [[], []]
    for seed in range(40):
        draw = np.random.default_rng(seed)
        length = watch_mean("length", draw.normal(50, 8, 50).tolist())
        means = [(float(draw.normal(50 if t < 200 else 66, 8)), 1.0) for t in range(300)]
        asks = watch_rate("questions", int(draw.binomial(1600, 0.05)), 1600)
        counts = [(float(draw.binomial(32, 0.05 if t < 200 else 0.15)), 32.0) for t in range(300)]
        for which, (state, course) in enumerate(((length, means), (asks, counts))):
            alarm = drifting(state, course)
            assert alarm is not None
            late[which].append(alarm.at - 200)
    for delays, within in zip(late, (20, 25), strict=True):
        assert np.mean([0 < one <= within for one in delays]) >= 0.95


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
        lambda: watch_mean("x", [1.0, 1.0, 1.0]),
        lambda: watch_rate("x", 0, 0),
        lambda: watch_rate("x", 1, 10).update((9.0, 8.0)),
    ],
)
def test_bad_counters_are_refused_by_name(call: object) -> None:
    with pytest.raises(ValueError, match=r"^x: "):
        call()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("state", "observations"),
    [
        (Bets(name="x", alpha=ALPHA), [[0.3, -0.2], [0.9, 0.8], [1.0], [0.7]]),
        (Knee(), [(0.5, 0.1, 0.1), (1.0, 0.3, 0.1), (2.0, 0.2, 0.1), (9.0, -5.0, 0.1)]),
        (watch_rate("q", 1, 50), [(0.0, 8.0), (3.0, 8.0), (8.0, 8.0), (8.0, 8.0)]),
        (watch_mean("m", [1.0, 2.0, 3.0]), [(2.0, 1.0), (9.0, 1.0), (9.0, 1.0)]),
    ],
)
def test_a_state_that_was_written_down_goes_on_as_if_it_had_not_been(
    state: Detector, observations: list[object]
) -> None:
    """A kill between any two observations changes nothing."""
    alive, revived = state, state
    for one in observations:
        alive, alarm = alive.update(one)  # type: ignore[arg-type]
        again, same = restored(json.loads(json.dumps(saved(revived), allow_nan=False))).update(one)  # type: ignore[arg-type]
        assert (again, same) == (alive, alarm)
        revived = again


def test_no_state_of_ours_is_refused() -> None:
    for bad in ({}, {"detector": "Bets"}, {**saved(Knee()), "more": 1}):
        with pytest.raises(ValueError, match="no state of ours"):
            restored(bad)
