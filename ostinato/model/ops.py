"""The arithmetic of the decoder as values: a set of plain functions, an argument of ``forward``.

``TORCH_OPS`` is the readable set, correct on every device and under autograd. Faster sets have the same
signatures and are tested against it: ``model/native`` has one for inference, and one for training that
replaces only ``gemm``, the matrix products inside our own autograd functions.
Inputs may be strided views whose last dimension is contiguous. ``linear``, ``experts`` and ``gemm`` take
quantised weights too (``weights.Quantised``).

T rows, K inputs, N outputs, r rank, H heads, D head dim, F width of an MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.model.attention import Attend
from ostinato.model.elementwise import add_rms_norm, gelu_mul, rms_norm, rope, silu_mul
from ostinato.model.gemm import Gemm
from ostinato.model.moe import experts, route
from ostinato.model.packed import PackedAttention
from ostinato.model.weights import Block, Quantised, Weight
from ostinato.types import Segment

T = TypeVar("T")


def return_unchanged(value: T) -> T:
    """Return ``value``: the identity."""
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One implementation of the decoder's arithmetic. Each field is documented at its function below."""

    linear: Callable[..., Tensor]  # (x [T, K], weight [N, K], bias=None, out_dtype=None) -> [T, N]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # (x [..., K], weight [K], eps) -> [..., K]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]  # (x [T, H, D], cos [T, D], sin [T, D]) -> [T, H, D]
    silu_mul: Callable[[Tensor], Tensor]  # gate_up [T, 2F] -> [T, F]
    add_lora: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]  # (y, x, a, b, scale) -> y + update
    route: Callable[..., tuple[Tensor, Tensor, Tensor]]  # (logits [T, E], moe, bias, routing): see moe.route
    experts: Callable[..., Tensor]  # (x [T, D], ids, weights [T, K], gate_up, down, lora): see moe.experts
    gemm: Gemm  # under autograd; ``linear`` is the product outside of it
    gelu_mul: Callable[[Tensor], Tensor] = gelu_mul  # the same with another gate
    # additional steps of one of several ranks (``parallel``); identities on a single rank
    embed: Callable[[Tensor, Tensor], Tensor] = F.embedding  # (tokens [T], weight [V, D]) -> own rows
    enter: Callable[[Tensor], Tensor] = (
        return_unchanged  # own rows -> all rows, for a linear map with cut outputs
    )
    leave: Callable[[Tensor], Tensor] = (
        return_unchanged  # partial sums of a map with cut inputs -> own rows of the sum
    )
    gather: Callable[[Block], Block] = (
        return_unchanged  # a layer whose weights are sharded -> the whole layer
    )
    # for the trainer's forward
    attention: Callable[[tuple[Segment, ...]], Attend] = PackedAttention  # for the rows of a microbatch
    # (logits [n, V] fp32, temperature, targets [n]) -> [n] log-probabilities; None: those of torch's softmax
    score: Callable[[Tensor, float, Tensor], Tensor] | None = None
    # (logits [n, V] fp32, targets [n]) -> [n, 2] log-probability and entropy, with slopes left in the logits;
    # None: by torch (``algo.logprobs``)
    head: Callable[[Tensor, Tensor], Tensor] | None = None


def linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Compute x weight^T + bias in x's type or in ``out_dtype``. Operands of fewer bits are widened first,
    except on a GPU, where products of 16 bits with sums in fp32 are as exact.

    For a quantised weight products, sums, scale and bias are fp32, and the result is rounded once.
    """
    if isinstance(weight, Quantised):
        y = weight.product(x)
        return (y if bias is None else y + bias.float()).to(out_dtype or x.dtype)
    dtype = out_dtype or x.dtype
    if can_sum_wide(x, weight, dtype):
        y = torch.mm(x, weight.T, out_dtype=dtype)
        return y if bias is None else y + bias.to(dtype)
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def can_sum_wide(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether torch multiplies bf16 without widening it and returns fp32: on a GPU, without
    autograd."""
    is_bf16 = x.dtype == weight.dtype == torch.bfloat16 and dtype == torch.float32
    needs_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return is_bf16 and x.is_cuda and x.dim() == 2 and not needs_gradient


def product(x: Tensor, weight: Weight) -> Tensor:
    """Compute x [M, N] weight [N, K] -> [M, K] in x's type."""
    if isinstance(weight, Quantised):
        return weight.transposed_product(x).to(x.dtype)
    return torch.mm(x, weight.to(x.dtype))


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute y + scale * x a^T b^T: a linear map with its low-rank adapter (arXiv 2106.09685 section 4.1).

    x [T, K], a [r, K], b [N, r], y [T, N]. Outside of autograd an implementation may overwrite y.
    """
    return y + F.linear(F.linear(x, a) * scale, b)


TORCH_OPS = Ops(
    linear=linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope=rope,
    silu_mul=silu_mul,
    add_lora=add_lora,
    route=route,
    experts=experts,
    gemm=Gemm(nt=linear, nn=product),
)
