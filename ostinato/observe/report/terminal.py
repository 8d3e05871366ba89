"""Tables of the report in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import rich.box
import rich.table
from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from ostinato.inputs import printable
from ostinato.observe.report.facts import Table

PADDING = 2  # of a column, in characters
WORDS = 30  # that a column of text takes at least, if it has so many


def terminal_table(table: Table, width: int) -> Group:
    """A table of the report for a terminal: without notes, except for the unit that begins a line's note.
    Columns that do not fit into ``width`` follow in a table of their own, with the names of the lines again.
    """
    return Group(*(_part(table, places, width) for places in _parts(table, width)))


def _parts(table: Table, width: int) -> Iterator[list[int]]:
    """Places in ``table.head`` of the columns of each part, at least one."""
    left, places = width - _names_width(table, width), list[int]()
    for place, column in enumerate(table.head):
        needed = max(cell_len(_name(cell)) for cell in (column, *(row[place + 1] for row in table.rows)))
        needed = PADDING + (min(needed, WORDS) if column in table.words else needed)
        if places and needed > left:
            yield places
            left, places = width - _names_width(table, width), []
        places.append(place)
        left -= needed
    yield places


def _names_width(table: Table, width: int) -> int:
    """Of the column with the names of the lines, which wraps beyond half of the table."""
    names = [cell_len(f"{_name(name)}  {_unit(name)}".rstrip()) for name, *_ in table.rows]
    return PADDING + min(max([cell_len(table.title), *names]), width // 2)


def _part(table: Table, places: Sequence[int], width: int) -> rich.table.Table:
    shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    shown.add_column(Text(printable(table.title)), min_width=_names_width(table, width) - PADDING)
    for column in (table.head[place] for place in places):
        number = column not in table.words
        shown.add_column(Text(_name(column)), justify="right" if number else "left", no_wrap=number)
    for name, *cells in table.rows:
        unit = f"  {_unit(name)}" if _unit(name) else ""
        texts = (Text(_name(cells[place])) for place in places)
        shown.add_row(Text.assemble(_name(name), (unit, "dim")), *texts)
    return shown


def _unit(name: str) -> str:
    return printable(name.partition("\n")[2].partition(";")[0])


def _name(cell: str) -> str:
    """The text of a cell without its note."""
    return printable(cell.partition("\n")[0])
