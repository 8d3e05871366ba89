"""Requests and passes as a drafter sees them, and a small world whose policy drifts from step to step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ostinato.algo.noise import key, uniform
from ostinato.compiler import BuildError
from ostinato.history.native.library import load_library
from ostinato.history.store import History
from ostinato.types import DraftQuery, Drafts, HistoryEntry, Request, SampledTokens, Sampling

VOCAB, STOP = 6, 0
FREE = 1e-3 + 1e-9 * np.arange(65)  # seconds of a pass in which draft tokens cost next to nothing


def request(
    tokens: Sequence[int], *, seed: Sequence[int] = (1,), uid: str = "p", temperature: float = 1.0
) -> Request:
    return Request(
        tokens=np.array(tokens, np.int32),
        sampling=Sampling(temperature=temperature),
        seed=tuple(seed),
        uid=uid,
    )


def running(*handles: int, room: int = 40, seconds: np.ndarray = FREE, leaves: int = 1) -> DraftQuery:
    return DraftQuery(
        handles=np.array(handles, np.int64),
        room=np.full(len(handles), room, np.int32),
        weights=np.ones(len(handles), np.float32),
        seconds=seconds,
        leaves=leaves,
    )


def emitted(
    handle: int, tokens: Sequence[int], *, ended: bool = False, prob: float = 1.0, edge: float = 0.0
) -> SampledTokens:
    n = len(tokens)
    return SampledTokens(
        handles=np.array([handle], np.int64),
        counts=np.array([n], np.int32),
        tokens=np.array(tokens, np.int32),
        probs=np.full(n, prob, np.float32),
        edges=np.full(n, edge, np.float32),
        ended=np.array([ended]),
    )


def past(
    context: Sequence[int], tokens: Sequence[int], *, probs: Any = 1.0, edges: Any = 0.0, reward: float = 0.0
) -> HistoryEntry:
    n = len(tokens)
    return HistoryEntry(
        context=np.array(context, np.int32),
        tokens=np.array(tokens, np.int32),
        probs=np.broadcast_to(np.float32(probs), n),
        edges=np.broadcast_to(np.float32(edges), n),
        reward=reward,
    )


def compiled() -> bool:
    try:
        load_library()
    except BuildError:
        return False
    return True


# ---- the world


@dataclass
class Speaker:
    """A sequence as an engine would hold it, with a handle at every drafter."""

    handles: list[int]
    request: Request
    limit: int
    tokens: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    edges: list[float] = field(default_factory=list)

    def speak(self, policy: np.ndarray) -> int:
        """Sample one token by inverse transform, as the engine does."""
        text = [*self.request.tokens.tolist(), *self.tokens]
        chances = policy[text[-2], text[-1]]
        ends = np.cumsum(chances)
        u = uniform(key(self.request.seed), len(text))
        greedy = self.request.sampling.temperature == 0
        token = int(chances.argmax()) if greedy else min(int(np.searchsorted(ends, u, "right")), VOCAB - 1)
        self.tokens.append(token)
        self.probs.append(float(np.float32(chances[token])))
        self.edges.append(float(np.float32(ends[token] - chances[token])))
        return token

    def verify(self, policy: np.ndarray, tokens: list[int], parents: list[int]) -> tuple[int, bool]:
        """Sample-then-match along a draft: how many tokens came, and whether that is the end."""
        at, before = -1, len(self.tokens)
        while True:
            token = self.speak(policy)
            if token == STOP or len(self.tokens) == self.limit:
                return len(self.tokens) - before, True
            hits = [n for n in range(len(tokens)) if parents[n] == at and tokens[n] == token]
            if not hits:
                return len(self.tokens) - before, False
            at = hits[0]


def policy_of(seed: int, step: int) -> np.ndarray:
    """[V, V, V] the next token after two."""
    world = np.random.default_rng(seed)
    logits = 2.5 * world.normal(size=(VOCAB, VOCAB, VOCAB)) + 0.1 * step * world.normal(size=VOCAB)
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def well_formed(drafts: Drafts, rooms: list[int], leaves: int, most: int) -> None:
    """Parents first, no deeper than there is room, no more leaves and tokens than allowed."""
    assert drafts.counts.sum() == len(drafts.tokens) == len(drafts.parents) <= most
    start = 0
    for count, room in zip(drafts.counts.tolist(), rooms, strict=True):
        parents = drafts.parents[start : start + count].tolist()
        depth = {-1: 0}
        for node, parent in enumerate(parents):
            assert -1 <= parent < node
            depth[node] = depth[parent] + 1
        assert max(depth.values()) <= max(room, 0)
        assert len(set(range(count)) - set(parents)) <= leaves
        children = list(zip(parents, drafts.tokens[start : start + count].tolist(), strict=True))
        assert len(set(children)) == count  # siblings differ
        start += count


def play(
    drafters: list[Any], histories: list[History], seed: int, *, leaves: int, temperature: float
) -> None:
    """Three steps of rollouts, by engines that hear the same; every drafter has to propose the same."""
    rng = random.Random(seed)
    for step in range(3):
        policy, done = policy_of(seed, step), []
        queue = [(f"p{prompt}", (seed, step, prompt, sample)) for prompt in range(2) for sample in range(2)]
        speakers: list[Speaker] = []
        while queue or speakers:
            while queue and len(speakers) < 3:
                uid, address = queue.pop(0)
                asked = request([1, int(uid[1]), 2, 3], seed=address, uid=uid, temperature=temperature)
                asked = replace(asked, uid="") if rng.random() < 0.1 else asked
                handles = [drafter.open(asked) for drafter in drafters]
                speakers.append(Speaker(handles=handles, request=asked, limit=rng.randint(4, 14)))
            heard = one_pass(drafters, speakers, policy, rng, leaves)
            done += [speaker for speaker, ended in zip(speakers, heard, strict=True) if ended]
            speakers = [speaker for speaker, ended in zip(speakers, heard, strict=True) if not ended]
        for uid in sorted({speaker.request.uid for speaker in done}):
            its = [speaker for speaker in done if speaker.request.uid == uid]
            for history in histories:
                history.add(uid, step, [remembered(speaker) for speaker in its])
        what = None if rng.random() < 0.7 else ["p0"]
        for drafter in drafters:
            drafter.forget(what)


def remembered(speaker: Speaker) -> HistoryEntry:
    return past(
        speaker.request.tokens.tolist(),
        speaker.tokens,
        probs=speaker.probs,
        edges=speaker.edges,
        reward=sum(speaker.tokens) % 2,
    )


def one_pass(
    drafters: list[Any], speakers: list[Speaker], policy: np.ndarray, rng: random.Random, leaves: int
) -> list[bool]:
    """Which of the speakers have ended."""
    most = rng.choice([0, 3, 20])
    seconds = np.cumsum([1e-3] + [rng.choice([0.0, 1e-5, 1e-4, 3e-4]) for _ in range(most)])
    room = [speaker.limit - len(speaker.tokens) - 1 for speaker in speakers]
    weights = np.array([rng.choice([1, 1, 0.5, 2]) for _ in speakers], np.float32)
    handles = [np.array([speaker.handles[d] for speaker in speakers]) for d in range(len(drafters))]
    first, *others = (
        drafter.propose(
            DraftQuery(
                handles=mine,
                room=np.array(room, np.int32),
                weights=weights,
                seconds=seconds,
                leaves=leaves,
            )
        )
        for drafter, mine in zip(drafters, handles, strict=True)
    )
    for other in others:
        assert (first.counts.tolist(), first.tokens.tolist(), first.parents.tolist()) == (
            other.counts.tolist(), other.tokens.tolist(), other.parents.tolist()
        )  # fmt: skip
    well_formed(first, room, leaves, most)
    counts, ended, start = [], [], 0
    for speaker, count in zip(speakers, first.counts.tolist(), strict=True):
        part = slice(start, start + count)
        came, is_last = speaker.verify(policy, first.tokens[part].tolist(), first.parents[part].tolist())
        counts.append(came)
        ended.append(is_last or rng.random() < 0.02)  # given up
        start += count
    pairs = list(zip(speakers, counts, strict=True))
    for drafter, mine in zip(drafters, handles, strict=True):
        drafter.observe(
            SampledTokens(
                handles=mine,
                counts=np.array(counts, np.int32),
                tokens=np.concatenate([speaker.tokens[-n:] for speaker, n in pairs]).astype(np.int32),
                probs=np.concatenate([speaker.probs[-n:] for speaker, n in pairs]).astype(np.float32),
                edges=np.concatenate([speaker.edges[-n:] for speaker, n in pairs]).astype(np.float32),
                ended=np.array(ended),
            )
        )
    return ended
