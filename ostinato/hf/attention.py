"""Attention over packed rows inside a model of ``transformers``: our ``Attend`` as its attention function.

The model passes the options of its family: a window, a soft cap of the scores, sinks. Layers with any of them
are computed from all pairs of rows; others by the kernels of ``model.packed``.

T rows, H query heads, Hkv key heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ostinato.model.packed import PackedAttention, attend_all_pairs

NAME = "ostinato_packed"  # of the function in transformers' registry


def compute_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    attend: PackedAttention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **other_options: Any,
) -> tuple[Tensor, None]:
    """Attend from query [1, H, T, D] to key and value [1, Hkv, T, D] as transformers calls it; return ([1,
    T, H, D], None). ``attention_mask`` is not used, since ``attend`` has the segments."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if softcap is None and s_aux is None:
        return attend(0, q, k, v, scale, sliding_window).unsqueeze(0), None
    out = attend_all_pairs(attend.segments, q, k, v, scale, sliding_window, softcap, s_aux)
    return out.unsqueeze(0), None
