"""The saturating curve of RL compute (ScaleRL, arXiv 2510.13786, equation 1) and what follows from it.

    R(C) = R0 + (A - R0) * S(C),    S(C) = 1 / (1 + (C_mid / C)^B)

C is compute in any unit, R the expected held-out score, R0 that before training, A the ceiling, C_mid the
compute at which half of A - R0 is gained, B the steepness in ln C. Only C_mid has a unit, that of C.
Parameters may be arrays: everything broadcasts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri, stdtrit

Number = float | np.ndarray


def share(C: Number, B: Number, C_mid: Number) -> np.ndarray:
    """Compute S(C) in [0, 1], the share of A - R0 that is gained at C; 0 at C = 0."""
    with np.errstate(divide="ignore", over="ignore"):
        return 1.0 / (1.0 + np.exp(np.asarray(B) * (np.log(C_mid) - np.log(C))))


def score(C: Number, R0: Number, A: Number, B: Number, C_mid: Number) -> np.ndarray:
    """R(C), the expected held-out score."""
    return R0 + (np.asarray(A) - R0) * share(C, B, C_mid)


def compute_for(T: Number, R0: Number, A: Number, B: Number, C_mid: Number) -> np.ndarray:
    """Compute C with R(C) = T, for R0 < T < A; 0 if T is at most R0, infinite if T is at least A."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        ratio = (np.asarray(T) - R0) / (np.asarray(A) - T)
        C = C_mid * np.exp(np.log(ratio) / B)
    return np.where(np.asarray(T) <= R0, 0.0, np.where(np.asarray(T) >= A, np.inf, C))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sigmoid:
    """The curve of one run."""

    R0: float
    A: float
    B: float
    C_mid: float

    def score(self, C: Number) -> np.ndarray:
        return score(C, self.R0, self.A, self.B, self.C_mid)

    def compute_for(self, T: Number) -> np.ndarray:
        return compute_for(T, self.R0, self.A, self.B, self.C_mid)


# ---- the noise of evaluations: AR(1) along the run, x[t] = rho x[t-1] + sqrt(1 - rho^2) sd e[t]. Successive
# policies are alike and the held-out prompts the same: intervals that take errors as independent are far too
# narrow. The lag counts evaluations, not compute: runs are evaluated on a schedule.

PARAMETERS = 3  # of the curve: A, B, C_mid
FEWEST = 5  # evaluations after training began that a curve takes
MORE = "train with eval.every=N, or add some: ostinato resume RUN trainer.steps=M eval.every=N"
Z_90 = 1.6448536269514722  # the limit of student_90 for many degrees of freedom
MEDIAN = 0.6744897501960817  # of |z|, z normal


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """The assumed noise of evaluations, in units of the score (0 to 1).

    The standard deviation of an evaluation is the largest of ``floor``, ``factor`` times that of the
    residuals, and its own standard error, if it has one. ``few`` multiplies the first two by Student's t (n -
    3 degrees of freedom) over the normal quantile, since five evaluations measure their noise worse than
    fifty.
    """

    rho: float  # correlation of neighbours
    floor: float
    factor: float
    few: bool = False

    def sd(self, residual_sd: float, stderr: np.ndarray | None, n: int) -> np.ndarray:
        """[n] standard deviations of evaluations."""
        widening = student_90(max(1, n - PARAMETERS)) / Z_90 if self.few else 1.0
        lower_bound = np.full(n, widening * max(self.floor, self.factor * residual_sd))
        return lower_bound if stderr is None else np.maximum(lower_bound, stderr)


# For intervals: larger than the noise of real runs. Real curves are no exact sigmoids either: with this noise
# the 90 % intervals of published curves held (`ostinato bench scaling`), with independent noise they did not.
CONSERVATIVE = Noise(rho=0.6, floor=0.006, factor=1.3, few=True)

# For alarms, which CONSERVATIVE would suppress: as measured around published curves (sd 0.003 to 0.005,
# correlation of neighbours 0.23 on average, up to 0.54).
MEASURED = Noise(rho=0.45, floor=0.0045, factor=1.0)


def whiten(x: np.ndarray, sd: np.ndarray | float, rho: float) -> np.ndarray:
    """L^-1 x along the last axis, L the Cholesky factor of ``covariance(sd, rho, n)``: unit noise."""
    x = x / sd
    if not rho:
        return x
    innovations = (x[..., 1:] - rho * x[..., :-1]) / math.sqrt(1 - rho**2)
    return np.concatenate([x[..., :1], innovations], axis=-1)


def covariance(sd: np.ndarray | float, rho: float, n: int) -> np.ndarray:
    """[n, n] covariance of n successive evaluations: sd_i sd_j rho^|i - j|."""
    lag = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    return np.outer(np.broadcast_to(sd, n), np.broadcast_to(sd, n)) * np.where(
        lag == 0, 1.0, float(rho) ** lag
    )


def simulate(rng: np.random.Generator, rows: int, n: int, sd: np.ndarray | float, rho: float) -> np.ndarray:
    """[rows, n] noise of n successive evaluations, independent between rows."""
    white = rng.standard_normal((rows, n))
    noise = np.empty((rows, n))
    previous = noise[:, 0] = white[:, 0]
    for t in range(1, n):
        previous = noise[:, t] = rho * previous + math.sqrt(1 - rho**2) * white[:, t]
    return noise * sd


def sd_of_mean(n: int, sd: float, rho: float) -> float:
    """Compute the standard deviation of the mean of n successive evaluations."""
    return math.sqrt(covariance(sd, rho, n).sum()) / n


def sd_from_steps(residuals: np.ndarray, rho: float) -> float:
    """Estimate the standard deviation of AR(1) noise from the median difference of neighbours (von Neumann
    1941). So neither a curve that fits badly over long stretches nor a sudden fall counts as noise. 0 for
    fewer than two residuals."""
    if len(residuals) < 2:
        return 0.0
    step = float(np.median(np.abs(np.diff(residuals)))) / MEDIAN
    return step / math.sqrt(2 * (1 - rho))


# -- the normal distribution between two bounds, accurate in both tails, and Student's quantile


def log_between(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Compute ln(Phi(high) - Phi(low)), low < high."""
    is_right = low + high > 0
    # mirrored so that the mass is in the left tail, where log_ndtr is accurate
    low, high = np.where(is_right, -high, low), np.where(is_right, -low, high)
    log_high = log_ndtr(high)
    return log_high + np.log(-np.expm1(np.minimum(log_ndtr(low) - log_high, -1e-300)))


def truncated_quantile(low: np.ndarray, high: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Quantile ``u`` (in (0, 1)) of the normal restricted to [low, high]."""
    is_right = low + high > 0
    low, high = np.where(is_right, -high, low), np.where(is_right, -low, high)
    first, last = ndtr(low), ndtr(high)
    p = first + np.where(is_right, 1 - u, u) * (last - first)
    is_inside = (p > 0) & (p < 1)
    z = np.where(is_inside, ndtri(np.where(is_inside, p, 0.5)), high)  # underflow: at the near bound
    z = np.clip(z, low, high)
    return np.where(is_right, -z, z)


def student_90(freedom: int) -> float:
    """Compute the 95 % quantile of Student's t: half of a 90 % interval."""
    return float(stdtrit(freedom, 0.95))
