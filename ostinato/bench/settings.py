"""Thread settings that a peer is tried under, so that each is measured at its best."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ostinato.engine.threads import logical_cores


def torch_threads() -> dict[str, dict[str, str]]:
    """For torch with its own OpenMP runtime."""
    cores = logical_cores()
    return {
        f"{cores} threads, short spin": _openmp(cores, "", "20000"),
        f"{cores} threads, passive": _openmp(cores, "PASSIVE", "0"),
        "1 thread": _openmp(1, "PASSIVE", "0"),
    }


def vllm_threads() -> dict[str, dict[str, str]]:
    """For vLLM on CPU, which by default keeps a core free and binds its threads to the others."""
    base = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "", "OMP_WAIT_POLICY": "", "GOMP_SPINCOUNT": ""}
    every = {**base, "VLLM_CPU_OMP_THREADS_BIND": f"0-{logical_cores() - 1}"}
    return {"its default binding": base, "all cores bound": every}


def our_threads() -> int:
    """What ``engine.threads.configure`` chose for this machine, or the user."""
    return int(os.environ.get("OMP_NUM_THREADS") or logical_cores())


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``changes``; an empty value takes a variable away."""
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value or name not in changes}


def _openmp(threads: int, policy: str, spin: str) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": policy, "GOMP_SPINCOUNT": spin}
