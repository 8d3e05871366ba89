"""Attention over packed segments in Triton: one launch forward and two backward for any number of segments.

Twin: ``model.packed.PackedAttention``, which takes a call for each run of equally long segments and each
prompt. Here a program has neighbouring rows that read the same prefix, and one softmax runs over both key
sets: first the whole prefix, then the rows' own segments causally. So nothing has to be merged.

Backward is deterministic: a program has the gradients of some queries, or of some keys, and adds up in a
fixed order; there are no atomics. Sums are fp32, gradients are rounded once. float64 takes the twin.

T rows, H query heads, G key heads, Dk and Dv head dimensions, M rows of a tile of queries, N of keys.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# A kernel is no function of Python: its types are Triton's.
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ostinato.model.packed import Forward, PackedAttention, check_segments
from ostinato.types import Segment

WIDEST = 256  # head dimension
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rows of a tile of queries and of one of keys, and warps of a program."""

    queries: int
    keys: int
    warps: int

    @property
    def launch(self) -> dict[str, int]:
        return {"M": self.queries, "N": self.keys, "num_warps": self.warps, "num_stages": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """Tiles of the three kernels, by the padded head dimension and the bytes of an element."""

    forward: Blocks
    of_queries: Blocks
    of_keys: Blocks

    @classmethod
    def of(cls, width: int, itemsize: int) -> Shape:
        if itemsize > 2:
            return cls(*[Blocks(32, 32, 4)] * 3)
        if width <= 128:
            return cls(Blocks(128, 64, 8), Blocks(64, 64, 8), Blocks(32, 64, 8))
        return cls(Blocks(64, 32, 8), Blocks(32, 32, 8), Blocks(32, 32, 8))


@dataclass(frozen=True, slots=True)
class Tiles:
    """Who computes what: the longest work first, so that the last programs to finish are short.

    queries [n, 4]: first row, end, prefix start, prefix end. keys [m, 5]: first row, end, end of the last
    row's segment, and which of ``readers`` [s, 4] have it in their prefix: rows, prefix. starts [T]: where
    the segment of a row starts.
    """

    queries: Tensor
    keys: Tensor
    readers: Tensor
    starts: Tensor

    @classmethod
    def of(cls, segments: tuple[Segment, ...], rows: int, keys: int, device: torch.device) -> Tiles:
        """``rows`` in a tile of queries, ``keys`` in one of keys."""
        runs = [list(run) for _, run in groupby(segments, key=lambda s: (s.prefix_start, s.prefix_stop))]
        spans = [(run[0].start, run[-1].stop, run[0].prefix_start, run[0].prefix_stop) for run in runs]
        queries = [
            (first, min(first + rows, stop), *prefix)
            for start, stop, *prefix in spans
            for first in range(start, stop, rows)
        ]
        lengths = [s.stop - s.start for s in segments]
        starts = np.repeat([s.start for s in segments], lengths)
        stops = np.repeat([s.stop for s in segments], lengths)
        readers: list[tuple[int, ...]] = []
        cells: list[tuple[int, ...]] = []
        for first in range(0, len(starts), keys):
            end = min(first + keys, len(starts))
            found = [span for span in spans if span[2] < end and first < span[3]]
            cells.append((first, end, int(stops[end - 1]), len(readers), len(readers) + len(found)))
            readers += found
        queries.sort(key=lambda q: int(starts[q[0]]) - q[1] + q[2] - q[3])
        cells.sort(key=lambda c: c[0] - c[2] - sum(r[1] - r[0] for r in readers[c[3] : c[4]]))

        def put(values: Any, width: int) -> Tensor:
            return torch.from_numpy(np.array(values, np.int32).reshape(-1, width)).to(device)

        return cls(put(queries, 4), put(cells, 5), put(readers, 4), put(starts, 1))


class VarlenAttention:
    """``Attend`` for the rows of one microbatch, as ``PackedAttention``, also in what ``forward`` is."""

    def __init__(self, segments: tuple[Segment, ...], forward: Forward | None = None) -> None:
        check_segments(segments)
        self._segments, self._tiles = segments, dict[tuple[Any, ...], Tiles]()
        self._forward = forward

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [T, H, Dk], k [T, G, Dk], v [T, G, Dv] -> [T, H, Dv]. The layer's number plays no role."""
        width = max(q.shape[2], v.shape[2])
        if q.dtype == torch.float64 or width > WIDEST:
            return PackedAttention(self._segments, self._forward)(layer, q, k, v, scale)
        if len(q) != (rows := self._segments[-1].stop):
            raise ValueError(f"q has {len(q)} rows for segments of {rows}; take both from one batch")
        shape = Shape.of(width, q.element_size())
        tiles_of = partial(self._of, device=q.device)
        return _Attention.apply(q, k, v, scale, shape, tiles_of, self._forward)  # type: ignore[return-value]

    def _of(self, rows: int, keys: int, device: torch.device) -> Tiles:
        """Made once for all layers."""
        where = rows, keys, device
        if where not in self._tiles:
            self._tiles[where] = Tiles.of(self._segments, *where)
        return self._tiles[where]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        shape: Shape,
        tiles_of: Callable[[int, int], Tiles],
        forward: Forward | None,
    ) -> Tensor:
        q, k, v = (_by_rows(x) for x in (q, k, v))
        ctx.scale, ctx.shape, ctx.tiles_of = scale, shape, tiles_of
        if forward is not None:
            out, lse = forward(q, k, v, scale)
            ctx.save_for_backward(q, k, v, out, lse)
            return out
        block = shape.forward
        tiles, heads = tiles_of(block.queries, shape.of_keys.keys), q.shape[1]
        out = q.new_empty(*q.shape[:2], v.shape[2])
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        _forward_kernel[(heads, len(tiles.queries))](
            q, k, v, out, lse, tiles.queries, tiles.starts, scale, *_strides(q, k, v), heads,
            heads // k.shape[1], **_widths(k, v), **block.launch,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad, heads, groups = grad.contiguous(), q.shape[1], k.shape[1]
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        delta, strides, widths = torch.empty_like(lse), _strides(q, k, v), _widths(k, v)
        block, keys = ctx.shape.of_queries, ctx.shape.of_keys
        tiles = ctx.tiles_of(block.queries, keys.keys)
        _queries_kernel[(heads, len(tiles.queries))](
            q, k, v, out, lse, grad, delta, grads[0], tiles.queries, tiles.starts, ctx.scale, *strides, heads,
            heads // groups, **widths, **block.launch,
        )  # fmt: skip
        _keys_kernel[(groups, len(tiles.keys))](
            q, k, v, lse, grad, delta, grads[1], grads[2], tiles.keys, tiles.readers, tiles.starts, ctx.scale,
            *strides, heads, groups, heads // groups, **widths, **keys.launch,
        )  # fmt: skip
        return *grads, None, None, None, None


def _by_rows(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Of rows and of heads."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def _widths(k: Tensor, v: Tensor) -> dict[str, int]:
    """Head dimensions, and what they are padded to: a product takes sixteen at least."""
    key, value = k.shape[2], v.shape[2]
    padded = (max(16, triton.next_power_of_2(width)) for width in (key, value))
    return dict(zip(("KEY_DIM", "VALUE_DIM", "KEY", "VALUE"), (key, value, *padded), strict=True))


@triton.jit
def _rows_of(base, first, row, limit, stride, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[rows, PADDED] of ``first`` + ``row``, zeros from ``limit`` and from DIM on."""
    column = tl.arange(0, PADDED)
    here = (first + row < limit)[:, None] & (column[None, :] < DIM)
    place = row[:, None] * stride + column[None, :]
    return tl.load(base + tl.cast(first, tl.int64) * stride + place, mask=here, other=0.0)


@triton.jit
def _widened(
    q, keys, values, first, last, row, start, scale, k_row, v_row, peak, total, out,
    OWN: tl.constexpr, N: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """The softmax (peak in powers of 2, total, out) of rows, with keys ``first`` to ``last`` added: all of
    them, or (OWN) those from ``start`` to ``row``."""
    for at in range(first, last, N):
        column = tl.arange(0, N)
        k = _rows_of(keys, at, column, last, k_row, KEY_DIM, KEY)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        key = at + column
        if OWN:
            seen = (key[None, :] >= start[:, None]) & (key[None, :] <= row[:, None])
        else:
            seen = (key < last)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        mass = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(mass, axis=1)
        v = _rows_of(values, at, column, last, v_row, VALUE_DIM, VALUE)
        out = out * shrink[:, None] + tl.dot(mass.to(v.dtype), v, input_precision="ieee")
        peak = higher
    return peak, total, out


@triton.jit
def _forward_kernel(
    queries, keys, values, out, lse, tiles, starts, scale, q_row, q_head, k_row, k_head, v_row, v_head, heads,
    group, M: tl.constexpr, N: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * 4
    first, stop = tl.load(tile), tl.load(tile + 1)
    member = tl.arange(0, M)
    row = first + member
    ours = row < stop
    start = tl.load(starts + row, mask=ours, other=2147483647)
    q = _rows_of(queries + head * q_head, first, member, stop, q_row, KEY_DIM, KEY)
    keys += head // group * k_head
    values += head // group * v_head
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    result = tl.zeros([M, VALUE], tl.float32)
    peak, total, result = _widened(
        q, keys, values, tl.load(tile + 2), tl.load(tile + 3), row, start, scale, k_row, v_row, peak, total,
        result, False, N, KEY_DIM, VALUE_DIM, KEY, VALUE,
    )  # fmt: skip
    peak, total, result = _widened(
        q, keys, values, tl.load(starts + first), stop, row, start, scale, k_row, v_row, peak, total,
        result, True, N, KEY_DIM, VALUE_DIM, KEY, VALUE,
    )  # fmt: skip
    total = tl.where(ours, total, 1.0)
    column = tl.arange(0, VALUE)
    place = (row.to(tl.int64) * heads + head)[:, None] * VALUE_DIM + column[None, :]
    mask = ours[:, None] & (column[None, :] < VALUE_DIM)
    tl.store(out + place, (result / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + row * heads + head, peak / LOG2_E + tl.log(total), mask=ours)


@triton.jit
def _slope_of_queries(
    q, grad, keys, values, first, last, row, start, lse, delta, scale, k_row, v_row, slope,
    OWN: tl.constexpr, N: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """``slope`` [M, KEY] of queries, unscaled, with the share of keys ``first`` to ``last`` added."""
    for at in range(first, last, N):
        column = tl.arange(0, N)
        k = _rows_of(keys, at, column, last, k_row, KEY_DIM, KEY)
        v = _rows_of(values, at, column, last, v_row, VALUE_DIM, VALUE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        key = at + column
        if OWN:
            seen = (key[None, :] >= start[:, None]) & (key[None, :] <= row[:, None])
        else:
            seen = (key < last)[None, :]
        probs = tl.where(seen, tl.exp2(scores - lse[:, None]), 0.0)
        of_probs = tl.dot(grad, tl.trans(v), input_precision="ieee")
        of_scores = probs * (of_probs - delta[:, None])
        slope += tl.dot(of_scores.to(k.dtype), k, input_precision="ieee")
    return slope


@triton.jit
def _queries_kernel(
    queries, keys, values, out, lses, grads, deltas, slopes, tiles, starts, scale, q_row, q_head, k_row,
    k_head, v_row, v_head, heads, group, M: tl.constexpr, N: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """The gradient of queries, and ``deltas``: the sum of grad * out of each row and head."""
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * 4
    first, stop = tl.load(tile), tl.load(tile + 1)
    member = tl.arange(0, M)
    row = first + member
    ours = row < stop
    start = tl.load(starts + row, mask=ours, other=2147483647)
    q = _rows_of(queries + head * q_head, first, member, stop, q_row, KEY_DIM, KEY)
    grad = _rows_of(grads + head * VALUE_DIM, first, member, stop, heads * VALUE_DIM, VALUE_DIM, VALUE)
    result = _rows_of(out + head * VALUE_DIM, first, member, stop, heads * VALUE_DIM, VALUE_DIM, VALUE)
    delta = tl.sum(grad.to(tl.float32) * result.to(tl.float32), axis=1)
    tl.store(deltas + row * heads + head, delta, mask=ours)
    lse = tl.load(lses + row * heads + head, mask=ours, other=0.0) * LOG2_E
    keys += head // group * k_head
    values += head // group * v_head
    slope = tl.zeros([M, KEY], tl.float32)
    slope = _slope_of_queries(
        q, grad, keys, values, tl.load(tile + 2), tl.load(tile + 3), row, start, lse, delta, scale, k_row,
        v_row, slope, False, N, KEY_DIM, VALUE_DIM, KEY, VALUE,
    )  # fmt: skip
    slope = _slope_of_queries(
        q, grad, keys, values, tl.load(starts + first), stop, row, start, lse, delta, scale, k_row,
        v_row, slope, True, N, KEY_DIM, VALUE_DIM, KEY, VALUE,
    )  # fmt: skip
    column = tl.arange(0, KEY)
    place = (row.to(tl.int64) * heads + head)[:, None] * KEY_DIM + column[None, :]
    mask = ours[:, None] & (column[None, :] < KEY_DIM)
    tl.store(slopes + place, (slope * scale).to(slopes.dtype.element_ty), mask=mask)


@triton.jit
def _slopes_of_keys(
    k, v, queries, grads, lses, deltas, starts, first, last, key, low, high, scale, q_row, heads, of_k, of_v,
    OWN: tl.constexpr, M: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """``of_k`` [N, KEY] (unscaled) and ``of_v`` [N, VALUE] with the share of queries ``first`` to ``last``
    added: of those that have the key in their own segment (OWN), or in the prefix ``low`` to ``high``."""
    for at in range(first, last, M):
        member = tl.arange(0, M)
        row = at + member
        here = row < last
        q = _rows_of(queries, at, member, last, q_row, KEY_DIM, KEY)
        grad = _rows_of(grads, at, member, last, heads * VALUE_DIM, VALUE_DIM, VALUE)
        lse = tl.load(lses + row * heads, mask=here, other=0.0) * LOG2_E
        delta = tl.load(deltas + row * heads, mask=here, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2_E)
        if OWN:
            start = tl.load(starts + row, mask=here, other=2147483647)
            seen = (key[:, None] >= start[None, :]) & (key[:, None] <= row[None, :])
        else:
            seen = ((key >= low) & (key < high))[:, None] & here[None, :]
        probs = tl.where(seen, tl.exp2(scores - lse[None, :]), 0.0)
        of_v += tl.dot(probs.to(grad.dtype), grad, input_precision="ieee")
        of_probs = tl.dot(v, tl.trans(grad), input_precision="ieee")
        of_scores = probs * (of_probs - delta[None, :])
        of_k += tl.dot(of_scores.to(q.dtype), q, input_precision="ieee")
    return of_k, of_v


@triton.jit
def _keys_kernel(
    queries, keys, values, lses, grads, deltas, key_slopes, value_slopes, tiles, readers, starts, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, heads, groups, group, M: tl.constexpr, N: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values, summed over the query heads of a key head and over all readers."""
    owner, tile = tl.program_id(0), tiles + tl.program_id(1) * 5
    first, stop, own_stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    member = tl.arange(0, N)
    key = first + member
    k = _rows_of(keys + owner * k_head, first, member, stop, k_row, KEY_DIM, KEY)
    v = _rows_of(values + owner * v_head, first, member, stop, v_row, VALUE_DIM, VALUE)
    of_k = tl.zeros([N, KEY], tl.float32)
    of_v = tl.zeros([N, VALUE], tl.float32)
    for head in range(owner * group, owner * group + group):
        q, grad = queries + head * q_head, grads + head * VALUE_DIM
        lse, delta = lses + head, deltas + head
        of_k, of_v = _slopes_of_keys(
            k, v, q, grad, lse, delta, starts, first, own_stop, key, 0, 0, scale, q_row, heads, of_k, of_v,
            True, M, KEY_DIM, VALUE_DIM, KEY, VALUE,
        )  # fmt: skip
        for number in range(tl.load(tile + 3), tl.load(tile + 4)):
            reader = readers + number * 4
            of_k, of_v = _slopes_of_keys(
                k, v, q, grad, lse, delta, starts, tl.load(reader), tl.load(reader + 1), key,
                tl.load(reader + 2), tl.load(reader + 3), scale, q_row, heads, of_k, of_v,
                False, M, KEY_DIM, VALUE_DIM, KEY, VALUE,
            )  # fmt: skip
    ours = (key < stop)[:, None]
    place = key.to(tl.int64) * groups + owner
    column = tl.arange(0, KEY)
    mask = ours & (column[None, :] < KEY_DIM)
    at = place[:, None] * KEY_DIM + column[None, :]
    tl.store(key_slopes + at, (of_k * scale).to(key_slopes.dtype.element_ty), mask=mask)
    column = tl.arange(0, VALUE)
    mask = ours & (column[None, :] < VALUE_DIM)
    at = place[:, None] * VALUE_DIM + column[None, :]
    tl.store(value_slopes + at, of_v.to(value_slopes.dtype.element_ty), mask=mask)
