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
from ostinato.model.share import count_elements, find_spans
from ostinato.parallel.collectives import Collectives, Mesh
from ostinato.parallel.fsdp import Pieces
from ostinato.parallel.pieces import copy_part, write_part
from ostinato.parallel.shares import OwnedPart, Placement, find_summed_axes, has_part, owned_parts, shares_of

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
            name: find_summed_axes(name, shapes[name], own_share, in_pieces=self._is_in_pieces(leaf))
            for name, leaf in named.items()
        }

    def reduce(self) -> Tensor:
        """See ``train.leaves.Leaves``: sum the gradients over ranks, in place, and return their norm. A leaf
        without a gradient on this rank gets one of zeros."""
        for leaf in self.named.values():
            if leaf.grad is None:
                leaf.grad = torch.zeros_like(leaf)
        for axes in sorted(set(self._axes.values())):
            gradients = [
                _require_gradient(leaf) for name, leaf in self.named.items() if self._axes[name] == axes
            ]
            for bucket in _group_into_buckets(gradients):
                self._sum_gradients(bucket, axes)
        self._sum_tied()
        squares = [
            torch.linalg.vector_norm(_require_gradient(leaf), dtype=torch.float64).square()
            for name, leaf in self.named.items()
            if self._is_counted(name)
        ]
        device = self._mesh.device
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
        return self._links.sum_(total.reshape(1), "all").sqrt()[0]

    def whole(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Complete tensors by name, on the first rank and its CPU; empty on the others. They are sent one at
        a time, each part by one rank. ``own`` has all leaves of this rank, or no leaves on any rank, which
        gives no tensors. Scalars have the same value everywhere, and are not sent."""
        whole_by_name: dict[str, Tensor] = {}
        if not own:
            return whole_by_name
        sample = next(iter(own.values()))
        if not sample.ndim:
            return (
                {name: sample.cpu().clone() for name in self.shapes}
                if self._mesh.rank == 0
                else whole_by_name
            )
        for name, shape in self.shapes.items():
            local_tensor = own.get(name)
            if local_tensor is not None and self._is_in_pieces(self.named[name]):
                assert self._pieces is not None
                local_tensor = self._pieces.join(self.named[name], local_tensor)
            whole_tensor = torch.empty(shape, dtype=sample.dtype) if self._mesh.rank == 0 else None
            for part in owned_parts(self._config, self._shares, name, shape):
                self._transfer_part(part, local_tensor, whole_tensor, sample.dtype)
            if whole_tensor is not None:
                whole_by_name[name] = whole_tensor
        return whole_by_name

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a complete tensor that belongs to the leaf ``name``; a scalar is its own."""
        if not whole.ndim:
            return whole
        share = next(share for share in self._shares[self._mesh.rank] if has_part(self._config, share, name))
        part = copy_part(whole, find_spans(self._config, share, name, whole.shape))
        leaf = self.named[name]
        if not self._is_in_pieces(leaf):
            return part
        assert self._pieces is not None
        return self._pieces.own(leaf, part)

    def _is_in_pieces(self, leaf: Tensor) -> bool:
        return self._pieces is not None and self._pieces.shape(leaf) is not None

    def _sum_gradients(self, gradients: Sequence[Tensor], axes: Sequence[str]) -> None:
        """Sum ``gradients`` in place over ``axes``, flattened into one tensor."""
        if all(self._mesh.size(axis) == 1 for axis in axes):
            return
        flat_gradients = torch.cat([gradient.flatten() for gradient in gradients])
        for axis in axes:
            self._links.sum_(flat_gradients, axis)
        for gradient, gradient_sum in zip(
            gradients, flat_gradients.split([gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(gradient_sum.view_as(gradient))

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

    def _is_counted(self, name: str) -> bool:
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
                write_part(whole, part.spans, local_tensor.cpu())
        elif whole is not None:
            shape = [count_elements([spans]) for spans in part.spans]
            write_part(whole, part.spans, self._links.receive(shape, dtype, "all", part.rank).wait().cpu())


def _require_gradient(leaf: Tensor) -> Tensor:
    """The gradient of a leaf that must have one."""
    assert leaf.grad is not None
    return leaf.grad


def _group_into_buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield runs of tensors of at most BUCKET_BYTES together; a larger tensor is alone in its run."""
    bucket: list[Tensor] = []
    bucket_bytes = 0
    for gradient in gradients:
        if bucket and bucket_bytes + gradient.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, bucket_bytes = [], 0
        bucket.append(gradient)
        bucket_bytes += gradient.nbytes
    if bucket:
        yield bucket
