"""Threads and OpenMP wait policy, chosen by a measurement and cached per machine.

A decode step is hundreds of small products, so the price of waking threads matters beside their number:
the products of the model that is run are timed. OpenMP reads its environment when torch is imported; so each
way of waiting is timed in a process of its own, and once torch is imported only the number can be set.

    cli -> configure("auto", model=...) -> environment | cache file | measure() -> a probe process per policy
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
from collections.abc import MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

from ostinato import isa
from ostinato.files import atomic_write, cache_folder, read_cached

logger = logging.getLogger(__name__)
Policy = Literal["active", "passive"]  # spin before sleeping, or sleep at once, while waiting for work
POLICIES: tuple[Policy, ...] = get_args(Policy)
# OMP_WAIT_POLICY=active alone spins for minutes and starves whatever shares the cores. Some 0.3 ms bridges
# the gap between two kernels of a decode step, which is all that spinning is good for here.
SPINS = {"active": "20000", "passive": "0"}  # GOMP_SPINCOUNT

PROBE_LIMIT_S = 120.0  # a process that takes longer, import of torch and compiler included, has failed
LOOK_S = 0.2  # seconds for which other load on the machine is observed
SPIN_GAIN = 1.1  # speed-up that spinning has to bring: it takes time from other work on the core


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """A choice: ``count`` OpenMP threads that wait by ``policy``; ``source`` is its origin."""

    count: int
    policy: Policy
    source: str = "given"  # given | environment | cache | measured | default

    def __str__(self) -> str:
        return f"{self.count} thread{'s' * (self.count > 1)}, wait policy {self.policy} ({self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The products to be timed: of a model by name or folder. ``dtype``: "auto", or that of the run."""

    model: str = "asset:seed-moe"
    dtype: str = "auto"
    native: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A measured candidate: us of all products of a token, sampled and trained; None: it failed."""

    count: int
    policy: Policy
    us_per_token: float | None


def configure(
    threads: int | Literal["auto"] = "auto",
    policy: Policy | Literal["auto"] = "auto",
    *,
    work: Products | None = Products(),
    environ: MutableMapping[str, str] = os.environ,
) -> Threads:
    """Choose, and write the choice into the environment that torch will read. A torch that is imported gets
    the number of threads only.

    Arguments take precedence, then OMP_NUM_THREADS and OMP_WAIT_POLICY if the user has set them, then the
    earlier measurement of ``work`` on this machine, then a measurement of some ten seconds. The wait policy
    of a measurement is used only with its number of threads; with another number, or on a busy machine, it
    is passive: two runs that both spin take five times as long. GOMP_SPINCOUNT stays if the user has set it
    and ``policy`` is "auto". ``work`` None: nothing is measured, because a GPU multiplies, and there is a
    thread per core.
    """
    choice = _choose_threads(threads, policy, work, environ)
    if "torch" in sys.modules:
        choice = _set_imported_torch(
            choice, spins="PASSIVE" not in environ.get("OMP_WAIT_POLICY", "").upper()
        )
    environ["OMP_NUM_THREADS"] = str(choice.count)
    environ["OMP_WAIT_POLICY"] = choice.policy.upper()
    if policy != "auto" or "GOMP_SPINCOUNT" not in environ:
        environ["GOMP_SPINCOUNT"] = SPINS[choice.policy]
    return choice


def _set_imported_torch(choice: Threads, *, spins: bool) -> Threads:
    """Set the number of threads of the imported torch, and return the choice with this number. It is never
    more than torch has, unless it is given. If threads spin (``spins``) against a measured choice, there are
    no more than idle cores, since threads that wait for a core take ten times as long."""
    torch, is_measured = sys.modules["torch"], choice.source in ("cache", "measured")
    if choice.source != "given":
        choice = replace(choice, count=min(choice.count, torch.get_num_threads()))
    if spins and is_measured and choice.policy == "passive":
        idle = round(count_logical_cores() * (1 - measure_busy_share()))
        choice = replace(choice, count=max(1, min(choice.count, idle)))
    if spins and choice.count > 1 and choice.policy == "passive" and choice.source != "default":
        logger.warning(
            f"torch was imported first, so its {choice.count} threads spin while they wait, which is slow on "
            "a busy machine; set OMP_WAIT_POLICY=PASSIVE in the environment before torch is imported"
        )
    torch.set_num_threads(choice.count)
    return choice


def _choose_threads(
    threads: int | Literal["auto"],
    policy: Policy | Literal["auto"],
    work: Products | None,
    environ: MutableMapping[str, str],
) -> Threads:
    """Choose as ``configure`` says, and measure if that is needed; the environment is only read."""
    set_count, set_policy = environ.get("OMP_NUM_THREADS", ""), environ.get("OMP_WAIT_POLICY", "").lower()
    measurement = None if work is None else read_choice(work)
    if threads != "auto":
        choice = Threads(count=threads, policy="passive", source="given")
    elif set_count.isdecimal() and int(set_count) > 0:
        choice = Threads(count=int(set_count), policy="passive", source="environment")
    elif work is None:
        choice = Threads(count=count_physical_cores(), policy="passive", source="default")
    else:
        choice = measurement = measurement or measure(work)
    if measurement is not None and measurement.count == choice.count:  # its policy was timed with this count
        # asked twice: the load that is seen first may be short
        is_loaded = measurement.source == "cache" and is_busy() and is_busy()
        may_spin = measurement.policy == "active" and not is_loaded
        choice = replace(choice, policy="active" if may_spin else "passive")
    user_policy = next((name for name in POLICIES if name == set_policy), choice.policy)
    return replace(choice, policy=user_policy if policy == "auto" else policy)


def read_choice(work: Products) -> Threads | None:
    """Return the choice that was measured earlier on this machine. None if there is none, if its file is not
    readable, or if it was measured while the machine was busy, and now it is not."""
    choice, was_busy = read_cached(cache_file(work), _parse_cache) or (None, False)
    return None if was_busy and not is_busy() else choice


def _parse_cache(read: Any) -> tuple[Threads, bool]:
    """Convert a cache file to (choice, whether the machine was busy). Raises ValueError, TypeError or
    LookupError for contents that ``_write_cache`` never wrote."""
    count, policy = read["best"]["count"], read["best"]["policy"]
    if type(count) is not int or not 1 <= count <= count_logical_cores() or policy not in SPINS:
        raise ValueError(f"{count!r} threads with policy {policy!r}, of {count_logical_cores()} cores")
    return Threads(count=count, policy=policy, source="cache"), bool(read.get("busy"))


def measure(work: Products) -> Threads:
    """Time every candidate, write the fastest to the cache file, and return it; without any timing, return a
    default. A result of a busy machine never replaces a valid one in the cache."""
    counts = list_candidates(count_logical_cores(), count_physical_cores())
    was_busy = is_busy()
    schedule = "and again when the machine is no longer busy" if was_busy else "once on this machine"
    logger.info(f"measuring threads for products of {work.model}, {schedule}")
    timings = [
        Timing(count=count, policy=policy, us_per_token=us)
        for policy in POLICIES
        for count, us in probe(work, policy, counts).items()
    ]
    best = find_fastest(timings)
    if best is None:
        return Threads(count=count_physical_cores(), policy="passive", source="default")
    for timing in timings:
        us = f"{timing.us_per_token:,.0f} us per token" if timing.us_per_token else "failed"
        logger.info(
            f"  {timing.count:3d} threads {timing.policy:8s} {us}{' <- fastest' if timing is best else ''}"
        )
    if not was_busy or read_choice(work) is None:
        _write_cache(work, best, timings, was_busy)
    return Threads(count=best.count, policy=best.policy, source="measured")


def find_fastest(timings: list[Timing]) -> Timing | None:
    """Return the fastest timing, where those of spinning count SPIN_GAIN times; None if every probe
    failed."""
    handicapped_us = {
        t: us * (SPIN_GAIN if t.policy == "active" else 1.0) for t in timings if (us := t.us_per_token)
    }
    return min(handicapped_us, key=handicapped_us.__getitem__, default=None)


def is_busy() -> bool:
    """Observe the cores for LOOK_S, and return whether they work for over a quarter of it. The load average
    is of no use: it includes an earlier run for minutes."""
    return measure_busy_share() > 0.25


def measure_busy_share() -> float:
    """Measure the share of LOOK_S in which our cores work, from 0 to 1; 0 if that is unknown."""
    if (old_ticks := _read_ticks()) is None:
        return 0.0
    time.sleep(LOOK_S)
    busy_ticks, idle_ticks = (b - a for a, b in zip(old_ticks, _read_ticks() or old_ticks, strict=True))
    return busy_ticks / max(1, busy_ticks + idle_ticks)


def _read_ticks() -> tuple[int, int] | None:
    """Return (busy ticks, idle ticks) of the cores that we may use; None where these are unknown."""
    try:
        lines = Path("/proc/stat").read_text(encoding="utf-8").splitlines()
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    ticks = [[int(word) for word in words[1:]] for line in lines if (words := line.split())[0] in names]
    idle = sum(sum(counts[3:5]) for counts in ticks)  # idle and waiting for a disk
    return sum(sum(counts[:8]) for counts in ticks) - idle, idle


def list_candidates(logical: int, physical: int) -> list[int]:
    """Return the numbers of threads to time: {1, physical/2, physical, logical}."""
    return sorted({1, max(1, physical // 2), physical, logical})


def probe(work: Products, policy: Policy, counts: Sequence[int]) -> dict[int, float | None]:
    """Measure microseconds per token for each number of threads, in a new process; None for all if that
    fails. A single thread never waits, so it is timed under the passive policy only, and is not in the
    result of the other."""
    counts = [count for count in counts if count > 1 or policy == "passive"]
    if not counts:
        return {}
    environ = {**os.environ, "OMP_NUM_THREADS": str(max(counts)), "OMP_WAIT_POLICY": policy.upper()}
    environ["GOMP_SPINCOUNT"] = SPINS[policy]
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # it must find the modules that this process finds
    command = [sys.executable, "-P", "-m", "ostinato.engine.products", json.dumps([asdict(work), counts])]
    try:
        process = subprocess.run(command, env=environ, capture_output=True, timeout=PROBE_LIMIT_S, check=True)
        return dict(zip(counts, map(float, json.loads(process.stdout.splitlines()[-1])), strict=True))
    except (OSError, ValueError, TypeError, IndexError, subprocess.SubprocessError):
        return dict.fromkeys(counts)


def count_logical_cores() -> int:
    """Count the CPUs that this process may use: its affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no control group, or "max"
        return cores


def count_physical_cores() -> int:
    """Count cores without hardware threads; the logical number where the system does not report them."""
    try:
        blocks = Path("/proc/cpuinfo").read_text(encoding="utf-8").strip().split("\n\n")
    except OSError:
        return count_logical_cores()
    allowed = os.sched_getaffinity(0)
    fields = [
        {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in block.splitlines())}
        for block in blocks
    ]
    cores = {
        (cpu.get("physical id"), cpu["core id"])
        for cpu in fields
        if "core id" in cpu and int(cpu["processor"]) in allowed
    }
    return min(len(cores), count_logical_cores()) or count_logical_cores()


def cache_file(work: Products) -> Path:
    """Return ``~/.cache/ostinato/threads-<fingerprint>-<products>.json``; XDG_CACHE_HOME is honoured."""
    digest = hashlib.sha256(repr((isa.effective_cap(), work)).encode()).hexdigest()[:8]
    return cache_folder() / f"threads-{fingerprint()}-{digest}.json"


def fingerprint() -> str:
    """Return a short hash of what the measurement depends on: processor, cores that we may use, torch."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line for line in cpuinfo if line.startswith("model name")), platform.processor())
    except OSError:
        model = platform.processor()
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "none"
    facts = (
        platform.system(),
        platform.machine(),
        model,
        count_logical_cores(),
        count_physical_cores(),
        torch_version,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def _write_cache(work: Products, best_timing: Timing, timings: list[Timing], busy: bool) -> None:
    """Write the cache file; a failure is only a warning."""
    file = cache_file(work)
    tree = {"best": asdict(best_timing), "timings": [asdict(t) for t in timings], "busy": busy}
    try:
        atomic_write(file, json.dumps(tree, indent=2))
    except OSError as error:  # a cache is a convenience: a read-only home only costs the next start
        warnings.warn(f"the thread measurement could not be cached in {file}: {error}", stacklevel=2)
