"""Tables of the report in a terminal."""

from __future__ import annotations

import rich.box
import rich.table
from rich.text import Text

from ostinato.inputs import printable
from ostinato.observe.report.facts import Table


def terminal_table(table: Table) -> rich.table.Table:
    """A table of the report for a terminal: without notes, except for the unit that begins a line's note."""
    shown = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    shown.add_column(Text(printable(table.title)))
    for column in table.head:
        number = column not in table.words
        shown.add_column(Text(_name(column)), justify="right" if number else "left", no_wrap=number)
    for name, *cells in table.rows:
        unit = name.partition("\n")[2].partition(";")[0]
        shown.add_row(
            Text.assemble(_name(name), (f"  {unit}" if unit else "", "dim")), *map(Text, map(_name, cells))
        )
    return shown


def _name(cell: str) -> str:
    """The text of a cell without its note."""
    return printable(cell.partition("\n")[0])
