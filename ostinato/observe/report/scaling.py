"""The pages of ``ostinato scale``: a curve over compute and what is known of it, what its ceiling hangs on,
and runs side by side.

Plain arrays in, one file that opens offline out. Nothing is fitted here: a curve comes with its quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.observe.report.charts import Chart, Section, Series, Values, to_plain
from ostinato.observe.report.facts import Table
from ostinato.observe.report.page.offline import render, script_json
from ostinato.run import atomic_write

NONE = "-"  # as report.facts has it
COLORS = ("--blue", "--orange", "--teal", "--purple")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """A run over compute: its evaluations, and what is known of its curve."""

    name: str
    compute: np.ndarray  # [n] of all evaluations, ascending
    score: np.ndarray  # [n]
    window: tuple[float, float]  # compute of the first and the last evaluation that was fitted
    places: np.ndarray  # [m] compute, see ``places``
    quantiles: np.ndarray | None  # [5, m] at 5, 25, 50, 75 and 95 %; None where the curve refutes the model
    told: bool  # False: not identified, so neither the median nor the half around it is shown
    color: str = ""  # a CSS variable; by default the next of COLORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A row of a forest plot. ``middle`` is None where not identified; ``seen`` is what then happened."""

    name: str
    low: float
    high: float
    middle: float | None
    text: str
    seen: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Intervals of one quantity below each other."""

    title: str
    note: str
    rows: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """``lead`` comes first, sentence by sentence; ``alarms`` are sentences that a reader must not miss."""

    title: str
    kind: str  # of the answer, e.g. "forecast"
    lead: Sequence[str] = ()
    alarms: Sequence[str] = ()
    tables: Sequence[Table] = ()
    forests: Sequence[Forest] = ()
    sections: Sequence[Section] = field(default_factory=list)


def write_page(path: Path, page: Page, now: datetime | None = None) -> None:
    """Write the page atomically. ``now`` is the time of writing."""
    atomic_write(path, html(page, now or datetime.now(UTC)))


def html(page: Page, now: datetime) -> str:
    drawn = [chart for section in page.sections for chart in section.charts if not chart.empty]
    return render(
        "scaling.html.jinja",
        ("uplot.js", "charts.js"),
        page=page,
        forests=[drawn_forest(forest) for forest in page.forests],
        written=f"{now:%Y-%m-%d %H:%M} UTC",
        chart_data=script_json({chart.key: to_plain(chart) for chart in drawn}),
    )


# -- numbers as text


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


# -- over compute


def places(compute: Sequence[np.ndarray], last: float, count: int = 64) -> np.ndarray:
    """[m] where curves are drawn: at all evaluations, once between neighbours (so that these stand as points
    and are not joined), and ``count`` times evenly in ln C up to ``last``."""
    measured = np.unique(np.concatenate(compute))
    between = np.exp((np.log(measured[:-1]) + np.log(measured[1:])) / 2)
    even = np.geomspace(measured[0], max(last, measured[-1]), count)
    return np.unique(np.concatenate([measured, between, even]))


def curve_chart(courses: Sequence[Course], unit: str, note: str) -> Chart:
    """Scores and curves over compute; all courses have the same ``places``. Points are rings before the fit
    window, dots in it, crosses after it, whatever their colour; of one course alone its ends are drawn."""
    alone = len(courses) == 1
    lines: list[Series] = []
    chosen = dict.fromkeys(
        course.color or color for course, color in zip(courses, cycle(COLORS), strict=False)
    )
    second = list(chosen)[1:]  # the curves of all but the first colour are dashed
    for course, color in zip(courses, cycle(COLORS), strict=False):
        color = course.color or color
        prefix = "" if alone else f"{course.name}, "
        lines += _known(course, color, prefix, dashed=color in second)
        lines += _measured(course, "--ink" if alone else color, prefix)
    edges = _window(courses[0]) if alone else []
    return _over(courses[0].places, unit, "curve", "Score over compute", note, lines, edges=edges)


def _window(course: Course) -> list[tuple[float, str]]:
    """Where the fit begins, if anything is left out, and where it ends, if anything is drawn beyond."""
    first, last = course.window
    begins = [(first, "fitted from here")] if course.compute[0] < first else []
    ends = [(last, "fitted up to here")] if last < course.places[-1] else []
    return begins + ends


def _known(course: Course, color: str, prefix: str, *, dashed: bool) -> Iterator[Series]:
    if course.quantiles is None:
        return
    low, lower, median, upper, high = (list(map(float, each)) for each in course.quantiles)
    nothing: Values = [None] * len(low)
    if course.told:
        label = f"{prefix}median, 90 %"
        yield Series(label=label, values=list(median), color=color, low=[*low], high=[*high], dashed=dashed)
        yield Series(label=f"{prefix}50 %", values=nothing, color=color, low=[*lower], high=[*upper])
    else:
        yield Series(label=f"{prefix}90 %", values=nothing, color=color, low=[*low], high=[*high])


def _measured(course: Course, color: str, prefix: str) -> Iterator[Series]:
    first, last = course.window
    parts = (
        ("left out", course.compute < first, "--grey", "ring"),
        ("fitted", (first <= course.compute) & (course.compute <= last), color, "dot"),
        ("later", course.compute > last, "--orange" if not prefix else "--red", "cross"),
    )
    at = np.searchsorted(course.places, course.compute)
    for label, which, shade, marker in parts:
        values: Values = [None] * len(course.places)
        for place, score in zip(at[which], course.score[which], strict=True):
            values[int(place)] = float(score)
        if which.any():
            yield Series(label=f"{prefix}{label}", values=values, color=shade, marker=marker)


def _over(
    compute: np.ndarray, unit: str, key: str, title: str, note: str, lines: Sequence[Series], **more: Any
) -> Chart:
    """A chart over ln C. Decades stand below its axis where there are two of them, else the places do."""
    decades = math.floor(math.log10(compute[-1])) - math.ceil(math.log10(compute[0])) + 1
    labels = [] if decades >= 2 else [compute_text(float(f"{C:.3g}")) for C in compute]
    places = {"steps": [float(C) for C in compute], "labels": labels, "log_x": True, "along": f"# {unit}"}
    return Chart(key=key, title=title, note=note, unit="", series=list(lines), **places, **more)


def residual_chart(compute: np.ndarray, residuals: np.ndarray, sd: np.ndarray, unit: str) -> Chart:
    """What the least-squares curve leaves of the fitted scores, in the noise that intervals assume."""
    low, high = (Values([sign * float(s) for s in sd]) for sign in (-1, 1))
    noise = Series(label="noise ± 1 sd", values=[0.0] * len(compute), color="--grey", low=low, high=high)
    left = Series(label="residual", values=[float(r) for r in residuals], color="--blue")
    note = "Measured less fitted score; a pattern says that the curve is no sigmoid."
    return _over(compute, unit, "residuals", "Residuals", note, [noise, left])


def cutoff_chart(first: np.ndarray, A: np.ndarray, unit: str) -> Chart:
    """A of fits that leave out what was evaluated before ``first`` ([c] each)."""
    note = "Ceiling A by least squares, early evaluations left out up to that compute; it should not move."
    line = Series(label="A", values=[float(a) for a in A], color="--blue")
    return _over(first, unit, "cutoff", "A by cut-off", note, [line])


def slope_chart(courses: Sequence[Course], logits: Sequence[np.ndarray], A: float, unit: str) -> Chart:
    """ln F = ln((R - R0) / (A - R)) of the evaluations ([n] for each course; NaN where there is none)."""
    at = courses[0].places
    lines = []
    for course, values, color in zip(courses, logits, cycle(COLORS), strict=False):
        shown: Values = [None] * len(at)
        for place, value in zip(np.searchsorted(at, course.compute), values, strict=True):
            shown[int(place)] = float(value) if math.isfinite(value) else None
        if any(value is not None for value in shown):
            lines.append(Series(label=course.name, values=shown, color=course.color or color))
    note = f"ln((R - R0) / (A - R)) with A = {A:.3f} for both: lines over ln C, their slopes are B."
    return _over(at, unit, "slopes", "Slopes at an equal ceiling", note, lines)


def width_chart(lengths: Sequence[tuple[float, float]], wanted: float, unit: str) -> Chart:
    """Expected 90 % width of A of pilots by their length."""
    compute = np.array([C for C, _ in lengths])
    line = Series(label="width", values=[width for _, width in lengths], color="--blue")
    note = "Expected 90 % width of A, by how far the pilot runs."
    return _over(
        compute, unit, "width", "How well a pilot knows A", note, [line], mark=(wanted, "wanted"), low=0.0
    )


# -- forest plots, drawn here: they need no script

NAME, PLOT, TEXT, ROW, TOP = 210.0, 330.0, 170.0, 26.0, 8.0  # pixels of columns and rows
LONGEST = 32  # characters of a name


def drawn_forest(forest: Forest) -> dict[str, Any]:
    """What the template draws, in pixels."""
    ends = [end for row in forest.rows for end in (row.low, row.high, row.seen) if end is not None]
    low, high = min(ends), max(ends)
    room = 0.04 * (high - low) or 0.05 * abs(high) or 0.05
    low, high = low - room, high + room

    def x(value: float | None) -> float | None:
        return None if value is None else round(NAME + PLOT * (value - low) / (high - low), 1)

    rows = [
        {
            "name": row.name if len(row.name) <= LONGEST else f"{row.name[: LONGEST - 1]}…",
            "full": row.name,
            "text": row.text,
            "y": TOP + ROW * (at + 0.5),
            "x": (x(row.low), x(row.high)),
            "middle": x(row.middle),
            "seen": x(row.seen),
        }
        for at, row in enumerate(forest.rows)
    ]
    bottom = TOP + ROW * len(rows)
    return {
        "title": forest.title,
        "note": forest.note,
        "rows": rows,
        "ticks": [(x(tick), f"{tick:.4g}") for tick in ticks(low, high)],
        "bottom": bottom,
        "size": (NAME + PLOT + TEXT, bottom + 22),
    }


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most so many round numbers from ``low`` to ``high``."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power * factor for factor in (1, 2, 5, 10, 20)):
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first < most:
            return [float(f"{step * at:.6g}") for at in range(first, last + 1)]
    return []
