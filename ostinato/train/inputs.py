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
    counts: Tensor | None = None  # [3, T], gate.row_counts

    @property
    def work(self) -> Work:
        """The work of one forward."""
        return Work.packed(self.segments, len(self.rows))


def as_inputs(microbatch: Microbatch, device: torch.device, *, moe: bool, replay: bool) -> Inputs:
    """The tensors of a microbatch on ``device``. Carried experts are kept with ``moe``, and replayed with
    ``replay`` as well."""

    def tensor(array: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(array.astype(dtype)).to(device)

    carried = tensor(microbatch.experts, np.int16) if moe and microbatch.experts is not None else None
    return Inputs(
        source=microbatch,
        tokens=tensor(microbatch.tokens, np.int64),
        positions=tensor(microbatch.positions, np.int64),
        segments=microbatch.segments,
        rows=tensor(microbatch.rows, np.int64),
        targets=tensor(microbatch.targets, np.int64),
        behaviour=tensor(microbatch.logprobs, np.float32),
        advantages=tensor(microbatch.advantages, np.float32),
        weights=tensor(microbatch.weights, np.float32),
        sample_idx=tensor(microbatch.sample_idx, np.int64),
        carried=carried,
        routing=carried if replay else None,
    )


def otherwise_packed(part: Inputs) -> Iterator[Inputs]:
    """The sequences of ``part`` in their order, no prompt shared, in passes of about half as many rows.

    Their ``rows`` and targets are in the same order as those of ``part``. For scoring only: they carry no
    experts, and the fields that a loss needs are not adapted.
    """
    spans = sequence_spans(part.source)
    lengths = spans[:, 1] - spans[:, 0] + spans[:, 3] - spans[:, 2]
    firsts = np.flatnonzero(np.diff(part.source.sample_idx)) + 1
    targets, support = np.split(part.source.rows, firsts), part.source.support
    edges = np.concatenate(([0], firsts, [len(part.source.rows)]))
    passes = (lengths.cumsum() - lengths) // max(1, len(part.tokens) // 2)
    for sequences in np.split(np.arange(len(spans)), np.flatnonzero(np.diff(passes)) + 1):
        bounds = np.concatenate(([0], lengths[sequences].cumsum())).tolist()
        source_rows = np.concatenate(
            [
                np.r_[prompt_start:prompt_stop, start:stop]
                for start, stop, prompt_start, prompt_stop in spans[sequences]
            ]
        )
        rows = [
            offset + places(targets[sequence], spans[sequence])
            for sequence, offset in zip(sequences, bounds[:-1], strict=True)
        ]
        target_span = slice(edges[sequences[0]], edges[sequences[-1] + 1])
        yield replace(
            part,
            source=replace(
                part.source, support=None if support is None else support.take(np.r_[target_span])
            ),
            tokens=part.tokens[source_rows],
            positions=part.positions[source_rows],
            segments=tuple(Segment(start=start, stop=stop) for start, stop in pairwise(bounds)),
            rows=torch.from_numpy(np.concatenate(rows)).to(part.rows),
            targets=part.targets[target_span],
            carried=None,
            routing=None,
        )


def places(rows: np.ndarray, span: np.ndarray) -> np.ndarray:
    """Positions of rows of a microbatch in their sequence: the shared prompt first, then its own rows."""
    start, _, prompt_start, prompt_stop = span
    return np.where(rows < start, rows - prompt_start, rows - start + prompt_stop - prompt_start)
