"""Stops a run: Ctrl-C once, Ctrl-C twice, SIGTERM.

Ctrl-C        the running step is finished, then the run saves and ends
Ctrl-C again  running work is cancelled and KeyboardInterrupt raised; all reported rows are on the disk
SIGTERM       as the first Ctrl-C, and groups in flight may end too; work that is not done within ``grace_s``
              seconds is abandoned, but for an optimizer step

A terminal that is closed ends a run as it ends any program (SIGHUP), unless ``nohup`` started it: the run can
be resumed from its last checkpoint.

A wait without progress is ended by a ``Watchdog``, which reports what was waited for.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from ostinato.failure import Lost
from ostinato.threads import T


class Ended(KeyboardInterrupt):
    """SIGTERM outside the loop of a run, where no step is to be finished."""

    why = "terminated"  # in the ledger


@contextmanager
def raise_at_sigterm() -> Iterator[None]:
    """Raise Ended at the first SIGTERM within the context, so that everything open is closed in order; later
    ones are ignored. ``StopSignals`` takes precedence. Outside the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_ended(number: int, frame: FrameType | None) -> None:
        signal.signal(number, lambda *again: None)
        raise Ended

    old_handler = signal.signal(signal.SIGTERM, raise_ended)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old_handler)


class Abandoned(Exception):
    """The step was abandoned because the grace period of a SIGTERM was over."""


class Stalled(Lost):
    """There was no progress for the time that the plan allows."""


class StopSignals:
    """A context in which the signals above are handled. Outside the main thread, where Python delivers no
    signals, it handles those of ``relay`` alone. Enter it inside a running event loop. ``at_once``: the first
    Ctrl-C acts as the second."""

    def __init__(self, grace_s: float, *, at_once: bool = False, relay: SignalRelay | None = None) -> None:
        self._relay = relay
        self.received: signal.Signals | None = None
        self._grace_s, self._at_once = grace_s, at_once
        self._is_expired, self._is_cancelled, self._is_blocking, self._is_finishing = (
            False,
            False,
            False,
            False,
        )
        self._error: Exception | None = None
        self._task: asyncio.Task[Any] | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        self._loop = asyncio.get_running_loop()
        if self._relay is not None:
            self._relay.add(self.handle_signal)
        elif threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self.handle_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._relay is not None:
            self._relay.remove(self.handle_signal)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @property
    def is_limited(self) -> bool:
        """Whether only the grace period is left."""
        return self.received is signal.SIGTERM

    async def run_bounded(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``. It is cancelled when the grace period ends, a second Ctrl-C comes
        or ``give_up`` is called; then Abandoned, KeyboardInterrupt or the error of ``give_up`` is raised. If
        the grace period is over already, ``work`` is not begun."""
        if self._is_expired:
            work.close()
            raise Abandoned
        self._task = asyncio.ensure_future(work)
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._is_cancelled:
                raise KeyboardInterrupt from None
            if self._error is not None:
                raise self._error from None
            if self._is_expired:
                raise Abandoned from None
            raise
        finally:
            self._task = None

    def give_up(self, error: Exception) -> None:
        """Cancel the running work; its caller gets ``error``. Without running work nothing happens."""
        if self._task is not None:
            self._error = error
            self._task.cancel()

    @contextmanager
    def mark_blocking(self) -> Iterator[None]:
        """Mark the context as work that keeps the event loop from running: no cancellation can reach it."""
        self._is_blocking = True
        try:
            yield
        finally:
            self._is_blocking = False

    @contextmanager
    def mark_finishing(self) -> Iterator[None]:
        """Mark the context as work that the end of the grace period does not cancel."""
        self._is_finishing = True
        try:
            yield
        finally:
            self._is_finishing = False

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Store the signal; cancel the work at a second Ctrl-C, and start the grace period at a SIGTERM.
        Raises KeyboardInterrupt at a second Ctrl-C where there is no work that can be cancelled."""
        if number == signal.SIGINT and (self._at_once or self.received is not None):
            # Raised inside a task, KeyboardInterrupt would tear down the event loop around the other tasks:
            # these are cancelled in order instead, unless no task can be cancelled or that was tried before.
            if self._is_cancelled or self._is_blocking or self._task is None:
                raise KeyboardInterrupt
            self._is_cancelled = True
            self._loop.call_soon_threadsafe(self._task.cancel)
        elif number == signal.SIGTERM and not self.is_limited:
            self._loop.call_soon_threadsafe(self._loop.call_later, self._grace_s, self._end_grace)
        self.received = self.received if self.is_limited else signal.Signals(number)

    def _end_grace(self) -> None:
        """Cancel the running work, unless it may finish; what follows is abandoned."""
        self._is_expired = True
        if self._task is not None and not self._is_finishing:
            self._task.cancel()


class SignalRelay:
    """A context of the main thread that hands Ctrl-C and SIGTERM on to ``StopSignals`` in other threads, also
    to those that are added later. A second Ctrl-C is raised here too. In another thread it hands on none."""

    def __init__(self) -> None:
        self._handlers: list[Callable[[int, FrameType | None], None]] = []
        self._received: list[int] = []
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalRelay:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._hand_on)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def add(self, handler: Callable[[int, FrameType | None], None]) -> None:
        """Call ``handler`` with each signal, and now with the first one if there was any."""
        self._handlers.append(handler)
        for number in self._received[:1]:
            handler(number, None)

    def remove(self, handler: Callable[[int, FrameType | None], None]) -> None:
        self._handlers.remove(handler)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
        for handler in tuple(self._handlers):
            # of a thread that cannot be interrupted, and of a run whose loop has just been closed
            with suppress(KeyboardInterrupt, RuntimeError):
                handler(number, frame)
        if number == signal.SIGINT and self._received.count(number) > 1:
            raise KeyboardInterrupt


class Watchdog:
    """Ends a wait without progress. ``amount`` grows with progress (tokens sampled); other progress is
    reported by calls of ``on_progress``. ``waiting`` describes what is waited for.

    Idle time is counted in slices of the event loop: while the loop is blocked, no worker can make progress,
    so none is considered late.
    """

    SLICES = 20  # of the limit: checks until the wait is ended

    def __init__(
        self, limit_s: float, signals: StopSignals, amount: Callable[[], float], waiting: Callable[[], str]
    ) -> None:
        self._limit_s, self._signals, self._amount, self._waiting = limit_s, signals, amount, waiting
        self._idle_slices, self._old_amount = 0, amount()

    def on_progress(self) -> None:
        self._idle_slices = 0

    async def watch(self) -> None:
        """Check progress in every slice, until cancelled. After SLICES without any, and after every further
        one, cancel the running work with ``Stalled``."""
        while True:
            await asyncio.sleep(self._limit_s / self.SLICES)
            self._idle_slices += 1
            if (amount := self._amount()) != self._old_amount:
                self._old_amount = amount
                self.on_progress()
            if self._idle_slices >= self.SLICES:
                self._signals.give_up(
                    Stalled(
                        f"nothing has got on for {self._limit_s:g} s (pipeline.watch_s): {self._waiting()}"
                    )
                )
