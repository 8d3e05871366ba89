"""Are replayed expert routes the routes of these tokens, and if not, what happened to them?

A routing is an integer array [T, L, K]: the K experts that token t went to in each of L mixture layers; rows
of NO_EXPERT are unknown and count nowhere. A trainer that replays routes computes its own (native) choice
anyway, so comparing the two is free. Where both sides run the same weights on the same tokens, 98-99 % of the
ids agree; rows shifted by one, layers in another order or another sequence's routes agree in half of them or
less, silently: the loss stays finite and the run learns from noise.

Everything here is numpy, and pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ostinato.types import NO_EXPERT

THRESHOLD = 0.9  # measured: aligned sequences from 0.98 on, misaligned ones up to 0.6
_LOOK = 512  # rows and...
_SEQUENCES = 16  # ...sequences that a diagnosis looks at
_MARGIN = 0.1  # an explanation has to agree by that much more than what is to be explained


class Cause(StrEnum):
    """Why replayed routes disagree with native ones."""

    ALIGNED = "aligned"
    ZERO = "zero"  # never written: one expert named K times
    SHIFTED = "shifted"  # rows belong to a neighbouring token
    LAYERS = "layers"  # layers in another order
    SHUFFLED = "shuffled"  # another sequence of the same batch
    STALE = "stale"  # right tokens, other weights: an older policy, a cache that outlived an update
    UNRELATED = "unrelated"  # no better than chance: other texts, or another numbering of the experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found: ``overlap`` as it is, and ``best``, what it would be if ``cause`` were mended."""

    cause: Cause
    overlap: float
    best: float
    detail: str = ""  # for people: how far shifted, which sequence


class Misaligned(RuntimeError):
    """Replayed routes are not those of these tokens under these weights."""

    def __init__(self, message: str, diagnosis: Diagnosis) -> None:
        super().__init__(message)
        self.diagnosis = diagnosis


def shared_ids(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The share of ids in common, [T, L] float32 of two [T, L, K]; NaN where either side is unknown.

    The order of the K does not count. Ids of a row have to differ, else one counts twice.
    """
    common = sum((a[..., k : k + 1] == b).any(axis=-1) for k in range(a.shape[-1]))
    share = np.asarray(common, np.float32) / a.shape[-1]
    share[(a[..., 0] == NO_EXPERT) | (b[..., 0] == NO_EXPERT)] = np.nan
    return share


def alignment(native: Sequence[np.ndarray], replayed: Sequence[np.ndarray]) -> np.ndarray:
    """Mean overlap of each sequence, [B] float64 in 0 .. 1; NaN for one without a row known on both sides.

    native, replayed: B integer arrays [T_b, L, K]. Raises ValueError where their shapes differ.
    """
    return np.array([_mean(a, b) for a, b in _pairs(native, replayed)])


def require_aligned(
    native: Sequence[np.ndarray], replayed: Sequence[np.ndarray], threshold: float = THRESHOLD
) -> np.ndarray:
    """``alignment``; raises Misaligned, naming the probable cause, if a sequence is below ``threshold``."""
    overlaps = alignment(native, replayed)
    low = np.flatnonzero(overlaps < threshold)
    if len(low):
        found = diagnose(native, replayed, threshold)
        raise Misaligned(
            f"routes of {len(low)} of {len(overlaps)} sequences agree with the trainer's own in less than "
            f"{threshold:g} of the ids (sequence {low[0]}: {overlaps[low[0]]:.2f}); probable cause: "
            f"{found.cause}{f', {found.detail}' if found.detail else ''} (mended: {found.best:.2f})",
            found,
        )
    return overlaps


def diagnose(
    native: Sequence[np.ndarray], replayed: Sequence[np.ndarray], threshold: float = THRESHOLD
) -> Diagnosis:
    """The explanation of a disagreement that mends most of it. Looks at 16 sequences and 512 rows of each."""
    pairs = [(a[:_LOOK], b[:_LOOK]) for a, b in _pairs(native, replayed)]
    order = np.argsort([np.nan_to_num(_mean(a, b), nan=1.0) for a, b in pairs], kind="stable")
    pairs = [pairs[i] for i in order[:_SEQUENCES]]  # the worst: some may be in order
    overlap = _mean_of([_mean(a, b) for a, b in pairs])
    if not overlap < threshold:
        return Diagnosis(cause=Cause.ALIGNED, overlap=overlap, best=overlap)
    if _mean_of([_repeated(b) for _, b in pairs]) > 0.5:
        return Diagnosis(
            cause=Cause.ZERO, overlap=overlap, best=overlap, detail="rows name one expert several times"
        )
    best, cause, detail = max(_explanations(pairs), key=lambda one: one[0], default=(0.0, Cause.STALE, ""))
    if best >= overlap + _MARGIN:
        return Diagnosis(cause=cause, overlap=overlap, best=best, detail=detail)
    cause = Cause.STALE if overlap > _chance(pairs) + _MARGIN else Cause.UNRELATED
    return Diagnosis(cause=cause, overlap=overlap, best=overlap)


def _pairs(
    native: Sequence[np.ndarray], replayed: Sequence[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    pairs = list(zip(native, replayed, strict=True))
    for i, (a, b) in enumerate(pairs):
        if a.shape != b.shape or a.ndim != 3:
            raise ValueError(
                f"sequence {i} has native routes {a.shape} and replayed {b.shape}; [T, L, K] both"
            )
    return pairs


def _explanations(pairs: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[float, Cause, str]]:
    """(overlap once mended, cause, detail) of everything worth trying."""
    for shift in (-2, -1, 1, 2):
        here = [(a[max(-shift, 0) : len(a) - max(shift, 0)], b[max(shift, 0) :]) for a, b in pairs]
        overlap = _mean_of([_mean(a, b[: len(a)]) for a, b in here])
        late = "later" if shift > 0 else "earlier"
        yield overlap, Cause.SHIFTED, f"each token's routes stand {abs(shift)} row(s) {late}"
    layers = pairs[0][0].shape[1]
    for roll in range(1, layers):
        overlap = _mean_of([_mean(a, np.roll(b, -roll, axis=1)) for a, b in pairs])
        yield overlap, Cause.LAYERS, f"layers rolled by {roll} of {layers}"
    if layers > 2:  # of two layers, the reverse is a roll
        yield _mean_of([_mean(a, b[:, ::-1]) for a, b in pairs]), Cause.LAYERS, "layers reversed"
    if len(pairs) > 1:
        best = [
            max(_prefix(a, b) for j, (_, b) in enumerate(pairs) if j != i) for i, (a, _) in enumerate(pairs)
        ]
        yield _mean_of(best), Cause.SHUFFLED, "another sequence of the batch fits better"


def _prefix(a: np.ndarray, b: np.ndarray) -> float:
    length = min(len(a), len(b))
    return float(np.nan_to_num(_mean(a[:length], b[:length])))


def _chance(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """What rows of other tokens agree in: some experts are popular everywhere."""
    return _mean_of([_mean(a, np.roll(b, len(b) // 2, axis=0)) for a, b in pairs])


def _repeated(ids: np.ndarray) -> float:
    """The share of known rows in which an expert stands twice."""
    ordered = np.sort(ids[ids[:, 0, 0] != NO_EXPERT], axis=-1)
    if ordered.size == 0 or ordered.shape[-1] == 1:
        return float("nan")
    return float((ordered[..., 1:] == ordered[..., :-1]).any(axis=-1).mean())


def _mean(a: np.ndarray, b: np.ndarray) -> float:
    return _mean_of(shared_ids(a, b))


def _mean_of(values: np.ndarray | Sequence[float]) -> float:
    """The mean of what is not NaN; NaN, silently, of nothing."""
    known = np.asarray(values, np.float64)
    known = known[~np.isnan(known)]
    return float(known.mean()) if known.size else float("nan")
