"""The memory-bound functions of a decoder, with backwards that save little.

Plain autograd through these formulas saves several copies of every activation, widened to fp32. Each
backward here saves only the input and recomputes the rest.

T rows, K width, H heads, D head dim, F width of an MLP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) * weight over the last dimension: x [..., K], weight [K].

    The quotient is taken in fp32 and rounded before the scaling, as transformers does. RMSNorm, arXiv
    1910.07467 section 3.
    """
    if torch.is_grad_enabled():
        return _RmsNorm.apply(x, weight, eps)  # type: ignore[return-value]
    return (x * _compute_inverse_rms(x, eps)).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute (rms_norm(x + residual), x + residual)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of every head: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).

    x [T, H, D]; cos, sin [T, D], equal in both halves. RoFormer, arXiv 2104.09864 section 3.4.
    """
    if torch.is_grad_enabled():
        return _Rope.apply(x, cos, sin)  # type: ignore[return-value]
    return _rotate(x, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up of the two halves: [T, 2F] -> [T, F]. SwiGLU, arXiv 2002.05202."""
    if torch.is_grad_enabled():
        return _SiluMul.apply(gate_up)  # type: ignore[return-value]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """Compute gelu(gate) * up of the two halves, gelu by tanh: [T, 2F] -> [T, F]. GEGLU, arXiv 2002.05202."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def _compute_inverse_rms(x: Tensor, eps: float) -> Tensor:
    wide_x = x if x.dtype == torch.float64 else x.float()
    return (wide_x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(-2) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(-2)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _compute_inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse  # fp32, as inverse is
        grad_weight = (
            (grad * unit).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        )
        grad_unit = grad * weight
        radial = (grad_unit * unit).mean(dim=-1, keepdim=True)  # the part along x, which the norm removes
        return ((grad_unit - unit * radial) * inverse).to(x.dtype), grad_weight, None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None  # the transpose of a rotation is its inverse


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_gate_up
