"""The mixture of experts by native kernels: tokens sorted by expert, one product per expert, summed in top-k
order.

The twin is ``model.moe.experts``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ostinato.model.moe import ExpertLora

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
Kernel = Callable[..., None]


class _Sorted:
    """The rows of a batch, sorted by expert, and the ways there and back."""

    def __init__(
        self, functions: Mapping[str, Kernel], ids: Tensor, weights: Tensor, num_experts: int
    ) -> None:
        self._functions = functions
        self._num_tokens, self._top_k = ids.shape
        self._weights = weights
        self._place = torch.empty(ids.shape, dtype=torch.int64)
        self._ends = torch.empty(num_experts, dtype=torch.int32)
        functions["moe_sort"](
            ids.data_ptr(), self._place.data_ptr(), self._ends.data_ptr(), *ids.shape, num_experts
        )

    def gather(self, x: Tensor) -> Tensor:
        """x [T, N] -> [T * K, N], a copy of each token for each of its experts."""
        rows = x.new_empty(self._num_tokens * self._top_k, x.shape[1])
        row_bytes = x.shape[1] * x.element_size()
        pointers = x.data_ptr(), self._place.data_ptr(), rows.data_ptr()
        self._functions["moe_gather"](*pointers, self._num_tokens, self._top_k, row_bytes)
        return rows

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Rows of expert e times weight[e]^T, weight [E, N, K]."""
        y = rows.new_empty(rows.shape[0], weight.shape[1])
        pointers = rows.data_ptr(), weight.data_ptr(), y.data_ptr(), self._ends.data_ptr()
        self._functions[f"grouped_nt_{_SUFFIX[rows.dtype]}"](*pointers, *weight.shape)
        return y

    def combine(self, rows: Tensor) -> Tensor:
        """sum_k weights[t, k] * (row of token t and its k-th expert) -> [T, N]."""
        y = rows.new_empty(self._num_tokens, rows.shape[1])
        pointers = rows.data_ptr(), self._place.data_ptr(), self._weights.data_ptr(), y.data_ptr()
        self._functions[f"moe_combine_{_SUFFIX[rows.dtype]}"](
            *pointers, self._num_tokens, self._top_k, rows.shape[1]
        )
        return y


def native_experts(
    functions: Mapping[str, Kernel], linear: Callable[..., Tensor], silu_mul: Callable[[Tensor], Tensor]
) -> Callable[..., Tensor]:
    """``Ops.experts`` from the compiled functions."""

    def experts(
        x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, lora: ExpertLora | None = None
    ) -> Tensor:
        x = x.contiguous()
        by_expert = _Sorted(
            functions, ids.long().contiguous(), weights.float().contiguous(), gate_up.shape[0]
        )
        rows = by_expert.gather(x)
        hidden = by_expert.linear(rows, gate_up)
        if lora is not None:
            shared = lora.gate_up_a.dim() == 2
            low = (
                by_expert.gather(linear(x, lora.gate_up_a))
                if shared
                else by_expert.linear(rows, lora.gate_up_a)
            )
            hidden += by_expert.linear(low.mul_(lora.scale), lora.gate_up_b)
        act = silu_mul(hidden)
        out = by_expert.combine(by_expert.linear(act, down))
        if lora is None:
            return out
        low = by_expert.linear(act, lora.down_a).mul_(lora.scale)
        if lora.down_b.dim() == 2:  # a shared B commutes with the weighted sum
            return out.add_(linear(by_expert.combine(low), lora.down_b))
        return out.add_(by_expert.combine(by_expert.linear(low, lora.down_b)))

    return experts
