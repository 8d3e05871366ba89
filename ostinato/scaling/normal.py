"""The standard normal distribution between two bounds, accurate in both tails, and Student's quantile."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

_erfc = np.vectorize(math.erfc, otypes=[float])
_cdf = np.vectorize(NormalDist().cdf, otypes=[float])
_quantile = np.vectorize(NormalDist().inv_cdf, otypes=[float])

FAR = 30.0  # standard deviations: beyond, Phi underflows soon, and its asymptote is good to 1e-8


def log_between(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """ln(Phi(high) - Phi(low)), low < high."""
    right = low + high > 0
    low, high = np.where(right, -high, low), np.where(right, -low, high)  # the mass is on the left
    top = log_cdf(high)
    return top + np.log(-np.expm1(np.minimum(log_cdf(low) - top, -1e-300)))


def log_cdf(x: np.ndarray) -> np.ndarray:
    """ln Phi(x)."""
    near, far = np.maximum(x, -FAR), np.minimum(x, -FAR)
    tail = -0.5 * far**2 - np.log(-far * math.sqrt(2 * math.pi)) - 1 / far**2
    return np.where(x < -FAR, tail, np.log(0.5 * _erfc(-near / math.sqrt(2))))


def truncated(low: np.ndarray, high: np.ndarray, u: np.ndarray) -> np.ndarray:
    """The quantile ``u`` (in (0, 1)) of the normal restricted to [low, high]."""
    right = low + high > 0
    low, high = np.where(right, -high, low), np.where(right, -low, high)
    first, last = _cdf(low), _cdf(high)
    p = first + np.where(right, 1 - u, u) * (last - first)
    inside = (p > 0) & (p < 1)
    z = np.where(inside, _quantile(np.where(inside, p, 0.5)), high)  # underflow: at the near bound
    z = np.clip(z, low, high)
    return np.where(right, -z, z)


def student_90(freedom: int) -> float:
    """The 95 % quantile of Student's t: half of a 90 % interval. Exact for 1 and 2 degrees of freedom, else
    by the expansion of Abramowitz and Stegun 26.7.5, within 0.3 %."""
    if freedom < 1:
        raise ValueError(f"freedom is {freedom}; use at least 1 degree of freedom")
    if freedom == 1:
        return math.tan(math.pi * 0.45)
    if freedom == 2:
        return 0.9 * math.sqrt(2 / (1 - 0.9**2))
    z = NormalDist().inv_cdf(0.95)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
