"""Many samplers as one engine: placement, supervision, replacement, and proof of what they serve.

    generate -> OpenCalls (which worker gets what) -> Worker (one life; Fleet: all) -> its sampler -> answers
    publish  -> Publications (what is sent, and which workers have proved it) -> every Worker

A call is a request with its seed, so every worker gives the same tokens, apart from the policy in flight.
Every worker has at most ``slots`` calls; the others wait here, where placement can still choose. A worker
that raises, is silent, makes no progress, or serves what it was not sent is replaced, and its calls go to
others with room. Failures of workers and of prompts are distinguished; each kind has a budget of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ostinato.engine.pool_dispatch import OpenCalls
from ostinato.engine.pool_worker import Fleet, Place, Results, State, Worker, sampler_lost
from ostinato.jobs import Placement
from ostinato.model.wire import fingerprint, pack
from ostinato.observe.timeline import Span
from ostinato.protocols import Sampler
from ostinato.types import Completion, HistoryEntry, PollResult, Publication, Request
from ostinato.workers.lost import Restarts, WorkerLost


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A policy served by all workers that it was published to."""

    version: int
    bytes: int  # sent, to all workers together
    seconds: float  # from ``publish`` until the last of those that were serving then had proved it


@dataclass(slots=True, kw_only=True, eq=False)
class _Unproved:
    publication: Publication
    begun: float
    missing: set[int]  # workers
    proved: int = 0


class Publications:
    """``new`` builds the publication of a policy; ``current`` is the one every worker is to serve."""

    def __init__(self, new: Callable[[Any, int], Publication]) -> None:
        self.current = Publication(version=0, fingerprint="")
        self._new = new
        self._answers: tuple[tuple[str, int, tuple[HistoryEntry, ...]], ...] = ()
        self._unproved: deque[_Unproved] = deque()  # the oldest first
        self._proved: list[Published] = []

    def remember(self, uid: str, step: int, answers: Sequence[HistoryEntry]) -> None:
        """Answers that go with the next publication."""
        self._answers += ((uid, step, tuple(answers)),)

    def publish(self, adapters: Any, version: int, workers: Collection[int]) -> Publication:
        """The publication to send to every worker; ``workers`` have to prove that they serve it, others when
        they start. Raises what ``new`` raises, and then nothing has changed."""
        begun = time.time()
        self.current = self._new(adapters, version)
        sent, self._answers = replace(self.current, answers=self._answers), ()
        if workers:
            self._unproved.append(_Unproved(publication=self.current, begun=begun, missing={*workers}))
        return sent

    def proved(self, worker: int, version: int) -> None:
        """The worker serves ``version``; nothing older is awaited from it any more."""
        for one in self._unproved:
            if one.publication.version <= version and worker in one.missing:
                one.missing.discard(worker)
                one.proved += one.publication.version == version
        self._settle()

    def lost(self, worker: int) -> None:
        """Nothing more is awaited from it."""
        for one in self._unproved:
            one.missing.discard(worker)
        self._settle()

    def _settle(self) -> None:
        while self._unproved and not self._unproved[0].missing:
            one = self._unproved.popleft()
            version, size = one.publication.version, one.publication.size * one.proved
            seconds = time.time() - one.begun
            self._proved.append(Published(version=version, bytes=size, seconds=seconds))

    def forget(self) -> None:
        """All workers are gone."""
        self._unproved.clear()

    def take(self) -> list[Published]:
        """Those that every worker has proved since the last call."""
        proved, self._proved = self._proved, []
        return proved


MOST_SPANS = 100_000  # kept where nothing takes them: the newest


def adapters_only(adapters: Any, version: int) -> Publication:
    """``adapters`` (``model.lora.Adapters`` or None) as values. Raises NotFinite naming a tensor."""
    packed = pack(adapters)
    size = 0 if packed is None else packed.num_bytes
    return Publication(version=version, fingerprint=fingerprint(adapters), payload=packed, size=size)


def unknown(request: Request) -> float:
    """Predicts no answer length: 0 means unknown."""
    return 0.0


class EnginePool:
    """Implements ``protocols.Engine`` with ``count`` samplers; ``spawn(i)`` makes the i-th, each time anew.

    place: which worker samples what (``rollout.schedule``); expect: predicted tokens of an answer, 0 if
    unknown; on_answer: called with each one that has ended; slots: calls that a worker has at once;
    publication: makes what is sent of a policy. silence_s: seconds without a reply or progress after which a
    worker is lost; start_s: seconds for one to start (then ``spawn`` is cancelled; it must leave nothing
    behind, also where it raises). Workers are named "sampler-0" and so on.

    ``generate`` raises WorkerLost when no worker serves and each was lost more than ``max_restarts`` times in
    a row without an answer, after more than ``max_quarantined`` prompts, and at a final loss (cluster gone).
    """

    def __init__(
        self,
        spawn: Callable[[int], Awaitable[Sampler]],
        count: int,
        *,
        place: Placement,
        expect: Callable[[Request], float] = unknown,
        on_answer: Callable[[Request, Completion], None] = lambda request, completion: None,
        slots: int = 256,
        silence_s: float = 60.0,
        start_s: float = 300.0,
        max_restarts: int = 5,
        max_quarantined: int = 8,
        pause_s: float = 0.5,
        publication: Callable[[Any, int], Publication] = adapters_only,
    ) -> None:
        if count < 1 or slots < 1:
            raise ValueError(f"a pool of {count} samplers with {slots} slots; both must be at least 1")
        self._expect, self._on_answer, self._max_quarantined = expect, on_answer, max_quarantined
        self._window_s = silence_s / 4 if count > 1 else 0.0  # in which a cause that workers share shows
        self._loop: asyncio.AbstractEventLoop | None = None
        self._planned, self._plan_again = False, 0.0
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._publications = Publications(publication)
        names = ("restarts", "redispatched", "quarantined")
        self.counters: Counter[str] = Counter({f"workers/{name}": 0 for name in names})
        self.work: dict[str, float] = {}  # the workers' own counters, summed over all lives
        self._new_open = partial(OpenCalls, place, lambda: self._fleet.serving, self._window_s, self.counters)
        worker = partial(
            Worker, slots=slots, silence_s=silence_s, on_reply=self._take_in, on_proof=self._proved
        )
        self._new_fleet = partial(
            Fleet,
            count=count,
            spawn=spawn,
            new_worker=worker,
            policy=lambda: self._publications.current,
            start_s=start_s,
            restarts=Restarts(most=max_restarts, pause_s=pause_s),
            on_loss=self._lose,
            on_failure=lambda error: self._open.fail(error),
        )
        self._open, self._fleet = self._new_open(), self._new_fleet()

    def _begin(self) -> None:
        """Begin with the workers in the event loop of the caller; refuse to be shared by two."""
        if self._fleet.failure is not None:
            raise self._fleet.failure
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("the pool is at work in another event loop; make one pool for each loop")
        self._loop, self._planned, self._plan_again = loop, False, 0.0
        self._publications.forget()
        self._open, self._fleet = self._new_open(), self._new_fleet()
        self._fleet.begin()

    # ---- the protocol

    def publish(self, adapters: Any, version: int) -> None:
        """Send the policy to all workers, and return at once. New calls are sampled by it, running ones
        continue under it. Raises what packing raises (NotFinite), and then the old policy stays."""
        places = self._fleet.places
        serving = [place.id for place in places if place.state is State.SERVING]
        publication = self._publications.publish(adapters, version, serving)
        for place in places:
            if place.worker is not None:
                place.worker.post(publication)

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        """Yield (index, completion) as requests end, wherever; see ``protocols.Engine``."""
        if any(request.constraint is not None for request in requests):
            raise ValueError("a request has a constraint, which only the engine in its own process can apply")
        self._begin()
        results: Results = asyncio.Queue()
        calls = self._open
        mine = [calls.add(index, one, self._expect(one), results) for index, one in enumerate(requests)]
        self._plan_soon()
        try:
            for _ in mine:
                result = await results.get()
                if isinstance(result, BaseException):
                    raise result.with_traceback(None)  # the same one is raised at every waiting caller
                self._on_answer(requests[result[0]], result[1])
                yield result
        finally:
            calls.abandon(mine)

    @property
    def served(self) -> tuple[int, str]:
        """(version, fingerprint) of what was published last."""
        current = self._publications.current
        return current.version, current.fingerprint

    # ---- beside the protocol

    async def ready(self) -> None:
        """Wait until every worker serves. Raises WorkerLost where any one of them is lost too often."""
        self._begin()
        await self._fleet.ready()

    async def close(self) -> None:
        """End all workers. What still runs is given up."""
        await self._fleet.close()

    def remember(self, uid: str, step: int, answers: Sequence[HistoryEntry]) -> None:
        """Answers that workers may draft from; they go with the next publication."""
        self._publications.remember(uid, step, answers)

    def take_spans(self) -> list[Span]:
        spans = list(self._spans)
        self._spans.clear()
        return spans

    def take_publications(self) -> list[Published]:
        """Those that have been proved by all since the last query."""
        return self._publications.take()

    def gauges(self) -> dict[str, float]:
        """Current gauges by metric name, and 0 for every counter, so that each row of metrics has them."""
        alive = sum(place.state is State.SERVING for place in self._fleet.places)
        now = {"workers/alive": float(alive), "workers/calls_waiting": float(len(self._open.waiting))}
        return now | dict.fromkeys(self.counters, 0.0)

    def status(self) -> list[dict[str, Any]]:
        """A row for each worker. Times are Unix seconds."""
        return [place.status() for place in self._fleet.places]

    # ---- placement, once for all that happens at a time

    def _plan_soon(self) -> None:
        """Schedule one placement, after all ready callers have sent their requests, so that it sees groups
        that arrive together. Planning for many workers is slow, and is limited to a tenth of the time."""
        if not self._planned:
            self._planned = True
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, self._plan_again - loop.time()), self.rebalance)

    def rebalance(self) -> None:
        """Place what waits. Happens by itself whenever a worker has nothing to do: as a callback of the event
        loop, which would only log what is raised."""
        self._planned = False
        begun = time.thread_time()  # what others take of the machine is not the plan's fault
        try:
            if self._fleet.failure is None:
                self._open.place()
        except Exception as error:  # of a placement
            self._fleet.fail(error)
        self._plan_again = asyncio.get_running_loop().time() + 9 * (time.thread_time() - begun)

    # ---- what workers do

    def _take_in(self, worker: Worker, reply: PollResult, before: PollResult | None) -> None:
        """Raises WorkerLost where an answer cannot be right."""
        self._spans += reply.spans
        known = before.counters if before is not None else {}
        for name, value in reply.counters.items():
            self.work[name] = self.work.get(name, 0) + value - known.get(name, 0)
        for id, tokens in reply.progress:
            if id in worker.calls:
                worker.calls[id].generated = tokens
        for id, completion in reply.done:
            if self._open.answered(worker, id, completion):
                self._fleet.places[worker.id].restarts.worked()
        worker.fill()
        self._plan_soon()

    def _proved(self, worker: Worker, version: int) -> None:
        self._spans += self._fleet.proved(worker.id)
        self._publications.proved(worker.id, version)
        self._plan_soon()

    def _lose(self, place: Place, worker: Worker | None, lost: WorkerLost) -> None:
        """Take its calls back; a loss that is explained by a prompt is no failure of the worker."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.counters["workers/restarts"] += 1
        self._publications.lost(place.id)
        place.restarts.in_a_row += worker is None or not self._open.take_back(worker, lost, now)
        if self._open.suspects.accused:
            loop.call_at(now + self._window_s, self._judge, now + self._window_s)
        self._judge(now)

    def _judge(self, now: float) -> None:
        """Once a prompt is found to be at fault, the losses until then are attributed to it."""
        if self._open.judge(now):
            for place in self._fleet.places:
                place.restarts.worked()
        if excess := self._open.suspects.excess(self._max_quarantined, "samplers"):
            self._fleet.fail(sampler_lost(excess, final=True))
        self._plan_soon()
