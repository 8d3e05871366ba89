"""The laws of the sigmoid, and of the noise around it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.scaling.curve import Sigmoid, compute_for
from ostinato.scaling.noise import covariance, sd_from_steps, sd_of_mean, simulate, whiten

LAW = settings(max_examples=50, deadline=None)

curves = st.builds(
    lambda R0, gain, B, log_C_mid: Sigmoid(R0=R0, A=R0 + gain * (1 - R0), B=B, C_mid=math.exp(log_C_mid)),
    st.floats(0.0, 0.8),
    st.floats(0.05, 1.0),
    st.floats(0.3, 6.0),
    st.floats(-5, 50),
)
ratios = st.floats(0.2, 8.0)  # C / C_mid


@LAW
@given(curves, ratios)
def test_inverse(curve: Sigmoid, ratio: float) -> None:
    C = ratio * curve.C_mid
    assert curve.compute_for(curve.score(C)) == pytest.approx(C, rel=1e-6)


def test_targets_outside_the_curve() -> None:
    curve = Sigmoid(R0=0.4, A=0.6, B=2.0, C_mid=100.0)
    assert compute_for(np.array([0.3, 0.4, 0.5, 0.6, 0.7]), 0.4, 0.6, 2.0, 100.0) == pytest.approx(
        [0, 0, 100, math.inf, math.inf]
    )
    assert curve.compute_for(0.6) == math.inf


# ---- noise


@LAW
@given(st.integers(1, 12), st.floats(0, 0.95), st.integers(0, 1000))
def test_whiten_is_the_inverse_of_the_cholesky_factor(n: int, rho: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sd, x = rng.uniform(0.001, 0.1, n), rng.standard_normal((3, n))
    twin = np.linalg.solve(np.linalg.cholesky(covariance(sd, rho, n)), x.T).T
    np.testing.assert_allclose(whiten(x, sd, rho), twin, rtol=1e-8, atol=1e-8)


def test_simulated_noise_has_its_covariance() -> None:
    noise = simulate(np.random.default_rng(0), 40_000, 4, 0.01, 0.6)
    np.testing.assert_allclose(np.cov(noise, rowvar=False), covariance(0.01, 0.6, 4), atol=3e-6)
    assert noise.mean(axis=1).std() == pytest.approx(sd_of_mean(4, 0.01, 0.6), rel=0.02)


def test_sd_from_steps_sees_noise_and_not_a_slow_misfit() -> None:
    noise = simulate(np.random.default_rng(1), 1, 4000, 0.01, 0.45)[0]
    assert sd_from_steps(noise, 0.45) == pytest.approx(0.01, rel=0.05)
    slow = 0.05 * np.sin(np.linspace(0, 6, 4000))
    assert sd_from_steps(noise + slow, 0.45) == pytest.approx(0.01, rel=0.05)
