"""A microbatch in two, for a device that is full: whole sequences, each with the rows of its prompt.

What is computed of the halves is put together as if of the whole. Only rounding differs.
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
# of the targets, [R] each
SCORED = ("targets", "behaviour", "advantages", "weights", "sample_idx", "old", "reference", "teacher")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Half:
    """Some sequences of a microbatch; ``rows`` [t]: which of its rows they are."""

    inputs: Inputs
    rows: Tensor


def halves(part: Inputs) -> tuple[Half, Half] | None:
    """About as many rows of answers in each; None for a single sequence."""
    spans = sequence_spans(part.source)
    if len(spans) < 2:
        return None
    lengths = (spans[:, 1] - spans[:, 0]).cumsum()
    cut = int(np.searchsorted(lengths, lengths[-1] / 2)) + 1
    cut = min(cut, len(spans) - 1)
    edges = np.concatenate(([0], np.flatnonzero(np.diff(part.source.sample_idx)) + 1, [len(part.rows)]))
    first, second = (
        _half(part, spans[a:z], slice(a, z), slice(int(edges[a]), int(edges[z])))
        for a, z in ((0, cut), (cut, len(spans)))
    )
    return first, second


def _half(part: Inputs, spans: np.ndarray, sequences: slice, scored: slice) -> Half:
    """Of the sequences with these ``spans``, whose targets are the ``scored`` ones."""
    source = part.source
    wanted = np.zeros(len(source.tokens), bool)
    for start, stop, prompt_start, prompt_stop in spans:
        wanted[start:stop] = True
        wanted[prompt_start:prompt_stop] = True
    segments: list[Segment] = []
    for segment in reversed(source.segments):  # a prefix lies before its readers
        if wanted[segment.start : segment.stop].any():
            wanted[segment.start : segment.stop] = wanted[segment.prefix_start : segment.prefix_stop] = True
            segments.append(segment)
    place = np.concatenate(([0], wanted.cumsum()))  # of a row, and of the end of rows
    moved = tuple(
        Segment(
            start=int(place[s.start]),
            stop=int(place[s.stop]),
            prefix_start=int(place[s.prefix_start]),
            prefix_stop=int(place[s.prefix_stop]),
        )
        for s in reversed(segments)
    )
    taken = _taken(source, wanted, place, moved, sequences, scored)
    rows = torch.from_numpy(np.flatnonzero(wanted)).to(part.tokens.device)
    inputs = replace(
        part,
        source=taken,
        tokens=part.tokens[rows],
        positions=part.positions[rows],
        segments=moved,
        rows=torch.from_numpy(taken.rows.astype(np.int64)).to(rows),
        carried=None if part.carried is None else part.carried[rows],
        routing=None if part.routing is None else part.routing[rows],
        counts=None if part.counts is None else part.counts[:, rows],
        **{name: None if (x := getattr(part, name)) is None else x[scored] for name in SCORED},
    )
    return Half(inputs=inputs, rows=rows)


def _taken(
    source: Microbatch,
    wanted: np.ndarray,
    place: np.ndarray,
    segments: tuple[Segment, ...],
    sequences: slice,
    scored: slice,
) -> Microbatch:
    names = ("targets", "logprobs", "advantages", "weights", "sample_idx", "staleness")
    numbers = np.arange(len(source.rows))[scored]
    return replace(
        source,
        tokens=source.tokens[wanted],
        positions=source.positions[wanted],
        segments=segments,
        rows=place[source.rows[scored]].astype(source.rows.dtype),
        uids=source.uids[sequences],
        support=None if source.support is None else source.support.take(numbers),
        experts=None if source.experts is None else source.experts[wanted],
        **{name: getattr(source, name)[scored] for name in names},
    )


def whole_scores(parts: Sequence[tuple[Tensor, Scores]]) -> Scores:
    """Of (rows, scores) of both halves."""
    return Scores(
        logprobs=_joined(parts, lambda one: one.logprobs),
        entropy=_joined(parts, lambda one: one.entropy),
        counts=_by_row(parts, lambda one: one.counts, 1),
        native=_by_row(parts, lambda one: one.native, 0),
        margins=_by_row(parts, lambda one: one.margins, 0),
    )


def whole_outcome(parts: Sequence[tuple[Tensor, Outcome]]) -> Outcome:
    """Of (rows, outcome) of both halves: losses and statistics are sums over tokens."""
    (_, one), (_, other) = parts
    a, b = one.mismatch, other.mismatch
    return Outcome(
        loss=one.loss + other.loss,
        stats={name: value + other.stats[name] for name, value in one.stats.items()},
        mismatch=Mismatch(
            a.count + b.count,
            {name: value + b.sums[name] for name, value in a.sums.items()},
            {name: torch.maximum(value, b.maxima[name]) for name, value in a.maxima.items()},
        ),
        counts=_by_row(parts, lambda outcome: outcome.counts, 1),
    )


def _joined(parts: Sequence[tuple[Tensor, T]], of: Callable[[T], Tensor | None]) -> Tensor | None:
    found = [x for _, one in parts if (x := of(one)) is not None]
    return torch.cat(found) if found else None


def _by_row(parts: Sequence[tuple[Tensor, T]], of: Callable[[T], Tensor | None], dim: int) -> Tensor | None:
    """Rows back in their places in the whole; those of a prompt in both halves are the second's."""
    found = [(rows, x) for rows, one in parts if (x := of(one)) is not None]
    if not found:
        return None
    shape = list(found[0][1].shape)
    shape[dim] = 1 + max(int(rows[-1]) for rows, _ in found)
    whole = found[0][1].new_zeros(shape)
    for rows, x in found:
        whole.index_copy_(dim, rows, x)
    return whole
