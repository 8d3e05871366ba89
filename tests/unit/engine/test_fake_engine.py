"""The fake engine keeps the promises that tests of everything above it rely on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from reference.fake_engine import FakeEngine, draw, scripted

from ostinato.types import NO_EXPERT, Completion, Request, Sampling, Stop

PROBS = np.array([0.5, 0.25, 0.15, 0.1])


def bandit(adapters: Any, request: Request, said: Sequence[int]) -> np.ndarray:
    return np.log(PROBS)


def ask(sample: int, **sampling: Any) -> Request:
    options = {"max_tokens": 5, "stop_tokens": (3,)} | sampling
    return Request(tokens=np.array([7, 8, 9], np.int32), sampling=Sampling(**options), seed=(1, 2, 3, sample))


def generate(engine: FakeEngine, requests: list[Request]) -> dict[int, Completion]:
    async def collect() -> dict[int, Completion]:
        return {index: completion async for index, completion in engine.generate(requests)}

    return asyncio.run(collect())


def test_a_request_gets_the_same_tokens_alone_and_in_any_company() -> None:
    requests = [ask(k) for k in range(8)]
    together = generate(FakeEngine(bandit), requests)
    reversed_ = generate(FakeEngine(bandit), requests[::-1])
    for k, request in enumerate(requests):
        alone = generate(FakeEngine(bandit), [request])[0]
        assert alone.tokens.tolist() == together[k].tokens.tolist() == reversed_[7 - k].tokens.tolist()
    assert len({tuple(c.tokens) for c in together.values()}) > 1


def test_frequencies_and_logprobs_are_those_of_the_distribution() -> None:
    completions = generate(FakeEngine(bandit), [ask(k, max_tokens=1) for k in range(4000)])
    tokens = np.array([c.tokens[0] for c in completions.values()])
    logprobs = np.array([c.logprobs[0] for c in completions.values()])
    np.testing.assert_allclose(np.bincount(tokens, minlength=4) / 4000, PROBS, atol=0.03)
    np.testing.assert_allclose(logprobs, np.log(PROBS)[tokens], rtol=1e-6)


def test_temperature_and_greedy() -> None:
    assert draw(np.log(PROBS), 0.5, 0.0) == (0, pytest.approx(np.log(0.25 / (PROBS**2).sum())))
    assert draw(np.log(PROBS), 0.0, 0.99) == (0, 0.0)
    assert draw(np.log(PROBS), 1.0, 0.0, banned=[0]) == (1, pytest.approx(np.log(0.5)))


def test_stops_and_order_of_finishing() -> None:
    answers = {0: [1, 1, 1, 1, 1], 1: [2, 3], 2: [1, 2, 1, 3]}
    engine = FakeEngine(scripted(lambda request: answers[request.seed[-1]], 4))

    async def order() -> list[int]:
        return [index async for index, _ in engine.generate([ask(k) for k in range(3)])]

    assert asyncio.run(order()) == [1, 2, 0]
    completions = generate(engine, [ask(k) for k in range(3)])
    assert [completions[k].stop for k in range(3)] == [Stop.LENGTH, Stop.EOS, Stop.EOS]
    assert completions[1].text == "2"
    cut = generate(engine, [ask(2, stop_strings=(" 2",))])[0]
    assert (cut.stop, cut.text, cut.tokens.tolist()) == (Stop.STRING, "1", [1, 2])


def test_versions_and_routes_are_aligned_with_tokens() -> None:
    engine = FakeEngine(bandit, moe=(2, 3))
    engine.publish(None, 5)
    completion = generate(engine, [ask(0)])[0]
    assert completion.versions.tolist() == [5] * len(completion.tokens)
    assert completion.experts is not None and completion.prompt_experts is not None
    assert completion.experts.shape == (len(completion.tokens), 2, 3)
    assert completion.prompt_experts.shape == (3, 2, 3)
    assert (completion.experts[-1] == NO_EXPERT).all() and (completion.experts[:-1] >= 0).all()


def test_min_tokens_bans_the_stop_token() -> None:
    completions = generate(FakeEngine(bandit), [ask(k, min_tokens=5) for k in range(50)])
    assert all(3 not in c.tokens[:-1] for c in completions.values())
    assert {len(c.tokens) for c in completions.values()} == {5}


def test_a_filter_it_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sampling\.top_k is 2"):
        generate(FakeEngine(bandit), [ask(0, top_k=2)])
