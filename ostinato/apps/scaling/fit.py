"""Least squares by variable projection: A - R0 in closed form, B and C_mid by a grid and a polish."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ostinato.apps.scaling.curve import FEWEST, MORE, PARAMETERS, Sigmoid, share, whiten
from ostinato.apps.scaling.series import Series

B_RANGE = (0.3, 8.0)
REACH = 20.0  # C_mid is searched from C_min / REACH to REACH x C_max


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """The least-squares curve and its residuals."""

    curve: Sigmoid
    residuals: np.ndarray  # [n] observed - fitted

    @property
    def sse(self) -> float:
        return float(self.residuals @ self.residuals)

    @property
    def residual_sd(self) -> float:
        """Standard deviation of the residuals, unbiased for independent noise; 0 without degrees of
        freedom."""
        return math.sqrt(self.sse / max(1, len(self.residuals) - PARAMETERS))


def fit(series: Series, *, rho: float = 0.0, sd: np.ndarray | float = 1.0) -> Fit:
    """Fit the least-squares sigmoid with R0 fixed and A at most 1.

    ``rho`` > 0 is generalised least squares for AR(1) noise, ``sd`` ([n]) weighs each evaluation by its own.
    Raises ValueError for fewer than 3 evaluations.
    """
    if len(series) < PARAMETERS:
        raise ValueError(
            f"{series.name} has {len(series)} of the {FEWEST} evaluations that a curve takes, in the window "
            f"and after training began; {MORE}"
        )
    problem = _Problem.of(series, sd, rho)
    log_B, log_C_mid = problem.polish(problem.search())
    gain = float(problem.gain(problem.whiten_shares(log_B, log_C_mid)))
    curve = Sigmoid(R0=series.R0, A=series.R0 + gain, B=math.exp(log_B), C_mid=math.exp(log_C_mid))
    return Fit(curve=curve, residuals=series.score - curve.score(series.compute))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Problem:
    """The least-squares problem: min |y - a S(B, C_mid)|^2 in whitened coordinates, a = A - R0 in [0,
    max_gain]."""

    compute: np.ndarray  # [n]
    y: np.ndarray  # [n] whiten_shares R - R0
    sd: np.ndarray | float
    rho: float
    max_gain: float
    low: np.ndarray  # [2] least ln B, ln C_mid
    high: np.ndarray

    @classmethod
    def of(cls, series: Series, sd: np.ndarray | float, rho: float) -> _Problem:
        C = series.compute
        return cls(
            compute=C,
            y=whiten(series.score - series.R0, sd, rho),
            sd=sd,
            rho=rho,
            max_gain=1.0 - series.R0,
            low=np.log([B_RANGE[0], C[0] / REACH]),
            high=np.log([B_RANGE[1], C[-1] * REACH]),
        )

    def whiten_shares(self, log_B: np.ndarray, log_C_mid: np.ndarray) -> np.ndarray:
        """Compute [..., n] S in whitened coordinates."""
        B, C_mid = np.exp(log_B), np.exp(log_C_mid)
        return whiten(share(self.compute, B[..., None], C_mid[..., None]), self.sd, self.rho)

    def gain(self, S: np.ndarray) -> np.ndarray:
        """Compute the least-squares a for each row of S."""
        return np.clip((S @ self.y) / np.maximum((S * S).sum(-1), 1e-300), 0.0, self.max_gain)

    def search(self, cells: tuple[int, int] = (40, 120)) -> np.ndarray:
        """Find [2] the best (ln B, ln C_mid) of a grid."""
        log_B, log_C_mid = (np.linspace(*ends) for ends in zip(self.low, self.high, cells, strict=True))
        S = self.whiten_shares(log_B[:, None], log_C_mid[None, :])
        a = self.gain(S)
        sse = a * (a * (S * S).sum(-1) - 2 * (S @ self.y))  # less the constant y y
        i, j = np.unravel_index(sse.argmin(), sse.shape)
        return np.array([log_B[i], log_C_mid[j]])

    def polish(self, point: np.ndarray, rounds: int = 200) -> np.ndarray:
        """Improve ``point`` (ln B, ln C_mid) by Levenberg and Marquardt's descent inside the box, in
        ``rounds`` steps at most, on residuals with a projected out (Kaufman)."""
        damping = 1e-3
        r, J = self._linearise(point)
        for _ in range(rounds):
            H = J.T @ J
            step = np.linalg.solve(H + damping * np.diag(np.diag(H) + 1e-12 * np.trace(H) + 1e-30), J.T @ r)
            candidate = np.clip(point + step, self.low, self.high)
            r_candidate, J_candidate = self._linearise(candidate)
            is_better = r_candidate @ r_candidate < r @ r
            is_done = np.abs(candidate - point).max() < 1e-13
            if is_better:
                point, r, J = candidate, r_candidate, J_candidate
            if is_done or damping > 1e12:
                break
            damping = damping / 10 if is_better else damping * 10
        return point

    def _linearise(self, point: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ([n] residuals, [n, 2] minus their derivatives) at ``point`` (ln B, ln C_mid)."""
        B, C_mid = np.exp(point)
        S = share(self.compute, B, C_mid)
        slope = S * (1 - S)  # dS / d(B ln(C / C_mid))
        J = np.stack([slope * B * np.log(self.compute / C_mid), -slope * B], axis=-1)
        S, J = whiten(S, self.sd, self.rho), whiten(J.T, self.sd, self.rho).T
        a = self.gain(S)
        if 0.0 < a < self.max_gain:  # a is not at a bound, so it changes with B and C_mid
            J = J - np.outer(S, S @ J) / (S @ S)
        return self.y - a * S, a * J
