"""An engine without a model, for tests: a known distribution over the next token, or a script.

It keeps the promises of the protocol that others rely on: addressed noise, the policy version of every
token, routes aligned with the tokens, completions in the order in which they finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np

from ostinato.algo.noise import key, uniform
from ostinato.routes import route_dtype
from ostinato.types import NO_EXPERT, Completion, Request, Sampling, Stop

_EXPERTS = 97  # a prime: neighbours, layers and slots differ

Policy = Callable[[Any, Request, Sequence[int]], np.ndarray]
"""(published adapters, request, tokens sampled so far) -> logits of the next token [V]."""


class FakeEngine:
    """Draws from softmax(logits / temperature) of ``policy`` with the addressed noise.

    ``moe`` (layers, top_k) adds routes that are a function of (token, position); ``delay_s`` passes before
    each completion is handed out. ``calls`` keeps the requests of every call, to see which came together.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        decode: Callable[[Sequence[int]], str] = lambda tokens: " ".join(map(str, tokens)),
        moe: tuple[int, int] | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self._policy, self._decode, self._moe, self._delay_s = policy, decode, moe, delay_s
        self._adapters: Any = None
        self.version = 0
        self.calls: list[list[Request]] = []

    def publish(self, adapters: Any, version: int) -> None:
        self._adapters, self.version = adapters, version

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        for request in requests:
            _refuse_filters(request.sampling)
        self.calls.append(list(requests))
        completions = [self._complete(request) for request in requests]
        for index in sorted(range(len(requests)), key=lambda i: len(completions[i].tokens)):
            await asyncio.sleep(self._delay_s)
            yield index, completions[index]

    def _complete(self, request: Request) -> Completion:
        sampling, prompt = request.sampling, np.asarray(request.tokens, np.int32)
        address = key(request.seed)
        tokens: list[int] = []
        logprobs: list[float] = []
        stop, text = Stop.LENGTH, ""
        while stop is Stop.LENGTH and len(tokens) < sampling.max_tokens:
            banned = sampling.stop_tokens if len(tokens) < sampling.min_tokens else ()
            noise = float(uniform(address, len(prompt) + len(tokens)))
            scores = self._policy(self._adapters, request, tokens)
            token, logprob = draw(scores, sampling.temperature, noise, banned)
            tokens.append(token)
            logprobs.append(logprob)
            text = self._decode([t for t in tokens if t not in sampling.stop_tokens])
            stop, text = _stopped(token, text, sampling)
        experts = self._routes(np.append(prompt, np.asarray(tokens, np.int32)))
        if experts is not None:
            experts[-1] = NO_EXPERT
            experts = experts[request.routes_from :]
        return Completion(
            tokens=np.asarray(tokens, np.int32),
            logprobs=np.asarray(logprobs, np.float32),
            versions=np.full(len(tokens), self.version, np.int32),
            stop=stop,
            text=text,
            experts=None if experts is None else experts[-len(tokens) :],
            prompt_experts=None if experts is None else experts[: -len(tokens)],
        )

    def _routes(self, tokens: np.ndarray) -> np.ndarray | None:
        if self._moe is None:
            return None
        layers, top_k = self._moe
        slots = np.arange(layers * top_k).reshape(1, layers, top_k)
        ids = (tokens[:, None, None] * 31 + np.arange(len(tokens))[:, None, None] + slots) % _EXPERTS
        return ids.astype(route_dtype(_EXPERTS))


def scripted(answer: Callable[[Request], Sequence[int]], vocab_size: int) -> Policy:
    """The policy that says ``answer(request)``, token by token, with probability 1.

    The answer must be as long as ``max_tokens`` or end in a stop token; running out of words is an error.
    """

    def policy(adapters: Any, request: Request, output: Sequence[int]) -> np.ndarray:
        scores = np.full(vocab_size, -np.inf)
        scores[answer(request)[len(output)]] = 0.0
        return scores

    return policy


def draw(
    scores: np.ndarray, temperature: float, noise: float, banned: Sequence[int] = ()
) -> tuple[int, float]:
    """(token, its log-probability): the inverse cumulative distribution of softmax(scores / temperature) at
    ``noise`` in (0, 1); at temperature 0 the first best token, whose log-probability is then 0."""
    scores = np.array(scores, np.float64)
    scores[list(banned)] = -np.inf
    if temperature == 0:
        return int(scores.argmax()), 0.0
    weights = np.exp((scores - scores.max()) / temperature)
    cumulative = np.cumsum(weights)
    token = int(np.searchsorted(cumulative, noise * cumulative[-1], side="right"))
    return token, float(np.log(weights[token] / cumulative[-1]))


def _stopped(token: int, text: str, sampling: Sampling) -> tuple[Stop, str]:
    if token in sampling.stop_tokens:
        return Stop.EOS, text
    cuts = [text.index(string) for string in sampling.stop_strings if string in text]
    return (Stop.STRING, text[: min(cuts)]) if cuts else (Stop.LENGTH, text)


def _refuse_filters(sampling: Sampling) -> None:
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if getattr(sampling, name) != off:
            raise ValueError(
                f"sampling.{name} is {getattr(sampling, name)}; the fake engine only knows {off}"
            )
