"""Attention over packed rows and routed experts, straight from their definitions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.model.attention import compute_attention
from ostinato.model.moe import ExpertLora
from ostinato.types import Segment


class DenseMaskAttention:
    """The slow obvious twin for packed rows: a full [T, T] mask written out from the segments."""

    def __init__(self, segments: Sequence[Segment], device: torch.device | str = "cpu") -> None:
        self.mask = segment_mask(segments).to(device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return compute_attention(q, k, v, scale, mask=self.mask)


def segment_mask(segments: Sequence[Segment]) -> Tensor:
    """[T, T] bool, True where the row may see the column."""
    total = max((s.stop for s in segments), default=0)
    mask = torch.zeros(total, total, dtype=torch.bool)
    for s in segments:
        rows = s.stop - s.start
        mask[s.start : s.stop, s.start : s.stop] = torch.ones(rows, rows, dtype=torch.bool).tril()
        mask[s.start : s.stop, s.prefix_start : s.prefix_stop] = True
    return mask


def experts_loop(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, lora: ExpertLora | None = None
) -> Tensor:
    """The twin of ``experts``: one token and one expert at a time, straight from the definition."""

    def pick(factor: Tensor, expert: int) -> Tensor:
        return factor[expert] if factor.dim() == 3 else factor

    rows = []
    for t in range(x.shape[0]):
        total = torch.zeros_like(x[t])
        for k, expert in enumerate(ids[t].tolist()):
            w1, w2 = gate_up[expert], down[expert]
            if lora is not None:
                w1 = w1 + lora.scale * pick(lora.gate_up_b, expert) @ pick(lora.gate_up_a, expert)
                w2 = w2 + lora.scale * pick(lora.down_b, expert) @ pick(lora.down_a, expert)
            gate, up = (w1 @ x[t]).chunk(2)
            total = total + weights[t, k].to(x.dtype) * (w2 @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)
