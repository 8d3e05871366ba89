"""Many samplers as one engine: calls are dealt; those of a lost sampler are sampled again by another one.

    generate -> waiting --placement--> dealt to a Worker -> its sampler -> answered
                   ^                        |
                   +------ it is lost ------+
    publish  -> every Worker -> its sampler, which proves the served policy by a fingerprint

A call is a request with its seed, so every worker gives the same tokens, apart from the policy in flight. A
sampler is lost when it raises, is silent, makes no progress, or serves a policy that it was not sent.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from ostinato.model.wire import fingerprint_adapters, pack_adapters
from ostinato.observe.timeline import Kind, Span
from ostinato.protocols import Job, Placement, Sampler
from ostinato.protocols import Worker as JobWorker
from ostinato.types import Completion, HistoryEntry, PollResult, Publication, Request, Stop
from ostinato.workers.remote import WorkerKind, WorkerLost

COLLECT_S = 2.0  # the longest wait of a collect where nothing happens; its reply is a sign of life
HEAR_S = 0.02  # from one collect to the next: answers that end meanwhile are reported together
CLOSE_S = 10.0  # limit for closing a lost sampler
SLICES = 8  # parts of a bounded wait, each waited for by itself
LONGEST_PAUSE_S = 30.0  # before a sampler is started again
HOMES = 10_000  # conversations whose worker is remembered
MOST_SPANS = 100_000  # of the newest spans, kept where no caller takes them

T = TypeVar("T")
Results = asyncio.Queue[tuple[int, Completion] | BaseException]


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A request that has not ended, and where it is; ids grow in the order of the requests."""

    id: int
    index: int  # of the request in its ``generate``
    request: Request
    results: Results
    expected: float  # tokens; 0: unknown
    home: int | None = None  # the worker that has it, or had the turn before it
    oldest: int = 0  # version that its tokens may have
    generated: int = 0  # tokens, as its sampler reported last
    losses: int = 0  # samplers that were lost with it
    awaited: bool = True  # whether its caller still waits for it

    def make_job(self) -> Job:
        """Return the call as placements see it. A seed path is (run, round, ..., place in the stream,
        sample); a call with less than four numbers has no siblings, and counts as of round 0."""
        seed = self.request.seed
        step, place = (seed[1], seed[-2]) if len(seed) > 3 else (0, self.id)
        return Job(
            id=self.id,
            step=step,
            place=place,
            predicted=self.expected or math.inf,
            prompt=len(self.request.tokens),
            generated=self.generated,
            home=self.home,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Published:
    """A policy that was sent to the workers which served at that time."""

    version: int
    begun: float
    missing: set[int]  # workers that have not proved it
    bytes: int = 0  # sent, to all workers together
    seconds: float = 0.0  # until the last worker had proved it

    def settle(self, worker: int, version: float, size: int = 0) -> None:
        """Record that the worker serves ``version`` or a later one (infinity: it is lost), once."""
        if self.version <= version and worker in self.missing:
            self.missing.discard(worker)
            self.bytes += size * (self.version == version)
            self.seconds = time.time() - self.begun


class State(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    LOST = "lost"  # and not started again yet


def make_sampler_lost(cause: str, final: bool = False) -> WorkerLost:
    return WorkerLost(WorkerKind.SAMPLER, cause, final=final)


async def wait_bounded(awaitable: Awaitable[T], seconds: float, what: str) -> T:
    """Return the result of ``awaitable``. Raises WorkerLost if it raises, is cancelled, or takes over
    ``seconds``: then it is cancelled, but not waited for, since it may ignore that.

    Time is counted in slices: if the event loop was blocked for long (by a training step), replies that have
    arrived meanwhile are read before a worker counts as silent.
    """
    task = asyncio.ensure_future(awaitable)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # asyncio logs unread errors
    try:
        for _ in range(SLICES):
            await asyncio.wait({task}, timeout=seconds / SLICES)
            if task.done():
                break
    finally:
        task.cancel()
    if not task.done():
        raise make_sampler_lost(f"silent for {seconds:g} s: {what}")
    try:
        return task.result()
    except WorkerLost:
        raise
    except asyncio.CancelledError:
        raise make_sampler_lost(f"gave up: {what}") from None
    except Exception as error:  # not Ctrl-C, which is no failure of a worker
        raise make_sampler_lost(f"{type(error).__name__}: {error}") from error


@dataclass(kw_only=True, eq=False)
class Worker:
    """A place of the pool. Its sampler may be lost and replaced; ``serve`` runs one sampler until it is lost.

    One task sends to the sampler, first the policy, then calls and drops; another one collects replies.
    ``on_reply`` receives every reply and the reply before it, ``on_proof`` every publication that is served.
    """

    id: int
    slots: int
    silence_s: float
    on_reply: Callable[[Worker, PollResult, PollResult | None], None]
    on_proof: Callable[[Worker, Publication], None]
    state: State = State.STARTING
    since: float = field(default_factory=time.time)
    heard: float = 0.0
    cause: str = ""  # of the latest loss
    losses: int = 0  # in a row, without an answer in between
    calls: dict[int, Call] = field(default_factory=dict)  # sent, and not ended
    dealt: deque[Call] = field(default_factory=deque)  # to be sent as there is room
    reply: PollResult | None = None  # the latest
    _drops: list[int] = field(default_factory=list)
    _publication: Publication | None = None  # to be sent
    _last_sent: int = 0  # version of the last publication that was sent, and ...
    _proved_version: int = 0  # ... of the last that is served
    _idle_s: float = 0.0  # seconds without progress
    _has_work: asyncio.Event = field(default_factory=asyncio.Event)

    def set_state(self, state: State) -> None:
        self.state, self.since = state, time.time()

    # ---- sending

    def post(self, publication: Publication) -> None:
        """Queue ``publication`` to be sent. It replaces an unsent one, which is no longer needed."""
        if self._publication is not None:
            publication = replace(publication, answers=self._publication.answers + publication.answers)
        self._publication = publication
        self._has_work.set()

    def deal(self, call: Call) -> None:
        call.home, call.generated = self.id, 0
        self.dealt.append(call)
        self._has_work.set()

    def drop(self, call: Call) -> None:
        """Remove ``call`` if it is queued; if it was sent, ask the sampler to drop it."""
        if call in self.dealt:
            self.dealt.remove(call)
        elif call.id in self.calls:
            self._drops.append(call.id)
            self._has_work.set()

    def take_back(self) -> tuple[list[Call], list[Call]]:
        """Clear the state of a lost sampler; return (calls that were sent to it, calls that were not)."""
        calls = [*self.calls.values()], [*self.dealt]
        self.calls, self.dealt, self.reply, self._drops, self._idle_s = {}, deque(), None, [], 0.0
        return calls

    # ---- serving

    async def serve(self, sampler: Sampler, policy: Publication, start_s: float) -> None:
        """Serve until the sampler is lost; its first ``policy`` may take ``start_s``. Raises WorkerLost."""
        self._publication, self._proved_version = policy, policy.version
        await self._publish(sampler, start_s)
        tasks = [asyncio.create_task(self._send(sampler)), asyncio.create_task(self._collect(sampler))]
        try:
            ended_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended_tasks:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, sampler: Sampler) -> None:
        while True:
            self._has_work.clear()
            await self._publish(sampler, self.silence_s)
            drops, self._drops, calls = self._drops, [], list[Call]()
            while self.dealt and len(self.calls) < self.slots:
                call = self.dealt.popleft()
                call.oldest = self._proved_version
                self._idle_s = self._idle_s if self.calls else 0.0
                self.calls[call.id] = call
                calls.append(call)
            if calls or drops:
                start = sampler.start([(call.id, call.request) for call in calls], drops)
                await wait_bounded(start, self.silence_s, f"starting {len(calls)} calls")
                self.heard = time.time()
            await self._has_work.wait()

    async def _publish(self, sampler: Sampler, seconds: float) -> None:
        publication, self._publication = self._publication, None
        if publication is None:
            return
        version = self._last_sent = publication.version
        proof = await wait_bounded(sampler.publish(publication), seconds, f"publishing version {version}")
        if proof != publication.fingerprint:
            target, actual = publication.fingerprint or "the base", proof or "the base"
            raise make_sampler_lost(
                f"was sent version {version} ({target}) and serves version {version} ({actual})"
            )
        self.heard, self._proved_version = time.time(), version
        self.on_proof(self, publication)

    async def _collect(self, sampler: Sampler) -> None:
        wait_s, loop = min(COLLECT_S, self.silence_s / 3), asyncio.get_running_loop()
        while True:
            oldest, start = self._proved_version, loop.time()
            reply = await wait_bounded(sampler.collect(wait_s), self.silence_s, self._describe_work())
            self._check_reply(reply, oldest, min(loop.time() - start, wait_s))
            self.heard, self.reply, last_reply = time.time(), reply, self.reply
            self.on_reply(self, reply, last_reply)
            self._has_work.set()  # there may be room
            await asyncio.sleep(min(HEAR_S, wait_s) - (loop.time() - start))

    def _check_reply(self, reply: PollResult, oldest: int, waited_s: float) -> None:
        """Count idle time. Raises WorkerLost for versions or calls that were not sent, for an aborted call
        that was not dropped, and after ``silence_s`` without progress."""
        if not oldest <= reply.version <= self._last_sent:
            raise make_sampler_lost(f"serves version {reply.version}; it was sent version {self._last_sent}")
        for id, completion in reply.done:
            if (call := self.calls.get(id)) is None:
                raise make_sampler_lost(f"answered call {id}, which it does not have")
            versions = completion.versions
            if len(versions) and not call.oldest <= versions.min() <= versions.max() <= self._last_sent:
                raise make_sampler_lost(
                    f"answered prompt {call.request.uid} with tokens of version {versions.min()}, where "
                    f"{call.oldest} to {self._last_sent} were served"
                )
            if completion.stop is Stop.ABORT and call.awaited:
                raise make_sampler_lost(f"gave up prompt {call.request.uid}, which was not cancelled")
        old, has_run = self.reply, any(span.kind in (Kind.PREFILL, Kind.DECODE) for span in reply.spans)
        is_stuck = old is not None and 0 <= reply.sampled == old.sampled and not (reply.done or has_run)
        self._idle_s = self._idle_s + waited_s if is_stuck and self.calls else 0.0
        if self._idle_s >= self.silence_s:
            raise make_sampler_lost(f"no progress for {self.silence_s:g} s: {self._describe_work()}")

    def _describe_work(self) -> str:
        return f"sampling {len(self.calls)} calls" if self.calls else "waiting for calls"

    # ---- reporting

    def as_job_worker(self) -> JobWorker:
        """Return the worker as placements see it."""
        calls = (*self.calls.values(), *self.dealt)
        return JobWorker(id=self.id, slots=self.slots, jobs=tuple(call.make_job() for call in calls))

    def status(self) -> dict[str, Any]:
        """Return the worker's row of ``EnginePool.status``; times are Unix seconds."""
        return {
            "worker": f"sampler-{self.id}",
            "state": str(self.state),
            "since": round(self.since, 3),
            "version": self.reply.version if self.reply is not None else -1,
            "running": len(self.calls),
            "sampled": self.reply.sampled if self.reply is not None else 0,
            "heard": round(self.heard or self.since, 3),
            "cause": self.cause,
        }


def publish_adapters(adapters: Any, version: int) -> Publication:
    """Pack the values of ``adapters`` (``model.lora.Adapters`` or None). Raises NotFinite naming a tensor."""
    packed = pack_adapters(adapters)
    size = 0 if packed is None else packed.num_bytes
    return Publication(version=version, fingerprint=fingerprint_adapters(adapters), payload=packed, size=size)


def predict_unknown(request: Request) -> float:
    """Return 0, the predicted length of an answer of unknown length."""
    return 0.0


class EnginePool:
    """Implements ``protocols.Engine`` with ``count`` samplers; ``spawn(i)`` makes a new i-th sampler.

    place: which worker samples what (``rollout.schedule``); expect: predicted tokens of an answer, 0 if
    unknown; on_answer: called with each answer that has ended; slots: calls that a worker has at once;
    publication: makes the publication of a policy. silence_s: seconds without a reply or progress after which
    a sampler is lost; start_s: limit for its start (then ``spawn`` is cancelled; it must clean up, also
    where it raises). Workers are named "sampler-0" and so on.

    ``generate`` raises WorkerLost when no worker serves and each was lost more than ``max_restarts`` times in
    a row without an answer, when a call was on more lost samplers than that, and at a final loss.
    """

    def __init__(
        self,
        spawn: Callable[[int], Awaitable[Sampler]],
        count: int,
        *,
        place: Placement,
        expect: Callable[[Request], float] = predict_unknown,
        on_answer: Callable[[Request, Completion], None] = lambda request, completion: None,
        slots: int = 256,
        silence_s: float = 60.0,
        start_s: float = 300.0,
        max_restarts: int = 5,
        pause_s: float = 0.5,
        publication: Callable[[Any, int], Publication] = publish_adapters,
    ) -> None:
        if count < 1 or slots < 1:
            raise ValueError(f"a pool of {count} samplers with {slots} slots; both must be at least 1")
        self._spawn, self._placement, self._expect, self._on_answer = spawn, place, expect, on_answer
        self._count, self._slots, self._silence_s, self._start_s = count, slots, silence_s, start_s
        self._max_restarts, self._pause_s, self._new_publication = max_restarts, pause_s, publication
        self._current = Publication(version=0, fingerprint="")
        self._answers: tuple[tuple[str, int, tuple[HistoryEntry, ...]], ...] = ()  # for the next publication
        self._published: list[Published] = []
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self.counters: Counter[str] = Counter({"workers/restarts": 0, "workers/redispatched": 0})
        self.work: dict[str, float] = {}  # the samplers' own counters, summed over all samplers
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reset_state()

    def _reset_state(self) -> None:
        self._failure: Exception | None = None
        self._calls: set[Call] = set()  # that have not ended
        self._waiting: dict[int, Call] = {}  # those that no worker has
        self._homes: dict[tuple[int, ...], int] = {}
        self._ids, self._tasks, self._news = itertools.count(), list[asyncio.Task[None]](), asyncio.Event()
        self._is_planned, self._next_plan_at = False, 0.0
        callbacks = {"on_reply": self._process_reply, "on_proof": self._process_proof}
        sizes = {"slots": self._slots, "silence_s": self._silence_s}
        self._workers = [Worker(id=id, **sizes, **callbacks) for id in range(self._count)]

    def _start_workers(self) -> None:
        """Start the workers in the caller's event loop, unless they run in it; calls in a closed loop are
        lost. Raises RuntimeError if another open loop has them, and the pool's failure."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            if self._failure is not None:
                raise self._failure
            return
        if self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("the pool is at work in another event loop; make one pool for each loop")
        self._loop, self._published = loop, []
        self._reset_state()
        self._tasks = [asyncio.create_task(self._supervise(worker)) for worker in self._workers]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    def publish(self, adapters: Any, version: int) -> None:
        """Send the policy, and answers to remember, to all workers; running calls continue under it. Raises
        the errors of packing (NotFinite), and then the old policy stays."""
        start = time.time()
        self._current = self._new_publication(adapters, version)
        publication, self._answers = replace(self._current, answers=self._answers), ()
        serving = self._find_serving()
        if serving:
            self._published.append(Published(version=version, begun=start, missing={*serving}))
        for worker in self._workers:
            if worker.state is not State.LOST:
                worker.post(publication)

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        """Yield (index, completion) as requests end; see ``protocols.Engine``. At the exit other calls are
        dropped. Raises ValueError for a constraint, errors of ``_start_workers``, and the pool's failure."""
        if any(request.constraint is not None for request in requests):
            raise ValueError("a request has a constraint, which only the engine in its own process can apply")
        self._start_workers()
        results: Results = asyncio.Queue()
        calls = [self._queue_call(index, request, results) for index, request in enumerate(requests)]
        self._plan_soon()
        try:
            for _ in calls:
                result = await results.get()
                if isinstance(result, BaseException):
                    raise result.with_traceback(None)  # the same error is raised at every waiting caller
                self._on_answer(requests[result[0]], result[1])
                yield result
        finally:
            for call in [call for call in calls if call.awaited]:
                self._forget_call(call)
                if call.home is not None:
                    self._workers[call.home].drop(call)

    @property
    def served(self) -> tuple[int, str]:
        """(version, fingerprint) of the latest publication."""
        return self._current.version, self._current.fingerprint

    async def ready(self) -> None:
        """Start the workers and wait until all serve. Raises WorkerLost, and the pool's failure."""
        self._start_workers()
        while pending := [worker for worker in self._workers if worker.state is not State.SERVING]:
            if self._failure is not None:
                raise self._failure
            if failures := [worker for worker in pending if worker.losses > self._max_restarts]:
                raise self._make_exhausted_error(failures)
            self._news.clear()
            await self._news.wait()  # every start is bounded, and so is their number

    async def close(self) -> None:
        """End all samplers; the pool has then failed. Calls that still run end with an error."""
        self._fail(RuntimeError("the pool was closed"))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._workers:
            worker.set_state(State.LOST)

    def remember(self, uid: str, step: int, answers: Sequence[HistoryEntry]) -> None:
        """Add ``answers``, which samplers may draft from, to the next publication."""
        self._answers += ((uid, step, tuple(answers)),)

    def take_spans(self) -> list[Span]:
        spans = list(self._spans)
        self._spans.clear()
        return spans

    def take_publications(self) -> list[Published]:
        """Return and remove the publications that each of their workers has proved, or was lost before."""
        publications = [publication for publication in self._published if not publication.missing]
        self._published = [publication for publication in self._published if publication.missing]
        return publications

    def gauges(self) -> dict[str, float]:
        """Return gauges by metric name, and 0 for every counter, so that each row of metrics has them."""
        gauges = {"workers/alive": len(self._find_serving()), "workers/calls_waiting": len(self._waiting)}
        return {name: float(value) for name, value in ({**gauges, **dict.fromkeys(self.counters, 0)}).items()}

    def status(self) -> list[dict[str, Any]]:
        """Return a row for each worker; times are Unix seconds."""
        return [worker.status() for worker in self._workers]

    def _queue_call(self, index: int, request: Request, results: Results) -> Call:
        id, expected = next(self._ids), self._expect(request)
        call = Call(id=id, index=index, request=request, results=results, expected=expected)
        call.home = self._homes.pop(request.seed, None)
        self._calls.add(call)
        self._waiting[id] = call
        return call

    def _forget_call(self, call: Call) -> None:
        call.awaited = False
        self._waiting.pop(call.id, None)
        self._calls.discard(call)

    def _find_serving(self) -> dict[int, Worker]:
        return {worker.id: worker for worker in self._workers if worker.state is State.SERVING}

    def _plan_soon(self) -> None:
        """Schedule one placement, after all ready callers have sent their requests, so that it sees groups
        that arrive together. Planning for many workers is slow, so it gets a tenth of the time at most."""
        if not self._is_planned:
            self._is_planned = True
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, self._next_plan_at - loop.time()), self._run_plan)

    def _run_plan(self) -> None:
        """Place the waiting calls and delay the next plan; fail the pool on an error, as a loop only logs."""
        self._is_planned = False
        start = time.thread_time()  # of this thread: other load on the machine must not delay the next plan
        try:
            if self._failure is None:
                self._place_calls()
        except Exception as error:  # ``placement`` is passed in by the caller
            self._fail(error)
        self._next_plan_at = asyncio.get_running_loop().time() + 9 * (time.thread_time() - start)

    def _place_calls(self) -> None:
        workers = self._find_serving()
        if not workers or not self._waiting:
            return
        job_workers = [worker.as_job_worker() for worker in workers.values()]
        waiting = [call.make_job() for _, call in sorted(self._waiting.items())]
        starts = self._placement(waiting, job_workers)
        if not starts and not any(worker.jobs for worker in job_workers):
            starts = ((waiting[0].id, job_workers[0].id),)  # nothing runs: waiting would change nothing
        for id, worker in starts:
            workers[worker].deal(self._waiting.pop(id))

    def _process_reply(self, worker: Worker, reply: PollResult, last_reply: PollResult | None) -> None:
        self._spans += reply.spans
        old_counters = last_reply.counters if last_reply is not None else {}
        for name, value in reply.counters.items():
            self.work[name] = self.work.get(name, 0) + value - old_counters.get(name, 0)
        for id, tokens in reply.progress:
            if id in worker.calls:
                worker.calls[id].generated = tokens
        for id, completion in reply.done:
            if (call := worker.calls.pop(id, None)) is None:
                raise make_sampler_lost(f"answered call {id}, which it does not have")  # twice in one reply
            if completion.stop is not Stop.ERROR:
                worker.losses = 0
            if len(self._homes) >= HOMES:
                self._homes.pop(next(iter(self._homes)))
            self._homes[call.request.seed] = worker.id
            if call.awaited:
                self._forget_call(call)
                call.results.put_nowait((call.index, completion))
        self._plan_soon()

    def _process_proof(self, worker: Worker, publication: Publication) -> None:
        if worker.state is not State.SERVING:
            name, now = f"sampler-{worker.id}", time.time()
            self._spans.append(Span(worker=name, kind=Kind.START, start=worker.since, stop=now))
            worker.set_state(State.SERVING)
            self._news.set()
        for entry in self._published:
            entry.settle(worker.id, publication.version, publication.size)
        self._plan_soon()

    async def _supervise(self, worker: Worker) -> None:
        """Run samplers for ``worker`` until the pool fails, with pauses that double with each loss."""
        while self._failure is None:
            doublings = min(max(worker.losses - 1, 0), 10)
            await asyncio.sleep(min(self._pause_s * (2**doublings - 1), LONGEST_PAUSE_S))
            worker.set_state(State.STARTING)
            sampler = None
            try:
                sampler = await wait_bounded(self._spawn(worker.id), self._start_s, "starting")
                await worker.serve(sampler, self._current, self._start_s)
            except WorkerLost as error:
                self._replace_sampler(worker, error)
            finally:
                if sampler is not None:
                    with suppress(WorkerLost):
                        await wait_bounded(sampler.close(), CLOSE_S, "closing")

    def _replace_sampler(self, worker: Worker, error: WorkerLost) -> None:
        """Queue the calls of a lost sampler again; fail the pool after too many losses, or a final one."""
        if error.final:
            return self._fail(error)
        worker.cause, worker.losses = str(error), worker.losses + 1
        worker.set_state(State.LOST)
        self.counters["workers/restarts"] += 1
        for publication in self._published:
            publication.settle(worker.id, math.inf)
        sent_calls, queued_calls = worker.take_back()
        for call in sent_calls:
            call.losses += 1
            self.counters["workers/redispatched"] += call.awaited
        self._waiting |= {call.id: call for call in (*sent_calls, *queued_calls) if call.awaited}
        limit = self._max_restarts
        if calls := [call for call in sent_calls if call.awaited and call.losses > limit]:
            words = f"prompt {calls[0].request.uid} was on {calls[0].losses} samplers that were lost, at last"
            self._fail(make_sampler_lost(f"{words}: {error}", final=True))
        elif all(other.losses > limit and other.state is not State.SERVING for other in self._workers):
            self._fail(self._make_exhausted_error(self._workers))
        self._news.set()
        self._plan_soon()

    def _make_exhausted_error(self, workers: Sequence[Worker]) -> WorkerLost:
        causes = "; ".join(f"sampler-{worker.id}: {worker.cause}" for worker in workers)
        return make_sampler_lost(
            f"{len(workers)} of {self._count} samplers were lost more than {self._max_restarts} times "
            f"in a row without an answer in between: {causes}",
            final=True,
        )

    def _fail(self, error: Exception) -> None:
        """End all samplers and calls because of ``error``; does nothing after the first call."""
        if self._failure is not None:
            return
        self._failure = error
        self._news.set()
        for call in self._calls:
            call.results.put_nowait(error)
        for task in self._tasks:
            if task is not asyncio.current_task():  # this task ends itself after closing its sampler
                task.cancel()

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Fail the pool if supervision itself raised: that is a bug, and every caller must get the error."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
