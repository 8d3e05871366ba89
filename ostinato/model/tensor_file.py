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
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8"}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


class TensorShape(NamedTuple):
    """Dtype and shape of a tensor that is to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of a file: the header, and the first byte of each of the tensors, which follow without
    gaps."""

    header: bytes
    starts: Mapping[str, int]  # in the order of the file
    tensors: Mapping[str, TensorShape]
    num_bytes: int  # of the whole file

    def view_tensors(self, buffer: Any) -> dict[str, Tensor]:
        """Return the tensors of the file in ``buffer``, which they keep alive."""
        return {name: _view(buffer, self.tensors[name], start) for name, start in self.starts.items()}


def list_shapes(tensors: Mapping[str, Tensor]) -> dict[str, TensorShape]:
    return {name: TensorShape(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def plan_layout(tensors: Mapping[str, TensorShape], metadata: Mapping[str, str]) -> Layout:
    """Compute the layout. Equal arguments give the same bytes. Raises ValueError for a dtype other than fp32,
    bf16, fp16 and int8."""
    for name, (dtype, _) in tensors.items():
        if dtype not in _DTYPE_NAMES:
            raise ValueError(
                f"tensor {name} is {dtype}; weights are sent in {', '.join(_DTYPE_NAMES.values())}"
            )
    # those that fill whole cache lines come first
    names = sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT != 0, name))
    ends = np.cumsum([0, *(tensors[name].nbytes for name in names)]).tolist()
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, start, end in zip(names, ends[:-1], ends[1:], strict=True):
        dtype, shape = tensors[name]
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    header_json = json.dumps(entries, separators=(",", ":")).encode()
    header_json += b" " * (-(8 + len(header_json)) % ALIGNMENT)
    header = struct.pack("<Q", len(header_json)) + header_json
    starts = {name: len(header) + start for name, start in zip(names, ends[:-1], strict=True)}
    return Layout(header=header, starts=starts, tensors=dict(tensors), num_bytes=len(header) + ends[-1])


def read_tensors(buffer: Any) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return (metadata, tensors) of a file in memory. The tensors are views, which keep ``buffer`` alive.

    Raises ValueError for a file that is cut off or not in this format.
    """
    data = memoryview(buffer)
    try:
        (header_bytes,) = struct.unpack_from("<Q", data)
        entries = parse_json(bytes(data[8 : 8 + header_bytes]))
        metadata = entries.pop("__metadata__", {})
        tensors = {
            name: _view_entry(buffer, entry, 8 + header_bytes, len(data)) for name, entry in entries.items()
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the file is cut off or not in the safetensors format ({error})") from error
    return metadata, tensors


def _view_entry(buffer: Any, entry: Mapping[str, Any], start: int, num_bytes: int) -> Tensor:
    """Return the tensor of an entry of the header. ``start``: the first byte after the header, ``num_bytes``:
    of the file. Raises KeyError for an unknown dtype, and ValueError for bytes that are outside of the file
    or do not fit the shape."""
    shape = TensorShape(_DTYPES[entry["dtype"]], tuple(entry["shape"]))
    first_byte, end_byte = entry["data_offsets"]
    if first_byte < 0 or end_byte - first_byte != shape.nbytes or start + end_byte > num_bytes:
        raise ValueError(
            f"a tensor of {shape.nbytes} bytes from {first_byte} to {end_byte} of {num_bytes - start}"
        )
    return _view(buffer, shape, start + first_byte)


def _view(buffer: Any, shape: TensorShape, start: int) -> Tensor:
    """Return the tensor at byte ``start`` of ``buffer``; a tensor without elements has memory of its own."""
    if not shape.nbytes:
        return torch.empty(shape.shape, dtype=shape.dtype)
    count = shape.nbytes // shape.dtype.itemsize
    return torch.frombuffer(buffer, dtype=shape.dtype, count=count, offset=start).view(shape.shape)


def get_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def iterate_parts(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the header and then the bytes of each tensor, in the order of the file, for ``b"".join`` or
    successive writes. Raises ValueError as ``plan_layout`` does."""
    layout = plan_layout(list_shapes(tensors), metadata)
    yield layout.header
    for name in layout.starts:
        yield get_bytes(tensors[name])
