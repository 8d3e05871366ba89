"""What is known of a curve: the posterior beside its slow twin, and its two cross-checks."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.scaling.curve import Sigmoid
from ostinato.scaling.fit import fit
from ostinato.scaling.noise import CONSERVATIVE, Noise, covariance
from ostinato.scaling.normal import log_between, truncated
from ostinato.scaling.plan import simulated
from ostinato.scaling.posterior import PRIOR, Interval, _Grid, interval, posterior
from ostinato.scaling.series import Series, series

SCALERL = Sigmoid(R0=0.4, A=0.61, B=1.92, C_mid=2542.0)


def half_known(ratio: float = 2.5, n: int = 10, seed: int = 0) -> Series:
    return simulated(SCALERL, np.linspace(ratio / n, ratio, n) * SCALERL.C_mid, seed=seed)


def weighted(values: np.ndarray, weights: np.ndarray) -> Interval:
    order = np.argsort(values.ravel())
    mass = np.cumsum(weights.ravel()[order]) / weights.sum()
    low, median, high = (float(values.ravel()[order][np.searchsorted(mass, q)]) for q in (0.05, 0.5, 0.95))
    return Interval(low=low, median=median, high=high)


def brute_force(one: Series, noise: Noise) -> dict[str, Interval]:
    """The slow twin: every (A, B, C_mid) of a grid, with the covariance matrix itself."""
    sd = noise.sd(fit(one).residual_sd, one.stderr, len(one))
    inverse = np.linalg.inv(np.linalg.cholesky(covariance(sd, noise.rho, len(one))))
    log_B = np.linspace(math.log(0.5), math.log(6), 40)[:, None]
    span = math.log(one.compute[0] / PRIOR.below), math.log(one.compute[-1] * PRIOR.above)
    log_C_mid = np.linspace(*span, 80)
    A = np.linspace(0.4025, 0.9975, 240)[:, None, None]
    S = 1 / (1 + np.exp(np.exp(log_B)[..., None] * (log_C_mid[..., None] - np.log(one.compute))))
    white, white_S = inverse @ (one.score - one.R0), S @ inverse.T
    chi2 = sum((white[t] - (A - one.R0) * white_S[..., t]) ** 2 for t in range(len(one)))
    log_mass = -0.5 * ((log_B - math.log(PRIOR.B)) / PRIOR.spread) ** 2 - chi2 / 2
    mass = np.exp(log_mass - log_mass.max())
    R = one.R0 + (A - one.R0) / (1 + np.exp(np.exp(log_B) * (log_C_mid - math.log(12_000))))
    every = {"A": A, "B": np.exp(log_B), "C_mid": np.exp(log_C_mid), "R": R}
    return {name: weighted(np.broadcast_to(x, mass.shape), mass) for name, x in every.items()}


@pytest.mark.parametrize("ratio", [1.5, 3.0])
def test_the_grid_of_two_dimensions_is_that_of_three(ratio: float) -> None:
    one = half_known(ratio)
    known, twin = posterior(one), brute_force(one, CONSERVATIVE)
    draws = {"A": known.A, "B": known.B, "C_mid": known.C_mid, "R": known.score(12_000.0)}
    for name, values in draws.items():
        ours, slow = interval(values), twin[name]
        for end in ("low", "median", "high"):
            assert getattr(ours, end) == pytest.approx(getattr(slow, end), rel=0.06, abs=0.004), (name, end)


def test_the_error_of_R0_is_integrated_out() -> None:
    """The density of a cell is the integral over A and R0, here by a dense sum of both."""
    clean, sd = half_known(1.5, 8), np.full(8, 0.006)
    one = series("run", clean.compute, clean.score, R0=0.4, R0_stderr=0.03)
    log_B, log_C_mid = np.log([0.8, 1.9, 1.9, 4.0]), np.log([2542.0, 2542.0, 8000.0, 1500.0])
    ours = _Grid.of(one, sd, 0.6, PRIOR).density(log_B, log_C_mid)
    inverse = np.linalg.inv(np.linalg.cholesky(covariance(sd, 0.6, 8)))
    A, R0 = np.linspace(0.4, 1, 3001)[:, None], np.linspace(0.2, 0.6, 801)
    slow = []
    for B, C_mid in zip(np.exp(log_B), np.exp(log_C_mid), strict=True):
        S = inverse @ (1 / (1 + (C_mid / one.compute) ** B))
        white, rest = inverse @ one.score, inverse @ np.ones(8) - S
        chi2 = sum((white[t] - A * S[t] - R0 * rest[t]) ** 2 for t in range(8)) + ((R0 - 0.4) / 0.03) ** 2
        least = float(np.min(chi2))
        prior = -0.5 * (math.log(B / PRIOR.B) / PRIOR.spread) ** 2
        slow.append(prior - least / 2 + math.log(np.exp((least - chi2) / 2).sum()))
    np.testing.assert_allclose(ours - ours[0], np.array(slow) - slow[0], atol=0.01)


def test_a_measured_R0_is_corrected_by_the_curve() -> None:
    """R0 measured 0.05 too low, with that error told: the draws of R0 are drawn to where it is."""
    clean = simulated(SCALERL, np.linspace(0.1, 4, 40) * SCALERL.C_mid, sd=0.002, rho=0.0)
    one = series("run", clean.compute, clean.score, R0=0.35, R0_stderr=0.03)
    known = posterior(one, noise=Noise(rho=0.0, floor=0.002, factor=0.0))
    assert np.median(known.R0) == pytest.approx(0.4, abs=0.01)
    assert known.R0.std() < 0.015
    assert interval(known.A).low <= 0.61 <= interval(known.A).high


def test_the_seed_decides_the_draws_and_little_else() -> None:
    one = half_known(3.0, 20)
    first, again, other = posterior(one), posterior(one), posterior(one, seed=1)
    np.testing.assert_array_equal(first.A, again.A)
    assert not np.array_equal(first.A, other.A)
    assert interval(first.A).high == pytest.approx(interval(other.A).high, abs=0.004)


def test_a_posterior_narrower_than_a_cell_is_found() -> None:
    """Forty precise evaluations: the mass is a thousandth of a cell of the first grid."""
    one = simulated(SCALERL, np.linspace(0.2, 8, 40) * SCALERL.C_mid, sd=1e-5)
    known = posterior(one, noise=Noise(rho=0.0, floor=1e-5, factor=0.0))
    curve = known.fit.curve
    assert interval(known.A).low <= curve.A <= interval(known.A).high
    assert interval(known.A).width < 1e-4
    assert np.median(known.C_mid) == pytest.approx(curve.C_mid, rel=1e-3)


def test_quantities_of_draws() -> None:
    known = posterior(half_known(4.0, 20))
    assert known.score(np.array([1e3, 1e4])).shape == (4096, 2)
    assert known.score(1e4).shape == (4096,)
    assert np.all(known.gain(5_000, 50_000) >= 0)
    C = known.compute_for(0.55)
    reached = np.isfinite(C)
    assert reached.mean() > 0.99
    R = known.R0 + (known.A - known.R0) / (1 + (known.C_mid / C) ** known.B)
    np.testing.assert_allclose(R[reached], 0.55)
    assert interval(known.compute_for(0.95)).median == math.inf
    assert known.measured(np.array([1e4, 2e4])).std(0) == pytest.approx(
        np.hypot(known.score(np.array([1e4, 2e4])).std(0), 0.006), rel=0.05
    )


# ---- the normal distribution


@settings(max_examples=50, deadline=None)
@given(st.floats(-5, 5), st.floats(0.01, 8))
def test_log_between(low: float, width: float) -> None:
    normal = NormalDist()
    twin = math.log(normal.cdf(low + width) - normal.cdf(low))
    assert log_between(np.array(low), np.array(low + width)) == pytest.approx(twin, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.floats(-50, 50), st.floats(0.01, 5), st.floats(0.001, 0.999))
def test_truncated_stays_inside_and_is_a_quantile(low: float, width: float, u: float) -> None:
    z = float(truncated(np.array([low]), np.array([low + width]), np.array([u]))[0])
    assert low <= z <= low + width
    if abs(low) < 5:
        below = log_between(np.array(low), np.array(z)) if z > low else -np.inf
        assert math.exp(below - log_between(np.array(low), np.array(low + width))) == pytest.approx(
            u, abs=1e-3
        )


def test_few_evaluations_know_less_of_their_noise() -> None:
    """Of published runs with 6 to 12 evaluations in the window the intervals were too narrow. Two degrees of
    freedom (five evaluations) widen the noise by 1.78, seventeen by 1.06; what an evaluation's own standard
    error says is not widened, and noise that is given is taken as it is."""
    for n, wider in ((5, 1.775), (20, 1.058)):
        np.testing.assert_allclose(CONSERVATIVE.sd(0.0, None, n), 0.006 * wider, rtol=1e-3)
    np.testing.assert_allclose(CONSERVATIVE.sd(0.0, np.full(5, 0.02), 5), 0.02)
    np.testing.assert_allclose(Noise(rho=0.45, floor=0.0042, factor=0.0).sd(0.0, None, 5), 0.0042)
