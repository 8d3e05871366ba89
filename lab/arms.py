"""Drafters side by side: one engine without drafts, one whose drafter is exchanged between rollouts.

All drafting arms share an engine, so its KV pool and its measured cost table are the same for each of them;
what the engine learns of a drafter (whether it pays) is each arm's own.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lab.epochs import Model, answers_of
from lab.settings import Clock
from ostinato.engine.local import LocalEngine
from ostinato.engine.speculation import Speculation
from ostinato.model.lora import Adapters
from ostinato.protocols import Drafter
from ostinato.types import Completion, DraftQuery, Drafts, Request, SampledTokens

ORACLE_DEPTH = 32


@dataclass(slots=True)
class Holder:
    """A drafter with a clock: ``seconds`` is what its calls took."""

    drafter: Drafter
    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.0

    def open(self, request: Request) -> int:
        start = self.clock()
        handle = self.drafter.open(request)
        self.seconds += self.clock() - start
        return handle

    def propose(self, running: DraftQuery) -> Drafts:
        start = self.clock()
        drafts = self.drafter.propose(running)
        self.seconds += self.clock() - start
        return drafts

    def observe(self, emitted: SampledTokens) -> None:
        start = self.clock()
        self.drafter.observe(emitted)
        self.seconds += self.clock() - start


@dataclass(slots=True)
class Nothing:
    """Never drafts: what is held while no arm drafts."""

    def open(self, request: Request) -> int:
        return 0

    def propose(self, running: DraftQuery) -> Drafts:
        none = np.zeros(0, np.int32)
        return Drafts(counts=np.zeros(len(running.handles), np.int32), tokens=none)

    def observe(self, emitted: SampledTokens) -> None:
        pass


@dataclass(slots=True)
class Oracle:
    """Drafts what will really be sampled, equally deep for all, as deep as pays by the engine's cost
    table: what is left is the price of the passes. ``truth`` is the answer by seed of the request."""

    truth: Mapping[tuple[int, ...], np.ndarray]
    _answers: dict[int, np.ndarray] = field(default_factory=dict)
    _sampled: dict[int, int] = field(default_factory=dict)

    def open(self, request: Request) -> int:
        handle = len(self._answers)
        self._answers[handle], self._sampled[handle] = self.truth[tuple(request.seed)], 0
        return handle

    def propose(self, running: DraftQuery) -> Drafts:
        handles = running.handles.tolist()
        left = np.array([len(self._answers[h]) - self._sampled[h] - 1 for h in handles])
        counts = best_depth(np.minimum(left, running.room), running.seconds)
        parts = [
            self._answers[h][self._sampled[h] :][:n] for h, n in zip(handles, counts.tolist(), strict=True)
        ]
        return Drafts(
            counts=counts.astype(np.int32),
            tokens=np.concatenate([*parts, np.zeros(0, np.int32)]).astype(np.int32),
        )

    def observe(self, emitted: SampledTokens) -> None:
        for handle, count in zip(emitted.handles.tolist(), emitted.counts.tolist(), strict=True):
            self._sampled[handle] += count


def best_depth(left: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Draft tokens of each sequence [S] at the common depth that gives most tokens per second when all are
    accepted; ``left`` [S] are most that each may have, ``seconds`` [N + 1] the pass with n of them."""
    left = np.maximum(left, 0)
    depths = np.minimum(left[None, :], np.arange(ORACLE_DEPTH + 1)[:, None])
    totals = depths.sum(1)
    fits = totals < len(seconds)
    speeds = (len(left) + totals[fits]) / seconds[totals[fits]]
    return depths[: len(speeds)][int(np.argmax(speeds))]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rollout:
    """One timed rollout, from the first request submitted to the last completion."""

    seconds: float
    drafting_s: float  # of them, inside the drafter
    answers: tuple[Completion, ...]

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def passes(self) -> int:
        """(sequence, pass) pairs that gave a token."""
        return sum(answer.passes for answer in self.answers)

    @property
    def drafted(self) -> int:
        return sum(answer.drafted for answer in self.answers)

    @property
    def accepted(self) -> int:
        return sum(answer.accepted for answer in self.answers)


def nothing_known(request: Request) -> float:
    """How long the answer will be: 0 where it is unknown."""
    return 0.0


class Pair:
    """The two engines on one model: ``plain`` without a drafter, ``drafting`` with the one that is given,
    which may come with a forecast of answer lengths."""

    def __init__(
        self,
        model: Model,
        *,
        kv_memory_mb: int,
        max_batch: int,
        context_limit: int,
        clock: Clock = Clock.WALL,
    ) -> None:
        self._clock, self._expect = clock.read, nothing_known
        self._known: dict[
            int, tuple[Holder, Speculation]
        ] = {}  # by id of the drafter, which the holder keeps

        def engine(drafter: Drafter | None) -> LocalEngine:
            return LocalEngine(
                model.decoder,
                kernels=model.kernels,
                kv_memory_mb=kv_memory_mb,
                max_batch=max_batch,
                context_limit=context_limit,
                drafter=drafter,
                expect=None if drafter is None else lambda request: self._expect(request),
            )

        self.plain, self.drafting = engine(None), engine(Nothing())

    def _held(self, drafter: Drafter) -> tuple[Holder, Speculation]:
        if id(drafter) not in self._known:
            holder = Holder(drafter, clock=self._clock)
            self._known[id(drafter)] = holder, self.drafting.speculate(holder)
        return self._known[id(drafter)]

    def rollout(
        self,
        drafter: Drafter | None,
        requests: Sequence[Request],
        adapters: Adapters | None = None,
        expect: Callable[[Request], float] = nothing_known,
    ) -> Rollout:
        """Ask for all of ``requests`` at once, of the policy ``adapters``; drafter None is the plain engine.

        Publishing, before the clock starts, empties the prefix tree: no arm finds what another has computed.
        """
        engine, holder = self.plain, None
        if drafter is not None:
            engine = self.drafting
            holder, engine.speculation = self._held(drafter)
            holder.seconds = 0.0
        self._expect = expect
        engine.publish(adapters, engine.version + 1)
        gc.collect()  # the waste of one arm is not another's
        start = self._clock()
        answers = asyncio.run(answers_of(engine, requests))
        seconds = self._clock() - start
        return Rollout(seconds=seconds, drafting_s=holder.seconds if holder else 0.0, answers=answers)

    def warm_up(self, requests: Sequence[Request]) -> None:
        """Let both engines run once, so that no arm pays for what happens only once."""
        for drafter in (None, Nothing()):
            self.rollout(drafter, requests)
