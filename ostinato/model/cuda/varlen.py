"""Attention over packed segments in Triton: a launch forward and two backward for any number of segments.

Twin: ``model.packed.PackedAttention``, which needs a call for each run of equally long segments and each
prompt. Here a program has neighbouring rows that read the same prefix, and a single softmax runs over both
key sets: first the whole prefix, then the rows' own segments causally. So nothing has to be merged.

Backward is deterministic: a program sums the gradients of some queries, or of some keys, in a fixed order;
there are no atomics. Sums are fp32, and gradients are rounded once. float64 uses the twin.

T rows, H query heads, G key heads, Dk and Dv head dimensions, M rows of a tile of queries, N of keys.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# A kernel is no Python function: its types are Triton's.
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
    """The numbers of rows of a tile of queries and of a tile of keys, and of warps of a program."""

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
    """The work of each program. The longest comes first, so that the programs that finish last are short.

    queries [n, 4]: first row, end, prefix start, prefix end. keys [m, 5]: first row, end, end of the last
    row's segment, and the range of ``readers`` [s, 4] (rows, prefix) that have it in their prefix. starts
    [T]: the start of the segment of a row.
    """

    queries: Tensor
    keys: Tensor
    readers: Tensor
    starts: Tensor

    @classmethod
    def of(cls, segments: tuple[Segment, ...], rows: int, keys: int, device: torch.device) -> Tiles:
        """Cut tiles of ``rows`` queries, and tiles of ``keys`` keys."""
        runs = [list(run) for _, run in groupby(segments, key=lambda s: (s.prefix_start, s.prefix_stop))]
        spans = [(run[0].start, run[-1].stop, run[0].prefix_start, run[0].prefix_stop) for run in runs]
        query_tiles = [
            (first_row, min(first_row + rows, stop), *prefix)
            for start, stop, *prefix in spans
            for first_row in range(start, stop, rows)
        ]
        lengths = [s.stop - s.start for s in segments]
        starts = np.repeat([s.start for s in segments], lengths)
        stops = np.repeat([s.stop for s in segments], lengths)
        readers: list[tuple[int, ...]] = []
        key_tiles: list[tuple[int, ...]] = []
        for first_row in range(0, len(starts), keys):
            end = min(first_row + keys, len(starts))
            prefix_spans = [span for span in spans if span[2] < end and first_row < span[3]]
            key_tiles.append(
                (first_row, end, int(stops[end - 1]), len(readers), len(readers) + len(prefix_spans))
            )
            readers += prefix_spans
        query_tiles.sort(key=lambda tile: int(starts[tile[0]]) - tile[1] + tile[2] - tile[3])
        key_tiles.sort(
            key=lambda key_tile: (
                key_tile[0]
                - key_tile[2]
                - sum(reader[1] - reader[0] for reader in readers[key_tile[3] : key_tile[4]])
            )
        )

        def to_device(values: Any, width: int) -> Tensor:
            return torch.from_numpy(np.array(values, np.int32).reshape(-1, width)).to(device)

        return cls(
            to_device(query_tiles, 4), to_device(key_tiles, 5), to_device(readers, 4), to_device(starts, 1)
        )


class VarlenAttention:
    """Implements ``Attend`` for the rows of a microbatch; ``forward`` is as in ``PackedAttention``."""

    def __init__(self, segments: tuple[Segment, ...], forward: Forward | None = None) -> None:
        check_segments(segments)
        self._segments, self._tiles = segments, dict[tuple[Any, ...], Tiles]()
        self._forward = forward

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Compute attention [T, H, Dv] of q [T, H, Dk], k [T, G, Dk], v [T, G, Dv]. ``layer`` has no effect.
        float64 and wide heads are computed by the twin. Raises ValueError for q of another number of rows."""
        width = max(q.shape[2], v.shape[2])
        if q.dtype == torch.float64 or width > WIDEST:
            return PackedAttention(self._segments, self._forward)(layer, q, k, v, scale)
        if len(q) != (rows := self._segments[-1].stop):
            raise ValueError(f"q has {len(q)} rows for segments of {rows}; take both from one batch")
        shape = Shape.of(width, q.element_size())
        get_tiles = partial(self._make_tiles, device=q.device)
        return _Attention.apply(q, k, v, scale, shape, get_tiles, self._forward)  # type: ignore[return-value]

    def _make_tiles(self, rows: int, keys: int, device: torch.device) -> Tiles:
        """Return the tiles, which are made at the first call and kept for all layers."""
        key = rows, keys, device
        if key not in self._tiles:
            self._tiles[key] = Tiles.of(self._segments, *key)
        return self._tiles[key]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        shape: Shape,
        get_tiles: Callable[[int, int], Tiles],
        forward: Forward | None,
    ) -> Tensor:
        q, k, v = (_make_contiguous(x) for x in (q, k, v))
        ctx.scale, ctx.shape, ctx.get_tiles = scale, shape, get_tiles
        if forward is not None:
            out, lse = forward(q, k, v, scale)
            ctx.save_for_backward(q, k, v, out, lse)
            return out
        block = shape.forward
        tiles, heads = get_tiles(block.queries, shape.of_keys.keys), q.shape[1]
        out = q.new_empty(*q.shape[:2], v.shape[2])
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        _forward_kernel[(heads, len(tiles.queries))](
            q, k, v, out, lse, tiles.queries, tiles.starts, scale, *_list_strides(q, k, v), heads,
            heads // k.shape[1], **_find_widths(k, v), **block.launch,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grad, heads, groups = grad.contiguous(), q.shape[1], k.shape[1]
        grads = [x.new_empty(x.shape) for x in (q, k, v)]
        delta, strides, widths = torch.empty_like(lse), _list_strides(q, k, v), _find_widths(k, v)
        block, keys = ctx.shape.of_queries, ctx.shape.of_keys
        tiles = ctx.get_tiles(block.queries, keys.keys)
        _queries_kernel[(heads, len(tiles.queries))](
            q, k, v, out, lse, grad, delta, grads[0], tiles.queries, tiles.starts, ctx.scale, *strides, heads,
            heads // groups, **widths, **block.launch,
        )  # fmt: skip
        _keys_kernel[(groups, len(tiles.keys))](
            q, k, v, lse, grad, delta, grads[1], grads[2], tiles.keys, tiles.readers, tiles.starts, ctx.scale,
            *strides, heads, groups, heads // groups, **widths, **keys.launch,
        )  # fmt: skip
        return *grads, None, None, None, None


def _make_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()


def _list_strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of rows and of heads of each tensor."""
    return tuple(stride for x in tensors for stride in x.stride()[:2])


def _find_widths(k: Tensor, v: Tensor) -> dict[str, int]:
    """Return the head dimensions, and their padded sizes: a product needs at least 16."""
    key, value = k.shape[2], v.shape[2]
    padded_widths = (max(16, triton.next_power_of_2(width)) for width in (key, value))
    return dict(zip(("KEY_DIM", "VALUE_DIM", "KEY", "VALUE"), (key, value, *padded_widths), strict=True))


@triton.jit
def _load_rows(base, first_row, row, limit, stride, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Load [rows, PADDED] from row ``first_row`` + ``row``, with zeros from row ``limit`` and from column DIM
    on."""
    column = tl.arange(0, PADDED)
    mask = (first_row + row < limit)[:, None] & (column[None, :] < DIM)
    place = row[:, None] * stride + column[None, :]
    return tl.load(base + tl.cast(first_row, tl.int64) * stride + place, mask=mask, other=0.0)


@triton.jit
def _add_keys(
    q, keys, values, first_key, last_key, row, start, scale, k_row, v_row, peak, total, out,
    OWN: tl.constexpr, N: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Add keys ``first_key`` to ``last_key`` to the softmax (peak in powers of 2, total, out) of rows, and
    return it. With OWN a row sees only the keys from ``start`` to ``row``."""
    for begin in range(first_key, last_key, N):
        column = tl.arange(0, N)
        k = _load_rows(keys, begin, column, last_key, k_row, KEY_DIM, KEY)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        key = begin + column
        if OWN:
            is_visible = (key[None, :] >= start[:, None]) & (key[None, :] <= row[:, None])
        else:
            is_visible = (key < last_key)[None, :]
        scores = tl.where(is_visible, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        mass = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(mass, axis=1)
        v = _load_rows(values, begin, column, last_key, v_row, VALUE_DIM, VALUE)
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
    first_row, stop = tl.load(tile), tl.load(tile + 1)
    member = tl.arange(0, M)
    row = first_row + member
    is_row = row < stop
    start = tl.load(starts + row, mask=is_row, other=2147483647)
    q = _load_rows(queries + head * q_head, first_row, member, stop, q_row, KEY_DIM, KEY)
    keys += head // group * k_head
    values += head // group * v_head
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    result = tl.zeros([M, VALUE], tl.float32)
    peak, total, result = _add_keys(
        q, keys, values, tl.load(tile + 2), tl.load(tile + 3), row, start, scale, k_row, v_row, peak, total,
        result, False, N, KEY_DIM, VALUE_DIM, KEY, VALUE,
    )  # fmt: skip
    peak, total, result = _add_keys(
        q, keys, values, tl.load(starts + first_row), stop, row, start, scale, k_row, v_row, peak, total,
        result, True, N, KEY_DIM, VALUE_DIM, KEY, VALUE,
    )  # fmt: skip
    total = tl.where(is_row, total, 1.0)
    column = tl.arange(0, VALUE)
    place = (row.to(tl.int64) * heads + head)[:, None] * VALUE_DIM + column[None, :]
    mask = is_row[:, None] & (column[None, :] < VALUE_DIM)
    tl.store(out + place, (result / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + row * heads + head, peak / LOG2_E + tl.log(total), mask=is_row)


@triton.jit
def _add_query_slope(
    q, grad, keys, values, first_key, last_key, row, start, lse, delta, scale, k_row, v_row, slope,
    OWN: tl.constexpr, N: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Return ``slope`` [M, KEY] of queries, unscaled, plus the share of keys ``first_key`` to
    ``last_key``."""
    for begin in range(first_key, last_key, N):
        column = tl.arange(0, N)
        k = _load_rows(keys, begin, column, last_key, k_row, KEY_DIM, KEY)
        v = _load_rows(values, begin, column, last_key, v_row, VALUE_DIM, VALUE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        key = begin + column
        if OWN:
            is_visible = (key[None, :] >= start[:, None]) & (key[None, :] <= row[:, None])
        else:
            is_visible = (key < last_key)[None, :]
        probs = tl.where(is_visible, tl.exp2(scores - lse[:, None]), 0.0)
        grad_probs = tl.dot(grad, tl.trans(v), input_precision="ieee")
        grad_scores = probs * (grad_probs - delta[:, None])
        slope += tl.dot(grad_scores.to(k.dtype), k, input_precision="ieee")
    return slope


@triton.jit
def _queries_kernel(
    queries, keys, values, out, lses, grads, deltas, slopes, tiles, starts, scale, q_row, q_head, k_row,
    k_head, v_row, v_head, heads, group, M: tl.constexpr, N: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of queries, and ``deltas``: the sum of grad * out of each row and head."""
    head, tile = tl.program_id(0), tiles + tl.program_id(1) * 4
    first_row, stop = tl.load(tile), tl.load(tile + 1)
    member = tl.arange(0, M)
    row = first_row + member
    is_row = row < stop
    start = tl.load(starts + row, mask=is_row, other=2147483647)
    q = _load_rows(queries + head * q_head, first_row, member, stop, q_row, KEY_DIM, KEY)
    grad = _load_rows(grads + head * VALUE_DIM, first_row, member, stop, heads * VALUE_DIM, VALUE_DIM, VALUE)
    result = _load_rows(out + head * VALUE_DIM, first_row, member, stop, heads * VALUE_DIM, VALUE_DIM, VALUE)
    delta = tl.sum(grad.to(tl.float32) * result.to(tl.float32), axis=1)
    tl.store(deltas + row * heads + head, delta, mask=is_row)
    lse = tl.load(lses + row * heads + head, mask=is_row, other=0.0) * LOG2_E
    keys += head // group * k_head
    values += head // group * v_head
    slope = tl.zeros([M, KEY], tl.float32)
    slope = _add_query_slope(
        q, grad, keys, values, tl.load(tile + 2), tl.load(tile + 3), row, start, lse, delta, scale, k_row,
        v_row, slope, False, N, KEY_DIM, VALUE_DIM, KEY, VALUE,
    )  # fmt: skip
    slope = _add_query_slope(
        q, grad, keys, values, tl.load(starts + first_row), stop, row, start, lse, delta, scale, k_row,
        v_row, slope, True, N, KEY_DIM, VALUE_DIM, KEY, VALUE,
    )  # fmt: skip
    column = tl.arange(0, KEY)
    place = (row.to(tl.int64) * heads + head)[:, None] * KEY_DIM + column[None, :]
    mask = is_row[:, None] & (column[None, :] < KEY_DIM)
    tl.store(slopes + place, (slope * scale).to(slopes.dtype.element_ty), mask=mask)


@triton.jit
def _add_key_slopes(
    k, v, queries, grads, lses, deltas, starts, first_row, last_row, key, low, high, scale, q_row, heads,
    grad_k, grad_v, OWN: tl.constexpr, M: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Return ``grad_k`` [N, KEY] (unscaled) and ``grad_v`` [N, VALUE], plus the share of queries
    ``first_row`` to ``last_row``: of those that have the key in their own segment (OWN), or in the prefix
    ``low`` to ``high``."""
    for begin in range(first_row, last_row, M):
        member = tl.arange(0, M)
        row = begin + member
        in_range = row < last_row
        q = _load_rows(queries, begin, member, last_row, q_row, KEY_DIM, KEY)
        grad = _load_rows(grads, begin, member, last_row, heads * VALUE_DIM, VALUE_DIM, VALUE)
        lse = tl.load(lses + row * heads, mask=in_range, other=0.0) * LOG2_E
        delta = tl.load(deltas + row * heads, mask=in_range, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2_E)
        if OWN:
            start = tl.load(starts + row, mask=in_range, other=2147483647)
            is_visible = (key[:, None] >= start[None, :]) & (key[:, None] <= row[None, :])
        else:
            is_visible = ((key >= low) & (key < high))[:, None] & in_range[None, :]
        probs = tl.where(is_visible, tl.exp2(scores - lse[None, :]), 0.0)
        grad_v += tl.dot(probs.to(grad.dtype), grad, input_precision="ieee")
        grad_probs = tl.dot(v, tl.trans(grad), input_precision="ieee")
        grad_scores = probs * (grad_probs - delta[None, :])
        grad_k += tl.dot(grad_scores.to(q.dtype), q, input_precision="ieee")
    return grad_k, grad_v


@triton.jit
def _keys_kernel(
    queries, keys, values, lses, grads, deltas, key_slopes, value_slopes, tiles, readers, starts, scale,
    q_row, q_head, k_row, k_head, v_row, v_head, heads, groups, group, M: tl.constexpr, N: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values, summed over the query heads of a key head and all readers."""
    owner, tile = tl.program_id(0), tiles + tl.program_id(1) * 5
    first_key, stop, own_stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    member = tl.arange(0, N)
    key = first_key + member
    k = _load_rows(keys + owner * k_head, first_key, member, stop, k_row, KEY_DIM, KEY)
    v = _load_rows(values + owner * v_head, first_key, member, stop, v_row, VALUE_DIM, VALUE)
    grad_k = tl.zeros([N, KEY], tl.float32)
    grad_v = tl.zeros([N, VALUE], tl.float32)
    for head in range(owner * group, owner * group + group):
        q, grad = queries + head * q_head, grads + head * VALUE_DIM
        lse, delta = lses + head, deltas + head
        grad_k, grad_v = _add_key_slopes(
            k, v, q, grad, lse, delta, starts, first_key, own_stop, key, 0, 0, scale, q_row, heads, grad_k,
            grad_v, True, M, KEY_DIM, VALUE_DIM, KEY, VALUE,
        )  # fmt: skip
        for number in range(tl.load(tile + 3), tl.load(tile + 4)):
            reader = readers + number * 4
            grad_k, grad_v = _add_key_slopes(
                k, v, q, grad, lse, delta, starts, tl.load(reader), tl.load(reader + 1), key,
                tl.load(reader + 2), tl.load(reader + 3), scale, q_row, heads, grad_k, grad_v,
                False, M, KEY_DIM, VALUE_DIM, KEY, VALUE,
            )  # fmt: skip
    is_key = (key < stop)[:, None]
    place = key.to(tl.int64) * groups + owner
    column = tl.arange(0, KEY)
    mask = is_key & (column[None, :] < KEY_DIM)
    offset = place[:, None] * KEY_DIM + column[None, :]
    tl.store(key_slopes + offset, (grad_k * scale).to(key_slopes.dtype.element_ty), mask=mask)
    column = tl.arange(0, VALUE)
    mask = is_key & (column[None, :] < VALUE_DIM)
    offset = place[:, None] * VALUE_DIM + column[None, :]
    tl.store(value_slopes + offset, grad_v.to(value_slopes.dtype.element_ty), mask=mask)
