"""The posterior seen from two other sides: where they disagree with it, a person is warned."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ostinato.scaling.fit import Fit, fit
from ostinato.scaling.noise import whiten
from ostinato.scaling.posterior import Interval, Posterior, interval
from ostinato.scaling.series import Series

CHI2 = 2.7055434540954  # the 90 % quantile of chi-squared with one degree of freedom


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossCheck:
    """90 % intervals of A three ways; ``warnings`` are sentences, none where they agree."""

    posterior: Interval
    profile: Interval  # an end at R0 or 1 is not closed
    bootstrap: Interval
    warnings: tuple[str, ...]


def cross_check(known: Posterior, *, resamples: int = 100, seed: int = 0) -> CrossCheck:
    """The interval of A by profile likelihood and by block bootstrap beside that of the posterior."""
    A, profile = interval(known.A), profile_interval(known.series, known.sd, known.noise.rho)
    bootstrap = interval(block_bootstrap(known.series, known.fit, resamples=resamples, seed=seed))
    warnings = [
        f"the {name} puts A between {other.low:.3f} and {other.high:.3f}, the posterior between"
        f" {A.low:.3f} and {A.high:.3f}; trust neither before more is measured"
        for name, other in (("profile likelihood", profile), ("block bootstrap", bootstrap))
        if _disagree(A, other)
    ]
    return CrossCheck(posterior=A, profile=profile, bootstrap=bootstrap, warnings=tuple(warnings))


def _disagree(A: Interval, other: Interval) -> bool:
    """Do the medians lie outside each other's intervals, or is the posterior less than half as wide? That it
    is wider is meant: its noise is larger than what the residuals show."""
    outside = not A.low <= other.median <= A.high or not other.low <= A.median <= other.high
    return (outside and abs(A.median - other.median) > 0.01) or other.width > 2 * A.width


def profile_interval(series: Series, sd: np.ndarray, rho: float) -> Interval:
    """All A whose best B and C_mid fit within 2.71 of the best chi-squared; its ``median`` is the best A.

    The fit with A fixed is exact, so the profile is; its ends are found by bisection, to 1e-4.
    """
    best = fit(series, rho=rho, sd=sd)
    least = _chi2(best, sd, rho)

    def inside(A: float) -> bool:
        return _chi2(fit(series, rho=rho, sd=sd, A=A), sd, rho) - least <= CHI2

    ends = []
    for bound in (series.R0, 1.0):
        within, beyond = best.curve.A, bound
        if inside(bound):
            ends.append(bound)
            continue
        while abs(within - beyond) > 1e-4:
            middle = (within + beyond) / 2
            within, beyond = (middle, beyond) if inside(middle) else (within, middle)
        ends.append((within + beyond) / 2)
    return Interval(low=ends[0], median=best.curve.A, high=ends[1])


def _chi2(found: Fit, sd: np.ndarray, rho: float) -> float:
    white = whiten(found.residuals, sd, rho)
    return float(white @ white)


def block_bootstrap(series: Series, found: Fit, *, resamples: int = 100, seed: int = 0) -> np.ndarray:
    """[resamples] values of A, fitted to the curve of ``found`` with its residuals drawn again in blocks of
    neighbours (Kuensch 1989), n^(1/3) and at least 2 long, which keeps their correlation."""
    n, rng = len(series), np.random.default_rng(seed)
    length = min(n, max(2, round(n ** (1 / 3))))
    starts = rng.integers(0, n - length + 1, (resamples, math.ceil(n / length)))
    which = (starts[..., None] + np.arange(length)).reshape(resamples, -1)[:, :n]
    residuals = found.residuals * math.sqrt(n / max(1, n - found.free))
    fitted = found.curve.score(series.compute)
    scores = np.clip(fitted + residuals[which] - residuals.mean(), 0, 1)
    return np.array([fit(replace(series, score=score)).curve.A for score in scores])
