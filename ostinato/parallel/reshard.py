"""From the layout of one phase to that of another: who sends which part of an adapter to whom.

Factors are logical tensors, of which ``share.placed`` says what each rank keeps. So a plan follows from two
lists of shares alone: what a rank is to have and does not hold yet is sent to it once, by one of those that
hold it, and nothing else moves. A checkpoint or a publish from one place is the plan in which rank 0 is to
have everything. The base does not move at all: where a rank's shares are equal in both phases it maps one
copy for both (``model.shared``), elsewhere each phase loads its own part from the checkpoint.

    held     {rank: its shares} before    --Reshard.plan-->   moves      pure, no torch
    wanted   {rank: its shares} after     --Reshard.run--->   tensors    one exchange for each layer
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from ostinato.model.config import ModelConfig
from ostinato.model.pieces import blocks
from ostinato.model.shapes import AdapterSpec, adapter_shapes
from ostinato.model.share import Share, Spans, placed, size_of
from ostinato.parallel.layout import Layout
from ostinato.parallel.shares import shares_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ostinato.parallel.links import Links

Holdings = Mapping[int, Sequence[Share]]  # by rank: what it keeps, a share for each of its chunks of layers
Shapes = Mapping[str, tuple[int, ...]]  # of whole tensors, by name
Part = tuple[Spans, ...]  # of a tensor: along each dimension, the indices that are kept


@dataclass(frozen=True, slots=True)
class Move:
    """A part of a tensor goes from rank ``source`` to rank ``target``; where they are one, it stays."""

    name: str
    source: int
    target: int
    part: Part

    @property
    def elements(self) -> int:
        return size_of(self.part)


def holdings(layout: Layout, config: ModelConfig, first: int = 0) -> dict[int, tuple[Share, ...]]:
    """Of the ranks of a layout, counted from ``first``: phases on other ranks have other numbers."""
    return {first + rank: shares_of(layout, config, rank) for rank in range(layout.world)}


def factor_shapes(config: ModelConfig, spec: AdapterSpec) -> dict[str, tuple[int, ...]]:
    """Of an adapter's factors, named as in ``Adapters.state_dict``."""
    return {
        f"{name}.{part}": shape
        for name, pair in adapter_shapes(config, spec).items()
        for part, shape in zip("AB", pair, strict=True)
    }


def same_base(one: Holdings, other: Holdings) -> frozenset[int]:
    """The ranks that keep the same of the base in both phases, and so need one copy of it: on one host and in
    one dtype that of ``model.shared``."""
    return frozenset(rank for rank in one.keys() & other.keys() if tuple(one[rank]) == tuple(other[rank]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """A plan, in the order in which it is carried out. Ranks are places on one axis."""

    config: ModelConfig
    shapes: Shapes
    held: Holdings
    wanted: Holdings
    moves: tuple[Move, ...]

    @classmethod
    def plan(cls, config: ModelConfig, shapes: Shapes, held: Holdings, wanted: Holdings) -> Reshard:
        """What has to move, and what stays, so that every rank of ``wanted`` has its part.

        As little as possible is sent: what a rank lacks, once. Ranks that hold the same take turns.
        Raises ValueError where something that is wanted is held by nobody.
        """
        moves = tuple(_moves(config, shapes, held, wanted))
        return cls(config=config, shapes=shapes, held=held, wanted=wanted, moves=moves)

    def sent(self, itemsize: int = 4) -> Counter[tuple[int, int]]:
        """Bytes by (source, target), of what leaves a rank."""
        total: Counter[tuple[int, int]] = Counter()
        for move in self.moves:
            if move.source != move.target:
                total[move.source, move.target] += move.elements * itemsize
        return total

    def run(
        self, own: Mapping[str, Tensor], links: Links, dtype: torch.dtype, axis: str = "all"
    ) -> dict[str, Tensor]:
        """This rank's parts of before, by name, become its parts of after, in memory of their own.

        Every rank of the axis calls it. One exchange for each layer, so that besides what it keeps a rank has
        one layer of what travels in memory. All tensors are of ``dtype``, on the CPU.
        """
        import torch

        rank = links.place(axis)
        before, after = self._parts(self.held, rank), self._parts(self.wanted, rank)
        result = {
            name: torch.empty([sum(map(len, kept)) for kept in part], dtype=dtype)
            for name, part in after.items()
        }
        for _, moves in groupby(self.moves, key=lambda move: _layer(move.name)):
            _exchange(list(moves), _Side(own, before), _Side(result, after), links, dtype, axis)
        return result

    def _parts(self, held: Holdings, rank: int) -> dict[str, Part]:
        """What a rank keeps, by name."""
        alone = {rank: held.get(rank, ())}
        names = self.shapes.items()
        return {name: part for name, shape in names for _, part in _keepers(self.config, alone, name, shape)}


def _moves(config: ModelConfig, shapes: Shapes, held: Holdings, wanted: Holdings) -> Iterator[Move]:
    known: dict[Any, list[_Need]] = {}  # layers that are cut alike have one pattern
    turn = 0
    for name, shape in shapes.items():
        before, after = (tuple(_keepers(config, one, name, shape)) for one in (held, wanted))
        if (before, after) not in known:
            known[before, after] = list(_needs(before, after))
        for need in known[before, after]:
            found = 0
            for ranks, common, size in need.owners:
                source = need.target if need.target in ranks else ranks[turn % len(ranks)]
                turn += source != need.target
                found += size
                yield Move(name, source, need.target, common)
            if found != need.elements:
                raise ValueError(
                    f"rank {need.target} is to have {need.elements} elements of {name}, of which {found} are "
                    "held; give shares that together are the model"
                )


class _Need(NamedTuple):
    """What a rank is to have of a tensor, and who holds which part of it: (replicas, part, its elements)."""

    target: int
    elements: int
    owners: list[tuple[list[int], Part, int]]


def _needs(before: Sequence[tuple[int, Part]], after: Sequence[tuple[int, Part]]) -> Iterator[_Need]:
    replicas: dict[Part, list[int]] = {}
    for rank, part in before:
        replicas.setdefault(part, []).append(rank)
    for target, needed in after:
        owners = []
        for part, ranks in replicas.items():
            if (common := _shared(needed, part)) is not None:
                owners.append((ranks, common, size_of(common)))
        yield _Need(target, size_of(needed), owners)


def _shared(one: Part, other: Part) -> Part | None:
    """What two parts of a tensor share, in the order of the first; None where that is nothing."""
    spans = []
    for mine, theirs in zip(one, other, strict=True):
        both = (range(max(a.start, b.start), min(a.stop, b.stop)) for a in mine for b in theirs)
        if not (common := tuple(span for span in both if len(span))):
            return None
        spans.append(common)
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class _Side:
    """A rank's tensors before or after, and what of the whole each of them is."""

    tensors: Mapping[str, Tensor]
    parts: Mapping[str, Part]

    def views(self, move: Move) -> Iterator[Tensor]:
        """The blocks of what moves, where they lie here."""
        for there, _ in blocks(move.part):
            box = tuple(_within(one, kept) for one, kept in zip(there, self.parts[move.name], strict=True))
            yield self.tensors[move.name][box]


def _exchange(
    moves: Sequence[Move], before: _Side, after: _Side, links: Links, dtype: torch.dtype, axis: str
) -> None:
    """One all-to-all of flat numbers: to each rank its moves, in the order of the plan."""
    import torch

    rank, ranks = links.place(axis), range(links.size(axis))
    leaving = {one: [m for m in moves if m.source == rank and m.target == one != rank] for one in ranks}
    coming = {one: [m for m in moves if m.target == rank and m.source == one != rank] for one in ranks}
    pieces = [view.flatten() for some in leaving.values() for move in some for view in before.views(move)]
    out = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype)
    there, here = ([sum(move.elements for move in some) for some in by.values()] for by in (leaving, coming))
    received, start = links.exchanged(out, there, here, axis), 0
    for view in (view for some in coming.values() for move in some for view in after.views(move)):
        view.copy_(received[start : start + view.numel()].view(view.shape))
        start += view.numel()
    for move in moves:
        if move.source == move.target == rank:
            for old, new in zip(before.views(move), after.views(move), strict=True):
                new.copy_(old)


def _within(wanted: slice, kept: Spans) -> slice:
    """A range of the whole, of which all is kept, in the part."""
    start = 0
    for span in kept:
        if span.start <= wanted.start and wanted.stop <= span.stop:
            return slice(start + wanted.start - span.start, start + wanted.stop - span.start)
        start += len(span)
    raise ValueError(f"{wanted} is not within {kept}")


def _keepers(
    config: ModelConfig, held: Holdings, name: str, shape: tuple[int, ...]
) -> Iterator[tuple[int, Part]]:
    """(rank, its part) of all that keep something of a tensor."""
    layer = _layer(name)
    for rank, shares in held.items():
        share = next((one for one in shares if layer in one.layers), None)
        if share is not None:
            yield rank, placed(config, share, name, shape)


def _layer(name: str) -> int:
    return int(name.split(".", 2)[1])


__all__ = ["Holdings", "Move", "Reshard", "factor_shapes", "holdings", "same_base"]
