"""The calls of a pool, and the prompts that are suspected of breaking its workers."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ostinato.jobs import Job
from ostinato.types import Completion, Request

TRIES = 2  # of a prompt on workers that were lost, before it runs alone; lost alone again, it is to blame

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
    def prompt(self) -> str:
        """What it is named by in failures; calls of one prompt have the same."""
        return self.request.uid or f"with seed {list(self.request.seed[:-1])}"

    @property
    def said(self) -> int:
        """Tokens of its answer that it brings along."""
        return 0 if self.request.said is None else len(self.request.said.tokens)

    @property
    def may_move(self) -> bool:
        """Not while it is on its way, and not before it has got on where it is: it could move for ever."""
        return self.wanted and self.going_to is None and (not self.handed or self.generated > self.said)

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
            generated=max(self.generated, self.said),
            home=self.home,
        )

    def go_on(self, part: Completion) -> None:
        """Keep what was sampled so far for whoever gets the call next."""
        if len(part.tokens):
            self.request = replace(self.request, said=part)


def fault(call: Call, answer: Completion, versions: Collection[int]) -> str:
    """What is wrong with an answer of a worker that was sent these versions for it; "" if nothing is."""
    before, brought = call.said, call.request.said
    if brought is not None and not np.array_equal(answer.tokens[:before], brought.tokens):
        return f"did not continue what it was given of prompt {call.prompt}"
    if unknown := set(answer.versions[before:].tolist()) - set(versions):
        return (
            f"answered prompt {call.prompt} with tokens of version {min(unknown)}, "
            f"where {' or '.join(map(str, sorted(versions)))} was to be sampled from"
        )
    return ""


class Suspects:
    """Which prompts were on workers that were lost, how often, and which one is to blame."""

    def __init__(self) -> None:
        self._strikes: Counter[str] = Counter()
        self.quarantined: dict[str, str] = {}  # prompt -> what it did, in one sentence

    def blame(self, prompts: Collection[str], cause: str) -> None:
        """A worker was lost with these."""
        self._strikes.update(prompts)
        for prompt in prompts:
            if len(prompts) == 1 and self._strikes[prompt] >= TRIES:
                self.quarantined[prompt] = (
                    f"prompt {prompt} is quarantined: {self._strikes[prompt]} samplers were lost with it "
                    f"(the last one: {cause})"
                )

    @property
    def alone(self) -> set[str]:
        """Who has to run alone."""
        return {prompt for prompt, strikes in self._strikes.items() if strikes >= TRIES}

    def forget(self, prompt: str) -> None:
        """Nothing of it is on its way any more."""
        del self._strikes[prompt]


def isolated(
    waiting: Sequence[str], alone: Collection[str], held: Mapping[int, Collection[str]]
) -> tuple[dict[str, int], frozenset[int]]:
    """(worker of each suspect that may begin now, workers that nobody else may go to).

    waiting: suspects of which calls wait, the eldest first; alone: all suspects; held: prompts that each
    living worker has. A suspect goes on where it is alone, and begins where nobody is. Where all are busy,
    the least busy worker takes nobody until it is empty.
    """
    only = {worker: next(iter(prompts)) for worker, prompts in held.items() if len(set(prompts)) == 1}
    by_suspects = {worker: prompt for worker, prompt in only.items() if prompt in alone}
    places = {prompt: worker for worker, prompt in by_suspects.items() if prompt in waiting}
    idle = [worker for worker, prompts in held.items() if not prompts]
    for suspect in waiting:
        if suspect not in places and idle:
            places[suspect] = idle.pop(0)
    closed = {*by_suspects, *places.values()}
    if len(places) < len(waiting) and not closed:
        closed.add(min(held, key=lambda worker: len(held[worker])))
    return places, frozenset(closed)


__all__ = ["Call", "Results", "Suspects", "fault", "isolated"]
