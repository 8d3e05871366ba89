"""Checks that replayed expert routes belong to these tokens, and if not, finds the probable cause.

A routing is an integer array [T, L, K]: the K experts that token t went to in each of L mixture layers; rows
of NO_EXPERT are unknown and not counted. A trainer that replays routes computes its own (native) choice
anyway, so comparing the two is free. Where both sides run the same weights on the same tokens, 98-99 % of the
ids agree; rows shifted by one, layers in another order or another sequence's routes agree in half of them or
less, silently: the loss stays finite and the run learns from noise.

Everything here is numpy, and pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ostinato.failure import NamedFailure
from ostinato.types import NO_EXPERT, Microbatch

THRESHOLD = 0.9  # measured: aligned sequences from 0.98 on, misaligned ones up to 0.6
USUAL_OVERLAP = 0.98  # overlap of aligned sequences; the expected overlap is at most this
SURE_NATS = 20.0  # nats: what happens by chance once in exp(20), 5e8, is not attributed to chance
MIN_ROUTERS = 32  # fewest routers for which the overlap of a single sequence is meaningful
_MIN_ROWS, _MAX_ROWS = 16, 512  # rows of each sequence that a diagnosis compares
_MAX_SEQUENCES = 16  # sequences that a diagnosis compares
_MAX_CANDIDATES = 512  # sequences tried as the source of shuffled routes
_MARGIN = 0.1  # an explanation must raise the overlap by this much


class Cause(StrEnum):
    """Why replayed routes disagree with native ones."""

    ALIGNED = "aligned"
    ZERO = "zero"  # never written: the same expert K times
    SHIFTED = "shifted"  # rows belong to a neighbouring token
    LAYERS = "layers"  # layers in another order
    SHUFFLED = "shuffled"  # another sequence of the same batch
    STALE = "stale"  # right tokens, other weights: an older policy, a cache that outlived an update
    UNRELATED = "unrelated"  # no better than chance: other texts, or another numbering of the experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The probable cause in the worst sequences. ``fixed_overlap``: their overlap if it were fixed."""

    cause: Cause
    fixed_overlap: float
    detail: str = ""  # for people: how far shifted, which sequence


class Misaligned(NamedFailure):
    """Replayed routes are not those of these tokens under these weights.

    ``uids``: of the sequences below the threshold. ``steps_taken``: optimizer steps already taken on the same
    batch; if 0, no weight has changed.
    """

    def __init__(
        self, message: str, diagnosis: Diagnosis, uids: Sequence[str] = (), *, steps_taken: int = 0
    ) -> None:
        super().__init__(message)
        self.diagnosis, self.uids, self.steps_taken = diagnosis, tuple(uids), steps_taken

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all fields: a trainer in another process raises the same error as one in this process."""
        return type(self), (str(self), self.diagnosis), self.__dict__


def shared_ids(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Share of ids in common, [T, L] float32, of two [T, L, K]; NaN where either side is unknown.

    The order of the K ids does not matter. The ids of a row must differ: one that is repeated counts twice.
    """
    common = sum((a[..., k : k + 1] == b).any(axis=-1) for k in range(a.shape[-1]))
    share = np.asarray(common, np.float32) / a.shape[-1]
    share[(a[..., 0] == NO_EXPERT) | (b[..., 0] == NO_EXPERT)] = np.nan
    return share


def alignment(native: Sequence[np.ndarray], replayed: Sequence[np.ndarray]) -> np.ndarray:
    """Mean overlap of each sequence, [B] float64 in 0 .. 1; NaN for one without a row known on both sides.

    native, replayed: B integer arrays [T_b, L, K]. Raises ValueError where their shapes differ.
    """
    return np.array([_measure_overlap(a, b) for a, b in _pair_routes(native, replayed)])


def require_aligned(
    native: Sequence[np.ndarray], replayed: Sequence[np.ndarray], threshold: float = THRESHOLD
) -> np.ndarray:
    """The overlaps [B] of ``alignment``. Raises Misaligned, which names the probable cause, if a sequence is
    below ``threshold``, and ValueError as ``alignment`` does."""
    overlaps = alignment(native, replayed)
    if (overlaps < threshold).any():
        raise make_misaligned(native, replayed, overlaps, threshold)
    return overlaps


def make_misaligned(
    native: Sequence[np.ndarray],
    replayed: Sequence[np.ndarray],
    overlaps: np.ndarray,
    threshold: float = THRESHOLD,
    uids: Sequence[str] = (),
    is_faulty: np.ndarray | None = None,
) -> Misaligned:
    """The error to raise if some ``overlaps`` [B] are below the threshold. ``uids`` name the sequences;
    ``is_faulty`` [B] bool marks those that the error names, by default all that are below it."""
    faulty_indices = np.flatnonzero(overlaps < threshold if is_faulty is None else is_faulty).tolist()
    diagnosis = diagnose(
        [native[i] for i in faulty_indices], [replayed[i] for i in faulty_indices], threshold, others=replayed
    )
    faulty_uids = [uids[i] for i in faulty_indices] if uids else []
    first_name = faulty_uids[0] if faulty_uids else faulty_indices[0]
    return Misaligned(
        f"routes of {len(faulty_indices)} of {len(overlaps)} sequences agree with the trainer's own in less "
        f"than {threshold:g} of the ids (sequence {first_name}: {overlaps[faulty_indices[0]]:.2f}); "
        f"probable cause: {diagnosis.cause}{f', {diagnosis.detail}' if diagnosis.detail else ''} "
        f"(fixed: {diagnosis.fixed_overlap:.2f})",
        diagnosis,
        faulty_uids,
    )


def sequence_spans(microbatch: Microbatch) -> np.ndarray:
    """The rows of each sequence of a microbatch, [S, 4] int64 in the order of its ``uids``: (start, stop) of
    its answer and (start, stop) of its prompt, which siblings may share. Either may be empty.

    The prompt goes up to the row that predicts the first trained token. The last token trained is predicted
    by the sequence's own last row; if it has none, a completion of one token, by the prompt's.
    """
    edges = np.flatnonzero(np.diff(microbatch.sample_idx))
    firsts, lasts = np.append(0, edges + 1), np.append(edges, len(microbatch.rows) - 1)
    segments = np.array(
        [
            (segment.start, segment.stop, segment.prefix_start, segment.prefix_stop)
            for segment in microbatch.segments
        ]
    )
    start, stop, prompt_start, prompt_stop = segments[
        np.searchsorted(segments[:, 0], microbatch.rows[lasts], side="right") - 1
    ].T
    is_shared = prompt_stop > prompt_start
    answer_start = np.where(is_shared, start, microbatch.rows[firsts] + 1)
    prompt = np.where(is_shared, prompt_start, start), np.where(is_shared, prompt_stop, answer_start)
    return np.stack((answer_start, stop, *prompt), axis=1)


def sum_parts(values: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Sums of values [..., T] over the rows of each sequence, [..., S, 2]: of its answer, of its prompt. A
    shared prompt counts for each of its sequences."""
    total = np.concatenate((np.zeros((*values.shape[:-1], 1), values.dtype), values.cumsum(axis=-1)), axis=-1)
    start, stop, prompt_start, prompt_stop = spans.T
    return np.stack(
        (total[..., stop] - total[..., start], total[..., prompt_stop] - total[..., prompt_start]), -1
    )


def overlap_ratio(common: ArrayLike, total: ArrayLike) -> np.ndarray:
    """Ids in common over ids known on both sides, of any shape; NaN where nothing is known."""
    return np.divide(common, total, out=np.full(np.shape(total), np.nan), where=np.asarray(total) > 0)


def is_too_low(overlaps: np.ndarray, routers: np.ndarray, threshold: float = THRESHOLD) -> np.ndarray:
    """Parts [S, P] bool of a batch that are below the threshold, and lower than chance would make them.

    overlaps [S, P]: of each part of a sequence (answer, prompt), NaN where nothing is known. routers [S, P]:
    how many (token, layer) pairs each is the mean of.

    A few routers may all differ. A part is too low only if a part of n routers, each of which agrees with
    probability p, would agree in a share ``a`` or less of them with a chance below exp(-20): by Chernoff's
    bound, if n KL(a || p) > 20 nats. p is the median of the answers or of the prompts (the higher one),
    kept between the threshold and 0.98. Routers of a sequence are not independent; but where two sets differ
    they mostly differ in one of K, and a share of K ids scatters less than the one coin per router that the
    bound allows for.
    """
    medians = [np.median(values[~np.isnan(values)]) for values in overlaps.T if not np.isnan(values).all()]
    usual_overlap = min(max([threshold, *map(float, medians)]), max(USUAL_OVERLAP, threshold))
    return (overlaps < threshold) & (improbability(overlaps, routers, usual_overlap) > SURE_NATS)


def improbability(overlaps: ArrayLike, routers: ArrayLike, usual: float) -> np.ndarray:
    """n KL(a || p) in nats: n routers that agree with probability ``usual`` agree in a share of ``overlaps``
    or less with a probability of at most exp of minus this (Chernoff, for a < p). NaN where an overlap is."""
    a, p = np.asarray(overlaps, np.float64), min(max(usual, 1e-12), 1 - 1e-12)
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 log 0 is 0
        disagree = np.where(a < 1, (1 - a) * (np.log1p(-a) - math.log1p(-p)), 0.0)
        agree = np.where(a == 0, 0.0, a * (np.log(a) - math.log(p)))
    return np.asarray(routers) * np.where(np.isnan(a), np.nan, agree + disagree)


def find_lowest_overlap(overlaps: np.ndarray, routers: np.ndarray) -> float:
    """The lowest overlap among parts with at least 32 routers; NaN if there are none."""
    reliable = overlaps[(routers >= MIN_ROUTERS) & ~np.isnan(overlaps)]
    return float(reliable.min()) if reliable.size else math.nan


def is_never_written(routes: np.ndarray) -> bool:
    """Whether a known row [..., K] has the same expert K times: a buffer that was never filled."""
    if routes.shape[-1] == 1 or routes.size == 0:
        return False
    return bool(((routes == routes[..., :1]).all(axis=-1) & (routes[..., 0] != NO_EXPERT)).any())


def diagnose(
    native: Sequence[np.ndarray],
    replayed: Sequence[np.ndarray],
    threshold: float = THRESHOLD,
    others: Sequence[np.ndarray] = (),
) -> Diagnosis:
    """The explanation that would fix most of a disagreement, and the overlap when it is fixed; ALIGNED if
    there is none. It compares the worst stretch of the 16 worst sequences with the shifted, the reordered and
    the first 512 of all ``replayed`` and ``others`` routes. Raises ValueError as ``alignment`` does."""
    pairs = [(a, b) for a, b in _pair_routes(native, replayed) if len(a)]
    worst_pairs = sorted(pairs, key=lambda pair: np.nan_to_num(_measure_overlap(*pair), nan=1.0))[
        :_MAX_SEQUENCES
    ]
    windows = [_find_worst_stretch(a, b, threshold) for a, b in worst_pairs]
    stretches = [(a[w], b[w], w) for (a, b), w in zip(worst_pairs, windows, strict=True)]
    # aligned stretches need no explanation, and would dilute the fault of a misaligned one
    stretches = [(a, b, w) for a, b, w in stretches if _measure_overlap(a, b) < threshold] or stretches
    pairs = [(a, b) for a, b, _ in stretches]
    overlap = _average_known([_measure_overlap(a, b) for a, b in pairs])
    if not overlap < threshold:  # NaN too: nothing is known, so nothing is wrong
        return Diagnosis(cause=Cause.ALIGNED, fixed_overlap=overlap)
    if _average_known([_measure_repeats(b) for _, b in pairs]) > 0.5:
        return Diagnosis(cause=Cause.ZERO, fixed_overlap=overlap, detail="rows name one expert several times")
    candidates = [[routes[w] for routes in [*replayed, *others][:_MAX_CANDIDATES]] for *_, w in stretches]
    convincing_overlap = threshold - _MARGIN

    def rank_explanation(explanation: tuple[float, Cause, str]) -> tuple[bool, float]:
        """Sort key: SHUFFLED comes last, since one of many sequences fits a short stretch by luck."""
        return explanation[1] is not Cause.SHUFFLED and explanation[0] >= convincing_overlap, explanation[0]

    fixed_overlap, cause, detail = max(
        _try_explanations(pairs, candidates), key=rank_explanation, default=(0.0, Cause.STALE, "")
    )
    # the best of many wrong sequences fits better than a single one, but not as well as the right one
    is_lucky_fit = cause is Cause.SHUFFLED and fixed_overlap < convincing_overlap
    if fixed_overlap >= overlap + _MARGIN and not is_lucky_fit:
        return Diagnosis(cause=cause, fixed_overlap=fixed_overlap, detail=detail)
    cause = Cause.STALE if overlap > _measure_chance_overlap(pairs) + _MARGIN else Cause.UNRELATED
    return Diagnosis(cause=cause, fixed_overlap=overlap)


def _pair_routes(
    native: Sequence[np.ndarray], replayed: Sequence[np.ndarray]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(native, replayed) of each sequence. Raises ValueError where their shapes differ."""
    pairs = list(zip(native, replayed, strict=True))
    for i, (a, b) in enumerate(pairs):
        if a.shape != b.shape or a.ndim != 3:
            raise ValueError(
                f"sequence {i} has native routes {a.shape} and replayed {b.shape}; [T, L, K] both"
            )
    return pairs


def _find_worst_stretch(native: np.ndarray, replayed: np.ndarray, threshold: float) -> slice:
    """The 16 to 512 adjacent rows that fall furthest short of the threshold. Rows that a bug did not affect,
    such as a prompt that siblings share, would hide what fixes the rest."""
    share = shared_ids(native, replayed)
    deficit = np.where(np.isnan(share), 0, threshold - share).sum(axis=1).cumsum()
    min_before = np.minimum.accumulate(np.concatenate(([0.0], deficit)))[:-1]
    stop = int(np.argmax(deficit - min_before)) + 1  # the largest sum of neighbours ends here
    start = int(np.argmin(np.concatenate(([0.0], deficit))[:stop]))
    start = min(start, max(0, stop - _MIN_ROWS))  # further back, if the stretch is short
    return slice(start, min(stop, start + _MAX_ROWS))


def _try_explanations(
    pairs: list[tuple[np.ndarray, np.ndarray]], candidates_by_pair: Sequence[Sequence[np.ndarray]]
) -> Iterator[tuple[float, Cause, str]]:
    """Yield (overlap when fixed, cause, detail) of every explanation. ``candidates_by_pair``: for each pair,
    the routes of other sequences that may have been given to it."""
    for shift in (-2, -1, 1, 2):
        overlapping = [(a[max(-shift, 0) : len(a) - max(shift, 0)], b[max(shift, 0) :]) for a, b in pairs]
        overlap = _average_known([_measure_overlap(a, b[: len(a)]) for a, b in overlapping])
        direction = "later" if shift > 0 else "earlier"
        yield overlap, Cause.SHIFTED, f"each token's routes stand {abs(shift)} row(s) {direction}"
    num_layers = pairs[0][0].shape[1]
    for roll in range(1, num_layers):
        overlap = _average_known([_measure_overlap(a, np.roll(b, -roll, axis=1)) for a, b in pairs])
        yield overlap, Cause.LAYERS, f"layers rolled by {roll} of {num_layers}"
    if num_layers > 2:  # of two layers, the reverse is a roll
        yield (
            _average_known([_measure_overlap(a, b[:, ::-1]) for a, b in pairs]),
            Cause.LAYERS,
            "layers reversed",
        )
    best_overlaps = [
        max(_measure_prefix_overlap(a, b) for b in candidates)
        for (a, _), candidates in zip(pairs, candidates_by_pair, strict=True)
    ]
    yield _average_known(best_overlaps), Cause.SHUFFLED, "another sequence of the batch fits better"


def _measure_prefix_overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Overlap over the common length; 0 if nothing of it is known, or if it is below half of ``a``, since a
    few rows agree by chance."""
    length = min(len(a), len(b))
    return float(np.nan_to_num(_measure_overlap(a[:length], b[:length]))) if 2 * length >= len(a) else 0.0


def _measure_chance_overlap(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """Overlap with rows of other tokens, which is above zero since some experts are popular everywhere."""
    return _average_known([_measure_overlap(a, np.roll(b, len(b) // 2, axis=0)) for a, b in pairs])


def _measure_repeats(ids: np.ndarray) -> float:
    """Share of known rows in which an expert occurs twice; NaN without any."""
    ordered = np.sort(ids[ids[:, 0, 0] != NO_EXPERT], axis=-1)
    if ordered.size == 0 or ordered.shape[-1] == 1:
        return float("nan")
    return float((ordered[..., 1:] == ordered[..., :-1]).any(axis=-1).mean())


def _measure_overlap(a: np.ndarray, b: np.ndarray) -> float:
    return _average_known(shared_ids(a, b))


def _average_known(values: np.ndarray | Sequence[float]) -> float:
    """Mean of the values that are not NaN; NaN, without a warning, if there are none."""
    numbers = np.asarray(values, np.float64)
    numbers = numbers[~np.isnan(numbers)]
    return float(numbers.mean()) if numbers.size else float("nan")
