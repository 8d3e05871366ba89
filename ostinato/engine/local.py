"""The in-process engine: continuous batching on the trainer's own base tensors.

    generate -> submit -> waiting --admit--> running --step--> running | finished
                             ^                  |
                             +---- preempt -----+        (out of blocks: recomputed later, same tokens)

A step is one forward over a flat row of tokens: one per decoding sequence, and chunks of prompts within a
budget. Sequences with a known prefix begin after it. A group's siblings wait one step for the first of them,
then share its prompt. Nothing a sequence receives depends on the others: kernels work row by row and noise is
addressed.

In-flight publish: running sequences keep their keys and values and go on under the new adapters; every token
carries the version that sampled it, and such sequences are not added to the prefix tree.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ostinato.algo.noise import key, uniform
from ostinato.engine.cache import BLOCK, KVCache, OutOfBlocks
from ostinato.engine.paged import KVStore, NativePaged, Rows, TorchPaged, block_bytes
from ostinato.engine.sampler import Settings, sample
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS
from ostinato.types import NO_EXPERT, Completion, Request, Stop

_LOGIT_BYTES = 64 << 20  # logits held at once; rows beyond it are sampled in chunks


@dataclass(slots=True)
class Counters:
    """What the engine did since it was made."""

    steps: int = 0
    prefilled: int = 0  # tokens run to fill the cache
    decoded: int = 0  # tokens sampled
    cached: int = 0  # prompt tokens found in the prefix tree
    preempted: int = 0
    errors: int = 0


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request on its way."""

    index: int  # of the request in its call
    request: Request
    results: asyncio.Queue[tuple[int, Completion] | BaseException]
    on_token: Callable[[int, int], None] | None
    tokens: list[int]  # prompt and what has been sampled
    prompt_len: int
    address: int  # key of its noise
    limit: int  # length at which it is truncated
    version: int  # when its cache was begun
    blocks: list[int] = field(default_factory=list)
    computed: int = 0  # positions whose keys and values are known
    cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    nodes: list = field(default_factory=list)  # tree nodes that this prefill is about to make ready


class LocalEngine:
    """Implements ``protocols.Engine`` on a ``Decoder``; the base weights are the decoder's own tensors.

    ``decode`` turns token ids into text (needed for stop strings and ``Completion.text``). ``context_limit``
    is the largest number of tokens in a sequence. Raises ValueError for requests that can never fit.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        kernels: Kernels | None = None,
        decode: Callable[[Sequence[int]], str] | None = None,
        kv_memory_mb: int = 512,
        max_batch: int = 256,
        step_tokens: int = 2048,
        context_limit: int = 4096,
        record_routing: bool = True,
    ) -> None:
        if max_batch < 1 or step_tokens < 1:
            raise ValueError(f"engine.max_batch {max_batch} and step_tokens {step_tokens} must be at least 1")
        self.decoder = decoder
        self.counters = Counters()
        self.version = 0
        self._kernels = kernels
        self._ops = kernels.ops if kernels else TORCH_OPS
        self._decode = decode
        self._max_batch, self._step_tokens, self.context_limit = max_batch, step_tokens, context_limit
        self._device = decoder.device
        self._prepared = None
        layers, shape = decoder.config.num_layers, decoder.kv_shape
        blocks = (kv_memory_mb << 20) // block_bytes(layers, shape, decoder.dtype)
        self._cache = KVCache(blocks)
        self._store = KVStore.allocate(layers, blocks, shape, decoder.dtype, self._device)
        moe = decoder.config.moe
        self._routes: np.ndarray | None = None
        if moe is not None and record_routing:
            routes_shape = (blocks * BLOCK, len(moe.layers), moe.top_k)
            self._routes = np.full(routes_shape, NO_EXPERT, np.int16)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._driver: asyncio.Task[None] | None = None

    # ---- the protocol

    def publish(self, adapters: Adapters | None, version: int) -> None:
        """Serve a copy of ``adapters`` (None: the base) from the next step on; the prefix tree is
        forgotten.
        """
        with torch.inference_mode():
            self._prepared = (
                adapters.detach_copy().prepared(self.decoder.dtype) if adapters is not None else None
            )
        self.version = version
        self._cache.forget()

    async def generate(
        self, requests: Sequence[Request], on_token: Callable[[int, int], None] | None = None
    ) -> AsyncIterator[tuple[int, Completion]]:
        """Yield (index, completion) as requests finish; ``on_token(index, token)`` streams. Calls share one
        batch.
        """
        results: asyncio.Queue[tuple[int, Completion] | BaseException] = asyncio.Queue()
        mine = [self._sequence(index, request, results, on_token) for index, request in enumerate(requests)]
        self._leave_other_loops()
        self._waiting.extend(mine)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            for _ in mine:
                result = await results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            self._abandon(mine)

    def _leave_other_loops(self) -> None:
        """Drop what was asked for in an event loop that has been closed; refuse to be shared by two."""
        if self._driver is None or self._driver.done():
            return
        loop = self._driver.get_loop()
        if loop.is_closed():
            self._abandon([*self._running, *self._waiting])
            self._driver = None
        elif loop is not asyncio.get_running_loop():
            raise RuntimeError("the engine is at work in another event loop; make one engine for each loop")

    # ---- life of a sequence

    def _sequence(
        self,
        index: int,
        request: Request,
        results: asyncio.Queue[tuple[int, Completion] | BaseException],
        on_token: Callable[[int, int], None] | None,
    ) -> _Sequence:
        sampling, length = request.sampling, len(request.tokens)
        limit = min(length + sampling.max_tokens, self.context_limit)
        if length == 0:
            raise ValueError("a request has no tokens; give at least one, for example the bos token")
        tokens, vocab = [int(t) for t in request.tokens], self.decoder.config.vocab_size
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < vocab:
                raise ValueError(f"a prompt has the token {token}, but the model's are 0 to {vocab - 1}")
        if length >= self.context_limit:
            raise ValueError(
                f"a prompt has {length} tokens and the context {self.context_limit}; shorten the prompt"
            )
        if (limit + BLOCK - 1) // BLOCK > self._cache.num_blocks:
            raise ValueError(
                f"a request of up to {limit} tokens does not fit the KV cache of "
                f"{self._cache.num_blocks * BLOCK}; raise engine.kv_memory_mb or lower max_tokens"
            )
        if sampling.stop_strings and self._decode is None:
            raise ValueError("sampling.stop_strings need a tokenizer; give the engine decode=")
        return _Sequence(
            index=index,
            request=request,
            results=results,
            on_token=on_token,
            tokens=tokens,
            prompt_len=length,
            address=key(request.seed),
            limit=limit,
            version=self.version,
        )

    async def _drive(self) -> None:
        """Step while there is work; an error of a step reaches every caller."""
        try:
            while self._waiting or self._running:
                await asyncio.sleep(0)  # callers submit and consume between steps
                self.step()
        except BaseException as error:
            for sequence in (*self._waiting, *self._running):
                sequence.results.put_nowait(error)
            if not isinstance(error, Exception):
                raise  # a cancelled loop or Ctrl-C is not ours to swallow; the callers have the rest

    def _abandon(self, sequences: list[_Sequence]) -> None:
        """Drop what the caller no longer waits for."""
        dropped = set(map(id, sequences))
        for sequence in self._running:
            if id(sequence) in dropped:
                self._release(sequence)
        self._running = [s for s in self._running if id(s) not in dropped]
        self._waiting = deque(s for s in self._waiting if id(s) not in dropped)

    def _release(self, sequence: _Sequence) -> None:
        self._cache.discard(sequence.nodes)
        self._cache.release(sequence.blocks)
        sequence.nodes, sequence.blocks, sequence.computed = [], [], 0

    # ---- one step

    def step(self) -> None:
        """Admit, run one forward, sample, and hand out what has finished."""
        self._admit()
        work = self._schedule()
        if not work:
            return
        version = self.version  # a callback that publishes changes it for the next step
        hidden, routing, slots = self._forward(work)
        if self._routes is not None and routing is not None:
            self._routes[slots] = routing.to(torch.int16).cpu().numpy()
        ends = np.cumsum([count for _, count in work]) - 1
        ready: list[tuple[_Sequence, int]] = []
        for (sequence, count), end in zip(work, ends.tolist(), strict=True):
            sequence.computed += count
            if sequence.computed == len(sequence.tokens):
                for node in sequence.nodes:
                    node.ready = True
                sequence.nodes = []
                ready.append((sequence, end))
        self.counters.steps += 1
        self.counters.prefilled += int(ends[-1]) + 1 - len(ready)
        if ready:
            self._sample(hidden, ready, version)

    def _admit(self) -> None:
        """Move waiting sequences to running while there is room."""
        if not self._waiting or len(self._running) >= self._max_batch:
            return
        copies: list[tuple[int, int]] = []
        later: deque[_Sequence] = deque()
        room = self._cache.available - len(self._running)  # one spare block for each that runs
        while self._waiting and len(self._running) < self._max_batch:
            sequence = self._waiting.popleft()
            match = self._cache.match(sequence.tokens)
            if match.pending:  # a sibling is computing this prefix right now
                later.append(sequence)
                continue
            # a matched block that only the tree holds was counted as room
            needed = len(sequence.tokens) // BLOCK + 1 - sum(self._cache.refs[b] > 1 for b in match.blocks)
            if needed > room and self._running:
                later.append(sequence)
                break
            self._cache.share(match.blocks)
            sequence.blocks = list(match.blocks)
            # The source may be evicted here, even to be the target: it keeps its content until the copies are
            # made below, before any forward.
            if match.copied:
                sequence.blocks.append(self._cache.allocate())
                copies.append((match.source, sequence.blocks[-1]))
            while len(sequence.blocks) * BLOCK < len(sequence.tokens):
                sequence.blocks.append(self._cache.allocate())
            sequence.computed = match.tokens
            sequence.version = self.version
            if not sequence.logprobs:
                sequence.cached = min(match.tokens, sequence.prompt_len)
                self.counters.cached += sequence.cached
            sequence.nodes = self._cache.insert(sequence.tokens, sequence.blocks, ready=False)
            room -= needed
            self._running.append(sequence)
        later.extend(self._waiting)
        self._waiting = later
        if copies:
            sources, targets = [s for s, _ in copies], [t for _, t in copies]
            self._store.copy_blocks(sources, targets)
            if self._routes is not None:
                shaped = self._routes.reshape(-1, BLOCK, *self._routes.shape[1:])
                shaped[targets] = shaped[sources]

    def _schedule(self) -> list[tuple[_Sequence, int]]:
        """(sequence, rows) of this step: decoding first, then prompts as far as the budget goes."""
        work: list[tuple[_Sequence, int]] = []
        budget = self._step_tokens
        by_need = sorted(self._running, key=lambda s: len(s.tokens) - s.computed > 1)
        for sequence in by_need:
            if budget == 0:
                break
            if sequence.blocks and self._grow(sequence):
                count = min(len(sequence.tokens) - sequence.computed, budget)
                work.append((sequence, count))
                budget -= count
        return [(sequence, count) for sequence, count in work if sequence.blocks]

    def _grow(self, sequence: _Sequence) -> bool:
        """Give it the block of its next token; False when it had to be preempted itself."""
        while len(sequence.blocks) * BLOCK < len(sequence.tokens):
            try:
                sequence.blocks.append(self._cache.allocate())
            except OutOfBlocks:
                victim = self._running.pop()  # the youngest has the least to lose
                self._release(victim)
                self._waiting.appendleft(victim)
                self.counters.preempted += 1
                if victim is sequence:
                    return False
        return True

    def _forward(
        self, work: list[tuple[_Sequence, int]]
    ) -> tuple[torch.Tensor, torch.Tensor | None, np.ndarray]:
        """Hidden states [T, D] and routes of the rows, and the cache slots that they went to."""
        counts = np.array([count for _, count in work])
        starts = np.array([sequence.computed for sequence, _ in work])
        tables = np.zeros((len(work), max(len(sequence.blocks) for sequence, _ in work)), np.int32)
        tokens: list[int] = []
        for row, (sequence, count) in enumerate(work):
            tables[row, : len(sequence.blocks)] = sequence.blocks
            tokens.extend(sequence.tokens[sequence.computed : sequence.computed + count])
        owner = np.repeat(np.arange(len(work), dtype=np.int32), counts)
        firsts = np.cumsum(counts) - counts
        positions = np.arange(len(tokens)) - firsts[owner] + starts[owner]
        slots = tables[owner, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK

        def on_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(self._device)

        rows = Rows(
            slots=on_device(slots),
            tables=on_device(tables),
            sequence=on_device(owner),
            lengths=on_device((positions + 1).astype(np.int32)),
        )
        kernels = self._kernels
        attend = TorchPaged(self._store, rows) if kernels is None else NativePaged(kernels, self._store, rows)
        with torch.inference_mode():
            hidden, routing = self.decoder.forward(
                on_device(np.array(tokens)),
                on_device(positions),
                attend,
                adapters=self._prepared,
                ops=self._ops,
            )
        return hidden, routing, slots

    def _sample(self, hidden: torch.Tensor, ready: list[tuple[_Sequence, int]], version: int) -> None:
        """Draw the next token of every sequence whose last row has run, and finish those that stop."""
        vocab = self.decoder.config.vocab_size
        chunk = max(1, _LOGIT_BYTES // (4 * vocab))
        finished: set[int] = set()
        for first in range(0, len(ready), chunk):
            part = ready[first : first + chunk]
            rows = [end for _, end in part]
            with torch.inference_mode():
                picked = hidden if len(rows) == hidden.shape[0] else hidden[rows]
                logits = self.decoder.logits(picked, adapters=self._prepared, ops=self._ops).float()
                for row, (sequence, _) in enumerate(part):
                    sampling = sequence.request.sampling
                    if len(sequence.logprobs) < sampling.min_tokens and sampling.stop_tokens:
                        logits[row, list(sampling.stop_tokens)] = -torch.inf
            addresses = np.array([sequence.address for sequence, _ in part], np.uint64)
            places = np.array([len(sequence.tokens) for sequence, _ in part])
            settings = Settings.of([sequence.request.sampling for sequence, _ in part])
            tokens, logprobs = sample(logits, settings, uniform(addresses, places), self._kernels)
            for (sequence, _), token, logprob in zip(part, tokens.tolist(), logprobs.tolist(), strict=True):
                stop = self._append(sequence, token, logprob, version)
                if stop is not None:
                    self._finish(sequence, stop)
                    finished.add(id(sequence))
        if finished:
            self._running = [s for s in self._running if id(s) not in finished]

    def _append(self, sequence: _Sequence, token: int, logprob: float, version: int) -> Stop | None:
        """Take one sampled token; the reason to stop, if it is one."""
        if token < 0:
            return Stop.ERROR
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        sequence.versions.append(version)
        self.counters.decoded += 1
        if sequence.on_token is not None:
            sequence.on_token(sequence.index, token)
        sampling = sequence.request.sampling
        if token in sampling.stop_tokens:
            return Stop.EOS
        if sampling.stop_strings and self._cut(sequence) is not None:
            return Stop.STRING
        return Stop.LENGTH if len(sequence.tokens) >= sequence.limit else None

    def _cut(self, sequence: _Sequence) -> str | None:
        """The text before the first stop string, or None when there is none."""
        assert self._decode is not None
        strings = sequence.request.sampling.stop_strings
        # a token adds at least one byte, so a new match lies within the last tokens
        recent = max(len(string.encode()) for string in strings) + 4
        tail = self._decode(sequence.tokens[max(sequence.prompt_len, len(sequence.tokens) - recent) :])
        if not any(string in tail for string in strings):
            return None
        text = self._decode(sequence.tokens[sequence.prompt_len :])
        cuts = [text.index(string) for string in strings if string in text]
        return text[: min(cuts)] if cuts else None

    def _finish(self, sequence: _Sequence, stop: Stop) -> None:
        """Hand out the completion and leave its blocks to the prefix tree."""
        tokens = sequence.tokens[sequence.prompt_len :]
        prompt_experts, experts = self._recorded_routes(sequence)
        text = ""
        if self._decode is not None:
            cut = self._cut(sequence) if stop is Stop.STRING else None
            text = cut if cut is not None else self._decode(tokens[:-1] if stop is Stop.EOS else tokens)
        error = "the logits are not finite" if stop is Stop.ERROR else ""
        self.counters.errors += stop is Stop.ERROR
        completion = Completion(
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(sequence.logprobs, np.float32),
            versions=np.array(sequence.versions, np.int32),
            stop=stop,
            text=text,
            experts=experts,
            prompt_experts=prompt_experts,
            cached_tokens=sequence.cached,
            error=error,
        )
        if stop is Stop.ERROR:
            self._cache.forget()  # its prompt is in the tree, and the numbers of it may be broken
        elif sequence.version == self.version:
            self._cache.insert(sequence.tokens[: sequence.computed], sequence.blocks)
        self._release(sequence)
        sequence.results.put_nowait((sequence.index, completion))

    def _recorded_routes(self, sequence: _Sequence) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Routes of the prompt and of the answer; NO_EXPERT for tokens that were never an input."""
        if self._routes is None:
            return None, None
        places = np.arange(sequence.computed)
        slots = np.array(sequence.blocks, np.int64)[places // BLOCK] * BLOCK + places % BLOCK
        routes = np.full((len(sequence.tokens), *self._routes.shape[1:]), NO_EXPERT, np.int16)
        routes[: sequence.computed] = self._routes[slots]
        return routes[: sequence.prompt_len], routes[sequence.prompt_len :]
