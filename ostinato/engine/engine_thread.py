"""An engine in a thread and an event loop of its own, so that passes and HTTP do not hold each other up.

A pass is one native call that releases the GIL. Calls may come from any other event loop.

The engine is created in that thread too: each thread that ran a kernel keeps a team of OpenMP workers, and
with more workers than cores libgomp puts waiting ones to sleep, which halves the speed of all passes.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from ostinato.types import Completion, Emitted, Request


class StreamingEngine(Protocol):
    """An engine that tells of tokens as they come."""

    def generate(
        self, requests: Sequence[Request], on_tokens: Callable[[int, Emitted], None] | None = None
    ) -> AsyncIterator[tuple[int, Completion]]: ...


T = TypeVar("T")
E = TypeVar("E", bound=StreamingEngine)
Event = tuple[int, Emitted | Completion]
END_S = 5.0


async def run_in_own_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run ``function`` in a thread that ends with it, without OpenMP workers, which would wait for the cores
    of the engine's, and return its result."""
    from ostinato.model.native.build import compute_alone

    with ThreadPoolExecutor(1, initializer=compute_alone) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)


class _Post:
    """Passes events to another event loop, which is woken once for all queued events."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[asyncio.Queue[Any], Any]] = deque()

    def send(self, to: asyncio.Queue[Any], event: Any) -> None:
        if self._loop.is_closed():  # nobody reads this event, or those still queued
            self._waiting.clear()
            return
        self._waiting.append((to, event))
        if len(self._waiting) == 1:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._waiting:
            queue, event = self._waiting[0]
            queue.put_nowait(event)
            self._waiting.popleft()  # last: a ``send`` to an empty queue wakes the loop again


class EngineThread(Generic[E]):
    """Makes ``engine`` with ``make`` and runs it in the same thread until ``close``. An exception of ``make``
    is raised here."""

    def __init__(self, make: Callable[[], E]) -> None:
        self._loop = asyncio.new_event_loop()
        self._posts: dict[asyncio.AbstractEventLoop, _Post] = {}  # of the loops that call
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._thread.start()

        async def begin() -> E:
            return make()

        try:
            self.engine = asyncio.run_coroutine_threadsafe(begin(), self._loop).result()
        except BaseException:
            self.close()
            raise

    async def generate(
        self, requests: Sequence[Request], limit_s: float | None = None, *, stream: bool = True
    ) -> AsyncGenerator[Event, None]:
        """Yield (index, tokens of a pass) as they come, unless ``stream`` is off, and (index, completion) at
        the end of each.

        Leaving the iteration frees the memory of the requests, after the current pass. Raises TimeoutError
        after ``limit_s`` (None: never), and the engine's exceptions: ValueError for a request that can never
        fit.
        """
        loop = asyncio.get_running_loop()
        for closed_loop in [other for other in list(self._posts) if other.is_closed()]:
            self._posts.pop(closed_loop, None)
        post = self._posts.setdefault(loop, _Post(loop))
        events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()

        def send(event: Event | BaseException | None) -> None:
            post.send(events, event)

        def listen(index: int, emitted: Emitted) -> None:
            send((index, emitted))

        async def run() -> None:
            try:
                async for index, completion in self.engine.generate(requests, listen if stream else None):
                    send((index, completion))
            except Exception as error:  # it is raised at the caller
                send(error)
            else:
                send(None)

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        limit = None if limit_s is None else loop.call_later(limit_s, events.put_nowait, TimeoutError())
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            if limit is not None:
                limit.cancel()
            future.cancel()

    async def call(self, function: Callable[[E], T]) -> T:
        """Run ``function`` between two passes, as the engine is not thread-safe, and return its result."""
        return await asyncio.wrap_future(self._submit(function))

    def run(self, function: Callable[[E], T]) -> T:
        """``call`` for a caller that is no coroutine, whose thread waits for the result. Raises RuntimeError
        after ``close``."""
        return self._submit(function).result()

    def _submit(self, function: Callable[[E], T]) -> Future[T]:
        async def run() -> T:
            return function(self.engine)

        if self._loop.is_closed():
            raise RuntimeError("the thread of the engine has ended")
        return asyncio.run_coroutine_threadsafe(run(), self._loop)

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
