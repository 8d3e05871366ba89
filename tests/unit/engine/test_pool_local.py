"""A pool of real engines: the tokens, log-probabilities and routes of one engine, bit for bit, wherever they
are sampled; weights on the wire with proof."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engine_contract import CONTRACT, Subject, collected, what_can_never_be_answered_is_refused
from worlds import NATIVE, VOCAB, adapters_of, decode, same, tiny_decoder

from ostinato.engine.local import LocalEngine
from ostinato.engine.pool import EnginePool
from ostinato.engine.serve import SamplerServer
from ostinato.model.wire import fingerprint_adapters, unpack_adapters
from ostinato.observe.timeline import Kind
from ostinato.protocols import Job, Starts, Worker
from ostinato.rollout.schedule import place_least_loaded
from ostinato.types import Completion, PollResult, Publication, Request, Sampling
from ostinato.workers.remote import seal, unseal

DECODER = tiny_decoder()


def engine(name: str = "engine") -> LocalEngine:
    return LocalEngine(
        DECODER, kernels=NATIVE, kv_memory_mb=2, context_limit=128, max_batch=6, decode=decode, name=name
    )


class Mortal:
    """A sampler that is called between any two passes, and dies at the n-th call."""

    def __init__(self, server: SamplerServer, collects: int) -> None:
        self._server, self._left = server, collects
        self.start, self.close = server.start, server.close

    async def collect(self, wait_s: float) -> PollResult:
        self._left -= 1
        if not self._left:
            raise ConnectionError("killed")
        return await self._server.collect(min(wait_s, 1e-4))

    async def publish(self, publication: Publication) -> str:
        return await self._server.publish(publication)


def pool(count: int, *, deaths: Sequence[int] = (), **options: Any) -> EnginePool:
    """``deaths``: after how many collects the first lives end."""
    left = list(deaths)

    async def spawn(number: int) -> Mortal:
        name = f"sampler-{number}"
        server = SamplerServer(engine(name), name, lambda payload: unpack_adapters(payload, DECODER.config))
        return Mortal(server, left.pop(0) if left else -1)

    return EnginePool(spawn, count, **{"place": place_least_loaded, "slots": 6, "silence_s": 20.0, **options})


def ask(place: int, sample: int, **sampling: Any) -> Request:
    tokens = np.random.default_rng(place).integers(0, VOCAB, 5 + 7 * place).astype(np.int32)
    setting = Sampling(**{"max_tokens": 60, "stop_tokens": (3,), "top_p": 0.9, **sampling})
    return Request(tokens=tokens, sampling=setting, seed=(3, 1, place, sample), uid=f"p{place}")


REQUESTS = [ask(place, sample) for place in range(4) for sample in range(4)]


def crowded(waiting: Sequence[Job], workers: Sequence[Worker]) -> Starts:
    """All to the first worker."""
    return tuple((job.id, workers[0].id) for job in waiting)


@pytest.mark.skipif(NATIVE is None, reason="only row-wise kernels give the same bits in any batch")
@pytest.mark.parametrize("place", [place_least_loaded, crowded])
@pytest.mark.parametrize(("count", "deaths"), [(1, ()), (3, ()), (3, (3, 5))])
def test_any_number_of_samplers_is_one_engine_bit_for_bit(
    place: Callable[..., Starts], count: int, deaths: tuple[int, ...]
) -> None:
    one = engine()
    one.publish(adapters_of(DECODER, 1), 5)
    alone = asyncio.run(collected(one.generate(REQUESTS), len(REQUESTS)))

    async def main() -> tuple[list[Completion], EnginePool]:
        ours = pool(count, deaths=deaths, place=place)
        ours.publish(adapters_of(DECODER, 1), 5)
        found = await collected(ours.generate(REQUESTS), len(REQUESTS))
        await ours.close()
        return found, ours

    found, ours = asyncio.run(main())
    for mine, theirs in zip(found, alone, strict=True):
        same(mine, theirs)
    assert ours.counters["workers/restarts"] == len(deaths) <= ours.counters["workers/redispatched"]
    assert {span.kind for span in ours.take_spans()} >= {Kind.START, Kind.PUBLISH}


def test_a_payload_that_was_damaged_on_its_way_costs_a_worker_and_no_token() -> None:
    """Its values are finite and fit: only the fingerprint shows it."""
    damaged = []

    class Noisy(Mortal):
        async def publish(self, publication: Publication) -> str:
            if publication.version == 2 and not damaged:
                damaged.append(True)
                publication = unseal(seal(publication))  # as it arrives: another memory
                next(iter(publication.payload.factors.values())).view(torch.int32).view(-1)[0] ^= 1
            return await super().publish(publication)

    async def spawn(number: int) -> Noisy:
        server = SamplerServer(
            engine(), "sampler-0", lambda payload: unpack_adapters(payload, DECODER.config)
        )
        return Noisy(server, -1)

    async def main() -> tuple[list[Completion], EnginePool]:
        ours = EnginePool(spawn, 1, place=place_least_loaded)
        ours.publish(adapters_of(DECODER, 1), 1)
        await ours.ready()
        ours.publish(adapters_of(DECODER, 2), 2)
        found = await collected(ours.generate(REQUESTS[:3]), 3)
        await ours.close()
        return found, ours

    found, ours = asyncio.run(main())
    one = engine()
    one.publish(adapters_of(DECODER, 2), 2)
    for mine, theirs in zip(found, asyncio.run(collected(one.generate(REQUESTS[:3]), 3)), strict=True):
        same(mine, theirs)
    assert ours.counters["workers/restarts"] == 1
    assert (
        f"was sent version 2 ({fingerprint_adapters(adapters_of(DECODER, 2))}) and serves version 2 ("
        in ours.status()[0]["cause"]
    )


IN_A_POOL = [promise for promise in CONTRACT if promise is not what_can_never_be_answered_is_refused]


@pytest.mark.parametrize("promise", IN_A_POOL, ids=lambda promise: promise.__name__)
def test_the_pool_keeps_the_promises_of_an_engine(promise: Callable[[Subject], None]) -> None:
    """But for one: what can never be answered ends as ERROR (the other calls of its worker go on)."""
    promise(
        Subject(
            engine=pool(2),
            vocab=VOCAB,
            policies=(adapters_of(DECODER, 1), adapters_of(DECODER, 2)),
            decode=decode,
        )
    )
