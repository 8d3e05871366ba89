"""The fake engine keeps the promises that tests of everything above it rely on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from reference.fake_engine import FakeEngine, scripted

from ostinato.types import Completion, Request, Sampling, Stop

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
