"""Safetensors in one block of memory: written without copies, read as views, aligned for the kernels.

The format is that of the safetensors library (8 bytes of length, JSON, tensors without gaps), against which
the tests compare this module. The library copies every tensor two or three times on the way into bytes, and
places the first tensor at whatever address the header ends. Here a header is padded, and tensors whose bytes
fill whole cache lines come first, so that kernels can compute directly on a mapped file.
"""

from __future__ import annotations

import json
import math
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


class TensorShape(NamedTuple):
    """Dtype and shape of a tensor that is to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of a file: the header, then tensors without gaps, located by their first byte."""

    header: bytes
    starts: Mapping[str, int]  # in the order of the file
    tensors: Mapping[str, TensorShape]
    size: int  # bytes

    def views(self, buffer: Any) -> dict[str, Tensor]:
        """The tensors in ``buffer``, which they keep alive."""
        return {name: _view(buffer, self.tensors[name], start) for name, start in self.starts.items()}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorShape]:
    return {name: TensorShape(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def layout(tensors: Mapping[str, TensorShape], metadata: Mapping[str, str]) -> Layout:
    """Compute the layout, the same for the same content. Raises ValueError for a dtype other than fp32, bf16,
    fp16 and int8."""
    for name, (dtype, _) in tensors.items():
        if dtype not in _NAMES:
            raise ValueError(f"tensor {name} is {dtype}; weights are sent in {', '.join(_NAMES.values())}")
    names = sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT != 0, name))
    ends = np.cumsum([0, *(tensors[name].nbytes for name in names)]).tolist()
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, start, end in zip(names, ends[:-1], ends[1:], strict=True):
        dtype, shape = tensors[name]
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    starts = {name: len(header) + start for name, start in zip(names, ends[:-1], strict=True)}
    return Layout(header=header, starts=starts, tensors=dict(tensors), size=len(header) + ends[-1])


def read(buffer: Any) -> tuple[dict[str, str], dict[str, Tensor]]:
    """(metadata, tensors) of a file in memory; the tensors are views, which keep ``buffer`` alive.

    Raises ValueError for a file that is cut off or not in this format.
    """
    data = memoryview(buffer)
    try:
        (length,) = struct.unpack_from("<Q", data)
        entries = parse_json(bytes(data[8 : 8 + length]))
        metadata = entries.pop("__metadata__", {})
        tensors = {name: _view_entry(buffer, entry, 8 + length, len(data)) for name, entry in entries.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the file is cut off or not in the safetensors format ({error})") from error
    return metadata, tensors


def _view_entry(buffer: Any, entry: Mapping[str, Any], start: int, size: int) -> Tensor:
    tensor = TensorShape(_DTYPES[entry["dtype"]], tuple(entry["shape"]))
    begin, end = entry["data_offsets"]
    if begin < 0 or end - begin != tensor.nbytes or start + end > size:
        raise ValueError(f"a tensor of {tensor.nbytes} bytes from {begin} to {end} of {size - start}")
    return _view(buffer, tensor, start + begin)


def _view(buffer: Any, tensor: TensorShape, start: int) -> Tensor:
    if not tensor.nbytes:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    count = tensor.nbytes // tensor.dtype.itemsize
    return torch.frombuffer(buffer, dtype=tensor.dtype, count=count, offset=start).view(tensor.shape)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, not copied if it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def file_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The parts of the file in order, not copied: for ``b"".join`` or successive writes."""
    plan = layout(shapes_of(tensors), metadata)
    yield plan.header
    for name in plan.starts:
        yield raw_bytes(tensors[name])
