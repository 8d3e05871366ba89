"""vLLM as an engine: tokens in, tokens and log-probabilities out, over HTTP; it is not imported here.

    generate -> one request each -> /inference/v1/generate -> tokens, log-probabilities, labels -> Completion
    publish  -> PEFT folder -> Served (pause, replace, label, resume), in this life of the server or the next

Running requests go on under the new adapter with the keys and values that they have. vLLM labels every token
with the policy in force when it was sampled, so versions are exact; a label that was not published here means
that the server is not ours any more, and none of its answers are used. New requests find no prefix of an
older policy: the label salts the prefix cache.

What is served is proven three times: the worker returns the digest of the adapter that it has read, every
answer carries its labels, and the first answers of every policy are scored by our own decoder (k3 below
``bound``).

A lost server is restarted and gets the requests again (``Lives``); a prompt that breaks it repeatedly is
identified, and ends as an error (``Company``). The noise is vLLM's own: seeded by the request (not on a CPU),
but dependent on the numerics of its batch, so tokens are not guaranteed to be the same in another batch.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.engine.requests import Limits
from ostinato.engine.serve import failed
from ostinato.engine.vllm_answers import answer, choice_of, question, refuse
from ostinato.engine.vllm_company import Company
from ostinato.engine.vllm_proof import Proofs, Verdict
from ostinato.engine.vllm_served import Lives, Policy, Served
from ostinato.engine.vllm_server import Reply, Server, Unreachable, check, post, vllm_lost
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.peft_io import PEFT_CONFIG, PEFT_TENSORS, write_peft
from ostinato.model.wire import check_finite, fingerprint
from ostinato.observe.timeline import Kind, Span
from ostinato.types import Completion, Request, Sampling
from ostinato.workers.lost import Restarts

BEAT_S = 5.0  # between two signs of life of a server with requests
MOST_OPEN = 512  # connections at once
MOST_SPANS = 10_000
PROBE_TOKENS = 48
QUESTIONS = "/inference/v1/generate"


class VllmEngine:
    """Implements ``protocols.Engine`` on a server that has the weights of ``decoder``; it begins with the
    base.

    ``folder`` is written to, and must be readable for the server under the same path. ``decode`` turns token
    ids into text. ``probe`` ([T] token ids) is sent to the base before any work; no policy's k3 may reach
    ``bound``. ``name`` is the worker's in the timeline.

    Raises ValueError for a server that lacks a needed feature, WorkerLost where it cannot be reached.
    """

    def __init__(
        self,
        server: Server,
        decoder: Decoder,
        *,
        folder: Path,
        decode: Callable[[Sequence[int]], str] | None = None,
        probe: np.ndarray | None = None,
        bound: float = 0.015,
        silence_s: float = 60.0,
        max_restarts: int = 5,
        max_quarantined: int = 8,
        name: str = "sampler-0",
    ) -> None:
        self._server, self._decoder, self._folder, self._decode = server, decoder, folder, decode
        self._max_quarantined, self._time, self._desk = max_quarantined, _Time(name), None
        self._proofs, self._served = Proofs(decoder, bound), Served(server, silence_s)
        self._policy, self.counters = Policy(version=0), Counter[str]()
        self._lives = Lives(
            server=server,
            start=self._start,
            install=self._served.install,
            restarts=Restarts(most=max_restarts),
            counters=self.counters,
        )
        try:
            self._start()
            self._served.ask("POST", "/resume")  # an earlier client may have left it paused
            self._facts = check(server.address, [0], server.key)
            self._limits = Limits(
                context=min(self._facts.context, decoder.config.max_positions),
                vocab_size=decoder.config.vocab_size,
                blocks=sys.maxsize,  # vLLM's own care
                has_text=decode is not None,
                policies={"": 0},  # none by name
            )
            self._served.install(self._policy)
            if probe is not None:
                self._prove_the_base(probe)
        except Unreachable as lost:
            server.close()
            raise vllm_lost(f"vLLM was lost before any work: {lost}; {server.why()}") from lost
        except BaseException:  # nothing else has the server yet
            server.close()
            raise

    def _start(self) -> None:
        """Start the server, with nothing proved about it yet."""
        with self._time.of(Kind.START):
            self._proofs.forget()
            self._server.revive()

    def _prove_the_base(self, probe: np.ndarray) -> None:
        """Check that the server has the weights, the dtype and the log-probabilities it should."""
        request = Request(tokens=probe, sampling=Sampling(max_tokens=PROBE_TOKENS), seed=(0,))
        reply = self._served.ask("POST", QUESTIONS, self._question(request, self._policy))
        self._proofs.hear(self._policy.label, None, request, self._completion(request, self._policy, reply))

    # ---- the protocol

    def take_verdict(self) -> Verdict | None:
        """On the newest policy that was judged since the last call; None: none was."""
        return self._proofs.take_verdict()

    @property
    def served(self) -> tuple[int, str]:
        """(version, fingerprint) that the server served by its last answer, publish or sign of life."""
        version, _, mark = self._served.label.partition(":")
        return int(version), "" if mark == "base" else mark

    @property
    def signs(self) -> int:
        """The number of signs of life: answers, and beats while requests run."""
        return self._served.signs

    def publish(self, adapters: Adapters | None, version: int) -> None:
        """Serve ``adapters`` (None: the base) from the next pass on; requests in flight go on under them.

        A request that began on the base ends on it, and its tokens say so. Raises NotFinite, and the old
        policy goes on; WorkerLost where the server does not take them, or is lost.
        """
        before = self._policy
        with self._time.of(None):  # the publisher reports it
            policy = written(adapters, version, self._folder)
            self._lives.publish(policy)
            self._policy = policy
        for old in self._folder.glob("policy-*"):
            if old not in (policy.folder, before.folder):
                shutil.rmtree(old, ignore_errors=True)

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        """Yield (index, completion) as requests finish. Raises ValueError for requests that never fit, and
        WorkerLost."""
        for request in requests:
            refuse(request, self._limits)
        desk = self._desk_here()
        tasks = [asyncio.create_task(self._answer(desk, index, r)) for index, r in enumerate(requests)]
        self._time.run(len(tasks))
        for task in tasks:
            task.add_done_callback(lambda task: self._time.run(-1))
        try:
            for done in asyncio.as_completed(tasks):
                yield await done
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def take_spans(self) -> list[Span]:
        """See ``protocols.Timed``. Of what the server does between, it is known that it has requests."""
        return self._time.take()

    def close(self) -> None:
        """End the server, if it is ours."""
        self._lives.close()

    # ---- requests

    async def _answer(self, desk: _Desk, index: int, request: Request) -> tuple[int, Completion]:
        key = request.uid, request.seed[:-1]
        async with desk.gate:
            with desk.company.member(key):
                while key not in desk.company.quarantined:
                    async with desk.company.together(key):
                        found = await self._attempt(desk, request)
                    if found is not None:
                        await self._prove(desk, request, *found)
                        return index, found[1]
                return index, failed(desk.company.quarantined[key])

    async def _attempt(self, desk: _Desk, request: Request) -> tuple[Policy, Completion] | None:
        """(the policy that answered, its answer); None: the request has to be sent again."""
        epoch, policy = self._lives.epoch, self._policy
        try:
            reply = await self._reply(desk, request, policy, epoch)
            completion = self._completion(request, policy, reply)
        except Unreachable as lost:
            await asyncio.to_thread(self._lives.recover, epoch, str(lost))
            return None
        if epoch != self._lives.epoch:  # begun on a server that was given up, whatever it goes by now
            return None
        self._lives.restarts.worked()
        self._served.signs += 1
        return policy, completion

    async def _reply(self, desk: _Desk, request: Request, policy: Policy, epoch: int) -> Reply:
        """Raises Unreachable where the server was lost, and the requests in flight are suspected."""
        try:
            body, server = self._question(request, policy), self._server
            reply = await self._watched(desk, post(server.address, QUESTIONS, body, key=server.key))
            if reply.status >= 500:  # of this request, or the end of all
                await asyncio.to_thread(self._served.beat)
            return reply
        except Unreachable as lost:
            raise Unreachable(self._blame(desk, epoch, str(lost))) from lost

    def _blame(self, desk: _Desk, epoch: int, why: str) -> str:
        """``why``, with the requests in flight as the first caller to notice the loss found them. Raises
        WorkerLost for too many culprits."""
        if epoch != self._lives.epoch:
            return why
        if desk.blamed[0] != epoch:
            company = desk.company
            desk.blamed = epoch, f"{why}, while these were in flight: {company}"
            explained, found = company.blame(why)
            self.counters["workers/quarantined"] += len(found)
            if excess := company.suspects.excess(self._max_quarantined, "vLLM"):
                raise vllm_lost(excess)
            if explained:  # no failure of the server's
                self._lives.restarts.worked()
        return desk.blamed[1]

    def _question(self, request: Request, policy: Policy) -> dict[str, Any]:
        name, seeded = policy.name(self._facts.base), self._facts.seeds
        return question(request, name, policy.label, self._limits.context, seeded=seeded)

    def _completion(self, request: Request, policy: Policy, reply: Reply) -> Completion:
        """The answer of a living server; raises as ``choice_of`` and ``Served.versions``."""
        if reply.status >= 500:
            return failed(f"vLLM answered {reply.error}")
        choice, cached = choice_of(reply, request, policy.name(self._facts.base))
        versions, moe = self._served.versions(policy, choice), self._decoder.config.moe
        experts = None if moe is None else moe.num_experts
        return answer(request, choice, versions, self._decode, cached=cached, num_experts=experts)

    async def _prove(self, desk: _Desk, request: Request, policy: Policy, completion: Completion) -> None:
        """The first answers that ``policy`` alone has sampled prove it. Raises WorkerLost."""
        if self._proofs.want(policy.label, policy.version, request, completion):
            async with desk.proof:
                await asyncio.to_thread(self._proofs.hear, policy.label, policy.adapters, request, completion)

    # ---- signs of life

    def _desk_here(self) -> _Desk:
        """What the calls in this event loop share."""
        loop = asyncio.get_running_loop()
        if self._desk is None or self._desk.loop is not loop:
            self._desk = _Desk(loop=loop, gate=asyncio.Semaphore(MOST_OPEN))
        return self._desk

    async def _watched(self, desk: _Desk, asking: Coroutine[Any, Any, Reply]) -> Reply:
        """The reply, or Unreachable as soon as the server gives no sign of life."""
        request_task = asyncio.create_task(asking)
        if desk.watch is None or desk.watch.done():
            desk.watch = asyncio.create_task(self._watch())
        watch = desk.watch  # the next caller begins another when it has ended
        desk.open += 1
        try:
            await asyncio.wait({request_task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not request_task.done():
                watch.result()
            return request_task.result()
        finally:
            request_task.cancel()
            desk.open -= 1
            if not desk.open:  # one that is being cancelled is not done yet and must not be used
                desk.watch.cancel()
                desk.watch = None

    async def _watch(self) -> None:
        """Beat until that raises Unreachable; in a thread, since the event loop may be blocked for longer
        than the server may be silent."""
        while True:
            await asyncio.sleep(BEAT_S)
            await asyncio.to_thread(self._served.beat)


# ---- bookkeeping


@dataclass(slots=True, kw_only=True)
class _Desk:
    """What the calls in one event loop share."""

    loop: asyncio.AbstractEventLoop
    gate: asyncio.Semaphore
    proof: asyncio.Lock = field(default_factory=asyncio.Lock)
    company: Company = field(default_factory=Company)
    blamed: tuple[int, str] = (-1, "")  # the last epoch whose loss was blamed, and its description
    open: int = 0  # questions that are being answered
    watch: asyncio.Task[None] | None = None


class _Time:
    """What the worker did, one thing at a time: it decodes while it has requests, unless it does what is
    named by ``of``."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)  # the newest, where nothing takes them
        self._lock = threading.Lock()
        self._running = 0  # requests
        self._doing: tuple[Kind | None] | None = None
        self._since = time.time()

    def run(self, requests: int) -> None:
        """So many more requests are running, or fewer."""
        with self._lock:
            if not self._running or not self._running + requests:
                self._turn()
            self._running += requests

    @contextmanager
    def of(self, kind: Kind | None) -> Iterator[None]:
        """Records the block as ``kind`` alone; None: as nothing, since another worker records it."""
        with self._lock:
            self._turn()
            before, self._doing = self._doing, (kind,)
        try:
            yield
        finally:
            with self._lock:
                self._turn()
                self._doing = before

    def take(self) -> list[Span]:
        with self._lock:
            self._turn()
            spans = list(self._spans)
            self._spans.clear()
        return spans

    def _turn(self) -> None:
        """End the current span, if there is one."""
        (kind,) = self._doing or (Kind.DECODE if self._running else None,)
        now = time.time()
        if kind is not None and now > self._since:
            self._spans.append(Span(worker=self._worker, kind=kind, start=self._since, stop=now))
        self._since = now


def written(adapters: Adapters | None, version: int, parent: Path) -> Policy:
    """The policy of ``adapters``, checked and written to a folder of its own. Raises NotFinite."""
    if adapters is None:
        return Policy(version=version)
    check_finite(adapters)
    mark = fingerprint(adapters)
    folder = parent / f"policy-{version}-{mark}"
    folder.mkdir(parents=True, exist_ok=True)
    write_peft(adapters, folder)
    copy, digest = adapters.detach_copy(), _digest(folder)
    return Policy(version=version, fingerprint=mark, folder=folder, digest=digest, adapters=copy)


def _digest(folder: Path) -> str:
    """As the worker computes it (``interop.vllm_worker.digest``)."""
    hashed = blake2b(digest_size=8)
    for name in (PEFT_CONFIG, PEFT_TENSORS):
        hashed.update((folder / name).read_bytes())
    return hashed.hexdigest()
