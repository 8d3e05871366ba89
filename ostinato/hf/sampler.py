"""A sampler for any model of ``transformers``: batches of contexts, by the model's own cache.

Requests run together. Shorter prompts are padded on the left, with at most as much padding as there are
tokens; if padding changes a model (``TransformersModel.pads``), only prompts of equal length run together.
Equal prompts are computed once. A step adds a token to every running sequence. A publish happens between two
steps: running sequences keep their cache and continue with the new adapters, and every token carries the
version that sampled it.

Noise is addressed, as in ``engine.local``; logits are the model's own, whose rounding depends on the batch:
in another batch a token can differ if its uniform is within rounding of an edge. There are no drafts, no
prefix tree, no preemption and no grammar.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.algo.noise import uniform
from ostinato.engine.counters import Busy, Counters
from ostinato.engine.driver import Driver
from ostinato.engine.postprocess import cut_at_string
from ostinato.engine.requests import Limits, Results, await_result, new_completion, new_sequence
from ostinato.engine.runner import Policies
from ostinato.engine.sampler import Drawn, find_likeliest, sample
from ostinato.engine.sequences import Sequence as Waiting
from ostinato.engine.sequences import Settings
from ostinato.hf.model import TransformersModel
from ostinato.model.lora import Adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.wire import check_finite
from ostinato.observe.timeline import Span
from ostinato.types import Completion, Emitted, Request, Stop

Decode = Callable[[Sequence[int]], str]
MOST_PADDED = 2.0  # most positions of a batch per token


@dataclass(slots=True, eq=False)
class Row:
    """A running sequence. Lists have an entry per token of the answer."""

    sequence: Waiting
    tokens: list[int]  # prompt and answer
    padding: int = 0  # padding positions before the tokens
    logprobs: list[float] = field(default_factory=list)
    edges: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)  # [n, L, K] of consecutive rows

    @property
    def answer(self) -> np.ndarray:
        return np.array(self.tokens[self.sequence.prompt_len :], np.int32)

    def stop(self, decode: Decode | None) -> Stop | None:
        """Return the reason why the sequence ends with its newest token; None if it continues."""
        sampling = self.sequence.request.sampling
        if self.tokens[-1] in sampling.stop_tokens:
            return Stop.EOS
        strings = sampling.stop_strings
        if strings and decode is not None and cut_at_string(decode, self.answer, strings) is not None:
            return Stop.STRING
        return Stop.LENGTH if len(self.tokens) >= self.sequence.limit else None


@dataclass(slots=True, eq=False)
class Wave:
    """Rows of equal length, padding included, of one policy; their cache, None if the model has none."""

    policy: int  # its number
    rows: list[Row]
    cache: Any = None


class TransformersEngine:
    """Implements ``protocols.Engine`` on a ``TransformersModel``; the weights are the trainer's own.

    ``max_batch``: the most sequences that run at once. ``kernels``: those that draw tokens from logits on a
    CPU. Other arguments are those of ``LocalEngine``. ``generate`` raises ValueError for requests that can
    never be answered, and for those with a constraint.
    """

    def __init__(
        self,
        model: TransformersModel,
        *,
        decode: Decode | None = None,
        max_batch: int = 256,
        context_limit: int = 4096,
        name: str = "engine",
        kernels: Kernels | None = None,
    ) -> None:
        self.decoder, self.context_limit, self.counters = model, context_limit, Counters()
        self._kernels = kernels  # to draw tokens from logits on a CPU
        self._decode, self._max_batch, self._busy = decode, max_batch, Busy(name)
        self._factors: dict[int, Any] = {0: None}  # factors by the policy's number
        self.policies = Policies(self)
        self._waiting: list[Waiting] = []
        self._waves: list[Wave] = []
        self._driver = Driver(
            self.step, lambda: bool(self._waiting or self._waves), self._fail, self._drop_all
        )

    @property
    def version(self) -> int:
        """The version of the policy without a name."""
        return self.policies.versions[0]

    @property
    def queue(self) -> tuple[int, int]:
        """The numbers of sequences that run and that wait."""
        return sum(len(wave.rows) for wave in self._waves), len(self._waiting)

    def publish(self, adapters: Adapters | None, version: int, policy: str = "") -> None:
        """Publish as ``LocalEngine.publish`` does; there is no prefix tree to clear."""
        self.policies.publish(adapters, version, policy)
        self.policies.retire(self._used_policies)

    def withdraw(self, policy: str) -> None:
        """Withdraw as ``LocalEngine.withdraw`` does."""
        self.policies.withdraw(policy)
        self.policies.retire(self._used_policies)

    def serve(self, adapters: Adapters | None, policy: int = 0) -> None:
        """Run ``policy`` with a copy of ``adapters`` (None: the base). Raises NotFinite, changing nothing."""
        if adapters is not None:
            check_finite(adapters)
        with torch.no_grad():
            copy = None if adapters is None else adapters.detach_copy().prepare(self.decoder.dtype)
        self._factors[policy] = copy

    def retire(self, policy: int) -> None:
        """Drop a policy that no sequence uses any more."""
        del self._factors[policy]

    @property
    def _used_policies(self) -> list[int]:
        return [*(wave.policy for wave in self._waves), *(sequence.policy for sequence in self._waiting)]

    def model_of(self, policy: str) -> tuple[TransformersModel, Any, Ops]:
        """Return as ``LocalEngine.model_of`` does, with prepared factors instead of adapters."""
        return self.decoder, self._factors[self.policies.numbers[policy]], TORCH_OPS

    def take_spans(self) -> list[Span]:
        """Return the spans of the passes since the last call, and clear them."""
        return self._busy.take()

    async def generate(
        self, requests: Sequence[Request], on_tokens: Callable[[int, Emitted], None] | None = None
    ) -> AsyncIterator[tuple[int, Completion]]:
        """Generate as ``LocalEngine.generate`` does. Raises ValueError for a request with a constraint
        too."""
        results, limits = Results(), self._limits
        if any(request.constraint is not None for request in requests):
            raise ValueError('grammars need our own decoder: model.backend = "native"')
        sequences = [
            new_sequence(request, limits, index=index, results=results, on_tokens=on_tokens)
            for index, request in enumerate(requests)
        ]
        with self._driver.working(lambda: self._waiting.extend(sequences), lambda: self._drop(sequences)):
            for _ in sequences:
                yield await await_result(results)

    @torch.no_grad()
    def step(self) -> None:
        """Start waiting requests as far as there is room, add a token to every running sequence, and record
        the pass."""
        start, prefilled, decoded = time.perf_counter(), self.counters.prefilled, self.counters.decoded
        self._admit()
        for wave in list(self._waves):
            self._advance(wave)
        self._waves = [wave for wave in self._waves if wave.rows]
        seconds = time.perf_counter() - start
        self.counters.steps += 1
        self.counters.seconds += seconds
        self.counters.seconds_without += seconds
        self._busy.record_pass(seconds, self.counters.prefilled - prefilled, self.counters.decoded - decoded)

    def _admit(self) -> None:
        """Start waiting requests as far as there is room, the oldest first, as waves of a policy each."""
        room = self._max_batch - self.queue[0]
        admitted, self._waiting = self._waiting[:room], self._waiting[room:]
        by_policy: dict[int, list[Row]] = {}
        for sequence in admitted:
            by_policy.setdefault(sequence.policy, []).append(Row(sequence, sequence.request.tokens.tolist()))
        for policy, rows in by_policy.items():
            self._waves += [
                Wave(policy, batch) for batch in pad_rows(rows, MOST_PADDED if self.decoder.pads else 1.0)
            ]

    def _advance(self, wave: Wave) -> None:
        """Run a forward of a wave, add a token to each of its rows, and finish the rows that end."""
        factors, version = self._factors[wave.policy], self.policies.versions[wave.policy]
        rows = wave.rows
        is_prefill = not rows[0].logprobs
        owners, distinct_rows = list(range(len(rows))), rows
        if is_prefill:  # compute equal prompts once
            places = {
                prompt: place for place, prompt in enumerate(dict.fromkeys(tuple(row.tokens) for row in rows))
            }
            owners = [places[tuple(row.tokens)] for row in rows]
            distinct_rows = [rows[owners.index(place)] for place in range(len(places))]
        logits, routes = self._forward(wave, distinct_rows, factors)
        if is_prefill:
            self.counters.prefilled += sum(len(row.tokens) for row in distinct_rows)
            self.counters.padded += sum(row.padding for row in distinct_rows)
        if is_prefill and len(distinct_rows) < len(rows):
            logits = logits[owners]
            if wave.cache is not None:
                _reorder_cache(wave.cache, torch.tensor(owners, device=logits.device))
        if routes is not None:
            for row, owner in zip(rows, owners, strict=True):
                new_routes = routes[owner][-len(row.tokens) :]
                row.routes = [*row.routes, new_routes] if wave.cache is not None else [new_routes]
        drawn = self._draw(logits, rows)
        self._append(wave, drawn, version, logits)

    def _forward(self, wave: Wave, rows: Sequence[Row], factors: Any) -> tuple[Tensor, np.ndarray | None]:
        """Return logits [B, V] of the last position, and routes [B, S, L, K] of the S positions that the
        cache lacks, None for a dense model. The wave gets the new cache."""
        model = self.decoder
        ids, positions, mask = make_inputs(rows, only_last=wave.cache is not None)
        ids = ids.to(model.device)
        with model.using(factors), model.record_routing() as tape:
            out = model.model.forward(
                input_ids=ids,
                position_ids=positions.to(model.device),
                attention_mask=None if mask is None else mask.to(model.device),
                past_key_values=wave.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            routes = None
            if tape is not None:
                dense = tape.native().dense()
                routes = dense.reshape(*ids.shape, *dense.shape[1:])
        wave.cache = getattr(out, "past_key_values", None)
        return out.logits[:, -1], routes

    def _draw(self, logits: Tensor, rows: Sequence[Row]) -> Drawn:
        """Draw a token for each row, from its processed distribution."""
        logits = logits.float()
        for index, row in enumerate(rows):
            sampling = row.sequence.request.sampling
            if sampling.stop_tokens and len(row.logprobs) < sampling.min_tokens:
                logits[index, list(sampling.stop_tokens)] = -torch.inf
        settings = Settings.of([row.sequence.request.sampling for row in rows])
        keys = np.array([row.sequence.address for row in rows], np.uint64)
        positions = np.array([len(row.tokens) for row in rows])
        needs_support = bool(settings.find_filtered(logits.shape[1]).any())
        kernels = None if logits.is_cuda else self._kernels
        drawn = sample(logits, settings, uniform(keys, positions), kernels, want_support=needs_support)
        top = max((row.sequence.request.top_logprobs for row in rows if row.sequence.on_tokens), default=0)
        return drawn._replace(top=find_likeliest(logits, settings, drawn, top)) if top else drawn

    def _append(self, wave: Wave, drawn: Drawn, version: int, logits: Tensor) -> None:
        """Append the tokens to their rows, and stream them. Rows that end are finished, and removed from the
        wave and its cache."""
        ends = [] if drawn.support is None else np.cumsum(drawn.support.counts).tolist()
        kept_places = []
        for place, row in enumerate(wave.rows):
            token = int(drawn.tokens[place])
            if token < 0:
                self.counters.errors += 1
                self._finish(row, Stop.ERROR)
                continue
            row.tokens.append(token)
            row.logprobs.append(float(drawn.logprobs[place]))
            row.edges.append(float(drawn.edges[place]))
            row.versions.append(version)
            if drawn.support is not None and row.sequence.request.sampling.filtered:
                start = ends[place] - int(drawn.support.counts[place])
                row.sequence.supports.append(drawn.support.ids[start : ends[place]].copy())
            self.counters.decoded += 1
            if row.sequence.on_tokens is not None:
                row.sequence.on_tokens(row.sequence.index, _make_emitted(drawn, place, row, version))
            if (stop := row.stop(self._decode)) is not None:
                self._finish(row, stop)
            else:
                kept_places.append(place)
        if len(kept_places) < len(wave.rows):
            wave.rows = [wave.rows[place] for place in kept_places]
            if kept_places and wave.cache is not None:
                _reorder_cache(wave.cache, torch.tensor(kept_places, device=logits.device))

    def _finish(self, row: Row, stop: Stop) -> None:
        """Hand out the completion of a row."""
        sequence = row.sequence
        if sequence.supports and len(sequence.supports) < len(row.logprobs):  # after an error
            sequence.supports = []
        sequence.sampled = (
            np.array(row.logprobs, np.float32),
            np.array(row.edges, np.float32),
            np.array(row.versions, np.int32),
        )
        sequence.passes = len(row.logprobs)
        routes = None
        if row.routes:
            dtype = np.int8 if self._num_experts <= 128 else np.int16
            routes = np.concatenate(row.routes).astype(dtype)[sequence.request.routes_from :]
        tokens = np.array(row.tokens, np.int32)
        completion = new_completion(sequence, tokens, routes, stop, self._decode)
        sequence.results.put_nowait((sequence.index, completion))

    @property
    def _num_experts(self) -> int:
        return self.decoder.config.moe.num_experts if self.decoder.config.moe else 0

    @property
    def _limits(self) -> Limits:
        return Limits(
            context=self.context_limit,
            vocab_size=self.decoder.config.vocab_size,
            blocks=self.context_limit,  # no pool of blocks: contexts alone are bounded
            has_text=self._decode is not None,
            policies=self.policies.numbers,
        )

    def _fail(self, error: BaseException) -> None:
        """Give an error of a step to every caller, and drop all sequences."""
        running = [row.sequence for wave in self._waves for row in wave.rows]
        for sequence in (*running, *self._waiting):
            sequence.results.put_nowait(error)
        self._drop_all()

    def _drop(self, sequences: Iterable[Waiting]) -> None:
        """End those of the sequences that have not ended, without a completion: their caller has left."""
        dropped_ids = set(map(id, sequences))
        self._waiting = [sequence for sequence in self._waiting if id(sequence) not in dropped_ids]
        for wave in self._waves:
            kept_places = [
                place for place, row in enumerate(wave.rows) if id(row.sequence) not in dropped_ids
            ]
            if len(kept_places) < len(wave.rows):
                wave.rows = [wave.rows[place] for place in kept_places]
                if kept_places and wave.cache is not None:
                    _reorder_cache(wave.cache, torch.tensor(kept_places, device=self.decoder.device))
        self._waves = [wave for wave in self._waves if wave.rows]

    def _drop_all(self) -> None:
        self._waiting, self._waves = [], []


def pad_rows(rows: Sequence[Row], max_ratio: float) -> Iterator[list[Row]]:
    """Yield batches of ``rows``, the longest first, and set the padding before shorter rows. A batch has at
    most ``max_ratio`` times as many positions as tokens. At 1.0 the rows of a batch are equally long."""
    batch, tokens = list[Row](), 0
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        width = len(batch[0].tokens) if batch else len(row.tokens)
        if batch and width * (len(batch) + 1) > max_ratio * (tokens + len(row.tokens)):
            yield batch
            batch, tokens, width = [], 0, len(row.tokens)
        row.padding = width - len(row.tokens)
        batch.append(row)
        tokens += len(row.tokens)
    if batch:
        yield batch


def make_inputs(rows: Sequence[Row], *, only_last: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Make (ids [B, S], positions [B, S], mask [B, padding and tokens]) of all tokens, or of the last ones
    alone (``only_last``). The mask is 0 at padding; None without padding."""
    width = rows[0].padding + len(rows[0].tokens)
    padding = torch.tensor([row.padding for row in rows])[:, None]
    ids = torch.tensor([row.tokens[-1:] if only_last else [0] * row.padding + row.tokens for row in rows])
    places = torch.arange(width)
    positions = (places[-ids.shape[1] :] - padding).clamp_min(0)
    return ids, positions, (places >= padding).long() if padding.any() else None


def _reorder_cache(cache: Any, rows: Tensor) -> None:
    """Select ``rows`` of a cache, in this order. MiniMax's cache has the states of its linear layers in a
    separate list, which its class does not reorder; the entry of a layer without state is an empty list."""
    cache.reorder_cache(rows)
    if states := getattr(cache, "linear_cache", None):
        cache.linear_cache = [state[rows] if isinstance(state, Tensor) else state for state in states]


def _make_emitted(drawn: Drawn, place: int, row: Row, version: int) -> Emitted:
    top: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
    if drawn.top is not None and (number := row.sequence.request.top_logprobs):
        top = ((drawn.top[0][place, :number], drawn.top[1][place, :number]),)
    return Emitted(
        tokens=drawn.tokens[place : place + 1].astype(np.int32),
        logprobs=drawn.logprobs[place : place + 1],
        top=top,
        version=version,
    )
