"""Tables as data, for a terminal (``terminal_table``) and the page, and numbers as text with their unit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import rich.box
import rich.table
from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from ostinato.inputs import make_printable

NONE = "-"  # shown for unknown values
PADDING = 2  # characters between columns
MAX_WORDS_WIDTH = 30  # least width of a column of text that is as long

Line = Sequence[str]  # its name, then a cell for each column; text after a line end is a note in small type


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table; ``head`` names the columns after the first, whose name is the title."""

    title: str
    head: Line
    rows: Sequence[Line]
    note: str = ""
    words: Sequence[str] = ()  # columns of text: left-aligned, with line breaks


# ---- numbers


def format_seconds(seconds: float) -> str:
    """A duration as "8.2 s", "4 min 05 s", "3 h 20 min" or "2 d 04 h"."""
    if seconds < 59.95:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02d} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def format_figure(value: float | None) -> str:
    """A number with three digits: "1.79e-5", "0.0121", "1,240"; "-" for None."""
    if value is None:
        return NONE
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size and size < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.3g}" if not 0.9 < size < 1 else f"{value:.5f}".rstrip("0").rstrip(".")


def format_si(value: float) -> str:
    """A number with three digits and an SI letter: "812", "81.2 k", "1.23 P"."""
    for letter, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def format_compute(C: float) -> str:
    """Compute with four digits: "30,200", "0.125", "4.051e18"; "never" for infinity, "-" for NaN (not
    identified)."""
    if math.isnan(C):
        return NONE
    if math.isinf(C):
        return "never"
    if C == 0 or 1e-3 <= C < 1e7:
        return f"{float(f'{C:.4g}'):,.0f}" if C >= 1000 else f"{C:.4g}"
    digits, _, power = f"{C:.3e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"


# ---- in a terminal


def terminal_table(table: Table, width: int) -> Group:
    """A table for a terminal, without notes, except for the unit that begins a line's note. Columns that do
    not fit into ``width`` follow in a table of their own, with the names of the lines again."""
    return Group(*(_make_part(table, places, width) for places in _split_columns(table, width)))


def _split_columns(table: Table, width: int) -> Iterator[list[int]]:
    """Yield the indices in ``table.head`` of the columns of each part. There is at least one part."""
    free_width, places = width - _measure_names(table, width), list[int]()
    for place, column in enumerate(table.head):
        column_width = max(
            cell_len(_strip_note(cell)) for cell in (column, *(row[place + 1] for row in table.rows))
        )
        column_width = PADDING + (
            min(column_width, MAX_WORDS_WIDTH) if column in table.words else column_width
        )
        if places and column_width > free_width:
            yield places
            free_width, places = width - _measure_names(table, width), []
        places.append(place)
        free_width -= column_width
    yield places


def _measure_names(table: Table, width: int) -> int:
    """Width of the column with the names of the lines, which wraps beyond half of the table."""
    names = [cell_len(f"{_strip_note(name)}  {_read_unit(name)}".rstrip()) for name, *_ in table.rows]
    return PADDING + min(max([cell_len(table.title), *names]), width // 2)


def _make_part(table: Table, places: Sequence[int], width: int) -> rich.table.Table:
    """The part of the table with the columns at ``places``."""
    part_table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    part_table.add_column(Text(make_printable(table.title)), min_width=_measure_names(table, width) - PADDING)
    for column in (table.head[place] for place in places):
        is_number = column not in table.words
        part_table.add_column(
            Text(_strip_note(column)), justify="right" if is_number else "left", no_wrap=is_number
        )
    for name, *cells in table.rows:
        unit = f"  {_read_unit(name)}" if _read_unit(name) else ""
        texts = (Text(_strip_note(cells[place])) for place in places)
        part_table.add_row(Text.assemble(_strip_note(name), (unit, "dim")), *texts)
    return part_table


def _read_unit(name: str) -> str:
    """The unit in the note of a line's name; empty without one."""
    return make_printable(name.partition("\n")[2].partition(";")[0])


def _strip_note(cell: str) -> str:
    """The text of a cell without its note."""
    return make_printable(cell.partition("\n")[0])
