"""An engine in a thread and an event loop of its own, so that passes and HTTP do not wait for each other.

A pass is one native call without the interpreter's lock. Calls come from any other event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from ostinato.engine.local import LocalEngine
from ostinato.types import Completion, Emitted, Request

T = TypeVar("T")
Event = tuple[int, Emitted | Completion]
END_S = 5.0


class EngineThread:
    """Runs ``engine`` until ``close``."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()

    async def generate(self, requests: Sequence[Request], limit_s: float) -> AsyncGenerator[Event, None]:
        """Yield (index, tokens of a pass) as they come and (index, completion) at the end of each.

        Leaving the iteration frees what the requests hold, after the pass that runs. Raises TimeoutError
        after ``limit_s``, and what the engine raises: ValueError for a request that can never fit.
        """
        here = asyncio.get_running_loop()
        events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

        def send(event: Event | BaseException | None) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(events.put_nowait, event)

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


__all__ = ["EngineThread", "Event"]
