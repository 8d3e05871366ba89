"""``ostinato bench scaling``: would the forecasts have been right?

On the published curves of the ScaleRL paper (points digitised from its figures): forecasts from the early
part of every run against the end of it, and the numbers that the paper and its refits give for the
same points. On simulated curves: coverage of the intervals when the truth is known.
"""

from __future__ import annotations

import csv
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from scipy.optimize import brentq, minimize_scalar

from lab.backtest import FRACTIONS, Row, backtest, calibrate, summary
from lab.harness import Bench, Result, Say, option
from ostinato.apps.scaling.curve import CONSERVATIVE, MEASURED, Noise, Sigmoid
from ostinato.apps.scaling.fit import fit
from ostinato.apps.scaling.gates import REPORTED
from ostinato.apps.scaling.posterior import posterior
from ostinato.apps.scaling.series import Series, read_csv, series
from ostinato.every import Axis

FIRST = 1500.0  # GPU-hours: the paper leaves out what is before (appendix A.5)
R0 = 0.40
# One of each run of which the figures show several views, without the one that collapses.
DISTINCT = (
    "Fig1a ScaleRL-bs2048",
    "Fig2 ScaleRL",
    "Fig2 Magistral",
    "Fig4a PPO-off-policy-1",
    "Fig4a PPO-off-policy-8",
    "Fig4a PipelineRL-8",
    "Fig5a CISPO",
    "Fig5b fp32",
    "Fig11-math math+code:math",
    "Fig11-code math+code:code",
    "Fig15b LOO-no-fp32",
)
BARS = {
    "coverage": 0.85,
    "median_width": 0.06,
    "median_error": 0.012,
    "synthetic_noise_known": (0.88, 0.96),
    "synthetic_default": 0.88,
    "largest_relative_error": 1e-6,
    "fit_s": 0.1,
    "posterior_s": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling(Bench):
    """``points`` is a CSV with columns figure, series, gpu_hours, pass_rate; None: the published curves."""

    points: Path | None = option(
        None, "A CSV with columns figure, series, gpu_hours, pass_rate; else published curves."
    )
    fractions: tuple[float, ...] = FRACTIONS
    headline: float = 0.5
    synthetic: int = 500
    rounds: int = 5  # of timings

    def quick(self) -> Scaling:
        return replace(self, synthetic=100, rounds=1)

    def measure(self, say: Say) -> dict[str, Any]:
        curves = {
            one.name: one
            for one in read_csv(
                self.points or published("scalerl_points.csv"),
                compute="gpu_hours",
                score="pass_rate",
                by=("figure", "series"),
                R0=R0,
                axis=Axis.DEVICE_HOURS,
                held_out="figures of arXiv 2510.13786",
            )
        }
        rows = backtest(list(curves.values()), self.fractions, first=FIRST)
        headline = summary([row for row in rows if row.fraction == self.headline])
        if not headline.curves:
            raise ValueError(
                f"none of the {len(curves)} curves of {self.points} has 5 evaluations between {FIRST:g} and"
                f" {self.headline:.0%} of its compute; nothing can be tested"
            )
        say(f"{headline.curves} curves at {self.headline:.0%}: {headline.coverage:.1%} covered")
        result: dict[str, Any] = {
            "coverage": headline.coverage,
            "median_width": headline.median_width,
            "median_error": headline.median_error,
            "by_fraction": [_by_fraction(rows, fraction) for fraction in self.fractions],
            "rows": [_row(row) for row in rows],
            "seconds": _seconds(list(curves.values()), self.rounds),
        }
        say("simulated curves")
        result["synthetic"] = synthetic(self.synthetic)
        result["noises"] = noises(list(curves.values()), self)
        if self.points is None:
            result["exactness"] = exactness()
            result["oracles"] = oracles(curves)
        result["held"] = _held(result)
        settings = asdict(self) | {"points": None if self.points is None else self.points.name}
        return result | {"bars": BARS, "settings": settings}

    @staticmethod
    def table(result: Result) -> Table:
        shown = Table(title="Forecasts of the end of published runs, 90 % intervals")
        for name in ("fitted on", "of", "curves", "covered", "median width", "median error", "largest error"):
            shown.add_column(name, justify="left" if name == "of" else "right")
        for entry in result["by_fraction"]:
            for of in ("all", "reported", "distinct"):
                one = entry[of]
                if one["curves"]:
                    shown.add_row(
                        f"{entry['fraction']:.0%}",
                        of,
                        str(one["curves"]),
                        f"{one['coverage']:.0%}",
                        f"{one['median_width']:.3f}",
                        f"{one['median_error']:.4f}",
                        f"{one['largest_error']:.3f}",
                    )
        matched, of_all, default = (
            result["synthetic"][name]["coverage"] for name in ("matched", "matched_all", "default")
        )
        failed = [name for name, holds in result["held"].items() if not holds]
        shown.caption = (
            f"simulated: {matched:.1%} covered where the noise is known ({of_all:.1%} over the parameters of"
            f" all published curves), {default:.1%} with the noise that all commands assume;"
            f" fit {1e3 * result['seconds']['fit_s']:.1f} ms, posterior"
            f" {1e3 * result['seconds']['posterior_s']:.0f} ms; bars missed: {', '.join(failed) or 'none'}"
        )
        return shown


def published(name: str) -> Path:
    """The file of that name among the data of the package."""
    return Path(str(files("ostinato.apps.scaling").joinpath("data", name)))


def _row(row: Row) -> dict[str, Any]:
    return asdict(row) | {"covered": row.covered, "error": row.error}


def _by_fraction(rows: Sequence[Row], fraction: float) -> dict[str, Any]:
    """All curves; those that the gate lets a point estimate be reported of; one of each healthy run."""
    at = [row for row in rows if row.fraction == fraction]
    return {
        "fraction": fraction,
        "all": asdict(summary(at)),
        "reported": asdict(summary([row for row in at if row.standing in REPORTED])),
        "distinct": asdict(summary([row for row in at if row.name in DISTINCT])),
    }


def _seconds(curves: Sequence[Series], rounds: int) -> dict[str, float]:
    """CPU seconds of one fit and one posterior: medians over curves and rounds."""

    def median(work: Callable[[Series], object]) -> float:
        picked = []
        for one in rounds * [curve.between(first=FIRST) for curve in curves]:
            start = time.process_time()
            work(one)
            picked.append(time.process_time() - start)
        return statistics.median(picked)

    return {"fit_s": round(median(fit), 5), "posterior_s": round(median(posterior), 5)}


def synthetic(curves: int) -> dict[str, Any]:
    """Coverage where the posterior knows the noise: of the paper's curve, and of all rows of the parameter
    file in turn; and with the noise that it assumes by default."""
    matched = Noise(rho=0.45, floor=0.0042, factor=0.0)
    return {
        "matched": asdict(calibrate(curves, noise=matched)),
        "matched_all": asdict(calibrate(curves, noise=matched, truths=list(parameters().values()))),
        "default": asdict(calibrate(curves)),
    }


def noises(curves: Sequence[Series], bench: Scaling) -> list[dict[str, Any]]:
    """Coverage of published curves (at the headline's share of the run) and of simulated ones by the noise
    that is assumed: real curves leave the sigmoid a little, simulated ones do not; no noise suits both."""
    between = Noise(rho=0.5, floor=0.005, factor=1.2, few=True)
    rows = []
    for name, noise in (("measured", MEASURED), ("between", between), ("default", CONSERVATIVE)):
        one = summary(backtest(curves, (bench.headline,), noise=noise, first=FIRST))
        simulated = calibrate(bench.synthetic // 2, noise=noise).coverage
        rows.append({"noise": name, **asdict(noise), "published": one.coverage, "simulated": simulated})
    return rows


def parameters() -> dict[str, Sigmoid]:
    """The curves of the parameter file, by figure and series."""
    with published("scalerl_params.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return {
        f"{row['figure']} {row['series']}": Sigmoid(
            R0=float(row["R0_curve"]),
            A=float(row["published_A"]),
            B=float(row["published_B"]),
            C_mid=float(row["published_Cmid"] or row["Cmid_curve"]),
        )
        for row in rows
    }


def exactness() -> dict[str, Any]:
    """Noiseless curves of all rows of the parameter file: the largest relative error of what is fitted."""
    truths, worst = parameters(), 0.0
    for name, truth in truths.items():
        C = np.linspace(0.6, 5.0, 24) * truth.C_mid
        found = fit(series(name, C, truth.score(C), R0=truth.R0)).curve
        errors = (getattr(found, one) / getattr(truth, one) - 1 for one in ("A", "B", "C_mid"))
        worst = max(worst, *map(abs, errors))
    return {"curves": len(truths), "largest_relative_error": worst}


def power_law(one: Series) -> tuple[float, float]:
    """(A, B) of A - D / C^B with A at most 1, by least squares: linear in A and D for each B."""
    C, R = one.compute, one.score

    def solve(log_B: float) -> tuple[float, float]:
        """(A, sum of squares)."""
        p = (C / C[0]) ** -np.exp(log_B)
        D, A = np.polyfit(p, R, 1)
        if A > 1:
            A, D = 1.0, -(p @ (1 - R)) / (p @ p)
        return float(A), float(((R - A - D * p) ** 2).sum())

    grid = np.linspace(math.log(0.01), math.log(8), 400)
    best = int(np.argmin([solve(log_B)[1] for log_B in grid]))
    ends = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
    log_B = minimize_scalar(lambda log_B: solve(log_B)[1], bounds=ends, method="bounded").x
    return solve(log_B)[0], math.exp(log_B)


def oracles(curves: dict[str, Series]) -> list[dict[str, Any]]:
    """Known numbers of the published points beside ours."""
    early = curves["Fig10a ScaleRL-bs2048"].between(last=5000)
    late = curves["Fig1a ScaleRL-bs2048"]
    both = series(
        "batch 2048", np.append(early.compute, late.compute), np.append(early.score, late.score), R0=R0
    )
    projected = fit(both.between(FIRST, 39_000))
    power = [power_law(both.between(first, 39_000)) for first in (FIRST, 5000)]
    legend = Sigmoid(R0=R0, A=0.645, B=1.68, C_mid=10_909)
    later = late.between(first=46_000)
    off = later.score - legend.score(later.compute)
    small, large = Sigmoid(R0=R0, A=0.610, B=1.92, C_mid=2542), replace(legend, B=1.70)
    crossing: Any = brentq(lambda C: small.score(C) - large.score(C), 10_000, 1e6)
    expected = [
        ("variable projection: A", projected.curve.A, 0.6325, 1e-4),
        ("variable projection: B", projected.curve.B, 1.844, 1e-3),
        ("variable projection: C_mid", projected.curve.C_mid, 10_019, 1.0),
        ("variable projection: sum of squares", projected.sse, 2.95e-4, 1e-6),
        ("power law from 1.5k: A (its bound)", power[0][0], 1.0, 1e-6),
        ("power law from 1.5k: exponent", power[0][1], 0.173, 1e-3),
        ("power law from 5k: A", power[1][0], 0.741, 1e-3),
        ("power law from 5k: exponent", power[1][1], 0.445, 1e-3),
        ("printed curve on 46k to 102k: RMSE", float(np.sqrt(np.mean(off**2))), 0.0042, 1e-4),
        ("batch 768 and 2048 cross at", crossing, 30_200, 302),
    ]
    return [
        {"what": what, "ours": ours, "known": known, "holds": abs(ours - known) <= tolerance}
        for what, ours, known, tolerance in expected
    ]


def _held(result: dict[str, Any]) -> dict[str, bool]:
    low, high = BARS["synthetic_noise_known"]
    held = {
        "coverage": result["coverage"] >= BARS["coverage"],
        "median_width": result["median_width"] <= BARS["median_width"],
        "median_error": result["median_error"] <= BARS["median_error"],
        "synthetic_noise_known": low <= result["synthetic"]["matched"]["coverage"] <= high,
        "synthetic_noise_known_all": low <= result["synthetic"]["matched_all"]["coverage"] <= high,
        "synthetic_default": result["synthetic"]["default"]["coverage"] >= BARS["synthetic_default"],
        "fit_s": result["seconds"]["fit_s"] <= BARS["fit_s"],
        "posterior_s": result["seconds"]["posterior_s"] <= BARS["posterior_s"],
    }
    if "exactness" in result:
        worst = result["exactness"]["largest_relative_error"]
        held["largest_relative_error"] = worst <= BARS["largest_relative_error"]
        held["oracles"] = all(oracle["holds"] for oracle in result["oracles"])
    return held
