"""The workers of a pool: ``Worker`` is one life, from its first publication until it is lost; ``Fleet`` all.

Two tasks talk to it. One sends, in order, what it is given: publications, calls, drops. The other collects.
Whatever the worker raises, and every wait longer than was agreed, ends its life as ``WorkerLost``,
which names the cause. What a worker says of the policy that it serves is checked in every reply.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from ostinato import jobs
from ostinato.jobs import Job
from ostinato.observe.timeline import Kind, Span
from ostinato.protocols import Sampler
from ostinato.types import Completion, PollResult, Publication, Request
from ostinato.workers.lost import Restarts, WorkerKind, WorkerLost
from ostinato.workers.suspects import Key, name

Results = asyncio.Queue[tuple[int, Completion] | BaseException]


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A request on its way; ids grow in the order of the requests."""

    id: int
    index: int  # of the request in its ``generate``
    request: Request
    results: Results
    expected: float  # tokens; 0: unknown
    home: int | None = None  # the worker that has it, or had what comes before it
    after: int = 0  # the number of the publication that its worker had been sent before it
    handed: bool = False  # it was sent to its worker
    generated: int = 0  # tokens, as its worker reported last
    awaited: bool = True  # its caller has not given it up

    @property
    def key(self) -> Key:
        """The same for all calls of one prompt in one round."""
        return self.request.uid, self.request.seed[:-1]

    @property
    def prompt(self) -> str:
        """Its name in error messages."""
        return name(self.key)

    def job(self) -> Job:
        """The call as placements see it. A seed path is (run, round, ..., place in the stream, sample); a
        call with a shorter one has no siblings."""
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


def fault(call: Call, answer: Completion, versions: Collection[int]) -> str:
    """What is wrong with an answer of a worker that was sent these versions for it; "" if nothing is."""
    if unknown := set(answer.versions.tolist()) - set(versions):
        return (
            f"answered prompt {call.prompt} with tokens of version {min(unknown)}, "
            f"where {' or '.join(map(str, sorted(versions)))} was to be sampled from"
        )
    return ""


COLLECT_S = 2.0  # the longest that a collect waits where nothing happens: a sign of life
HEAR_S = 0.02  # from one collect to the next: what ends meanwhile is reported together
CLOSE_S = 10.0  # for a worker that is given up to end
SLICES = 8  # that a bounded wait is counted in

T = TypeVar("T")


def sampler_lost(cause: str, by_calls: bool = True, final: bool = False) -> WorkerLost:
    return WorkerLost(WorkerKind.SAMPLER, cause, final=final, by_calls=by_calls)


async def bounded(awaited: Awaitable[T], seconds: float, what: str) -> T:
    """The result of ``awaited``. Raises WorkerLost where it raises, or takes longer than ``seconds``: it is
    then cancelled, but not waited for, since it may ignore that.

    Time is counted in slices: where the event loop itself was blocked for long (by a training step), what has
    arrived meanwhile is read before a worker is called silent.
    """
    task = asyncio.ensure_future(awaited)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # or it is logged as not seen
    try:
        for _ in range(SLICES):
            await asyncio.wait({task}, timeout=seconds / SLICES)
            if task.done():
                break
    finally:
        task.cancel()
    if not task.done():
        raise sampler_lost(f"silent for {seconds:g} s: {what}")
    try:
        return task.result()
    except WorkerLost:
        raise
    except asyncio.CancelledError:
        raise sampler_lost(f"gave up: {what}") from None
    except Exception as error:  # not Ctrl-C, which is no failure of a worker
        raise sampler_lost(f"{type(error).__name__}: {error}") from error


def _policy(version: int, fingerprint: str) -> str:
    return f"version {version} ({fingerprint or 'the base'})"


@dataclass(slots=True, eq=False)
class _Letter:
    """What is sent to a worker together, in this order."""

    publication: Publication | None = None
    calls: list[Call] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Worker:
    """``on_reply`` is called with every reply and the one before, ``on_proof`` with the version of every
    publication that is served."""

    id: int
    sampler: Sampler
    slots: int
    silence_s: float
    on_reply: Callable[[Worker, PollResult, PollResult | None], None]
    on_proof: Callable[[Worker, int], None]
    calls: dict[int, Call] = field(default_factory=dict)  # handed over, and not ended
    dealt: deque[Call] = field(default_factory=deque)  # to be handed over as there is room
    reply: PollResult | None = None  # the latest
    heard: float = field(default_factory=time.time)
    serving: bool = False

    def __post_init__(self) -> None:
        self._outbox: deque[_Letter] = deque()  # a publication is in the last one, if it is in any
        self._mail = asyncio.Event()
        self._policies: dict[int, tuple[int, str]] = {}  # (version, fingerprint) by number of publication
        self._posted = self._sent = self._served = 0  # numbers: meant for it, on their way, acknowledged
        self._still_s = 0.0  # seconds without progress

    # ---- what is sent to it

    def post(self, publication: Publication) -> None:
        """Send it; it replaces one that has not been sent yet, which is no longer needed."""
        last = self._outbox[-1].publication if self._outbox else None
        if last is None:
            self._posted += 1
            self._outbox.append(_Letter())
        else:
            publication = replace(publication, answers=last.answers + publication.answers)
        self._outbox[-1].publication = publication
        self._policies[self._posted] = (publication.version, publication.fingerprint)
        self._mail.set()

    def versions(self, call: Call) -> set[int]:
        """Versions that its tokens may have: the last one sent before the call, and all sent since."""
        return {version for n, (version, _) in self._policies.items() if call.after <= n <= self._sent}

    def deal(self, call: Call) -> None:
        call.home, call.generated, call.handed = self.id, 0, False
        self.dealt.append(call)

    def fill(self) -> None:
        """Hand over as many of the calls that it was dealt as it has room for."""
        room = self.slots - len(self.calls)
        if room > 0 and self.dealt:
            if not self.calls:
                self._still_s = 0.0
            letter = self._letter()
            for _ in range(min(room, len(self.dealt))):
                call = self.dealt.popleft()
                call.after = self._posted
                self.calls[call.id] = call
                letter.calls.append(call)

    def drop(self, call: Call) -> None:
        """Cancel ``call``, if this worker has it."""
        if call in self.dealt:
            self.dealt.remove(call)
            return
        for letter in self._outbox:
            if call in letter.calls:
                letter.calls.remove(call)
                del self.calls[call.id]
                return
        if self.calls.get(call.id) is call:
            self._letter().drop.append(call.id)

    def _letter(self) -> _Letter:
        """The last letter of the outbox, which is sent after all publications posted so far."""
        self._mail.set()
        if not self._outbox:
            self._outbox.append(_Letter())
        return self._outbox[-1]

    # ---- its life

    async def serve(self, start_s: float) -> None:
        """Work until it is lost; the first publication, which has been posted, may take ``start_s``. Raises
        WorkerLost."""
        await self._publish(self._outbox[0], start_s)
        self.serving = True
        tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._collect())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.serving = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self) -> None:
        while True:
            await self._mail.wait()
            self._mail.clear()
            while self._outbox:
                await self._publish(self._outbox[0], self.silence_s)
                await self._start(self._outbox.popleft())

    async def _start(self, letter: _Letter) -> None:
        for call in letter.calls:
            call.handed = True
        if letter.calls or letter.drop:
            started = self.sampler.start([(call.id, call.request) for call in letter.calls], letter.drop)
            await bounded(started, self.silence_s, f"starting {len(letter.calls)} calls")
            self.heard = time.time()

    async def _publish(self, letter: _Letter, seconds: float) -> None:
        publication, letter.publication = letter.publication, None
        if publication is None:
            return
        self._sent += 1
        version, published = publication.version, self.sampler.publish(publication)
        proof = await bounded(published, seconds, f"publishing version {version}")
        if proof != publication.fingerprint:
            sent, served = _policy(version, publication.fingerprint), _policy(version, proof)
            raise sampler_lost(f"was sent {sent} and serves {served}", by_calls=False)
        self.heard, self._served = time.time(), self._sent
        self.on_proof(self, version)

    async def _collect(self) -> None:
        wait_s = min(COLLECT_S, self.silence_s / 3)
        loop = asyncio.get_running_loop()
        while True:
            floor, awaited = self._served, loop.time()
            oldest = min([floor, *(call.after for call in self.calls.values())])
            self._policies = {n: policy for n, policy in self._policies.items() if n >= oldest}
            reply = await bounded(self.sampler.collect(wait_s), self.silence_s, self._occupation())
            self._check(reply, floor, min(loop.time() - awaited, wait_s))
            self.heard, self.reply, before = time.time(), reply, self.reply
            self.on_reply(self, reply, before)
            await asyncio.sleep(min(HEAR_S, wait_s) - (loop.time() - awaited))

    def _check(self, reply: PollResult, floor: int, waited_s: float) -> None:
        """Raises WorkerLost unless it serves what it was sent and makes progress with its calls."""
        sent = [policy for n, policy in self._policies.items() if floor <= n <= self._sent]
        if (reply.version, reply.fingerprint) not in sent:
            served = _policy(reply.version, reply.fingerprint)
            known = " and ".join(_policy(*policy) for policy in sent)
            raise sampler_lost(f"serves {served}; it was sent {known}", by_calls=False)
        before, passes = self.reply, any(one.kind in (Kind.PREFILL, Kind.DECODE) for one in reply.spans)
        stands = before is not None and 0 <= reply.sampled == before.sampled and not (reply.done or passes)
        self._still_s = self._still_s + waited_s if stands and self.calls else 0.0
        if self._still_s >= self.silence_s:
            raise sampler_lost(f"no progress for {self.silence_s:g} s: {self._occupation()}")

    def _occupation(self) -> str:
        return f"sampling {len(self.calls)} calls" if self.calls else "waiting for calls"

    # ---- what it looks like from outside

    @property
    def publishing(self) -> bool:
        """Whether it has yet to prove the last publication, which may then be why it is lost."""
        return self._sent > self._served

    @property
    def all_calls(self) -> list[Call]:
        return [*self.calls.values(), *self.dealt]

    def as_job_worker(self) -> jobs.Worker:
        """As placements see it."""
        return jobs.Worker(id=self.id, slots=self.slots, jobs=tuple(call.job() for call in self.all_calls))


class State(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    LOST = "lost"  # and not begun anew yet


@dataclass(slots=True, kw_only=True, eq=False)
class Place:
    """The place of a worker in the pool, over all its lives."""

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


@dataclass(kw_only=True, eq=False)
class Fleet:
    """All places of a pool, each with its own copy of the budget ``restarts``; ``start_s`` bounds the start
    of a sampler, and its first publication."""

    count: int
    spawn: Callable[[int], Awaitable[Sampler]]  # the sampler of a place
    new_worker: Callable[[int, Sampler], Worker]
    policy: Callable[[], Publication]  # that a new worker is sent first
    start_s: float
    restarts: Restarts
    on_loss: Callable[[Place, Worker | None, WorkerLost], None]  # counts it, and takes back what there was
    on_failure: Callable[[Exception], None]  # is called once, with what ends the pool
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.places = [Place(id=id, restarts=replace(self.restarts)) for id in range(self.count)]
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
        """Wait until every worker serves. Raises WorkerLost where any one of them is lost too often."""
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
        """End all workers because of ``error``; does nothing after the first call."""
        if self.failure is not None:
            return
        self.failure = error
        self._news.set()
        self.on_failure(error)
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
                sampler = await bounded(self.spawn(place.id), self.start_s, "starting")
                place.worker = self.new_worker(place.id, sampler)
                place.worker.post(self.policy())
                await place.worker.serve(self.start_s)
            except WorkerLost as lost:
                self._lose(place, lost)
            finally:
                if sampler is not None:
                    with suppress(WorkerLost):
                        await bounded(sampler.close(), CLOSE_S, "closing")

    def _lose(self, place: Place, lost: WorkerLost) -> None:
        """Give its work back; fail if the loss is final, or no place can go on."""
        if lost.final:
            self.fail(lost)
            return
        worker = place.worker if place.state is State.SERVING else None
        place.worker, place.cause = None, str(lost)
        place.enter(State.LOST)
        self.on_loss(place, worker, lost)
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
