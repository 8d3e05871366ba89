"""A judge of answers with any writer: both orders of a comparison, scores of a group, a cache.

    Spec + Writer (an engine, an address) -> Judge: chats -> Reply, cached -> Compared, Score

A judgement is a function of the judge's revision and of the compared texts: a hash of both is the seed of its
noise. So neither a cache, nor another batch, nor a resumed run changes a verdict. A comparison that fails has
a named fault in place of a verdict, never a score of 0 or a neutral score.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ostinato.apps.product.judging import (
    Choice,
    build_prompts,
    list_pairings,
    log_odds,
    merge_orders,
    parse_verdict,
    win_rates,
)

LABELS = ("A", "B")  # of the answers that are compared
Chat = Sequence[Mapping[str, str]]
Score = tuple[float | None, str, str]  # (value in [0, 1], "", "") or (None, name of a fault, its detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """The description of a judge, as judge.json has it. ``model``: the base, as model.path. ``template``: ""
    is ``judging.TEMPLATE``. ``calibration``: the temperature that calibrates its probabilities."""

    model: str
    template: str = ""
    max_tokens: int = 256  # of a critique and its verdict
    temperature: float = 0.0  # at which it is sampled
    calibration: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A judge's answer to one chat: a text, or a ``fault`` by name. ``near``: the probabilities of the
    likeliest tokens where the last of ``LABELS`` stands in the text; empty where they are not known."""

    text: str = ""
    near: Mapping[str, float] | None = None
    fault: str = ""
    detail: str = ""


class Writer(Protocol):
    """Writes replies to chats, each with the noise of its own seed. ``counters``: tokens, seconds,
    retries."""

    async def write(self, chats: Sequence[Chat], seeds: Sequence[int], spec: Spec) -> list[Reply]: ...


class Cache:
    """Replies by key: the ``max_replies`` most recently used ones."""

    def __init__(self, max_replies: int = 65_536) -> None:
        self._max_replies, self._replies = max_replies, OrderedDict[bytes, Reply]()

    def get(self, key: bytes) -> Reply | None:
        if key in self._replies:
            self._replies.move_to_end(key)
        return self._replies.get(key)

    def put(self, key: bytes, reply: Reply) -> None:
        self._replies[key] = reply
        while len(self._replies) > self._max_replies:
            self._replies.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Two answers compared in both orders. In the verdict of each order, A is the answer that stands first in
    it. ``log_odds`` are the calibrated log-odds that the first answer is better; None without
    probabilities."""

    ab: Choice
    ba: Choice
    replies: tuple[Reply, ...]
    log_odds: float | None = None

    @property
    def choice(self) -> Choice:
        return merge_orders(self.ab, self.ba)

    @property
    def fault(self) -> tuple[str, str]:
        """The reason why there is no verdict, by name and in words. Call it only without a verdict."""
        for reply in self.replies:
            if reply.fault:
                return reply.fault, reply.detail
        if self.choice is Choice.INCONSISTENT:
            return "inconsistent", "another verdict where the answers change places"
        return "unreadable", f"no verdict in {self.replies[self.ab is not Choice.UNREADABLE].text[-200:]!r}"


class Judge:
    """A judge with its writer and cache. ``counters``: judge/judgements (chats), judge/cached, and those of
    the writer."""

    def __init__(
        self, spec: Spec, revision: str, writer: Writer, cache: Cache, counters: Counter[str]
    ) -> None:
        self.spec, self.revision = spec, revision
        self._writer, self._cache, self._counters = writer, cache, counters

    async def ask(self, chats: Sequence[Chat]) -> list[Reply]:
        """Return the judge's reply to each chat, from the cache if it has one. New replies are cached, faults
        are not. Equal chats are answered once. Counts chats and cached replies."""
        revision = self.revision.encode()
        keys = [hashlib.sha256(revision + json.dumps([*map(dict, chat)]).encode()).digest() for chat in chats]
        reply_of = {key: reply for key in keys if (reply := self._cache.get(key)) is not None}
        new_chats = {key: chat for key, chat in zip(keys, chats, strict=True) if key not in reply_of}
        seeds = [int.from_bytes(key[:8], "little", signed=True) for key in new_chats]
        new_replies = (
            await self._writer.write(list(new_chats.values()), seeds, self.spec) if new_chats else []
        )
        for key, reply in zip(new_chats, new_replies, strict=True):
            reply_of[key] = reply
            if not reply.fault:
                self._cache.put(key, reply)
        self._counters["judge/judgements"] += len(chats)
        self._counters["judge/cached"] += len(chats) - len(new_chats)
        return [reply_of[key] for key in keys]

    async def compare(self, messages: Chat, pairs: Sequence[tuple[str, str]]) -> list[Compared]:
        """Compare the answers of each pair in both orders."""
        prompt = format_chat(messages)
        texts = [text for a, b in pairs for text in build_prompts(self.spec.template, prompt, a, b)]
        replies = await self.ask([[{"role": "user", "content": text}] for text in texts])
        return [self._merge_orders(ab, ba) for ab, ba in zip(replies[::2], replies[1::2], strict=True)]

    async def compare_each(self, rows: Iterable[tuple[Chat, str, str]]) -> list[Compared]:
        """Compare the two answers of every row (chat, answer, other answer) in both orders."""
        comparisons = await asyncio.gather(*(self.compare(chat, [(a, b)]) for chat, a, b in rows))
        return [comparison for (comparison,) in comparisons]

    def _merge_orders(self, ab: Reply, ba: Reply) -> Compared:
        odds = [_compute_log_odds(reply.near or {}) for reply in (ab, ba)]
        calibrated_odds = None
        if not any(map(math.isnan, odds)):
            calibrated_odds = float(log_odds(*map(np.array, odds))) / self.spec.calibration
        first, second = parse_verdict(ab.text), parse_verdict(ba.text)
        return Compared(ab=first, ba=second, replies=(ab, ba), log_odds=calibrated_odds)

    async def score(self, messages: Chat, answers: Sequence[str]) -> list[Score]:
        """Return win rates of sibling answers, in [0, 1]. Equal answers tie without a judgement. An answer
        has a fault in place of a rate if none of its comparisons has a verdict; faults of comparisons are
        counted."""
        pairs = sorted({(min(pair), max(pair)) for pair in list_pairings(len(answers))})
        unequal_pairs = [(i, j) for i, j in pairs if answers[i] != answers[j]]
        comparisons = await self.compare(messages, [(answers[i], answers[j]) for i, j in unequal_pairs])
        verdicts = dict.fromkeys((order for i, j in pairs for order in ((i, j), (j, i))), Choice.TIE)
        faults = [("", "")] * len(answers)
        for (i, j), comparison in zip(unequal_pairs, comparisons, strict=True):
            verdicts[i, j], verdicts[j, i] = comparison.ab, comparison.ba
            if comparison.choice in (Choice.UNREADABLE, Choice.INCONSISTENT):
                self._counters[f"judge/{comparison.fault[0]}"] += 1
                faults[i] = faults[j] = comparison.fault
        rates, _ = win_rates(len(answers), verdicts)
        rows = zip(rates.tolist(), faults, strict=True)
        return [(None, *fault) if math.isnan(rate) else (rate, "", "") for rate, fault in rows]


def format_chat(messages: Chat) -> str:
    """Format a chat for a judge: its message if it has only one, else its turns with their roles."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _compute_log_odds(near: Mapping[str, float]) -> float:
    """Compute log P(A) - log P(B) of the verdict's token. A label that is not among the likeliest tokens gets
    their smallest probability, which is an upper bound. NaN if neither label is among them."""
    if not any(label in near for label in LABELS):
        return math.nan
    smallest = min(near.values())
    a, b = (math.log(max(near.get(label, smallest), 1e-30)) for label in LABELS)
    return a - b
