"""Matrix products as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """Matrix products without autograd: what our own autograd functions are made of."""

    nt: Callable[..., Tensor]  # (x [M, K], w [N, K], bias=None, out_dtype=None) -> x w^T + bias
    nn: Callable[[Tensor, Tensor], Tensor]  # (x [M, N], w [N, K]) -> x w
