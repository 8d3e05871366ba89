"""What a worker is to its caller: an object elsewhere, whose methods are called with a bound in time.

Arguments and answers travel as ``payload`` has them, not as Ray does, and what a method raises is raised at
the caller as itself.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from ostinato.workers.lost import WorkerKind, WorkerLost
from ostinato.workers.payload import opened, sealed

SLICE_S = 1.0  # between two looks at the cluster and the worker while an answer is awaited


class WorkerFault(RuntimeError):
    """A method of a worker raised what cannot travel; its words are here."""


class Remote(Protocol):
    """One worker. Calls begin in the order in which they are made; the first waits until it is built."""

    name: str

    async def call(self, method: str, *arguments: Any, within_s: float, shared: bool = False) -> Any:
        """What ``method`` of the worker's object returns, or raises. ``shared``: other workers are about to
        get the same arguments, so they are packed once. Raises WorkerLost when the worker died, when it gives
        no sign of life, and after ``within_s`` seconds without progress of its object; a final one with the
        cluster."""
        ...

    def wait(self, method: str, *arguments: Any, within_s: float) -> Any:
        """``call`` for a thread that may block."""
        ...

    def kill(self) -> None:
        """End it, at once; nothing is said when it is gone already."""
        ...


class Patience:
    """How long an answer is waited for: until for ``within_s`` the worker's object has made no progress, or
    for ``silence_s`` the worker has given no sign of life, which ``ask`` asks it for.

    Seconds are counted as slices in which somebody waited: while the event loop is blocked nobody is late.
    """

    def __init__(
        self, ask: Callable[[], Future[float]], name: str, what: str, within_s: float, silence_s: float
    ) -> None:
        self._ask, self._name, self._what = ask, name, what
        self._within_s, self._silence_s = within_s, silence_s
        self._idle, self._silent, self._progress = 0.0, 0.0, 0.0
        self._sign: Future[float] | None = None  # nobody is asked in the first slice, where most answers come

    def wear(self, seconds: float = SLICE_S) -> None:
        """A slice has passed in vain. Raises WorkerLost when it was the last."""
        self._idle, self._silent = self._idle + seconds, self._silent + seconds
        if self._sign is None:
            self._sign = self._ask()
        elif self._sign.done() and self._sign.exception() is None:
            if (progress := self._sign.result()) > self._progress:
                self._idle, self._progress = 0.0, progress
            self._silent, self._sign = 0.0, self._ask()
        for passed, limit in ((self._silent, self._silence_s), (self._idle, self._within_s)):
            if passed >= limit:
                raise WorkerLost(WorkerKind.of(self._name), f"{self._what} in {limit:g} s", self._name)


def answer(value: Any) -> bytes:
    """What a worker sends back when a method has returned."""
    return sealed((True, value))


def refusal(error: BaseException, name: str) -> bytes:
    """What a worker sends back when a method has raised: the exception, with where it came from as a note."""
    lines = "".join(traceback.format_exception(error))
    error.add_note(f"in {name}:\n{lines}")
    try:
        payload = sealed((False, error.with_traceback(None)))
        opened(payload)  # an exception whose __init__ wants more than a message only breaks here
    except Exception:
        told = WorkerFault(f"{name} raised {type(error).__name__}: {error}")
        told.add_note(lines)
        payload = sealed((False, told))
    return payload


def outcome(payload: bytes) -> Any:
    """At the caller: the value, or the exception raised."""
    fine, value = opened(payload)
    if fine:
        return value
    raise value


__all__ = [
    "SLICE_S",
    "Patience",
    "Remote",
    "WorkerFault",
    "answer",
    "outcome",
    "refusal",
]
