"""Comparison of sampler and trainer on a whole batch, before training on it: a row of mismatch.jsonl.

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
from ostinato.train.gate import measure_coverage
from ostinato.train.inputs import Inputs, repack
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


def score_parts(passes: Passes, parts: Sequence[Inputs], *, floor: bool, replay: bool) -> list[Scored]:
    """Score microbatches natively, with ``replay`` also with the experts that they carry, and with ``floor``
    natively in another packing, by the same forward as in training (``ScoreOptions``)."""
    natively = [replace(part, routing=None) for part in parts]
    native = passes.score(natively, ScoreOptions(native=True, margins=True))
    replayable = [
        replace(part, routing=part.carried) for part in parts if replay and part.carried is not None
    ]
    replayed = iter(passes.score(replayable, ScoreOptions()))
    packed = [[*repack(part)] if floor else [] for part in parts]
    repacked_scores = iter(passes.score([*chain(*packed)], ScoreOptions()))
    results = []
    for part, native_scores, pieces in zip(parts, native, packed, strict=True):
        replayed_part = next(replayed) if replay and part.carried is not None else None
        work = part.work if replayed_part is None else part.work + part.work
        results.append(
            Scored(
                source=part.source,
                work=sum((piece.work for piece in pieces), work),
                native=_join_logprobs([native_scores]),
                replay=None if replayed_part is None else _join_logprobs([replayed_part]),
                floor=_join_logprobs([next(repacked_scores) for _ in pieces]) if pieces else None,
                chosen=None if native_scores.native is None else native_scores.native.cpu().numpy(),
                margins=None if native_scores.margins is None else native_scores.margins.cpu().numpy(),
            )
        )
    return results


def _join_logprobs(scores: Sequence[Scores]) -> np.ndarray:
    return torch.cat([score.logprobs for score in scores if score.logprobs is not None]).cpu().numpy()


def mismatch_row(scored: Sequence[Scored], layers: Sequence[int]) -> dict[str, Any]:
    """The metrics of a batch: arms, routers, versions, coverage, size of the routes. ``layers``: the indices
    of the decoder's MoE layers. An arm is present only if all microbatches have it, and "routers" is None
    without known routes."""
    sources = [entry.source for entry in scored]
    behaviour = np.concatenate([source.logprobs for source in sources]).astype(np.float64)
    sample_idx = np.concatenate([source.sample_idx for source in sources])
    staleness = np.concatenate([source.staleness for source in sources])
    native = np.concatenate([entry.native for entry in scored]).astype(np.float64)
    prompts = _index_prompts(sources)

    def compare(ours: np.ndarray, theirs: np.ndarray) -> dict[str, Any]:
        return arm(ours - theirs, sample_idx, clusters=prompts) | {"pearson": pearson(ours, theirs)}

    arms = {"native": compare(native, behaviour)}
    replay_logprobs = [entry.replay for entry in scored if entry.replay is not None]
    floor_logprobs = [entry.floor for entry in scored if entry.floor is not None]
    if len(replay_logprobs) == len(scored):
        arms["replay"] = compare(np.concatenate(replay_logprobs), behaviour)
    if len(floor_logprobs) == len(scored):
        arms["floor"] = compare(np.concatenate(floor_logprobs), native)
    routes = [source.experts for source in sources if source.experts is not None]
    rows, share = sum(len(source.tokens) for source in sources), measure_coverage(sources)
    return {
        "direction": DIRECTION,
        "arms": arms,
        "routers": _compare_routers(scored, layers) if share else None,
        "versions": {str(age): count for age, count in sorted(Counter(staleness.tolist()).items())},
        "coverage": share,
        "route_bytes_per_token": sum(ids.nbytes for ids in routes) / rows if routes else None,
    }


def _index_prompts(sources: Sequence[Microbatch]) -> np.ndarray:
    """Index [R] of each token's prompt, by which ``arm`` clusters: answers to one prompt are not independent.
    Uids are "prompt#sample"; a sample without a prompt gets its own index."""
    prompts = []
    for source in sources:
        first_targets = np.append(0, np.flatnonzero(np.diff(source.sample_idx)) + 1)
        sample_prompts = [
            uid.rpartition("#")[0] or f"#{index}"
            for uid, index in zip(source.uids, source.sample_idx[first_targets], strict=True)
        ]
        prompts.append(
            np.repeat(np.array(sample_prompts), np.diff(np.append(first_targets, len(source.sample_idx))))
        )
    return np.unique(np.concatenate(prompts), return_inverse=True)[1]


def _compare_routers(scored: Sequence[Scored], layers: Sequence[int]) -> dict[str, Any] | None:
    """``mismatch.routers`` of all microbatches with recorded and native experts; None without any."""
    parts = [
        (entry.source, entry.source.experts, entry.chosen, entry.margins)
        for entry in scored
        if entry.source.experts is not None and entry.chosen is not None and entry.margins is not None
    ]
    if not parts:
        return None
    sources, recorded_ids, native_ids, margins = zip(*parts, strict=True)
    row_offsets = np.cumsum([0, *(len(source.tokens) for source in sources[:-1])])
    spans = [sequence_spans(source) + offset for source, offset in zip(sources, row_offsets, strict=True)]
    return routers(
        np.concatenate(native_ids),
        np.concatenate(recorded_ids),
        np.concatenate(margins),
        spans=np.concatenate(spans),
        layers=layers,
    )
