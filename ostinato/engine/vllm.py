"""vLLM as an engine: takes tokens, returns tokens and log-probabilities, over HTTP; it is not imported here.

    generate -> one request each -> /inference/v1/generate -> tokens, log-probabilities, labels -> Completion
    publish  -> PEFT folder -> PolicyClient (pause, replace, label, resume) -> proof
    lend     -> pause, /release_kv_cache_memory ... /wake_up             around a training step on its GPU

Running requests go on under the new adapter with the keys and values that they have. vLLM labels every token
with the policy in force when it was sampled, so versions are exact; a label that was not published here means
that something else has published to the server, and none of its answers are used. New requests find no prefix
of an older policy: the label salts the prefix cache.

The served policy is proved three times: the worker returns the digest of the adapter that it has read, every
answer carries its labels, and at each publish an answer is scored by our own decoder (``vllm_proof``).

A server that is lost ends the run with an error that names it (WorkerLost); the run is saved and can be
resumed. The noise is vLLM's own: seeded by the request (not on a CPU), but dependent on the numerics of its
batch, so tokens are not guaranteed to be the same in another batch.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.engine.requests import Limits
from ostinato.engine.serve import make_failed
from ostinato.engine.vllm_answers import check_vllm_request, convert_answer, make_question, parse_choice
from ostinato.engine.vllm_policies import Policy, PolicyClient, write_policy
from ostinato.engine.vllm_proof import Verdict, draw_canary, prove_policy
from ostinato.engine.vllm_server import Reply, Server, Unreachable, check_server, make_vllm_lost, post
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.shapes import AdapterSpec
from ostinato.observe.timeline import Kind, Span
from ostinato.types import Completion, Request, Sampling

BEAT_S = 5.0  # seconds between two signs of life of a server with requests
MOST_OPEN = 512  # connections at once
SLOTS = 255  # requests at once to a server that others run: it takes 256 by default, a proof needs 1
PROOF_TOKENS = 32
QUESTIONS = "/inference/v1/generate"


class VllmEngine:
    """Implements ``protocols.Engine`` on a server that has the weights of ``decoder``; it begins with the
    base.

    ``folder`` is written to, and must be readable for the server under the same path. ``decode`` turns token
    ids into text. ``probe`` ([T] token ids) is answered at each publish; no policy's k3 may reach ``bound``.
    ``spec``: the adapted weights; a canary of all of them is published before any work. ``routes``,
    ``supports``: the server has to return the experts of tokens, and the ids that filters keep. ``slots``:
    requests that the server gets at once, 1 less than it takes. ``name`` is the worker's in the timeline.

    The server is started, and closed again if anything fails. Raises ValueError for a server that lacks a
    needed feature, WorkerLost for one that cannot be reached, ignores a kind of adapter, or is above the
    bound.
    """

    def __init__(
        self,
        server: Server,
        decoder: Decoder,
        *,
        folder: Path,
        probe: np.ndarray,
        spec: AdapterSpec | None = None,
        routes: bool = False,
        supports: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
        bound: float = 0.015,
        silence_s: float = 60.0,
        slots: int = SLOTS,
        name: str = "sampler-0",
    ) -> None:
        self._server, self._decoder, self._folder, self._decode = server, decoder, folder, decode
        self._probe = Request(tokens=probe, sampling=Sampling(max_tokens=PROOF_TOKENS), seed=(0,))
        self._bound, self._slots, self._timeline = bound, slots, _Timeline(name)
        self._client, self._policy = PolicyClient(server, silence_s), Policy(version=0)
        self._verdict: Verdict | None = None
        self._gate: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        try:
            with self._raise_named_loss("before any work"):
                server.start()
                self._client.ask("POST", "/resume")  # an earlier client may have left it paused
                self._facts = check_server(server.address, [0], server.key, routes=routes, supports=supports)
                self._limits = Limits(
                    context=min(self._facts.context, decoder.config.max_positions),
                    vocab_size=decoder.config.vocab_size,
                    blocks=sys.maxsize,  # vLLM manages its own blocks
                    has_text=decode is not None,
                    policies={"": 0},  # none by name
                )
            for adapters in (None if spec is None else draw_canary(decoder, spec), None):
                self.publish(adapters, 0)
        except BaseException:  # no caller has the engine yet, so nothing else would close the server
            server.close()
            raise
        self._timeline.started()

    @contextmanager
    def _raise_named_loss(self, occasion: str) -> Iterator[None]:
        """Raise WorkerLost if the server is lost within the context, with the occasion and the reason if it
        is known."""
        try:
            yield
        except Unreachable as error:
            raise make_vllm_lost(f"vLLM was lost {occasion}: {error}; {self._server.why()}") from error

    # ---- the protocol

    def take_verdict(self) -> Verdict | None:
        """Return the verdict on the newest policy and clear it; None if none was published since the last
        call."""
        verdict, self._verdict = self._verdict, None
        return verdict

    @property
    def served(self) -> tuple[int, str]:
        """(version, fingerprint) that the server has served, by its last answer, publish or sign of life."""
        version, _, fingerprint = self._client.label.partition(":")
        return int(version), "" if fingerprint == "base" else fingerprint

    @property
    def signs(self) -> int:
        """The number of signs of life: answers, and beats while requests run."""
        return self._client.signs

    def publish(self, adapters: Adapters | None, version: int) -> None:
        """Serve ``adapters`` (None: the base) from the next pass on; requests in flight go on under them.
        The policy is proved by an answer to the probe, and folders of older policies than the previous one
        are deleted.

        A request that began on the base ends on it, and its tokens have that version. Raises NotFinite, and
        the old policy stays; WorkerLost if the server refuses them, serves something else, or is lost.
        """
        old_policy, policy = self._policy, write_policy(adapters, version, self._folder, self._decoder.dtype)
        with self._raise_named_loss(f"when policy {policy.label} was published"):
            self._client.install(policy)
            self._policy = policy
            reply = self._client.ask("POST", QUESTIONS, self._make_question(self._probe, policy))
            completion = self._make_completion(self._probe, policy, reply)
        if completion.error:
            raise make_vllm_lost(f"vLLM did not answer under policy {policy.label}: {completion.error}")
        self._verdict = prove_policy(self._decoder, adapters, self._probe, completion, bound=self._bound)
        for old_folder in self._folder.glob("policy-*"):
            if old_folder not in (policy.folder, old_policy.folder):
                shutil.rmtree(old_folder, ignore_errors=True)

    @contextmanager
    def lend_memory(self) -> Iterator[None]:
        """Free the server's memory for keys and values within the context, for a training step on its GPU;
        requests that it has are aborted. Weights, adapters and CUDA graphs stay. Raises WorkerLost."""
        with self._raise_named_loss("when it lent its keys and values"):
            self._client.require_reply("POST", "/pause?mode=abort&clear_cache=true")
            self._client.require_reply("POST", "/release_kv_cache_memory")
        try:
            yield
        finally:
            with self._raise_named_loss("when it was woken"):
                self._client.require_reply("POST", "/wake_up?tags=kv_cache")

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        """Yield (index, completion) as requests finish; those that the caller does not await any more are
        cancelled. Raises ValueError for a request that never fits or that vLLM refuses, and WorkerLost."""
        for request in requests:
            check_vllm_request(request, self._limits)
        gate = self._find_gate()
        waiting = {
            asyncio.create_task(self._answer_request(gate, index, r)) for index, r in enumerate(requests)
        }
        watch = asyncio.create_task(self._watch())
        self._timeline.run(1)
        try:
            with self._raise_named_loss("while it had requests"):
                while waiting:
                    ended_tasks, _ = await asyncio.wait(
                        {*waiting, watch}, return_when=asyncio.FIRST_COMPLETED
                    )
                    if watch in ended_tasks:
                        watch.result()  # raises
                    for task in waiting & ended_tasks:
                        waiting.discard(task)
                        yield task.result()
        finally:
            self._timeline.run(-1)
            tasks: list[asyncio.Task[Any]] = [*waiting, watch]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def take_spans(self) -> list[Span]:
        """Return and clear the spans; see ``protocols.Timed``. Of a server it is only known when it has
        requests."""
        return self._timeline.take()

    def close(self) -> None:
        """End the server, if it was started here."""
        self._server.close()

    # ---- requests

    async def _answer_request(
        self, gate: asyncio.Semaphore, index: int, request: Request
    ) -> tuple[int, Completion]:
        """Send a request as soon as the gate allows, under the policy of that time; return its answer."""
        async with gate:
            policy, server = self._policy, self._server
            reply = await post(
                server.address, QUESTIONS, self._make_question(request, policy), key=server.key
            )
            if reply.status >= 500:  # an error of this request, or of a dying server: then ``beat`` raises
                await asyncio.to_thread(self._client.beat)
            completion = self._make_completion(request, policy, reply)
            self._client.signs += 1
            return index, completion

    def _make_question(self, request: Request, policy: Policy) -> dict[str, Any]:
        name, seeded = policy.name(self._facts.base), self._facts.seeds
        return make_question(request, name, policy.label, self._limits.context, seeded=seeded)

    def _make_completion(self, request: Request, policy: Policy, reply: Reply) -> Completion:
        """Convert the answer of a living server; a reply of 500 or more becomes an ERROR. Raises as
        ``parse_choice`` and ``PolicyClient.versions``."""
        if reply.status >= 500:
            return make_failed(f"vLLM answered {reply.error}")
        choice, cached = parse_choice(reply, request, policy.name(self._facts.base))
        versions, moe = self._client.versions(policy, choice), self._decoder.config.moe
        experts = None if moe is None else moe.num_experts
        return convert_answer(request, choice, versions, self._decode, cached=cached, num_experts=experts)

    def _find_gate(self) -> asyncio.Semaphore:
        """Return the semaphore that limits the requests of all calls in this event loop; a new loop gets a
        new one."""
        loop = asyncio.get_running_loop()
        if self._gate is None or self._gate[0] is not loop:
            self._gate = loop, asyncio.Semaphore(self._slots)
        return self._gate[1]

    async def _watch(self) -> None:
        """Ask for a sign of life after every BEAT_S without one. Raises Unreachable as ``beat`` does. It
        asks in a thread, since the event loop may be blocked for longer than the server may be silent."""
        while True:
            old_signs = self._client.signs
            await asyncio.sleep(BEAT_S)
            if self._client.signs == old_signs:
                await asyncio.to_thread(self._client.beat)


class _Timeline:
    """Spans of the start of the server, and of the times when it had requests."""

    def __init__(self, worker: str) -> None:
        self._worker, self._start, self._calls = worker, time.time(), 0
        self._spans: list[Span] = []

    def started(self) -> None:
        self._end(Kind.START)

    def run(self, calls: int) -> None:
        """Add ``calls`` (negative: subtract) to the calls that are running. If there were any, the time
        until now becomes a span."""
        if self._calls:
            self._end(Kind.DECODE)
        self._start, self._calls = time.time(), self._calls + calls

    def take(self) -> list[Span]:
        """Return the spans up to now, and clear them."""
        self.run(0)
        spans, self._spans = self._spans, []
        return spans

    def _end(self, kind: Kind) -> None:
        """Append the span that ends now, joined to the last one if that is of the same kind and adjacent."""
        last_span, stop = self._spans[-1] if self._spans else None, time.time()
        if last_span is not None and last_span.kind == kind and last_span.stop == self._start:
            self._spans.pop()
            self._start = last_span.start
        self._spans.append(Span(worker=self._worker, kind=kind, start=self._start, stop=stop))
