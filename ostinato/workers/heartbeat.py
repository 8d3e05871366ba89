"""Seconds since something last changed, and a thread that notices when a peer stops answering.

Seconds are counted in slices that were observed, not read from a clock: a machine that slept, or an event
loop that was blocked, does not make a worker late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class Idle:
    """Seconds since a value last changed."""

    def __init__(self, value: Any = None) -> None:
        self.seconds = 0.0
        self._value = value

    def after(self, passed_s: float, value: Any) -> float:
        """Record that ``passed_s`` later the value is ``value``; returns the seconds without a change."""
        self.seconds = self.seconds + passed_s if value == self._value else 0.0
        self._value = value
        return self.seconds


class Heartbeat:
    """Calls ``beat(passed_s)`` every ``every_s`` seconds in one thread, and counts in another how long no
    beat has returned, as a beat may hang or raise. The first beat that returns True ends both.

    ``on_silence`` is called once, after ``silence_s`` without a beat, with the seconds and the last exception
    in one line ("" if there was none).
    """

    def __init__(
        self,
        beat: Callable[[float], bool],
        on_silence: Callable[[float, str], None],
        *,
        every_s: float,
        silence_s: float,
        name: str,
    ) -> None:
        self._beat, self._on_silence = beat, on_silence
        self._every_s, self._silence_s = every_s, silence_s
        self._beats, self._fault, self.stopped = 0, "", threading.Event()
        # daemons: a thread that hangs in a beat must not keep the process from ending
        works = (self._talk, self._count)
        self._threads = [threading.Thread(target=work, name=name, daemon=True) for work in works]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, within_s: float) -> None:
        """Returns when both threads have ended, or after ``within_s`` seconds."""
        self.stopped.set()
        deadline = time.monotonic() + within_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _talk(self) -> None:
        before = time.monotonic()
        while not self.stopped.is_set():
            now = time.monotonic()
            passed_s, before = min(now - before, 2 * self._every_s), now
            try:
                if self._beat(passed_s):
                    self.stopped.set()
                    return
                self._beats += 1
            except Exception as error:  # whatever the peer's library raises: _count says for how long
                self._fault = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.stopped.wait(self._every_s)

    def _count(self) -> None:
        idle = Idle(0)
        while not self.stopped.wait(self._every_s):
            if idle.after(self._every_s, self._beats) >= self._silence_s:
                self._on_silence(idle.seconds, self._fault)
                self.stopped.set()
                return
