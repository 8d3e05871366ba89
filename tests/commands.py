"""``ostinato`` as a process of its own, as for a user, or in this one; and what is in its run folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from ostinato.cli.app import main

ROOT = Path(__file__).parents[1]
LIMIT_S = 500

# python -c LAUNCHER '["open", "/metrics.jsonl", 3, "kill"]' train recipe.toml ...
LAUNCHER = """
import json, os, resource, signal, sys, time

event, wanted, left, action = json.loads(sys.argv[1])

def strike(path):
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "wait":
        open("waits", "w").close()
        while not os.path.exists("go"):
            time.sleep(0.01)
        return
    room = 20 + (os.path.getsize(path) if os.path.exists(path) else 0)  # a torn write, then EFBIG
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

def hook(name, arguments):
    global left
    paths = [str(value) for value in arguments if isinstance(value, str | os.PathLike)]
    if name == event and (hit := [path for path in paths if wanted in path + "$"]):
        left -= 1
        if left == 0:
            strike(hit[0])

sys.addaudithook(hook)
from ostinato.cli.app import main
main(sys.argv[2:])
"""


TINY = {
    **{"model.dtype": "float32", "adapter.rank": 4, "adapter.targets": ["attn", "experts"]},
    **{"adapter.alpha": 8.0, "rollout.group_size": 4, "eval.n": 2, "eval.every": 0},
    "log.trajectories_every": 1,
}


def tiny_recipe(keys: dict[str, Any]) -> str:
    """The TOML of a run that is over in seconds, with ``keys`` ("trainer.steps") of its own."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in {**TINY, **keys}.items())


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ostinato", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def run(place: Path, *arguments: str, code: int = 0) -> str:
    """stdout, or stderr, of a command that ends with ``code``: here, or of Python if the first is "-c"."""
    if arguments[0] == "-c":
        python = [sys.executable, *arguments]
        done = subprocess.run(
            python, cwd=place, env=environment(), capture_output=True, text=True, timeout=LIMIT_S
        )
        ending, out, error = done.returncode, done.stdout, done.stderr
    else:
        with redirect_stdout(StringIO()) as printed, redirect_stderr(StringIO()) as complained:
            ending = ended(place, *arguments)
        out, error = printed.getvalue(), complained.getvalue()
    assert ending == code, out + error
    return out if code == 0 else error


def ended(place: Path, *arguments: str) -> int:
    """The exit code of a command in this process: it costs a tenth of a new one."""
    with chdir(place), pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def only_run(place: Path, name: str = "*") -> Path:
    (folder,) = (place / "runs").glob(name)
    return folder


def rows(file: Path) -> list[dict[str, Any]]:
    """Its whole lines; none where it is not there yet."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def gone(pid: int) -> bool:
    """Not running: no such process, or one that only waits to be reaped by its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(condition: Callable[[], Any], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()
