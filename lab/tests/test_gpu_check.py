"""The check of a GPU works on a CPU, so that the first minutes on a card are not spent on its own faults."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lab.gpu.world import Line, Lines, World
from lab.gpu_check import Part, Report, attempt, limited


@pytest.mark.slow
def test_a_dry_run_passes(repository: Path, tmp_path: Path) -> None:
    """Every part, at tiny shapes, in a process of its own; nothing that depends on a speed is judged."""
    file = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "lab.gpu_check", "--dry", "--json", str(file)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    lines = json.loads(file.read_text())["lines"]
    assert done.returncode == 0, [line for line in lines if line["verdict"] == "FAIL"]
    assert {line["part"] for line in lines} >= {
        "operations",
        "contract",
        "sampling",
        "training",
        "quickstart",
    }
    assert not [line for line in lines if line["speed"] and line["verdict"]]


def report(tmp_path: Path) -> tuple[World, Report]:
    world = World(device=torch.device("cpu"), dry=True, folder=tmp_path)
    return world, Report(dry=True, machine={}, file=tmp_path / "out.json")


def breaks(world: World) -> Lines:
    yield Line(name="before", value=1.0, bar=0.5)
    raise RuntimeError("CUDA error: an illegal\nmemory access")


def hangs(world: World) -> Lines:
    yield Line(name="before", value=1.0, bar=0.5)
    time.sleep(600)


@pytest.mark.parametrize(("run", "why"), [(breaks, "memory access"), (hangs, "longer than")])
def test_a_part_that_fails_hides_nothing(run: Callable[[World], Lines], why: str, tmp_path: Path) -> None:
    world, found = report(tmp_path)
    attempt(Part(name="first", limit_s=0.2, run=run), world, found, 0.2)
    attempt(
        Part(name="second", limit_s=5, run=lambda _: iter([Line(name="x", value=1.0, bar=2.0)])),
        world,
        found,
        5,
    )
    found.write()
    rows = json.loads((tmp_path / "out.json").read_text())["lines"]
    assert [row["verdict"] for row in rows] == ["PASS", "FAIL", "FAIL"]
    assert why in rows[1]["note"] and rows[2]["part"] == "second"


def test_a_limit_leaves_no_alarm_behind() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with limited(60, lambda: None):
        pass
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize(
    ("line", "dry", "verdict"),
    [
        (Line(name="x", value=2.0, bar=1.0), False, "PASS"),
        (Line(name="x", value=2.0, bar=1.0, most=True), False, "FAIL"),
        (Line(name="x", value=0.1, bar=1.0, speed=True), False, "FAIL"),
        (Line(name="x", value=0.1, bar=1.0, speed=True), True, ""),
        (Line(name="x", value=float("nan"), bar=1.0, most=True), True, "FAIL"),
        (Line(name="x", note="no card"), False, "NOT RUN"),
        (Line(name="x", value=3.0), False, ""),
    ],
)
def test_verdicts(line: Line, dry: bool, verdict: str) -> None:
    assert line.verdict(dry) == verdict
