"""Choose experts and compute the mixture of experts by native kernels.

Tokens are sorted by expert, each expert is a product over its own rows, and results are summed in top-k
order. The twins are ``model.moe.route`` and ``model.moe.experts``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ostinato.model.config import MoEConfig, Scoring
from ostinato.model.moe import ExpertLora
from ostinato.model.moe import route as torch_route
from ostinato.model.native.matrix import Matrix, make_matrix
from ostinato.model.weights import Quantised, Weight
from ostinato.types import NO_EXPERT

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
Kernel = Callable[..., int]


class Experts(ctypes.Structure):
    """The struct of moe.h: sizes, and pointers to tensors that the caller keeps alive."""

    _fields_ = [
        *[(name, Matrix) for name in ("gate_up", "down")],
        *[(name, ctypes.c_void_p) for name in ("gate_up_a", "gate_up_b", "down_a", "down_b")],
        *[(name, ctypes.c_long) for name in ("count", "width", "hidden", "rank_up", "rank_down", "shared")],
        ("scale", ctypes.c_double),
    ]


def make_experts_struct(
    gate_up: Weight, down: Weight, lora: ExpertLora | None, dtype: torch.dtype
) -> Experts:
    """Fill the struct for gate_up [E, 2F, D] and down [E, D, F], for rows of ``dtype``. All tensors must be
    contiguous, and kept alive by the caller."""
    num_experts, hidden, width = down.shape
    gate_up_struct, down_struct = make_matrix(gate_up, dtype), make_matrix(down, dtype)
    experts = Experts(
        gate_up=gate_up_struct, down=down_struct, count=num_experts, width=width, hidden=hidden, scale=1.0
    )
    if lora is not None:
        experts.gate_up_a, experts.gate_up_b = lora.gate_up_a.data_ptr(), lora.gate_up_b.data_ptr()
        experts.down_a, experts.down_b = lora.down_a.data_ptr(), lora.down_b.data_ptr()
        experts.rank_up, experts.rank_down = lora.gate_up_a.shape[-2], lora.down_a.shape[-2]
        experts.shared, experts.scale = lora.gate_up_a.dim() == 2, lora.scale
    return experts


def make_experts(functions: Mapping[str, Kernel]) -> Callable[..., Tensor]:
    """Make ``Ops.experts`` from the compiled functions."""
    kernels = {dtype: functions[f"experts_{suffix}"] for dtype, suffix in _SUFFIX.items()}

    def experts(
        x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight, lora: ExpertLora | None = None
    ) -> Tensor:
        x, ids, weights = x.contiguous(), ids.int().contiguous(), weights.float().contiguous()
        gate_up, down = (
            weight if isinstance(weight, Quantised) else weight.contiguous() for weight in (gate_up, down)
        )
        if lora is not None:
            lora = ExpertLora(*(factor.contiguous() for factor in lora[:4]), scale=lora.scale)
        kernel, y = kernels[x.dtype], torch.empty_like(x)
        struct = make_experts_struct(gate_up, down, lora, x.dtype)
        pointers = [tensor.data_ptr() for tensor in (x, ids, weights, y)]
        num_bytes = kernel(ctypes.byref(struct), *pointers, *ids.shape, None)
        workspace = torch.empty(num_bytes, dtype=torch.uint8)
        kernel(ctypes.byref(struct), *pointers, *ids.shape, workspace.data_ptr())
        return y

    return experts


def make_route(functions: Mapping[str, Kernel]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """Make ``Ops.route``: native for a softmax without groups and correction bias, torch's for other
    routers."""

    def route(
        logits: Tensor, moe: MoEConfig, bias: Tensor | None = None, routing: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        is_native = moe.scoring == Scoring.SOFTMAX and moe.num_groups == 1 and bias is None
        if not is_native:
            return torch_route(logits, moe, bias, routing)
        logits = logits.contiguous()
        rows, experts = logits.shape
        ids = torch.empty(rows, moe.top_k, dtype=torch.int32)
        weights = torch.empty(rows, moe.top_k)
        pointers = ids.data_ptr(), weights.data_ptr(), rows, experts, moe.top_k, moe.norm_topk, moe.scaling
        functions["route_rows"](logits.data_ptr(), None, *pointers)
        if routing is None:
            return ids, weights, ids
        native = ids.clone()
        replayed = torch.where(routing[:, :1].int() == NO_EXPERT, native, routing.int())
        functions["route_rows"](logits.data_ptr(), replayed.data_ptr(), *pointers)
        return ids, weights, native

    return route
