"""``protocols.Trainer`` over a worker that may die: it is replaced and restored, and its batch is repeated.

    link                                   worker
    step(batch) ------ batch ------------> PolicyTrainer.step
         report, adapters, snapshot <------

The link keeps the newest snapshot (parameters, moments, counters). A step is a function of it and of the
batch, so a new worker computes, bit for bit, what the lost one would have computed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ostinato.observe.timeline import Kind, Span
from ostinato.protocols import RestorableTrainer
from ostinato.types import Batch, StepReport
from ostinato.workers.lost import Restarts, WorkerLost
from ostinato.workers.remote import Remote

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The whole state of a trainer, apart from what its recipe sets."""

    tensors: Mapping[str, Any]
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stepped:
    """What a worker sends back for a batch."""

    report: StepReport
    adapters: Any
    snapshot: Snapshot
    span: Span


class TrainerServer:
    """The worker's side."""

    def __init__(self, trainer: RestorableTrainer, name: str = "trainer") -> None:
        self._trainer, self._name = trainer, name

    @property
    def progress(self) -> float:
        """Read by the event loop of the worker while a thread computes."""
        return self._trainer.progress

    def step(self, batch: Batch) -> Stepped:
        start = time.time()
        report = self._trainer.step(batch)
        span = Span(
            worker=self._name, kind=Kind.TRAIN, start=start, stop=time.time(), amount=batch.num_tokens
        )
        return Stepped(report=report, adapters=self._trainer.adapters(), snapshot=self.snapshot(), span=span)

    def snapshot(self) -> Snapshot:
        return Snapshot(tensors=dict(self._trainer.tensors()), counters=self._trainer.counters())

    def score(self, batch: Batch) -> Sequence[Any]:
        return self._trainer.score(batch)

    def adapters(self) -> Any:
        return self._trainer.adapters()

    def restore(self, snapshot: Snapshot) -> None:
        self._trainer.restore(snapshot.tensors, snapshot.counters)

    def identity(self) -> dict[str, str]:
        return self._trainer.identity()


class TrainerLink:
    """A ``train.PolicyTrainer`` in a worker made by ``spawn``.

    ``within_s`` limits one call, counted from its last progress. After ``max_restarts`` losses with no step
    in between it raises WorkerLost with the last cause. What the trainer itself raises (Misaligned,
    TrainingStopped ...) is raised here unchanged, and does not count as a loss.
    """

    def __init__(self, spawn: Callable[[], Remote], *, within_s: float, max_restarts: int = 5) -> None:
        self.losses: Counter[str] = Counter()
        self._spawn, self._within_s = spawn, within_s
        self._restarts = Restarts(most=max_restarts)
        self._spans: list[Span] = []
        self._since_when, self._cause = time.time(), ""
        self._worker: Remote | None = None
        self._waits = False
        self._snapshot: Snapshot | None = None
        self._identity: dict[str, str] = self._call("identity")
        self._snapshot = self._call("snapshot")
        self._adapters: Any = self._call("adapters")

    def step(self, batch: Batch) -> StepReport:
        stepped: Stepped = self._call("step", batch)
        self._restarts.worked()
        self._adapters, self._snapshot = stepped.adapters, stepped.snapshot
        self._spans.append(stepped.span)
        return stepped.report

    def score(self, batch: Batch) -> Sequence[Any]:
        return self._call("score", batch)

    @property
    def progress(self) -> float:
        """Grows while waiting for a worker: each such wait is bounded and ends with a named error."""
        return time.monotonic() if self._waits else 0.0

    def adapters(self) -> Any:
        """The adapters after the last step; a copy, like all that the worker sends."""
        return self._adapters

    def tensors(self) -> Mapping[str, Any]:
        assert self._snapshot is not None
        return self._snapshot.tensors

    def counters(self) -> Mapping[str, int]:
        assert self._snapshot is not None
        return self._snapshot.counters

    def identity(self) -> dict[str, str]:
        return self._identity

    def restore(self, tensors: Mapping[str, Any], counters: Mapping[str, int]) -> None:
        snapshot = Snapshot(tensors=dict(tensors), counters=dict(counters))
        self._call("restore", snapshot)
        self._snapshot = snapshot
        self._adapters = self._call("adapters")

    def _call(self, method: str, *arguments: Any) -> Any:
        """The worker's answer, or that of a new worker if this one is lost."""
        self._waits = True
        try:
            while True:
                try:
                    return self._standing().wait(method, *arguments, within_s=self._within_s)
                except WorkerLost as lost:
                    self._lose(lost)
        finally:
            self._waits = False

    def _standing(self) -> Remote:
        """The worker; a new one is first restored to the newest snapshot."""
        if self._worker is not None:
            return self._worker
        worker = self._spawn()
        try:
            if self._snapshot is not None:
                worker.wait("restore", self._snapshot, within_s=self._within_s)
        except BaseException:
            worker.kill()  # it may be only partly restored
            raise
        self._worker = worker
        return worker

    def _lose(self, cause: WorkerLost) -> None:
        if self._worker is not None:
            self._worker.kill()
        self._worker = None
        self._since_when, self._cause = time.time(), str(cause)
        self.losses["workers/restarts"] += 1
        self._restarts.lose(cause, "a step", "the memory of its host")

    def take_spans(self) -> Sequence[Span]:
        spans, self._spans = self._spans, []
        return spans

    def status(self) -> list[dict[str, Any]]:
        """One row in the format of ``EnginePool.status``."""
        state = "starting" if self._worker is None else "serving"
        row = {"worker": "trainer", "state": state, "since": self._since_when, "cause": self._cause}
        return [row]

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()
