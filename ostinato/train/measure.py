"""Sampler against trainer on a whole batch, before training on it: a row of mismatch.jsonl.

Three passes score the same tokens: native (the trainer chooses its experts), replay (it takes the
sampler's), and floor (native again, packed differently: the effect of shapes and summation order alone). They
use the same forward as training, and are turned into metrics here (``observe.mismatch``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from ostinato.algo.routing import sequence_spans
from ostinato.model.flops import Work
from ostinato.observe.mismatch import DIRECTION, arm, pearson, routers
from ostinato.train.gate import coverage
from ostinato.train.inputs import Inputs, otherwise_packed
from ostinato.train.passes import Passes, ScoreOptions, Scores
from ostinato.types import Microbatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scored:
    """One microbatch, scored by the trainer in up to three ways; log-probabilities [R] of its targets."""

    source: Microbatch
    work: Work  # of the passes
    native: np.ndarray
    replay: np.ndarray | None = None
    floor: np.ndarray | None = None
    chosen: np.ndarray | None = None  # [T, L, K], the trainer's own experts
    margins: np.ndarray | None = None  # [T, L], see model.moe.margins


def scored(passes: Passes, parts: Sequence[Inputs], *, floor: bool, replay: bool) -> list[Scored]:
    """Score microbatches in up to three ways, by the same forward as in training (``ScoreOptions``)."""
    free = [replace(part, routing=None) for part in parts]
    native = passes.score(free, ScoreOptions(native=True, margins=True))
    carrying = [replace(part, routing=part.carried) for part in parts if replay and part.carried is not None]
    replayed = iter(passes.score(carrying, ScoreOptions()))
    packed = [[*otherwise_packed(part)] if floor else [] for part in parts]
    again = iter(passes.score([*chain(*packed)], ScoreOptions()))
    found = []
    for part, one, pieces in zip(parts, native, packed, strict=True):
        replayed_part = next(replayed) if replay and part.carried is not None else None
        work = part.work if replayed_part is None else part.work + part.work
        found.append(
            Scored(
                source=part.source,
                work=sum((piece.work for piece in pieces), work),
                native=_logprobs([one]),
                replay=None if replayed_part is None else _logprobs([replayed_part]),
                floor=_logprobs([next(again) for _ in pieces]) if pieces else None,
                chosen=None if one.native is None else one.native.cpu().numpy(),
                margins=None if one.margins is None else one.margins.cpu().numpy(),
            )
        )
    return found


def _logprobs(scores: Sequence[Scores]) -> np.ndarray:
    return torch.cat([score.logprobs for score in scores if score.logprobs is not None]).cpu().numpy()


def mismatch_row(scored: Sequence[Scored], layers: Sequence[int]) -> dict[str, Any]:
    """The metrics of a batch: arms, routers, versions, coverage, size of the routes. ``layers``: the indices
    of the decoder's MoE layers. An arm is present only if all microbatches have it."""
    sources = [one.source for one in scored]
    behaviour = np.concatenate([source.logprobs for source in sources]).astype(np.float64)
    owner = np.concatenate([source.sample_idx for source in sources])
    staleness = np.concatenate([source.staleness for source in sources])
    native = np.concatenate([one.native for one in scored]).astype(np.float64)
    prompts = _prompts(sources)

    def compared(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
        return arm(ours - theirs, owner, clusters=prompts) | {"pearson": pearson(ours, theirs)}

    arms = {"native": compared(native, behaviour)}
    replayed = [one.replay for one in scored if one.replay is not None]
    floor = [one.floor for one in scored if one.floor is not None]
    if len(replayed) == len(scored):
        arms["replay"] = compared(np.concatenate(replayed), behaviour)
    if len(floor) == len(scored):
        arms["floor"] = compared(np.concatenate(floor), native)
    recorded = [source.experts for source in sources if source.experts is not None]
    rows, share = sum(len(source.tokens) for source in sources), coverage(sources)
    return {
        "direction": DIRECTION,
        "arms": arms,
        "routers": _routers(scored, layers) if share else None,
        "versions": {str(age): count for age, count in sorted(Counter(staleness.tolist()).items())},
        "coverage": share,
        "route_bytes_per_token": sum(ids.nbytes for ids in recorded) / rows if recorded else None,
    }


def _prompts(sources: Sequence[Microbatch]) -> np.ndarray:
    """[R] the index of each token's prompt: answers to one prompt are not independent. Uids are
    "prompt#sample"; a sample without a prompt gets its own index."""
    names = []
    for source in sources:
        firsts = np.append(0, np.flatnonzero(np.diff(source.sample_idx)) + 1)
        own = [
            uid.rpartition("#")[0] or f"#{index}"
            for uid, index in zip(source.uids, source.sample_idx[firsts], strict=True)
        ]
        names.append(np.repeat(np.array(own), np.diff(np.append(firsts, len(source.sample_idx)))))
    return np.unique(np.concatenate(names), return_inverse=True)[1]


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
        spans=np.concatenate(spans),
        layers=layers,
    )
