"""Several policies of one base in one engine: each answers as an engine of its own does, bit for bit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from worlds import KERNELS, VOCAB, adapters_of, answers, same, tiny_decoder

from ostinato.engine.local import LocalEngine
from ostinato.engine.runner import prepare_policy
from ostinato.engine.sampler import Drawn, find_likeliest, sample_torch
from ostinato.engine.sequences import Settings
from ostinato.model.native import Kernels
from ostinato.model.shapes import ExpertScheme
from ostinato.types import Completion, Emitted, Request, Sampling

DECODER = tiny_decoder()
NAMES = ("", "small", "large", "base")
# different ranks, both forms of adapters of experts, one with the router, one that adapts attention alone
ADAPTERS = (
    adapters_of(DECODER, 1),
    adapters_of(DECODER, 2, 0.3, rank=2, targets=("attn",)),
    adapters_of(
        DECODER,
        3,
        0.3,
        rank=7,
        expert_scheme=ExpertScheme.PER_EXPERT,
        targets=("attn", "mlp", "shared", "experts", "router"),
    ),
    None,
)


def engine(kernels: Kernels | None, **options: Any) -> LocalEngine:
    ours = LocalEngine(DECODER, kernels=kernels, **{"kv_memory_mb": 4, "context_limit": 256, **options})
    for version, (name, adapters) in enumerate(zip(NAMES, ADAPTERS, strict=True)):
        ours.publish(adapters, version, name)
    return ours


def request(length: int, index: int, policy: str, **sampling: Any) -> Request:
    tokens = np.random.default_rng(length).integers(0, VOCAB, length).astype(np.int32)
    settings = Sampling(**{"max_tokens": 12, **sampling})
    return Request(tokens=tokens, sampling=settings, seed=(7, index), policy=policy)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("tight", [{}, {"step_tokens": 7, "max_batch": 5}], ids=["wide", "tight"])
def test_every_policy_answers_among_others_as_alone(kernels: Kernels | None, tight: dict[str, int]) -> None:
    requests = [request(20, i, name, top_p=0.9 if i % 2 else 1.0) for i in range(3) for name in NAMES]
    together = answers(engine(kernels, **tight), requests)
    for one, done in zip(requests, together, strict=True):
        number = NAMES.index(one.policy)
        alone = LocalEngine(DECODER, kernels=kernels, kv_memory_mb=4, context_limit=256)
        alone.publish(ADAPTERS[number], number)
        (want,) = answers(alone, [replace(one, policy="")])
        same(want, done) if kernels else _nearly(want, done)
    assert len({done.tokens.tobytes() for done in together[: len(NAMES)]}) == len(NAMES)


def _nearly(want: Completion, done: Completion) -> None:
    """torch's own products are not row by row: the same tokens, and log-probabilities up to rounding."""
    assert done.tokens.tolist() == want.tokens.tolist() and done.versions.tolist() == want.versions.tolist()
    np.testing.assert_allclose(done.logprobs, want.logprobs, atol=1e-4)


def test_a_named_policy_is_replaced_for_what_comes_and_kept_for_what_runs() -> None:
    ours, first = engine(None), request(20, 0, "small")

    async def go() -> Completion:
        def renew(index: int, emitted: Emitted) -> None:
            if ours.policies.versions[ours.policies.numbers["small"]] == 1:
                ours.publish(ADAPTERS[2], 9, "small")

        async for _, done in ours.generate([first], on_tokens=renew):
            return done
        raise AssertionError

    running = asyncio.run(go())
    _nearly(answers(engine(None), [first])[0], running)
    after = answers(ours, [first])[0]
    assert set(running.versions.tolist()) == {1} and set(after.versions.tolist()) == {9}
    assert after.tokens.tolist() == answers(engine(None), [replace(first, policy="large")])[0].tokens.tolist()
    assert after.cached_tokens == 0  # what the old policy has computed is not found
    ours.publish(None, 10, "small")
    assert len(ours._runner._policies) == len(NAMES)  # the replaced ones are gone


@pytest.mark.parametrize("kernels", KERNELS)
def test_policies_that_come_and_go_leave_the_others_as_they_are(kernels: Kernels | None) -> None:
    """The fused step was made again, for all policies, whenever one was published: with a thousand of them
    that took longer than many passes."""
    ours = LocalEngine(DECODER, kernels=kernels, kv_memory_mb=4, context_limit=256)
    draw = np.random.default_rng(0)
    served: dict[str, int] = {}
    for turn in range(24):
        if served and draw.random() < 0.4:
            gone = str(draw.choice(sorted(served)))
            ours.withdraw(gone)
            del served[gone]
        number = int(draw.integers(4))
        adapters = ADAPTERS[number]
        as_is = prepare_policy(adapters and adapters.detach_copy(), DECODER.dtype)
        ours.publish(adapters if turn % 2 else as_is, number, f"p{turn % 7}")
        served[f"p{turn % 7}"] = number
    fresh = engine(kernels)
    requests = [request(12, i, name) for i, name in enumerate(sorted(served))]
    twins = [replace(one, policy=NAMES[served[one.policy]]) for one in requests]
    for done, want in zip(answers(ours, requests), answers(fresh, twins), strict=True):
        if kernels:
            same(want, done)
        else:
            _nearly(want, done)
    assert len(ours._runner._policies) == 1 + len(served)


def test_an_unknown_policy_is_named() -> None:
    ours = engine(None)
    with pytest.raises(ValueError, match=r"the policy 'other'; there are '', 'base', 'large', 'small'"):
        answers(ours, [request(5, 0, "other")])


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_listener_gets_the_likeliest_tokens_beside_each(kernels: Kernels | None) -> None:
    requests = [replace(request(9, i, ""), top_logprobs=n) for i, n in enumerate([3, 0, 2])]
    heard: dict[int, list[Emitted]] = {0: [], 1: [], 2: []}
    done = answers(engine(kernels), requests, lambda index, emitted: heard[index].append(emitted))
    for index, one in enumerate(done):
        assert np.concatenate([e.tokens for e in heard[index]]).tolist() == one.tokens.tolist()
        assert np.concatenate([e.logprobs for e in heard[index]]).tolist() == one.logprobs.tolist()
        top = [pair for e in heard[index] for pair in e.top]
        assert len(top) == (len(one.tokens) if requests[index].top_logprobs else 0)
        for token, logprob, (ids, logprobs) in zip(one.tokens, one.logprobs, top, strict=False):
            assert len(ids) == requests[index].top_logprobs and (np.diff(logprobs) <= 0).all()
            if token in ids:
                assert logprobs[ids.tolist().index(token)] == pytest.approx(logprob, abs=1e-5)


def test_the_likeliest_are_of_the_distribution_that_was_sampled_from() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 3)
    rows = [Sampling(temperature=0.5), Sampling(top_k=2), Sampling(temperature=0)]
    settings = Settings.of(rows)
    drawn = sample_torch(logits, settings, np.full(3, 0.1), want_support=True)
    ids, logprobs = find_likeliest(logits, settings, drawn, 3)
    assert ids.tolist() == [[0, 1, 2]] * 3
    want = [
        torch.log_softmax(2 * logits[0], 0)[:3],
        torch.log_softmax(logits[0, :2], 0),
        logits[0].log_softmax(0)[:3],
    ]
    assert logprobs[0] == pytest.approx(want[0].numpy(), abs=1e-6)
    assert logprobs[1, :2] == pytest.approx(want[1].numpy(), abs=1e-6) and logprobs[1, 2] == -np.inf
    assert logprobs[2] == pytest.approx(want[2].numpy(), abs=1e-6)


def test_the_likeliest_of_a_row_do_not_depend_on_the_rows_beside_it() -> None:
    """With two threads torch adds up the row of a batch of one in another order than those of a larger one: a
    request's top log-probabilities were an ulp apart, alone and among others."""
    logits = torch.randn(64, 49152, generator=torch.Generator().manual_seed(0)) / 2 + 10
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        drawn = sample_torch(logits, (settings := Settings.of([Sampling()] * 64)), np.full(64, 0.5))
        ids, logprobs = find_likeliest(logits, settings, drawn, 5)
        for row in range(64):
            part = slice(row, row + 1)
            one = Drawn(drawn.tokens[part], drawn.logprobs[part], drawn.edges[part])
            alone = find_likeliest(logits[part], Settings.of([Sampling()]), one, 5)
            assert (alone[0] == ids[part]).all() and (alone[1] == logprobs[part]).all()
    finally:
        torch.set_num_threads(threads)
