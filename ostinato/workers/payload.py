"""Values as bytes between our own processes: pickles in which arrays and tensors are plain bytes.

    sealed, opened      one string of bytes; arrays arrive writable and belong to the reader
    packed, unpacked    a pickle and, beside it, the bytes of arrays and tensors: for a broadcast in place

Tensors go several times faster than as torch has them pickled; ``packed`` ones without device and gradient.
Torch is not imported here: where it is not, there is no tensor.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNED = 64  # bytes


def sealed(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def opened(payload: bytes) -> Any:
    """What was ``sealed`` by a process of the same run: a pickle can do anything."""
    return pickle.loads(payload)


def packed(value: Any) -> tuple[np.ndarray, list[int]]:
    """([bytes] uint8, size of each part): a pickle and the arrays and tensors beside it, each aligned."""
    beside: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=5, buffer_callback=beside.append)
    pickler.detaches = True
    pickler.dump(value)
    parts = [stream.getbuffer(), *(buffer.raw() for buffer in beside)]
    sizes = [part.nbytes for part in parts]
    payload = room(sizes)
    for part, (start, stop) in zip(parts, _places(sizes), strict=True):
        payload[start:stop] = np.frombuffer(part, np.uint8)
    return payload, sizes


def unpacked(payload: np.ndarray, sizes: Sequence[int]) -> Any:
    """What was ``packed``; arrays and tensors are views of ``payload``, and writable."""
    head, *beside = (payload[start:stop].data for start, stop in _places(sizes))
    return pickle.loads(head, buffers=beside)


def head(payload: np.ndarray, sizes: Sequence[int]) -> bytes:
    """The pickle of what was ``packed``, without what lies beside it."""
    return payload[: sizes[0]].tobytes() if sizes else b""


def room(sizes: Sequence[int]) -> np.ndarray:
    """[bytes] uint8, for parts of these sizes."""
    return np.empty(_places(sizes)[-1][1] if sizes else 0, np.uint8)


def _places(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of each part."""
    places, start = [], 0
    for size in sizes:
        places.append((start, start + size))
        start += -(-size // ALIGNED) * ALIGNED
    return places


class _Pickler(pickle.Pickler):
    detaches = False  # tensors from their device and gradient

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.layout != torch.strided:
            return NotImplemented
        if not self.detaches and (value.requires_grad or value.device.type != "cpu"):
            return NotImplemented
        flat = value.detach().cpu().contiguous().reshape(-1)
        raw = flat.view(torch.uint8) if len(flat) else torch.empty(0, dtype=torch.uint8)  # of any stride
        return _tensor, (raw.numpy(), value.dtype, tuple(value.shape))


def _tensor(raw: np.ndarray, dtype: Any, shape: tuple[int, ...]) -> Any:
    torch = sys.modules["torch"]  # which ``dtype`` has brought along
    return torch.from_numpy(raw).view(dtype).reshape(shape)


__all__ = ["ALIGNED", "head", "opened", "packed", "room", "sealed", "unpacked"]
