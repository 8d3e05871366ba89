"""The alignment gate: are the routes that a batch carries the routes of its tokens?

The trainer computes its own choice of experts anyway, so at the start of a step, before any weight has moved,
comparing it with the choice that came with the batch costs next to nothing. Aligned sequences agree in 98 %
of the ids and more; routes shifted by a row, of another sequence or of another policy agree in far less,
and nothing else would tell (``algo.routing``). Counting stays on the device, in one pass over whole arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ostinato.algo.routing import (
    Cause,
    Diagnosis,
    Misaligned,
    judged,
    misaligned,
    sequence_spans,
    sequence_sums,
)
from ostinato.types import NO_EXPERT, Microbatch

_MEND = "; nothing was learned from them: mend what records them, or train without (trainer.replay=false)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Of the trainer's own experts with those that some microbatches carry."""

    uids: tuple[str, ...]  # of the S sequences
    overlaps: np.ndarray  # [S] float64: what each is judged by, NaN where nothing is known
    metrics: dict[str, float]  # routing/overlap and routing/differ over rows, routing/lowest_sequence


def row_counts(native: Tensor, carried: Tensor) -> Tensor:
    """[3, T] int64 of two [T, L, K] on one device: ids in common, ids known, ids in sets that differ.

    A row of NO_EXPERT is unknown and counts nowhere. The twin is ``algo.routing.shared_ids``.
    """
    top_k = native.shape[-1]
    known = carried[..., 0] != NO_EXPERT
    common = (native.unsqueeze(-1) == carried.unsqueeze(-2)).flatten(2).sum(dim=-1) * known
    return torch.stack((common, top_k * known, top_k * (known & (common < top_k)))).sum(dim=-1)


def agreement(counted: Sequence[tuple[Microbatch, Tensor]]) -> Agreement:
    """From microbatches and the ``row_counts`` of each. Metrics are empty where nothing is known."""
    uids = tuple(uid for microbatch, _ in counted for uid in microbatch.uids)
    rows = [counts.cpu().numpy() for _, counts in counted]
    by_sequence = [
        sequence_sums(counts[:2], sequence_spans(microbatch))
        for (microbatch, _), counts in zip(counted, rows, strict=True)
    ]
    overlaps = judged(*np.concatenate(by_sequence, axis=1))
    common, known, differ = (int(total) for total in np.concatenate(rows, axis=1).sum(axis=1))
    if not known:
        return Agreement(uids=uids, overlaps=overlaps, metrics={})
    metrics = {
        "routing/overlap": common / known,
        "routing/differ": differ / known,
        "routing/lowest_sequence": float(np.nanmin(overlaps)),
    }
    return Agreement(uids=uids, overlaps=overlaps, metrics=metrics)


def refusal(seen: Agreement, chosen: Iterable[tuple[Microbatch, np.ndarray]], threshold: float) -> Misaligned:
    """What to raise where ``seen`` is below the threshold, with the probable cause; ``chosen``: the same
    microbatches and the experts [T, L, K] that the trainer chooses for them when nothing is replayed."""
    native, carried = [], []
    for microbatch, ids in chosen:
        assert microbatch.experts is not None
        for start, stop, first, last in sequence_spans(microbatch):
            rows = np.r_[first:last, start:stop]
            native.append(ids[rows])
            carried.append(microbatch.experts[rows])
    found = misaligned(native, carried, seen.overlaps, threshold, seen.uids)
    return Misaligned(f"{found}{_MEND}", found.diagnosis, found.uids)


def unwritten(uids: Sequence[str]) -> Misaligned:
    """What to raise for routes that name one expert K times: they cannot even be replayed."""
    found = Diagnosis(cause=Cause.ZERO, overlap=0.0, best=0.0, detail="rows name one expert several times")
    return Misaligned(
        f"routes of samples {', '.join(uids)} name one expert several times for a token; probable cause: "
        f"{found.cause}, nothing was recorded{_MEND}",
        found,
        uids,
    )


__all__ = ["Agreement", "agreement", "refusal", "row_counts", "unwritten"]
