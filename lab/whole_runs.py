"""``ostinato train`` as a measured thing: a whole run in a process of its own, and its folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
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
    limit_s: float | None = None,
    started: Callable[[int], object] = lambda pid: None,
) -> RunFolder:
    """Train ``recipe`` with ``overrides`` under the empty folder ``logs``. Raises ContenderFailed, with the
    run's ``name`` and its own last words, where it does not end well, or not within ``limit_s``."""
    command = [sys.executable, "-m", "ostinato", "train", recipe, *overrides, f"log.dir={logs}"]
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
