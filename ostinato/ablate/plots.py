"""Plots and tables of a study for a page in Markdown: plain SVG, a panel per curve; forests of intervals.

Numbers are rounded to a tenth of a pixel, so that the same data draw the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ostinato.observe.report.facts import Table
from ostinato.observe.report.scaling import Forest, compute_text, ticks
from ostinato.run import atomic_write

INK, GREY, PALE = "#222222", "#888888", "#bbbbbb"
BLUE, ORANGE = "#1f77b4", "#d95f02"
WIDTH, HEIGHT, LEFT, TOP = 270.0, 170.0, 44.0, 26.0  # of a panel and its margins, in pixels
COLUMNS = 3
NAME, PLOT, TEXT, ROW = 200.0, 200.0, 150.0, 20.0  # of a forest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Band:
    """A curve over compute: its median (None where it may not be told) between two quantiles."""

    compute: np.ndarray  # [m] positive, ascending
    low: np.ndarray  # [m]
    middle: np.ndarray | None  # [m]
    high: np.ndarray  # [m]
    color: str = BLUE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Points:
    """Evaluations. Filled or hollow, so that they differ without colours too."""

    compute: np.ndarray  # [n]
    score: np.ndarray  # [n]
    color: str = BLUE
    filled: bool = True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Panel:
    """One plot; ``edge`` is a compute at which a dashed line stands, and ``edge_name`` its name."""

    title: str
    bands: Sequence[Band]
    points: Sequence[Points]
    edge: float | None = None
    edge_name: str = ""
    note: str = ""  # below the title


def panels_svg(panels: Sequence[Panel], title: str, unit: str) -> str:
    """All panels with the same axes: score over the logarithm of compute."""
    compute = np.concatenate([one.compute for panel in panels for one in (*panel.bands, *panel.points)])
    scores = np.concatenate(
        [one.score for panel in panels for one in panel.points]
        + [end for panel in panels for band in panel.bands for end in (band.low, band.high)]
    )
    axes = _Axes.over(compute, scores)
    columns = min(COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    width = max(columns * (WIDTH + LEFT) + 20, LEFT + 6.6 * len(title))  # room for it in 13 pixels
    height = TOP + rows * (HEIGHT + 2 * TOP) + 22
    parts = [_text(LEFT, 18, title, 13)]
    for at, panel in enumerate(panels):
        x = LEFT + (at % columns) * (WIDTH + LEFT)
        y = 2 * TOP + (at // columns) * (HEIGHT + 2 * TOP)
        parts += _panel(panel, axes, x, y)
    parts.append(_text(LEFT, height - 8, f"score over compute in {unit}, logarithmic", 11, GREY))
    return _svg(width, height, parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    left: float  # ln of compute
    right: float
    low: float
    high: float

    @classmethod
    def over(cls, compute: np.ndarray, scores: np.ndarray) -> _Axes:
        left, right = math.log(compute.min()), math.log(compute.max())
        room = 0.04 * (float(scores.max() - scores.min()) or 1.0)
        return cls(
            left=left - 0.02 * (right - left or 1.0),
            right=right + 0.02 * (right - left or 1.0),
            low=float(scores.min()) - room,
            high=float(scores.max()) + room,
        )

    def x(self, C: float) -> float:
        return WIDTH * (math.log(C) - self.left) / (self.right - self.left)

    def y(self, R: float) -> float:
        return HEIGHT * (1 - (R - self.low) / (self.high - self.low))

    def places(self, compute: np.ndarray, score: np.ndarray, x: float, y: float) -> list[str]:
        pairs = zip(compute, score, strict=True)
        return [f"{x + self.x(float(C)):.1f},{y + self.y(float(R)):.1f}" for C, R in pairs]

    def marks(self, most: int = 4) -> list[float]:
        """Round computes: decades, or 1, 2 and 5 of each where there are few."""
        first, last = math.floor(self.left / math.log(10)), math.ceil(self.right / math.log(10))
        for factors in ((1, 2, 5), (1, 3), (1,)):
            found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
            inside = [C for C in found if self.left <= math.log(C) <= self.right]
            if len(inside) <= most:
                return inside
        return inside[:: math.ceil(len(inside) / most)]


def _panel(panel: Panel, axes: _Axes, x: float, y: float) -> list[str]:
    parts = [
        f'<rect x="{x:g}" y="{y:g}" width="{WIDTH:g}" height="{HEIGHT:g}" fill="none" stroke="{PALE}"/>',
        _text(x + 2, y - 6, panel.title, 12),
    ]
    for score in ticks(axes.low, axes.high):
        at = y + axes.y(score)
        parts.append(_line(x, at, x + WIDTH, at, "#eeeeee"))
        parts.append(_text(x - 4, at + 3, f"{score:.4g}", 10, GREY, "end"))
    for C in axes.marks():
        parts.append(_text(x + axes.x(C), y + HEIGHT + 13, compute_text(C), 10, GREY, "middle"))
    for band in panel.bands:
        parts += _band(band, axes, x, y)
    for points in panel.points:
        parts += _dots(points, axes, x, y)
    if panel.edge is not None:
        across = axes.x(panel.edge)
        at, right = x + across, across > WIDTH / 2  # its name stands where there is room
        parts.append(_line(at, y, at, y + HEIGHT, INK, "4 3"))
        placed = (at - 4, "end") if right else (at + 4, "start")
        parts.append(_text(placed[0], y + HEIGHT - 6, panel.edge_name, 10, INK, placed[1]))
    if panel.note:
        parts.append(_text(x + 4, y + 13, panel.note, 10, GREY))
    return parts


def _band(band: Band, axes: _Axes, x: float, y: float) -> list[str]:
    upper = axes.places(band.compute, band.high, x, y)
    lower = axes.places(band.compute, band.low, x, y)
    found = [f'<polygon points="{" ".join(upper + lower[::-1])}" fill="{band.color}" fill-opacity="0.22"/>']
    if band.middle is not None:
        middle = " ".join(axes.places(band.compute, band.middle, x, y))
        found.append(f'<polyline points="{middle}" fill="none" stroke="{band.color}" stroke-width="1.6"/>')
    return found


def _dots(points: Points, axes: _Axes, x: float, y: float) -> list[str]:
    fill = points.color if points.filled else "white"
    pairs = (place.split(",") for place in axes.places(points.compute, points.score, x, y))
    shape = f'r="2.2" fill="{fill}" stroke="{points.color}"'
    return [f'<circle cx="{across}" cy="{down}" {shape}/>' for across, down in pairs]


def forests_svg(forests: Sequence[Forest], title: str) -> str:
    """Forest plots side by side; the rows of each are those of the first."""
    names = [row.name for row in forests[0].rows]
    each = PLOT + TEXT
    width, bottom = NAME + len(forests) * each, 2.4 * TOP + ROW * len(names)
    parts = [_text(10, 18, title, 13)]
    parts += [_text(10, 2.4 * TOP + ROW * (at + 0.7), name, 12) for at, name in enumerate(names)]
    for at, forest in enumerate(forests):
        parts += _forest(forest, names, NAME + at * each, 2.4 * TOP, bottom)
    return _svg(width, bottom + 26, parts)


def _forest(forest: Forest, names: Sequence[str], x: float, y: float, bottom: float) -> list[str]:
    ends = [end for row in forest.rows for end in (row.low, row.high)]
    room = 0.04 * (max(ends) - min(ends)) or 0.05
    low, high = min(ends) - room, max(ends) + room

    def across(value: float) -> float:
        return x + PLOT * (value - low) / (high - low)

    parts = [_text(x, y - 10, forest.title, 12)]
    for tick in ticks(low, high, most=4):
        parts.append(_line(across(tick), y, across(tick), bottom, "#eeeeee"))
        parts.append(_text(across(tick), bottom + 14, compute_text(tick), 10, GREY, "middle"))
    for row in forest.rows:
        down = y + ROW * (names.index(row.name) + 0.5)
        parts.append(_line(across(row.low), down, across(row.high), down, BLUE, width=2))
        if row.middle is not None:
            parts.append(f'<circle cx="{across(row.middle):.1f}" cy="{down:.1f}" r="3.5" fill="{BLUE}"/>')
        parts.append(_text(x + PLOT + 8, down + 4, row.text, 11))
    return parts


# -- primitives


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _line(
    x1: float, y1: float, x2: float, y2: float, color: str, dashes: str = "", *, width: float = 1
) -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    places = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {places} stroke="{color}" stroke-width="{width:g}"{dashed}/>'


def _text(x: float, y: float, text: str, size: int, color: str = INK, anchor: str = "start") -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    placed = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}"'
    return f'<text {placed} text-anchor="{anchor}">{escaped}</text>'


# -- Markdown


def markdown(table: Table) -> str:
    """A table of the report as Markdown, its note below."""
    head = [table.title, *table.head]
    lines = [_row(head), "|" + "---|" * len(head)]
    for name, *cells in table.rows:
        title, _, note = name.partition("\n")
        lines.append(_row([f"{title} ({note})" if note else title, *cells]))
    return "\n".join(lines) + (f"\n\n{table.note}" if table.note else "")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def write_between(
    stem: Path, title: str, marks: tuple[str, str], parts: Sequence[str], images: Mapping[str, str]
) -> None:
    """``stem``-<name>.svg for every image, and ``stem``.md, which shows ``parts`` and the images between two
    marks. What people wrote around the marks stays; a page that is not there begins with ``title``."""
    page = stem.with_name(f"{stem.name}.md")
    text = page.read_text(encoding="utf-8") if page.exists() else title
    shown = [f"![{name}]({stem.name}-{name}.svg)" for name in images]
    try:
        text = between_marks(text, *marks, "\n\n".join([*parts, *shown]))
    except ValueError as error:
        raise ValueError(f"{page} {error}") from None
    for name, image in images.items():
        atomic_write(stem.with_name(f"{stem.name}-{name}.svg"), image)
    atomic_write(page, text)


def between_marks(text: str, begin: str, end: str, body: str) -> str:
    """``text`` with ``body`` in place of what stands between two marks, which are added where there are none;
    what people wrote around them stays. Raises ValueError where one mark is gone: what would be replaced
    could be theirs."""
    if begin not in text and end not in text:
        text = f"{text}{begin}\n{end}\n"
    before, opened, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (opened and closed):
        raise ValueError(
            f"has lost its mark {end if opened else begin!r}; put it back, or write another page"
        )
    return f"{before}{begin}\n\n{body}\n\n{end}{after}"
