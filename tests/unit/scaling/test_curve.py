"""The laws of the sigmoid, and of the noise around it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.scaling.curve import Sigmoid, compute_for, crossovers, linearised
from ostinato.scaling.noise import MEASURED, Noise, covariance, sd_from_steps, sd_of_mean, simulate, whiten

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


@LAW
@given(curves)
def test_half_of_the_gain_is_had_at_C_mid_and_none_at_0(curve: Sigmoid) -> None:
    assert curve.score(curve.C_mid) == pytest.approx((curve.R0 + curve.A) / 2)
    assert curve.score(0.0) == curve.R0
    assert curve.score(math.inf) == pytest.approx(curve.A)


@LAW
@given(curves, ratios)
def test_elasticity_is_the_derivative_and_largest_at_C_mid(curve: Sigmoid, ratio: float) -> None:
    C, step = ratio * curve.C_mid, 1e-5
    slope = (curve.score(C * math.exp(step)) - curve.score(C * math.exp(-step))) / (2 * step)
    assert curve.elasticity(C) == pytest.approx(slope, rel=1e-5, abs=1e-9)
    top = curve.B * (curve.A - curve.R0) / 4
    assert curve.elasticity(curve.C_mid) == pytest.approx(top)
    assert curve.elasticity(C) <= top * (1 + 1e-12)


@LAW
@given(curves, ratios)
def test_linearised_is_a_line_of_slope_B(curve: Sigmoid, ratio: float) -> None:
    F = linearised(curve.score(np.array([1.0, ratio]) * curve.C_mid), curve.R0, curve.A)
    assert F[0] == pytest.approx(0, abs=1e-9)
    assert F[1] == pytest.approx(curve.B * math.log(ratio), rel=1e-6, abs=1e-6)


@LAW
@given(curves)
def test_far_beyond_C_mid_it_is_a_power_law(curve: Sigmoid) -> None:
    A, D, B = curve.power_law()
    C = curve.C_mid * 1e6 ** (1 / B)
    left = curve.A - curve.score(C)
    assert pytest.approx(float(curve.score(C)), abs=1e-5 * (curve.A - curve.R0)) == A - D / C**B
    assert left == pytest.approx((curve.A - curve.R0) * 1e-6, rel=1e-3)


@LAW
@given(curves, ratios, st.floats(1e-3, 1e6))
def test_only_C_mid_has_a_unit(curve: Sigmoid, ratio: float, unit: float) -> None:
    other = Sigmoid(R0=curve.R0, A=curve.A, B=curve.B, C_mid=unit * curve.C_mid)
    C = ratio * curve.C_mid
    assert other.score(unit * C) == pytest.approx(float(curve.score(C)), rel=1e-9)


def test_targets_outside_the_curve() -> None:
    curve = Sigmoid(R0=0.4, A=0.6, B=2.0, C_mid=100.0)
    assert compute_for(np.array([0.3, 0.4, 0.5, 0.6, 0.7]), 0.4, 0.6, 2.0, 100.0) == pytest.approx(
        [0, 0, 100, math.inf, math.inf]
    )
    assert curve.compute_for(0.6) == math.inf
    assert np.isnan(linearised(0.65, 0.4, 0.6))


@pytest.mark.parametrize(("B", "known"), [(1.70, 30_200), (1.68, 30_600)])
def test_published_crossover(B: float, known: float) -> None:
    """Batch 768 and batch 2048 of the ScaleRL paper, table 1 and the legend of its figure."""
    small = Sigmoid(R0=0.4, A=0.610, B=1.92, C_mid=2542)
    large = Sigmoid(R0=0.4, A=0.645, B=B, C_mid=10_909)
    late = [C for C in crossovers(small, large, 100, 1e6) if C > 10_000]
    assert late == pytest.approx([known], rel=0.01)
    assert large.score(100_000) == pytest.approx(0.6395 if B == 1.70 else 0.6392, abs=1e-4)


@LAW
@given(curves, curves)
def test_crossovers_are_where_curves_meet(one: Sigmoid, other: Sigmoid) -> None:
    other = Sigmoid(R0=one.R0, A=max(other.A, one.R0), B=other.B, C_mid=one.C_mid * 3)
    found = crossovers(one, other, one.C_mid / 100, one.C_mid * 100)
    assert len(found) <= 2  # from the same start: three terms in C^-B, by Descartes' rule of signs
    for C in found:
        assert one.score(C) == pytest.approx(float(other.score(C)), abs=1e-9)


def test_equal_curves_do_not_cross() -> None:
    curve = Sigmoid(R0=0.4, A=0.6, B=2.0, C_mid=100.0)
    assert crossovers(curve, curve, 1, 1e6) == []


def test_impossible_curves_are_refused() -> None:
    with pytest.raises(ValueError, match="C_mid of a sigmoid is 0"):
        Sigmoid(R0=0.4, A=0.6, B=2.0, C_mid=0.0)
    with pytest.raises(ValueError, match="below R0"):
        Sigmoid(R0=0.4, A=0.3, B=2.0, C_mid=1.0)


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


def test_the_largest_of_floor_residuals_and_standard_error_counts() -> None:
    noise = Noise(rho=0.5, floor=0.006, factor=1.3)
    assert noise.sd(0.001, None, 2) == pytest.approx([0.006, 0.006])
    assert noise.sd(0.010, np.array([0.001, 0.05]), 2) == pytest.approx([0.013, 0.05])


@pytest.mark.parametrize(("field", "value"), [("rho", 1.0), ("floor", 0.0), ("factor", -1.0)])
def test_impossible_noise_is_refused(field: str, value: float) -> None:
    given = {"rho": MEASURED.rho, "floor": MEASURED.floor, "factor": MEASURED.factor, field: value}
    with pytest.raises(ValueError, match=f"noise.{field} is"):
        Noise(rho=given["rho"], floor=given["floor"], factor=given["factor"])
