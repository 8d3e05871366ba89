"""Threads and OpenMP wait policy, chosen by a measurement and cached per machine.

A decode step is hundreds of small GEMMs with elementwise work between them, so the price of waking
threads matters more than their number: on some machines one thread wins, on others spinning threads
do. OpenMP reads its environment when its library is loaded, that is when torch is imported; so each
candidate is timed in a process of its own, and ``configure`` must run before ``import torch``.

    cli -> configure("auto") -> environment | cache file | measure() -> one probe process per candidate
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from ostinato.files import atomic_write, cache_folder, read_cached

logger = logging.getLogger(__name__)
Policy = Literal["active", "passive"]  # spin before sleeping, or sleep at once, while waiting for work
# OMP_WAIT_POLICY=active alone spins for minutes and starves whatever shares the cores. Some 0.3 ms bridges
# the gap between two kernels of a decode step, which is all that spinning is good for here.
SPINS = {"active": "20000", "passive": "0"}  # GOMP_SPINCOUNT

PROBE_S = 1.2  # of timed work per candidate
PROBE_LIMIT_S = 60.0  # a candidate that takes longer, import of torch included, is out
SPIN_GAIN = 1.1  # what spinning must gain to be chosen: it steals from whatever else wants the core


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """A choice: ``count`` OpenMP threads that wait by ``policy``; ``source`` says where it came from."""

    count: int
    policy: Policy
    source: str = "given"  # given | environment | cache | measured | default

    def __str__(self) -> str:
        return f"{self.count} thread{'s' * (self.count > 1)}, wait policy {self.policy} ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One measured candidate: median milliseconds of a decode-like step; None when its probe failed."""

    count: int
    policy: Policy
    ms_per_step: float | None


def configure(
    threads: int | Literal["auto"] = "auto",
    policy: Policy | Literal["auto"] = "auto",
    *,
    environ: MutableMapping[str, str] = os.environ,
) -> Threads:
    """Choose, and write the choice into the environment that torch will read. Call it before importing torch.

    What the caller gives wins, then OMP_NUM_THREADS and OMP_WAIT_POLICY if the user has set them, then
    the cache of this machine, then a measurement of a few seconds.
    """
    if "torch" in sys.modules:
        warnings.warn(
            "threads.configure was called after torch was imported, so the wait policy stays as it is; "
            "call it first",
            stacklevel=2,
        )
    choice = _choose(threads, policy, environ)
    environ["OMP_NUM_THREADS"] = str(choice.count)
    environ["OMP_WAIT_POLICY"] = choice.policy.upper()
    if policy != "auto" or "GOMP_SPINCOUNT" not in environ:
        environ["GOMP_SPINCOUNT"] = SPINS[choice.policy]
    return choice


def configure_early(threads: int | Literal["auto"] = "auto") -> Threads | None:
    """``configure`` where it can still have an effect; None, and nothing done, once torch is imported."""
    return None if "torch" in sys.modules else configure(threads)


def _choose(
    threads: int | Literal["auto"], policy: Policy | Literal["auto"], environ: MutableMapping[str, str]
) -> Threads:
    set_count, set_policy = environ.get("OMP_NUM_THREADS", ""), environ.get("OMP_WAIT_POLICY", "").lower()
    if threads != "auto":
        choice = Threads(count=threads, policy="passive", source="given")
    elif set_count.isdecimal() and int(set_count) > 0:
        choice = Threads(count=int(set_count), policy="passive", source="environment")
    else:
        choice = cached() or measure()
    if policy == "auto":
        policy = (
            "active" if set_policy == "active" else "passive" if set_policy == "passive" else choice.policy
        )
    return replace(choice, policy=policy)


def cached() -> Threads | None:
    """The choice measured earlier on this machine; None when there is none, or its file does not hold one."""
    return read_cached(cache_file(), _parsed)


def _parsed(read: Any) -> Threads:
    """Raises ValueError, TypeError or LookupError for what ``_write_cache`` never wrote."""
    count, policy = read["best"]["count"], read["best"]["policy"]
    if type(count) is not int or not 1 <= count <= logical_cores() or policy not in SPINS:
        raise ValueError(f"{count!r} threads with policy {policy!r}, of {logical_cores()} cores")
    return Threads(count=count, policy=policy, source="cache")


def measure() -> Threads:
    """Time every candidate and return the fastest, kept in the cache file unless the machine is busy."""
    options = candidates(logical_cores(), physical_cores())
    busy = is_busy()
    when = "again next time, since the machine is busy" if busy else "once on this machine"
    logger.info(f"measuring {len(options)} thread settings, {when}")
    timings = [Timing(count=n, policy=p, ms_per_step=probe(n, p)) for n, p in options]
    best = fastest(timings)
    if best is None:
        return Threads(count=physical_cores(), policy="passive", source="default")
    for timing in timings:
        mark = " <- fastest" if timing is best else ""
        ms = "failed" if timing.ms_per_step is None else f"{timing.ms_per_step:.2f} ms per step"
        logger.info(f"  {timing.count:3d} threads {timing.policy:8s} {ms}{mark}")
    if not busy:
        _write_cache(best, timings)
    return Threads(count=best.count, policy=best.policy, source="measured")


def fastest(timings: list[Timing]) -> Timing | None:
    """The timing with the lowest median, spinning handicapped by SPIN_GAIN; None when every probe failed."""
    done = [timing for timing in timings if timing.ms_per_step is not None]
    return min(done, key=_handicapped, default=None)


def _handicapped(timing: Timing) -> float:
    return (timing.ms_per_step or 0.0) * (SPIN_GAIN if timing.policy == "active" else 1.0)


def is_busy() -> bool:
    """Whether others want the cores: more than half of them were wanted over the last minute."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > logical_cores() / 2


def candidates(logical: int, physical: int) -> list[tuple[int, Policy]]:
    """Threads in {1, physical/2, physical, logical} by policy; one thread never waits, so it comes once."""
    counts = sorted({1, max(1, physical // 2), physical, logical})
    return [(n, p) for n in counts for p in (("passive",) if n == 1 else ("active", "passive"))]


def probe(count: int, policy: Policy) -> float | None:
    """Median milliseconds of a decode-like step in a fresh process; None when it fails or takes too long."""
    environ = {**os.environ, "OMP_NUM_THREADS": str(count), "OMP_WAIT_POLICY": policy.upper()}
    environ["GOMP_SPINCOUNT"] = SPINS[policy]
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # it imports what this process imports
    command = [sys.executable, "-P", str(Path(__file__).resolve()), str(PROBE_S)]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, timeout=PROBE_LIMIT_S, check=True)
        return float(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def decode_like_ms(seconds: float) -> float:
    """Median milliseconds of 12 layers of a small model at batch 16, timed for ``seconds``."""
    import torch

    x = torch.randn(16, 576)
    up, down = torch.randn(1536, 576) / 24, torch.randn(576, 1536) / 39
    head = torch.randn(8192, 576) / 24
    times: list[float] = []
    with torch.inference_mode():
        stop = time.perf_counter() + seconds
        while (start := time.perf_counter()) < stop or len(times) < 5:
            h = x
            for _ in range(12):
                h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
                h = h + torch.nn.functional.silu(h @ up.T) @ down.T
            (h @ head.T).softmax(-1)
            times.append(time.perf_counter() - start)
    return 1e3 * sorted(times)[len(times) // 2]


def logical_cores() -> int:
    """CPUs this process may use: its affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no control group, or "max"
        return cores


def physical_cores() -> int:
    """Cores without counting hardware threads twice; the logical number where the system does not say."""
    try:
        blocks = Path("/proc/cpuinfo").read_text(encoding="utf-8").strip().split("\n\n")
    except OSError:
        return logical_cores()
    allowed = os.sched_getaffinity(0)
    fields = [dict(_field(line) for line in block.splitlines() if ":" in line) for block in blocks]
    cores = {
        (cpu.get("physical id"), cpu["core id"])
        for cpu in fields
        if "core id" in cpu and int(cpu["processor"]) in allowed
    }
    return min(len(cores), logical_cores()) or logical_cores()


def _field(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip(), value.strip()


def cache_file() -> Path:
    """``~/.cache/ostinato/threads-<fingerprint>.json``; XDG_CACHE_HOME is honoured."""
    return cache_folder() / f"threads-{fingerprint()}.json"


def fingerprint() -> str:
    """A short hash of what the measurement depends on: processor, cores that we may use, torch."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line for line in cpuinfo if line.startswith("model name")), platform.processor())
    except OSError:
        model = platform.processor()
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "none"
    facts = (platform.system(), platform.machine(), model, logical_cores(), physical_cores(), torch_version)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def _write_cache(best: Timing, timings: list[Timing]) -> None:
    file = cache_file()
    text = json.dumps({"best": asdict(best), "timings": [asdict(t) for t in timings]}, indent=2)
    try:
        atomic_write(file, text)
    except OSError as error:  # a cache is a convenience: a read-only home only costs the next start
        warnings.warn(f"the thread measurement could not be cached in {file}: {error}", stacklevel=2)


if __name__ == "__main__":
    print(decode_like_ms(float(sys.argv[1])))
