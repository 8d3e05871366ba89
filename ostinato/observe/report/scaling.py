"""A curve over compute and what is known of it, as a chart; amounts of compute as text.

Plain arrays in. Nothing is fitted here: a curve comes with its quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ostinato.observe.report.charts import Chart, Series, Values

NONE = "-"  # as report.facts has it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """A run over compute: its evaluations, and what is known of its curve."""

    compute: np.ndarray  # [n] of all evaluations, ascending
    score: np.ndarray  # [n]
    places: np.ndarray  # [m] compute, see ``places``
    quantiles: np.ndarray  # [5, m] at 5, 25, 50, 75 and 95 %
    told: bool  # False: not identified, so neither the median nor the half around it is shown


def compute_text(C: float) -> str:
    """Four digits: "30,200", "0.125", "4.051e18"; "never" for infinity, a dash for what is not identified."""
    if math.isnan(C):
        return NONE
    if math.isinf(C):
        return "never"
    if C == 0 or 1e-3 <= C < 1e7:
        return f"{float(f'{C:.4g}'):,.0f}" if C >= 1000 else f"{C:.4g}"
    digits, _, power = f"{C:.3e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


def places(compute: np.ndarray, last: float, count: int = 64) -> np.ndarray:
    """[m] where curves are drawn: at all evaluations, once between neighbours (so that these stand as points
    and are not joined), and ``count`` times evenly in ln C up to ``last``."""
    measured = np.unique(compute)
    between = np.exp((np.log(measured[:-1]) + np.log(measured[1:])) / 2)
    even = np.geomspace(measured[0], max(last, measured[-1]), count)
    return np.unique(np.concatenate([measured, between, even]))


def curve_chart(course: Course, unit: str, note: str) -> Chart:
    """Scores and curve over ln C; a line stands where the evaluations end. Decades stand below the axis where
    there are two of them, else the places do."""
    at, last = course.places, float(course.compute[-1])
    decades = math.floor(math.log10(at[-1])) - math.ceil(math.log10(at[0])) + 1
    return Chart(
        key="curve",
        title="Score over compute",
        note=note,
        unit="",
        series=[*_known(course), _measured(course)],
        steps=[float(C) for C in at],
        labels=[] if decades >= 2 else [compute_text(float(f"{C:.3g}")) for C in at],
        log_x=True,
        along=f"# {unit}",
        edges=[(last, "fitted up to here")] if last < at[-1] else [],
    )


def _known(course: Course) -> Iterator[Series]:
    low, lower, median, upper, high = (list(map(float, each)) for each in course.quantiles)
    nothing: Values = [None] * len(low)
    if course.told:
        yield Series(label="median, 90 %", values=[*median], color="--blue", low=[*low], high=[*high])
        yield Series(label="50 %", values=nothing, color="--blue", low=[*lower], high=[*upper])
    else:
        yield Series(label="90 %", values=nothing, color="--blue", low=[*low], high=[*high])


def _measured(course: Course) -> Series:
    values: Values = [None] * len(course.places)
    for place, score in zip(np.searchsorted(course.places, course.compute), course.score, strict=True):
        values[int(place)] = float(score)
    return Series(label="fitted", values=values, color="--ink", marker="dot")
