"""The calls of a pool, and what is wrong with an answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from ostinato.jobs import Job
from ostinato.types import Completion, Request
from ostinato.workers.suspects import Key, name

Results = asyncio.Queue[tuple[int, Completion] | BaseException]


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A request on its way; ids grow in the order in which they were asked."""

    id: int
    index: int  # of the request in its ``generate``
    request: Request
    results: Results
    expected: float  # tokens; 0: unknown
    home: int | None = None  # the worker that has it, or had what comes before it
    after: int = 0  # the number of the publication that its worker had been sent before it
    handed: bool = False  # its worker has heard of it
    generated: int = 0  # tokens, as its worker told last
    going_to: int | None = None  # the worker that is to go on with it, while it is given up where it is
    wanted: bool = True  # somebody waits for it

    @property
    def key(self) -> Key:
        """Calls of one prompt in one round have the same."""
        return self.request.uid, self.request.seed[:-1]

    @property
    def prompt(self) -> str:
        """What it is named by in failures."""
        return name(self.key)

    @property
    def partial_len(self) -> int:
        """Tokens of its answer that it brings along."""
        return 0 if self.request.partial is None else len(self.request.partial.tokens)

    @property
    def may_move(self) -> bool:
        """Not while it is on its way, and not before it has got on where it is: it could move for ever."""
        return (
            self.wanted and self.going_to is None and (not self.handed or self.generated > self.partial_len)
        )

    def job(self) -> Job:
        """As placements see it. A seed path is (run, round, ..., place in the stream, sample); where it is
        shorter, nobody is its sibling."""
        seed = self.request.seed
        step, place = (seed[1], seed[-2]) if len(seed) > 3 else (0, self.id)
        return Job(
            id=self.id,
            step=step,
            place=place,
            predicted=self.expected or math.inf,
            prompt=len(self.request.tokens),
            generated=max(self.generated, self.partial_len),
            home=self.home,
        )

    def go_on(self, part: Completion) -> None:
        """Keep what was sampled so far for whoever gets the call next."""
        if len(part.tokens):
            self.request = replace(self.request, partial=part)


def fault(call: Call, answer: Completion, versions: Collection[int]) -> str:
    """What is wrong with an answer of a worker that was sent these versions for it; "" if nothing is."""
    before, brought = call.partial_len, call.request.partial
    if brought is not None and not np.array_equal(answer.tokens[:before], brought.tokens):
        return f"did not continue what it was given of prompt {call.prompt}"
    if unknown := set(answer.versions[before:].tolist()) - set(versions):
        return (
            f"answered prompt {call.prompt} with tokens of version {min(unknown)}, "
            f"where {' or '.join(map(str, sorted(versions)))} was to be sampled from"
        )
    return ""


__all__ = ["Call", "Results", "fault"]
