"""The alignment gate: whether the routes that a batch carries are the routes of its tokens.

The trainer computes its own choice of experts anyway, so comparing it with the choice that came with the
batch costs next to nothing. Aligned sequences agree in 98 % of the ids and more; routes shifted by a row, of
another sequence or of another policy agree in far less, and nothing else would show it (``algo.routing``).
Counting stays on the device, in one pass over whole arrays.

The answer and the prompt of a sequence are judged separately, or a long prompt would hide a wrong answer. How
short a single misaligned answer among many can be and still be found: tests/unit/train/test_gate.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ostinato.algo.routing import (
    SURE_NATS,
    Cause,
    Diagnosis,
    Misaligned,
    find_lowest_overlap,
    improbability,
    is_never_written,
    is_too_low,
    make_misaligned,
    overlap_ratio,
    sequence_spans,
    sum_parts,
)
from ostinato.model.config import MoEConfig
from ostinato.model.moe import find_routing_fault
from ostinato.types import NO_EXPERT, Batch, Microbatch

_FIX = ": fix what records them, or train without (trainer.replay=false)"
_NOTHING_LEARNED = "nothing was learned from them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Agreement of the trainer's own experts with those that some microbatches carry. An overlap is a share
    of ids, and a router is one (token, layer) pair. The parts of a sequence are its answer and its prompt."""

    uids: tuple[str, ...]  # of the S sequences
    ages: np.ndarray  # [S] batches trained on since the oldest token of the sequence was sampled
    overlaps: np.ndarray  # [S, 2] float64 of the parts, NaN where nothing is known
    routers: np.ndarray  # [S, 2] number of known routers in the parts
    together: np.ndarray  # [2] overlap of all answers, of all prompts; here each row counts once
    together_routers: np.ndarray  # [2]
    differ: float  # share of routers whose sets differ

    @property
    def metrics(self) -> dict[str, float]:
        """routing/overlap, routing/differ, and the lowest overlap of a part of at least 32 routers, if
        there is one; empty if nothing is known."""
        if not (num_known := self.together_routers.sum()):
            return {}
        lowest_overlap = find_lowest_overlap(self.overlaps, self.routers)
        overlap = float(np.nansum(self.together * self.together_routers) / num_known)
        metrics = {"routing/overlap": overlap, "routing/differ": self.differ}
        return metrics if np.isnan(lowest_overlap) else metrics | {"routing/lowest_sequence": lowest_overlap}

    def find_faulty(self, threshold: float) -> np.ndarray:
        """Sequences [S] bool whose overlap is too low (``algo.routing.is_too_low``). If all answers
        together, or all prompts, are below the threshold beyond chance, also every sequence whose own part
        is below it."""
        is_certain = improbability(self.together, self.together_routers, threshold) > SURE_NATS
        is_below = (self.overlaps < threshold) & (self.together < threshold) & is_certain
        return np.asarray((is_below | is_too_low(self.overlaps, self.routers, threshold)).any(axis=1))


def count_rows(native: Tensor, carried: Tensor) -> Tensor:
    """Counts [3, T] int64 by row of two [T, L, K] on one device: ids in common, ids known, ids in sets that
    differ.

    A row of NO_EXPERT is unknown and not counted. In numpy: ``algo.routing.shared_ids``.
    """
    top_k = native.shape[-1]
    is_known = carried[..., 0] != NO_EXPERT
    common = (native.unsqueeze(-1) == carried.unsqueeze(-2)).flatten(2).sum(dim=-1) * is_known
    return torch.stack((common, top_k * is_known, top_k * (is_known & (common < top_k)))).sum(dim=-1)


def measure_agreement(counted_microbatches: Sequence[tuple[Microbatch, Tensor]], top_k: int) -> Agreement:
    """The agreement over at least one microbatch, from the ``count_rows`` of each; waits for the device."""
    counts_by_row = [counts.cpu().numpy() for _, counts in counted_microbatches]
    parts = [
        sum_parts(counts[:2], sequence_spans(microbatch))
        for (microbatch, _), counts in zip(counted_microbatches, counts_by_row, strict=True)
    ]
    num_common, num_known = np.concatenate(parts, axis=1)
    total_common, total_known, num_differing = np.concatenate(counts_by_row, axis=1).sum(axis=1)
    answers = num_common[:, 0].sum(), num_known[:, 0].sum()
    routers = np.array([answers[1], total_known - answers[1]])  # a prompt is shared by its siblings
    return Agreement(
        uids=tuple(uid for microbatch, _ in counted_microbatches for uid in microbatch.uids),
        ages=np.concatenate([_max_staleness(microbatch) for microbatch, _ in counted_microbatches]),
        overlaps=overlap_ratio(num_common, num_known),
        routers=num_known / top_k,
        together=overlap_ratio(np.array([answers[0], total_common - answers[0]]), routers),
        together_routers=routers / top_k,
        differ=float(overlap_ratio(num_differing, total_known)),
    )


def _max_staleness(microbatch: Microbatch) -> np.ndarray:
    """Staleness [S] of the oldest token of each sequence."""
    first_targets = np.append(0, np.flatnonzero(np.diff(microbatch.sample_idx)) + 1)
    return np.maximum.reduceat(microbatch.staleness, first_targets)


def make_refusal(
    agreement: Agreement,
    native_choices: Iterable[tuple[Microbatch, np.ndarray]],
    threshold: float,
    *,
    steps: tuple[int, int] = (0, 1),
) -> Misaligned:
    """The error to raise where ``agreement`` has sequences at fault, with the probable cause;
    ``native_choices``: the same microbatches and the experts [T, L, K] that the trainer chooses for them when
    nothing is replayed; ``steps``: (optimizer steps already taken on this batch, all of its steps)."""
    native, carried = [], []
    for microbatch, ids in native_choices:
        assert microbatch.experts is not None
        for start, stop, prompt_start, prompt_stop in sequence_spans(microbatch):
            rows = np.r_[prompt_start:prompt_stop, start:stop]
            native.append(ids[rows])
            carried.append(microbatch.experts[rows])
    overlaps = np.fmin.reduce(agreement.overlaps, axis=1)  # of the worse part
    error = make_misaligned(
        native, carried, overlaps, threshold, agreement.uids, agreement.find_faulty(threshold)
    )
    done, planned = steps
    progress_note = (
        f"{done} of {planned} optimizer steps of this batch had been taken" if done else _NOTHING_LEARNED
    )
    return Misaligned(f"{error}; {progress_note}{_FIX}", error.diagnosis, error.uids, steps_taken=done)


def find_unreplayable(microbatches: Sequence[Microbatch], moe: MoEConfig) -> Misaligned | None:
    """The error to raise where the experts that microbatches carry cannot be replayed by any model: a buffer
    that was not filled, physical instead of logical ids, partly known rows. It names the sequences; None
    if all can be replayed. Each array is checked once, before any pass."""
    faults = [
        (microbatch, fault)
        for microbatch in microbatches
        if (fault := _find_routing_fault(microbatch, slice(None), moe))
    ]
    if not faults:
        return None
    uids = [uid for microbatch, _ in faults for uid in _find_broken_uids(microbatch, moe)]
    is_unwritten = any(
        is_never_written(microbatch.experts) for microbatch, _ in faults if microbatch.experts is not None
    )
    cause = Cause.ZERO if is_unwritten else Cause.UNRELATED
    detail = "rows name one expert several times, nothing was recorded" if is_unwritten else faults[0][1]
    return Misaligned(
        f"routes of samples {', '.join(uids)} cannot be replayed; probable cause: {cause}, {detail}; "
        f"{_NOTHING_LEARNED}{_FIX}",
        Diagnosis(cause=cause, fixed_overlap=0.0, detail=detail),
        uids,
    )


def _find_broken_uids(microbatch: Microbatch, moe: MoEConfig) -> list[str]:
    """The uids of the sequences with a fault; all of them if the array has another number of rows."""
    assert microbatch.experts is not None
    if len(microbatch.experts) != len(microbatch.tokens):
        return list(microbatch.uids)
    spans = zip(microbatch.uids, sequence_spans(microbatch), strict=True)
    return [
        uid
        for uid, (start, stop, prompt_start, prompt_stop) in spans
        if _find_routing_fault(microbatch, np.r_[prompt_start:prompt_stop, start:stop], moe)
    ]


def _find_routing_fault(microbatch: Microbatch, rows: slice | np.ndarray, moe: MoEConfig) -> str:
    """The fault of the experts of ``rows``, in words; empty where there is none."""
    if microbatch.experts is None:
        return ""
    return find_routing_fault(torch.from_numpy(microbatch.experts[rows]), len(microbatch.tokens[rows]), moe)


def drop_routes(batch: Batch) -> Batch:
    """The batch without the experts that it carries."""
    return replace(
        batch, microbatches=tuple(replace(microbatch, experts=None) for microbatch in batch.microbatches)
    )


def measure_coverage(microbatches: Sequence[Microbatch]) -> float:
    """Share of rows whose experts are known."""
    num_known = sum(
        int(np.count_nonzero(microbatch.experts[:, 0, 0] != NO_EXPERT))
        for microbatch in microbatches
        if microbatch.experts is not None
    )
    return num_known / sum(len(microbatch.tokens) for microbatch in microbatches)
