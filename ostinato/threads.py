"""Work in a thread of its own."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def end_python(thread: int) -> None:
    """Raise SystemExit in the thread with this id at its next step of Python: a loop that was given up would
    go on taking the interpreter from all others. Threads end with it without a word."""
    _raise_in(thread, SystemExit)


def _raise_in(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def within(work: Callable[[], T], timeout_s: float) -> T:
    """The result of ``work()``, done in a thread of its own. Raises TimeoutError after ``timeout_s``.

    The thread is then left to itself, and a process that ends does not wait for it.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except Exception as raised:
            done.set_exception(raised)
        except BaseException as raised:  # SystemExit would end the caller
            done.set_exception(RuntimeError(f"{raised!r} in a thread"))

    threading.Thread(target=run, daemon=True).start()
    return done.result(timeout_s)


def outside_loop(work: Callable[[], T]) -> T:
    """The result of ``work()``, which starts an event loop: done here, or in a thread of its own where this
    thread already runs a loop (a notebook). Ctrl-C then ends the work, and is raised when it has ended."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as raised:
            done.set_exception(raised)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return done.result()
    except KeyboardInterrupt:
        if thread.is_alive() and thread.ident is not None:
            _raise_in(thread.ident, KeyboardInterrupt)
        return done.result()


async def in_thread(work: Callable[[], T]) -> T:
    """The result of ``work()``, done in a thread of its own while the event loop goes on.

    A cancelled caller leaves the thread to itself, and a process that ends does not wait for it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)  # type: ignore[arg-type]
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except StopIteration as raised:  # which no future can hold
            error = RuntimeError(f"{raised!r} in a thread")
        except BaseException as raised:  # an edge of the process: whatever it is, it is the caller's
            error = raised
        with suppress(RuntimeError):  # of a loop that is closed: there is no caller any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await done
