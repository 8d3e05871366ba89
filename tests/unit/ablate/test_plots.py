"""Plots and pages of a study: whole SVG, nothing becomes markup, what people wrote stays."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.ablate.plots import (
    HEIGHT,
    WIDTH,
    Band,
    Panel,
    Points,
    between_marks,
    forests_svg,
    markdown,
    panels_svg,
    write_between,
)
from ostinato.observe.report.facts import Table
from ostinato.observe.report.scaling import Forest, Stretch

AT = np.geomspace(1e10, 1e13, 20)
SVG = "{http://www.w3.org/2000/svg}"


def panel(title: str = "a < b & c", told: bool = True) -> Panel:
    middle = np.linspace(0.3, 0.6, 20)
    band = Band(compute=AT, low=middle - 0.02, middle=middle if told else None, high=middle + 0.02)
    points = Points(compute=AT[::3], score=middle[::3], filled=False)
    return Panel(title=title, bands=[band], points=[points], edge=1e12, edge_name="fitted up to here")


def test_every_panel_is_drawn_and_nothing_becomes_markup() -> None:
    root = ET.fromstring(panels_svg([panel(), panel("<script>"), panel()], "t", "FLOP"))
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert texts.count("a < b & c") == 2
    assert "<script>" in texts
    assert len(list(root.iter(f"{SVG}polygon"))) == 3
    assert len(list(root.iter(f"{SVG}circle"))) == 3 * 7


def test_a_band_that_is_not_told_has_no_line() -> None:
    root = ET.fromstring(panels_svg([panel(told=False)], "t", "FLOP"))
    assert not list(root.iter(f"{SVG}polyline"))
    assert list(root.iter(f"{SVG}polygon"))


@settings(max_examples=30, deadline=None)
@given(
    start=st.floats(1e-3, 1e15),
    decades=st.floats(0.01, 6),
    low=st.floats(0, 1),
    high=st.floats(0, 1),
)
def test_points_stay_inside_of_the_panel(start: float, decades: float, low: float, high: float) -> None:
    compute = np.geomspace(start, start * 10**decades, 5)
    points = Points(compute=compute, score=np.linspace(low, high, 5))
    root = ET.fromstring(panels_svg([Panel(title="t", bands=[], points=[points])], "t", "steps"))
    frame = next(each for each in root.iter(f"{SVG}rect") if each.get("width") == f"{WIDTH:g}")
    left, top = float(frame.get("x") or 0), float(frame.get("y") or 0)
    for each in root.iter(f"{SVG}circle"):
        assert left <= float(each.get("cx") or 0) <= left + WIDTH
        assert top <= float(each.get("cy") or 0) <= top + HEIGHT


def test_forests_stand_side_by_side_by_name() -> None:
    def row(name: str, low: float) -> Stretch:
        return Stretch(name=name, low=low, high=low + 0.1, middle=low + 0.05, text="t")

    both = Forest(title="A", note="", rows=(row("one", 0.4), row("two", 0.5)))
    only = Forest(title="B", note="", rows=(row("two", 1.5),))
    root = ET.fromstring(forests_svg([both, only], "t"))
    places = [each.get("cy") for each in root.iter(f"{SVG}circle")]
    assert len(places) == 3
    assert places[1] == places[2] != places[0]


def test_markdown_keeps_its_columns() -> None:
    table = Table(title="Arm", head=("x", "y"), rows=[("a|b", "1 | 2", "-")], note="Why.")
    head, rule, row, _, note = markdown(table).split("\n")
    assert head == "| Arm | x | y |"
    assert rule == "|---|---|---|"
    assert row == "| a\\|b | 1 \\| 2 | - |"
    assert note == "Why."


@settings(max_examples=30, deadline=None)
@given(
    before=st.text("ab\n"), after=st.text("cd\n"), bodies=st.lists(st.text("xyz\n"), min_size=1, max_size=3)
)
def test_what_stands_around_the_marks_stays(before: str, after: str, bodies: list[str]) -> None:
    text = f"{before}<<{after}"
    for body in bodies:
        text = between_marks(text if ">>" in text else f"{before}<<>>{after}", "<<", ">>", body)
    assert text == f"{before}<<\n\n{bodies[-1]}\n\n>>{after}"
    assert between_marks("old", "<<", ">>", "x") == "old<<\n\nx\n\n>>\n"


@pytest.mark.parametrize(
    "text", ["mine << old, and all of my own text", "mine >> my own text", ">> mine << mine"]
)
def test_a_page_that_lost_a_mark_keeps_its_text(text: str, tmp_path: Path) -> None:
    """Without the mark of the end, everything below that of the beginning was replaced, down to the last
    line of the page."""
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=r"page.md has lost its mark '(<<|>>)'; put it back"):
        write_between(tmp_path / "page", "# T\n", ("<<", ">>"), ["new"], {"plot": "<svg/>"})
    assert page.read_text() == text
    assert not (tmp_path / "page-plot.svg").exists()
