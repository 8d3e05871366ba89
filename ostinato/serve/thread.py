"""An engine in a thread and an event loop of its own, so that passes and HTTP do not wait for each other.

A pass is one native call without the interpreter's lock. Calls come from any other event loop.

The engine is made in that thread too: every thread that has run a kernel keeps a team of OpenMP workers, and
with more workers than cores libgomp sends those that wait to sleep, which halves the speed of all passes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

from ostinato.engine.local import LocalEngine
from ostinato.types import Completion, Emitted, Request

T = TypeVar("T")
Event = tuple[int, Emitted | Completion]
END_S = 5.0


class _Post:
    """Events on their way to another event loop, which is woken once for all that are there."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Queue[Any], Any]] = deque()

    def send(self, loop: asyncio.AbstractEventLoop, to: asyncio.Queue[Any], event: Any) -> None:
        if loop.is_closed():  # it has no reader any more, nor what was left on its way
            self._waiting.clear()
            return
        self._waiting.append((to, event))
        if len(self._waiting) == 1:
            loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._waiting:
            to, event = self._waiting[0]
            to.put_nowait(event)
            self._waiting.popleft()  # last: what finds the line empty wakes the loop again


class EngineThread:
    """Runs what ``make`` gives, in the thread that made it, until ``close``. Raises what ``make`` raises."""

    def __init__(self, make: Callable[[], LocalEngine]) -> None:
        self._loop, self._post = asyncio.new_event_loop(), _Post()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()

        async def begin() -> LocalEngine:
            return make()

        try:
            self._engine = asyncio.run_coroutine_threadsafe(begin(), self._loop).result()
        except BaseException:
            self.close()
            raise

    async def generate(self, requests: Sequence[Request], limit_s: float) -> AsyncGenerator[Event, None]:
        """Yield (index, tokens of a pass) as they come and (index, completion) at the end of each.

        Leaving the iteration frees what the requests hold, after the pass that runs. Raises TimeoutError
        after ``limit_s``, and what the engine raises: ValueError for a request that can never fit.
        """
        here = asyncio.get_running_loop()
        events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

        def send(event: Event | BaseException | None) -> None:
            self._post.send(here, events, event)

        async def run() -> None:
            try:
                listener: Callable[[int, Emitted], None] = lambda index, emitted: send((index, emitted))  # noqa: E731
                async for index, completion in self._engine.generate(requests, listener):
                    send((index, completion))
            except Exception as error:  # the caller's, wherever it came up
                send(error)
            else:
                send(None)

        running = asyncio.run_coroutine_threadsafe(run(), self._loop)
        limit = here.call_later(limit_s, events.put_nowait, TimeoutError())
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            limit.cancel()
            running.cancel()

    async def call(self, function: Callable[[LocalEngine], T]) -> T:
        """What ``function`` returns, between two passes: the engine is not safe from other threads."""

        async def run() -> T:
            return function(self._engine)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))

    def close(self) -> None:
        """End what runs, and the thread."""

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
