"""Attention over packed rows inside a model of ``transformers``: our ``Attend`` as its attention function.

The model hands down what its family does besides: a window, a soft cap of the scores, sinks. Layers with any
of them are computed from all pairs of rows; the others by the kernels of ``model.packed``.

T rows, H query heads, Hkv key heads, D head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ostinato.model.packed import PackedAttention
from ostinato.types import Segment

NAME = "ostinato_packed"  # of the function among those of transformers


class PackedRows(PackedAttention):
    """``PackedAttention`` that knows its segments, for models that run them alone, or need who sees whom."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        super().__init__(segments)
        self.segments = segments
        self.longest = max(s.stop - s.start + s.prefix_stop - s.prefix_start for s in segments)
        self._visible: dict[int, Tensor] = {}

    def visible(self, window: int, device: torch.device) -> Tensor:
        """[T, T] bool: the keys that each row sees, none ``window`` or more places before it."""
        if window not in self._visible:
            places = torch.zeros(self.num_rows, dtype=torch.long)
            seen = torch.zeros(self.num_rows, self.num_rows, dtype=torch.bool)
            for one in self.segments:
                own, rows = one.stop - one.start, slice(one.start, one.stop)
                places[rows] = torch.arange(own) + one.prefix_stop - one.prefix_start
                seen[rows, rows] = torch.ones(own, own, dtype=torch.bool).tril()
                seen[rows, one.prefix_start : one.prefix_stop] = True
            near = places[:, None] - places[None, :] < window
            self._visible[window] = (seen & near).to(device)
        return self._visible[window]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    attend: PackedRows,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D], as transformers calls it."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    window = sliding_window if sliding_window is not None and sliding_window < attend.longest else None
    if window is None and softcap is None and s_aux is None:
        return attend(0, q, k, v, scale).unsqueeze(0), None
    seen = attend.visible(window or attend.longest, q.device)
    return _all_pairs(q, k, v, scale, seen, softcap, s_aux).unsqueeze(0), None


def _all_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    seen: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [T, H, D], k, v [T, Hkv, D], seen [T, T], sinks [H] -> [T, H, D]: softmax in fp32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k).to(wide) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:  # a key whose value is 0
        column = sinks.to(wide).reshape(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, column), dim=-1)
    shares = scores.softmax(dim=-1)[..., : k.shape[0]].to(v.dtype)
    return torch.einsum("hts,shd->thd", shares, v)
