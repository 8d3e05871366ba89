"""The trainer's attention by the sampler's kernel, on rows in blocks, for ``model.exact`` on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ostinato.model.exact import BLOCK, Blocks
from ostinato.types import Segment

Function = Callable[..., Any]


class BlockAttention:
    """Compute (q, k, v, scale) -> (out, log-sum-exp) for the rows of a microbatch (``PackedAttention``). The
    first call allocates the memory of a layer, which all later calls overwrite."""

    def __init__(
        self, segments: tuple[Segment, ...], write_cache: Function, paged_attention: Function
    ) -> None:
        self._write_cache, self._compute_attention, self._blocks = (
            write_cache,
            paged_attention,
            Blocks(segments),
        )
        self._memory: tuple[Tensor, Tensor] | None = None  # of a layer; all layers use it

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        blocks = self._blocks
        if self._memory is None:
            num_packed, (heads, width) = 2 if k.dtype == torch.bfloat16 else 1, k.shape[1:]
            shape = blocks.count, heads
            self._memory = (
                k.new_zeros(*shape, width // num_packed, BLOCK, num_packed),
                v.new_zeros(*shape, BLOCK, v.shape[2]),
            )
        keys, values = self._memory
        k, v = (x.index_select(0, blocks.writers) for x in (k, v))
        self._write_cache(k, v, blocks.slots, keys, values)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        out = self._compute_attention(
            q, keys, values, blocks.tables, blocks.sequence, blocks.lengths, scale, lse
        )
        return out, lse
