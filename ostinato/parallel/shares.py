"""The part of a model, and of a tensor, that each rank of a layout keeps. No torch: a planner counts by
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.model.config import ModelConfig
from ostinato.model.share import Share, Spans, find_spans, is_cut, is_expert
from ostinato.parallel.layout import Layout

Placement = Sequence[Sequence[Sequence[int]]]  # by MoE layer, by expert rank: the ids that it keeps


def shares_of(
    layout: Layout, config: ModelConfig, rank: int, placement: Placement | None = None
) -> tuple[Share, ...]:
    """The shares of a rank, one for each of its chunks of layers, in order of depth.

    ``placement``: which expert rank keeps which experts of a MoE layer, equally many each; None: neighbours
    together. Raises ValueError where the model cannot be cut so.
    """
    layout.refuse(config)
    coords = layout.coords(rank)
    spans = layout.chunk_layers(config.num_layers)
    return tuple(
        Share(
            layers=tuple(spans[chunk]),
            has_embedding=chunk == 0,
            has_head=chunk == layout.chunks - 1,
            tensor=layout.tensor,
            tensor_rank=coords.tensor,
            experts=_kept(layout, config, rank, placement),
            expert_tensor=layout.expert_tensor,
            expert_tensor_rank=coords.tensor if layout.expert_tensor > 1 else 0,
        )
        for chunk in layout.chunks_of(coords.pipeline)
    )


def _kept(
    layout: Layout, config: ModelConfig, rank: int, placement: Placement | None
) -> tuple[tuple[int, ...], ...] | None:
    """Ids of the experts of a rank, by MoE layer; None where it keeps all. Raises ValueError for a placement
    that is no even partition."""
    if config.moe is None or (layout.expert == 1 and placement is None):
        return None
    place, size = layout.place("e", rank), config.moe.num_experts // layout.expert
    if placement is None:
        return (tuple(range(place * size, (place + 1) * size)),) * len(config.moe.layers)
    experts_by_layer = tuple(tuple(ranks[place]) for ranks in placement)
    for layer, ranks in enumerate(placement):
        ids = sorted(expert for rank in ranks for expert in rank)
        if ids != list(range(config.moe.num_experts)) or {len(rank) for rank in ranks} != {size}:
            raise ValueError(
                f"the placement of MoE layer {layer} does not give each of {config.moe.num_experts} experts "
                f"to one of {layout.expert} ranks, {size} each; make it with placement.placed_experts"
            )
    return experts_by_layer


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """A part of a tensor, and the first rank that has it."""

    rank: int
    spans: tuple[Spans, ...]  # which part: ``share.find_spans``


def owned_parts(
    config: ModelConfig, shares: Sequence[Sequence[Share]], name: str, shape: Sequence[int]
) -> list[OwnedPart]:
    """Every part of a tensor once, with the first rank that has it. ``shares``: of every rank, by chunk;
    ``shape``: of the whole tensor. Together the parts are the whole, and no two overlap."""
    part_by_spans: dict[tuple[Spans, ...], OwnedPart] = {}
    for rank, chunks in enumerate(shares):
        for share in chunks:
            if keeps(config, share, name):
                spans = find_spans(config, share, name, shape)
                part_by_spans.setdefault(spans, OwnedPart(rank, spans))
    return list(part_by_spans.values())


def keeps(config: ModelConfig, share: Share, name: str) -> bool:
    """Whether a share has any part of the tensor ``name`` of the model."""
    if name == "embed":
        return share.has_embedding or (share.has_head and config.tie_embeddings)
    if name in ("norm", "head"):
        return share.has_head
    return int(name.split(".")[1]) in share.layers


def summed_over(name: str, shape: Sequence[int], share: Share, *, in_pieces: bool = False) -> tuple[str, ...]:
    """The axes over which the gradient of a leaf is summed, one after the other: the ranks that keep the same
    values, whose gradients of them are partial sums. ``shape``: of the whole."""
    whole_over_t = not is_cut(share, name, shape)
    if is_expert(name, shape):
        return ("r", "t") if share.expert_tensor > 1 and whole_over_t else ("r",)
    if in_pieces:
        return ("dcf", "t") if whole_over_t else ("dcf",)
    return ("s",) if whole_over_t else ("dc",)
