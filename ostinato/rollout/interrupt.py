"""Forced interruption of thinking: a phrase after a thought that is long enough (ScaleRL, arXiv 2510.13786,
A.10).

    request b tokens -> ended by itself              the answer
                     -> cut, its thought is closed   the same answer goes on, up to ``answer_tokens`` more
                     -> cut, still thinking          the phrase is put in, then up to ``answer_tokens`` more

b, the thinking budget, is uniform in {shortest .. longest} and addressed as every other draw: by the seed and
the position at which the answer begins. So it is the same in any batch and after a restart, and every turn of
an agent has its own. The phrase is the prompt of a second request, whose prefix the engine has in its cache.

The pieces become one ``Completion``, whose ``injected`` marks the phrase: part of the text, never trained on.
An answer that goes on without the phrase is, token by token, what one request would have given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ostinato.algo.noise import key, uniform
from ostinato.types import NO_EXPERT, Completion, Request, Sampling, Stop, Support

_BUDGETS = -1  # appended to a seed path: no sample has this number, so no token shares a budget's noise


class Words(Protocol):
    """What an interruption needs of ``render.Renderer``."""

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special: bool = True) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Interruption:
    """When thinking is interrupted, with which words, and what the answer may take then.

    ``think_end`` closes a thought; where it is "", every answer that has not ended is still thinking.
    """

    shortest: int  # tokens of thinking, at least
    longest: int
    answer_tokens: int  # after the budget
    phrase: np.ndarray  # [F] int32, what is put in
    think_end: str
    words: Words

    @property
    def most_tokens(self) -> int:
        """The longest answer: thinking, phrase and answer."""
        return self.longest + self._reserved

    @property
    def _reserved(self) -> int:
        return len(self.phrase) + self.answer_tokens

    def budget(self, seed: tuple[int, ...], position: int) -> int:
        """Tokens of thinking of the answer of episode ``seed`` that begins at ``position``."""
        u = uniform(key((*seed, _BUDGETS)), position)
        return self.shortest + int(u * (self.longest - self.shortest + 1))

    def first_tokens(self, seed: tuple[int, ...], position: int, room: int) -> int:
        """Tokens to sample first where ``room`` are left in the context.

        The thought is shortened so that phrase and answer fit after it. Where they cannot fit, it is an
        ordinary answer that may fill the room.
        """
        return min(self.budget(seed, position), room - self._reserved) if room > self._reserved else room

    def second_request(
        self, request: Request, answer: Completion, sampling: Sampling, context_limit: int
    ) -> Request | None:
        """The request that follows ``answer`` to ``request``; None when the answer is complete. ``sampling``
        is that of the whole answer."""
        if answer.stop is not Stop.LENGTH or len(answer.tokens) < request.sampling.max_tokens:
            return None  # fewer than requested: the engine's own limit
        closed = self.think_end and self.think_end in self.words.decode(answer.tokens, skip_special=False)
        tokens = np.concatenate([request.tokens, answer.tokens, self.phrase[: 0 if closed else None]])
        most = min(self.answer_tokens, context_limit - len(tokens))
        if most < 1:
            return None
        least = min(max(0, sampling.min_tokens - len(answer.tokens)), most)
        return replace(
            request,
            tokens=tokens.astype(np.int32, copy=False),
            sampling=replace(sampling, max_tokens=most, min_tokens=least),
            routes_from=len(request.tokens) + len(answer.tokens) - 1,  # the last token had not run yet
        )

    def join(self, request: Request, answer: Completion, again: Request, more: Completion) -> Completion:
        """``answer`` to ``request``, what ``again`` appended, and ``more``, the answer to ``again``, as one.

        Where thinking went on without the phrase, a stop string may lie across the seam, where the engine
        could not see it: the answer ends there, as that of one request would have.
        """
        num_known = len(request.tokens) + len(answer.tokens)
        completion = merge_completions(answer, again.tokens[num_known:], more, num_known)
        strings = request.sampling.stop_strings
        if completion.injected is None and (end := self._end_across(completion, len(answer.tokens), strings)):
            completion = _cut_at(completion, end)
        text = self.words.decode(completion.tokens[: -1 if completion.stop is Stop.EOS else None])
        if completion.stop is Stop.STRING and completion.injected is None:
            text = text[: min((text.index(string) for string in strings if string in text), default=None)]
        elif completion.stop is Stop.STRING:  # as much as the engine has cut from the end of its own piece
            text = text[: len(text) - len(self.words.decode(more.tokens)) + len(more.text)]
        return replace(completion, text=text)

    def _end_across(self, completion: Completion, seam: int, strings: Sequence[str]) -> int:
        """The number of tokens up to the end of a stop string that ends after the seam and before the engine
        stopped; 0 without one."""

        def holds(end: int) -> bool:
            text = self.words.decode(completion.tokens[:end])
            return any(string in text for string in strings)

        last = len(completion.tokens) - (completion.stop in (Stop.STRING, Stop.EOS))
        if not strings or not holds(last):
            return 0
        return next((end for end in range(seam + 1, last + 1) if holds(end)), 0)


def merge_completions(before: Completion, phrase: np.ndarray, more: Completion, num_known: int) -> Completion:
    """``before``, the tokens of ``phrase`` (marked as injected) and ``more`` as one completion without text.

    ``num_known`` tokens come before the phrase; all but the last of them had run, so those that the second
    request did not find in the cache were computed twice, and are subtracted from ``cached_tokens``.
    """
    put_in = len(phrase)
    again = [part.recomputed for part in (before, more) if part.recomputed is not None]
    edges, routes = (before.edges, more.edges), (before.experts, more.prompt_experts, more.experts)
    return Completion(
        tokens=np.concatenate([before.tokens, phrase, more.tokens]),
        logprobs=np.concatenate([before.logprobs, np.zeros(put_in, np.float32), more.logprobs]),
        edges=None
        if edges[0] is None or edges[1] is None
        else np.concatenate([edges[0], np.zeros(put_in, np.float32), edges[1]]),
        versions=np.concatenate([before.versions, np.full(put_in, -1, np.int32), more.versions]),
        injected=np.repeat([False, True, False], [len(before.tokens), put_in, len(more.tokens)])
        if put_in
        else None,
        stop=more.stop,
        experts=None
        if routes[0] is None or routes[1] is None or routes[2] is None
        else np.concatenate([routes[0][:-1], routes[1], routes[2]]),
        prompt_experts=before.prompt_experts,
        support=_merge_supports(before, put_in, more),
        drafted=before.drafted + more.drafted,
        accepted=before.accepted + more.accepted,
        passes=before.passes + more.passes,
        cached_tokens=before.cached_tokens + more.cached_tokens - (num_known - 1),
        recomputed=np.concatenate(again) if again else None,
        error=more.error,
    )


def _merge_supports(before: Completion, put_in: int, more: Completion) -> Support | None:
    if before.support is None and more.support is None:
        return None
    first, last = (
        Support.whole(len(part.tokens)) if part.support is None else part.support for part in (before, more)
    )
    return Support.concatenate([first, Support.whole(put_in), last])


def _cut_at(completion: Completion, end: int) -> Completion:
    """The first ``end`` tokens, ended by a stop string."""
    experts = None if completion.experts is None else completion.experts[:end].copy()
    if experts is not None:
        experts[-1] = NO_EXPERT  # as far as one request would have known
    return replace(
        completion,
        tokens=completion.tokens[:end],
        logprobs=completion.logprobs[:end],
        edges=None if completion.edges is None else completion.edges[:end],
        versions=completion.versions[:end],
        experts=experts,
        support=None if completion.support is None else completion.support.take(np.arange(end)),
        stop=Stop.STRING,
        error="",
    )
