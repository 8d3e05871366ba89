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


def elasticity(C: Number, R0: Number, A: Number, B: Number, C_mid: Number) -> np.ndarray:
    """dR / d ln C = B (A - R0) S (1 - S): score per e-fold of compute, largest at C_mid: B (A - R0) / 4."""
    S = share(C, B, C_mid)
    return np.asarray(B) * (np.asarray(A) - R0) * S * (1.0 - S)


def linearised(R: Number, R0: Number, A: Number) -> np.ndarray:
    """ln F with F = (R - R0) / (A - R) = (C / C_mid)^B, for R0 < R < A: a line of slope B over ln C.

    The paper's F (figure 7) has C_mid^B beside it: the same line, shifted. Nan where R is not between.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        F = (np.asarray(R) - R0) / (np.asarray(A) - R)
        return np.where(F > 0, np.log(np.abs(F)), np.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sigmoid:
    """One curve."""

    R0: float
    A: float
    B: float
    C_mid: float

    def __post_init__(self) -> None:
        for name in ("B", "C_mid"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} of a sigmoid is {value}; use a positive number")
        if not self.R0 <= self.A:
            raise ValueError(f"A of a sigmoid is {self.A}, below R0 ({self.R0}); the curve can only rise")

    def score(self, C: Number) -> np.ndarray:
        return score(C, self.R0, self.A, self.B, self.C_mid)

    def share(self, C: Number) -> np.ndarray:
        return share(C, self.B, self.C_mid)

    def compute_for(self, T: Number) -> np.ndarray:
        return compute_for(T, self.R0, self.A, self.B, self.C_mid)

    def elasticity(self, C: Number) -> np.ndarray:
        return elasticity(C, self.R0, self.A, self.B, self.C_mid)

    def power_law(self) -> tuple[float, float, float]:
        """(A, D, B) of A - D / C^B, which the curve becomes for C >> C_mid (appendix A.4)."""
        return self.A, (self.A - self.R0) * self.C_mid**self.B, self.B


def crossovers(one: Sigmoid, other: Sigmoid, low: float, high: float, cells: int = 4096) -> list[float]:
    """All C in (low, high) at which the curves cross, ascending; two crossings within a cell, 1 / ``cells``
    of the range in ln C, are not seen."""

    def gap(log_C: np.ndarray) -> np.ndarray:
        return one.score(np.exp(log_C)) - other.score(np.exp(log_C))

    grid = np.linspace(math.log(low), math.log(high), cells + 1)
    sign = np.sign(gap(grid))
    exact = grid[sign == 0] if np.any(sign) else grid[:0]  # equal curves do not cross
    starts = np.flatnonzero(sign[:-1] * sign[1:] < 0)
    left, right, rising = grid[starts], grid[starts + 1], sign[starts + 1] > 0
    for _ in range(60):  # bisection of all of them, down to the last bit
        middle = (left + right) / 2
        above = (gap(middle) > 0) == rising
        left, right = np.where(above, left, middle), np.where(above, middle, right)
    return np.exp(np.sort(np.concatenate([exact, (left + right) / 2]))).tolist()
