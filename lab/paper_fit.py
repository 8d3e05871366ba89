"""The fit procedure of the ScaleRL paper as printed (arXiv 2510.13786v1, appendix A.5), for comparison.

A and C_mid from a grid, B by least squares for each pair, the pair of the smallest sum of squares. Its C_mid
is quantised to 403 GPU-hours and its A to 0.005 and at most 0.8; ``fit.fit`` has neither limit and is faster.
"""

from __future__ import annotations

import math

import numpy as np

from ostinato.scaling.curve import Sigmoid, share
from ostinato.scaling.fit import PARAMETERS, Fit
from ostinato.scaling.series import Series

A_GRID = np.linspace(0.45, 0.80, 71)
C_MID_GRID = np.linspace(100.0, 40_000.0, 100)


def fit_paper(series: Series, A_grid: np.ndarray = A_GRID, C_mid_grid: np.ndarray = C_MID_GRID) -> Fit:
    """The grid fit. Raises ValueError for fewer than 3 evaluations, or where R0 is above all of the grid.

    The paper calls scipy's ``curve_fit`` for B; here the B of all pairs is found at once: the best of a grid,
    over which the sum of squares is quadratic in A, and golden-section steps from there.
    """
    if len(series) < PARAMETERS:
        raise ValueError(
            f"{series.name} has {len(series)} evaluations in the window; {PARAMETERS} parameters need as many"
        )
    gains = A_grid[A_grid >= series.R0] - series.R0
    if not len(gains):
        raise ValueError(
            f"R0 of {series.name} is {series.R0:g}; the paper's grid of A ends at {A_grid[-1]:g}"
        )
    log_B = np.linspace(math.log(0.1), math.log(20.0), 160)
    S = share(series.compute, np.exp(log_B)[:, None, None], C_mid_grid[:, None])  # [B, C_mid, n]
    y = series.score - series.R0
    first = (gains[:, None, None] ** 2 * (S * S).sum(-1) - 2 * gains[:, None, None] * (S @ y)).argmin(1)
    a, C_mid = (np.ravel(x) for x in np.meshgrid(gains, C_mid_grid, indexing="ij"))
    middle, width = log_B[first.ravel()], log_B[1] - log_B[0]

    def sse(log_B: np.ndarray) -> np.ndarray:
        residuals = y - a[:, None] * share(series.compute, np.exp(log_B)[:, None], C_mid[:, None])
        return (residuals * residuals).sum(-1)

    B = np.exp(_golden(sse, middle - width, middle + width))
    best = int(sse(np.log(B)).argmin())
    curve = Sigmoid(R0=series.R0, A=series.R0 + float(a[best]), B=float(B[best]), C_mid=float(C_mid[best]))
    return Fit(curve=curve, residuals=series.score - curve.score(series.compute))


def _golden(sse, low: np.ndarray, high: np.ndarray, rounds: int = 36) -> np.ndarray:
    """The minimum of each of many functions of one variable between ``low`` and ``high``."""
    ratio = (math.sqrt(5) - 1) / 2
    inner, outer = high - ratio * (high - low), low + ratio * (high - low)
    at_inner, at_outer = sse(inner), sse(outer)
    for _ in range(rounds):
        left = at_inner < at_outer  # where the minimum lies below ``outer``
        low, high = np.where(left, low, inner), np.where(left, outer, high)
        fresh = np.where(left, high - ratio * (high - low), low + ratio * (high - low))
        at_fresh = sse(fresh)
        inner, outer = np.where(left, fresh, outer), np.where(left, inner, fresh)
        at_inner, at_outer = np.where(left, at_fresh, at_outer), np.where(left, at_inner, at_fresh)
    return (low + high) / 2
