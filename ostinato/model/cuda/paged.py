"""Attention over paged keys and values in Triton: decode and prefill rows in one kernel.

Keys lie as [blocks, 16, Hkv, Dk], values as [blocks, 16, Hkv, Dv]; slot = block * 16 + offset. Positions are
cut into splits of a fixed length. Each split gives a partial result, (out, log-sum-exp), and partial results
are merged in the order of positions,

    lse = log(exp(lse_a) + exp(lse_b))        out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)

by a single program for all splits (many rows: prefill), or by a program for each split and another that
merges (few rows: decode would not fill the GPU otherwise). Both do the same arithmetic, and positions that a
row does not see add exact zeros: the result of a row depends on no other row, nor on which way was taken.

The query heads of a key head, and neighbouring rows of a sequence, share a tile. Twin: ``engine.paged``.

T rows, H query heads, Hkv key heads, G = H / Hkv, Dk and Dv head dimensions, S splits, N tiles.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# A kernel is no Python function: its types are Triton's.
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

PAGE = 16  # positions of a block
SPLIT = 512  # positions of a partial result
TILE_M = 16  # rows x heads of a tile: the smallest size of the matrix units
HEADS = 8  # of a program that norms, rotates and stores
TILE_N = 32  # positions that a program loads at once: with 64 the pointers spill


@dataclass(frozen=True, slots=True)
class Tiles:
    """The rows of each tile: ``count[n]`` neighbouring rows of a sequence from ``first[n]`` on."""

    first: Tensor  # [N] int32
    count: Tensor  # [N] int32

    @classmethod
    def of(cls, sequence: np.ndarray, group: int, device: torch.device) -> Tiles:
        """Cut tiles of rows [T], of which ``sequence`` are the sequences; rows of a sequence are consecutive.
        ``group``: H / Hkv."""
        tiles = torch.from_numpy(cut_tiles(sequence, group)).to(device)
        return cls(tiles[0], tiles[1])


def cut_tiles(sequence: np.ndarray, group: int) -> np.ndarray:
    """Compute the fields of ``Tiles``, (first, count) [2, N] int32 with N <= T, on the host. ``group``: H /
    Hkv."""
    tile_rows = count_tile_rows(group)
    starts = np.flatnonzero(np.r_[True, sequence[1:] != sequence[:-1]])
    lengths = np.diff(np.r_[starts, len(sequence)])
    tile_counts = -(-lengths // tile_rows)
    tile_idx = np.arange(tile_counts.sum()) - np.repeat(np.cumsum(tile_counts) - tile_counts, tile_counts)
    first_rows = np.repeat(starts, tile_counts) + tile_idx * tile_rows
    row_counts = np.minimum(tile_rows, np.repeat(starts + lengths, tile_counts) - first_rows)
    return np.stack((first_rows, row_counts)).astype(np.int32)


def count_tile_rows(group: int) -> int:
    """Return the number of rows that fill a tile, if each has ``group`` heads."""
    return max(1, TILE_M // triton.next_power_of_2(group))


def write_cache(k: Tensor, v: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write k [T, Hkv, Dk] and v [T, Hkv, Dv] (strided) to the slots [T] of a layer's pages. Rows with a slot
    below 0 are not written."""
    assert k.stride(2) == 1 and v.stride(2) == 1, "keys and values with a contiguous last dimension"
    heads, width = k.shape[1], max(k.shape[2], v.shape[2])
    if len(k):
        _write_kernel[(len(k), heads)](
            k, v, slots, keys, values, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            heads, k.shape[2], v.shape[2], BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip


@triton.jit
def _write_kernel(
    k, v, slots, keys, values, k_row, k_head, v_row, v_head, heads, key_dim, value_dim, BLOCK: tl.constexpr
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    slot = tl.load(slots + row).to(tl.int64) + tl.zeros([BLOCK], tl.int64)
    has_slot = slot >= 0
    key = tl.load(k + row * k_row + head * k_head + column, mask=column < key_dim)
    tl.store(keys + (slot * heads + head) * key_dim + column, key, mask=has_slot & (column < key_dim))
    value = tl.load(v + row * v_row + head * v_head + column, mask=column < value_dim)
    tl.store(values + (slot * heads + head) * value_dim + column, value, mask=has_slot & (column < value_dim))


def store_projection(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Norm and rotate a projection qkv [T, H + 2 Hkv, D]: the heads of q and k by the weights [D] of
    ``norms`` and by cos, sin [T, D]. Return the queries [T, H, D], and write k and v to the slots [T] as
    ``write_cache`` does."""
    kv_heads, size = keys.shape[2:]
    heads = qkv.shape[1] - 2 * kv_heads
    assert qkv.stride(2) == 1 and qkv.stride(1) == size == values.shape[3], "heads lie beside each other"
    out = qkv.new_empty(len(qkv), heads, size)
    if len(qkv):
        _project_kernel[(len(qkv), triton.cdiv(heads + 2 * kv_heads, HEADS))](
            qkv, *(norms or (qkv, qkv)), cos, sin, slots, out, keys, values, qkv.stride(0), cos.stride(0),
            heads, kv_heads, size // 2, eps,
            NORM=norms is not None, HEADS=HEADS, HALF=triton.next_power_of_2(size // 2),
        )  # fmt: skip
    return out


@triton.jit
def _project_kernel(
    qkv, q_norm, k_norm, cos, sin, slots, queries, keys, values, row_stride, turn_stride,
    heads, kv_heads, half, eps, NORM: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)[None, :]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    in_half = column < half
    of_query = in_half & (head < heads)
    of_key = in_half & (head >= heads) & (head < heads + kv_heads)
    of_value = in_half & (head >= heads + kv_heads) & (head < heads + 2 * kv_heads)
    source = qkv + row * row_stride + head * 2 * half + column
    first_half = tl.load(source, mask=of_query | of_key | of_value, other=0.0)
    second_half = tl.load(source + half, mask=of_query | of_key | of_value, other=0.0)
    a, b = first_half.to(tl.float32), second_half.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * half) + eps)[:, None]
        # rounded before and after the scaling, as rms_norm does
        a = (a * inverse).to(first_half.dtype).to(tl.float32)
        b = (b * inverse).to(first_half.dtype).to(tl.float32)
        q_scale = tl.load(q_norm + column, mask=in_half, other=0.0).to(tl.float32)
        k_scale = tl.load(k_norm + column, mask=in_half, other=0.0).to(tl.float32)
        a = (a * tl.where(head < heads, q_scale, k_scale)).to(first_half.dtype).to(tl.float32)
        q_scale = tl.load(q_norm + half + column, mask=in_half, other=0.0).to(tl.float32)
        k_scale = tl.load(k_norm + half + column, mask=in_half, other=0.0).to(tl.float32)
        b = (b * tl.where(head < heads, q_scale, k_scale)).to(first_half.dtype).to(tl.float32)
    angle = row * turn_stride + column
    c = tl.load(cos + angle, mask=in_half, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=in_half, other=0.0).to(tl.float32)
    rotated, rotated_second = (a * c - b * s).to(first_half.dtype), (b * c + a * s).to(first_half.dtype)
    query = queries + (row * heads + head) * 2 * half + column
    tl.store(query, rotated, mask=of_query)
    tl.store(query + half, rotated_second, mask=of_query)
    slot = tl.load(slots + row).to(tl.int64) + tl.zeros([HEADS, 1], tl.int64)
    of_key, of_value = of_key & (slot >= 0), of_value & (slot >= 0)
    key = keys + (slot * kv_heads + head - heads) * 2 * half + column
    tl.store(key, rotated, mask=of_key)
    tl.store(key + half, rotated_second, mask=of_key)
    value = values + (slot * kv_heads + head - heads - kv_heads) * 2 * half + column
    tl.store(value, first_half, mask=of_value)
    tl.store(value + half, second_half, mask=of_value)


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    sequence: Tensor,
    lengths: Tensor,
    tiles: Tiles,
    scale: float,
    lse: Tensor | None = None,
    *,
    parallel: bool,
) -> Tensor:
    """Compute attention [T, H, Dv] of row t of q [T, H, Dk] over the first ``lengths[t]`` positions of the
    blocks in ``tables[sequence[t]]``. ``parallel``: use a program for each split. Otherwise one program
    computes all splits of a tile, and also writes the log-sum-exps to ``lse`` [T, H] fp32. The result is the
    same."""
    heads, kv_heads = q.shape[1], keys.shape[2]
    key_dim, value_dim = keys.shape[3], values.shape[3]
    assert q.stride(2) == 1 and heads % kv_heads == 0
    out = q.new_empty(len(q), heads, value_dim)
    splits = triton.cdiv(tables.shape[1] * PAGE, SPLIT) if parallel else 1
    if parallel:
        parts = q.new_empty(splits, len(q), heads, value_dim, dtype=torch.float32)
        lses = q.new_empty(splits, len(q), heads, dtype=torch.float32)
    else:
        lses = q.new_empty(len(q), heads, dtype=torch.float32) if lse is None else lse
        parts = lses
    group = heads // kv_heads
    rows, padded_group = count_tile_rows(group), triton.next_power_of_2(group)
    if len(q):
        _attention_kernel[(len(tiles.first), kv_heads, splits)](
            q, keys, values, tables, sequence, lengths, tiles.first, tiles.count, out, parts, lses, scale,
            q.stride(0), q.stride(1), tables.stride(0), len(q), heads, kv_heads, group, key_dim, value_dim,
            PARALLEL=parallel, ROWS=rows, GROUP=padded_group, N=TILE_N, PAGE=PAGE, SPLIT=SPLIT,
            KEY=triton.next_power_of_2(key_dim), VALUE=triton.next_power_of_2(value_dim),
        )  # fmt: skip
    if parallel and len(q):
        _merge_kernel[(len(q), heads)](
            parts, lses, lengths, out, len(q), heads, value_dim,
            SPLIT=SPLIT, VALUE=triton.next_power_of_2(value_dim),
        )  # fmt: skip
    return out


@triton.jit
def _attend_split(
    q, keys, values, table, head, length, first_position, last_position, scale, kv_heads, key_dim, value_dim,
    M: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    """Compute (out [M, VALUE], lse [M]) fp32 of positions ``first_position`` to ``last_position``, of which
    row m sees those below ``length[m]``. For a row that sees none of them lse is -inf and out is 0."""
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    out = tl.zeros([M, VALUE], tl.float32)
    key_column, value_column = tl.arange(0, KEY), tl.arange(0, VALUE)
    for start in range(first_position, last_position, N):
        position = start + tl.arange(0, N)
        in_range = position < last_position
        page = tl.load(table + position // PAGE, mask=in_range, other=0).to(tl.int64)
        slot = (page * PAGE + position % PAGE) * kv_heads + head
        k = tl.load(
            keys + slot[None, :] * key_dim + key_column[:, None],
            mask=in_range[None, :] & (key_column[:, None] < key_dim),
            other=0.0,
        )
        v = tl.load(
            values + slot[:, None] * value_dim + value_column[None, :],
            mask=in_range[:, None] & (value_column[None, :] < value_dim),
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where(position[None, :] < length[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        mass = tl.exp(scores - shift[:, None])
        shrink = tl.exp(peak - shift)
        total = total * shrink + tl.sum(mass, axis=1)
        out = out * shrink[:, None] + tl.dot(mass.to(v.dtype), v, input_precision="ieee")
        peak = higher
    has_mass = total > 0
    lse = tl.where(has_mass, peak + tl.log(tl.where(has_mass, total, 1.0)), float("-inf"))
    return out / tl.where(has_mass, total, 1.0)[:, None], lse


@triton.jit
def _compute_weights(lse, part_lse):
    """Return (log-sum-exp of both parts, weight of the first, weight of the second). The first must be
    finite."""
    higher = tl.maximum(lse, part_lse)
    union = higher + tl.log(tl.exp(lse - higher) + tl.exp(part_lse - higher))
    return union, tl.exp(lse - union), tl.exp(part_lse - union)


@triton.jit(do_not_specialize=["num_rows", "table_row"])
def _attention_kernel(
    queries, keys, values, tables, sequence, lengths, tile_first, tile_count, out, parts, lses, scale,
    q_row, q_head, table_row, num_rows, heads, kv_heads, group, key_dim, value_dim,
    PARALLEL: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, PAGE: tl.constexpr,
    SPLIT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # padded to the size of the matrix units with rows that are not stored
    M: tl.constexpr = ROWS * GROUP
    member = tl.arange(0, M)
    row = tl.load(tile_first + tile) + member // GROUP
    is_member = (member // GROUP < tl.load(tile_count + tile)) & (member % GROUP < group)
    query_head = head * group + member % GROUP
    length = tl.load(lengths + row, mask=is_member, other=0)
    longest = tl.max(length)
    if PARALLEL:  # noqa: SIM102  a constexpr decides while the kernel is compiled
        if split * SPLIT >= longest:
            return
    key_column, value_column = tl.arange(0, KEY), tl.arange(0, VALUE)
    q = tl.load(
        queries + row.to(tl.int64)[:, None] * q_row + query_head[:, None] * q_head + key_column[None, :],
        mask=is_member[:, None] & (key_column[None, :] < key_dim),
        other=0.0,
    )
    table = tables + tl.load(sequence + tl.load(tile_first + tile)).to(tl.int64) * table_row
    mask = is_member[:, None] & (value_column[None, :] < value_dim)
    place = (row.to(tl.int64) * heads + query_head)[:, None] * value_dim + value_column[None, :]
    if PARALLEL:
        start = split * SPLIT
        result, lse = _attend_split(
            q, keys, values, table, head, length, start, tl.minimum(start + SPLIT, longest), scale,
            kv_heads, key_dim, value_dim, M, N, PAGE, KEY, VALUE,
        )  # fmt: skip
        offset = split.to(tl.int64) * num_rows * heads
        tl.store(parts + offset * value_dim + place, result, mask=mask)
        tl.store(lses + offset + row.to(tl.int64) * heads + query_head, lse, mask=is_member)
    else:
        result = tl.zeros([M, VALUE], tl.float32)
        lse = tl.zeros([M], tl.float32)
        for start in range(0, longest, SPLIT):
            part, part_lse = _attend_split(
                q, keys, values, table, head, length, start, tl.minimum(start + SPLIT, longest), scale,
                kv_heads, key_dim, value_dim, M, N, PAGE, KEY, VALUE,
            )  # fmt: skip
            union, weight, part_weight = _compute_weights(lse, part_lse)
            # exactly: the first split is taken as it is, and a split that a row does not see changes nothing
            weight = tl.where(start == 0, 0.0, tl.where(start < length, weight, 1.0))
            part_weight = tl.where(start == 0, 1.0, tl.where(start < length, part_weight, 0.0))
            lse = tl.where(start == 0, part_lse, tl.where(start < length, union, lse))
            result = result * weight[:, None] + part * part_weight[:, None]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)
        tl.store(lses + row.to(tl.int64) * heads + query_head, lse, mask=is_member)


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    parts, lses, lengths, out, num_rows, heads, value_dim, SPLIT: tl.constexpr, VALUE: tl.constexpr
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, VALUE)
    mask = column < value_dim
    place = row * heads + head
    result = tl.load(parts + place * value_dim + column, mask=mask, other=0.0)
    lse = tl.load(lses + place)
    length = tl.load(lengths + row)
    for _start in range(SPLIT, length, SPLIT):
        place += num_rows * heads
        part = tl.load(parts + place * value_dim + column, mask=mask, other=0.0)
        lse, weight, part_weight = _compute_weights(lse, tl.load(lses + place))
        result = result * weight + part * part_weight
    tl.store(out + (row * heads + head) * value_dim + column, result.to(out.dtype.element_ty), mask=mask)
