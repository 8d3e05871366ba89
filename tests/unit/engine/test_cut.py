"""Requests that are given up between two passes: they end, and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from worlds import NATIVE, VOCAB, decode, tiny_decoder

from ostinato.engine.local import LocalEngine
from ostinato.types import Completion, Request, Sampling, Stop

DECODER = tiny_decoder()


def engine(**options: Any) -> LocalEngine:
    usual: dict[str, Any] = {"kernels": NATIVE, "kv_memory_mb": 2, "context_limit": 96, "decode": decode}
    return LocalEngine(DECODER, **{**usual, **options})


def ask(index: int, length: int, **sampling: Any) -> Request:
    tokens = np.random.default_rng(length).integers(0, VOCAB, length).astype(np.int32)
    settings = Sampling(**{"max_tokens": 16, **sampling})
    return Request(
        tokens=tokens, sampling=settings, seed=(3, 1, index, 0), uid=f"p{index}", routes_from=length // 3
    )


def run(ours: LocalEngine, requests: Sequence[Request], cut_after: int | None = None) -> list[Completion]:
    """The answers; after ``cut_after`` passes all that still runs is given up."""

    async def main() -> list[Completion]:
        found: dict[int, Completion] = {}

        async def collect() -> None:
            async for index, completion in ours.generate(requests):
                found[index] = completion

        task = asyncio.create_task(collect())
        while not task.done():
            if cut_after is not None and ours.counters.steps >= cut_after:
                ours.cut(requests)
                break
            await asyncio.sleep(0)
        await task
        return [found[index] for index in range(len(requests))]

    return asyncio.run(main())


REQUESTS = [
    ask(0, 5),
    ask(1, 17, temperature=0.7, stop_strings=("ab", "c")),
    ask(2, 33, top_p=0.8),
    ask(3, 16, min_p=0.1, top_k=9, stop_tokens=(3, 4, 5, 6), min_tokens=7),
    ask(4, 40, temperature=0.0),
    ask(5, 9, stop_tokens=tuple(range(0, 40, 3))),
]


def test_a_cut_frees_what_the_request_had() -> None:
    ours = engine(kernels=None, max_batch=2, step_tokens=8)
    found = run(ours, REQUESTS, cut_after=2)
    assert all(one.stop is Stop.ABORT for one in found)
    assert not ours._scheduler.waiting and not len(ours._scheduler.table)
    ours._scheduler.cache.check([])
    again = run(ours, REQUESTS)
    assert [one.tokens.tolist() for one in again] == [
        one.tokens.tolist() for one in run(engine(kernels=None), REQUESTS)
    ]


def test_only_those_that_are_named_are_cut() -> None:
    ours = engine(kernels=None)

    async def main() -> list[tuple[int, Completion]]:
        found = []
        async for index, completion in ours.generate(REQUESTS[:3]):
            found.append((index, completion))
        return found

    async def both() -> list[tuple[int, Completion]]:
        task = asyncio.create_task(main())
        while ours.counters.steps < 4:
            await asyncio.sleep(0)
        tokens = {request.uid: tokens for request, tokens in ours.under_way()}
        assert set(tokens) == {"p0", "p1", "p2"} and max(tokens.values()) >= 3
        ours.cut([REQUESTS[1], REQUESTS[5]])
        return await task

    found = dict(asyncio.run(both()))
    assert [found[n].stop is Stop.ABORT for n in range(3)] == [False, True, False]
