"""Who keeps which part of a tensor of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.model.config import ModelConfig
from ostinato.model.share import Share, Spans, placed


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank with a part of a tensor that no rank before it has."""

    rank: int
    spans: tuple[Spans, ...]  # which part: ``share.placed``


def seats(
    config: ModelConfig, shares: Sequence[Sequence[Share]], name: str, shape: Sequence[int]
) -> list[Seat]:
    """Every part of a tensor once, by the first rank that has it. ``shares``: of every rank, by chunk;
    ``shape``: of the whole tensor. Together the parts are the whole, and no two overlap."""
    found: dict[tuple[Spans, ...], Seat] = {}
    for rank, chunks in enumerate(shares):
        for share in chunks:
            if keeps(config, share, name):
                spans = placed(config, share, name, shape)
                found.setdefault(spans, Seat(rank, spans))
    return list(found.values())


def keeps(config: ModelConfig, share: Share, name: str) -> bool:
    """Does a share have any part of a tensor of the model?"""
    if name == "embed":
        return share.embeds or (share.heads and config.tie_embeddings)
    if name in ("norm", "head"):
        return share.heads
    return int(name.split(".")[1]) in share.layers


__all__ = ["Seat", "keeps", "seats"]
