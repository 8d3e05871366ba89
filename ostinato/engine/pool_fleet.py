"""The workers of a pool over all their lives: started, waited for, and replaced where they are lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ostinato.engine.pool_worker import Worker, bounded, close, sampler_lost
from ostinato.observe.timeline import Kind, Span
from ostinato.protocols import Sampler
from ostinato.types import Publication
from ostinato.workers.lost import WorkerLost
from ostinato.workers.restarts import Restarts


class State(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    LOST = "lost"  # and not begun anew yet


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """Of a worker in the pool, over its lives."""

    id: int
    restarts: Restarts  # losses in a row, without an answer, that no prompt is held to have caused
    state: State = State.STARTING
    since: float = field(default_factory=time.time)
    worker: Worker | None = None
    cause: str = ""  # of the latest loss

    def enter(self, state: State) -> None:
        self.state, self.since = state, time.time()

    def status(self) -> dict[str, Any]:
        """Times are Unix seconds."""
        worker, reply = self.worker, self.worker.reply if self.worker is not None else None
        return {
            "worker": f"sampler-{self.id}",
            "state": str(self.state),
            "since": round(self.since, 3),
            "version": reply.version if reply is not None else -1,
            "running": len(worker.calls) if worker is not None else 0,
            "sampled": reply.sampled if reply is not None else 0,
            "heard": round(worker.heard if worker is not None else self.since, 3),
            "cause": self.cause,
        }


class Fleet:
    """``spawn`` makes the sampler of a place, ``new_worker`` the worker with it, and ``policy`` is sent to it
    first; ``start_s`` for all this. Each place has the budget ``restarts``.

    on_loss: takes back what a worker had, if it had served, and counts the loss against its place or not;
    on_failure: is called once, with what ends the pool.
    """

    def __init__(
        self,
        spawn: Callable[[int], Awaitable[Sampler]],
        count: int,
        new_worker: Callable[[int, Sampler], Worker],
        policy: Callable[[], Publication],
        *,
        start_s: float,
        restarts: Restarts,
        on_loss: Callable[[Place, Worker | None, WorkerLost], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self.places = [Place(id=id, restarts=replace(restarts)) for id in range(count)]
        self.failure: Exception | None = None
        self._spawn, self._new_worker, self._policy, self._start_s = spawn, new_worker, policy, start_s
        self._on_loss, self._on_failure = on_loss, on_failure
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()

    @property
    def serving(self) -> dict[int, Worker]:
        workers = (place.worker for place in self.places if place.worker is not None)
        return {worker.id: worker for worker in workers if worker.serving}

    def begin(self) -> None:
        """Start all workers, in the event loop of the caller."""
        self._tasks = [asyncio.create_task(self._supervise(place)) for place in self.places]
        for task in self._tasks:
            task.add_done_callback(self._broke)

    async def ready(self) -> None:
        """Until every worker serves. Raises WorkerLost where one is lost too often, whatever others do."""
        while starting := [place for place in self.places if place.state is not State.SERVING]:
            if self.failure is not None:
                raise self.failure
            if hopeless := [place for place in starting if place.restarts.spent]:
                raise self._spent(hopeless)
            self._news.clear()
            await self._news.wait()  # every start is bounded, and so is their number

    def proved(self, id: int) -> list[Span]:
        """The worker serves a policy: the span of its start, if that was the first one."""
        place = self.places[id]
        if place.state is State.SERVING:
            return []
        span = Span(worker=f"sampler-{id}", kind=Kind.START, start=place.since, stop=time.time())
        place.enter(State.SERVING)
        self._news.set()
        return [span]

    def fail(self, error: Exception) -> None:
        """The end of all workers, unless it has come already."""
        if self.failure is not None:
            return
        self.failure = error
        self._news.set()
        self._on_failure(error)
        for task in self._tasks:
            if task is not asyncio.current_task():  # that one ends by itself, when it has closed its sampler
                task.cancel()

    async def close(self) -> None:
        """End all workers."""
        self.fail(RuntimeError("the pool was closed"))
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks, return_exceptions=True)
        for place in self.places:
            place.worker = None
            place.enter(State.LOST)

    def _broke(self, task: asyncio.Task[None]) -> None:
        """Supervision itself has failed: that is a bug, and every caller is to see it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def _supervise(self, place: Place) -> None:
        """One worker after the other, for as long as the pool lives."""
        while self.failure is None:
            await asyncio.sleep(place.restarts.wait_s)
            place.enter(State.STARTING)
            sampler = None
            try:
                sampler = await bounded(self._spawn(place.id), self._start_s, "starting")
                place.worker = self._new_worker(place.id, sampler)
                place.worker.post(self._policy())
                await place.worker.serve(self._start_s)
            except WorkerLost as lost:
                self._lose(place, lost)
            finally:
                if sampler is not None:
                    await close(sampler)

    def _lose(self, place: Place, lost: WorkerLost) -> None:
        """Give its work back, and see whether this can go on."""
        if lost.final:
            self.fail(lost)
            return
        worker = place.worker if place.state is State.SERVING else None
        place.worker, place.cause = None, str(lost)
        place.enter(State.LOST)
        self._on_loss(place, worker, lost)
        if all(one.restarts.spent and one.state is not State.SERVING for one in self.places):
            self.fail(self._spent(self.places))
        self._news.set()

    def _spent(self, places: Sequence[Place]) -> WorkerLost:
        most = places[0].restarts.most
        causes = "; ".join(f"sampler-{place.id}: {place.cause}" for place in places)
        return sampler_lost(
            f"{len(places)} of {len(self.places)} samplers were lost more than {most} times "
            f"in a row without an answer in between (cluster.max_restarts is {most}): {causes}",
            final=True,
        )


__all__ = ["Fleet", "Place", "State"]
