"""Matrix products as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


def add_nt(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Add x w^T to y in place; return y."""
    return y.add_(F.linear(x, w))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """Matrix products without autograd, for our own autograd functions."""

    nt: Callable[..., Tensor]  # (x [M, K], w [N, K], bias=None, out_dtype=None) -> x w^T + bias
    nn: Callable[..., Tensor]  # (x [M, N], w [N, K]) -> x w
    thin: Callable[[Tensor, Tensor], Tensor] = F.linear  # nt with the few rows of an adapter's A
    # (y [M, N], x, w) -> y + x w^T; y is overwritten
    add: Callable[[Tensor, Tensor, Tensor], Tensor] = add_nt
