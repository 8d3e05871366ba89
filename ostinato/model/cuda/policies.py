"""Adapters of several policies in a pass, in Triton: every row gets its policy's update, in two launches.

Rows of a policy are consecutive, so a tile of rows has a single policy, and a program reads the factors of
that policy. The first launch has a program for every SPAN inputs of a tile, since few rows would leave a GPU
idle; the second sums these parts in their order. So the result of a row depends on no other row. Twin: the
rows of each policy by ``Ops.add_lora``, policy by policy.

T rows, K inputs, N outputs, P policies, R rank.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# A kernel is no Python function: its types are Triton's.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ostinato.model.cuda.paged import TILE_M, Tiles

SPAN = 512  # inputs of a program
DEPTH = 64  # inputs that a program loads at once
RANKS = 64  # of a program
COLUMNS = 64  # outputs of a program


def add_lora(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, *, owners: Tensor, tiles: Tiles
) -> Tensor:
    """Add scale * x a[p]^T b[p]^T to y [T, N] in place, and return y. x [T, K], a [P, R, K], b [P, N, R],
    where p is the row's place in ``owners`` [T] int32. ``tiles``: those of ``cut_tiles`` for these rows, with
    a group of 1; some may be empty."""
    assert x.stride(1) == y.stride(1) == 1 and a.is_contiguous() and b.is_contiguous()
    rows, inputs = x.shape
    _, columns, rank = b.shape
    splits, width = triton.cdiv(inputs, SPAN), min(RANKS, max(16, triton.next_power_of_2(rank)))
    parts = torch.empty(splits, rows, rank, dtype=torch.float32, device=x.device)
    tile_args = owners, tiles.first, tiles.count
    _down_kernel[(len(tiles.first), triton.cdiv(rank, width), splits)](
        x, a, parts, *tile_args, x.stride(0), inputs, rank, rows,
        M=TILE_M, R=width, D=DEPTH, SPAN=SPAN,
    )  # fmt: skip
    _up_kernel[(len(tiles.first), triton.cdiv(columns, COLUMNS))](
        y, b, parts, *tile_args, y.stride(0), columns, rank, rows, splits, scale,
        M=TILE_M, R=width, N=COLUMNS,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["rows"])
def _down_kernel(
    x, a, parts, owners, tile_first, tile_count, x_row, inputs, rank, rows,
    M: tl.constexpr, R: tl.constexpr, D: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Compute a part of x a^T: over the inputs of a split, for a tile of rows and some ranks."""
    tile, split = tl.program_id(0), tl.program_id(2)
    count = tl.load(tile_count + tile)
    if count == 0:
        return
    first_row, member = tl.load(tile_first + tile), tl.arange(0, M)
    row, row_mask = (first_row + member).to(tl.int64), member < count
    column = tl.program_id(1) * R + tl.arange(0, R)
    factor = a + tl.load(owners + first_row).to(tl.int64) * rank * inputs
    result = tl.zeros([M, R], tl.float32)
    for start in range(split * SPAN, tl.minimum(split * SPAN + SPAN, inputs), D):
        depth = start + tl.arange(0, D)
        depth_mask = depth < inputs
        x_part = tl.load(
            x + row[:, None] * x_row + depth[None, :], mask=row_mask[:, None] & depth_mask[None, :], other=0.0
        )
        a_part = tl.load(
            factor + column[None, :] * inputs + depth[:, None],
            mask=(column < rank)[None, :] & depth_mask[:, None],
            other=0.0,
        )
        result = tl.dot(x_part, a_part.to(x_part.dtype), result, input_precision="ieee")
    target = parts + (split.to(tl.int64) * rows + row)[:, None] * rank + column[None, :]
    tl.store(target, result, mask=row_mask[:, None] & (column < rank)[None, :])


@triton.jit(do_not_specialize=["rows", "scale"])
def _up_kernel(
    y, b, parts, owners, tile_first, tile_count, y_row, columns, rank, rows, splits, scale,
    M: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute y + scale * (the sum of all parts) b^T, for a tile of rows and some columns."""
    tile = tl.program_id(0)
    count = tl.load(tile_count + tile)
    if count == 0:
        return
    first_row, member = tl.load(tile_first + tile), tl.arange(0, M)
    row, row_mask = (first_row + member).to(tl.int64), member < count
    column = tl.program_id(1) * N + tl.arange(0, N)
    column_mask = column < columns
    factor = b + tl.load(owners + first_row).to(tl.int64) * columns * rank
    result = tl.zeros([M, N], tl.float32)
    for start in range(0, rank, R):
        depth = start + tl.arange(0, R)
        depth_mask = depth < rank
        low = tl.zeros([M, R], tl.float32)
        source = parts + row[:, None] * rank + depth[None, :]
        for _split in range(splits):
            low += tl.load(source, mask=row_mask[:, None] & depth_mask[None, :], other=0.0)
            source += rows * rank
        b_part = tl.load(
            factor + column[None, :] * rank + depth[:, None],
            mask=column_mask[None, :] & depth_mask[:, None],
            other=0.0,
        )
        result = tl.dot(low.to(b_part.dtype), b_part, result, input_precision="ieee")
    target = y + row[:, None] * y_row + column[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    result = tl.load(target, mask=mask, other=0.0).to(tl.float32) + scale * result
    tl.store(target, result.to(y.dtype.element_ty), mask=mask)
