"""How ``ostinato bench faults`` hurts a run: each function waits for a random moment of it and strikes there.

It returns when it struck and how, or None where the run had ended before: the run counts for nothing then.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import time
from typing import Any

from lab.faults_child import Child, alive
from lab.faults_planted import PLAN, STRUCK

START_S = 240.0  # for a run to begin, on a machine that is busy with others
PACE_S = 1.5  # of a step, before one has ended
PAUSE_S = 30.0
DISK_MB = 24

Sign = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """``sign`` finds the row of a step that was finished in spite of it, and counts it."""

    at: float  # ``time.time``
    how: str
    sign: Sign = lambda row: False


Strike = Callable[[Child, Random, int], Struck | None]


def counted(*names: str) -> Sign:
    """Whether a row counts one of these."""
    return lambda row: any((row.get(name) or 0) > 0 for name in names)


def later(done: int) -> Sign:
    """Whether a row is of a step that had not begun when ``done`` were."""
    return lambda row: row["step"] > done + 1


def moment(child: Child, random: Random, steps: int, workers: int) -> str | None:
    """Wait for one, evenly spread over the steps; it in words. None: the run has ended."""
    step, fraction = random.randrange(steps), random.random()

    def ready() -> bool:
        serving = [row for row in child.workers().values() if row["state"] == "serving" and "pid" in row]
        return child.folder is not None and len(serving) >= workers and len(child.rows()) >= step

    if not child.until(ready, START_S) or child.ended:
        return None
    pace = statistics.median([row["step_time"] for row in child.rows()] or [PACE_S])
    return f"{fraction * pace:.2f} s into step {step + 1}" if child.sleep(fraction * pace) else None


def kill(*names: str, workers: int) -> Strike:
    """SIGKILL to one of these workers."""

    def strike(child: Child, random: Random, steps: int) -> Struck | None:
        name, when = random.choice(names), moment(child, random, steps, workers)
        pid = child.workers().get(name, {}).get("pid", 0)
        if when is None or not pid or not alive(pid):
            return None
        os.kill(pid, signal.SIGKILL)
        if name.startswith("sampler"):
            return Struck(at=time(), how=f"{name}, {when}", sign=counted("workers/restarts"))
        return Struck(at=time(), how=f"{name}, {when}", sign=later(len(child.rows())))

    return strike


def kill_process(*names: str, workers: int) -> Strike:
    """SIGKILL to a process that the run has started, by a word of its command line. No row counts it."""

    def strike(child: Child, random: Random, steps: int) -> Struck | None:
        name, when = random.choice(names), moment(child, random, steps, workers)
        pids = child.processes(name) if when is not None else []
        if not pids:
            return None
        os.kill(pids[-1], signal.SIGKILL)
        return Struck(at=time(), how=f"{name}, {when}", sign=later(len(child.rows())))

    return strike


def pause(*names: str, workers: int) -> Strike:
    """One of these workers is stopped for 30 s: to its peers the same as a network that is silent."""

    def strike(child: Child, random: Random, steps: int) -> Struck | None:
        name, when = random.choice(names), moment(child, random, steps, workers)
        pid = child.workers().get(name, {}).get("pid", 0)
        if when is None or not pid or not alive(pid):
            return None
        os.kill(pid, signal.SIGSTOP)
        at = time()
        try:
            child.sleep(PAUSE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        seen, replaced = len(child.rows()), counted("workers/restarts")
        sign = lambda row: row["step"] > seen or replaced(row)  # noqa: E731
        return Struck(at=at, how=f"{name}, {when}", sign=sign)

    return strike


def planted(*signs: str) -> Strike:
    """It strikes by itself (``faults_planted``)."""

    def strike(child: Child, random: Random, steps: int) -> Struck | None:
        reported, plan = child.place / STRUCK, json.loads((child.place / PLAN).read_text())
        if not child.until(reported.exists, START_S):
            return None
        how = ", ".join(f"{name} {value}" for name, value in plan.items() if name != "kind")
        return Struck(at=float(reported.read_text()), how=how, sign=counted(*signs))

    return strike


def fill(workers: int) -> Strike:
    """No byte more can be written to where the run folder is: a ballast file, or a limit to the process."""

    def strike(child: Child, random: Random, steps: int) -> Struck | None:
        when = moment(child, random, steps, workers)
        if when is None:
            return None
        if not os.path.ismount(child.logs):
            resource.prlimit(child.process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
            return Struck(at=time(), how=f"limit of file sizes, {when}")
        with contextlib.suppress(OSError), ballast(child.logs).open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))
        return Struck(at=time(), how=f"full file system, {when}")

    return strike


def ballast(disk: Path) -> Path:
    return disk / "ballast"


@contextlib.contextmanager
def small_disk(path: Path, small: bool) -> Iterator[None]:
    """A file system of its own at ``path`` where it may be mounted; a plain folder otherwise."""
    path.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", str(path)]
    try:
        mounted = small and not subprocess.run(mount, capture_output=True, check=False).returncode
    except OSError:
        mounted = False
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)
