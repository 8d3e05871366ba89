"""The tensors of a microbatch that a forward pass of training takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ostinato.algo.routing import sequence_spans
from ostinato.model.flops import Work
from ostinato.types import Microbatch, Segment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """A Microbatch as tensors on the trainer's device; ``old``, ``reference``, ``teacher`` and ``counts``
    where they were computed ahead."""

    source: Microbatch
    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    segments: tuple[Segment, ...]
    rows: Tensor  # [R] int64
    targets: Tensor  # [R] int64
    behaviour: Tensor  # [R] fp32
    advantages: Tensor  # [R] fp32
    weights: Tensor  # [R] fp32
    sample_idx: Tensor  # [R] int64
    carried: Tensor | None  # [T, moe_layers, top_k] int16, the sampler's experts
    routing: Tensor | None  # the same where they are replayed
    old: Tensor | None = None  # [R] fp32
    reference: Tensor | None = None  # [R] fp32, of the base policy
    teacher: Tensor | None = None  # [R] fp32, of ``train.teacher``
    counts: Tensor | None = None  # [3, T], gate.count_rows

    @property
    def work(self) -> Work:
        """The work of one forward."""
        return Work.from_segments(self.segments, len(self.rows))


def as_inputs(microbatch: Microbatch, device: torch.device, *, moe: bool, replay: bool) -> Inputs:
    """The tensors of a microbatch on ``device``. Carried experts are kept with ``moe``, and replayed with
    ``replay`` as well."""

    def make_tensor(array: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(array.astype(dtype)).to(device)

    carried = make_tensor(microbatch.experts, np.int16) if moe and microbatch.experts is not None else None
    return Inputs(
        source=microbatch,
        tokens=make_tensor(microbatch.tokens, np.int64),
        positions=make_tensor(microbatch.positions, np.int64),
        segments=microbatch.segments,
        rows=make_tensor(microbatch.rows, np.int64),
        targets=make_tensor(microbatch.targets, np.int64),
        behaviour=make_tensor(microbatch.logprobs, np.float32),
        advantages=make_tensor(microbatch.advantages, np.float32),
        weights=make_tensor(microbatch.weights, np.float32),
        sample_idx=make_tensor(microbatch.sample_idx, np.int64),
        carried=carried,
        routing=carried if replay else None,
    )


def repack(part: Inputs) -> Iterator[Inputs]:
    """Yield the sequences of ``part`` in their order, each with its own prompt, in passes of about half as
    many rows. ``rows`` and targets are in the same order as those of ``part``. For scoring only: the results
    carry no experts, and the fields that a loss needs are still those of ``part``.
    """
    spans = sequence_spans(part.source)
    lengths = spans[:, 1] - spans[:, 0] + spans[:, 3] - spans[:, 2]
    sequence_starts = np.flatnonzero(np.diff(part.source.sample_idx)) + 1
    targets, support = np.split(part.source.rows, sequence_starts), part.source.support
    edges = np.concatenate(([0], sequence_starts, [len(part.source.rows)]))
    pass_of_sequence = (lengths.cumsum() - lengths) // max(1, len(part.tokens) // 2)
    for sequences in np.split(np.arange(len(spans)), np.flatnonzero(np.diff(pass_of_sequence)) + 1):
        row_bounds = np.concatenate(([0], lengths[sequences].cumsum())).tolist()
        source_rows = np.concatenate(
            [
                np.r_[prompt_start:prompt_stop, start:stop]
                for start, stop, prompt_start, prompt_stop in spans[sequences]
            ]
        )
        rows = [
            offset + locate_in_sequence(targets[sequence], spans[sequence])
            for sequence, offset in zip(sequences, row_bounds[:-1], strict=True)
        ]
        target_span = slice(edges[sequences[0]], edges[sequences[-1] + 1])
        yield replace(
            part,
            source=replace(
                part.source, support=None if support is None else support.take(np.r_[target_span])
            ),
            tokens=part.tokens[source_rows],
            positions=part.positions[source_rows],
            segments=tuple(Segment(start=start, stop=stop) for start, stop in pairwise(row_bounds)),
            rows=torch.from_numpy(np.concatenate(rows)).to(part.rows),
            targets=part.targets[target_span],
            carried=None,
            routing=None,
        )


def locate_in_sequence(rows: np.ndarray, span: np.ndarray) -> np.ndarray:
    """Positions of rows of a microbatch in their sequence: the shared prompt first, then its own rows."""
    start, _, prompt_start, prompt_stop = span
    return np.where(rows < start, rows - prompt_start, rows - start + prompt_stop - prompt_start)
