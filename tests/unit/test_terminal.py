"""How a run ends whose output has no reader, or that is interrupted while it begins."""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from ostinato.cli.generate import Voice, answer_stream
from ostinato.config import Recipe, dump_toml
from ostinato.inputs import escape_stream
from ostinato.launch import session
from ostinato.launch.progress import Monitor
from ostinato.pipeline.signals import Ended, raise_at_sigterm
from ostinato.render import Renderer
from ostinato.run import RunFolder
from ostinato.tables import Table as ReportTable
from ostinato.tables import terminal_table
from ostinato.terminal import Screen, announce_work, say, show_log


def broken_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def test_notes_appear_above_the_live_line_and_only_while_a_command_shows_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger, out = logging.getLogger("ostinato.launch.engine"), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with show_log(), Monitor(3, console=Console(file=out, force_terminal=True, width=60)):
        logger.info("[a] note")
    logger.warning("another")
    assert "\n[a] note\n" in out.getvalue().replace("\x1b[2K", "").replace("\r", "\n")
    assert "another" not in out.getvalue()


def test_a_reader_that_is_gone_is_an_error_by_name() -> None:
    with broken_pipe() as stream:
        with pytest.raises(BrokenPipeError):
            print("the table", file=escape_stream(stream), flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def test_other_errors_are_raised() -> None:
    """`train > log` on a full disk."""

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        escape_stream(Full()).write("x")


def test_a_second_sigterm_disturbs_nothing_while_all_is_closed() -> None:
    closed = False
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Ended), raise_at_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            closed = True
    assert closed and signal.getsignal(signal.SIGTERM) is before


# ---- a run that is interrupted says where it is


def test_ctrl_c_while_a_session_begins_says_where_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.load("quickstart")
    RunFolder.create(tmp_path / "run", dump_toml(recipe))

    def ends(stated: KeyboardInterrupt) -> None:
        def fake(*given: Any, **more: Any) -> None:
            raise stated

        monkeypatch.setattr(session, "_run_session", fake)
        session.run_session(recipe, tmp_path / "run", Console(quiet=True), workers="", on_step=None)

    with pytest.raises(KeyboardInterrupt, match="ostinato resume"):
        ends(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt, match="as it said"):
        ends(KeyboardInterrupt("as it said"))


# ---- what models, rows, file names and user code say cannot control the terminal

CONTROL = "\x1b]0;owned\x07\x9b2J\rshadow"
SHOWN = "\\u001b]0;owned\\u0007\\u009b2J\\u000dshadow"


class Bytes:
    """A renderer whose tokens are characters."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, out)
    return out


def test_control_characters_are_shown_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback of a reward that quotes an answer set the title of the terminal and its clipboard, and so
    did rows, names of arms and warnings."""
    monkeypatch.setenv("COLUMNS", "200")
    out = terminal(monkeypatch)
    say(f"[b]line\n\tof {CONTROL}")
    with show_log():
        logging.getLogger("ostinato.x").warning(CONTROL)
    screen = Screen()
    table = Table(CONTROL, title=CONTROL)
    table.add_row(CONTROL)
    screen.print(table)
    screen.print(terminal_table(ReportTable(title=CONTROL, head=(CONTROL,), rows=((CONTROL, CONTROL),)), 200))
    Monitor(1, console=screen).say(CONTROL)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # rich's own colours
    assert shown.startswith(f"[b]line\n\tof {SHOWN}\n{SHOWN}\n")
    assert shown.count(SHOWN) == 10 and not set(CONTROL[:1] + "\x07\x9b\r") & set(shown)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_answer_is_escaped_on_a_terminal_and_whole_in_a_pipe(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ostinato generate MODEL -p ... > file` is data: not a byte of the answer may change."""
    out = terminal(monkeypatch)
    monkeypatch.setattr(out, "isatty", lambda: is_terminal)
    voice = Voice(cast(Renderer, Bytes()), answer_stream(sys.stdout))
    for byte in CONTROL.encode("latin-1"):
        voice.say(np.array([byte]))
    voice.end()
    assert out.getvalue() == (SHOWN if is_terminal else CONTROL) + "\n"


@pytest.mark.parametrize("width", [60, 80, 120, 140, 400])
def test_a_table_never_loses_the_names_of_its_lines(width: int) -> None:
    """`ostinato compare` showed two rows of figures without the names of the arms below 200 columns: rich
    took all room from the one column that may wrap. What does not fit follows below, with the names again."""
    head = [f"gain of set {number} [95 % interval]" for number in range(9)]
    rows = [
        [name, *(f"{number}.250 [0.100, 0.400]" for number in range(9))] for name in ("grpo", "cispo, 1e-3")
    ]
    console = Console(file=io.StringIO(), width=width)
    console.print(terminal_table(ReportTable(title="arm", head=head, rows=rows), width))
    lines = cast(io.StringIO, console.file).getvalue().splitlines()
    figures = [line for line in lines if ".250" in line]
    assert figures and all(line.split("  ")[0].strip() in ("grpo", "cispo, 1e-3") for line in figures)
    assert max(map(len, lines)) <= width
    assert all(sum(f"{number}.250 [0.100, 0.400]" in line for line in lines) == 2 for number in range(9))
    assert len(figures) == 2 or width < 400


def test_columns_is_heeded_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "77")
    assert Screen(io.StringIO()).width == 77
    monkeypatch.delenv("COLUMNS")
    assert Screen(io.StringIO()).width > 120


# ---- what takes long is named while it lasts


@pytest.mark.parametrize("error", [False, True])
def test_what_takes_long_is_said_while_it_lasts(error: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """A first `ostinato generate` showed an empty screen for 27 s, in which kernels were compiled, threads
    measured and weights loaded; its answers are on standard output, so this goes to the other one."""
    said = threading.Event()
    listener = logging.Handler()
    listener.emit = lambda record: said.set()
    with show_log("ostinato.terminal", error=error):
        logging.getLogger("ostinato.terminal").addHandler(listener)
        try:
            with announce_work("loading the weights", after_s=0.0):
                assert said.wait(60)
            with announce_work("what is done at once", after_s=1e6):
                pass
        finally:
            logging.getLogger("ostinato.terminal").removeHandler(listener)
    out, err = capsys.readouterr()
    assert (err if error else out) == "loading the weights\n" and not (out if error else err)


def test_the_live_line_says_what_is_done_before_the_first_step() -> None:
    """During the first evaluation, the longest part of a small run, it was "sampling the first step"."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Monitor(3, console=console, description="scoring 256 held-out prompts") as monitor:
        monitor.on_eval({"step": 0, "set": "eval", "n": 256, "pass@1": 0.5, "stderr": 0.1, "reward": 0.5})
    before, after = out.getvalue().split("held-out pass@1", 1)
    assert "scoring 256 held-out prompts" in before and "sampling the first step" not in before
    assert "scoring 256" not in after.rpartition("━")[2]


@pytest.mark.parametrize(("quiet", "said"), [(False, "model.dtype auto: float32\n"), (True, "")])
def test_learn_says_what_the_command_says(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quiet: bool,
    said: str,
) -> None:
    """The choice of a dtype was a line of ``ostinato train`` alone."""

    def log(*_: object, **settings: object) -> None:
        logging.getLogger("ostinato.launch.machine").info("model.dtype auto: float32")

    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a script
    monkeypatch.setattr(logging.getLogger("ostinato"), "level", logging.NOTSET)
    monkeypatch.setattr(session, "_run_session", log)
    session.run_session(Recipe(), tmp_path / "run", Screen(quiet=quiet), workers="", on_step=None)
    assert capsys.readouterr().out == said
