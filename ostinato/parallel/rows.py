"""The arithmetic of a rank that trains a part of a model: what it gathers, cuts and sums over the others.

    rows of a microbatch   cut over c, then over t:   tokens, positions [T / c]    residual stream [T / (c t)]
    enter                  own rows -> all of the context slice, [T / c]           before what has cut outputs
    leave                  partial sums [T / c] -> own rows of the sum             after what has cut inputs
    Ulysses                [T / c, H] -> [T, H / c] around attention               so attention sees all rows

Everything else in a layer works row by row. Since every row belongs to one rank, gradients of what several
ranks keep alike are partial sums everywhere; adding them up over these ranks is the one rule there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.model.attention import Attend
from ostinato.model.decoder import Decoder
from ostinato.model.ops import Ops
from ostinato.model.weights import Moe
from ostinato.parallel.collectives import Collectives
from ostinato.parallel.fsdp import Pieces

Experts = Callable[..., Tensor]


def number_experts(decoder: Decoder, slots: Tensor | None) -> None:
    """Set ``slots`` in every MoE layer of a decoder to its row of ``slots`` [L_moe, E] of the whole model
    (``placement.number_slots``); None means contiguous experts, whose number is their place."""
    moe = decoder.config.moe
    if moe is None:
        return
    for layer, block in zip(decoder.share.layers, decoder.blocks, strict=True):
        if isinstance(block.mlp, Moe):
            block.mlp.slots = None if slots is None else slots[moe.layers.index(layer)].to(decoder.device)


def sequence_ops(
    ops: Ops, links: Collectives, *, rows: Experts | None = None, pieces: Pieces | None = None
) -> Ops:
    """``ops`` for training: tensor with sequence parallelism (arXiv 2205.05198 section 4.2).

    ``rows``: the experts of a rank that keeps some (``experts.ExpertParallel``). ``pieces``: weights that lie
    in pieces on data ranks.
    """
    return replace(
        ops,
        embed=VocabularyRows(links),
        enter=lambda x: links.all_gather(x, "t"),
        leave=lambda x: links.reduce_scatter(x, "t"),
        experts=ops.experts if rows is None else rows,
        gather=ops.gather if pieces is None else pieces,
    )


class VocabularyRows:
    """``Ops.embed`` where every tensor rank keeps a part of the vocabulary."""

    def __init__(self, links: Collectives) -> None:
        self._links = links

    def __call__(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Embed tokens [T] with weight [V / t, D], and return own rows [T / t, D]."""
        if self._links.size("t") == 1:
            return F.embedding(tokens, weight)
        local_ids = tokens - self._links.place("t") * len(weight)
        is_remote = (local_ids < 0) | (local_ids >= len(weight))
        vectors = F.embedding(local_ids.masked_fill(is_remote, 0), weight)
        vectors = vectors.masked_fill(is_remote.unsqueeze(-1), 0)
        return self._links.reduce_scatter(vectors, "t")


class Ulysses:
    """``Attend`` over rows that are cut: all rows of a part of the heads, while attention runs.

    ``inner`` gets all T rows and H / c heads, as if there were no others (arXiv 2309.14509 section 3).
    """

    def __init__(self, inner: Attend, links: Collectives) -> None:
        self._inner, self._links = inner, links

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Attention [T / c, H, Dv] of q [T / c, H, Dk], k [T / c, G, Dk] and v [T / c, G, Dv] over all
        rows."""
        parts = self._links.size("c")
        if parts == 1:
            return self._inner(layer, q, k, v, scale, *([] if window is None else [window]))
        rows, widths = len(q), (q.shape[1] * q.shape[2], k.shape[1] * k.shape[2], v.shape[1] * v.shape[2])
        # one exchange for all three: the heads of q, k and v for a rank are concatenated
        by_rank = torch.cat(
            [
                x.flatten(1).unflatten(1, (parts, size // parts))
                for x, size in zip((q, k, v), widths, strict=True)
            ],
            dim=-1,
        ).transpose(0, 1)
        counts = [rows] * parts
        all_rows = self._links.all_to_all(by_rank.reshape(parts * rows, -1), counts, counts, "c")
        all_q, all_k, all_v = all_rows.split([size // parts for size in widths], dim=-1)
        out = self._inner(
            layer,
            all_q.unflatten(-1, (-1, q.shape[2])),
            all_k.unflatten(-1, (-1, k.shape[2])),
            all_v.unflatten(-1, (-1, v.shape[2])),
            scale,
            *([] if window is None else [window]),
        )
        own_rows = self._links.all_to_all(out.flatten(1).contiguous(), counts, counts, "c")
        heads = own_rows.unflatten(0, (parts, rows)).transpose(0, 1)
        return heads.reshape(rows, q.shape[1], v.shape[2])
