"""The caller's side of a worker: a remote object, whose methods are called with a time limit.

Arguments and answers are pickled here (``seal``), not by Ray, and an exception that a method raises is
raised again at the caller.
"""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from ostinato.failure import Lost, NamedFailure


class WorkerKind(StrEnum):
    """The kinds of workers."""

    SAMPLER = "sampler"
    TRAINER = "trainer"
    GRADER = "grader"
    RANK = "rank"
    VLLM = "vllm"
    CLUSTER = "cluster"  # what all workers of a run depend on

    @classmethod
    def of(cls, name: str) -> WorkerKind:
        """The kind of a worker from its name: SAMPLER for "sampler-0"."""
        return cls(name.partition("-")[0])


class WorkerLost(Lost):
    """A worker died, stopped answering, made no progress, could not be reached, or serves what was not
    published. The message is ``name`` and ``cause``.

    ``kind``: the kind of worker. ``name``: its name, "" if ``cause`` is a whole sentence. ``final``: it
    cannot be replaced. Only a sampler is ever replaced; all other losses end the run.
    """

    def __init__(self, kind: WorkerKind, cause: str, name: str = "", final: bool = False) -> None:
        super().__init__(kind, cause, name, final)  # the same arguments, for pickle
        self.kind, self.cause, self.name, self.final = kind, cause, name, final

    def __str__(self) -> str:
        return f"{self.name} {self.cause}".strip()


def seal(value: Any) -> bytes:
    """``value`` as a pickle; plain tensors of torch on the CPU, without gradient, are pickled as arrays."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def unseal(payload: bytes) -> Any:
    """The value that was given to ``seal``; only for payloads of the same run, as a pickle can run any
    code."""
    return pickle.loads(payload)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.layout != torch.strided:
            return NotImplemented
        if value.requires_grad or value.device.type != "cpu":
            return NotImplemented
        flat = value.contiguous().reshape(-1)
        raw = flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8)  # of any stride
        return _make_tensor, (raw.numpy(), value.dtype, tuple(value.shape))


def _make_tensor(raw: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> Any:
    torch = sys.modules["torch"]  # loaded, as ``dtype`` is torch's
    return torch.from_numpy(raw).view(dtype).reshape(shape)


SLICE_S = 1.0  # between two checks of cluster and worker while waiting for an answer


class WorkerFault(NamedFailure):
    """A method of a worker raised an exception that cannot be pickled; this has its message."""


class Remote(Protocol):
    """One worker. Calls begin in the order in which they are made; the first waits until it is built."""

    name: str

    async def call(self, method: str, *arguments: Any, within_s: float, shared: bool = False) -> Any:
        """The result of ``method`` of the worker's object, or the exception that it raises. ``shared``: other
        workers will get the same arguments, so they are packed once. Raises WorkerLost if the worker died,
        stopped answering, or its object made no progress for ``within_s`` seconds; a final one if the cluster
        is lost."""
        ...

    def wait(self, method: str, *arguments: Any, within_s: float) -> Any:
        """``call`` for a thread that may block."""
        ...

    def kill(self) -> None:
        """End the worker at once; does nothing if it has already ended."""
        ...


class Patience:
    """The limits of waiting for an answer: ``within_s`` seconds without progress of the worker's object, or
    ``silence_s`` without an answer to ``query``, its heartbeat.

    Only slices in which a caller waited count: a blocked event loop does not make a worker late.
    """

    def __init__(
        self, query: Callable[[], Future[float]], name: str, what: str, within_s: float, silence_s: float
    ) -> None:
        self._query, self._name, self._failure = query, name, what
        self._within_s, self._silence_s = within_s, silence_s
        self._idle, self._silent, self._progress = 0.0, 0.0, 0.0
        self._pending_answer: Future[float] | None = (
            None  # no query in the first slice, where most answers come
        )

    def wear(self, seconds: float = SLICE_S) -> None:
        """Count a slice without an answer, and query the heartbeat; its answer, and progress of the object,
        start their limits again. Raises WorkerLost if a limit is reached."""
        self._idle, self._silent = self._idle + seconds, self._silent + seconds
        if self._pending_answer is None:
            self._pending_answer = self._query()
        elif self._pending_answer.done() and self._pending_answer.exception() is None:
            if (progress := self._pending_answer.result()) > self._progress:
                self._idle, self._progress = 0.0, progress
            self._silent, self._pending_answer = 0.0, self._query()
        for elapsed, limit in ((self._silent, self._silence_s), (self._idle, self._within_s)):
            if elapsed >= limit:
                raise WorkerLost(WorkerKind.of(self._name), f"{self._failure} in {limit:g} s", self._name)


def pack_answer(value: Any) -> bytes:
    """The payload of a method's result."""
    return seal((True, value))


def pack_refusal(error: BaseException, name: str) -> bytes:
    """The payload of an exception that a method raised, with its traceback as a note. One that cannot be
    pickled and restored becomes a WorkerFault with its message."""
    lines = "".join(traceback.format_exception(error))
    error.add_note(f"in {name}:\n{lines}")
    try:
        payload = seal((False, error.with_traceback(None)))
        unseal(payload)  # an exception whose __init__ takes more than a message only breaks here
    except Exception:
        fault = WorkerFault(f"{name} raised {type(error).__name__}: {error}")
        fault.add_note(lines)
        payload = seal((False, fault))
    return payload


def unpack_outcome(payload: bytes) -> Any:
    """The value of an answer. Raises the exception of a refusal."""
    is_answer, value = unseal(payload)
    if is_answer:
        return value
    raise value
