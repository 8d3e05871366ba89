"""The seams of Ostinato: Protocols of one to three methods.

Concrete classes meet only in ``cli`` and ``recipes``; everything between sees these.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ostinato.observe.timeline import Span
from ostinato.types import (
    Batch,
    Completion,
    DraftQuery,
    Drafts,
    Group,
    PollResult,
    Prompt,
    Publication,
    Request,
    Reward,
    SampledTokens,
    StepReport,
)


class Engine(Protocol):
    """Draws completions from the current policy."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[tuple[int, Completion]]:
        """Yield (index of the request, completion) as they finish. Concurrent calls share one batch."""
        ...

    def publish(self, adapters: Any, version: int) -> None:
        """Serve ``adapters`` (a ``model.lora.Adapters``, or None for the base) as policy ``version``."""
        ...


class Sampler(Protocol):
    """A worker that samples, in this process or another. It gets calls in the order in which they are made.

    Whatever it raises, and a wait longer than was agreed, means that the worker is lost.
    """

    async def start(self, calls: Sequence[tuple[int, Request]], drop: Sequence[int] = ()) -> None:
        """Begin ``calls``, each under the caller's id, and stop those in ``drop``, which return what they
        have."""
        ...

    async def collect(self, wait_s: float) -> PollResult:
        """The report since the last call; returned at once if an answer has ended, else within ``wait_s``."""
        ...

    async def publish(self, publication: Publication) -> str:
        """Serve the publication from the next pass on, also in running calls; returns the fingerprint
        served."""
        ...

    async def close(self) -> None:
        """Release its resources as far as possible; the worker is given up in any case."""
        ...


class Timed(Protocol):
    """Something whose time is drawn in the timeline."""

    def take_spans(self) -> Sequence[Span]:
        """The spans of work since the last query, in order."""
        ...


class Drafter(Protocol):
    """Guesses the next tokens of running sequences. Tokens never depend on it, only the time they take."""

    def open(self, request: Request) -> int:
        """Begin a sequence; returns the handle under which it is continued."""
        ...

    def propose(self, running: DraftQuery) -> Drafts:
        """The draft tokens that are worth their time in the coming pass; often none."""
        ...

    def observe(self, emitted: SampledTokens) -> None:
        """Take the result of a pass, drafted or not."""
        ...


class Env(Protocol):
    """One episode, used once and then discarded. Tokens in, tokens out.

    Where it has them, ``async open()`` is called before it and ``close()``, which may be a coroutine, after
    it."""

    def start(self) -> Any:
        """The context of turn 0 ([P] int32 token ids)."""
        ...

    async def step(self, completion: Completion) -> Any:
        """The next context ([C] int32 token ids) or None when the episode is over."""
        ...


class Tasks(Protocol):
    """An endless, addressed source of prompts: the same (epoch, index) is the same prompt."""

    def prompt(self, index: int) -> Prompt:
        """The prompt at ``index`` of the stream (shuffled by seed, repeating by epochs)."""
        ...

    def __len__(self) -> int:
        """Number of prompts."""
        ...

    @property
    def epoch(self) -> int:
        """Twice so many places in a row contain every prompt."""
        ...


class Grader(Protocol):
    """Judges siblings together, so pairwise and judge rewards are the ordinary case."""

    async def grade(self, group: Group) -> list[Reward]: ...


class Trainer(Protocol):
    """Batch in, new policy out. Blind to the algorithm that wrote the advantages."""

    def step(self, batch: Batch) -> StepReport: ...

    def adapters(self) -> Any: ...


class RestorableTrainer(Trainer, Protocol):
    """A trainer whose state can be saved, and put back by another one of the same recipe."""

    def score(self, batch: Batch) -> Sequence[Any]:
        """[R] log-probabilities of the targets of each microbatch, without learning from them."""
        ...

    def tensors(self) -> Mapping[str, Any]: ...

    def counters(self) -> Mapping[str, int]: ...

    def restore(self, tensors: Mapping[str, Any], counters: Mapping[str, int]) -> None: ...

    def identity(self) -> dict[str, str]: ...

    @property
    def progress(self) -> float:
        """Grows while a step gets on."""
        ...


class MetricWriter(Protocol):
    """One row of metrics per step; JSONL always, others optional."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...


def one_second(batch: int, attended: float) -> float:
    """A pass of unknown duration."""
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One answer that is to be sampled, or is being sampled."""

    id: int
    step: int  # the round that it belongs to
    place: int  # of its prompt in the stream: siblings share step and place
    predicted: float = math.inf  # tokens of the whole answer; inf: unknown
    prompt: int = 0  # tokens of context
    generated: int = 0  # tokens that it has
    home: int | None = None  # the worker that has its beginning in its cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A living sampler and what it has to do."""

    id: int
    slots: int  # sequences that it decodes together
    jobs: tuple[Job, ...] = ()  # all that it has, running or queued there
    pass_s: Callable[[int, float], float] = one_second  # (batch, positions attended in all) -> seconds


Starts = tuple[tuple[int, int], ...]  # (job, worker) in the order to start; the others wait centrally
Placement = Callable[[Sequence[Job], Sequence[Worker]], Starts]
"""(jobs that wait, living workers) -> starts. Pure; called whenever jobs have come or ended, or workers
have."""
