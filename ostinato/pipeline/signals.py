"""How a run is asked to stop: Ctrl-C once, Ctrl-C twice, SIGTERM.

Ctrl-C        the running step is finished, then the run saves and ends
Ctrl-C again  what runs is cancelled and KeyboardInterrupt raised; all that was reported is on the disk
SIGTERM       as the first Ctrl-C, but a step that is not done within ``grace_s`` seconds is abandoned
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


class Abandoned(Exception):
    """The step was given up because the grace period of a SIGTERM was over."""


class StopSignals:
    """A context in which the signals above are heard; outside the main thread, where Python delivers no
    signals, it hears nothing. To be entered inside a running event loop."""

    def __init__(self, grace_s: float) -> None:
        self.received: signal.Signals | None = None
        self._grace_s = grace_s
        self._expired, self._killed, self._blocking = False, False, False
        self._task: asyncio.Task[Any] | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    async def bounded(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``. When the grace period ends or a second Ctrl-C comes first, it is cancelled
        and Abandoned or KeyboardInterrupt raised."""
        if self._expired:
            work.close()
            raise Abandoned
        self._task = asyncio.ensure_future(work)
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._killed:
                raise KeyboardInterrupt from None
            if self._expired:
                raise Abandoned from None
            raise
        finally:
            self._task = None

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Around work that keeps the event loop from running: no cancellation can reach it."""
        self._blocking = True
        try:
            yield
        finally:
            self._blocking = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None:
            # Raised inside a task, KeyboardInterrupt would tear down the event loop around the others: they
            # are cancelled in order instead, unless no task can listen or that was tried before.
            if self._killed or self._blocking or self._task is None:
                raise KeyboardInterrupt
            self._killed = True
            self._loop.call_soon_threadsafe(self._task.cancel)
        elif number == signal.SIGTERM and self.received is not signal.SIGTERM:
            self._loop.call_soon_threadsafe(self._loop.call_later, self._grace_s, self._expire)
        self.received = self.received if self.received is signal.SIGTERM else signal.Signals(number)

    def _expire(self) -> None:
        self._expired = True
        if self._task is not None:
            self._task.cancel()
