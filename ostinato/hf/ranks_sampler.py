"""A sampler over the ranks of a sharded model: each samples its part of the requests, through the same parts.

Request i goes to rank i modulo n. Rank 0 makes every rank take one step at the same time
(``RankSampler.sample``); ranks with fewer batches run passes of one token, since the others wait for their
parts of the weights. No rank ever has the whole model.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ostinato.engine.counters import Busy, Counters
from ostinato.engine.driver import Driver
from ostinato.engine.requests import Results, await_result, new_sequence
from ostinato.hf.factors import ModuleAdapters
from ostinato.hf.fsdp import AXIS, ShardedModel
from ostinato.hf.sampler import TransformersEngine
from ostinato.model.lora import Adapters
from ostinato.observe.timeline import Span
from ostinato.types import Completion, Emitted, Request

Answers = list[tuple[int, Completion]]


class RankSampler(TransformersEngine):
    """The part of one rank: a ``TransformersEngine`` whose steps are taken on all ranks together."""

    decoder: ShardedModel

    def __init__(self, model: ShardedModel, **options: Any) -> None:
        super().__init__(model, **options)
        self._results = Results()

    def serve_factors(
        self, spec: Any, sites: Any, factors: Mapping[str, tuple[Tensor, Tensor]] | None, version: int
    ) -> None:
        """Publish whole ``factors`` by site (None: the base) as policy ``version``."""
        adapters = None if factors is None else ModuleAdapters(spec, factors, sites).to(self.decoder.device)
        self.publish(adapters, version)

    def sample(
        self, requests: Sequence[tuple[int, Request]], dropped: Sequence[int]
    ) -> tuple[Answers, tuple[int, int]]:
        """Begin the ``requests`` of this rank by id, end those ``dropped``, and take a step. Return, on the
        first rank, the answers that ended on any rank, and the numbers of tokens (prefilled, decoded)."""
        results, links = self._results, self.decoder.links
        self._waiting += [
            new_sequence(request, self._limits, index=number, results=results)
            for number, request in requests
            if number % links.size(AXIS) == links.place(AXIS)
        ]
        running = [*self._waiting, *(row.sequence for wave in self._waves for row in wave.rows)]
        self._drop([sequence for sequence in running if sequence.index in set(dropped)])
        before = self.counters.prefilled, self.counters.decoded
        self.step()
        ended = [results.get_nowait() for _ in range(results.qsize())]
        own = ended, self.counters.prefilled - before[0], self.counters.decoded - before[1]
        gathered: list[Any] | None = [None] * links.size(AXIS) if links.place(AXIS) == 0 else None
        dist.gather_object(own, gathered, dst=0)
        answers = [answer for part, _, _ in gathered or () for answer in part]
        return answers, (sum(part[1] for part in gathered or ()), sum(part[2] for part in gathered or ()))

    @torch.no_grad()
    def step(self) -> None:
        """As ``TransformersEngine`` does, with as many passes as the rank with most."""
        self._admit()
        passes = torch.tensor([len(self._waves)], device=self.decoder.device)
        num_passes = int(self.decoder.links.max_(passes, AXIS))
        for _ in range(num_passes - len(self._waves)):
            self.decoder.run_idle()
        for wave in list(self._waves):
            self._advance(wave)
        self._waves = [wave for wave in self._waves if wave.rows]


class RanksEngine:
    """Implements ``protocols.Engine`` on rank 0. ``call`` makes all ranks call a method of their
    ``RankSampler`` and returns what this rank's returns. ``generate`` raises ValueError as
    ``TransformersEngine`` does, and for streams and named policies, which are not passed between ranks."""

    def __init__(self, local: RankSampler, call: Callable[..., Any], name: str = "engine") -> None:
        self._local, self._call, self.counters, self._busy = local, call, Counters(), Busy(name)
        self._new: list[tuple[int, Request]] = []
        self._dropped: list[int] = []
        self._open: dict[int, tuple[int, Results]] = {}  # (the caller's index, its results) by id
        self._next = 0
        self._driver = Driver(self._step, lambda: bool(self._open), self._fail, self._drop_all)

    @property
    def context_limit(self) -> int:
        return self._local.context_limit

    @property
    def version(self) -> int:
        """The version of the policy."""
        return self._local.version

    def publish(self, adapters: Adapters | None, version: int, policy: str = "") -> None:
        """Serve a copy of whole ``adapters`` (None: the base) on all ranks. Raises NotFinite as
        ``TransformersEngine`` does, and ValueError for a named policy."""
        if policy:
            raise ValueError(f"policy {policy!r}: a model over ranks serves its own alone")
        if adapters is None:
            self._call("serve_factors", None, None, None, version)
            return
        factors = {name: (a.detach().cpu(), b.detach().cpu()) for name, (a, b) in adapters.tensors.items()}
        self._call("serve_factors", adapters.spec, adapters.config, factors, version)

    def take_spans(self) -> list[Span]:
        """Return the spans of the steps since the last call, and clear them."""
        return self._busy.take()

    async def generate(
        self, requests: Sequence[Request], on_tokens: Callable[[int, Emitted], None] | None = None
    ) -> AsyncIterator[tuple[int, Completion]]:
        """Generate as ``LocalEngine.generate`` does."""
        if on_tokens is not None or any(request.constraint is not None for request in requests):
            raise ValueError(
                "a model over ranks neither streams nor takes grammars; leave parallel.layout empty"
            )
        results = Results()
        for request in requests:
            new_sequence(request, self._local._limits, results=results)  # raises for one that has no answer
        ids = range(self._next, self._next + len(requests))
        self._next = ids.stop

        def add() -> None:
            self._new += zip(ids, requests, strict=True)
            self._open |= {number: (index, results) for index, number in enumerate(ids)}

        with self._driver.working(add, lambda: self._drop(ids)):
            for _ in requests:
                yield await await_result(results)

    def _step(self) -> None:
        """Take a step on all ranks, and hand out what ended."""
        start = time.perf_counter()
        new, dropped, self._new, self._dropped = self._new, self._dropped, [], []
        answers, (prefilled, decoded) = self._call("sample", new, dropped)
        for number, completion in answers:
            index, results = self._open.pop(number, (0, None))
            if results is not None:
                results.put_nowait((index, completion))
        self.counters.steps += 1
        self.counters.prefilled += prefilled
        self.counters.decoded += decoded
        self._busy.record_pass(time.perf_counter() - start, prefilled, decoded)

    def _drop(self, ids: Sequence[int]) -> None:
        """End those that have not ended: at the next step."""
        left = [number for number in ids if self._open.pop(number, None) is not None]
        self._new = [request for request in self._new if request[0] not in left]
        self._dropped += left

    def _fail(self, error: BaseException) -> None:
        for _, results in self._open.values():
            results.put_nowait(error)
        self._drop_all()

    def _drop_all(self) -> None:
        self._drop([*self._open])
