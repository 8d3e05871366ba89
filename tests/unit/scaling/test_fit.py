"""Least squares: exact where there is no noise, equal to its twins, and to the numbers that are known."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.scaling import oracles, published
from ostinato.scaling.curve import Sigmoid
from ostinato.scaling.fit import by_cutoff, fit, spread
from ostinato.scaling.forms import Form, choose, fit_form
from ostinato.scaling.noise import whiten
from ostinato.scaling.plan import simulated
from ostinato.scaling.series import Series, read_csv, series

LAW = settings(max_examples=30, deadline=None)
SCALERL = Sigmoid(R0=0.4, A=0.61, B=1.92, C_mid=2542.0)


def points() -> dict[str, Series]:
    found = read_csv(
        published("scalerl_points.csv"),
        compute="gpu_hours",
        score="pass_rate",
        by=("figure", "series"),
        R0=0.4,
    )
    return {one.name: one for one in found}


def parameters() -> list[Sigmoid]:
    with published("scalerl_params.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [
        Sigmoid(
            R0=float(row["R0_curve"]),
            A=float(row["published_A"]),
            B=float(row["published_B"]),
            C_mid=float(row["Cmid_curve"]),
        )
        for row in rows
    ]


def on(curve: Sigmoid, ratios: np.ndarray) -> Series:
    """Noiseless evaluations at ``ratios`` of C_mid."""
    C = ratios * curve.C_mid
    return series("noiseless", C, curve.score(C), R0=curve.R0)


def assert_close(found: Sigmoid, truth: Sigmoid, rel: float) -> None:
    for name in ("A", "B", "C_mid"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=rel), name


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_all_published_curves_come_back_exactly(rho: float) -> None:
    assert len(parameters()) == 16
    for truth in parameters():
        assert_close(fit(on(truth, np.linspace(0.6, 5, 24)), rho=rho).curve, truth, 1e-6)


@LAW
@given(
    st.floats(0.05, 0.6),
    st.floats(0.1, 0.95),
    st.floats(0.4, 6),
    st.floats(-8, 55),
    st.floats(1.5, 8),
    st.integers(8, 40),
)
def test_any_curve_comes_back_exactly(
    R0: float, gain: float, B: float, log_C_mid: float, reach: float, n: int
) -> None:
    truth = Sigmoid(R0=R0, A=R0 + gain * (1 - R0), B=B, C_mid=math.exp(log_C_mid))
    assert_close(fit(on(truth, np.linspace(0.3, reach, n))).curve, truth, 1e-6)


@LAW
@given(st.integers(0, 10_000), st.sampled_from([1.5, 3.0, 6.0]), st.sampled_from([0.0, 0.5]))
def test_no_cell_of_a_dense_grid_fits_better(seed: int, reach: float, rho: float) -> None:
    """The slow twin: every A, B and C_mid of a grid."""
    noisy = simulated(SCALERL, np.linspace(0.3, reach, 12) * SCALERL.C_mid, seed=seed)
    found = fit(noisy, rho=rho)
    white = whiten(found.residuals, 1.0, rho)
    A, B, C_mid = np.meshgrid(
        np.linspace(0.4, 1, 31), np.geomspace(0.35, 7.5, 25), np.geomspace(100, 40_000, 41), indexing="ij"
    )
    S = 1 / (1 + (C_mid[..., None] / noisy.compute) ** B[..., None])
    residuals = whiten(noisy.score - 0.4 - (A[..., None] - 0.4) * S, 1.0, rho)
    assert white @ white <= (residuals**2).sum(-1).min() + 1e-12


@LAW
@given(st.integers(0, 10_000), st.floats(1e-6, 1e20))
def test_the_unit_of_compute_changes_only_C_mid(seed: int, unit: float) -> None:
    noisy = simulated(SCALERL, np.linspace(0.3, 4, 15) * SCALERL.C_mid, seed=seed)
    scaled = replace(noisy, compute=unit * noisy.compute)
    curve = fit(noisy).curve
    assert_close(fit(scaled).curve, replace(curve, C_mid=unit * curve.C_mid), 1e-6)


def test_known_numbers_of_the_published_points() -> None:
    """The paper's procedure and variable projection on batch 2048, the failures of the power law (A at its
    bound of 1 from 1.5k on, 0.741 from 5k on), the printed curve against later points, a crossing."""
    assert [oracle["what"] for oracle in oracles(points()) if not oracle["holds"]] == []


def test_full_series_give_the_printed_asymptotes() -> None:
    """Within 0.012 for every healthy run, 0.002 for the code curve (math+code)."""
    for (name, one), truth in zip(points().items(), sorted_like(points()), strict=True):
        if "GRPO" in name:
            continue
        off = abs(fit(one.between(first=1500)).curve.A - truth)
        assert off <= (0.002 if "Fig11-code" in name else 0.012), name


def sorted_like(found: dict[str, Series]) -> list[float]:
    """The printed A of each series, in the order of the points file."""
    with published("scalerl_params.csv").open(encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        printed = {f"{row['figure']} {row['series']}": float(row["published_A"]) for row in rows}
    return [printed[name] for name in found]


def test_cutoffs() -> None:
    one = points()["Fig10a ScaleRL-bs768"].between(first=1500)
    cuts = by_cutoff(one)
    assert [cut.evaluations for cut in cuts] == [20, 19, 18, 17, 16, 15, 14, 13]
    assert cuts[0].A == fit(one).curve.A
    assert spread(cuts) == pytest.approx(max(c.A for c in cuts) - min(c.A for c in cuts))
    assert math.isnan(spread([]))


# ---- other laws


@pytest.mark.parametrize("form", [form for form in Form if form is not Form.POSTERIOR])
def test_every_form_comes_back_from_its_own_curve(form: Form) -> None:
    C = np.linspace(500, 20_000, 20)
    truth = {
        Form.SIGMOID: ({"A": 0.61, "B": 1.92, "C_mid": 2542.0}, SCALERL.score(C)),
        Form.SIGMOID_FREE_R0: ({"R0": 0.4, "A": 0.61, "B": 1.92, "C_mid": 2542.0}, SCALERL.score(C)),
        Form.POWER: ({"A": 0.7, "B": 0.5, "D": 6.0}, 0.7 - 6.0 * C**-0.5),
        Form.LOG_ERROR: ({"k": 0.2, "E": 1.0}, 1 - np.exp(1.0 - 0.2 * np.log(C))),
    }[form]
    law = fit_form(series("own", C, truth[1], R0=0.4), form)
    assert dict(law.parameters) == pytest.approx(truth[0], rel=1e-3)
    np.testing.assert_allclose(law.score(C), truth[1], atol=1e-5)


def test_the_form_that_foretells_best_comes_first() -> None:
    """The sigmoid foretells a curve that saturates; a law without a ceiling, one that has none."""
    C = np.linspace(500, 15_000, 30)
    noise = simulated(SCALERL, C, seed=1).score - SCALERL.score(C)
    saturating = series("saturating", C, SCALERL.score(C) + noise, R0=0.4)
    endless = series("endless", C, 1 - np.exp(1.0 - 0.2 * np.log(C)) + noise / 4, R0=0.05)
    assert choose(saturating)[0].form in (Form.SIGMOID, Form.SIGMOID_FREE_R0)
    assert choose(endless)[0].form in (Form.LOG_ERROR, Form.POWER)  # of which it is the case A = 1
    assert {one.error for one in choose(saturating.take(slice(4)))} == {math.inf}  # nothing to foretell


def test_a_form_that_cannot_be_fitted_is_last_and_says_why() -> None:
    C = np.linspace(500, 15_000, 20)
    perfect = series("perfect", C, np.minimum(1.0, 0.5 + C / 20_000), R0=0.4)
    last = choose(perfect)[-1]
    assert (last.form, last.law, last.error) == (Form.LOG_ERROR, None, math.inf)
    assert "score of 1" in last.reason


def test_a_sigmoid_that_comes_last_is_one_that_was_not_identified_yet() -> None:
    """The paper's run until 8k GPU-hours: by its rolling-origin error the sigmoid was the worst of the laws.
    Most of that is the first origin, at 1.5 C_mid, where least squares puts the ceiling at 1 (the
    prior on B takes a third of the error); from the next origin on it is better than the power law."""
    by = ("figure", "series")
    runs = read_csv(published("scalerl_points.csv"), compute="gpu_hours", score="pass_rate", by=by, R0=0.4)
    run = next(one for one in runs if one.name == "Fig2 ScaleRL").between(1500, 8000)
    found = {choice.form: choice for choice in choose(run)}
    assert list(found)[-1] is Form.SIGMOID
    first, *later = zip(*(found[form].by_origin for form in (Form.SIGMOID, Form.POWER)), strict=True)
    assert first[0] > 2 * first[1]
    assert all(sigmoid < power for sigmoid, power in later)
    assert found[Form.POSTERIOR].by_origin[0] < 0.7 * first[0]
