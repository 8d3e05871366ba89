"""Joules, where the machine counts them: powercap (RAPL) for processors and memory, NVML for NVIDIA GPUs.

Counters of the hardware, read as they are; nothing is estimated, and a machine without counters has none. A
processor's counter is that of the whole machine, whoever else uses it.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
MOST_WATTS = 1000.0  # that one processor package draws: tells whether its counter can have wrapped twice
LOOK_EVERY_S = 20.0  # such a counter may wrap within a minute

Counter = Callable[[], float | None]  # joules since some moment; None: not known any more


class Rapl:
    """One powercap domain, unwrapped. Its counter starts again at 0 beyond ``max_energy_range_uj``."""

    def __init__(self, domain: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = domain / "energy_uj"
        self._range = int((domain / "max_energy_range_uj").read_text())
        self._clock, self._joules = clock, 0.0
        self._at, self._last = clock(), int(self._file.read_text())

    def __call__(self) -> float | None:
        """None from when it was left alone so long that the counter may have wrapped twice, or unreadable."""
        if self._last is None:
            return None
        try:
            now, at = int(self._file.read_text()), self._clock()
        except (OSError, ValueError):
            now, at = None, self._at
        if now is None or (at - self._at) * MOST_WATTS * 1e6 > self._range:
            self._last = None
            return None
        self._joules += (now - self._last if now >= self._last else now + self._range - self._last) / 1e6
        self._at, self._last = at, now
        return self._joules


def rapl(root: Path = POWERCAP) -> dict[str, list[Counter]]:
    """The packages ("processor") and their memory, as far as they can be read; not "psys", which has both in
    it, nor the parts of a package."""
    found: dict[str, list[Counter]] = {"processor": [], "memory": []}
    for domain in sorted(root.glob("intel-rapl:*")):  # the name of the interface, on AMD too
        try:
            name = (domain / "name").read_text().strip()
            if name.startswith("package") and re.fullmatch(r"intel-rapl:\d+", domain.name):
                found["processor"].append(Rapl(domain))
            elif name == "dram":
                found["memory"].append(Rapl(domain))
        except (OSError, ValueError):  # readable by root alone, or no counter
            continue
    return found


def nvml(uuids: Sequence[str], library: str = "libnvidia-ml.so.1") -> list[Counter]:
    """The total energy counters of the GPUs with these UUIDs ("GPU-..."); none where one of them has none."""
    try:
        lib = ctypes.CDLL(library)
    except OSError:
        return []
    if not uuids or lib.nvmlInit_v2() != 0:
        return []
    counters = [_gpu(lib, uuid) for uuid in uuids]
    return [one for one in counters if one is not None] if all(one and one() for one in counters) else []


def _gpu(lib: ctypes.CDLL, uuid: str) -> Counter | None:
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    if lib.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != 0:
        return None

    def read() -> float | None:
        failed = lib.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
        return None if failed else millijoules.value / 1e3

    return read


class Meter:
    """The sum of several counters, by what they count, looked at often enough that none wraps unseen. None
    without counters, and from when one of them cannot tell any more."""

    def __init__(self, counters: Mapping[str, Sequence[Counter]], every_s: float = LOOK_EVERY_S) -> None:
        self.kinds = tuple(sorted(kind for kind, some in counters.items() if some))
        self._counters = tuple(counter for some in counters.values() for counter in some)
        self._lock = threading.Lock()
        if self._counters:
            threading.Thread(target=self._look, args=(every_s,), daemon=True).start()

    def __call__(self) -> float | None:
        with self._lock:
            found = [counter() for counter in self._counters]
        told = [joules for joules in found if joules is not None]
        return sum(told) if told and len(told) == len(found) else None

    def _look(self, every_s: float) -> None:
        while True:
            time.sleep(every_s)
            self()
