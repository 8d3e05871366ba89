"""Products with the same tile for any number of rows, for ``model.exact`` on a GPU.

A program has a tile of rows and columns and walks all inputs in their order; sums are fp32. The tile depends
on the types alone, and kernels are not specialised for the number of rows, so a row's result depends on that
row and the weight (as in vLLM's batch invariance; cuBLAS chooses its kernel, and with it the order of the
sum, by the number of rows). Twin: ``model.ops.linear``.

T rows, K inputs, N outputs.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# A kernel is no Python function: its types are Triton's.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # of a tile
COLUMNS = 64
DEPTHS = {2: 64, 4: 16}  # inputs that a program loads at once, by the bytes of an element
WARPS = 4


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    scale: float = 1.0,
) -> Tensor:
    """Compute (x weight^T + bias) * scale of x [T, K], weight [N, K]. The sum is rounded to ``out_dtype``
    (None: x's), and the scaled sum once more."""
    out = x.new_empty(len(x), len(weight), dtype=out_dtype or x.dtype)
    _multiply(x, weight, bias, out, scale=scale, adds=False)
    return out


def add_nt(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Add x weight^T to y [T, N] in place, and return y. The sum is rounded once."""
    _multiply(x, weight, None, y, scale=1.0, adds=True)
    return y


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Add scale * x a^T b^T to y in place, in two launches, and return y."""
    return add_nt(y, linear(x, a, scale=scale), b)


def _multiply(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, scale: float, adds: bool
) -> None:
    """Write (x weight^T + bias) * scale to ``out``; with ``adds``, add it to ``out``."""
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1, "rows with a contiguous last dimension"
    (rows, inputs), columns = x.shape, len(weight)
    depth = DEPTHS[x.element_size()]
    if rows and columns:
        # neighbouring programs have the same columns, so that their weights are read from memory once
        _product_kernel[(triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))](
            x, weight, out if bias is None else bias, out, rows, columns, inputs, x.stride(0),
            weight.stride(0), out.stride(0), scale, BIAS=bias is not None, ADD=adds,
            EVEN=inputs % depth == 0, M=ROWS, N=COLUMNS, D=depth, num_warps=WARPS, num_stages=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "x_row", "out_row", "scale"])
def _product_kernel(
    x, weight, bias, out, rows, columns, inputs, x_row, w_row, out_row, scale,
    BIAS: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    first_row, first_column = tl.program_id(0).to(tl.int64) * M, tl.program_id(1).to(tl.int64) * N
    row, column, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    row_mask, column_mask = first_row + row < rows, first_column + column < columns
    left_at = x + first_row * x_row + row[:, None] * x_row + depth[None, :]
    right_at = weight + first_column * w_row + column[None, :] * w_row + depth[:, None]
    result = tl.zeros([M, N], tl.float32)
    for start in range(0, inputs, D):
        if EVEN:
            x_part = tl.load(left_at + start, mask=row_mask[:, None], other=0.0)
            w_part = tl.load(right_at + start, mask=column_mask[None, :], other=0.0)
        else:
            depth_mask = start + depth < inputs
            x_part = tl.load(left_at + start, mask=row_mask[:, None] & depth_mask[None, :], other=0.0)
            w_part = tl.load(right_at + start, mask=column_mask[None, :] & depth_mask[:, None], other=0.0)
        result = tl.dot(x_part, w_part.to(x_part.dtype), result, input_precision="ieee")
    if BIAS:
        result += tl.load(bias + first_column + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    target = out + first_row * out_row + first_column + row[:, None] * out_row + column[None, :]
    mask = row_mask[:, None] & column_mask[None, :]
    if ADD:
        result += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    result = result.to(out.dtype.element_ty).to(tl.float32) * scale
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)
