"""The machine that a run is on, as its folder records it at each start."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ostinato import __version__
from ostinato.run import Jsonl, RunFolder


def record_start(
    run: RunFolder, device: str = "", algorithm: Mapping[str, Any] | None = None, train_prompts: int = 0
) -> None:
    """Append to starts.jsonl which machine and versions work on the run from now on; ``device`` names the
    accelerator. A report written elsewhere or later can then say so. ``algorithm``: all of its choices, of
    which a recipe holds only the user's. ``train_prompts``: how many there are; a recipe may say "all"."""
    row = {"at": time.time(), "machine": machine(device), "versions": versions()}
    row |= {"algorithm": dict(algorithm)} if algorithm else {}
    row |= {"train_prompts": train_prompts} if train_prompts else {}
    Jsonl(run.path / "starts.jsonl").append(row)


def machine(device: str = "") -> str:
    """ "AMD EPYC 7763, 2 cores, 7.8 GiB, Linux x86_64"; no name of the host or the user."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [processor(), f"{cores} cores"]
    if (size := memory_gib()) is not None:
        parts.append(f"{size:.1f} GiB")
    return ", ".join([*parts, *([device] if device else []), f"{platform.system()} {platform.machine()}"])


def processor() -> str:
    """The name on the processor, as far as the system has it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def memory_gib() -> float | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):  # not every system has these names
        return None


def versions() -> str:
    """ "ostinato 0.1.0, torch 2.13.0, Python 3.12.4"."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "missing"
    return f"ostinato {__version__}, torch {torch}, Python {platform.python_version()}"
