"""The posterior of A, B and C_mid: a grid over (ln B, ln C_mid), with A and R0 integrated exactly.

    R[t] = A S + R0 (1 - S) + noise,   noise AR(1)           R0 ~ N(measured, its error)
    A ~ U(R0, 1),   ln B ~ N(ln 1.9, 0.35),   ln C_mid flat from C_min / 10 to 8 C_max

Given B and C_mid the exponent is quadratic in A, so its integral over [R0, 1] is a difference of normal
distribution functions, and only two dimensions are left for the grid. The grid is refined where the mass is;
draws are taken from its cells, and A of each draw from its own truncated normal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ostinato.apps.scaling import curve
from ostinato.apps.scaling.curve import CONSERVATIVE, Noise, log_between, simulate, truncated_quantile, whiten
from ostinato.apps.scaling.fit import B_RANGE, PARAMETERS, Fit, fit
from ostinato.apps.scaling.series import Series

LEVEL = 0.9  # of all intervals by default


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """The prior: B is log-normal around ``B`` with ``spread`` in ln B; C_mid is flat in its logarithm, from
    C_min / ``below`` to ``above`` C_max."""

    B: float = 1.9
    spread: float = 0.35
    below: float = 10.0
    above: float = 8.0


PRIOR = Prior()


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An equal-tailed interval with the median."""

    low: float
    median: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low

    def ends(self) -> Interval:
        """Return the interval without the median (NaN), which would look like a forecast where there is
        none."""
        return Interval(low=self.low, median=math.nan, high=self.high)


def interval(values: np.ndarray, level: float = LEVEL) -> Interval:
    """Take the interval of draws. Infinite draws (compute for a target that is never reached) are the
    largest."""
    quantiles = np.quantile(values, [(1 - level) / 2, 0.5, (1 + level) / 2], method="inverted_cdf")
    low, median, high = (float(q) for q in quantiles)
    return Interval(low=low, median=median, high=high)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posterior:
    """Draws of equal weight, and the data, noise and prior that they follow from."""

    series: Series  # of the fit window
    fit: Fit
    noise: Noise
    prior: Prior
    sd: np.ndarray  # [n] standard deviations of the evaluations
    R0: np.ndarray  # [N]
    A: np.ndarray  # [N]
    B: np.ndarray  # [N]
    C_mid: np.ndarray  # [N]

    def score(self, C: float | np.ndarray) -> np.ndarray:
        """Compute R(C) of every draw: [N, m], or [N] for a single C."""
        computes = np.atleast_1d(np.asarray(C, float))
        R = curve.score(computes, *(x[:, None] for x in (self.R0, self.A, self.B, self.C_mid)))
        return R if np.ndim(C) else R[:, 0]

    def simulate_evaluations(self, C: np.ndarray, seed: int = 0) -> np.ndarray:
        """Simulate [N, m] successive evaluations at C as they would be measured: with noise, clipped to [0,
        1]."""
        rng = np.random.default_rng(seed)
        sd = float(np.median(self.sd))
        noise = simulate(rng, len(self.A), len(C), sd, self.noise.rho)
        return np.clip(self.score(np.asarray(C)) + noise, 0, 1)

    def compute_for(self, T: float) -> np.ndarray:
        """Compute [N] C with R(C) = T: infinite for draws with A <= T, 0 for draws with R0 >= T."""
        return curve.compute_for(T, self.R0, self.A, self.B, self.C_mid)

    def gain(self, start: float, end: float) -> np.ndarray:
        """Compute [N] R(end) - R(start)."""
        R = self.score(np.array([start, end]))
        return R[:, 1] - R[:, 0]


def posterior(
    series: Series,
    *,
    noise: Noise = CONSERVATIVE,
    prior: Prior = PRIOR,
    draws: int = 4096,
    seed: int = 0,
    cells: tuple[int, int] = (48, 96),
) -> Posterior:
    """Compute the posterior after the evaluations of ``series``, as ``draws`` draws that the ``seed``
    decides.

    Raises ValueError for fewer than 3 evaluations.
    """
    least_squares = fit(series)
    residual_sd = least_squares.residual_sd if len(series) > PARAMETERS else 0.0
    sd = noise.sd(residual_sd, series.stderr, len(series))
    grid = _Grid.of(series, sd, noise.rho, prior)
    for heat in (16.0, 4.0, 1.0):  # cooling, so that a mass narrower than a cell is found
        log_B, log_C_mid = grid.axes(cells)
        grid = grid.refine(grid.density(log_B[:, None], log_C_mid[None, :]) / heat, cells)
    log_B, log_C_mid = grid.axes(cells)
    density = grid.density(log_B[:, None], log_C_mid[None, :])
    rng = np.random.default_rng(seed)
    mass = np.cumsum(np.exp(density - density.max()).ravel())
    cell_ids = np.searchsorted(mass, (np.arange(draws) + rng.random()) / draws * mass[-1])
    i, j = np.unravel_index(np.minimum(cell_ids, mass.size - 1), density.shape)
    log_B = log_B[i] + (rng.random(draws) - 0.5) * (log_B[1] - log_B[0])
    log_C_mid = log_C_mid[j] + (rng.random(draws) - 0.5) * (log_C_mid[1] - log_C_mid[0])
    order = rng.permutation(draws)  # so that neighbours in the grid are no neighbours among the draws
    A, R0 = grid.levels(log_B, log_C_mid, rng)
    return Posterior(
        series=series,
        fit=least_squares,
        noise=noise,
        prior=prior,
        sd=sd,
        R0=R0[order],
        A=A[order],
        B=np.exp(log_B[order]),
        C_mid=np.exp(log_C_mid[order]),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Grid:
    """The density over a box of (ln B, ln C_mid)."""

    series: Series
    sd: np.ndarray
    rho: float
    prior: Prior
    low: np.ndarray  # [2]
    high: np.ndarray

    @classmethod
    def of(cls, series: Series, sd: np.ndarray, rho: float, prior: Prior) -> _Grid:
        C = series.compute
        return cls(
            series=series,
            sd=sd,
            rho=rho,
            prior=prior,
            low=np.log([B_RANGE[0], C[0] / prior.below]),
            high=np.log([B_RANGE[1], C[-1] * prior.above]),
        )

    def axes(self, cells: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Compute the centres of the cells, ln B and ln C_mid."""
        steps = (self.high - self.low) / cells
        (log_B, log_C_mid) = (
            low + step * (np.arange(n) + 0.5) for low, step, n in zip(self.low, steps, cells, strict=True)
        )
        return log_B, log_C_mid

    def refine(self, density: np.ndarray, cells: tuple[int, int], tail: float = 1e-5) -> _Grid:
        """Return the grid of a smaller box: it has the mass, all but ``tail`` on each side, and one more cell
        on each side."""
        mass = np.exp(density - density.max())
        ends = []
        for axis, n in enumerate(cells):
            cumulative = np.cumsum(mass.sum(1 - axis)) / mass.sum()
            ends.append(
                (
                    max(np.searchsorted(cumulative, tail) - 1, 0),
                    min(np.searchsorted(cumulative, 1 - tail) + 2, n),
                )
            )
        step = (self.high - self.low) / cells
        first, last = (np.array(bound_indices) for bound_indices in zip(*ends, strict=True))
        return _Grid(
            series=self.series,
            sd=self.sd,
            rho=self.rho,
            prior=self.prior,
            low=self.low + step * first,
            high=self.low + step * last,
        )

    def density(self, log_B: np.ndarray, log_C_mid: np.ndarray) -> np.ndarray:
        """Compute ln of the posterior density of the cells, up to a constant; A and R0 are integrated out."""
        q = self._compute_quadratic(log_B, log_C_mid)
        mean, width = q.sy / q.ss, 1 / np.sqrt(q.ss)
        mass = log_between(-mean / width, (1 - self.series.R0 - mean) / width)
        prior = -0.5 * ((log_B - math.log(self.prior.B)) / self.prior.spread) ** 2
        return prior - 0.5 * (q.yy - q.sy * mean) + np.log(width) + mass - 0.5 * np.log1p(q.se2 * q.pp)

    def levels(
        self, log_B: np.ndarray, log_C_mid: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw (A, R0) for each (B, C_mid)."""
        q = self._compute_quadratic(log_B, log_C_mid)
        mean, width = q.sy / q.ss, 1 / np.sqrt(q.ss)
        high = 1 - self.series.R0
        z = truncated_quantile(-mean / width, (high - mean) / width, rng.random(len(log_B)))
        gain = np.clip(mean + width * z, 0, high)
        se = math.sqrt(q.se2)
        variance = 1 / (1 + q.se2 * q.pp)
        shift = variance * se * (q.py - gain * q.sp) + np.sqrt(variance) * rng.standard_normal(len(log_B))
        A = self.series.R0 + gain
        return A, np.clip(self.series.R0 + se * shift, 0, A)

    def _compute_quadratic(self, log_B: np.ndarray, log_C_mid: np.ndarray) -> _Quadratic:
        """Compute the quadratic of the exponent for each (B, C_mid)."""
        n = len(self.series)
        S = curve.share(self.series.compute, np.exp(log_B)[..., None], np.exp(log_C_mid)[..., None])
        s = whiten(S, self.sd, self.rho)
        y = whiten(self.series.score - self.series.R0, self.sd, self.rho)
        ss, sy = np.maximum((s * s).sum(-1), 1e-12), s @ y
        se2 = self.series.R0_stderr**2
        if not se2:  # R0 is known
            zeros = np.zeros_like(sy)
            return _Quadratic(yy=np.full_like(sy, y @ y), sy=sy, ss=ss, se2=0.0, pp=zeros, py=zeros, sp=zeros)
        p = whiten(np.ones(n), self.sd, self.rho) - s  # the factor of R0
        pp, py, sp = (p * p).sum(-1), p @ y, (s * p).sum(-1)
        g = se2 / (1 + se2 * pp)
        return _Quadratic(
            yy=y @ y - g * py**2,
            sy=sy - g * sp * py,
            ss=np.maximum(ss - g * sp**2, 1e-12),
            se2=se2,
            pp=pp,
            py=py,
            sp=sp,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Quadratic:
    """The exponent (times -2) at a = A - R0 is yy - 2 a sy + a^2 ss, with the error of R0 integrated out; pp,
    py and sp have 1 - S in place of S or y."""

    yy: np.ndarray
    sy: np.ndarray
    ss: np.ndarray
    se2: float  # variance of the measured R0
    pp: np.ndarray
    py: np.ndarray
    sp: np.ndarray
