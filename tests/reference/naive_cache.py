"""Decoding with keys and values kept whole, for comparisons with caches in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from ostinato.model.attention import compute_attention


class NaiveCache:
    """One sequence decoded piece by piece: earlier keys and values are kept and seen by later rows."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        if layer in self.keys:
            k = torch.cat((self.keys[layer], k))
            v = torch.cat((self.values[layer], v))
        self.keys[layer], self.values[layer] = k, v
        rows, total = q.shape[0], k.shape[0]
        mask = torch.ones(rows, total, dtype=torch.bool, device=q.device).tril(total - rows)
        if window is not None:
            mask = mask.triu(total - rows - window + 1)
        return compute_attention(q, k, v, scale, mask=mask)
