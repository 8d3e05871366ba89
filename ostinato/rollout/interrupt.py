"""Forced interruption of thinking: a phrase after a thought that is long enough (ScaleRL, arXiv 2510.13786,
A.10).

    request b tokens -> ended by itself              the answer
                     -> cut, its thought is closed   the same answer goes on, up to ``answer_tokens`` more
                     -> cut, still thinking          the phrase is injected, then up to ``answer_tokens`` more

b, the thinking budget, is uniform in {shortest .. longest} and addressed as any other draw: by the seed and
the position at which the answer begins. So it is the same in any batch and after a restart, and differs
between the turns of an agent. The phrase is the prompt of a second request, whose prefix the engine has in
its cache.

The pieces become one ``Completion``, whose ``injected`` marks the phrase: part of the text, never trained on.
An answer that goes on without the phrase is, token by token, that of a single request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ostinato.algo.noise import key, uniform
from ostinato.types import NO_EXPERT, Completion, Request, Sampling, Stop, Support

_BUDGET_KEY = -1  # appended to a seed path: no sample has this number, so no token shares a budget's noise


class Words(Protocol):
    """The part of ``render.Renderer`` that an interruption needs."""

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special: bool = True) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Interruption:
    """The limits of thinking, the phrase that interrupts it, and the length of the answer after it.

    ``think_end`` closes a thought; if it is "", every answer that has not ended is still thinking.
    """

    shortest: int  # tokens of thinking, at least
    longest: int
    answer_tokens: int  # after the budget
    phrase: np.ndarray  # [F] int32, the tokens to inject
    think_end: str
    words: Words

    @property
    def max_tokens(self) -> int:
        """The longest answer: thinking, phrase and answer."""
        return self.longest + self._reserved_size

    @property
    def _reserved_size(self) -> int:
        return len(self.phrase) + self.answer_tokens

    def draw_budget(self, seed: tuple[int, ...], position: int) -> int:
        """Draw the tokens of thinking for the answer of episode ``seed`` that begins at ``position``."""
        u = uniform(key((*seed, _BUDGET_KEY)), position)
        return self.shortest + int(u * (self.longest - self.shortest + 1))

    def count_first_tokens(self, seed: tuple[int, ...], position: int, room: int) -> int:
        """Return the number of tokens to sample first if ``room`` are left in the context.

        The thought is shortened so that phrase and answer fit after it. If they cannot fit, it is an
        ordinary answer that may fill the room.
        """
        return (
            min(self.draw_budget(seed, position), room - self._reserved_size)
            if room > self._reserved_size
            else room
        )

    def make_second_request(
        self, request: Request, answer: Completion, sampling: Sampling, context_limit: int
    ) -> Request | None:
        """Return the request that follows ``answer`` to ``request``; None if the answer is complete, or the
        context has no room for more. If its thought is not closed, the phrase is appended. ``sampling`` is
        that of the whole answer."""
        if answer.stop is not Stop.LENGTH or len(answer.tokens) < request.sampling.max_tokens:
            return None  # fewer than requested: the engine's own limit ended it
        is_closed = self.think_end and self.think_end in self.words.decode(answer.tokens, skip_special=False)
        tokens = np.concatenate([request.tokens, answer.tokens, self.phrase[: 0 if is_closed else None]])
        max_tokens = min(self.answer_tokens, context_limit - len(tokens))
        if max_tokens < 1:
            return None
        min_tokens = min(max(0, sampling.min_tokens - len(answer.tokens)), max_tokens)
        return replace(
            request,
            tokens=tokens.astype(np.int32, copy=False),
            sampling=replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens),
            routes_from=len(request.tokens) + len(answer.tokens) - 1,  # the last token had not run yet
        )

    def join(self, request: Request, answer: Completion, followup: Request, tail: Completion) -> Completion:
        """Join ``answer`` to ``request``, the tokens that ``followup`` appended, and ``tail``, the answer to
        ``followup``.

        If thinking went on without the phrase, a stop string may lie across the boundary, where the engine
        could not see it: the answer ends there, as that of a single request would have.
        """
        num_known = len(request.tokens) + len(answer.tokens)
        completion = merge_completions(answer, followup.tokens[num_known:], tail, num_known)
        strings = request.sampling.stop_strings
        if completion.injected is None and (end := self._find_end(completion, len(answer.tokens), strings)):
            completion = _truncate_at_string(completion, end)
        text = self.words.decode(completion.tokens[: -1 if completion.stop is Stop.EOS else None])  # no eos
        if completion.stop is Stop.STRING and completion.injected is None:
            text = text[: min((text.index(string) for string in strings if string in text), default=None)]
        elif completion.stop is Stop.STRING:  # cut as much from the end as the engine has cut from ``tail``
            text = text[: len(text) - len(self.words.decode(tail.tokens)) + len(tail.text)]
        return replace(completion, text=text)

    def _find_end(self, completion: Completion, boundary: int, strings: Sequence[str]) -> int:
        """Return the number of tokens up to the end of a stop string that ends after the boundary and before
        the engine stopped; 0 without such a string."""

        def has_string(end: int) -> bool:
            text = self.words.decode(completion.tokens[:end])
            return any(string in text for string in strings)

        length = len(completion.tokens) - (completion.stop in (Stop.STRING, Stop.EOS))
        if not strings or not has_string(length):
            return 0
        return next((end for end in range(boundary + 1, length + 1) if has_string(end)), 0)


def merge_completions(head: Completion, phrase: np.ndarray, tail: Completion, num_known: int) -> Completion:
    """Merge ``head``, the tokens of ``phrase`` (marked as injected) and ``tail``; the text is left empty.

    ``num_known`` tokens come before the phrase; all but the last of them had run, so those that the second
    request did not find in the cache were computed twice, and are subtracted from ``cached_tokens``.
    """
    num_injected = len(phrase)
    recomputed = [part.recomputed for part in (head, tail) if part.recomputed is not None]
    edges, routes = (head.edges, tail.edges), (head.experts, tail.prompt_experts, tail.experts)
    return Completion(
        tokens=np.concatenate([head.tokens, phrase, tail.tokens]),
        logprobs=np.concatenate([head.logprobs, np.zeros(num_injected, np.float32), tail.logprobs]),
        edges=None
        if edges[0] is None or edges[1] is None
        else np.concatenate([edges[0], np.zeros(num_injected, np.float32), edges[1]]),
        versions=np.concatenate([head.versions, np.full(num_injected, -1, np.int32), tail.versions]),
        injected=np.repeat([False, True, False], [len(head.tokens), num_injected, len(tail.tokens)])
        if num_injected
        else None,
        stop=tail.stop,
        experts=None
        if routes[0] is None or routes[1] is None or routes[2] is None
        else np.concatenate([routes[0][:-1], routes[1], routes[2]]),
        prompt_experts=head.prompt_experts,
        support=_merge_supports(head, num_injected, tail),
        drafted=head.drafted + tail.drafted,
        accepted=head.accepted + tail.accepted,
        passes=head.passes + tail.passes,
        cached_tokens=head.cached_tokens + tail.cached_tokens - (num_known - 1),
        recomputed=np.concatenate(recomputed) if recomputed else None,
        error=tail.error,
    )


def _merge_supports(head: Completion, num_injected: int, tail: Completion) -> Support | None:
    """Join the records; the phrase, and a part without a record, have the whole vocabulary."""
    if head.support is None and tail.support is None:
        return None
    first, last = (
        Support.whole(len(part.tokens)) if part.support is None else part.support for part in (head, tail)
    )
    return Support.concatenate([first, Support.whole(num_injected), last])


def _truncate_at_string(completion: Completion, end: int) -> Completion:
    """Return the first ``end`` tokens of a completion, ended by a stop string."""
    experts = None if completion.experts is None else completion.experts[:end].copy()
    if experts is not None:
        experts[-1] = NO_EXPERT  # a single request would not have run its last token either
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
