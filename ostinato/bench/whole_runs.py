"""``ostinato train`` as a measured thing: a whole run in a process of its own, and its folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ostinato.bench.contender import ContenderFailed
from ostinato.run import RunFolder


def trained(recipe: str, overrides: Sequence[str], logs: Path, name: str) -> RunFolder:
    """Train ``recipe`` with ``overrides`` under the empty folder ``logs``. Raises ContenderFailed, with the
    run's ``name`` and its own last words, where it does not end well."""
    command = [sys.executable, "-m", "ostinato", "train", recipe, *overrides, f"log.dir={logs}"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
        raise ContenderFailed(f"the run {name} failed: {said[0][:300]}")
    return RunFolder.open(next(path for path in logs.iterdir() if path.is_dir()))
