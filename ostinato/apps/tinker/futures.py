"""Futures: a request is stored, acknowledged and run in order, and its result is kept until fetched.

Requests of a model run one after the other by their ``seq``, in whatever order they arrive; a missing request
holds up those after it. Samples run as they come. After a restart, pending requests run again; a request
during which the process died twice fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ostinato.apps.tinker.registry import PENDING, Registry, Result, StoredRequest

RunRequest = Callable[[StoredRequest], Awaitable[Result]]
SAMPLE = "sample"
MAX_STARTS = 2  # of a request during which the process died
log = logging.getLogger(__name__)


class Futures:
    """The requests of a registry, run by ``run`` in the event loop that calls ``resume``."""

    def __init__(self, registry: Registry, run: RunRequest) -> None:
        self._registry, self._run = registry, run
        self._end_events: dict[str, asyncio.Event] = {}  # of requests with a waiting client
        self._queues: dict[str, asyncio.Task[None]] = {}  # by model
        self._samples: dict[str, asyncio.Task[None]] = {}  # by request
        self._is_ending = False

    @property
    def num_samples(self) -> int:
        """The number of sample requests that have not ended."""
        return len(self._samples)

    def resume(self) -> None:
        """Run the pending requests of an earlier process."""
        pending = self._registry.list_pending()
        if pending:
            log.info("%d requests of an earlier process go on", len(pending))
        for stored in pending:
            self._start(stored)

    def submit(self, id: str, owner: str, seq: int, kind: str, body: bytes) -> None:
        """Accept a request; a repeated request has no effect. Raises UserError if another has its ``seq``."""
        if self._registry.submit(id, owner, seq, kind, body):
            stored = self._registry.get_request(id)
            assert stored is not None
            self._start(stored)

    async def wait_for_result(self, id: str, wait_s: float) -> StoredRequest | None:
        """Return the request once it has ended, or as it is after ``wait_s``; None for an unknown request."""
        stored = self._registry.get_request(id)
        if stored is not None and stored.state == PENDING and not self._is_ending:
            event = self._end_events.setdefault(id, asyncio.Event())
            with suppress(TimeoutError):
                await asyncio.wait_for(event.wait(), wait_s)
            stored = self._registry.get_request(id)
        if stored is not None and stored.state != PENDING:
            self._registry.mark_fetched(id)
        return stored

    def cancel(self, id: str) -> None:
        """Cancel a sample request, on behalf of its client."""
        if (task := self._samples.get(id)) is not None:
            task.cancel()
            self._finish(id, Result.make_failure("the client has cancelled this request", "User"))

    def end_waits(self) -> None:
        """Make ``wait_for_result`` return at once: polling clients will retry at the next process."""
        self._is_ending = True
        for event in self._end_events.values():
            event.set()

    async def close(self) -> None:
        """Cancel running requests; they stay pending for the next process."""
        tasks = [*self._queues.values(), *self._samples.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, stored: StoredRequest) -> None:
        if stored.kind == SAMPLE:
            task = self._samples[stored.id] = asyncio.create_task(self._run_request(stored))
            task.add_done_callback(lambda _: self._samples.pop(stored.id, None))
        elif (queue := self._queues.get(stored.owner)) is None or queue.done():
            self._queues[stored.owner] = asyncio.create_task(self._run_in_order(stored.owner))

    async def _run_in_order(self, owner: str) -> None:
        """Run the requests of a model by ``seq``, up to a missing request, which restarts this on arrival."""
        while (
            stored := self._registry.find_request(owner, self._registry.find_last_seq(owner) + 1)
        ) is not None:
            await self._run_request(stored)

    async def _run_request(self, stored: StoredRequest) -> None:
        try:
            result = await self._compute_result(stored)
        except ValueError as error:  # an error of the client
            log.info("refused %s %s: %s", stored.kind, stored.id, error)
            result = Result.make_failure(str(error), "User")
        except Exception as error:
            log.exception("request %s failed", stored.id)
            result = Result.make_failure(f"{type(error).__name__}: {error}", "Server")
        self._finish(stored.id, result)

    async def _compute_result(self, stored: StoredRequest) -> Result:
        """Run a request and return its result; a failure where it has ended the process too often."""
        if stored.starts >= MAX_STARTS:
            return Result.make_failure(
                f"the server died {stored.starts} times while it ran this request; it is not tried again",
                "Server",
            )
        self._registry.count_start(stored.id)
        try:
            return await self._run(stored)
        except asyncio.CancelledError:
            self._registry.count_start(stored.id, -1)
            raise

    def _finish(self, id: str, result: Result) -> None:
        self._registry.finish(id, result)
        if (event := self._end_events.pop(id, None)) is not None:
            event.set()
