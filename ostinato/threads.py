"""Work in separate threads."""

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
    """Raise SystemExit in the thread with this id at its next step of Python, which ends it silently, so that
    an abandoned loop does not slow down all others."""
    _raise_in(thread, SystemExit)


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise ``error`` in another thread, by its id."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


def within(work: Callable[[], T], timeout_s: float) -> T:
    """The result of ``work()``, done in a new thread. Raises TimeoutError after ``timeout_s``.

    The thread then goes on, and a process that ends does not wait for it.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as raised:
            future.set_exception(raised)
        except BaseException as raised:  # SystemExit would end the caller
            future.set_exception(RuntimeError(f"{raised!r} in a thread"))

    threading.Thread(target=run, daemon=True).start()
    return future.result(timeout_s)


def outside_loop(work: Callable[[], T]) -> T:
    """The result of ``work()``, which starts an event loop: done here, or in a new thread if this thread
    already runs a loop (a notebook). Ctrl-C then ends the work, and is raised when it has ended."""
    loop = None
    with suppress(RuntimeError):
        loop = asyncio.get_running_loop()
    if loop is None:  # outside of the handler, which would be the context of every error of ``work``
        return work()
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as raised:
            future.set_exception(raised)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return future.result()
    except KeyboardInterrupt:
        if thread.is_alive() and thread.ident is not None:
            _raise_in(thread.ident, KeyboardInterrupt)
        return future.result()


async def in_thread(work: Callable[[], T]) -> T:
    """The result of ``work()``, done in a new thread while the event loop goes on.

    If the caller is cancelled the thread goes on, and a process that ends does not wait for it.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except StopIteration as raised:  # no future can hold this
            error = RuntimeError(f"{raised!r} in a thread")
        except BaseException as raised:  # any error is passed to the caller
            error = raised
        with suppress(RuntimeError):  # the loop is closed, so there is no caller
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    return await future
