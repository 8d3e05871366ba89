"""The local engine: exactness against a naive generator, and in fp32 bit for bit against itself under any
batch, order, chunking, preemption or prefix sharing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from worlds import KERNELS, VOCAB, adapters_of, answers, same, tiny_decoder

from ostinato.algo.noise import key, uniform
from ostinato.engine.cache import KVCache
from ostinato.engine.local import LocalEngine
from ostinato.engine.model_input import ModelInput
from ostinato.engine.sampler import Drawn, sample_torch
from ostinato.engine.sequences import Settings
from ostinato.model.attention import CausalAttention
from ostinato.model.lora import Adapters
from ostinato.model.native import Kernels
from ostinato.pipeline.account import compute_answer_work
from ostinato.types import NO_EXPERT, Emitted, Request, Sampling, Stop

DECODER = tiny_decoder()


def engine(kernels: Kernels | None, **options: Any) -> LocalEngine:
    return LocalEngine(DECODER, kernels=kernels, **{"kv_memory_mb": 4, "context_limit": 256, **options})


def request(length: int, index: int = 0, **sampling: Any) -> Request:
    tokens = np.random.default_rng(length).integers(0, VOCAB, length).astype(np.int32)
    return Request(tokens=tokens, sampling=Sampling(**{"max_tokens": 12, **sampling}), seed=(7, index))


def naive(request: Request, adapters: Adapters | None = None) -> tuple[list[int], list[float]]:
    """The slow twin: the whole sequence through the decoder for every token."""
    tokens, logprobs = [int(t) for t in request.tokens], []
    for _ in range(request.sampling.max_tokens):
        with torch.inference_mode():
            row = torch.tensor(tokens)
            hidden, _ = DECODER(row, torch.arange(len(tokens)), CausalAttention(), adapters=adapters)
            logits = DECODER.logits(hidden[-1:])
        u = np.array([uniform(key(request.seed), len(tokens))])
        token, logprob, *_ = sample_torch(logits, Settings.of([request.sampling]), u)
        tokens.append(int(token[0]))
        logprobs.append(float(logprob[0]))
    return tokens[len(request.tokens) :], logprobs


REQUESTS = [
    request(n, i, temperature=t)
    for i, (n, t) in enumerate([(5, 1.0), (17, 0.7), (33, 1.0), (16, 1.3), (40, 0.0)])
]
FILTERED = [
    request(9, 5, top_p=0.7),
    request(20, 6, top_k=4, temperature=1.2),
    request(31, 7, min_p=0.2, stop_tokens=(3, 4), min_tokens=5),
    request(12, 8, top_k=9, top_p=0.9, temperature=0.0),
]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("adapted", [False, True])
def test_the_engine_is_the_naive_generator(kernels: Kernels | None, adapted: bool) -> None:
    adapters = adapters_of(DECODER, 3) if adapted else None
    ours = engine(kernels)
    ours.publish(adapters, 5)
    for asking, done in zip(REQUESTS, answers(ours, REQUESTS), strict=True):
        tokens, logprobs = naive(asking, adapters)
        assert done.tokens.tolist() == tokens and done.stop == Stop.LENGTH
        assert done.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert set(done.versions.tolist()) == {5}


@pytest.mark.parametrize("kernels", KERNELS)
def test_routes_are_those_of_a_forward_over_the_finished_sequence(kernels: Kernels | None) -> None:
    for asking, done in zip(REQUESTS, answers(engine(kernels), REQUESTS), strict=True):
        row = torch.from_numpy(np.concatenate([asking.tokens, done.tokens])).long()
        _, routing = DECODER(row, torch.arange(len(row)), CausalAttention())
        assert routing is not None and done.experts is not None and done.prompt_experts is not None
        recorded = np.concatenate([done.prompt_experts, done.experts])
        assert np.array_equal(recorded[:-1], routing[:-1].numpy())
        assert (recorded[-1] == NO_EXPERT).all()  # the last token was sampled and never run


@pytest.mark.parametrize("kernels", [p for p in KERNELS if p.id == "native"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_order_chunks_and_preemption_change_nothing(kernels: Kernels, dtype: torch.dtype) -> None:
    decoder = DECODER if dtype == torch.float32 else tiny_decoder(dtype=dtype)

    def fresh(**options: Any) -> LocalEngine:
        return LocalEngine(decoder, kernels=kernels, **{"kv_memory_mb": 4, "context_limit": 256, **options})

    requests = [*REQUESTS, *FILTERED]
    alone = [answers(fresh(), [asking])[0] for asking in requests]
    assert [done.support is not None for done in alone] == [False] * 5 + [True] * 3 + [False]
    for a, b in zip(alone, answers(fresh(), requests), strict=True):
        same(a, b)
    for a, b in zip(alone, reversed(answers(fresh(), requests[::-1])), strict=True):
        same(a, b)
    for a, b in zip(alone, answers(fresh(step_tokens=7, max_batch=3), requests), strict=True):
        same(a, b)
    growing = [request(5 + i, i, max_tokens=60, top_p=(1.0, 0.8, 0.9)[i]) for i in range(3)]
    alone = [answers(fresh(), [asking])[0] for asking in growing]
    tight = fresh()
    tight._scheduler.cache = KVCache(9)  # 144 positions for three sequences that want 198
    for a, b in zip(alone, answers(tight, growing), strict=True):
        same(a, b)
    assert tight.counters.preempted > 0
    tight._scheduler.cache.check([])


@pytest.mark.slow
@pytest.mark.parametrize(("blocks", "step_tokens"), [(9, 2048), (7, 9), (8, 40)])
def test_what_a_preemption_has_to_run_again_is_recorded(blocks: int, step_tokens: int) -> None:
    """It stood in no book: 64 answers in a pool for a third of them were preempted 47 times, and the passes
    computed 1.27 times what the answers showed. Here against the passes themselves, row by row."""
    ours = engine(None, step_tokens=step_tokens)
    ours._scheduler.cache = KVCache(blocks)
    forward, ran = ours._runner.run, Counter[str]()

    def counted(plan: ModelInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        ran.update(tokens=len(plan.tokens), pairs=plan.attended)
        return forward(plan)

    ours._runner.run = counted  # type: ignore[method-assign]
    requests = [request(5 + i, i, max_tokens=60) for i in range(4)]
    sampled = answers(ours, requests)
    works = [
        compute_answer_work(len(one.tokens), done.cached_tokens, done)
        for one, done in zip(requests, sampled, strict=True)
    ]
    again = [done.recomputed for done in sampled if done.recomputed is not None]
    rows = [position for spans in again for begin, end in spans for position in range(begin, end)]
    tokens = sum(one.tokens for one in works) + len(rows)
    assert ran == {"tokens": tokens, "pairs": sum(one.pairs for one in works) + sum(rows) + len(rows)}
    assert sum(int(np.diff(spans).sum()) for spans in again) > 50
    assert (
        sum(len(done.recomputed) for done in sampled if done.recomputed is not None)
        == ours.counters.preempted
    )
    assert all(done.recomputed is None for done in answers(engine(None), requests))


@pytest.mark.parametrize("kernels", KERNELS)
def test_supports_are_what_the_filters_keep_of_a_forward_over_the_finished_sequence(
    kernels: Kernels | None,
) -> None:
    """The ids by definition, in fp64 from the whole sequence: min-p, then banned stop tokens beside top-k."""
    asking = [request(20, 0, min_p=0.3), request(21, 1, top_k=4, stop_tokens=(3,), min_tokens=12)]
    for wish, done in zip(asking, answers(engine(kernels), asking), strict=True):
        row = torch.from_numpy(np.concatenate([wish.tokens, done.tokens])).long()
        hidden, _ = DECODER(row, torch.arange(len(row)), CausalAttention())
        p = DECODER.logits(hidden)[len(wish.tokens) - 1 : -1].double().softmax(-1).detach().numpy()
        if wish.sampling.min_p:
            kept = p >= 0.3 * p.max(axis=1, keepdims=True)
        else:
            p[:, 3] = 0.0
            kept = p >= np.sort(p, axis=1)[:, -4:-3]
        assert done.support is not None
        assert done.support.counts.tolist() == kept.sum(axis=1).tolist()
        assert done.support.ids.tolist() == np.nonzero(kept)[1].tolist()
        assert done.support.holds(done.tokens).all()


def test_salts_share_no_prefix() -> None:
    """What anybody had asked was found in the cache and counted in ``cached_tokens``: 87 requests read out
    another user's card number, digit by digit."""
    ours, asking = engine(None), request(37)
    (first,) = answers(ours, [asking])
    for salt, cached in (("mallory", 0), ("mallory", 36), ("alice", 0), ("", 36), ("alice", 36)):
        (done,) = answers(ours, [replace(asking, salt=salt)])
        assert (done.cached_tokens, done.tokens.tolist()) == (cached, first.tokens.tolist()), salt
    together = answers(engine(None), [replace(asking, salt=salt) for salt in ("a", "b", "a")])
    assert [done.cached_tokens for done in together] == [0, 0, 36]
    ours._scheduler.cache.check([])


def test_supports_are_recorded_where_they_are_wanted() -> None:
    asking = [request(9, 0, top_p=0.7), request(9, 1)]
    with_, without = answers(engine(None), asking), answers(engine(None, record_support=False), asking)
    assert [done.support is None for done in (*with_, *without)] == [False, True, True, True]
    assert [d.tokens.tolist() for d in with_] == [d.tokens.tolist() for d in without]


@pytest.mark.parametrize("kernels", KERNELS)
def test_siblings_prefill_their_prompt_once(kernels: Kernels | None) -> None:
    siblings = [request(37, i) for i in range(6)]
    ours = engine(kernels)
    together = answers(ours, siblings)
    assert ours.counters.prefilled == 37 - 1  # the last prompt token of each is its first decode row
    assert [c.cached_tokens for c in together] == [0, 36, 36, 36, 36, 36]
    for asking, done in zip(siblings, together, strict=True):
        (apart,) = answers(engine(kernels), [asking])
        assert apart.tokens.tolist() == done.tokens.tolist()
        if kernels is not None:
            same(apart, done)
    assert len({tuple(c.tokens.tolist()) for c in together}) > 1  # their noise differs


def test_the_engine_samples_from_the_trainers_own_tensors() -> None:
    decoder = tiny_decoder(seed=1)
    pointers = {name: p.data_ptr() for name, p in decoder.named_parameters()}
    ours = LocalEngine(decoder, kv_memory_mb=4)
    ours.publish(adapters_of(decoder, 1), 1)
    answers(ours, [request(5)])
    assert {name: p.data_ptr() for name, p in ours.decoder.named_parameters()} == pointers


def test_an_answer_ends_no_sooner_than_it_may_and_with_the_context() -> None:
    (late,) = answers(
        engine(None), [request(5, max_tokens=30, min_tokens=10, stop_tokens=tuple(range(VOCAB - 1)))]
    )
    assert len(late.tokens) == 11 and set(late.tokens[:10].tolist()) == {VOCAB - 1}
    assert late.logprobs[:10].tolist() == [0.0] * 10  # the only token that was allowed
    (end,) = answers(engine(None, context_limit=9), [request(5, max_tokens=30)])
    assert end.stop == Stop.LENGTH and len(end.tokens) == 4


def test_a_stop_string_whose_characters_take_several_tokens_each() -> None:
    """As many tokens as the string has characters were searched, and four more: a Chinese word whose every
    byte is a token was never found."""
    word = "\u4f60\u597d\u4e16\u754c"  # 12 bytes, 4 characters
    spelt = word.encode()

    def spell(tokens: Sequence[int]) -> str:  # token t is byte t of the word
        return bytes(spelt[t] if t < len(spelt) else ord("-") for t in tokens).decode(errors="replace")

    ours = engine(None, decode=spell)
    answer = [20, *range(len(spelt)), 20, 20]

    def scripted(*args: Any, **options: Any) -> Drawn:
        drawn = draw(*args, **options)
        return drawn._replace(tokens=np.full_like(drawn.tokens, answer[ours.counters.decoded]))

    draw, ours._runner.draw = ours._runner.draw, scripted  # type: ignore[method-assign]
    (done,) = answers(ours, [request(5, max_tokens=15, stop_strings=(word,))])
    assert done.stop == Stop.STRING and done.text == "-" and len(done.tokens) == 1 + len(spelt)


def test_requests_that_cannot_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="prompt has 9 tokens and the context 9"):
        answers(engine(None, context_limit=9), [request(9)])
    small = engine(None, context_limit=4096)
    small._scheduler.cache = KVCache(2)
    with pytest.raises(ValueError, match="kv_memory_mb"):
        answers(small, [request(20, max_tokens=100)])
    with pytest.raises(ValueError, match="stop_strings"):
        answers(engine(None), [request(5, stop_strings=("a",))])


def test_a_partial_block_may_be_the_only_one_left() -> None:
    """The block to copy from was held while the copy's was allocated. Where it was the only one that could be
    freed, admission failed with OutOfBlocks, and the request, in no queue at that moment, was waited for for
    ever."""
    ours = engine(None)
    ours._scheduler.cache = KVCache(2)
    asking = request(20)  # 32 tokens in the end: both blocks
    first, again = answers(ours, [asking]), answers(ours, [asking])
    assert first[0].tokens.tolist() == again[0].tokens.tolist() == naive(asking)[0]
    assert again[0].cached_tokens == 19
    ours._scheduler.cache.check([])


@pytest.mark.parametrize("kernels", KERNELS)
def test_broken_numbers_stay_with_their_request(kernels: Kernels | None) -> None:
    """In the torch twin a masked NaN was still NaN: one broken request broke every shorter one of its batch,
    whose block tables are filled up with block 0, and the next owner of its blocks."""
    decoder = tiny_decoder(tie_word_embeddings=False)
    decoder.embed.data[3] = torch.nan

    def of(*tokens: int) -> Request:
        return Request(tokens=np.array(tokens, np.int32), sampling=Sampling(max_tokens=4, top_k=1), seed=(0,))

    ours = LocalEngine(decoder, kernels=kernels, kv_memory_mb=4, context_limit=256)
    stops = [done.stop for done in answers(ours, [of(*[5] * 20, *[3] * 20), of(6, 7, 8)])]
    assert stops == [Stop.ERROR, Stop.LENGTH]
    assert answers(ours, [of(*[5] * 20, 6)])[0].stop == Stop.LENGTH  # not from the broken one's prefix
    assert answers(ours, [of(*[5] * 60)])[0].stop == Stop.LENGTH  # in its blocks
    ours._scheduler.cache.check([])


def test_tokens_carry_the_version_that_sampled_them_even_if_a_callback_publishes() -> None:
    """The version was read token by token: after a publish by the callback of one sequence the others of the
    same step were marked with the policy to come."""
    ours = engine(None)
    asking, seen = [request(5 + i, i, max_tokens=4) for i in range(3)], 0

    def publish_once(index: int, emitted: Emitted) -> None:
        nonlocal seen
        seen += 1
        if seen == 4:  # the first token of the second step
            ours.publish(None, 1)

    async def go() -> list[list[int]]:
        return [c.versions.tolist() async for _, c in ours.generate(asking, on_tokens=publish_once)]

    assert asyncio.run(go()) == [[0, 0, 1, 1]] * 3


def test_an_engine_outlives_a_closed_event_loop() -> None:
    """A driver left behind in a closed loop is never done, and the next caller waited for it for ever."""
    ours = engine(None)
    loop = asyncio.new_event_loop()
    stream = ours.generate([request(5, i, max_tokens=4 + 60 * i) for i in range(2)])
    loop.run_until_complete(anext(stream))
    with pytest.raises(RuntimeError, match="another event loop"):
        answers(ours, [request(9)])
    loop.close()
    assert len(answers(ours, [request(9)])[0].tokens) == 12
    ours._scheduler.cache.check([])


def test_a_token_outside_of_the_vocabulary_is_refused_by_name() -> None:
    """It reached the embedding, whose IndexError named no request and ended every other request too."""
    bad = Request(tokens=np.array([1, VOCAB], np.int32), sampling=Sampling(max_tokens=3), seed=(0,))
    with pytest.raises(ValueError, match=f"token {VOCAB}, but the model's are 0 to {VOCAB - 1}"):
        answers(engine(None), [bad])


def test_an_error_in_a_step_reaches_every_caller() -> None:
    ours = engine(None)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    ours._runner.run = broken  # type: ignore[method-assign, assignment]

    async def ask() -> list[BaseException | None]:
        async def one(index: int) -> None:
            async for _ in ours.generate([request(5, index)]):
                pass

        return await asyncio.gather(*(one(i) for i in range(3)), return_exceptions=True)

    assert [str(e) for e in asyncio.run(ask())] == ["out of memory"] * 3


@pytest.mark.parametrize("kernels", KERNELS)
def test_memory_that_was_lent_comes_back_empty(kernels: Kernels | None) -> None:
    """As around a training step on the sampler's GPU: the answers behind it are those of a new engine."""
    ours, store = (made := engine(kernels)), made._runner.store
    size = store.num_bytes
    answers(ours, REQUESTS)
    with pytest.raises(ZeroDivisionError), ours.lend_memory():
        assert store.num_bytes == 0
        raise ZeroDivisionError
    assert store.num_bytes == size
    for one, other in zip(answers(ours, REQUESTS), answers(engine(kernels), REQUESTS), strict=True):
        same(one, other)


def test_requests_keep_their_memory() -> None:
    async def lend() -> int:
        ours = engine(None)
        async for _ in ours.generate([request(5, 0, max_tokens=1), request(9, 1, max_tokens=40)]):
            with ours.lend_memory():
                return ours._runner.store.num_bytes
        return 0

    assert asyncio.run(lend()) > 0
