"""What a process and all that it has started use of the machine, looked at from outside: the same for all
contenders. Linux."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event, Thread

EVERY_S = 0.1
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Meter:
    """A context: between, ``follow(pid)`` is called once."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float, float]] = []  # Unix seconds, processor seconds, peak MB
        self._over = Event()
        self.started = 0.0

    def follow(self, pid: int) -> None:
        self.started = time.time()
        self._seen.append((self.started, 0.0, 0.0))
        self._thread = Thread(target=self._look, args=(pid,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self.started:  # else what was to be followed has failed to start, which is the error to be seen
            self._thread.join()

    def _look(self, pid: int) -> None:
        while not self._over.wait(EVERY_S):
            seen = [one for one in map(used, family(pid)) if one]
            if not seen:
                return
            _, seconds, peak = self._seen[-1]
            now = (sum(s for s, _ in seen), sum(mb for _, mb in seen))
            self._seen.append((time.time(), max(seconds, now[0]), max(peak, now[1])))

    def at(self, unix: float) -> tuple[float, float]:
        """(processor seconds, peak MB) by then; the peak is the sum of what each process has had at most."""
        after = min(bisect_left(self._seen, (unix,)), len(self._seen) - 1)
        (t0, s0, _), (t1, s1, peak) = self._seen[max(0, after - 1)], self._seen[after]
        share = 1.0 if t1 == t0 else min(1.0, max(0.0, (unix - t0) / (t1 - t0)))
        return s0 + share * (s1 - s0), peak

    def course(
        self, start: float, ends: Sequence[float], pauses: Sequence[Sequence[float]]
    ) -> dict[str, list[float]]:
        """By cost, from ``start`` to each of ``ends`` (Unix seconds), without what lies in ``pauses``."""
        course: dict[str, list[float]] = {"wall_s": [], "from_start_s": [], "device_s": [], "peak_mb": []}
        for end in (start, *ends):
            before = [(a, b) for a, b in pauses if b <= end]
            wall = end - start - sum(b - a for a, b in before)
            device = self.at(end)[0] - self.at(start)[0]
            course["wall_s"].append(wall)
            course["from_start_s"].append(start - self.started + wall)
            course["device_s"].append(device - sum(self.at(b)[0] - self.at(a)[0] for a, b in before))
            course["peak_mb"].append(self.at(end)[1])
        return course


def family(pid: int) -> Iterator[int]:
    """It and its descendants."""
    yield pid
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = file.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from family(int(child))


def used(pid: int) -> tuple[float, float] | None:
    """(processor seconds, with those of its children that have ended; most MB of memory it had); None when it
    is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        peak = Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()
    except OSError:
        return None
    return (TICK_S * sum(map(int, fields[11:15])), int(peak[0]) / 1024) if peak else None
