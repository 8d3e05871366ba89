"""Standard output and error of a command, for a person: what models, rows and user code write cannot control
the terminal. A reader that goes ends the command (BrokenPipeError)."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from ostinato.inputs import escaping, printable

WIDE = 140


def say(*lines: str, error: bool = False) -> None:
    """Lines on standard output, or on standard error."""
    print(*lines, sep="\n", file=escaping(sys.stderr if error else sys.stdout), flush=True)


class Screen(Console):
    """A rich console on ``stream``, by default standard output, that escapes the strings that it is given.
    Where there is no terminal and COLUMNS is not set, it is WIDE."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        super().__init__(file=stream or sys.stdout, quiet=quiet)
        if not self.is_terminal and not os.environ.get("COLUMNS"):
            self.width = WIDE

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


class _Lines(logging.Handler):
    """Records as plain lines on standard output, which rich replaces while it shows the live line of a run:
    what is written there appears above that line; or on standard error. Errors of the stream are raised."""

    def __init__(self, error: bool) -> None:
        super().__init__()
        self._error = error

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record), error=self._error)


@contextmanager
def waiting(what: str, after_s: float = 2.0) -> Iterator[None]:
    """Around work that may be long: after ``after_s`` a line says ``what`` is being done."""
    timer = threading.Timer(after_s, logging.getLogger(__name__).info, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def logged(name: str = "ostinato", *, error: bool = False) -> Iterator[None]:
    """For the body of a command: records of the logger ``name``, information included, are shown, on standard
    output or ``error``. This is the only place that configures logging; without it, Python shows warnings on
    stderr."""
    logger, handler = logging.getLogger(name), _Lines(error)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
