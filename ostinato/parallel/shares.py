"""The part of a model, and of a tensor, that each rank of a layout keeps. No torch: a planner uses it,
too."""

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

    ``placement``: which expert rank keeps which experts of a MoE layer, equally many each; None: contiguous
    ones. Raises ValueError if the layout cannot cut the model, for a rank outside of the layout, and for a
    placement that does not give every expert to one rank.
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
            experts=_list_experts(layout, config, rank, placement),
            expert_tensor=layout.expert_tensor,
            expert_tensor_rank=coords.tensor if layout.expert_tensor > 1 else 0,
        )
        for chunk in layout.chunks_of(coords.pipeline)
    )


def _list_experts(
    layout: Layout, config: ModelConfig, rank: int, placement: Placement | None
) -> tuple[tuple[int, ...], ...] | None:
    """Ids of the experts of a rank, by MoE layer; None where it keeps all. Raises ValueError for a placement
    that is no even partition."""
    if config.moe is None or (layout.expert == 1 and placement is None):
        return None
    expert_rank, experts_per_rank = layout.place("e", rank), config.moe.num_experts // layout.expert
    if placement is None:
        return (tuple(range(expert_rank * experts_per_rank, (expert_rank + 1) * experts_per_rank)),) * len(
            config.moe.layers
        )
    experts_by_layer = tuple(tuple(ranks[expert_rank]) for ranks in placement)
    for layer, ranks in enumerate(placement):
        ids = sorted(expert for rank in ranks for expert in rank)
        if ids != list(range(config.moe.num_experts)) or {len(rank) for rank in ranks} != {experts_per_rank}:
            raise ValueError(
                f"the placement of MoE layer {layer} does not give each of {config.moe.num_experts} experts "
                f"to one of {layout.expert} ranks, {experts_per_rank} each; make it with "
                "placement.placed_experts"
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
            if has_part(config, share, name):
                spans = find_spans(config, share, name, shape)
                part_by_spans.setdefault(spans, OwnedPart(rank, spans))
    return list(part_by_spans.values())


def has_part(config: ModelConfig, share: Share, name: str) -> bool:
    """Whether a share has any part of the tensor ``name`` of the model."""
    if name == "embed":
        return share.has_embedding or (share.has_head and config.tie_embeddings)
    if name in ("norm", "head"):
        return share.has_head
    return int(name.split(".")[1]) in share.layers


def find_summed_axes(
    name: str, shape: Sequence[int], share: Share, *, in_pieces: bool = False
) -> tuple[str, ...]:
    """The axes over which the gradient of a leaf is summed, one after the other. Ranks along them keep the
    same values, and each has a partial sum of their gradient. ``shape``: of the whole. ``in_pieces``: FSDP
    cuts it."""
    is_whole_over_t = not is_cut(share, name, shape)
    if is_expert(name, shape):
        return ("r", "t") if share.expert_tensor > 1 and is_whole_over_t else ("r",)
    if in_pieces:
        return ("dcf", "t") if is_whole_over_t else ("dcf",)
    return ("s",) if is_whole_over_t else ("dc",)
