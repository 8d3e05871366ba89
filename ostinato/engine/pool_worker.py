"""One life of a worker of the pool, from its first publication until it is lost.

Two tasks talk to it. One sends, in order, what it is told: publications, calls, drops. The other collects.
Whatever the worker raises, and every wait longer than was agreed, ends its life as ``WorkerLost``,
which names the cause. What a worker says of the policy that it serves is checked in every reply.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, runtime_checkable

from ostinato import jobs
from ostinato.engine.pool_calls import Call
from ostinato.observe.timeline import Kind
from ostinato.protocols import Sampler
from ostinato.types import PollResult, Publication
from ostinato.workers.lost import WorkerKind, WorkerLost

COLLECT_S = 2.0  # the longest that a collect waits where nothing happens: a sign of life
HEAR_S = 0.02  # from one collect to the next: what ends meanwhile is heard of together
CLOSE_S = 10.0  # for a worker that is given up to end
SLICES = 8  # that a bounded wait is counted in

T = TypeVar("T")


def sampler_lost(cause: str, by_calls: bool = True, final: bool = False) -> WorkerLost:
    return WorkerLost(WorkerKind.SAMPLER, cause, final=final, by_calls=by_calls)


@runtime_checkable
class Closing(Protocol):
    """A sampler with something to give back."""

    async def close(self) -> None: ...


async def bounded(asked: Awaitable[T], seconds: float, what: str) -> T:
    """Its result. Raises WorkerLost where it raises, or is not there in time: it is then cancelled, and not
    waited for, since it may not listen.

    Time is counted in slices: where the event loop itself was held up for long (by a training step), what has
    arrived meanwhile is looked at before anybody is called silent.
    """
    task = asyncio.ensure_future(asked)
    task.add_done_callback(_heed)
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


def _heed(task: asyncio.Future[T]) -> None:
    """Look at what came of it, so that nobody complains that nobody did."""
    if not task.cancelled():
        task.exception()


async def close(sampler: Sampler) -> None:
    """Best effort: it is given up in any case."""
    if isinstance(sampler, Closing):
        with suppress(WorkerLost):
            await bounded(sampler.close(), CLOSE_S, "closing")


def _policy(version: int, fingerprint: str) -> str:
    return f"version {version} ({fingerprint or 'the base'})"


@dataclass(slots=True, eq=False)
class _Letter:
    """What is sent to a worker together, in this order."""

    publication: Publication | None = None
    calls: list[Call] = field(default_factory=list)
    drop: list[int] = field(default_factory=list)


class Worker:
    """``on_reply`` is called with every reply and the one before, ``on_proof`` with the version of every
    publication that is served."""

    def __init__(
        self,
        id: int,
        sampler: Sampler,
        *,
        slots: int,
        silence_s: float,
        on_reply: Callable[[Worker, PollResult, PollResult | None], None],
        on_proof: Callable[[Worker, int], None],
    ) -> None:
        self.id, self.slots = id, slots
        self.calls: dict[int, Call] = {}  # handed over, and not ended
        self.dealt: deque[Call] = deque()  # to be handed over as there is room
        self.reply: PollResult | None = None  # the latest
        self.heard = time.time()
        self.serving = False
        self._sampler, self._silence_s = sampler, silence_s
        self._on_reply, self._on_proof = on_reply, on_proof
        self._outbox: deque[_Letter] = deque()  # a publication is in the last one, if it is in any
        self._mail = asyncio.Event()
        self._policies: dict[int, tuple[int, str]] = {}  # (version, fingerprint) by number of publication
        self._posted = self._sent = self._served = 0  # numbers: meant for it, on their way, acknowledged
        self._still_s = 0.0  # how long it has not got on

    # ---- what it is told

    def post(self, publication: Publication) -> None:
        """Send it, instead of one that has not been sent yet: nobody needs that any more."""
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
        """That its tokens may be of: what the worker was sent last before it, and what it was sent since."""
        return {version for n, (version, _) in self._policies.items() if call.after <= n <= self._sent}

    def deal(self, call: Call) -> None:
        call.home, call.going_to, call.generated, call.handed = self.id, None, 0, False
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

    def drop(self, call: Call) -> bool:
        """Ask for ``call`` back. True: it has it already, for the worker has not heard of it yet."""
        if call in self.dealt:
            self.dealt.remove(call)
            return True
        for letter in self._outbox:
            if call in letter.calls:
                letter.calls.remove(call)
                del self.calls[call.id]
                return True
        self._letter().drop.append(call.id)
        return False

    def _letter(self) -> _Letter:
        """To be sent after all that was posted."""
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
                await self._publish(self._outbox[0], self._silence_s)
                await self._start(self._outbox.popleft())

    async def _start(self, letter: _Letter) -> None:
        for call in letter.calls:
            call.handed = True
        if letter.calls or letter.drop:
            started = self._sampler.start([(call.id, call.request) for call in letter.calls], letter.drop)
            await bounded(started, self._silence_s, f"starting {len(letter.calls)} calls")
            self.heard = time.time()

    async def _publish(self, letter: _Letter, seconds: float) -> None:
        publication, letter.publication = letter.publication, None
        if publication is None:
            return
        self._sent += 1
        version, published = publication.version, self._sampler.publish(publication)
        proof = await bounded(published, seconds, f"publishing version {version}")
        if proof != publication.fingerprint:
            sent, served = _policy(version, publication.fingerprint), _policy(version, proof)
            raise sampler_lost(f"was sent {sent} and serves {served}", by_calls=False)
        self.heard, self._served = time.time(), self._sent
        self._on_proof(self, version)

    async def _collect(self) -> None:
        wait_s = min(COLLECT_S, self._silence_s / 3)
        loop = asyncio.get_running_loop()
        while True:
            floor, asked = self._served, loop.time()
            oldest = min([floor, *(call.after for call in self.calls.values())])
            self._policies = {n: policy for n, policy in self._policies.items() if n >= oldest}
            reply = await bounded(self._sampler.collect(wait_s), self._silence_s, self._occupation())
            self._check(reply, floor, min(loop.time() - asked, wait_s))
            self.heard, self.reply, before = time.time(), reply, self.reply
            self._on_reply(self, reply, before)
            await asyncio.sleep(min(HEAR_S, wait_s) - (loop.time() - asked))

    def _check(self, reply: PollResult, floor: int, waited_s: float) -> None:
        """Does it serve what it was sent, and get on with what it has?"""
        sent = [policy for n, policy in self._policies.items() if floor <= n <= self._sent]
        if (reply.version, reply.fingerprint) not in sent:
            served = _policy(reply.version, reply.fingerprint)
            known = " and ".join(_policy(*policy) for policy in sent)
            raise sampler_lost(f"serves {served}; it was sent {known}", by_calls=False)
        before, passes = self.reply, any(one.kind in (Kind.PREFILL, Kind.DECODE) for one in reply.spans)
        stands = before is not None and 0 <= reply.sampled == before.sampled and not (reply.done or passes)
        self._still_s = self._still_s + waited_s if stands and self.calls else 0.0
        if self._still_s >= self._silence_s:
            raise sampler_lost(f"no progress for {self._silence_s:g} s: {self._occupation()}")

    def _occupation(self) -> str:
        return f"sampling {len(self.calls)} calls" if self.calls else "waiting for calls"

    # ---- what it looks like from outside

    @property
    def publishing(self) -> bool:
        """It has not proved yet what it was sent last: that may be why it is lost."""
        return self._sent > self._served

    def __contains__(self, call: Call) -> bool:
        return call.id in self.calls or call in self.dealt

    @property
    def all_calls(self) -> list[Call]:
        return [*self.calls.values(), *self.dealt]

    def as_job_worker(self) -> jobs.Worker:
        """As placements see it: passes take what they took so far, on the average."""
        counters = self.reply.counters if self.reply is not None else {}
        passes, seconds = counters.get("steps", 0), counters.get("seconds", 0.0)
        mean = seconds / passes if passes and seconds else 1.0
        return jobs.Worker(
            id=self.id,
            slots=self.slots,
            jobs=tuple(call.job() for call in self.all_calls if call.going_to is None),
            pass_s=lambda batch, attended: mean,
        )


__all__ = ["Closing", "Worker", "bounded", "close", "sampler_lost"]
