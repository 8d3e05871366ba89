"""What every engine promises (``protocols.Engine``), as functions that any engine can be put through.

A test makes a ``Subject`` and calls ``check(subject)`` for each of ``CONTRACT``. What not every engine can do
is tested where an engine says so: addressed noise, policies that differ, a score by somebody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ostinato.protocols import Engine
from ostinato.types import Completion, Request, Sampling, Stop

Score = Callable[
    [Any, np.ndarray], np.ndarray
]  # (adapters, tokens [T]) -> [T - 1] log-probabilities of all but one


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An engine and what it can do. ``policies`` are two that differ, published as versions 1 and 2."""

    engine: Engine
    vocab: int
    policies: tuple[Any, Any]
    prompt_tokens: int = 9  # of the prompts that it is sent
    answer_tokens: int = 12
    stop: int = 3  # a token that both policies sample now and then
    addressed: bool = True  # tokens are a function of the request alone
    filters: bool = True  # it knows top_k, top_p and min_p
    decode: Callable[[Sequence[int]], str] | None = None
    score: Score | None = None  # at temperature 1, with what the engine samples from up to rounding
    bound: float = 1e-4  # of k3 between engine and ``score``

    def ask(self, index: int, prompt: int = 0, **sampling: Any) -> Request:
        """Sample ``index`` of prompt ``prompt``."""
        tokens = np.random.default_rng(prompt).integers(4, self.vocab, self.prompt_tokens).astype(np.int32)
        settings = Sampling(**{"max_tokens": self.answer_tokens, **sampling})
        return Request(tokens=tokens, sampling=settings, seed=(11, prompt, index), uid=f"p{prompt}")

    def many(self, n: int, **sampling: Any) -> list[Request]:
        """Four siblings of each of a few prompts."""
        return [self.ask(i % 4, i // 4, **sampling) for i in range(n)]

    def run(self, requests: Sequence[Request]) -> list[Completion]:
        return asyncio.run(collected(self.engine.generate(requests), len(requests)))


async def collected(answers: AsyncIterator[tuple[int, Completion]], n: int) -> list[Completion]:
    """In the order of the requests; every index exactly once."""
    found: dict[int, Completion] = {}
    async for index, completion in answers:
        assert index not in found, f"request {index} was answered twice"
        found[index] = completion
    assert sorted(found) == list(range(n)), "not every request was answered"
    return [found[index] for index in range(n)]


def every_request_is_answered_once_with_aligned_arrays(subject: Subject) -> None:
    subject.engine.publish(subject.policies[0], 1)
    for request, answer in zip(requests := subject.many(12), subject.run(requests), strict=True):
        assert answer.stop is Stop.LENGTH and len(answer.tokens) == request.sampling.max_tokens
        assert answer.tokens.dtype == np.int32 and answer.logprobs.dtype == np.float32
        assert answer.tokens.min() >= 0 and answer.tokens.max() < subject.vocab
        assert np.isfinite(answer.logprobs).all() and (answer.logprobs <= 1e-5).all()
        assert answer.versions.dtype == np.int32 and (answer.versions == 1).all()
        assert answer.error == "" and answer.injected is None


def siblings_differ_and_noise_is_the_requests_own(subject: Subject) -> None:
    subject.engine.publish(subject.policies[0], 1)
    requests = subject.many(8)
    first, again = subject.run(requests), subject.run(requests[::-1])[::-1]
    assert len({tuple(answer.tokens) for answer in first[:4]}) > 1
    if subject.addressed:
        assert [answer.tokens.tolist() for answer in first] == [answer.tokens.tolist() for answer in again]
        alone = [subject.run([request])[0] for request in requests]
        assert [answer.tokens.tolist() for answer in first] == [answer.tokens.tolist() for answer in alone]


def a_stop_token_ends_an_answer_and_is_its_last(subject: Subject) -> None:
    subject.engine.publish(subject.policies[0], 1)
    stops = tuple(range(0, subject.vocab, 3))
    ended = subject.run(subject.many(12, stop_tokens=stops))
    assert any(answer.stop is Stop.EOS for answer in ended)
    for answer in ended:
        if answer.stop is Stop.EOS:
            assert answer.tokens[-1] in stops and len(answer.logprobs) == len(answer.tokens)
        assert not np.isin(answer.tokens[:-1], stops).any()
    late = subject.run(subject.many(12, stop_tokens=stops, min_tokens=5))
    assert all(len(answer.tokens) >= 5 for answer in late)
    assert not any(np.isin(answer.tokens[:4], stops).any() for answer in late)


def a_stop_string_ends_an_answer_and_its_text_ends_before(subject: Subject) -> None:
    if subject.decode is None:
        return
    subject.engine.publish(subject.policies[0], 1)
    plain = subject.run([subject.ask(0, temperature=0.0)])[0]
    text = subject.decode(plain.tokens.tolist())
    cut = text[len(text) // 2 :][:4]
    answer = subject.run([subject.ask(0, temperature=0.0, stop_strings=(cut,))])[0]
    assert answer.stop is Stop.STRING and answer.text == text[: text.index(cut)]
    assert answer.tokens.tolist() == plain.tokens[: len(answer.tokens)].tolist()
    assert cut in subject.decode(answer.tokens.tolist())
    assert cut not in subject.decode(answer.tokens[:-1].tolist())


def greedy_is_the_best_token_and_sure(subject: Subject) -> None:
    subject.engine.publish(subject.policies[0], 1)
    first, again = (
        subject.run([subject.ask(0, temperature=0.0)]),
        subject.run([subject.ask(1, temperature=0.0)]),
    )
    assert first[0].tokens.tolist() == again[0].tokens.tolist()
    assert (first[0].logprobs == 0).all()
    if subject.filters:  # the same by a filter, at a temperature
        narrow = subject.run([subject.ask(2, top_k=1)])[0]
        assert narrow.tokens.tolist() == first[0].tokens.tolist()
        np.testing.assert_allclose(narrow.logprobs, 0.0, atol=1e-5)


def logprobs_are_of_the_distribution_that_was_sampled_from(subject: Subject) -> None:
    """Against somebody else's forward, at temperatures that the engine has to have applied."""
    if subject.score is None:
        return
    for number, policy in enumerate(subject.policies, start=1):
        subject.engine.publish(policy, number)
        requests = subject.many(8)
        gaps = []
        for request, answer in zip(requests, subject.run(requests), strict=True):
            whole = np.concatenate([request.tokens, answer.tokens])
            theirs = subject.score(policy, whole)[len(request.tokens) - 1 :]
            gaps.append(theirs - answer.logprobs)
        gap = np.concatenate(gaps).astype(np.float64)
        assert (np.expm1(gap) - gap).mean() < subject.bound, f"policy {number}"


def what_is_asked_after_a_publish_is_sampled_by_it(subject: Subject) -> None:
    greedy = [subject.ask(0, prompt, temperature=0.0) for prompt in range(6)]
    answers = []
    for version, policy in [(1, subject.policies[0]), (2, subject.policies[1]), (3, subject.policies[0])]:
        subject.engine.publish(policy, version)
        answers.append(subject.run(greedy))
        assert all((answer.versions == version).all() for answer in answers[-1])
    tokens = [[answer.tokens.tolist() for answer in one] for one in answers]
    assert tokens[0] == tokens[2], "an old policy published again is not what it was"
    assert tokens[0] != tokens[1], "two policies gave the same answers; give the subject others"


def versions_never_go_back_within_an_answer(subject: Subject) -> None:
    """Published while requests run: each token says who sampled it."""

    async def run() -> list[Completion]:
        subject.engine.publish(subject.policies[0], 1)
        requests = subject.many(8, max_tokens=2 * subject.answer_tokens)
        short = [subject.ask(9, 9, max_tokens=1)]
        answers = asyncio.create_task(collected(subject.engine.generate(requests), len(requests)))
        await collected(subject.engine.generate(short), 1)
        subject.engine.publish(subject.policies[1], 2)
        return await answers

    for answer in asyncio.run(run()):
        assert (np.diff(answer.versions) >= 0).all() and set(answer.versions.tolist()) <= {1, 2}


def calls_share_the_engine_and_one_that_is_given_up_harms_nobody(subject: Subject) -> None:
    async def run() -> list[list[Completion]]:
        subject.engine.publish(subject.policies[0], 1)
        given_up = subject.engine.generate(subject.many(8))
        await anext(given_up)
        others = [subject.engine.generate(subject.many(4)), subject.engine.generate(subject.many(6))]
        tasks = [asyncio.create_task(collected(one, n)) for one, n in zip(others, (4, 6), strict=True)]
        await asyncio.sleep(0)
        await given_up.aclose()  # type: ignore[attr-defined]
        return [await task for task in tasks]

    four, six = asyncio.run(run())
    assert all(answer.stop is Stop.LENGTH for answer in (*four, *six))
    assert len(subject.run(subject.many(3))) == 3


def what_can_never_be_answered_is_refused(subject: Subject) -> None:
    empty = Request(tokens=np.zeros(0, np.int32), sampling=Sampling(max_tokens=2), seed=(1,))
    outside = Request(tokens=np.array([subject.vocab], np.int32), sampling=Sampling(max_tokens=2), seed=(1,))
    for request in (empty, outside):
        try:
            subject.run([request])
        except ValueError as error:
            assert str(error)
        else:
            raise AssertionError(f"{request.tokens.tolist()} was answered")
    assert subject.run([subject.ask(0)])[0].stop is Stop.LENGTH  # and the next one is


CONTRACT: tuple[Callable[[Subject], None], ...] = (
    every_request_is_answered_once_with_aligned_arrays,
    siblings_differ_and_noise_is_the_requests_own,
    a_stop_token_ends_an_answer_and_is_its_last,
    a_stop_string_ends_an_answer_and_its_text_ends_before,
    greedy_is_the_best_token_and_sure,
    logprobs_are_of_the_distribution_that_was_sampled_from,
    what_is_asked_after_a_publish_is_sampled_by_it,
    versions_never_go_back_within_an_answer,
    calls_share_the_engine_and_one_that_is_given_up_harms_nobody,
    what_can_never_be_answered_is_refused,
)
