"""The arithmetic of ranks that all hold the same rows and each a part of the weights: a sampler's.

A pass of a sampler may have one row, which nothing could be cut from; so rows are not cut between layers as
in training, and sums of parts are added up for all ranks (Megatron-LM, arXiv 1909.08053 section 3)::

    embed    each rank looks up its rows of the vocabulary, the others are zero        sum over t
    leave    what attention and MLP of a rank's heads and widths give                  sum over t
    experts  each rank's experts, or its part of their width                           sum over e, and over t

A sum is an all-gather of the parts and an addition in the order of ranks. A ring adds in an order that
depends on where in the buffer a number lies, so a row would change with the batch that it is in; here it does
not, bit for bit, as with one rank. It also takes one step instead of 2 (n - 1), which is what counts where
rows are few; it sends n / 2 times as many bytes.

T rows, D hidden size, K experts per token, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.model.config import ModelConfig
from ostinato.model.moe import ExpertLora
from ostinato.model.ops import Ops
from ostinato.model.weights import Weight
from ostinato.parallel.layout import Layout
from ostinato.parallel.links import Links


def check_layout(layout: Layout, config: ModelConfig) -> None:
    """Raises ValueError, in one sentence, for a layout that ranks with the same rows cannot have."""
    layout.refuse(config)
    for letter, size in (("p", layout.pipeline), ("c", layout.context), ("f", layout.shard)):
        if size > 1:
            raise ValueError(
                f"engine.layout is {str(layout)!r} with {letter}{size}, but the ranks of this sampler share "
                "all rows of a pass; use t, and e and x for experts (d only with them)"
            )
    if layout.data > 1 and layout.expert_replicas > 1:
        raise ValueError(
            f"engine.layout is {str(layout)!r}, where {layout.data} ranks would do the same work; cut "
            "experts over them with e, or use cluster.samplers for more samplers"
        )


def replicated_ops(ops: Ops, links: Links, layout: Layout) -> Ops:
    """``ops``, as one of several ranks with the same rows needs them. No gradient goes through them."""
    experts = ops.experts
    if layout.expert * layout.expert_tensor > 1:
        experts = OwnExperts(ops.experts, links, layout)
    if layout.tensor == 1:
        return replace(ops, experts=experts)
    embed = VocabularyPart(links)
    return replace(ops, embed=embed, leave=lambda x: added_up(links, x, "t"), experts=experts)


def added_up(links: Links, x: Tensor, axis: str) -> Tensor:
    """The sum of each rank's x [T, D] over an axis, on all of them: the same bits on all, and of a row the
    same bits in any batch. In fp32 at least, and rounded once."""
    ranks = links.size(axis)
    if ranks == 1:
        return x
    first, *others = links.gathered(x, axis).unflatten(0, (ranks, -1)).unbind()
    total = first.to(torch.promote_types(x.dtype, torch.float32))
    for part in others:
        total = total + part  # widened on the way
    return total.to(x.dtype)


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """``Ops.embed`` of a rank that keeps a part of the vocabulary."""

    links: Links

    def __call__(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """tokens [T], weight [V / t, D] -> [T, D], as one rank would look them up, bit for bit."""
        local = tokens - self.links.place("t") * len(weight)
        elsewhere = (local < 0) | (local >= len(weight))
        rows = F.embedding(local.masked_fill(elsewhere, 0), weight)
        return added_up(self.links, rows.masked_fill(elsewhere.unsqueeze(-1), 0), "t")


@dataclass(frozen=True, slots=True)
class OwnExperts:
    """``Ops.experts`` of a rank that keeps some of the experts, or a part of their width.

    ``base`` computes the mixture of the experts that are here: a row that goes to several of them is given
    to it as several tokens with one expert each, so it may be any set of kernels.
    """

    base: Callable[..., Tensor]
    links: Links
    layout: Layout

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Weight,
        down: Weight,
        lora: ExpertLora | None = None,
    ) -> Tensor:
        """x [T, D], ids and weights [T, K] of all experts -> [T, D], on all ranks."""
        if self.layout.expert == 1:
            out = self.base(x, ids, weights, gate_up, down, lora)
        else:
            out = self._own(x, ids, weights, gate_up, down, lora)
        out = added_up(self.links, out, "e")
        return added_up(self.links, out, "t") if self.layout.expert_tensor > 1 else out

    def _own(
        self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight, lora: ExpertLora | None
    ) -> Tensor:
        """The part of the mixture that the experts here add."""
        kept, K = gate_up.shape[0], ids.shape[1]
        local = (ids - kept * self.links.place("e")).flatten()
        mine = ((local >= 0) & (local < kept)).nonzero().squeeze(1)  # [S], places in T * K
        out = x.new_zeros(ids.numel(), x.shape[1])
        if len(mine):
            one = (local[mine].unsqueeze(1), weights.flatten()[mine].unsqueeze(1))
            out[mine] = self.base(x[mine // K], *one, gate_up, down, lora)
        return _sum_of_slots(out.unflatten(0, (-1, K)))


def _sum_of_slots(parts: Tensor) -> Tensor:
    """[T, K, D] -> [T, D], in the order of slots."""
    total = parts[:, 0].to(torch.promote_types(parts.dtype, torch.float32))
    for slot in range(1, parts.shape[1]):
        total = total + parts[:, slot]
    return total.to(parts.dtype)


__all__ = ["OwnExperts", "VocabularyPart", "added_up", "check_layout", "replicated_ops"]
