"""Requests and passes as a drafter sees them, and a small world whose policy drifts from step to step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
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


def running(*handles: int, room: int = 40, seconds: np.ndarray = FREE) -> DraftQuery:
    return DraftQuery(
        handles=np.array(handles, np.int64),
        room=np.full(len(handles), room, np.int32),
        weights=np.ones(len(handles), np.float32),
        seconds=seconds,
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
    """A sequence as an engine would hold it."""

    handle: int
    request: Request
    limit: int
    tokens: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    edges: list[float] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return [*self.request.tokens.tolist(), *self.tokens]

    def speak(self, policy: np.ndarray) -> int:
        """Sample one token by inverse transform, as the engine does."""
        text = self.text
        chances = policy[text[-2], text[-1]]
        ends = np.cumsum(chances)
        u = uniform(key(self.request.seed), len(text))
        greedy = self.request.sampling.temperature == 0
        token = int(chances.argmax()) if greedy else min(int(np.searchsorted(ends, u, "right")), VOCAB - 1)
        self.tokens.append(token)
        self.probs.append(float(np.float32(chances[token])))
        self.edges.append(float(np.float32(ends[token] - chances[token])))
        return token

    def verify(self, policy: np.ndarray, draft: list[int]) -> tuple[int, int, bool]:
        """Sample-then-match along a draft: how many tokens came, how many of them were drafted, and whether
        that is the end."""
        before = len(self.tokens)
        while True:
            token, at = self.speak(policy), len(self.tokens) - before - 1
            hit = draft[at : at + 1] == [token]
            ended = token == STOP or len(self.tokens) == self.limit
            if not hit or ended:
                return at + 1, at + hit, ended


def policy_of(seed: int, step: int, drift: float) -> np.ndarray:
    """[V, V, V] the next token after two."""
    world = np.random.default_rng(seed)
    logits = 2.5 * world.normal(size=(VOCAB, VOCAB, VOCAB)) + drift * step * world.normal(size=VOCAB)
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def split(drafts: Drafts, rooms: list[int], most: int) -> list[list[int]]:
    """The draft of every sequence: no longer than there is room, no more tokens than allowed."""
    assert drafts.counts.sum() == len(drafts.tokens) <= most
    assert all(count <= max(room, 0) for count, room in zip(drafts.counts.tolist(), rooms, strict=True))
    return [part.tolist() for part in np.split(drafts.tokens, np.cumsum(drafts.counts)[:-1])]


@dataclass(kw_only=True)
class Game:
    """Rollouts of a few steps with a drafter, of a policy that drifts; ``seen``: what the engine counts."""

    drafter: Any
    history: History
    seed: int
    temperature: float = 1.0
    drift: float = 0.1
    steps: int = 3
    free: bool = False  # drafts cost next to nothing
    speakers: list[Speaker] = field(default_factory=list)  # all there were
    on_draft: Callable[[Speaker, list[int]], None] = lambda speaker, path: None  # before it is verified
    seen: Counter[str] = field(default_factory=Counter)

    def play(self) -> Counter[str]:
        rng = random.Random(self.seed)
        for step in range(self.steps):
            policy, running = policy_of(self.seed, step, self.drift), list[Speaker]()
            queue = [(f"p{prompt}", (self.seed, step, prompt, k)) for prompt in range(2) for k in range(2)]
            done: list[Speaker] = []
            while queue or running:
                while queue and len(running) < 3:
                    running.append(self.begin(*queue.pop(0), rng))
                ended = self.one_pass(running, policy, rng)
                done += [speaker for speaker, is_over in zip(running, ended, strict=True) if is_over]
                running = [speaker for speaker, is_over in zip(running, ended, strict=True) if not is_over]
            self.remember(step, done)
            self.drafter.forget(None if rng.random() < 0.7 else ["p0"])
        return self.seen

    def begin(self, uid: str, seed: tuple[int, ...], rng: random.Random) -> Speaker:
        requests = request([1, int(uid[1]), 2, 3], seed=seed, uid=uid, temperature=self.temperature)
        requests = replace(requests, uid="") if rng.random() < 0.1 else requests
        self.speakers.append(Speaker(self.drafter.open(requests), requests, limit=rng.randint(4, 14)))
        return self.speakers[-1]

    def remember(self, step: int, done: list[Speaker]) -> None:
        for uid in sorted({speaker.request.uid for speaker in done}):
            its = [speaker for speaker in done if speaker.request.uid == uid]
            self.history.add(
                uid,
                step,
                [
                    past(
                        one.request.tokens.tolist(),
                        one.tokens,
                        probs=one.probs,
                        edges=one.edges,
                        reward=k % 2,
                    )
                    for k, one in enumerate(its)
                ],
            )

    def one_pass(self, running: list[Speaker], policy: np.ndarray, rng: random.Random) -> list[bool]:
        """Which of the speakers have ended."""
        most = 20 if self.free else rng.choice([0, 3, 20])
        steps = [1e-9] if self.free else [0.0, 1e-5, 1e-4, 3e-4]
        room = [speaker.limit - len(speaker.tokens) - 1 for speaker in running]
        handles = np.array([speaker.handle for speaker in running])
        drafts = self.drafter.propose(
            DraftQuery(
                handles=handles,
                room=np.array(room, np.int32),
                weights=np.array([rng.choice([1, 1, 0.5, 2]) for _ in running], np.float32),
                seconds=np.cumsum([1e-3] + [rng.choice(steps) for _ in range(most)]),
            )
        )
        counts, ended = [], []
        for speaker, draft in zip(running, split(drafts, room, most), strict=True):
            for depth in range(len(draft)):
                self.on_draft(speaker, draft[: depth + 1])
            came, accepted, is_last = speaker.verify(policy, draft)
            counts.append(came)
            ended.append(is_last or rng.random() < 0.02)  # given up
            self.seen.update(drafted=len(draft), accepted=accepted, emitted=came)
            self.seen.update(f"drafted {depth} deep" for depth in range(1, len(draft) + 1))
            self.seen.update(f"accepted {depth} deep" for depth in range(1, accepted + 1))
        reported = [
            np.concatenate([getattr(one, name)[-n:] for one, n in zip(running, counts, strict=True)])
            for name in ("tokens", "probs", "edges")
        ]
        self.drafter.observe(
            SampledTokens(
                handles=handles,
                counts=np.array(counts, np.int32),
                tokens=reported[0].astype(np.int32),
                probs=reported[1].astype(np.float32),
                edges=reported[2].astype(np.float32),
                ended=np.array(ended),
            )
        )
        self.seen.update(passes=1, places=len(running))
        return ended
