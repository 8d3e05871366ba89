"""A run of ``ostinato bench faults``: ``ostinato train`` as a child, watched from outside, and ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

POLL_S = 0.05
STOPPED_S = 3.0  # a gap in the heartbeat from which somebody has stopped this process, and its children too
LEAVE_S = 90.0  # for what a run has started to be gone: Ray's own agents take their time without a head


class Stopped(Exception):
    """This process stood still for a while, and the run beside it: what was measured means nothing."""


class Heartbeat:
    """Knows when this process was stopped (SIGSTOP, a machine that slept)."""

    def __init__(self, every_s: float = 0.1) -> None:
        self._every_s, self.woken = every_s, 0.0  # the last time that it went on
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(self._every_s)
            now = time.monotonic()
            if now - before > STOPPED_S:
                self.woken = now
            before = now


class Child:
    """A command in the folder ``place`` that trains under ``logs``. Times are Unix seconds."""

    def __init__(self, command: Sequence[str], place: Path, logs: Path, heartbeat: Heartbeat) -> None:
        self.place, self.logs, self._heartbeat, self._begun = place, logs, heartbeat, time.monotonic()
        self.seen: dict[int, float] = {}  # when the row of a step was there
        self._out, self._errors = place / "out.txt", place / "errors.txt"
        with self._out.open("a") as out, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, cwd=place, stdout=out, stderr=errors, env=_environment(), text=True
            )

    # ---- what it does

    @property
    def ended(self) -> bool:
        if self._heartbeat.woken > self._begun:
            raise Stopped
        return self.process.poll() is not None

    def until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Whether ``condition`` came true before the run ended or ``limit_s`` were over."""
        limit = time.monotonic() + limit_s
        while not condition():
            self._look()
            if self.ended or time.monotonic() > limit:
                return condition()
            time.sleep(POLL_S)
        return True

    def sleep(self, seconds: float) -> bool:
        """Whether the run still goes on afterwards."""
        return not self.until(lambda: False, seconds) and not self.ended

    def _look(self) -> None:
        for row in self.rows():
            self.seen.setdefault(row["step"], time.time())

    @property
    def folder(self) -> Path | None:
        """The run folder, once there is one."""
        return next((path for path in self.logs.glob("*") if (path / "recipe.toml").exists()), None)

    def rows(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl, so far."""
        return list(_lines(self.folder / "metrics.jsonl")) if self.folder else []

    def workers(self) -> dict[str, dict[str, Any]]:
        """The rows of workers.json, by name."""
        with suppress(OSError, ValueError, TypeError):
            return {row["worker"]: row for row in json.loads((self._folder() / "workers.json").read_text())}
        return {}

    def _folder(self) -> Path:
        if self.folder is None:
            raise OSError("no run folder yet")
        return self.folder

    def sentence(self) -> str:
        """Its last words: the line on stderr that begins with our name, or else the last."""
        lines = [line for line in self._errors.read_text(errors="replace").splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("ostinato: ")]
        return (ours or lines or [""])[-1][:600]

    def forgive(self) -> None:
        """Being stopped until now does no harm."""
        self._begun = time.monotonic()

    # ---- its processes

    def processes(self, name: str) -> list[int]:
        """Those that it has started, directly or not, whose command line has ``name``."""
        return [pid for pid in descendants(self.process.pid) if name in command(pid)]

    def leave(self, others: Sequence[int]) -> list[str]:
        """End it if it has not ended, and which of ``others``, processes of its, outlived it: ended too."""
        if self.process.poll() is None:
            others = [*others, *descendants(self.process.pid)]
            self.process.kill()
        self.process.wait()
        limit = time.monotonic() + LEAVE_S
        while (left := [pid for pid in set(others) if alive(pid)]) and time.monotonic() < limit:
            time.sleep(POLL_S)
        names = [command(pid)[:80] for pid in left]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return names


@contextmanager
def child(
    arguments: Sequence[str], place: Path, logs: Path, heartbeat: Heartbeat, module: str = "ostinato"
) -> Iterator[Child]:
    """``python -m module arguments``, which has ended, with all that it started, when the context does."""
    running = Child([sys.executable, "-m", module, *arguments], place, logs, heartbeat)
    try:
        yield running
    finally:
        running.leave([])


def _environment() -> dict[str, str]:
    """One thread, and the package that this one is of, wherever it lies."""
    package = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def descendants(root: int) -> list[int]:
    """Processes that ``root`` has started, and those that they have."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                parents.setdefault(_stat(int(entry))[1], []).append(int(entry))
    found, front = [], [root]
    while front:
        front = [pid for parent in front for pid in parents.get(parent, [])]
        found += front
    return found


def command(pid: int) -> str:
    """Its command line; empty when it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def alive(pid: int) -> bool:
    """Running or stopped: neither gone, nor dead and only waiting to be reaped."""
    try:
        return _stat(pid)[0] not in "ZX"
    except OSError:
        return False


def _stat(pid: int) -> tuple[str, int]:
    """State and parent."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[1])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole rows of a log that grows."""
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)
