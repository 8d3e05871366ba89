"""The saturating curve of RL compute (ScaleRL, arXiv 2510.13786, equation 1) and what follows from it.

    R(C) = R0 + (A - R0) * S(C),    S(C) = 1 / (1 + (C_mid / C)^B)

C is compute in any unit, R the expected held-out score, R0 that before training, A the ceiling, C_mid the
compute at which half of A - R0 is gained, B the steepness in ln C. Only C_mid has a unit, that of C.
Parameters may be arrays: everything broadcasts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Number = float | np.ndarray


def share(C: Number, B: Number, C_mid: Number) -> np.ndarray:
    """S(C) in [0, 1], what is gained of A - R0; 0 at C = 0."""
    with np.errstate(divide="ignore", over="ignore"):
        return 1.0 / (1.0 + np.exp(np.asarray(B) * (np.log(C_mid) - np.log(C))))


def score(C: Number, R0: Number, A: Number, B: Number, C_mid: Number) -> np.ndarray:
    """R(C)."""
    return R0 + (np.asarray(A) - R0) * share(C, B, C_mid)


def compute_for(T: Number, R0: Number, A: Number, B: Number, C_mid: Number) -> np.ndarray:
    """C with R(C) = T, for R0 < T < A; 0 where T is had from the start, infinite where A is not above it."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        ratio = (np.asarray(T) - R0) / (np.asarray(A) - T)
        C = C_mid * np.exp(np.log(ratio) / B)
    return np.where(np.asarray(T) <= R0, 0.0, np.where(np.asarray(T) >= A, np.inf, C))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sigmoid:
    """One curve."""

    R0: float
    A: float
    B: float
    C_mid: float

    def score(self, C: Number) -> np.ndarray:
        return score(C, self.R0, self.A, self.B, self.C_mid)

    def compute_for(self, T: Number) -> np.ndarray:
        return compute_for(T, self.R0, self.A, self.B, self.C_mid)
