"""An answer that is given up on one engine and continued on another is the answer that one engine gives."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import DRAFTS_PAY, NATIVE, VOCAB, adapters_of, decode, same, tiny_decoder

from ostinato.engine.local import LocalEngine
from ostinato.history.drafter import HistoryDrafter
from ostinato.history.store import History
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


ASKED = [
    ask(0, 5),
    ask(1, 17, temperature=0.7, stop_strings=("ab", "c")),
    ask(2, 33, top_p=0.8),
    ask(3, 16, min_p=0.1, top_k=9, stop_tokens=(3, 4, 5, 6), min_tokens=7),
    ask(4, 40, temperature=0.0),
    ask(5, 9, stop_tokens=tuple(range(0, 40, 3))),
]
native_only = pytest.mark.skipif(
    NATIVE is None, reason="only row-wise kernels give the same bits in any batch"
)


@pytest.mark.slow
@native_only
@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, 18), min_size=1, max_size=3), step_tokens=st.sampled_from([7, 40, 2048]))
def test_cut_anywhere_and_continued_elsewhere_it_is_the_same_answer(
    cuts: list[int], step_tokens: int
) -> None:
    whole = run(engine(), ASKED)
    now, requests = dict[int, Completion](), list(ASKED)
    for cut_after in (*cuts, None):
        left = [index for index in range(len(ASKED)) if index not in now]
        parts = run(engine(step_tokens=step_tokens), [requests[index] for index in left], cut_after)
        for index, part in zip(left, parts, strict=True):
            if part.stop is not Stop.ABORT:
                now[index] = part
            elif len(part.tokens):
                same_beginning(part, whole[index])
                requests[index] = replace(ASKED[index], partial=part)
    for index, one in enumerate(whole):
        same(now[index], one)
        assert now[index].passes == one.passes


def same_beginning(part: Completion, whole: Completion) -> None:
    n = len(part.tokens)
    assert part.tokens.tolist() == whole.tokens[:n].tolist()
    assert np.array_equal(part.logprobs, whole.logprobs[:n])
    assert part.text == decode(part.tokens.tolist())


@native_only
def test_what_moves_runs_its_positions_again_and_says_so() -> None:
    request = ASKED[2]
    [part] = run(engine(), [request], cut_after=9)
    [moved] = run(engine(), [replace(request, partial=part)])
    ran = len(request.tokens) + len(part.tokens) - 1
    assert moved.recomputed is not None and moved.recomputed.tolist() == [[0, ran]]


@native_only
def test_a_part_goes_on_under_the_policy_of_now_and_keeps_the_versions_that_it_has() -> None:
    first, second = engine(), engine()
    first.publish(adapters_of(DECODER, 1), 4)
    second.publish(adapters_of(DECODER, 2), 5)
    [part] = run(first, [ASKED[0]], cut_after=6)
    [moved] = run(second, [replace(ASKED[0], partial=part)])
    n = len(part.tokens)
    assert 0 < n < len(moved.tokens)
    assert moved.versions.tolist() == [4] * n + [5] * (len(moved.tokens) - n)
    assert np.array_equal(moved.logprobs[:n], part.logprobs)


@native_only
def test_drafts_know_a_part_that_moves() -> None:

    def drafting() -> LocalEngine:
        history = History()
        return engine(drafter=HistoryDrafter(history), cost=DRAFTS_PAY)

    whole = run(engine(), ASKED)
    parts = run(drafting(), ASKED, cut_after=5)
    ours = drafting()
    rest = [replace(r, partial=p) if len(p.tokens) else r for r, p in zip(ASKED, parts, strict=True)]
    for one, request, part in zip(whole, rest, parts, strict=True):
        [moved] = [part] if part.stop is not Stop.ABORT else run(ours, [request])
        assert moved.tokens.tolist() == one.tokens.tolist()


def test_a_cut_frees_what_the_request_had() -> None:
    ours = engine(kernels=None, max_batch=2, step_tokens=8)
    found = run(ours, ASKED, cut_after=2)
    assert all(one.stop is Stop.ABORT for one in found)
    assert not ours._scheduler.waiting and not len(ours._scheduler.table)
    ours._scheduler.cache.check([])
    again = run(ours, ASKED)
    assert [one.tokens.tolist() for one in again] == [
        one.tokens.tolist() for one in run(engine(kernels=None), ASKED)
    ]


def test_only_those_that_are_named_are_cut() -> None:
    ours = engine(kernels=None)

    async def main() -> list[tuple[int, Completion]]:
        found = []
        async for index, completion in ours.generate(ASKED[:3]):
            found.append((index, completion))
        return found

    async def both() -> list[tuple[int, Completion]]:
        task = asyncio.create_task(main())
        while ours.counters.steps < 4:
            await asyncio.sleep(0)
        tokens = {request.uid: tokens for request, tokens in ours.under_way()}
        assert set(tokens) == {"p0", "p1", "p2"} and max(tokens.values()) >= 3
        ours.cut([ASKED[1], ASKED[5]])
        return await task

    found = dict(asyncio.run(both()))
    assert [found[n].stop is Stop.ABORT for n in range(3)] == [False, True, False]


def test_parts_that_cannot_be_continued_are_refused_by_name() -> None:
    [part] = run(engine(kernels=None), [ASKED[2]], cut_after=5)
    for broken, words in [
        (replace(part, edges=None), "without edges"),
        (replace(part, support=None), "without the supports"),
    ]:
        with pytest.raises(ValueError, match=words):
            run(engine(kernels=None), [replace(ASKED[2], partial=broken)])
    short = replace(ASKED[2], sampling=replace(ASKED[2].sampling, max_tokens=len(part.tokens)), partial=part)
    with pytest.raises(ValueError, match="nothing is left to continue"):
        run(engine(kernels=None), [short])
