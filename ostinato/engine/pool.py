"""Many samplers as one engine: placement, supervision, replacement, and proof of what they serve.

    generate -> waiting --place--> dealt --room--> with a worker -> ended
                  ^                                    |
                  +---- its worker is lost, or it moves to another one

A call is a request with its seed, so whoever answers it gives the same tokens, but for the policy in flight.
Every worker has at most ``slots`` calls; the others wait here, where placement can still choose.

Failures of workers and of prompts are told apart. A worker that raises, is silent, stands still, or serves
what it was not sent is replaced, given the current policy, and its calls go to whoever has room. Prompts that
were on two workers that were lost run by themselves, fewer and fewer; a prompt with which alone one more is
lost ends as ERROR (``pool_suspects``). Both kinds of failure have a budget of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from ostinato.engine.pool_calls import Call, Results, fault
from ostinato.engine.pool_worker import Worker, bounded, close, sampler_lost
from ostinato.engine.serve import failed
from ostinato.jobs import Placement, Plan, least_loaded
from ostinato.model.wire import fingerprint, pack
from ostinato.observe.timeline import Kind, Span
from ostinato.protocols import Sampler
from ostinato.types import Completion, HistoryEntry, PollResult, Publication, Request, Stop
from ostinato.workers.lost import WorkerLost
from ostinato.workers.restarts import Restarts
from ostinato.workers.suspects import Key, Suspects, isolated

HOMES = 10_000  # conversations whose worker is remembered
MOST_SPANS = 100_000  # kept where nobody takes them: the newest


class State(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    LOST = "lost"  # and not begun anew yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A policy that all workers of its time serve."""

    version: int
    bytes: int  # sent, to all workers together
    seconds: float  # from ``publish`` until the last of those that were serving then had proved it
    workers: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Sending:
    version: int
    size: int
    begun: float
    missing: set[int]
    proved: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Place:
    """Of a worker in the pool, over its lives."""

    id: int
    state: State = State.STARTING
    since: float = field(default_factory=time.time)
    worker: Worker | None = None
    cause: str = ""  # of the latest loss
    restarts: Restarts  # losses in a row, without an answer, that no prompt is held to have caused

    def enter(self, state: State) -> None:
        self.state, self.since = state, time.time()


def adapters_only(adapters: Any, version: int) -> Publication:
    """``adapters`` (``model.lora.Adapters`` or None) as bytes. Raises NotFinite naming a tensor."""
    return Publication(version=version, fingerprint=fingerprint(adapters), payload=pack(adapters))


def unknown(request: Request) -> float:
    """Nothing is known of how long it will be answered."""
    return 0.0


class EnginePool:
    """Implements ``protocols.Engine`` with ``count`` samplers; ``spawn(i)`` makes the i-th, again and again.

    place: who samples what (``rollout.schedule``); expect: tokens of an answer, 0 if unknown; slots: calls
    that a worker has at once; publication: a policy as it is sent. Seconds: silence_s without a reply or
    without progress, and a worker is lost; start_s for one to come up (then ``spawn`` is cancelled, and has
    to leave nothing behind, as where it raises). ``generate`` raises WorkerLost when no worker serves and
    each was lost more than ``max_restarts`` times in a row without an answer, after more than
    ``max_quarantined`` prompts, and as soon as the loss of a worker is final (the cluster is gone).
    Names of workers: "sampler-0" and so on.
    """

    def __init__(
        self,
        spawn: Callable[[int], Awaitable[Sampler]],
        count: int,
        *,
        place: Placement = least_loaded,
        expect: Callable[[Request], float] = unknown,
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
        self._spawn, self._place, self._expect, self._make = spawn, place, expect, publication
        self._slots, self._silence_s, self._start_s = slots, silence_s, start_s
        self._pause_s, self._max_restarts, self._max_quarantined = pause_s, max_restarts, max_quarantined
        self._window_s = silence_s / 4 if count > 1 else 0.0  # in which a cause that workers share shows
        self._places = self._new_places(count)
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self._ids = itertools.count()
        self._waiting: dict[int, Call] = {}
        self._open: Counter[Key] = Counter()  # calls that have not ended, by prompt
        self._suspects = Suspects(self._window_s)
        self._homes: dict[tuple[int, ...], int] = {}
        self._planned, self._plan_again = False, 0.0
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._current = Publication(version=0, fingerprint="", payload=b"")
        self._sending: deque[_Sending] = deque()
        self._published: list[Published] = []
        self._answers: tuple[tuple[str, int, tuple[HistoryEntry, ...]], ...] = ()
        names = ("restarts", "redispatched", "quarantined", "migrated")
        self.counters: Counter[str] = Counter({f"workers/{name}": 0 for name in names})
        self.work: dict[str, float] = {}  # the workers' own counters, summed over all lives

    def _new_places(self, count: int) -> list[_Place]:
        most, pause_s = self._max_restarts, self._pause_s
        return [_Place(id=i, restarts=Restarts(most=most, pause_s=pause_s)) for i in range(count)]

    # ---- the protocol

    def publish(self, adapters: Any, version: int) -> None:
        """Send it to all workers, and come back at once. Calls that are asked from here on are sampled by it,
        running ones go on under it. Raises what packing raises (NotFinite), and the old policy stays."""
        begun = time.time()
        publication = replace(self._make(adapters, version), answers=self._answers)
        self._answers = ()
        self._current = replace(publication, answers=())
        for place in self._places:
            if place.worker is not None:
                place.worker.post(publication)
        missing = {place.id for place in self._places if place.state is State.SERVING}
        if missing:  # for one that is starting it is a part of the start
            size = len(publication.payload)
            self._sending.append(_Sending(version=version, size=size, begun=begun, missing=missing))

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        """Yield (index, completion) as requests end, wherever; see ``protocols.Engine``."""
        self._begin()
        results: Results = asyncio.Queue()
        mine = [self._call(index, request, results) for index, request in enumerate(requests)]
        self._plan_soon()
        try:
            for _ in mine:
                result = await results.get()
                if isinstance(result, BaseException):
                    raise result.with_traceback(None)  # the same one is raised at everybody who waits
                yield result
        finally:
            self._abandon(mine)

    @property
    def served(self) -> tuple[int, str]:
        """(version, fingerprint) of what was published last."""
        return self._current.version, self._current.fingerprint

    # ---- beside the protocol

    async def ready(self) -> None:
        """Until every worker serves. Raises WorkerLost where one is lost too often, whatever others do."""
        self._begin()
        while starting := [place for place in self._places if place.state is not State.SERVING]:
            if self._failure is not None:
                raise self._failure
            if hopeless := [place for place in starting if place.restarts.spent]:
                raise self._lost(hopeless)
            self._news.clear()
            await self._news.wait()  # every start is bounded, and so is their number

    async def close(self) -> None:
        """End all workers. What still runs is given up."""
        self._fail(RuntimeError("the pool was closed"))
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks, return_exceptions=True)
        for place in self._places:
            place.worker = None
            place.enter(State.LOST)

    def rebalance(self) -> None:
        """Place what waits, and move what the placement would have elsewhere: given up where it runs, and
        continued there. Happens by itself whenever a worker has nothing to do."""
        self._planned = False
        if self._failure is None:
            workers = [place.worker for place in self._places if place.worker is not None]
            self._place_waiting({worker.id: worker for worker in workers if worker.serving})

    def remember(self, uid: str, step: int, answers: Sequence[HistoryEntry]) -> None:
        """Answers that workers may draft from; they go with the next publication."""
        self._answers += ((uid, step, tuple(answers)),)

    def take_spans(self) -> list[Span]:
        spans = list(self._spans)
        self._spans.clear()
        return spans

    def take_publications(self) -> list[Published]:
        """Those that have been proved by all since it was last asked."""
        published, self._published = self._published, []
        return published

    def gauges(self) -> dict[str, float]:
        """Of now, by the names of metrics; 0 for what is counted, which a row of a quiet step has too."""
        alive = sum(place.state is State.SERVING for place in self._places)
        now = {"workers/alive": float(alive), "workers/calls_waiting": float(len(self._waiting))}
        return now | dict.fromkeys(self.counters, 0.0)

    def status(self) -> list[dict[str, Any]]:
        """A row for each worker. Times are Unix seconds."""
        return [_status(place) for place in self._places]

    # ---- calls

    def _call(self, index: int, request: Request, results: Results) -> Call:
        call = Call(
            id=next(self._ids),
            index=index,
            request=request,
            results=results,
            expected=self._expect(request),
            home=self._homes.pop(request.seed, None),
        )
        self._open[call.key] += 1
        if guilty := self._suspects.quarantined.get(call.key):
            self._end(call, failed(guilty))
        else:
            self._waiting[call.id] = call
        return call

    def _end(self, call: Call, completion: Completion) -> None:
        """Hand it out."""
        if call.wanted:
            call.wanted = False
            call.results.put_nowait((call.index, completion))
            self._leave(call)

    def _leave(self, call: Call) -> None:
        self._open[call.key] -= 1
        if not self._open[call.key]:
            del self._open[call.key]
            self._suspects.forget(call.key)

    def _abandon(self, calls: Sequence[Call]) -> None:
        """Nobody waits for these any more."""
        for call in calls:
            if call.wanted:
                call.wanted = False
                self._leave(call)
                self._waiting.pop(call.id, None)
                if (worker := self._holder(call)) is not None and call.going_to is None:
                    worker.drop(call)

    def _holder(self, call: Call) -> Worker | None:
        workers = (place.worker for place in self._places if place.worker is not None)
        return next((worker for worker in workers if call.id in worker.calls or call in worker.dealt), None)

    # ---- placement

    def _plan_soon(self) -> None:
        """Once, when all that is ready to ask has asked: placement sees groups that arrive together. A plan
        for many workers takes its time, and gets a tenth of it."""
        if not self._planned:
            self._planned = True
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, self._plan_again - loop.time()), self._rebalance)

    def _rebalance(self) -> None:
        """As a callback of the event loop, which would only log an error: those who wait are told of it."""
        begun = time.thread_time()  # what others take of the machine is not the plan's fault
        try:
            self.rebalance()
        except Exception as error:  # of a placement
            self._fail(error)
        self._plan_again = asyncio.get_running_loop().time() + 9 * (time.thread_time() - begun)

    def _place_waiting(self, alive: Mapping[int, Worker]) -> None:
        if not alive or (not self._waiting and all(worker.all_calls for worker in alive.values())):
            return
        cells, accused = self._suspects.cells, self._suspects.accused
        waiting = sorted(self._waiting.values(), key=lambda call: call.id)
        places, closed = dict[int, int](), frozenset[int]()
        if cells:
            waiting = [call for call in waiting if call.key not in accused]
            ready = dict.fromkeys(cells[call.key] for call in waiting if call.key in cells)
            held = {id: {call.key for call in worker.all_calls} for id, worker in alive.items()}
            places, closed = isolated([*ready], cells, held)
        for call in waiting:
            if (cell := cells.get(call.key)) in places:
                self._deal(call, alive[places[cell]])
        open = [worker.as_job_worker() for id, worker in alive.items() if id not in closed]
        jobs = [call.job() for call in waiting if call.key not in cells]
        plan = self._place(jobs, open) if open else Plan()
        if jobs and not plan.starts and open and not any(worker.jobs for worker in open):
            plan = least_loaded(jobs, open)  # whatever a placement waits for, nothing will happen by itself
        self._follow(plan, alive)

    def _follow(self, plan: Plan, alive: Mapping[int, Worker]) -> None:
        for id, worker in plan.starts:
            self._deal(self._waiting[id], alive[worker])
        holders = {call.id: (call, worker) for worker in alive.values() for call in worker.all_calls}
        for id, target in plan.moves:
            call, worker = holders[id]
            if worker.id == target or not call.may_move:
                continue
            call.going_to = target
            if worker.drop(call):
                self._deal(call, alive[target])
        for worker in alive.values():
            worker.fill()

    def _deal(self, call: Call, worker: Worker) -> None:
        self._waiting.pop(call.id, None)
        worker.deal(call)

    # ---- what workers tell

    def _hear(self, worker: Worker, told: PollResult) -> None:
        """Take in a reply. Raises WorkerLost where an answer cannot be right."""
        self._spans += told.spans
        known = worker.told_before.counters if worker.told_before is not None else {}
        for name, value in told.counters.items():
            self.work[name] = self.work.get(name, 0) + value - known.get(name, 0)
        for id, tokens in told.progress:
            if id in worker.calls:
                worker.calls[id].generated = tokens
        for id, completion in told.done:
            self._answered(worker, id, completion)
        worker.fill()
        self._plan_soon()

    def _answered(self, worker: Worker, id: int, completion: Completion) -> None:
        call = worker.calls.get(id)
        if call is None:
            raise sampler_lost(f"answered call {id}, which it does not have", by_calls=False)
        if wrong := fault(call, completion, worker.versions(call)):
            raise sampler_lost(wrong, by_calls=False)
        if completion.stop is Stop.ABORT and call.wanted and call.going_to is None:
            raise sampler_lost(f"gave prompt {call.prompt} up unasked")
        del worker.calls[id]
        if completion.stop is Stop.ABORT and call.wanted:
            self._continue(call, completion)
            return
        if completion.stop is not Stop.ERROR:
            self._places[worker.id].restarts.worked()
        if len(self._homes) >= HOMES:
            self._homes.pop(next(iter(self._homes)))
        self._homes[call.request.seed] = worker.id
        self._end(call, completion)

    def _continue(self, call: Call, part: Completion) -> None:
        """It moves: on to where it was to go, if that worker is still there."""
        call.go_on(part)
        assert call.going_to is not None
        self.counters["workers/migrated"] += 1
        place, call.going_to = self._places[call.going_to], None
        if place.worker is not None and place.worker.serving and not self._suspects.cells:
            self._deal(call, place.worker)
            place.worker.fill()
        else:
            self._waiting[call.id] = call

    def _acknowledged(self, worker: Worker, publication: Publication) -> None:
        place = self._places[worker.id]
        if place.state is not State.SERVING:
            span = Span(worker=f"sampler-{place.id}", kind=Kind.START, start=place.since, stop=time.time())
            self._spans.append(span)
            place.enter(State.SERVING)
            self._news.set()
        for sending in self._sending:
            if sending.version <= publication.version and worker.id in sending.missing:
                sending.missing.discard(worker.id)
                sending.proved += sending.version == publication.version  # an older one was never sent
        self._settle()
        self._plan_soon()

    def _settle(self) -> None:
        """Close the books of publications that nobody owes a proof of."""
        while self._sending and not self._sending[0].missing:
            sent = self._sending.popleft()
            self._published.append(
                Published(
                    version=sent.version,
                    bytes=sent.size * sent.proved,
                    seconds=time.time() - sent.begun,
                    workers=sent.proved,
                )
            )

    # ---- lives and deaths

    def _begin(self) -> None:
        """Begin with the workers in the event loop of the caller; refuse to be shared by two."""
        if self._failure is not None:
            raise self._failure
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("the pool is at work in another event loop; make one pool for each loop")
        self._loop, self._news = loop, asyncio.Event()
        self._planned, self._plan_again = False, 0.0
        self._waiting, self._open, self._sending = {}, Counter(), deque()
        self._suspects = Suspects(self._window_s)
        self._places = self._new_places(len(self._places))
        self._tasks = [asyncio.create_task(self._supervise(place)) for place in self._places]
        for task in self._tasks:
            task.add_done_callback(self._broke)

    def _broke(self, task: asyncio.Task[None]) -> None:
        """Supervision itself has failed: that is a bug, and every caller is told."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))

    async def _supervise(self, place: _Place) -> None:
        """One worker after the other, for as long as the pool lives."""
        while self._failure is None:
            await asyncio.sleep(place.restarts.wait_s)
            place.enter(State.STARTING)
            sampler = None
            try:
                sampler = await bounded(self._spawn(place.id), self._start_s, "starting")
                place.worker = self._worker(place.id, sampler)
                place.worker.post(self._current)
                await place.worker.serve(self._start_s)
            except WorkerLost as lost:
                if lost.final:
                    self._fail(lost)
                else:
                    self._lose(place, lost)
            finally:
                if sampler is not None:
                    await close(sampler)

    def _worker(self, id: int, sampler: Sampler) -> Worker:
        return Worker(
            id,
            sampler,
            slots=self._slots,
            silence_s=self._silence_s,
            hear=self._hear,
            acknowledged=self._acknowledged,
        )

    def _lose(self, place: _Place, lost: WorkerLost) -> None:
        """Take its calls back, see who may be to blame, and whether this can go on."""
        worker, place.worker = place.worker, None
        served, place.cause = place.state is State.SERVING, str(lost)
        place.enter(State.LOST)
        self.counters["workers/restarts"] += 1
        for sending in self._sending:
            sending.missing.discard(place.id)
        self._settle()
        explained = worker is not None and served and self._take_back(worker, lost)
        place.restarts.in_a_row += not explained
        self._judge(asyncio.get_running_loop().time())
        if all(one.restarts.spent and one.state is not State.SERVING for one in self._places):
            self._fail(self._lost(self._places))
        self._news.set()

    def _lost(self, places: Sequence[_Place]) -> WorkerLost:
        causes = "; ".join(f"sampler-{place.id}: {place.cause}" for place in places)
        return sampler_lost(
            f"{len(places)} of {len(self._places)} samplers were lost more than {self._max_restarts} times "
            f"in a row without an answer in between (cluster.max_restarts is {self._max_restarts}): {causes}",
            final=True,
        )

    def _take_back(self, worker: Worker, lost: WorkerLost) -> bool:
        """What it had not ended waits again. True: it was lost to its calls."""
        handed = [call for call in worker.calls.values() if call.handed]
        self.counters["workers/redispatched"] += sum(call.wanted for call in handed)
        for call in worker.all_calls:
            if call.wanted:
                call.going_to = None
                self._waiting[call.id] = call
        keys = [*dict.fromkeys(call.key for call in handed)]
        blamed = keys if lost.by_calls and not worker.publishing else []
        loop = asyncio.get_running_loop()
        now = loop.time()
        explained = self._suspects.blame(worker.id, now, blamed, str(lost))
        for key in set(keys) - self._open.keys():
            self._suspects.forget(key)  # nobody waits for it
        if self._suspects.accused:
            loop.call_at(now + self._window_s, self._judge, now + self._window_s)
        return explained

    def _judge(self, now: float) -> None:
        """The guilty end as ERROR. What was lost until then is explained: no worker's failure."""
        guilty = self._suspects.judge(now)
        self.counters["workers/quarantined"] += len(guilty)
        for place in self._places if guilty else ():
            place.restarts.worked()
        told = self._suspects.quarantined
        for call in [call for call in self._waiting.values() if call.key in told]:
            del self._waiting[call.id]
            self._end(call, failed(told[call.key]))
        if len(told) > self._max_quarantined:
            self._fail(
                sampler_lost(
                    f"{len(told)} prompts broke samplers (cluster.max_quarantined is "
                    f"{self._max_quarantined}); the latest: {[*told.values()][-1]}",
                    final=True,
                )
            )
        self._plan_soon()

    def _fail(self, error: Exception) -> None:
        """The end: everybody who waits hears of it, and whoever asks from now on."""
        if self._failure is not None:
            return
        self._failure = error
        self._news.set()
        for place in self._places:
            for call in place.worker.all_calls if place.worker is not None else ():
                self._waiting[call.id] = call
        for call in self._waiting.values():
            if call.wanted:
                call.results.put_nowait(error)
        for task in self._tasks:
            if task is not asyncio.current_task():  # that one ends by itself, when it has closed its sampler
                task.cancel()


def _status(place: _Place) -> dict[str, Any]:
    worker, told = place.worker, place.worker.told if place.worker is not None else None
    return {
        "worker": f"sampler-{place.id}",
        "state": str(place.state),
        "since": round(place.since, 3),
        "version": told.version if told is not None else -1,
        "running": len(worker.calls) if worker is not None else 0,
        "sampled": told.sampled if told is not None else 0,
        "heard": round(worker.heard, 3) if worker is not None else round(place.since, 3),
        "cause": place.cause,
    }


__all__ = ["EnginePool", "Published", "State", "adapters_only"]
