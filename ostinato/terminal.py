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

from ostinato.inputs import escape_stream, make_printable

WIDE = 140


def say(*lines: str, error: bool = False) -> None:
    """Print lines on standard output, or on standard error with ``error``, without control characters."""
    print(*lines, sep="\n", file=escape_stream(sys.stderr if error else sys.stdout), flush=True)


class Screen(Console):
    """A rich console on ``stream``, by default standard output, that escapes the strings that it is given.
    Where there is no terminal and COLUMNS is not set, it is WIDE. With a ``prefix``, which every string gets,
    it is no terminal: several have no live line."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False, prefix: str = "") -> None:
        super().__init__(file=stream or sys.stdout, quiet=quiet, force_terminal=False if prefix else None)
        self._prefix = prefix
        if not self.is_terminal and not os.environ.get("COLUMNS"):
            self.width = WIDE

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(make_printable(self._prefix + text), **options)


class _Lines(logging.Handler):
    """Records as plain lines on standard output, which rich replaces while it shows the live line of a run:
    what is written there appears above that line; or on standard error. Errors of the stream are raised."""

    def __init__(self, error: bool, by_thread: bool) -> None:
        super().__init__()
        self._error = error
        if by_thread:
            self.setFormatter(logging.Formatter("%(threadName)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record), error=self._error)


@contextmanager
def announce_work(what: str, after_s: float = 2.0) -> Iterator[None]:
    """Log ``what`` is being done if the block takes longer than ``after_s`` seconds."""
    timer = threading.Timer(after_s, logging.getLogger(__name__).info, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def show_log(name: str = "ostinato", *, error: bool = False, by_thread: bool = False) -> Iterator[None]:
    """Show the records of the logger ``name``, information included, on standard output or, with ``error``,
    on standard error while the block runs, which is the body of a command; with ``by_thread`` each after the
    name of its thread. This is the only place that
    configures logging; without it, Python shows warnings on stderr."""
    logger, handler = logging.getLogger(name), _Lines(error, by_thread)
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
