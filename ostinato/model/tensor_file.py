"""Safetensors as one stretch of memory: laid out without copies, read as views, aligned for the kernels.

The format is that of the safetensors library (8 bytes of length, JSON, tensors without gaps), which the
tests hold this against. The library copies every tensor two or three times on the way into bytes, and puts
the first one at whatever address the header ends: here a header is padded, and tensors whose bytes fill
whole cache lines come first, so that a file that is mapped can be computed with where it lies.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ostinato.inputs import parse_json

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Shaped(NamedTuple):
    """A tensor that is to be written: all but its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where everything goes: the header, then tensors without gaps, by their first byte in the file."""

    header: bytes
    starts: Mapping[str, int]  # in the order of the file
    tensors: Mapping[str, Shaped]
    size: int  # bytes

    def views(self, buffer: Any) -> dict[str, Tensor]:
        """The tensors in ``buffer``, which they keep alive."""
        return {name: _view(buffer, self.tensors[name], start) for name, start in self.starts.items()}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shaped]:
    return {name: Shaped(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def layout(tensors: Mapping[str, Shaped], metadata: Mapping[str, str]) -> Layout:
    """The same for the same content. Raises ValueError for a dtype other than fp32, bf16, fp16 and int8."""
    for name, (dtype, _) in tensors.items():
        if dtype not in _NAMES:
            raise ValueError(f"tensor {name} is {dtype}; weights are sent in {', '.join(_NAMES.values())}")
    ordered = sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT != 0, name))
    ends = np.cumsum([0, *(tensors[name].nbytes for name in ordered)]).tolist()
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, start, end in zip(ordered, ends[:-1], ends[1:], strict=True):
        dtype, shape = tensors[name]
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    starts = {name: len(header) + start for name, start in zip(ordered, ends[:-1], strict=True)}
    return Layout(header=header, starts=starts, tensors=dict(tensors), size=len(header) + ends[-1])


def read(buffer: Any) -> tuple[dict[str, str], dict[str, Tensor]]:
    """(metadata, tensors) of a file in memory; the tensors are views, which keep ``buffer`` alive.

    Raises ValueError, in words, for what is cut off or not such a file.
    """
    data = memoryview(buffer)
    try:
        (length,) = struct.unpack_from("<Q", data)
        entries = parse_json(bytes(data[8 : 8 + length]))
        metadata = entries.pop("__metadata__", {})
        tensors = {name: _entry(buffer, entry, 8 + length, len(data)) for name, entry in entries.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the file is cut off or not in the safetensors format ({error})") from error
    return metadata, tensors


def _entry(buffer: Any, entry: Mapping[str, Any], start: int, size: int) -> Tensor:
    expected = Shaped(_DTYPES[entry["dtype"]], tuple(entry["shape"]))
    first, end = entry["data_offsets"]
    if first < 0 or end - first != expected.nbytes or start + end > size:
        raise ValueError(f"a tensor of {expected.nbytes} bytes from {first} to {end} of {size - start}")
    return _view(buffer, expected, start + first)


def _view(buffer: Any, expected: Shaped, start: int) -> Tensor:
    if not expected.nbytes:
        return torch.empty(expected.shape, dtype=expected.dtype)
    count = expected.nbytes // expected.dtype.itemsize
    return torch.frombuffer(buffer, dtype=expected.dtype, count=count, offset=start).view(expected.shape)


def raw(tensor: Tensor) -> memoryview:
    """Its bytes, not copied if it lies on the CPU without strides."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def joined(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The parts of the file in order, not copied: for ``b"".join`` or one write after another."""
    plan = layout(shapes_of(tensors), metadata)
    yield plan.header
    for name in plan.starts:
        yield raw(tensors[name])
