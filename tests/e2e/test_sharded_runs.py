"""``ostinato train`` over several ranks of this host: whoever is killed, the run ends by name, leaves nobody
behind, and goes on to the bytes of the run that nothing befell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from commands import command
from short_run import SHORT, STEPS

pytestmark = pytest.mark.slow

RUN = SHORT | {"parallel.layout": "d2"}


def train(folder: Path) -> list[str]:
    return ["train", "quickstart", f"log.dir={folder}", *(f"{key}={value}" for key, value in RUN.items())]


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command(*arguments), stdout=log, stderr=log, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(true: Callable[[], object], folder: Path, within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.02)


def rows(folder: Path) -> int:
    return sum(path.read_text().count("\n") for path in folder.glob("*/metrics.jsonl"))


def followers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return [child for child in psutil.Process(process.pid).children() if child.cmdline()[-1:] == ["rank"]]


def adapter(folder: Path) -> bytes:
    (path,) = folder.glob("*/adapter/adapter_model.safetensors")
    return path.read_bytes()


def run_of(folder: Path) -> str:
    (recipe,) = folder.glob("*/recipe.toml")
    return str(recipe.parent)


@pytest.mark.timeout(600)
def test_a_run_survives_the_loss_of_any_rank(tmp_path: Path) -> None:
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    with started(whole, *train(whole)) as process:
        assert process.wait(240) == 0, (whole / "log").read_text()

    with started(hurt, *train(hurt)) as process:
        until(lambda: rows(hurt) >= 1, hurt)
        (follower,) = followers(process)
        follower.kill()
        assert process.wait(60) == 1, (hurt / "log").read_text()
    said = (hurt / "log").read_text().splitlines()[-1]
    name = r"ostinato: rank 1 on \S+ \(process \d+\) ended: killed by signal 9, last seen "
    assert re.match(name, said), said
    assert said.endswith(f"to go on: ostinato resume {run_of(hurt)}")
    assert rows(hurt) < STEPS

    with started(hurt, "resume", run_of(hurt)) as process:
        until(lambda: rows(hurt) >= 3, hurt)
        (follower,) = followers(process)
        process.kill()
        process.wait()
    gone, alive = psutil.wait_procs([follower], timeout=20)
    assert not alive and gone, "rank 1 has outlived rank 0"
    assert rows(hurt) < STEPS

    with started(hurt, "resume", run_of(hurt)) as process:
        assert process.wait(240) == 0, (hurt / "log").read_text()
    assert adapter(whole) == adapter(hurt)
    assert rows(hurt) == rows(whole) == STEPS


@pytest.mark.timeout(300)
def test_ctrl_c_is_rank_0s_affair(tmp_path: Path) -> None:
    """SIGINT goes to every process of a terminal: the step is finished by all ranks, saved, and all end."""
    with started(tmp_path, *train(tmp_path)) as process:
        until(lambda: rows(tmp_path) >= 1, tmp_path)
        (follower,) = followers(process)
        follower.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130, (tmp_path / "log").read_text()
        assert not follower.is_running()
    assert "interrupted after step" in (tmp_path / "log").read_text()
    (checkpoint, *_) = sorted(tmp_path.glob("*/checkpoints/step-*"))[::-1]
    assert int(checkpoint.name.removeprefix("step-")) == rows(tmp_path)


def test_layouts_that_cannot_be_are_refused_before_any_rank_begins(tmp_path: Path) -> None:
    for layout, sentence in (("d2q3", "d2q3"), ("t7", "t7")):
        with started(tmp_path, *train(tmp_path), f"parallel.layout={layout}") as process:
            assert process.wait(120) == 2
        last = (tmp_path / "log").read_text().splitlines()[-1]
        assert last.startswith("ostinato: ") and sentence in last, last
        assert not list(tmp_path.glob("*/ranks"))
