"""A ``protocols.Trainer`` in a worker.

    link                                   worker
    step(batch) ------ batch ------------> PolicyTrainer.step
         report, adapters, snapshot <------

The link keeps the newest snapshot (parameters, moments, counters): a run that loses its trainer saves the
last step, and ends by WorkerLost. Resumed, it computes, bit for bit, what the lost one would have computed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ostinato.observe.timeline import Kind, Span
from ostinato.protocols import RestorableTrainer
from ostinato.types import Batch, StepReport
from ostinato.workers.remote import Remote


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The whole state of a trainer, apart from what its recipe sets."""

    tensors: Mapping[str, Any]
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stepped:
    """The reply of a worker to a batch."""

    report: StepReport
    adapters: Any
    snapshot: Snapshot
    span: Span


class TrainerServer:
    """The worker's side of ``TrainerLink``: the calls that it serves."""

    def __init__(self, trainer: RestorableTrainer, name: str = "trainer") -> None:
        self._trainer, self._name = trainer, name

    @property
    def progress(self) -> float:
        """Progress of the trainer, read by the event loop of the worker while a thread computes."""
        return self._trainer.progress

    def step(self, batch: Batch) -> Stepped:
        """Train on ``batch``. Returns the report with the adapters and the state after the step, and its
        time."""
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
    """A ``train.PolicyTrainer`` in ``worker``. ``within_s`` limits a call, counted from its last progress.

    Every call to the worker raises WorkerLost if it is lost, and the errors of the trainer (Misaligned,
    TrainingStopped ...) unchanged. State, adapters and identity are those that were received last.
    """

    def __init__(self, worker: Remote, *, within_s: float) -> None:
        self._worker, self._within_s, self._is_waiting = worker, within_s, False
        self._spans: list[Span] = []
        self._started_at = time.time()
        self._identity: dict[str, str] = self._call("identity")
        self._snapshot: Snapshot = self._call("snapshot")
        self._adapters: Any = self._call("adapters")

    def step(self, batch: Batch) -> StepReport:
        stepped: Stepped = self._call("step", batch)
        self._adapters, self._snapshot = stepped.adapters, stepped.snapshot
        self._spans.append(stepped.span)
        return stepped.report

    def score(self, batch: Batch) -> Sequence[Any]:
        return self._call("score", batch)

    @property
    def progress(self) -> float:
        """A number that grows during each wait for the worker, since such a wait is bounded; 0 otherwise."""
        return time.monotonic() if self._is_waiting else 0.0

    def adapters(self) -> Any:
        """The adapters after the last step; a copy, like all that the worker sends."""
        return self._adapters

    def tensors(self) -> Mapping[str, Any]:
        return self._snapshot.tensors

    def counters(self) -> Mapping[str, int]:
        return self._snapshot.counters

    def identity(self) -> dict[str, str]:
        return self._identity

    def restore(self, tensors: Mapping[str, Any], counters: Mapping[str, int]) -> None:
        snapshot = Snapshot(tensors=dict(tensors), counters=dict(counters))
        self._call("restore", snapshot)
        self._snapshot, self._adapters = snapshot, self._call("adapters")

    def _call(self, method: str, *arguments: Any) -> Any:
        """The result of a method of ``TrainerServer`` in the worker. Raises WorkerLost, and what it
        raises."""
        self._is_waiting = True
        try:
            return self._worker.wait(method, *arguments, within_s=self._within_s)
        finally:
            self._is_waiting = False

    def take_spans(self) -> Sequence[Span]:
        spans, self._spans = self._spans, []
        return spans

    def status(self) -> list[dict[str, Any]]:
        """One row in the format of ``EnginePool.status``."""
        return [{"worker": "trainer", "state": "serving", "since": self._started_at, "cause": ""}]

    def close(self) -> None:
        self._worker.kill()
