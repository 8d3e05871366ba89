"""What one rank of a layout goes through of a microbatch: its rows, and those that it answers for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ostinato.model.packed import PackedAttention
from ostinato.parallel.chunks import Rows
from ostinato.parallel.collectives import Collectives
from ostinato.parallel.layout import Layout
from ostinato.parallel.mesh import Mesh
from ostinato.parallel.rows import Ulysses
from ostinato.train.inputs import Inputs
from ostinato.types import NO_EXPERT, Segment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slice:
    """What of a microbatch one rank goes through. T rows with padding, n of them this rank's own.

    Seven rows over c2 t2 (P is padding), and what rank (context 1, tensor 0) has of them::

        row        0 1 2 3 4 5 6 P
        context    0 0 0 0 1 1 1 1     rows: tokens and positions of rows 4 to 7
        tensor     0 0 1 1 0 0 1 1     own: rows 4 and 5
    """

    source: Inputs | None  # None: all rows are padding
    index: int  # of the microbatch among those of the call
    rows: Rows  # of the context slice; the routes of own rows
    own: range  # of the T rows, those of this rank
    real: int  # how many of the own rows, the first ones, are no padding
    carried: Tensor | None  # [n, moe_layers, top_k] int16, NO_EXPERT where there is padding
    predictors: Tensor  # [m] int64: the rows of the context slice whose hidden states predict ...
    places: Tensor  # [m] int64: ... these of the R targets


def sliced(part: Inputs, index: int, mesh: Mesh, links: Collectives) -> Slice:
    """The share of this rank in a microbatch of its data rank."""
    length = len(part.tokens)
    total = length + padding(length, mesh.layout)
    context, own = _ranges(total, mesh)
    segments = part.segments
    if total > length:
        segments = (*segments, Segment(start=length, stop=total))
    here = (part.rows >= context.start) & (part.rows < context.stop)

    def routes(ids: Tensor | None) -> Tensor | None:
        return None if ids is None else _filled(ids, own, NO_EXPERT)

    rows = Rows(
        tokens=_filled(part.tokens, context, 0),
        positions=_filled(part.positions, context, 0),
        attend=Ulysses(PackedAttention(segments), links),
        routing=routes(part.routing),
    )
    return Slice(
        source=part,
        index=index,
        rows=rows,
        own=own,
        real=max(0, min(length, own.stop) - own.start),
        carried=routes(part.carried),
        predictors=part.rows[here] - context.start,
        places=here.nonzero().squeeze(1),
    )


def idle(mesh: Mesh, links: Collectives) -> Slice:
    """A pass of a rank that has no microbatch left, so that the others find it in their collectives."""
    total = mesh.layout.row_shards
    context, own = _ranges(total, mesh)
    blank = torch.zeros(len(context), dtype=torch.int64, device=mesh.device)
    attend = Ulysses(PackedAttention((Segment(start=0, stop=total),)), links)
    none = blank[:0]
    return Slice(
        source=None,
        index=-1,
        rows=Rows(tokens=blank, positions=blank, attend=attend),
        own=own,
        real=0,
        carried=None,
        predictors=none,
        places=none,
    )


def padding(rows: int, layout: Layout) -> int:
    """Rows that a microbatch of so many gets besides, to be cut evenly."""
    return -rows % layout.row_shards


def _ranges(total: int, mesh: Mesh) -> tuple[range, range]:
    """(rows of a context slice, own rows)."""
    layout, at = mesh.layout, mesh.coords
    width, narrow = total // layout.context, total // layout.row_shards
    start = at.context * width
    first = start + at.tensor * narrow
    return range(start, start + width), range(first, first + narrow)


def _filled(x: Tensor, rows: range, fill: int) -> Tensor:
    """Rows of x, those behind its end filled."""
    found = x[rows.start : rows.stop]
    missing = len(rows) - len(found)
    return torch.cat((found, x.new_full((missing, *x.shape[1:]), fill))) if missing else found


__all__ = ["Slice", "idle", "padding", "sliced"]
