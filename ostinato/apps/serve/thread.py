"""An engine in a thread and an event loop of its own, so that passes and HTTP do not hold each other up.

A pass is one native call that releases the GIL. Calls may come from any other event loop.

The engine is created in that thread too: each thread that ran a kernel keeps a team of OpenMP workers, and
with more workers than cores libgomp puts waiting ones to sleep, which halves the speed of all passes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ostinato.launch.engine import AnyEngine
from ostinato.types import Completion, Emitted, Request

T = TypeVar("T")
Event = tuple[int, Emitted | Completion]
END_S = 5.0


async def run_in_own_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run ``function`` in a thread that ends with it, with its team of OpenMP workers, and return its
    result."""
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


class _Post:
    """Passes events to another event loop, which is woken once for all queued events."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Queue[Any], Any]] = deque()

    def send(self, loop: asyncio.AbstractEventLoop, to: asyncio.Queue[Any], event: Any) -> None:
        if loop.is_closed():  # nobody reads this event, or those still queued
            self._waiting.clear()
            return
        self._waiting.append((to, event))
        if len(self._waiting) == 1:
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._waiting:
            queue, event = self._waiting[0]
            queue.put_nowait(event)
            self._waiting.popleft()  # last: a ``send`` to an empty queue wakes the loop again


class EngineThread:
    """Makes an engine with ``make`` and runs it in the same thread until ``close``. An exception of ``make``
    is raised here."""

    def __init__(self, make: Callable[[], AnyEngine]) -> None:
        self._loop, self._post = asyncio.new_event_loop(), _Post()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()

        async def begin() -> AnyEngine:
            return make()

        try:
            self._engine = asyncio.run_coroutine_threadsafe(begin(), self._loop).result()
        except BaseException:
            self.close()
            raise

    async def generate(self, requests: Sequence[Request], limit_s: float) -> AsyncGenerator[Event, None]:
        """Yield (index, tokens of a pass) as they come and (index, completion) at the end of each.

        Leaving the iteration frees the memory of the requests, after the current pass. Raises TimeoutError
        after ``limit_s``, and the engine's exceptions: ValueError for a request that can never fit.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

        def send(event: Event | BaseException | None) -> None:
            self._post.send(loop, events, event)

        async def run() -> None:
            try:
                listener: Callable[[int, Emitted], None] = lambda index, emitted: send((index, emitted))  # noqa: E731
                async for index, completion in self._engine.generate(requests, listener):
                    send((index, completion))
            except Exception as error:  # it is raised at the caller
                send(error)
            else:
                send(None)

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        limit = loop.call_later(limit_s, events.put_nowait, TimeoutError())
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            limit.cancel()
            future.cancel()

    async def call(self, function: Callable[[AnyEngine], T]) -> T:
        """Run ``function`` between two passes, as the engine is not thread-safe, and return its result."""

        async def run() -> T:
            return function(self._engine)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))

    def close(self) -> None:
        """Cancel all running work and end the thread."""

        async def end() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        if not self._thread.is_alive():
            self._loop.close()
