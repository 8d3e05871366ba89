"""What a worker is to its caller: an object elsewhere, whose methods are called with a bound in time.

Arguments and answers travel as pickles of our own making, not as Ray's: arrays arrive writable and belong to
who reads them, and what a method raises is raised at the caller as itself.
"""

from __future__ import annotations

import io
import pickle
import sys
import traceback
from typing import Any, Protocol


class WorkerGone(RuntimeError):
    """A worker died, or did not answer in time. It is not asked again; another may take its place."""


class WorkerFault(RuntimeError):
    """A method of a worker raised what cannot travel; its words are here."""


class ClusterLost(RuntimeError):
    """The cluster itself is gone: no worker can be started any more."""


class Remote(Protocol):
    """One worker. Calls begin in the order in which they are made; the first waits until it is built."""

    name: str

    async def call(self, method: str, *arguments: Any, within_s: float, shared: bool = False) -> Any:
        """What ``method`` of the worker's object returns, or raises. ``shared``: other workers are about to
        get the same arguments, so they are packed once. Raises WorkerGone, ClusterLost."""
        ...

    def wait(self, method: str, *arguments: Any, within_s: float) -> Any:
        """``call`` for a thread that may block. The worker has to give signs of life meanwhile."""
        ...

    def kill(self) -> None:
        """End it, at once; nothing is said when it is gone already."""
        ...


def sealed(value: Any) -> bytes:
    """A pickle; tensors go as their bytes, several times faster than as torch has them pickled."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")  # not imported for it: where it is not, there is no tensor
        if torch is None or type(value) is not torch.Tensor:
            return NotImplemented
        if value.device.type != "cpu" or value.layout != torch.strided or value.requires_grad:
            return NotImplemented
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor, (raw, value.dtype, tuple(value.shape))


def _tensor(raw: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    return (
        sys.modules["torch"].from_numpy(raw).view(dtype).reshape(shape)
    )  # its dtype has brought torch along


def opened(payload: bytes) -> Any:
    return pickle.loads(payload)


def answer(value: Any) -> bytes:
    """What a worker sends back when a method has returned."""
    return sealed((True, value))


def refusal(error: BaseException, name: str) -> bytes:
    """What a worker sends back when a method has raised: the exception, with where it came from as a note."""
    lines = "".join(traceback.format_exception(error))
    error.add_note(f"in {name}:\n{lines}")
    try:
        payload = sealed((False, error.with_traceback(None)))
        opened(payload)  # an exception whose __init__ wants more than a message only breaks here
    except Exception:
        told = WorkerFault(f"{name} raised {type(error).__name__}: {error}")
        told.add_note(lines)
        payload = sealed((False, told))
    return payload


def outcome(payload: bytes) -> Any:
    """At the caller: the value, or the exception raised."""
    fine, value = opened(payload)
    if fine:
        return value
    raise value


__all__ = [
    "ClusterLost",
    "Remote",
    "WorkerFault",
    "WorkerGone",
    "answer",
    "opened",
    "outcome",
    "refusal",
    "sealed",
]
