"""What some ranks know, told to all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from ostinato.parallel.collectives import Collectives


def all_gather_ragged(
    links: Collectives,
    shapes: Sequence[Sequence[int]],
    own: Mapping[int, Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """Tensors of these shapes on all ranks, in one reduction, whoever has them: ``own`` has some of them, by
    index, or has zeros where others have values. What one rank alone has arrives as it is: the rest of the
    sum is zero."""
    sizes = [prod(shape) for shape in shapes]
    flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
    views = [one.view(*shape) for one, shape in zip(flat.split(sizes), shapes, strict=True)]
    for index, values in own.items():
        views[index].copy_(values)
    if len(flat):
        links.sum_(flat, "all")
    return views


__all__ = ["all_gather_ragged"]
