"""A judge of answers, whoever writes for it: both orders of a comparison, scores of a group, a cache.

    Spec + Writer (an engine, an address) -> Judge: chats -> Reply, cached -> Compared, Score

A judgement is a function of the judge's revision and of what is compared: its noise is keyed by a hash of
both, so neither a cache, nor another batch, nor a resumed run changes a verdict. What cannot be judged has no
verdict, by name: it is never a score of 0, and never a neutral one.
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
    both_orders,
    log_odds,
    pairings,
    pairwise_prompts,
    parse_verdict,
    win_rates,
)

LABELS = ("A", "B")  # of the answers that are compared
Chat = Sequence[Mapping[str, str]]
Score = tuple[float | None, str, str]  # in [0, 1]; or the name of a fault, and what it was


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What judge.json holds. ``model``: the base, as model.path. ``template``: "" is
    ``judging.TEMPLATE``. ``calibration``: the temperature that calibrates its probabilities."""

    model: str
    template: str = ""
    max_tokens: int = 256  # of a critique and its verdict
    temperature: float = 0.0  # at which it is sampled
    calibration: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of one chat: a text, or a ``fault`` by name. ``near``: where the last of ``LABELS`` stands in
    it, the probabilities of the likeliest tokens; empty where they are not known."""

    text: str = ""
    near: Mapping[str, float] | None = None
    fault: str = ""
    detail: str = ""


class Writer(Protocol):
    """Answers chats, each with noise of its own seed. ``counters``: tokens, seconds, retries."""

    async def write(self, chats: Sequence[Chat], seeds: Sequence[int], spec: Spec) -> list[Reply]: ...


class Cache:
    """Replies by key: at most ``most`` of them, the ones most recently used."""

    def __init__(self, most: int = 65_536) -> None:
        self._most, self._kept = most, OrderedDict[bytes, Reply]()

    def get(self, key: bytes) -> Reply | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: bytes, reply: Reply) -> None:
        self._kept[key] = reply
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Two answers in both orders: the verdict of each as it stands there, and the replies. ``log_odds``:
    that the first is better, calibrated; None where probabilities are not known."""

    ab: Choice
    ba: Choice
    replies: tuple[Reply, ...]
    log_odds: float | None = None

    @property
    def choice(self) -> Choice:
        return both_orders(self.ab, self.ba)

    @property
    def fault(self) -> tuple[str, str]:
        """Why there is no verdict, by name and in words."""
        for reply in self.replies:
            if reply.fault:
                return reply.fault, reply.detail
        if self.choice is Choice.INCONSISTENT:
            return "inconsistent", "another verdict where the answers change places"
        return "unreadable", f"no verdict in {self.replies[self.ab is not Choice.UNREADABLE].text[-200:]!r}"


class Judge:
    """One judge. ``counters``: judge/judgements (chats), judge/cached, and what its writer counts."""

    def __init__(
        self, spec: Spec, revision: str, writer: Writer, cache: Cache, counters: Counter[str]
    ) -> None:
        self.spec, self.revision = spec, revision
        self._writer, self._cache, self._counters = writer, cache, counters

    async def ask(self, chats: Sequence[Chat]) -> list[Reply]:
        """What it says to each; equal chats are answered once. A fault is not kept."""
        revision = self.revision.encode()
        keys = [hashlib.sha256(revision + json.dumps([*map(dict, chat)]).encode()).digest() for chat in chats]
        known = {key: reply for key in keys if (reply := self._cache.get(key)) is not None}
        new = {key: chat for key, chat in zip(keys, chats, strict=True) if key not in known}
        seeds = [int.from_bytes(key[:8], "little", signed=True) for key in new]
        written = await self._writer.write(list(new.values()), seeds, self.spec) if new else []
        for key, reply in zip(new, written, strict=True):
            known[key] = reply
            if not reply.fault:
                self._cache.put(key, reply)
        self._counters["judge/judgements"] += len(chats)
        self._counters["judge/cached"] += len(chats) - len(new)
        return [known[key] for key in keys]

    async def compare(self, messages: Chat, pairs: Sequence[tuple[str, str]]) -> list[Compared]:
        """Each pair in both orders."""
        prompt = question(messages)
        texts = [text for a, b in pairs for text in pairwise_prompts(self.spec.template, prompt, a, b)]
        replies = await self.ask([[{"role": "user", "content": text}] for text in texts])
        return [self._compared(ab, ba) for ab, ba in zip(replies[::2], replies[1::2], strict=True)]

    async def compare_each(self, rows: Iterable[tuple[Chat, str, str]]) -> list[Compared]:
        """Every (chat, answer, other answer) in both orders."""
        found = await asyncio.gather(*(self.compare(chat, [(a, b)]) for chat, a, b in rows))
        return [one for (one,) in found]

    def _compared(self, ab: Reply, ba: Reply) -> Compared:
        odds = [_log_odds(order.near or {}) for order in (ab, ba)]
        known = None
        if not any(map(math.isnan, odds)):
            known = float(log_odds(*map(np.array, odds))) / self.spec.calibration
        first, second = parse_verdict(ab.text), parse_verdict(ba.text)
        return Compared(ab=first, ba=second, replies=(ab, ba), log_odds=known)

    async def score(self, messages: Chat, answers: Sequence[str], ring: bool) -> list[Score]:
        """Win rates of siblings, in [0, 1]. Equal answers tie, unjudged."""
        pairs = sorted({(min(pair), max(pair)) for pair in pairings(len(answers), ring)})
        differ = [(i, j) for i, j in pairs if answers[i] != answers[j]]
        found = await self.compare(messages, [(answers[i], answers[j]) for i, j in differ])
        verdicts = dict.fromkeys((order for i, j in pairs for order in ((i, j), (j, i))), Choice.TIE)
        faults = [("", "")] * len(answers)
        for (i, j), one in zip(differ, found, strict=True):
            verdicts[i, j], verdicts[j, i] = one.ab, one.ba
            if one.choice in (Choice.UNREADABLE, Choice.INCONSISTENT):
                self._counters[f"judge/{one.fault[0]}"] += 1
                faults[i] = faults[j] = one.fault
        rates, _ = win_rates(len(answers), verdicts)
        each = zip(rates.tolist(), faults, strict=True)
        return [(None, *fault) if math.isnan(rate) else (rate, "", "") for rate, fault in each]


def question(messages: Chat) -> str:
    """A chat as a judge reads it: its one message, or its turns with their roles."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _log_odds(near: Mapping[str, float]) -> float:
    """log P(A) - log P(B) where the verdict stands: what is not among the likeliest is at most as likely as
    the last of these. NaN without either."""
    if not any(label in near for label in LABELS):
        return math.nan
    least = min(near.values())
    a, b = (math.log(max(near.get(label, least), 1e-30)) for label in LABELS)
    return a - b
