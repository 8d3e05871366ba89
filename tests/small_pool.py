"""A pool on a clock that jumps: an engine that takes a second for a token, and links that fail on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
from loops import now

from ostinato.engine.pool import EnginePool
from ostinato.engine.serve import SamplerServer
from ostinato.protocols import Job, Placement, Starts, Worker
from ostinato.rollout.schedule import place_least_loaded
from ostinato.types import Completion, PollResult, Publication, Request, Sampling, Stop

WORDS = 50
EOS = 0


def token_at(seed: tuple[int, ...], position: int, weight: int) -> int:
    """Of policy ``weight``: what a sequence says at ``position``."""
    digest = blake2b(repr((seed, position, weight)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % WORDS


def fingerprint(weight: int) -> str:
    return f"{weight:016x}" if weight else ""


def publication(weight: int, version: int) -> Publication:
    payload = b"" if weight == 0 else str(weight).encode()
    return Publication(version=version, fingerprint=fingerprint(weight), payload=payload, size=len(payload))


def read(payload: bytes) -> int:
    return int(payload) if payload else 0


@dataclass(eq=False)
class SlowEngine:
    """A token per second for all that run, of ``token_at`` under the weight that is served then."""

    poison: Collection[str] = ()  # uids of which it breaks, at the third token
    refuse: Collection[str] = ()  # uids that it refuses
    frozen: bool = False  # it has stopped, and does not tell
    weight: int = 0
    version: int = 0
    counters: dict[str, float] = field(default_factory=lambda: {"decoded": 0, "steps": 0, "seconds": 0.0})
    running: dict[int, tuple[Request, list[int]]] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    most: int = 0  # calls at a time
    broken: str = ""

    @property
    def served(self) -> tuple[int, str]:
        return self.version, fingerprint(self.weight)

    def publish(self, adapters: Any, version: int) -> None:
        self.weight, self.version = adapters, version

    def cut(self, requests: Collection[Request]) -> None:
        self.given_up |= {id(request) for request in requests if id(request) in self.running}

    def under_way(self) -> list[tuple[Request, int]]:
        return [(request, len(tokens)) for request, tokens in self.running.values()]

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        if any(request.uid in self.refuse for request in requests):
            raise ValueError(f"a prompt of {len(requests[0].tokens)} tokens is refused")
        results: asyncio.Queue[tuple[int, Completion] | Exception] = asyncio.Queue()
        for request in requests:
            sampled = list[int]()
            self.running[id(request)] = (request, sampled)
        self.most = max(self.most, len(self.running))
        tasks = [asyncio.create_task(self._one(i, r, results)) for i, r in enumerate(requests)]
        try:
            for _ in requests:
                result = await results.get()
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            for task, request in zip(tasks, requests, strict=True):
                task.cancel()
                self.running.pop(id(request), None)
                self.given_up.discard(id(request))

    async def _one(self, index: int, request: Request, results: asyncio.Queue[Any]) -> None:
        tokens = self.running[id(request)][1]
        versions = list[int]()
        stop = Stop.LENGTH
        try:
            while len(tokens) < request.sampling.max_tokens:
                await asyncio.sleep(1.0)
                if self.broken or (request.uid in self.poison and len(tokens) == 2):
                    self.broken = self.broken or f"out of memory at {request.uid}"
                    results.put_nowait(RuntimeError(self.broken))
                    return
                if id(request) in self.given_up:
                    stop = Stop.ABORT
                    break
                if self.frozen:
                    continue
                tokens.append(token_at(request.seed, len(request.tokens) + len(tokens), self.weight))
                versions.append(self.version)
                self.counters["decoded"] += 1
                if tokens[-1] == EOS:
                    stop = Stop.EOS
                    break
        finally:
            self.running.pop(id(request), None)
        results.put_nowait((index, answer(tokens, versions, stop)))


def answer(tokens: Sequence[int], versions: Sequence[int], stop: Stop) -> Completion:
    return Completion(
        tokens=np.array(tokens, np.int32),
        logprobs=np.zeros(len(tokens), np.float32),
        edges=np.zeros(len(tokens), np.float32),
        versions=np.array(versions, np.int32),
        stop=stop,
    )


def expected(request: Request, weight: int = 0) -> list[int]:
    """What the request is answered with while ``weight`` is served."""
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_tokens and tokens[-1:] != [EOS]:
        tokens.append(token_at(request.seed, len(request.tokens) + len(tokens), weight))
    return tokens


def group(place: int, size: int = 4, *, longest: int = 30, step: int = 1) -> list[Request]:
    """Siblings of the prompt at ``place``."""
    tokens = np.arange(1, 4 + place % 3, dtype=np.int32)
    sampling = Sampling(max_tokens=longest, stop_tokens=(EOS,))
    return [
        Request(tokens=tokens, sampling=sampling, seed=(0, step, place, k), uid=f"p{place}")
        for k in range(size)
    ]


@dataclass(frozen=True)
class Fault:
    """What a link does from ``at`` seconds of its life on."""

    kind: str  # raise, hang, deaf, pause, freeze, old, stale, forget, twice, mute, stillborn
    at: float = 0.0


@dataclass(eq=False)
class Link:
    """A sampler in this process, which fails on demand."""

    server: SamplerServer
    engine: SlowEngine
    fault: Fault | None = None
    closed: bool = False
    born: float = field(default_factory=now)
    sent: list[Publication] = field(default_factory=list)

    def is_now(self, *kinds: str) -> bool:
        fault = self.fault
        return fault is not None and fault.kind in kinds and now() - self.born >= fault.at

    async def _suffer(self) -> None:
        if self.is_now("raise"):
            raise ConnectionError("the actor died")
        if self.is_now("hang"):
            await asyncio.sleep(1e9)
        while self.is_now("deaf"):  # does not even hear that it is given up
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                continue
            raise asyncio.CancelledError  # the world has ended
        if self.is_now("pause"):
            assert self.fault is not None
            await asyncio.sleep(max(0.0, self.born + self.fault.at + 30.0 - now()))
        self.engine.frozen = self.is_now("freeze")

    async def start(self, calls: Sequence[tuple[int, Request]], drop: Sequence[int] = ()) -> None:
        await self._suffer()
        await self.server.start([] if self.is_now("forget") else calls, drop)

    async def collect(self, wait_s: float) -> PollResult:
        await self._suffer()
        reported = await self.server.collect(wait_s)
        if self.is_now("old"):
            reported = replace(reported, version=reported.version - 1)
        if self.is_now("twice"):
            reported = replace(reported, done=reported.done + reported.done)
        if self.is_now("stale"):  # older than any: of one that was served meanwhile nobody can tell
            done = tuple((id, replace(one, versions=one.versions * 0 - 1)) for id, one in reported.done)
            reported = replace(reported, done=done)
        return reported

    async def publish(self, publication: Publication) -> str:
        await self._suffer()
        self.sent.append(publication)
        proof = await self.server.publish(publication)
        return "something else" if self.is_now("mute") else proof

    async def close(self) -> None:
        self.closed = True
        await self.server.close()


@dataclass(eq=False)
class World:
    """Workers of a pool, life after life."""

    faults: Mapping[tuple[int, int], Fault] = field(default_factory=dict)  # by (worker, life)
    make: Callable[[], SlowEngine] = SlowEngine
    start_s: float = 2.0
    links: dict[int, list[Link]] = field(default_factory=dict)

    async def spawn(self, number: int) -> Link:
        lives = self.links.setdefault(number, [])
        fault = self.faults.get((number, len(lives)))
        await asyncio.sleep(self.start_s)
        if fault is not None and fault.kind == "stillborn":
            lives.append(Link(SamplerServer(SlowEngine(), "", read), SlowEngine()))
            raise OSError("no such host")
        engine = self.make()
        link = Link(SamplerServer(engine, f"sampler-{number}", read), engine, fault)
        lives.append(link)
        return link

    def pool(self, count: int, **options: Any) -> EnginePool:
        usual: dict[str, Any] = {
            "place": place_least_loaded,
            "slots": 8,
            "silence_s": 20.0,
            "start_s": 50.0,
            "publication": publication,
        }
        return EnginePool(self.spawn, count, **{**usual, **options})


async def answers(pool: EnginePool, requests: Sequence[Request], after_s: float = 0.0) -> list[Completion]:
    """In the order of the requests; each exactly once."""
    await asyncio.sleep(after_s)
    found: dict[int, Completion] = {}
    async for index, completion in pool.generate(requests):
        assert index not in found, "answered twice"
        found[index] = completion
    return [found[i] for i in range(len(requests))]


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in completions]


def mixed(seed: int) -> Placement:
    """A placement full of whims: it may wait, and deal more than there is room for."""

    def place(waiting: Sequence[Job], workers: Sequence[Worker]) -> Starts:
        assert workers, "a placement is called for where somebody can work"
        rng = np.random.default_rng([seed, len(waiting), *(len(worker.jobs) for worker in workers)])
        ids = [worker.id for worker in workers]
        return tuple((job.id, int(rng.choice(ids))) for job in waiting if rng.random() < 0.7)

    return place
