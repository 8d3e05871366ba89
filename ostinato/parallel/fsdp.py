"""Fully sharded weights: a layer's matrices lie in pieces on data ranks, and are whole while it runs.

What FSDP (arXiv 2304.11277) and ZeRO-3 (arXiv 1910.02054 section 5.3) do, for a decoder whose layers are
plain slots: ``Pieces`` is ``Ops.gather``. Under checkpointing a layer is gathered when it runs and once more
when its backward does, and is freed in between; gradients of trained pieces come back summed and cut. Norms
and biases stay whole, and routed experts too: they are cut by ``e``.

torch's ``fully_shard`` hangs on the hooks of ``nn.Module.__call__``, and this decoder's layers are not called
as modules (``weights.Block``): hence a function of a block, by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ostinato.model.decoder import Decoder
from ostinato.model.weights import Block
from ostinato.parallel.collectives import Collectives


class Pieces:
    """Cuts the matrices of decoders over axis "f", in place, and gathers those of a block while it runs."""

    def __init__(self, links: Collectives) -> None:
        self._links = links
        self._shapes: dict[int, torch.Size] = {}  # of the whole, by id of the piece

    def take(self, decoder: Decoder) -> None:
        """Keep this rank's pieces of a decoder's matrices only, as parameters of the same names."""
        names = {id(parameter): name for name, parameter in decoder.named_parameters()}
        for block in decoder.blocks:
            for holder, field, matrix in _iterate_matrices(block):
                piece_values = cut_piece(matrix.detach(), self._links)
                piece = nn.Parameter(piece_values, requires_grad=matrix.requires_grad)
                self._shapes[id(piece)] = matrix.shape
                path, _, leaf = names[id(matrix)].rpartition(".")
                decoder.get_submodule(path)._parameters[leaf] = piece
                setattr(holder, field, piece)

    def __call__(self, block: Block) -> Block:
        """The block with whole matrices, from one gather of all its pieces; the block itself if it has
        none."""
        matrices = [*_iterate_matrices(block, self._shapes)]
        if not matrices:
            return block
        own_pieces = torch.cat([piece for _, _, piece in matrices])
        by_rank = self._links.all_gather(own_pieces, "f").view(self._links.size("f"), -1)
        whole_by_piece: dict[int, Tensor] = {}
        columns = by_rank.split([len(piece) for _, _, piece in matrices], dim=1)
        for (_, _, piece), column in zip(matrices, columns, strict=True):
            shape = self._shapes[id(piece)]
            whole_by_piece[id(piece)] = column.reshape(-1)[: shape.numel()].view(shape)
        return _replace_matrices(block, whole_by_piece)

    def shape(self, piece: Tensor) -> torch.Size | None:
        """Shape of the matrix that a parameter is a piece of; None where it is whole."""
        return self._shapes.get(id(piece))

    def join(self, piece: Tensor, values: Tensor) -> Tensor:
        """``values`` of one piece (its optimizer moments, itself) joined over the ranks, [whole shape]."""
        return join_piece(values, self._shapes[id(piece)], self._links)

    def own(self, piece: Tensor, whole: Tensor) -> Tensor:
        """The inverse of ``join``: a copy of this rank's piece of ``whole``, with zeros behind the end."""
        return cut_piece(whole, self._links)


def cut_piece(whole: Tensor, links: Collectives) -> Tensor:
    """A flat copy of this rank's piece of ``whole``, with zeros behind the end, so that all are equally
    long."""
    num_parts = links.size("f")
    padded = F.pad(whole.flatten(), (0, -whole.numel() % num_parts))
    return padded.view(num_parts, -1)[links.place("f")].clone()


def join_piece(piece: Tensor, shape: Sequence[int], links: Collectives) -> Tensor:
    """The whole [shape] of the pieces of all ranks; all call it together."""
    return links.gather(piece, "f")[: prod(shape)].view(*shape)


def _iterate_matrices(
    block: Any, pieces: dict[int, torch.Size] | None = None
) -> Iterator[tuple[Any, str, nn.Parameter]]:
    """Yield (owner, its field, the matrix) for every matrix of a block; with ``pieces``, only for those that
    are cut."""
    for field in fields(block):
        value = getattr(block, field.name)
        if is_dataclass(value):
            yield from _iterate_matrices(value, pieces)
        elif isinstance(value, nn.Parameter) and (value.ndim == 2 if pieces is None else id(value) in pieces):
            yield block, field.name, value


def _replace_matrices(holder: Any, whole: dict[int, Tensor]) -> Any:
    """A copy of ``holder`` with the tensors of ``whole`` in the place of their pieces, by id of the piece."""
    changes = {}
    for field in fields(holder):
        value = getattr(holder, field.name)
        if is_dataclass(value):
            changes[field.name] = _replace_matrices(value, whole)
        elif id(value) in whole:
            changes[field.name] = whole[id(value)]
    return replace(holder, **changes)
