"""What the ranks of a layout train: sums of its gradients over ranks, and the complete tensors for callers.

A leaf that several ranks keep has a part of its gradient on each of them, since every row belongs to one rank
(``parallel.rows``). Over which ranks it is summed follows from what it is:

    dense, whole on every tensor rank (norms, routers, the factors that see the hidden state)   the stage
    dense, cut by tensor ranks                                                                  d and c
    the part of experts                                                  replicas of these experts; with x
                                                                         and not cut by it, t as well
    in pieces over f, summed over f where it was gathered            d / f and c; whole over t: t as well
    an embedding that is the head too, on the first stage and the last                     these two as well

Sums are made once per optimizer step, leaves of one kind in buckets. The norm counts every element once, in
fp64, so all ranks clip alike and take the same step; replicas stay the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ostinato.model.config import ModelConfig
from ostinato.model.share import find_spans, size_of
from ostinato.parallel.collectives import Collectives, Mesh
from ostinato.parallel.fsdp import Pieces
from ostinato.parallel.pieces import cut, put
from ostinato.parallel.shares import OwnedPart, Placement, keeps, owned_parts, shares_of, summed_over

BUCKET_BYTES = 64 << 20  # of gradients that are summed in one call


class ShardedLeaves:
    """``train.leaves.Leaves`` of one rank. ``named``: its leaves; ``shapes``: of all leaves of the whole
    model, in one order everywhere; ``pieces``: of weights that lie in pieces over f."""

    def __init__(
        self,
        mesh: Mesh,
        links: Collectives,
        config: ModelConfig,
        named: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        pieces: Pieces | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.named, self.shapes = named, shapes
        self._mesh, self._links, self._pieces, self._config = mesh, links, pieces, config
        world = range(mesh.layout.world)
        self._shares = [shares_of(mesh.layout, config, rank, placement) for rank in world]
        own_share = self._shares[mesh.rank][0]
        self._axes = {
            name: summed_over(name, shapes[name], own_share, in_pieces=self._is_in_pieces(leaf))
            for name, leaf in named.items()
        }

    def reduce(self) -> Tensor:
        """See ``train.leaves.Leaves``. A leaf that no row of this rank has touched has a gradient of zero."""
        for leaf in self.named.values():
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
        for axes in sorted(set(self._axes.values())):
            gradients = [
                _require_gradient(leaf) for name, leaf in self.named.items() if self._axes[name] == axes
            ]
            for bucket in _group_into_buckets(gradients):
                self._sum(bucket, axes)
        self._sum_tied()
        squares = [
            torch.linalg.vector_norm(_require_gradient(leaf), dtype=torch.float64).square()
            for name, leaf in self.named.items()
            if self._counts(name)
        ]
        device = self._mesh.device
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
        return self._links.sum_(total.reshape(1), "all").sqrt()[0]

    def whole(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Complete tensors by name, on the first rank and its CPU; empty on the others. They are sent one at
        a time, each part by one rank. ``own`` has all leaves of this rank, or none of them on any rank;
        scalars are alike everywhere, and not sent."""
        complete: dict[str, Tensor] = {}
        if not own:
            return complete
        example = next(iter(own.values()))
        if not example.ndim:
            return {name: example.cpu().clone() for name in self.shapes} if self._mesh.rank == 0 else complete
        for name, shape in self.shapes.items():
            local_tensor = own.get(name)
            if local_tensor is not None and self._is_in_pieces(self.named[name]):
                assert self._pieces is not None
                local_tensor = self._pieces.join(self.named[name], local_tensor)
            whole = torch.empty(shape, dtype=example.dtype) if self._mesh.rank == 0 else None
            for part in owned_parts(self._config, self._shares, name, shape):
                self._transfer_part(part, local_tensor, whole, example.dtype)
            if whole is not None:
                complete[name] = whole
        return complete

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a complete tensor that belongs to the leaf ``name``; a scalar is its own."""
        if not whole.ndim:
            return whole
        share = next(share for share in self._shares[self._mesh.rank] if keeps(self._config, share, name))
        part = cut(whole, find_spans(self._config, share, name, whole.shape))
        leaf = self.named[name]
        if not self._is_in_pieces(leaf):
            return part
        assert self._pieces is not None
        return self._pieces.own(leaf, part)

    def _is_in_pieces(self, leaf: Tensor) -> bool:
        return self._pieces is not None and self._pieces.shape(leaf) is not None

    def _sum(self, gradients: Sequence[Tensor], axes: Sequence[str]) -> None:
        """Sum ``gradients`` in place over ``axes``, flattened into one tensor."""
        if all(self._mesh.size(axis) == 1 for axis in axes):
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        for axis in axes:
            self._links.sum_(flat, axis)
        for gradient, summed in zip(
            gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(summed.view_as(gradient))

    def _sum_tied(self) -> None:
        """Sum the gradients of an embedding that is the head too: the last stage sends its own to the first
        and receives the sum."""
        leaf, stages = self.named.get("embed"), self._mesh.layout.pipeline
        if leaf is None or stages == 1 or not self._config.tie_embeddings:
            return
        gradient, stage = _require_gradient(leaf), self._mesh.coords.pipeline
        shape, dtype = gradient.shape, gradient.dtype
        if stage == 0:
            gradient += self._links.receive(shape, dtype, "p", stages - 1).wait()
            self._links.send(gradient, "p", stages - 1).wait()
        else:
            self._links.send(gradient, "p", 0).wait()
            gradient.copy_(self._links.receive(shape, dtype, "p", 0).wait())

    def _counts(self, name: str) -> bool:
        """Whether the elements of a leaf count in the norm at this rank."""
        if name == "embed" and self._mesh.coords.pipeline > 0:
            return False  # it is the head, and tied to that of the first stage
        return all(self._mesh.place(axis) == 0 for axis in self._axes[name])

    def _transfer_part(
        self, part: OwnedPart, local_tensor: Tensor | None, whole: Tensor | None, dtype: torch.dtype
    ) -> None:
        """Send one part to the first rank, which writes it into its place in ``whole``."""
        if self._mesh.rank == part.rank:
            assert local_tensor is not None
            if whole is None:
                self._links.send(local_tensor, "all", 0).wait()
            else:
                put(whole, part.spans, local_tensor.cpu())
        elif whole is not None:
            shape = [size_of([spans]) for spans in part.spans]
            put(whole, part.spans, self._links.receive(shape, dtype, "all", part.rank).wait().cpu())


def _require_gradient(leaf: Tensor) -> Tensor:
    """The gradient of a leaf that must have one."""
    assert leaf.grad is not None
    return leaf.grad


def _group_into_buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors of about BUCKET_BYTES together, at least one in each."""
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and size + gradient.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket
