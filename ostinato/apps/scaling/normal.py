"""The standard normal distribution between two bounds, accurate in both tails, and Student's quantile."""

from __future__ import annotations

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri, stdtrit


def log_between(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """ln(Phi(high) - Phi(low)), low < high."""
    right = low + high > 0
    low, high = np.where(right, -high, low), np.where(right, -low, high)  # the mass is on the left
    top = log_ndtr(high)
    return top + np.log(-np.expm1(np.minimum(log_ndtr(low) - top, -1e-300)))


def truncated(low: np.ndarray, high: np.ndarray, u: np.ndarray) -> np.ndarray:
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
