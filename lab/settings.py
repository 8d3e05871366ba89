"""What a benchmark runs under: the threads that suit each best, and the machine that its figures are of."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato import isa
from ostinato.config import Recipe
from ostinato.engine.threads import count_logical_cores
from ostinato.launch.machine import CACHES

if TYPE_CHECKING:
    from ostinato.model.native import Kernels

# what makes one processor's matrix products another's, as /proc/cpuinfo names it
FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
OWN_CACHES = dict.fromkeys(CACHES, "")  # of peers: what is set for us is taken away


class Clock(StrEnum):
    """What counts as a second."""

    WALL = "wall"
    CPU = "cpu"  # of all threads of this process: for one thread on a machine that is shared with others

    @property
    def read(self) -> Callable[[], float]:
        return time.process_time if self is Clock.CPU else time.perf_counter


def torch_threads() -> dict[str, dict[str, str]]:
    """For torch with its own OpenMP runtime."""
    cores = count_logical_cores()
    return {
        f"{cores} threads, short spin": _openmp(cores, "", "20000"),
        f"{cores} threads, passive": _openmp(cores, "PASSIVE", "0"),
        "1 thread": _openmp(1, "PASSIVE", "0"),
    }


def vllm_threads() -> dict[str, dict[str, str]]:
    """For vLLM on CPU, which by default keeps a core free and binds its threads to the others."""
    base = {
        **OWN_CACHES,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "",
        "OMP_WAIT_POLICY": "",
        "GOMP_SPINCOUNT": "",
    }
    every = {**base, "VLLM_CPU_OMP_THREADS_BIND": f"0-{count_logical_cores() - 1}"}
    return {"its default binding": base, "all cores bound": every}


def our_threads() -> int:
    """What ``engine.threads.configure`` chose for this machine, or the user."""
    return int(os.environ.get("OMP_NUM_THREADS") or count_logical_cores())


def machine() -> dict[str, Any]:
    """What a figure is of: processor, instruction set, cores, threads, versions, commit and day, and how busy
    others kept the machine."""
    lines = (line.partition(":") for line in isa.processor().splitlines())
    known = {name.strip(): value.strip() for name, _, value in lines}
    own = set((known.get("flags") or known.get("Features") or "").split())
    return {
        "processor": known.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in FLAGS if flag in own],
        "instruction_set": isa.instruction_set(),
        "capped": isa.effective_cap(),
        "cores": count_logical_cores(),
        "threads": our_threads(),
        "wait_policy": os.environ.get("OMP_WAIT_POLICY", ""),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "torch": version("torch"),
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def with_dtype(recipe: Recipe) -> Recipe:
    """``recipe`` with the dtype of a run on this CPU where it says "auto"."""
    section = recipe.model
    if section.dtype != "auto":
        return recipe
    from ostinato.model.named import find_model_folder

    dtype = faster_dtype(find_model_folder(section.path), section.fp32_head, recipe.engine.native)
    return recipe.model_copy(update={"model": section.model_copy(update={"dtype": dtype})})


def faster_dtype(folder: Path, fp32_head: bool = True, native: bool = True) -> str:
    """Of the model on this CPU, as ``model.dtype = "auto"`` chooses it; threads are chosen before."""
    from ostinato.engine.products import choose_dtype
    from ostinato.model.config import read_config

    return choose_dtype(read_config(folder), device="cpu", native=native, fp32_head=fp32_head).dtype


def commit() -> str | None:
    """The commit of this checkout, with "+" where the code differs from it; None outside of one."""
    root = Path(__file__).parent.parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None  # installed inside of another project
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "ostinato", "lab")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def folder_of(model: str) -> Path:
    """Of a model by name."""
    from ostinato.model.named import find_model_folder

    return Path(find_model_folder(model))


def native_kernels() -> Kernels | None:
    """None, and a line on standard error, where they cannot be compiled."""
    from ostinato.model.native import BuildError, load_kernels

    try:
        return load_kernels()
    except BuildError as error:
        print(f"without native kernels: {error}", file=sys.stderr)
        return None


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``changes``; an empty value takes a variable away."""
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value or name not in changes}


def _openmp(threads: int, policy: str, spin: str) -> dict[str, str]:
    openmp = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": policy, "GOMP_SPINCOUNT": spin}
    return {**OWN_CACHES, **openmp}
