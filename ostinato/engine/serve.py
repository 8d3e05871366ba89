"""Samplers of a pool: any engine behind ``protocols.Sampler``, in this process or in a worker elsewhere.

    start    -> engine.generate  -> answers, kept until they are collected
    drop     -> engine.cut           (the tokens sampled so far are returned)
    publish  -> engine.publish   -> the fingerprint of the policy that the engine then serves
    collect  <- answers, spans, counters, and the served version and fingerprint

Nothing here waits for the trainer or for another worker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ostinato.observe.timeline import Kind, Span
from ostinato.protocols import Engine, Timed
from ostinato.types import Completion, HistoryEntry, PollResult, Publication, Request, Stop
from ostinato.workers.remote import Remote

Remember = Callable[[str, int, Sequence[HistoryEntry]], None]  # (uid, step, answers)
CLOSE_S = 5.0  # limit for cancelled calls to end


class Serving(Engine, Protocol):
    """An engine that reports which policy it serves, and whose running requests can be cut."""

    @property
    def served(self) -> tuple[int, str]:
        """(version, fingerprint of the weights that are served, computed from these)."""
        ...

    def cut(self, requests: Collection[Request]) -> None:
        """End these requests now: ``generate`` yields them as ABORT, with their tokens so far."""
        ...

    def under_way(self) -> Sequence[tuple[Request, int]]:
        """Return the requests that have not ended, each with the number of its sampled tokens."""
        ...


@runtime_checkable
class Reloadable(Protocol):
    """An engine that takes all weights from a file (``Publication.path``)."""

    def publish_weights(self, path: Path, version: int) -> None: ...


def make_failed(sentence: str) -> Completion:
    """Return an empty completion that ended as ERROR, with ``sentence`` as the reason."""
    empty_floats, empty_ids = np.zeros(0, np.float32), np.zeros(0, np.int32)
    return Completion(
        tokens=empty_ids, logprobs=empty_floats, versions=empty_ids, stop=Stop.ERROR, error=sentence
    )


class SamplerServer:
    """Implements ``protocols.Sampler`` with ``engine``.

    ``name`` is the worker's in the timeline. ``read`` turns a publication's payload into adapters for the
    engine (``model.wire.unpack_adapters``). ``remember`` receives the answers that come with publications;
    None if the engine does not draft from them. A request that the engine refuses (ValueError) ends alone, as
    ERROR; any other error of the engine is raised by the next ``collect`` without answers.
    """

    def __init__(
        self, engine: Serving, name: str, read: Callable[[Any], Any], *, remember: Remember | None = None
    ) -> None:
        self._engine, self._name, self._read, self._remember = engine, name, read, remember
        self._running: dict[int, Request] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._done: list[tuple[int, Completion]] = []
        self._spans: list[Span] = []
        self._engine_error: Exception | None = None
        self._has_news = asyncio.Event()

    async def start(self, calls: Sequence[tuple[int, Request]], drop: Sequence[int] = ()) -> None:
        """Start ``calls`` as one call of the engine, and cut those of ``drop`` that run; see
        ``protocols.Sampler``."""
        if calls:
            self._running.update(calls)
            self._start_calls(dict(calls))
        if drop:
            await asyncio.sleep(0)  # calls that were just started reach the engine first
            self._engine.cut([self._running[id] for id in drop if id in self._running])

    async def collect(self, wait_s: float) -> PollResult:
        """Return the answers since the last call; wait at most ``wait_s`` for the first one. Raises the
        error of the engine, after all answers have been returned."""
        if not self._done and self._engine_error is None:
            self._has_news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_news.wait(), wait_s)
        if not self._done and self._engine_error is not None:
            raise self._engine_error
        return self._report()  # nothing awaits from here on, so what is taken is returned

    async def publish(self, publication: Publication) -> str:
        """Serve the policy from the next pass on, remember its answers, and return the fingerprint that is
        served. Raises the errors of the engine and ``read``, and RuntimeError for weights that the engine
        cannot load; then the old policy stays."""
        start, engine, version = time.time(), self._engine, publication.version
        size = publication.size
        if publication.path:
            if not isinstance(engine, Reloadable):
                raise RuntimeError(f"{self._name} cannot load all weights ({publication.path})")
            engine.publish_weights(Path(publication.path), version)
            size = Path(publication.path).stat().st_size
        else:
            engine.publish(self._read(publication.payload), version)
        if self._remember is not None:
            for answers in publication.answers:
                self._remember(*answers)
        fingerprint = engine.served[1]
        self._spans.append(
            Span(worker=self._name, kind=Kind.PUBLISH, start=start, stop=time.time(), amount=size)
        )
        return fingerprint

    async def close(self) -> None:
        """Cancel all calls, which then have no answers, and wait up to CLOSE_S for their end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    # ---- calls

    def _start_calls(self, calls: Mapping[int, Request]) -> None:
        """Start a task for the calls, and keep it until it ends."""
        task = asyncio.create_task(self._run_calls(calls))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_calls(self, calls: Mapping[int, Request]) -> None:
        """Store the answers of ``calls``. If the engine refuses one of them, each is started again alone."""
        ids, open_ids = list(calls), set(calls)
        try:
            async for index, completion in self._engine.generate(list(calls.values())):
                open_ids.discard(ids[index])
                self._store_answer(ids[index], completion)
        except ValueError as error:
            if len(calls) == 1:
                self._store_answer(ids[0], make_failed(str(error)))
                return
            for id in sorted(open_ids):  # any of them may be at fault: each is tried alone
                self._start_calls({id: calls[id]})
        except Exception as error:  # the edge of the process: the collector gets the error
            self._engine_error = error
            self._has_news.set()

    def _store_answer(self, id: int, completion: Completion) -> None:
        """Store the answer of a running call for ``collect``; nothing if it does not run any more."""
        if self._running.pop(id, None) is not None:
            self._done.append((id, completion))
            self._has_news.set()

    # ---- reports

    def _report(self) -> PollResult:
        """Return the answers and spans that were not reported yet, and clear them, with the present state."""
        (version, fingerprint), counters = self._engine.served, self._read_counters()
        done, self._done = tuple(self._done), []
        return PollResult(
            done=done,
            version=version,
            fingerprint=fingerprint,
            sampled=int(counters["decoded"]) if "decoded" in counters else -1,
            progress=self._read_progress(),
            spans=self._take_spans(),
            counters=counters,
        )

    def _read_progress(self) -> tuple[tuple[int, int], ...]:
        if not self._running:
            return ()
        ids = {id(request): call for call, request in self._running.items()}
        progress = ((ids.get(id(request)), tokens) for request, tokens in self._engine.under_way())
        return tuple((call, tokens) for call, tokens in progress if call is not None)

    def _read_counters(self) -> Mapping[str, float]:
        counters = getattr(self._engine, "counters", None)
        if is_dataclass(counters) and not isinstance(counters, type):
            return asdict(counters)
        return dict(counters) if isinstance(counters, Mapping) else {}

    def _take_spans(self) -> tuple[Span, ...]:
        """Return the engine's passes and the publications since the last call, sorted by their starts, and
        clear them."""
        spans, self._spans = self._spans, []
        if isinstance(self._engine, _Timed):
            spans += self._engine.take_spans()
        return tuple(sorted(spans, key=lambda span: span.start))


@runtime_checkable
class _Timed(Timed, Protocol): ...


class SamplerLink:
    """Forwards to a sampler elsewhere; every wait is bounded by ``silence_s`` beyond the requested time.

    Raises WorkerLost when the worker died or is silent; errors of the sampler itself are raised unchanged.
    """

    def __init__(self, remote: Remote, silence_s: float) -> None:
        self.name = remote.name
        self._remote, self._silence_s = remote, silence_s

    async def wait_until_built(self) -> SamplerLink:
        """Wait until the sampler is built, and return this link: a policy that is sent before the model is
        loaded may be lost. The worker is ended if building fails, the wait is cancelled or ``silence_s`` is
        over. Answers that have ended are discarded."""
        try:
            await self.collect(0.0)
        except BaseException:
            self._remote.kill()
            raise
        return self

    async def start(self, calls: Sequence[tuple[int, Request]], drop: Sequence[int] = ()) -> None:
        await self._remote.call("start", calls, drop, within_s=self._silence_s)

    async def collect(self, wait_s: float) -> PollResult:
        return await self._remote.call("collect", wait_s, within_s=wait_s + self._silence_s)

    async def publish(self, publication: Publication) -> str:
        """Publish; the publication is packed once, however many samplers it is sent to in turn."""
        return await self._remote.call("publish", publication, within_s=self._silence_s, shared=True)

    async def close(self) -> None:
        """End the worker, at once."""
        self._remote.kill()
