"""Would it have been right? Forecasts from the early part of known curves, against what then happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ostinato.apps.scaling.curve import CONSERVATIVE, Noise, Sigmoid
from ostinato.apps.scaling.gates import FEWEST, Standing, assess
from ostinato.apps.scaling.posterior import Interval, Posterior, interval, posterior
from ostinato.apps.scaling.series import Series, simulate_series

FRACTIONS = (0.25, 0.35, 0.5, 0.7)
SCALERL = Sigmoid(R0=0.40, A=0.61, B=1.92, C_mid=2542.0)  # table 1 of the paper
FINAL = 0.8  # the final score is the mean of what lies beyond this share of the last compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One curve, fitted up to a share of its compute: the final score as foretold and as it was."""

    name: str
    fraction: float
    evaluations: int  # in the fit
    standing: Standing
    foretold: Interval  # of the curve: the noise of what was measured counts against it
    least_squares: float  # the point forecast of the plain fit
    final: float  # what was measured

    @property
    def covered(self) -> bool:
        return self.foretold.low <= self.final <= self.foretold.high

    @property
    def error(self) -> float:
        """Of the point forecast, the median."""
        return abs(self.foretold.median - self.final)


def backtest(
    curves: Sequence[Series],
    fractions: Sequence[float] = FRACTIONS,
    *,
    noise: Noise = CONSERVATIVE,
    first: float = 0.0,
) -> list[Row]:
    """A row for each curve and fraction with at least 5 evaluations at ``first`` <= C <= fraction x C_end.

    The target is the mean score at C >= 0.8 C_end; none of it is in the fit.
    """
    rows = []
    for whole in curves:
        kept = whole.between(first=first)
        if not len(kept):
            continue
        end = float(kept.compute[-1])
        final = kept.between(first=FINAL * end)
        for fraction in fractions:
            window = kept.between(last=min(fraction, np.nextafter(FINAL, 0)) * end)
            if len(window) >= FEWEST:
                rows.append(_row(posterior(window, noise=noise), final, fraction))
    return rows


def _row(known: Posterior, final: Series, fraction: float) -> Row:
    return Row(
        name=known.series.name,
        fraction=fraction,
        evaluations=len(known.series),
        standing=assess(known).standing,
        foretold=interval(known.score(final.compute).mean(axis=1)),
        least_squares=float(known.fit.curve.score(final.compute).mean()),
        final=float(final.score.mean()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of some rows; NaN where there are none."""

    curves: int
    coverage: float  # share of 90 % intervals that hold the final score
    median_width: float
    median_error: float
    rmse: float
    largest_error: float
    least_squares_error: float  # median, of the plain fit


def summary(rows: Sequence[Row]) -> Summary:
    if not rows:
        nan = float("nan")
        return Summary(
            curves=0,
            coverage=nan,
            median_width=nan,
            median_error=nan,
            rmse=nan,
            largest_error=nan,
            least_squares_error=nan,
        )
    errors = np.array([row.error for row in rows])
    return Summary(
        curves=len(rows),
        coverage=float(np.mean([row.covered for row in rows])),
        median_width=float(np.median([row.foretold.width for row in rows])),
        median_error=float(np.median(errors)),
        rmse=float(np.sqrt(np.mean(errors**2))),
        largest_error=float(errors.max()),
        least_squares_error=float(np.median([abs(row.least_squares - row.final) for row in rows])),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Coverage of the true score by 90 % intervals, by how far the curves had come."""

    curves: int
    coverage: float
    median_width: float
    by_ratio: tuple[tuple[float, float], ...]  # (C_max / C_mid, coverage)


def calibrate(
    curves: int = 500,
    *,
    noise: Noise = CONSERVATIVE,
    truths: Sequence[Sigmoid] = (SCALERL,),
    ratios: Sequence[float] = (1.5, 2.0, 3.0, 4.0, 5.0),
    evaluations: int = 20,
    sd: float = 0.0042,
    rho: float = 0.45,
    beyond: float = 5.0,
    seed: int = 0,
) -> Calibration:
    """Simulated curves with AR(1) noise, each cut at one of the ``ratios`` of C_mid and forecast ``beyond``
    times further; ``truths`` and ratios take turns. With the noise that they were made with (and factor 0) a
    right posterior covers 90 %."""
    hits: dict[float, list[bool]] = {ratio: [] for ratio in ratios}
    widths = []
    for number in range(curves):
        ratio = ratios[number % len(ratios)]
        truth = truths[number // len(ratios) % len(truths)]
        C = np.linspace(0, ratio * truth.C_mid, evaluations + 1)[1:]
        known = posterior(
            simulate_series(truth, C, sd=sd, rho=rho, seed=seed + number),
            noise=noise,
            draws=1024,
            cells=(32, 64),
        )
        foretold = interval(known.score(beyond * C[-1]))
        hits[ratio].append(foretold.low <= float(truth.score(beyond * C[-1])) <= foretold.high)
        widths.append(foretold.width)
    return Calibration(
        curves=curves,
        coverage=float(np.mean([hit for each in hits.values() for hit in each])),
        median_width=float(np.median(widths)),
        by_ratio=tuple((ratio, float(np.mean(each))) for ratio, each in hits.items() if each),
    )
