"""Drafts in the engine: the same tokens, fewer passes; and nothing is kept that was not sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference.scripted import ScriptedDrafter
from worlds import DRAFTS_PAY, NATIVE, answers, same, tiny_decoder

from ostinato.engine.cache import KVCache
from ostinato.engine.local import LocalEngine
from ostinato.engine.requests import new_sequence
from ostinato.types import Completion, Emitted, Request, Sampling, Stop

VOCAB = 31


DECODER = tiny_decoder(vocab_size=VOCAB)


def requested(n: int = 4, **sampling: Any) -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(
            tokens=rng.integers(0, VOCAB, 5 + 4 * i).astype(np.int32),
            sampling=Sampling(**{"max_tokens": 24, **sampling}),
            seed=(3, i),
        )
        for i in range(n)
    ]


def engine(drafter: ScriptedDrafter | None = None, **options: Any) -> LocalEngine:
    given = {"kernels": NATIVE, "kv_memory_mb": 4, "context_limit": 128, "cost": DRAFTS_PAY, **options}
    return LocalEngine(DECODER, drafter=drafter, **given)


def oracle(requests: Sequence[Request], done: Sequence[Completion], **options: Any) -> ScriptedDrafter:
    whole = {r.seed: np.concatenate([r.tokens, c.tokens]) for r, c in zip(requests, done, strict=True)}
    return ScriptedDrafter(lambda request, tokens: whole[request.seed][len(tokens) :], **options)


def test_right_drafts_save_passes_and_change_nothing() -> None:
    requests = requested()
    plain = answers(engine(), requests)
    ours = engine(oracle(requests, plain, length=7))
    for a, b in zip(plain, answers(ours, requests), strict=True):
        same(a, b, bits=NATIVE is not None)
        # the pass that runs the prompt drafts as well: 3 times 7 and one more
        assert (a.passes, b.passes) == (24, 3) and b.drafted == b.accepted == 21
    assert ours.counters.accepted == 84 and ours.counters.decoded == 96


@pytest.mark.slow
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_whatever_is_drafted_the_tokens_are_the_same(data: st.DataObject) -> None:
    """Half-true drafts in a KV pool that may be too small, over block edges and stop tokens."""
    stop = data.draw(st.sampled_from([(), (3,), (3, 4, 5)]))
    filters = data.draw(st.sampled_from([{}, {"top_p": 0.8}, {"top_k": 5, "min_p": 0.1, "temperature": 0.7}]))
    sampling = {"stop_tokens": stop, "min_tokens": data.draw(st.integers(0, 4)), **filters}
    requests = requested(data.draw(st.integers(1, 5)), **sampling)
    plain = answers(engine(), requests)
    whole = {r.seed: np.concatenate([r.tokens, c.tokens]) for r, c in zip(requests, plain, strict=True)}
    rng = np.random.default_rng(data.draw(st.integers(0, 9999)))
    truth = data.draw(st.floats(0, 1))

    def script(request: Request, tokens: np.ndarray) -> np.ndarray:
        drafts = rng.integers(0, VOCAB, 9)
        right = whole[request.seed][len(tokens) : len(tokens) + 9]
        keep = rng.random(len(right)) < truth
        drafts[: len(right)] = np.where(keep, right, drafts[: len(right)])
        return drafts

    drafter = ScriptedDrafter(script, length=data.draw(st.integers(1, 9)))
    options = {
        "max_batch": data.draw(st.sampled_from([2, 8])),
        "step_tokens": data.draw(st.sampled_from([5, 64])),
    }
    ours = engine(drafter, **options)
    if data.draw(st.booleans()):
        ours._scheduler.cache = KVCache(data.draw(st.integers(4, 9)))
    for a, b in zip(plain, answers(ours, requests), strict=True):
        same(a, b, bits=NATIVE is not None)
    assert not drafter._open, "every handle was closed"


def test_a_caller_that_goes_away_closes_its_handles() -> None:
    requests = requested(4)
    drafter = oracle(requests, answers(engine(), requests), length=2)
    ours = engine(drafter)

    async def leave() -> None:
        async for _ in ours.generate([*requests, *requested(3, max_tokens=3)]):
            break

    asyncio.run(leave())
    assert not drafter._open and not ours._scheduler.table.order


def test_drafts_never_preempt_anybody() -> None:
    requests = requested(3)
    plain = answers(engine(), requests)
    ours = engine(oracle(requests, plain, length=9))
    ours._scheduler.cache = KVCache(9)  # exactly what the three need in the end: 29, 33 and 37 tokens
    for a, b in zip(plain, answers(ours, requests), strict=True):
        same(a, b, bits=NATIVE is not None)
    assert ours.counters.preempted == 0


def test_logits_that_are_not_finite_end_a_request_inside_a_draft() -> None:
    decoder = tiny_decoder(seed=2, vocab_size=VOCAB)
    requests = requested(2)
    plain = answers(LocalEngine(decoder, kv_memory_mb=4, context_limit=128), requests)
    token = int(plain[0].tokens[3])
    decoder.embed.data[token] = torch.nan  # known at the head too: from the first step on
    (done, _) = answers(
        LocalEngine(
            decoder, kv_memory_mb=4, context_limit=128, drafter=oracle(requests, plain), cost=DRAFTS_PAY
        ),
        requests,
    )
    assert done.stop is Stop.ERROR and "finite" in done.error and len(done.tokens) == 0


def test_an_error_leaves_no_block_of_a_draft_behind() -> None:
    requests = requested(2)
    plain = answers(engine(), requests)
    ours = engine(oracle(requests, plain))
    sampled = 0

    def listener(index: int, emitted: Emitted) -> None:
        nonlocal sampled
        sampled += len(emitted.tokens)
        if sampled >= 9:
            raise RuntimeError("the listener broke")

    async def listen() -> None:
        async for _ in ours.generate(requests, on_tokens=listener):
            pass

    with pytest.raises(RuntimeError, match="the listener broke"):
        asyncio.run(listen())
    ours._scheduler.cache.check([])


def test_blocks_that_failed_drafts_have_taken_are_given_back_before_anybody_is_preempted() -> None:
    requests = requested(3)
    plain = answers(engine(), requests)
    wrong = ScriptedDrafter(lambda request, tokens: (tokens[-1:].repeat(30) + 1) % VOCAB, length=30)
    ours = engine(wrong)
    ours._scheduler.cache = KVCache(10)
    for a, b in zip(plain, answers(ours, requests), strict=True):
        same(a, b, bits=NATIVE is not None)
    assert ours.counters.drafted > 0 and ours.counters.preempted == 0


def test_a_block_added_before_others_are_given_back_is_in_the_table() -> None:
    """Giving back surplus blocks noted all of a sequence's blocks as shown, the one just added too: its place
    in the table kept what a former occupant of the slot had there."""
    ours = engine()
    ours._scheduler.cache = KVCache(5)
    scheduler = ours._scheduler
    table, cache = scheduler.table, scheduler.cache
    first, second = requested(2)
    for request in (first, second):
        scheduler.waiting.append(new_sequence(request, ours._limits, results=asyncio.Queue()))
    ours._copy_blocks(scheduler.admit())
    growing, other = table.order
    table.tables[growing, 1:] = 99
    table.get_sequence(other).blocks += [cache.allocate(), cache.allocate()]  # a failed draft's
    table.show_blocks(other)
    table.length[growing] = 40  # needs two more blocks: one is free, one is given back
    preempted = scheduler.append_blocks(growing)
    blocks = table.get_sequence(growing).blocks
    assert len(blocks) == 3 and not preempted
    assert table.tables[growing, :3].tolist() == blocks
