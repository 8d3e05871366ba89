"""vLLM as an engine: tokens in, tokens and log-probabilities out, over HTTP; it is not imported here.

    generate -> one request each -> /inference/v1/generate -> tokens, log-probabilities, labels -> Completion
    publish  -> PEFT folder -> pause (KV kept) -> the adapter replaced -> labelled -> resume

Running requests go on under the new adapter with the keys and values that they have. vLLM labels every token
with the policy in force when it was sampled, so versions are exact; a label that was not published here is a
server that is not ours any more, and nothing that it said is used. New requests find no prefix of an older
policy: the label salts the prefix cache.

What is served is proven three times: the worker tells the digest of the adapter that it has read, every
answer carries its labels, and the first answers of every policy are scored by our own decoder (k3 below
``bound``).

A server that dies, or does not answer for ``silence_s``, is started anew at most ``max_restarts`` times in a
row, gets the policy, and is asked again; a prompt that breaks it again and again is found, and ends as an
error (``vllm_company``). The noise is vLLM's own: seeded by the request (not on a CPU), but a
function of the numerics of its batch, so there is no law that tokens are the same in any company.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
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

from ostinato.engine.vllm_answers import answer, failed, question
from ostinato.engine.vllm_company import Company
from ostinato.engine.vllm_http import Reply, Unreachable, call, post
from ostinato.engine.vllm_proof import Proofs, Verdict
from ostinato.engine.vllm_server import Server, check, vllm_lost, vllm_wrong
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.peft_io import PEFT_CONFIG, PEFT_TENSORS, write_peft
from ostinato.model.wire import check_finite, fingerprint
from ostinato.observe.timeline import Kind, Span
from ostinato.types import Completion, Request, Sampling
from ostinato.workers.lost import WorkerLost
from ostinato.workers.restarts import Restarts

logger = logging.getLogger(__name__)
LORA = "ostinato"  # the name of the adapter there
COLDEST = 0.01  # vLLM raises temperatures between 0 and this to it
BEAT_S = 5.0  # between two signs of life of a server with requests
MOST_OPEN = 512  # connections at once
MOST_SPANS = 10_000
PROBE_TOKENS = 48
QUESTIONS = "/inference/v1/generate"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Policy:
    """What was published."""

    version: int
    fingerprint: str = ""  # "": the base
    folder: Path | None = None  # of its adapter
    digest: str = ""  # of the files in it
    adapters: Adapters | None = None  # a copy

    @property
    def label(self) -> str:
        return f"{self.version}:{self.fingerprint or 'base'}"


class VllmEngine:
    """Implements ``protocols.Engine`` on a server that has the weights of ``decoder``; it begins with the
    base.

    ``folder`` is written to, and has to be read by the server under the same path. ``decode`` turns token ids
    into text. ``probe`` ([T] token ids) is what the base is asked before any work; no policy's k3 may reach
    ``bound``. ``name`` is the worker's in the timeline.

    Raises ValueError for a server that cannot do what is asked of it, WorkerLost where it is not there.
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
        self._probe, self._silence_s = probe, silence_s
        self._restarts, self._max_quarantined = Restarts(most=max_restarts), max_quarantined
        self._time = _Time(name)
        self._lock = threading.RLock()  # of the server's life and of what it serves
        self._epoch = 0
        self._desk: _Desk | None = None
        self._heard = ""  # the label that the server told last
        self.signs = 0  # of life: answers, and beats while requests run
        self.counters = Counter[str]()
        self._proofs = Proofs(decoder, bound)
        self._closed = False
        self._slot = -1  # the version in the adapter's place
        self._labels: dict[str, int] = {}  # to the version that was in the adapter's place
        try:
            with self._time.of(Kind.START):
                server.revive()
            self._ask("POST", "/resume")  # whoever was here before may have left it paused
            self._facts = check(server.address, [0], server.key)
            self.context_limit = min(self._facts.context, decoder.config.max_positions)
            self._policy = self._written(None, 0)
            self._install(self._policy)
            self._prove_the_base()
        except Unreachable as lost:
            server.close()
            raise vllm_lost(f"vLLM was lost before any work: {lost}; {server.why()}") from lost
        except BaseException:  # nobody else knows of the server yet
            server.close()
            raise

    # ---- the protocol

    @property
    def version(self) -> int:
        return self._policy.version

    def take_verdict(self) -> Verdict | None:
        """On the newest policy that was judged since the last call; None: none was."""
        return self._proofs.take_verdict()

    @property
    def served(self) -> tuple[int, str]:
        """(version, fingerprint) that the server was last heard to serve, by answer, publish or sign of
        life."""
        version, _, told = self._heard.partition(":")
        return int(version), "" if told == "base" else told

    def publish(self, adapters: Adapters | None, version: int) -> None:
        """Serve ``adapters`` (None: the base) from the next pass on; requests in flight go on under them.

        A request that began on the base ends on it, and its tokens say so. Raises NotFinite, and the old
        policy goes on; WorkerLost where the server does not take them, or is lost.
        """
        before = self._policy
        with self._time.of(None):  # whoever publishes tells of it
            policy = self._written(adapters, version)
            with self._lock:
                try:
                    self._install(policy)
                except Unreachable as lost:
                    self._revived(str(lost), policy)
                self._policy = policy
        for old in self._folder.glob("policy-*"):
            if old not in (policy.folder, before.folder):
                shutil.rmtree(old, ignore_errors=True)

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        """Yield (index, completion) as requests finish. Raises ValueError for requests that never fit, and
        WorkerLost."""
        for request in requests:
            self._refuse(request)
        desk = self._desk_here()
        tasks = [asyncio.create_task(self._answer(desk, index, r)) for index, r in enumerate(requests)]
        self._time.asked(len(tasks))
        for task in tasks:
            task.add_done_callback(lambda task: self._time.answered())
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
        self._closed = True
        self._server.close()
        with self._lock:  # a restart that was under way has ended, and what it had started ends too
            self._server.close()

    # ---- requests

    def _refuse(self, request: Request) -> None:
        sampling, length = request.sampling, len(request.tokens)
        vocab = self._decoder.config.vocab_size
        if length == 0:
            raise ValueError("a request has no tokens; give at least one, for example the bos token")
        for token in (int(request.tokens.min()), int(request.tokens.max())):
            if not 0 <= token < vocab:
                raise ValueError(f"a prompt has the token {token}, but the model's are 0 to {vocab - 1}")
        if request.partial is not None:
            raise ValueError("a request brings a part of its answer, which vLLM cannot go on with")
        if length >= self.context_limit:
            raise ValueError(
                f"a prompt has {length} tokens and the context {self.context_limit}; shorten the prompt"
            )
        if 0 < sampling.temperature < COLDEST:
            raise ValueError(
                f"sampling.temperature is {sampling.temperature}; vLLM takes 0 (greedy) or {COLDEST} and more"
            )
        if sampling.min_tokens and sampling.stop_strings:
            raise ValueError(
                f"sampling.min_tokens is {sampling.min_tokens} with stop_strings, which vLLM "
                "does not look for before as many tokens; drop one of them"
            )
        if sampling.stop_strings and self._decode is None:
            raise ValueError("sampling.stop_strings need a tokenizer; give the engine decode=")

    async def _answer(self, desk: _Desk, index: int, request: Request) -> tuple[int, Completion]:
        key = request.uid, request.seed[:-1]
        async with desk.gate:
            with desk.company.member(key):
                while key not in desk.company.guilty:
                    async with desk.company.together(key):
                        found = await self._attempt(desk, request)
                    if found is not None:
                        await self._prove(desk, request, *found)
                        return index, found[1]
                return index, failed(desk.company.guilty[key])

    async def _attempt(self, desk: _Desk, request: Request) -> tuple[Policy, Completion] | None:
        """(the policy that was asked, what it said); None: it is to be asked again."""
        epoch, policy = self._epoch, self._policy
        try:
            reply = await self._reply(desk, request, policy, epoch)
            said = self._said(request, policy, reply)
        except Unreachable as lost:
            await asyncio.to_thread(self._recover, epoch, str(lost))
            return None
        if epoch != self._epoch:  # begun on a server that was given up, whatever it goes by now
            return None
        self._restarts.worked()
        self.signs += 1
        return policy, said

    async def _reply(self, desk: _Desk, request: Request, policy: Policy, epoch: int) -> Reply:
        """Raises Unreachable where the server was lost, and those who were asked bear the blame."""
        try:
            question = self._question(request, policy)
            asking = post(self._server.address, QUESTIONS, question, key=self._server.key)
            reply = await self._watched(desk, asking)
            if reply.status >= 500:  # of this request, or the end of all
                await asyncio.to_thread(self._beat)
            return reply
        except Unreachable as lost:
            raise Unreachable(self._blame(desk, epoch, str(lost))) from lost

    def _blame(self, desk: _Desk, epoch: int, why: str) -> str:
        """``why``, and who was asked; the first to find out says it. Raises WorkerLost for too many
        culprits."""
        if epoch != self._epoch:
            return why
        blamed, told = desk.blamed
        if epoch == blamed:
            return told
        company = desk.company
        told = f"{why}, while these were asked: {company}"
        desk.blamed = epoch, told
        explained, found = company.blame(why)
        self.counters["workers/quarantined"] += len(found)
        if len(company.guilty) > self._max_quarantined:
            raise vllm_lost(
                f"{len(company.guilty)} prompts broke vLLM (cluster.max_quarantined is "
                f"{self._max_quarantined}); the latest: {[*company.guilty.values()][-1]}"
            )
        if explained:  # no failure of the server's
            self._restarts.worked()
        return told

    def _question(self, request: Request, policy: Policy) -> dict[str, Any]:
        name, seeded = self._name_of(policy), self._facts.seeds
        return question(request, name, policy.label, self.context_limit, seeded=seeded)

    def _said(self, request: Request, policy: Policy, reply: Reply) -> Completion:
        """The answer in the ``reply`` of a living server. Raises ValueError where it refused the request, and
        Unreachable where it is not the server that was asked."""
        if reply.status >= 500:
            return failed(f"vLLM answered {reply.error}")
        if reply.status == 404:  # it does not know our adapter (any more)
            raise Unreachable(f"vLLM answered {reply.error}")
        if reply.status != 200:
            raise ValueError(f"vLLM refused a request of {len(request.tokens)} tokens with {reply.error}")
        choice, name = reply.body["choices"][0], self._name_of(policy)
        if reply.body["model"] != name:
            raise Unreachable(f"vLLM answered as {reply.body['model']!r}, and {name!r} was asked")
        versions = self._versions(policy, choice)
        details = reply.body["usage"].get("prompt_tokens_details") or {}
        cached = int(details.get("cached_tokens") or 0)
        moe = self._decoder.config.moe
        experts = None if moe is None else moe.num_experts
        return answer(request, choice, versions, self._decode, cached=cached, num_experts=experts)

    def _versions(self, policy: Policy, choice: dict[str, Any]) -> np.ndarray:
        """[T] int32, by the labels of the tokens."""
        spans, count = choice["weight_versions"] or [], len(choice["token_ids"])
        versions = np.full(count, -1, np.int32)
        for span in spans:
            if span["version"] not in self._labels:
                raise Unreachable(f"vLLM serves policy {span['version']!r}, which was not published")
            served = self._labels[span["version"]] if policy.folder is not None else policy.version
            versions[span["start"] : span["end"]] = served
            self._heard = span["version"]
        if count and versions.min() < policy.version:
            raise Unreachable(f"vLLM answered as policy {versions.min()} where {policy.version} was asked")
        return versions

    def _name_of(self, policy: Policy) -> str:
        return self._facts.base if policy.folder is None else LORA

    # ---- signs of life

    def _desk_here(self) -> _Desk:
        """What the calls in this event loop share."""
        loop = asyncio.get_running_loop()
        if self._desk is None or self._desk.loop is not loop:
            self._desk = _Desk(loop=loop, gate=asyncio.Semaphore(MOST_OPEN))
        return self._desk

    async def _watched(self, desk: _Desk, asking: Coroutine[Any, Any, Reply]) -> Reply:
        """The reply, or Unreachable as soon as the server gives no sign of life."""
        asked = asyncio.create_task(asking)
        if desk.watch is None or desk.watch.done():
            desk.watch = asyncio.create_task(self._watch())
        watch = desk.watch  # whoever comes when it has ended begins another
        desk.open += 1
        try:
            await asyncio.wait({asked, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                watch.result()
            return asked.result()
        finally:
            asked.cancel()
            desk.open -= 1
            if not desk.open:  # one that is being cancelled is not done yet: nobody may take it up
                desk.watch.cancel()
                desk.watch = None

    async def _watch(self) -> None:
        """Ends with Unreachable. In a thread, for the event loop may be kept busy longer than silence is
        borne."""
        while True:
            await asyncio.sleep(BEAT_S)
            await asyncio.to_thread(self._beat)

    def _beat(self) -> None:
        """The engine core answers this between two passes. ``/health`` says well for a while after it
        died."""
        reply = self._call("GET", "/weight_info")
        if reply.status != 200:
            raise Unreachable(f"vLLM told no sign of life but {reply.error}")
        label = reply.body["weight_version"]
        if label not in self._labels:
            raise Unreachable(f"vLLM serves policy {label!r}, which was not published")
        self._heard = label
        self.signs += 1

    def _recover(self, epoch: int, why: str) -> None:
        """Have a server again, after it was lost in ``epoch``. One of many that find it lost does the
        work."""
        with self._lock:
            if epoch == self._epoch:
                self._revived(why, self._policy)

    def _revived(self, why: str, policy: Policy) -> None:
        """A server that serves ``policy``, in a new epoch. Raises WorkerLost."""
        while True:
            self._restarts.in_a_row += 1
            lost, most = self._restarts.in_a_row, self._restarts.most
            if self._restarts.spent or self._closed:
                raise vllm_lost(f"vLLM was lost {lost} times in a row: {why}; {self._server.why()}")
            logger.warning(f"vLLM was lost and is started anew ({lost} of {most}): {why}")
            try:
                with self._time.of(Kind.START):
                    self._proofs.forget()
                    self._server.revive()
                self._install(policy)
            except (Unreachable, WorkerLost) as error:
                if isinstance(error, WorkerLost) and error.final:
                    raise
                why = str(error)
                continue
            self._epoch += 1
            self.counters["workers/restarts"] += 1
            return

    # ---- publishing

    def _written(self, adapters: Adapters | None, version: int) -> Policy:
        """Checked, and in files. Raises NotFinite."""
        if adapters is None:
            return Policy(version=version)
        check_finite(adapters)
        mark = fingerprint(adapters)
        folder = self._folder / f"policy-{version}-{mark}"
        folder.mkdir(parents=True, exist_ok=True)
        write_peft(adapters, folder)
        return Policy(
            version=version,
            fingerprint=mark,
            folder=folder,
            digest=_digest(folder),
            adapters=adapters.detach_copy(),
        )

    def _install(self, policy: Policy) -> None:
        """Have the server serve it. Raises WorkerLost and Unreachable, and the server stays paused: an
        adapter that was replaced, but not labelled, would sample under the name of the one before."""
        self._must("POST", "/pause?mode=keep&clear_cache=false")
        if policy.folder is not None:
            self._load(policy, policy.folder)
            self._slot = policy.version
        self._labels[policy.label] = self._slot
        self._must("POST", "/update_weight_version", {"new_version": policy.label})
        self._must("POST", "/resume")
        self._beat()
        if self._heard != policy.label:
            raise vllm_wrong(f"vLLM serves policy {self._heard!r} after {policy.label!r} was published")

    def _load(self, policy: Policy, folder: Path) -> None:
        """The adapter into its place, which the first one makes."""
        known = {card["id"] for card in self._must("GET", "/v1/models")["data"]}
        if LORA not in known:
            body = {"lora_name": LORA, "lora_path": str(folder.absolute())}
            if (reply := self._ask("POST", "/v1/load_lora_adapter", body)).status != 200:
                self._must("POST", "/resume")  # nothing was replaced
                raise vllm_wrong(f"vLLM does not take the adapter of policy {policy.label}: {reply.error}")
        body = {"method": "ostinato_publish", "args": [str(folder.absolute())]}
        if (reply := self._ask("POST", "/collective_rpc", body)).status != 200:
            raise vllm_wrong(f"vLLM does not take the adapter of policy {policy.label}: {reply.error}")
        if read := {*reply.body["results"]} - {policy.digest}:
            raise vllm_wrong(f"vLLM read {sorted(read)} in {folder}, where {policy.digest} was written")

    # ---- proofs

    def _prove_the_base(self) -> None:
        """Before any work: that the server has the weights, the dtype and the log-probabilities it should."""
        if self._probe is not None:
            policy, sampling = self._policy, Sampling(max_tokens=PROBE_TOKENS)
            request = Request(tokens=self._probe, sampling=sampling, seed=(0,))
            reply = self._ask("POST", QUESTIONS, self._question(request, policy))
            self._proofs.hear(policy.label, None, request, self._said(request, policy, reply))

    async def _prove(self, desk: _Desk, request: Request, policy: Policy, said: Completion) -> None:
        """The first answers that ``policy`` alone has sampled prove it. Raises WorkerLost."""
        if self._proofs.want(policy.label, policy.version, request, said):
            async with desk.proof:
                await asyncio.to_thread(self._proofs.hear, policy.label, policy.adapters, request, said)

    # ---- calls

    def _must(self, method: str, path: str, body: Any = None) -> Any:
        """What the server says. Raises Unreachable where it refuses: it always can."""
        if (reply := self._ask(method, path, body)).status != 200:
            raise Unreachable(f"{method} {path}: {reply.error}")
        return reply.body

    def _ask(self, method: str, path: str, body: Any = None) -> Reply:
        """Raises Unreachable where nobody answers, or the last words of a server that dies."""
        reply = self._call(method, path, body)
        if reply.status >= 500:
            self._beat()
        return reply

    def _call(self, method: str, path: str, body: Any = None) -> Reply:
        server = self._server
        return call(server.address, method, path, body, key=server.key, timeout_s=self._silence_s)


# ---- bookkeeping


@dataclass(slots=True, kw_only=True)
class _Desk:
    """What the calls in one event loop share."""

    loop: asyncio.AbstractEventLoop
    gate: asyncio.Semaphore
    proof: asyncio.Lock = field(default_factory=asyncio.Lock)
    company: Company = field(default_factory=Company)
    blamed: tuple[int, str] = (-1, "")  # the last epoch whose loss has been, and what is told of it
    open: int = 0  # questions that are being answered
    watch: asyncio.Task[None] | None = None


class _Time:
    """What the worker did, one thing at a time: it decodes while it has requests, unless it does what is
    named by ``of``."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)  # the newest, where nobody takes them
        self._lock = threading.Lock()
        self._running = 0  # requests
        self._doing: tuple[Kind | None] | None = None
        self._since = time.time()

    def asked(self, requests: int) -> None:
        with self._lock:
            self._turn()
            self._running += requests

    def answered(self) -> None:
        with self._lock:
            if self._running == 1:
                self._turn()
            self._running -= 1

    @contextmanager
    def of(self, kind: Kind | None) -> Iterator[None]:
        """Doing this, and nothing else; None: what somebody else tells of."""
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
        """What was done until now is a span."""
        (kind,) = self._doing or (Kind.DECODE if self._running else None,)
        now = time.time()
        if kind is not None and now > self._since:
            self._spans.append(Span(worker=self._worker, kind=kind, start=self._since, stop=now))
        self._since = now


def _digest(folder: Path) -> str:
    """As the worker computes it (``interop.vllm_worker.digest``)."""
    hashed = blake2b(digest_size=8)
    for name in (PEFT_CONFIG, PEFT_TENSORS):
        hashed.update((folder / name).read_bytes())
    return hashed.hexdigest()


__all__ = ["Policy", "VllmEngine"]
