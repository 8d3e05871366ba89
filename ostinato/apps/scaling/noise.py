"""The noise of evaluations: AR(1) along the run, x[t] = rho x[t-1] + sqrt(1 - rho^2) sd e[t].

Errors of neighbouring evaluations go together: the policies are near and the held-out prompts the same.
Intervals that take them as independent are far too narrow. The lag counts evaluations, not compute: runs are
evaluated on a schedule. Below: the standard normal distribution between two bounds, and Student's quantile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri, stdtrit

PARAMETERS = 3  # of the curve that residuals are left by
Z_90 = 1.6448536269514722  # what student_90 becomes for many degrees of freedom
MEDIAN = 0.6744897501960817  # of |z|, z normal


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How noisy evaluations are taken to be, in units of the score (0 to 1).

    The standard deviation of one is the largest of ``floor``, ``factor`` times that of the residuals, and
    its standard error where it came with one. ``few`` widens the first two by Student's t over the normal
    quantile, n - 3 degrees of freedom: five evaluations measure their own noise worse than fifty.
    """

    rho: float  # of neighbours
    floor: float
    factor: float
    few: bool = False

    def sd(self, residual_sd: float, stderr: np.ndarray | None, n: int) -> np.ndarray:
        """[n] standard deviations."""
        wider = student_90(max(1, n - PARAMETERS)) / Z_90 if self.few else 1.0
        least = np.full(n, wider * max(self.floor, self.factor * residual_sd))
        return least if stderr is None else np.maximum(least, stderr)


# For intervals: larger than the noise of real runs. Real curves are not quite sigmoids either, and with this
# the 90 % intervals of published ones held (`ostinato bench scaling`); with independent noise they did not.
CONSERVATIVE = Noise(rho=0.6, floor=0.006, factor=1.3, few=True)

# For alarms, which the above would make deaf: what was measured around published curves (sd 0.003 to 0.005,
# correlation of neighbours 0.23 on average, up to 0.54).
MEASURED = Noise(rho=0.45, floor=0.0045, factor=1.0)


def whiten(x: np.ndarray, sd: np.ndarray | float, rho: float) -> np.ndarray:
    """L^-1 x along the last axis, L the Cholesky factor of ``covariance(sd, rho, n)``: unit noise."""
    x = x / sd
    if not rho:
        return x
    rest = (x[..., 1:] - rho * x[..., :-1]) / math.sqrt(1 - rho**2)
    return np.concatenate([x[..., :1], rest], axis=-1)


def covariance(sd: np.ndarray | float, rho: float, n: int) -> np.ndarray:
    """[n, n] of n evaluations in a row: sd_i sd_j rho^|i - j|."""
    lag = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    return np.outer(np.broadcast_to(sd, n), np.broadcast_to(sd, n)) * np.where(
        lag == 0, 1.0, float(rho) ** lag
    )


def simulate(rng: np.random.Generator, rows: int, n: int, sd: np.ndarray | float, rho: float) -> np.ndarray:
    """[rows, n]: so many independent stretches of noise."""
    white = rng.standard_normal((rows, n))
    noise = np.empty((rows, n))
    last = noise[:, 0] = white[:, 0]
    for t in range(1, n):
        last = noise[:, t] = rho * last + math.sqrt(1 - rho**2) * white[:, t]
    return noise * sd


def sd_of_mean(n: int, sd: float, rho: float) -> float:
    """Of the mean of n evaluations in a row."""
    return math.sqrt(covariance(sd, rho, n).sum()) / n


def sd_from_steps(residuals: np.ndarray, rho: float) -> float:
    """The standard deviation of AR(1) noise from how far neighbours are apart (von Neumann 1941), by the
    median: neither a curve that fits badly over long stretches nor a sudden fall counts as noise."""
    if len(residuals) < 2:
        return 0.0
    step = float(np.median(np.abs(np.diff(residuals)))) / MEDIAN
    return step / math.sqrt(2 * (1 - rho))


# -- the normal distribution between two bounds, accurate in both tails, and Student's quantile


def log_between(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """ln(Phi(high) - Phi(low)), low < high."""
    right = low + high > 0
    low, high = np.where(right, -high, low), np.where(right, -low, high)  # the mass is on the left
    top = log_ndtr(high)
    return top + np.log(-np.expm1(np.minimum(log_ndtr(low) - top, -1e-300)))


def truncated_quantile(low: np.ndarray, high: np.ndarray, u: np.ndarray) -> np.ndarray:
    """The quantile ``u`` (in (0, 1)) of the normal restricted to [low, high]."""
    right = low + high > 0
    low, high = np.where(right, -high, low), np.where(right, -low, high)
    first, last = ndtr(low), ndtr(high)
    p = first + np.where(right, 1 - u, u) * (last - first)
    inside = (p > 0) & (p < 1)
    z = np.where(inside, ndtri(np.where(inside, p, 0.5)), high)  # underflow: at the near bound
    z = np.clip(z, low, high)
    return np.where(right, -z, z)


def student_90(freedom: int) -> float:
    """The 95 % quantile of Student's t: half of a 90 % interval."""
    return float(stdtrit(freedom, 0.95))
