"""Splitting a microbatch in two for a device that is full: whole sequences, each with the rows of its prompt.

Results of the halves are merged into those of the whole; they differ from it only by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ostinato.algo.offpolicy import Mismatch
from ostinato.algo.routing import sequence_spans
from ostinato.train.inputs import Inputs
from ostinato.train.passes import Outcome, Scores
from ostinato.types import Microbatch, Segment

T = TypeVar("T")
# fields of the targets, [R] each
TARGET_FIELDS = ("targets", "behaviour", "advantages", "weights", "sample_idx", "old", "reference", "teacher")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Half:
    """Some sequences of a microbatch; ``rows`` [t]: which of its rows they are."""

    inputs: Inputs
    rows: Tensor


def halve(part: Inputs) -> tuple[Half, Half] | None:
    """Two halves with about equally many rows of answers; None if there is one sequence."""
    spans = sequence_spans(part.source)
    if len(spans) < 2:
        return None
    lengths = (spans[:, 1] - spans[:, 0]).cumsum()
    cut = int(np.searchsorted(lengths, lengths[-1] / 2)) + 1
    cut = min(cut, len(spans) - 1)
    edges = np.concatenate(([0], np.flatnonzero(np.diff(part.source.sample_idx)) + 1, [len(part.rows)]))
    first, second = (
        _take_half(part, spans[begin:end], slice(begin, end), slice(int(edges[begin]), int(edges[end])))
        for begin, end in ((0, cut), (cut, len(spans)))
    )
    return first, second


def _take_half(part: Inputs, spans: np.ndarray, sequences: slice, targets: slice) -> Half:
    """The half with the ``sequences`` at these ``spans`` [S, 4]; ``targets``: the slice of their targets."""
    source = part.source
    is_taken = np.zeros(len(source.tokens), bool)
    for start, stop, prompt_start, prompt_stop in spans:
        is_taken[start:stop] = True
        is_taken[prompt_start:prompt_stop] = True
    segments: list[Segment] = []
    for segment in reversed(source.segments):  # a prefix lies before its readers
        if is_taken[segment.start : segment.stop].any():
            is_taken[segment.start : segment.stop] = is_taken[segment.prefix_start : segment.prefix_stop] = (
                True
            )
            segments.append(segment)
    new_row = np.concatenate(([0], is_taken.cumsum()))  # of each old row, and of the end of the rows
    new_segments = tuple(
        Segment(
            start=int(new_row[s.start]),
            stop=int(new_row[s.stop]),
            prefix_start=int(new_row[s.prefix_start]),
            prefix_stop=int(new_row[s.prefix_stop]),
        )
        for s in reversed(segments)
    )
    half_source = _take_microbatch(source, is_taken, new_row, new_segments, sequences, targets)
    rows = torch.from_numpy(np.flatnonzero(is_taken)).to(part.tokens.device)
    inputs = replace(
        part,
        source=half_source,
        tokens=part.tokens[rows],
        positions=part.positions[rows],
        segments=new_segments,
        rows=torch.from_numpy(half_source.rows.astype(np.int64)).to(rows),
        carried=None if part.carried is None else part.carried[rows],
        routing=None if part.routing is None else part.routing[rows],
        counts=None if part.counts is None else part.counts[:, rows],
        **{name: None if (x := getattr(part, name)) is None else x[targets] for name in TARGET_FIELDS},
    )
    return Half(inputs=inputs, rows=rows)


def _take_microbatch(
    source: Microbatch,
    is_taken: np.ndarray,
    new_row: np.ndarray,
    segments: tuple[Segment, ...],
    sequences: slice,
    targets: slice,
) -> Microbatch:
    """The microbatch of a half: its rows are ``is_taken`` [T] bool, ``new_row`` [T + 1] their new indices."""
    names = ("targets", "logprobs", "advantages", "weights", "sample_idx", "staleness")
    target_indices = np.arange(len(source.rows))[targets]
    return replace(
        source,
        tokens=source.tokens[is_taken],
        positions=source.positions[is_taken],
        segments=segments,
        rows=new_row[source.rows[targets]].astype(source.rows.dtype),
        uids=source.uids[sequences],
        support=None if source.support is None else source.support.take(target_indices),
        experts=None if source.experts is None else source.experts[is_taken],
        **{name: getattr(source, name)[targets] for name in names},
    )


def merge_scores(parts: Sequence[tuple[Tensor, Scores]]) -> Scores:
    """Scores of the whole from the (rows, scores) of both halves."""
    return Scores(
        logprobs=_join_targets(parts, lambda scores: scores.logprobs),
        entropy=_join_targets(parts, lambda scores: scores.entropy),
        counts=_merge_rows(parts, lambda scores: scores.counts, 1),
        native=_merge_rows(parts, lambda scores: scores.native, 0),
        margins=_merge_rows(parts, lambda scores: scores.margins, 0),
    )


def merge_outcomes(parts: Sequence[tuple[Tensor, Outcome]]) -> Outcome:
    """Outcome of the whole from the (rows, outcome) of both halves; losses and statistics are sums over
    tokens, and are added."""
    (_, first), (_, second) = parts
    first_mismatch, second_mismatch = first.mismatch, second.mismatch
    return Outcome(
        loss=first.loss + second.loss,
        stats={name: value + second.stats[name] for name, value in first.stats.items()},
        mismatch=Mismatch(
            first_mismatch.count + second_mismatch.count,
            {name: value + second_mismatch.sums[name] for name, value in first_mismatch.sums.items()},
            {
                name: torch.maximum(value, second_mismatch.maxima[name])
                for name, value in first_mismatch.maxima.items()
            },
        ),
        counts=_merge_rows(parts, lambda outcome: outcome.counts, 1),
    )


def _join_targets(
    parts: Sequence[tuple[Tensor, T]], get_value: Callable[[T], Tensor | None]
) -> Tensor | None:
    """Values by target of both halves, one after the other. None without values."""
    values = [x for _, result in parts if (x := get_value(result)) is not None]
    return torch.cat(values) if values else None


def _merge_rows(
    parts: Sequence[tuple[Tensor, T]], get_value: Callable[[T], Tensor | None], dim: int
) -> Tensor | None:
    """Values by row, written to their rows of the whole along ``dim``. If both halves have a row (of a
    prompt), the value of the second half stays. None without values."""
    values_by_rows = [(rows, x) for rows, result in parts if (x := get_value(result)) is not None]
    if not values_by_rows:
        return None
    shape = list(values_by_rows[0][1].shape)
    shape[dim] = 1 + max(int(rows[-1]) for rows, _ in values_by_rows)
    whole = values_by_rows[0][1].new_zeros(shape)
    for rows, x in values_by_rows:
        whole.index_copy_(dim, rows, x)
    return whole
