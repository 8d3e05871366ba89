"""The arithmetic of an NVIDIA card: kernels in Triton, with the signatures of ``model/ops.py`` and engine.

Imported where a device is CUDA, since Triton comes with torch's CUDA wheels alone. Every kernel has its twin
in torch, and tests run both: in Triton's interpreter without a card (float32), on a card in its own types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.model.cuda.elementwise import add_rms_norm, rms_norm, rope, silu_mul
from ostinato.model.cuda.graphs import Graph
from ostinato.model.cuda.mixture import experts, route
from ostinato.model.cuda.scoring import score_
from ostinato.model.cuda.varlen import VarlenAttention
from ostinato.model.ops import TORCH_OPS, Ops


def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """y + scale * x a^T b^T in two launches; outside of autograd y is overwritten."""
    low = F.linear(x, a)
    if torch.is_grad_enabled():
        return torch.addmm(y, low.to(y.dtype), b.t().to(y.dtype), alpha=scale)
    return y.addmm_(low.to(y.dtype), b.t().to(y.dtype), alpha=scale)


def add_product(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """y += x w^T in one launch."""
    return y.addmm_(x, w.t())


CUDA_OPS = replace(
    TORCH_OPS,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope=rope,
    silu_mul=silu_mul,
    add_lora=add_lora,
    route=route,
    experts=experts,
    gemm=replace(TORCH_OPS.gemm, add=add_product),
    attention=VarlenAttention,
    head=score_,
)


@dataclass(frozen=True, slots=True)
class CudaKernels:
    """What an engine is given to run on these kernels; as on a CPU on those of ``model.native.Kernels``.
    ``graph`` makes what small passes are captured in; None: they are launched kernel by kernel."""

    ops: Ops = CUDA_OPS
    graph: Callable[[], Graph] | None = None
