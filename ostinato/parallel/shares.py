"""Which part of a model each rank of a layout keeps. No torch: a planner counts by it."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.model.config import ModelConfig
from ostinato.model.share import Share
from ostinato.parallel.layout import Layout

Placement = Sequence[Sequence[Sequence[int]]]  # by MoE layer, by expert rank: the ids that it keeps


def shares_of(
    layout: Layout, config: ModelConfig, rank: int, placement: Placement | None = None
) -> tuple[Share, ...]:
    """What a rank keeps, one share for each of its chunks of layers, in order of depth.

    ``placement``: which expert rank keeps which experts of a MoE layer, equally many each; None: neighbours
    together. Raises ValueError where the model cannot be cut so.
    """
    layout.refuse(config)
    at = layout.coords(rank)
    spans = layout.chunk_layers(config.num_layers)
    return tuple(
        Share(
            layers=tuple(spans[chunk]),
            embeds=chunk == 0,
            heads=chunk == layout.chunks - 1,
            tensor=layout.tensor,
            tensor_rank=at.tensor,
            experts=_kept(layout, config, rank, placement),
            expert_tensor=layout.expert_tensor,
            expert_tensor_rank=at.tensor if layout.expert_tensor > 1 else 0,
        )
        for chunk in layout.chunks_of(at.pipeline)
    )


def _kept(
    layout: Layout, config: ModelConfig, rank: int, placement: Placement | None
) -> tuple[tuple[int, ...], ...] | None:
    if config.moe is None or (layout.expert == 1 and placement is None):
        return None
    place, size = layout.place("e", rank), config.moe.num_experts // layout.expert
    if placement is None:
        return (tuple(range(place * size, (place + 1) * size)),) * len(config.moe.layers)
    kept = tuple(tuple(ranks[place]) for ranks in placement)
    for layer, ranks in enumerate(placement):
        ids = sorted(expert for one in ranks for expert in one)
        if ids != list(range(config.moe.num_experts)) or {len(one) for one in ranks} != {size}:
            raise ValueError(
                f"the placement of MoE layer {layer} does not give each of {config.moe.num_experts} experts "
                f"to one of {layout.expert} ranks, {size} each; make it with placement.placed_experts"
            )
    return kept


__all__ = ["Placement", "shares_of"]
