"""The fingerprint of a base on many ranks, equal to ``peft_io.compute_base_fingerprint`` of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ostinato.model.config import ModelConfig
from ostinato.model.decoder import Decoder
from ostinato.model.peft_io import compute_fingerprint
from ostinato.model.share import Spans
from ostinato.model.weights import compute_fingerprint_stride
from ostinato.parallel.collectives import Collectives, Mesh, all_gather_ragged
from ostinato.parallel.fsdp import Pieces
from ostinato.parallel.shares import OwnedPart, Placement, owned_parts, shares_of


def sharded_fingerprint(
    mesh: Mesh,
    links: Collectives,
    decoders: Sequence[Decoder],
    *,
    pieces: Pieces | None = None,
    placement: Placement | None = None,
) -> str:
    """The fingerprint, the same on every rank and under every layout, from a few values of every tensor. All
    ranks call it together."""
    config = decoders[0].config
    shapes = parameter_shapes(config)
    shares = [shares_of(mesh.layout, config, rank, placement) for rank in range(mesh.layout.world)]
    parameters = {name: weight for decoder in decoders for name, weight in decoder.named_parameters()}
    samples = {}
    for index, (name, shape) in enumerate(shapes.items()):
        weight = parameters.get(name)
        if weight is None:
            continue
        if pieces is not None and pieces.shape(weight) is not None:
            weight = pieces.join(weight, weight.detach())  # on all of its ranks at once
        own_parts = [part for part in owned_parts(config, shares, name, shape) if part.rank == mesh.rank]
        if own_parts:
            samples[index] = _sample_part(weight.detach(), shape, own_parts[0])
    sizes = [(len(_sample_indices(shape)),) for shape in shapes.values()]
    gathered = all_gather_ragged(links, sizes, samples, dtype=torch.float32, device=mesh.device)
    return compute_fingerprint(
        (name, shape, values) for (name, shape), values in zip(shapes.items(), gathered, strict=True)
    )


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of the whole decoder, by name; nothing is allocated."""
    return {
        name: tuple(parameter.shape) for name, parameter in Decoder(config, device="meta").named_parameters()
    }


def _sample_indices(shape: Sequence[int]) -> np.ndarray:
    """Indices into the flattened whole of the values that are part of the fingerprint."""
    return np.arange(0, int(np.prod(shape)), compute_fingerprint_stride(int(np.prod(shape))))


def _sample_part(weight: Tensor, shape: Sequence[int], part: OwnedPart) -> Tensor:
    """Values at ``_sample_indices`` that ``part`` has, 0 elsewhere; rounded to bf16, as fp32."""
    indices_by_dim = np.unravel_index(_sample_indices(shape), shape)
    local_by_dim = [_locate(spans, ids) for spans, ids in zip(part.spans, indices_by_dim, strict=True)]
    is_local = np.logical_and.reduce([ids >= 0 for ids in local_by_dim])
    values = torch.zeros(len(is_local), dtype=torch.float32, device=weight.device)
    local_indices = tuple(torch.from_numpy(ids[is_local]).to(weight.device) for ids in local_by_dim)
    values[torch.from_numpy(is_local).to(weight.device)] = weight[local_indices].bfloat16().float()
    return values


def _locate(spans: Spans, ids: np.ndarray) -> np.ndarray:
    """Indices ``ids`` of the whole as indices along one dimension of a part; -1 for those of other parts."""
    local_ids, local_start = np.full(len(ids), -1), 0
    for span in spans:
        is_inside = (ids >= span.start) & (ids < span.stop)
        local_ids[is_inside] = ids[is_inside] - span.start + local_start
        local_start += len(span)
    return local_ids
