"""What a benchmark prints and writes: progress on standard error, a table for people, JSON for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from lab.settings import machine


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tell(measure: Callable[[], dict[str, Any]], table: Any, json_file: Path | None) -> dict[str, Any]:
    from lab.contender import ContenderFailed
    from ostinato.run import to_json

    try:
        before = machine()  # the load of the benchmark itself is not others'
        result = {"machine": before} | measure()
    except ContenderFailed as error:
        say(f"ostinato: {error}")
        raise typer.Exit(1) from None
    text = json.dumps(json.loads(to_json(result)), indent=1)  # no NaN, which JSON lacks
    if json_file is not None and str(json_file) == "-":
        print(text)
        return result
    show(table(result))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(f"{text}\n")
    return result


def show(table: Any) -> None:
    """Text as it is; a rich table at the width of the terminal, and wide where there is none."""
    from rich.console import Console

    console = Console()
    if isinstance(table, str):
        print(table)
    else:
        (console if console.is_terminal else Console(width=140)).print(table)
