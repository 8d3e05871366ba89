"""The memory-bound functions of a decoder in Triton, forward and backward, in a launch each.

The twins are in ``model/elementwise.py``, with the same signatures. Everything between a load and a store is
fp32. A row is reduced by a single program in an order that depends on its width alone, and kernels are not
specialised for the number of rows, so the result of a row does not depend on other rows. float64, which only
tests of gradients use, takes the twin.

T rows, K width, H heads, D head dim, F width of an MLP.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# A kernel is no Python function: its types are Triton's.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ostinato.model import elementwise as twin

TILE = 4096  # elements of a program: several rows if they are narrow


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) * weight over the last dimension: x [..., K], weight [K]."""
    if x.dtype == torch.float64:
        return twin.rms_norm(x, weight, eps)
    if torch.is_grad_enabled():
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[return-value]
    return _normalise(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute (rms_norm(x + residual), x + residual), both [T, K]."""
    if x.dtype == torch.float64:
        return twin.add_rms_norm(x, residual, weight, eps)
    if torch.is_grad_enabled():
        return _AddRmsNorm.apply(x, residual, weight, eps)  # type: ignore[return-value]
    return _normalise(x, residual, weight, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of every head: x [T, H, D]; cos, sin [T, D], equal in both halves."""
    if x.dtype == torch.float64:
        return twin.rope(x, cos, sin)
    if torch.is_grad_enabled():
        return _Rope.apply(x, cos, sin)  # type: ignore[return-value]
    return _rotate(x, cos, sin, 1.0)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up of the two halves: [T, 2F] -> [T, F]."""
    if gate_up.dtype == torch.float64:
        return twin.silu_mul(gate_up)
    if torch.is_grad_enabled():
        return _SiluMul.apply(gate_up)  # type: ignore[return-value]
    return _silu_mul(gate_up)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _normalise(x, None, weight, eps)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_x = _normalise_backward(grad, x, weight, ctx.eps, None)
        return grad_x, _compute_weight_gradient(ctx.needs_input_grad[1], grad, x, weight, ctx.eps), None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, total = _normalise(x, residual, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return normed, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_total: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        total, weight = ctx.saved_tensors
        grad_x = _normalise_backward(grad, total, weight, ctx.eps, grad_total)
        return (
            grad_x,
            grad_x,
            _compute_weight_gradient(ctx.needs_input_grad[2], grad, total, weight, ctx.eps),
            None,
        )


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1.0), None, None  # the transpose of a rotation is its inverse


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _silu_mul(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return _silu_mul_backward(grad, gate_up)


def _compute_weight_gradient(
    is_needed: bool, grad: Tensor, x: Tensor, weight: Tensor, eps: float
) -> Tensor | None:
    """Compute the gradient of the norm's weight [K], for full-parameter training only; None if it is not
    needed. It is a sum over rows, by torch."""
    if not is_needed:
        return None
    unit = x.float() * (x.float().square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (grad.float() * unit).flatten(0, -2).sum(0).to(weight.dtype)


def _find_strides(x: Tensor) -> tuple[int, int, int]:
    """Return (heads, stride of the leading dimension, stride of a head) of x [T, K] or [T, H, K]. Row r is at
    (r // heads) * outer + (r % heads) * inner. Nothing is copied: the last dimension must be contiguous."""
    assert x.dim() in (2, 3) and x.stride(-1) == 1, "the last dimension of rows has to be contiguous"
    return (x.shape[1], x.stride(0), x.stride(1)) if x.dim() == 3 else (1, x.stride(0), 0)


def _choose_tile(width: int) -> tuple[int, int, int]:
    """Return (rows of a program, padded width, warps), which depend on the width alone."""
    block = triton.next_power_of_2(width)
    rows = max(1, TILE // block)
    return rows, block, 4 if rows * block <= TILE else 8


def _normalise(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    heads, outer, inner = _find_strides(x)
    count, width = x.numel() // x.shape[-1], x.shape[-1]
    out = x.new_empty(x.shape)
    total = x if residual is None else x.new_empty(x.shape)
    addend = x if residual is None else residual
    rows, block, warps = _choose_tile(width)
    if count:
        _normalise_kernel[(triton.cdiv(count, rows),)](
            x, addend, weight, out, total, outer, inner, *_find_strides(addend)[1:], heads, count, width, eps,
            ADD=residual is not None, ROWS=rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out, total


@triton.jit(do_not_specialize=["count"])
def _normalise_kernel(
    x, residual, weight, out, total, outer, inner, added_outer, added_inner, heads, count, width, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row[:, None] < count) & (column[None, :] < width)
    offset = (row // heads) * outer + (row % heads) * inner
    value = tl.load(x + offset[:, None] + column[None, :], mask=mask, other=0.0)
    place = row[:, None] * width + column[None, :]
    if ADD:
        offset = (row // heads) * added_outer + (row % heads) * added_inner
        addend = tl.load(residual + offset[:, None] + column[None, :], mask=mask, other=0.0)
        value = (value.to(tl.float32) + addend.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + place, value, mask=mask)
    wide = value.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)
    unit = (wide * inverse[:, None]).to(out.dtype.element_ty).to(tl.float32)  # rounded before the scaling
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + place, (unit * scale[None, :]).to(out.dtype.element_ty), mask=mask)


def _normalise_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, grad_total: Tensor | None
) -> Tensor:
    """Compute the gradient of x; with ``grad_total``, the gradient of x + residual, that is added."""
    grad = grad.contiguous()
    direct = grad if grad_total is None else grad_total.contiguous()
    heads, outer, inner = _find_strides(x)
    count, width = x.numel() // x.shape[-1], x.shape[-1]
    out = x.new_empty(x.shape)
    rows, block, warps = _choose_tile(width)
    if count:
        _normalise_backward_kernel[(triton.cdiv(count, rows),)](
            grad, direct, x, weight, out, outer, inner, heads, count, width, eps,
            ADD=grad_total is not None, ROWS=rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return out


@triton.jit
def _normalise_backward_kernel(
    grad, direct, x, weight, out, outer, inner, heads, count, width, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row[:, None] < count) & (column[None, :] < width)
    offset = (row // heads) * outer + (row % heads) * inner
    wide = tl.load(x + offset[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)
    unit = wide * inverse[:, None]
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    place = row[:, None] * width + column[None, :]
    grad_unit = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32) * scale[None, :]
    radial = tl.sum(grad_unit * unit, axis=1) / width  # the part along x, which the norm removes
    result = (grad_unit - unit * radial[:, None]) * inverse[:, None]
    if ADD:
        result += tl.load(direct + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    heads, outer, inner = _find_strides(x)
    count, width = x.numel() // x.shape[-1], x.shape[-1]
    out = x.new_empty(x.shape)
    rows, block, warps = _choose_tile(width)
    if count:
        _rotate_kernel[(triton.cdiv(count, rows),)](
            x, cos, sin, out, outer, inner, cos.stride(0), heads, count, width // 2, sign,
            ROWS=rows, HALF=block // 2, num_warps=warps,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def _rotate_kernel(
    x, cos, sin, out, outer, inner, turn_stride, heads, count, half, sign,
    ROWS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    mask = (row[:, None] < count) & (column[None, :] < half)
    offset = ((row // heads) * outer + (row % heads) * inner)[:, None] + column[None, :]
    angle = (row // heads)[:, None] * turn_stride + column[None, :]
    first_half = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    second_half = tl.load(x + offset + half, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32) * sign
    place = row[:, None] * (2 * half) + column[None, :]
    tl.store(out + place, (first_half * c - second_half * s).to(out.dtype.element_ty), mask=mask)
    tl.store(out + place + half, (second_half * c + first_half * s).to(out.dtype.element_ty), mask=mask)


BLOCK_F = 1024


def _silu_mul(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1, "rows [T, 2F] with a contiguous last dimension"
    out = gate_up.new_empty(rows, width)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK_F))
        _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), width, BLOCK=BLOCK_F)
    return out


@triton.jit
def _silu_mul_kernel(gate_up, out, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


def _silu_mul_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    grad = grad.contiguous()
    out = gate_up.new_empty(gate_up.shape)
    if rows:
        grid = (rows, triton.cdiv(width, BLOCK_F))
        _silu_mul_backward_kernel[grid](grad, gate_up, out, gate_up.stride(0), width, BLOCK=BLOCK_F)
    return out


@triton.jit
def _silu_mul_backward_kernel(grad, gate_up, out, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(gate_up + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + row * width + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = g * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    place = row * (2 * width) + column
    tl.store(out + place, grad_gate.to(out.dtype.element_ty), mask=mask)
    tl.store(out + place + width, (g * gate * sigmoid).to(out.dtype.element_ty), mask=mask)
