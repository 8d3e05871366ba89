"""Sampler against trainer on a whole batch, before anything is learned from it: a row of mismatch.jsonl.

Three passes score the same tokens: native (the trainer chooses its experts), replay (it takes the
sampler's), and floor (native again, packed otherwise: what shapes and the order of sums alone change). The
trainer makes them with the forward that it trains with; here they become figures (``algo.mismatch``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from ostinato.algo.mismatch import DIRECTION, arm, routers
from ostinato.algo.routing import sequence_spans
from ostinato.model.config import MoEConfig
from ostinato.model.moe import margins
from ostinato.model.ops import Ops
from ostinato.types import NO_EXPERT, Microbatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """One microbatch, scored by the trainer in up to three ways; log-probabilities [R] of its targets."""

    source: Microbatch
    native: np.ndarray
    replay: np.ndarray | None = None
    floor: np.ndarray | None = None
    chosen: np.ndarray | None = None  # [T, L, K], the trainer's own experts
    margins: np.ndarray | None = None  # [T, L], see model.moe.margins


def watching(ops: Ops, into: list[Tensor]) -> Ops:
    """``ops`` whose ``route`` also appends the margin [T] of every MoE layer that is passed."""

    def route(
        logits: Tensor, moe: MoEConfig, bias: Tensor | None = None, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        into.append(margins(logits.detach(), moe, bias))
        return ops.route(logits, moe, bias, given)

    return replace(ops, route=route)


def mismatch_row(scored: Sequence[Scored], layers: Sequence[int]) -> dict[str, Any]:
    """The figures of a batch: arms, routers, versions, coverage, size of the routes. ``layers``: the
    decoder's numbers of its MoE layers. Each arm is there if all microbatches have it."""
    behaviour = np.concatenate([one.source.logprobs for one in scored]).astype(np.float64)
    owner = np.concatenate([one.source.sample_idx for one in scored])
    staleness = np.concatenate([one.source.staleness for one in scored])
    native = np.concatenate([one.native for one in scored])
    arms = {"native": arm(native - behaviour, owner)}
    if replayed := [one.replay for one in scored if one.replay is not None]:
        arms["replay"] = arm(np.concatenate(replayed) - behaviour, owner)
    if floor := [one.floor for one in scored if one.floor is not None]:
        arms["floor"] = arm(np.concatenate(floor).astype(np.float64) - native, owner)
    recorded = [one.source.experts for one in scored if one.source.experts is not None]
    rows = sum(len(one.source.tokens) for one in scored)
    known = sum(int((ids[:, 0, 0] != NO_EXPERT).sum()) for ids in recorded)
    return {
        "direction": DIRECTION,
        "arms": arms,
        "routers": _routers(scored, layers) if known else None,
        "versions": {str(age): count for age, count in sorted(Counter(staleness.tolist()).items())},
        "coverage": known / rows,
        "route_bytes_per_token": sum(ids.nbytes for ids in recorded) / rows if recorded else None,
    }


def _routers(scored: Sequence[Scored], layers: Sequence[int]) -> dict[str, Any] | None:
    parts = [
        (one.source, one.source.experts, one.chosen, one.margins)
        for one in scored
        if one.source.experts is not None and one.chosen is not None and one.margins is not None
    ]
    if not parts:
        return None
    sources, recorded, chosen, gaps = zip(*parts, strict=True)
    before = np.cumsum([0, *(len(source.tokens) for source in sources[:-1])])
    spans = [sequence_spans(source) + rows for source, rows in zip(sources, before, strict=True)]
    return routers(
        np.concatenate(chosen),
        np.concatenate(recorded),
        np.concatenate(gaps),
        np.concatenate([source.positions for source in sources]),
        spans=np.concatenate(spans),
        layers=layers,
    )


__all__ = ["Scored", "mismatch_row", "watching"]
