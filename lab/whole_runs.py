"""``ostinato train`` as a measured thing: a whole run in a process of its own, and its folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab.contender import ContenderFailed
from lab.settings import environment
from ostinato.run import RunFolder


def trained(
    recipe: str,
    overrides: Sequence[str],
    logs: Path,
    name: str,
    *,
    cores: Collection[int] = (),
    limit_s: float | None = None,
    verb: str = "train",
    started: Callable[[int], object] = lambda pid: None,
) -> RunFolder:
    """Train ``recipe`` (``verb`` "sft": on rows with answers) with ``overrides`` under the empty folder
    ``logs``, on ``cores`` alone where they are given. Raises ContenderFailed, with the run's ``name`` and its
    own last words, where it does not end well, or not within ``limit_s``."""
    command = [sys.executable, "-m", "ostinato", verb, recipe, *overrides, f"log.dir={logs}"]
    with confined(cores):
        output(f"the run {name}", command, limit_s=limit_s, started=started)
    return RunFolder.open(next(path for path in logs.iterdir() if path.is_dir()))


def output(
    name: str,
    command: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    limit_s: float | None = None,
    started: Callable[[int], object] = lambda pid: None,
) -> str:
    """Run ``command`` to its end; what it prints. ``started`` gets its process id. Raises ContenderFailed,
    with ``name`` and its last words, where it fails or takes longer than ``limit_s``."""
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment(environ or {}),
    )
    try:
        started(running.pid)
        out, err = running.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        running.terminate()  # it saves and takes its workers with it
        raise ContenderFailed(f"{name} took longer than {limit_s:.0f} s") from None
    finally:
        _end(running)
    if running.returncode:
        lines = (err or out).strip().splitlines()[-1:] or ["it printed nothing"]
        raise ContenderFailed(f"{name} failed: {lines[0][:300]}")
    return out


def allowed_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may use; none where the system cannot confine a process."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


@contextmanager
def confined(cores: Collection[int]) -> Iterator[None]:
    """What this thread starts inside may use ``cores`` alone; all that it has itself where these are none."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _end(running: subprocess.Popen[str], grace_s: float = 30.0) -> None:
    """Whatever happened, it is gone afterwards."""
    if running.poll() is not None:
        return
    running.terminate()
    try:
        running.communicate(timeout=grace_s)
    except subprocess.TimeoutExpired:
        running.kill()
        running.communicate()
