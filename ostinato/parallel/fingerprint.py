"""The fingerprint of a base that lies on many ranks: what ``peft_io.base_fingerprint`` says of the whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ostinato.model.config import ModelConfig
from ostinato.model.decoder import Decoder
from ostinato.model.peft_io import fingerprint_of
from ostinato.model.share import Spans
from ostinato.model.weights import fingerprint_stride
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
    """The same on every rank and under every layout; a few values of every tensor are exchanged."""
    config = decoders[0].config
    shapes = parameter_shapes(config)
    shares = [shares_of(mesh.layout, config, rank, placement) for rank in range(mesh.layout.world)]
    held = {name: weight for decoder in decoders for name, weight in decoder.named_parameters()}
    own = {}
    for index, (name, shape) in enumerate(shapes.items()):
        weight = held.get(name)
        if weight is None:
            continue
        if pieces is not None and pieces.shape(weight) is not None:
            weight = pieces.joined(weight, weight.detach())  # on all of its ranks at once
        mine = [part for part in owned_parts(config, shares, name, shape) if part.rank == mesh.rank]
        if mine:
            own[index] = _sampled(weight.detach(), shape, mine[0])
    sizes = [(len(_indices(shape)),) for shape in shapes.values()]
    found = all_gather_ragged(links, sizes, own, dtype=torch.float32, device=mesh.device)
    return fingerprint_of(
        (name, shape, one) for (name, shape), one in zip(shapes.items(), found, strict=True)
    )


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of every parameter of the whole decoder, by name; nothing is allocated."""
    return {name: tuple(one.shape) for name, one in Decoder(config, device="meta").named_parameters()}


def _indices(shape: Sequence[int]) -> np.ndarray:
    """The places in the flattened whole whose values are part of the fingerprint."""
    return np.arange(0, int(np.prod(shape)), fingerprint_stride(int(np.prod(shape))))


def _sampled(weight: Tensor, shape: Sequence[int], part: OwnedPart) -> Tensor:
    """Their values where they are here, 0 elsewhere; rounded to bf16, as fp32."""
    places = np.unravel_index(_indices(shape), shape)
    local = [_local(spans, ids) for spans, ids in zip(part.spans, places, strict=True)]
    here = np.logical_and.reduce([ids >= 0 for ids in local])
    values = torch.zeros(len(here), dtype=torch.float32, device=weight.device)
    at = tuple(torch.from_numpy(ids[here]).to(weight.device) for ids in local)
    values[torch.from_numpy(here).to(weight.device)] = weight[at].bfloat16().float()
    return values


def _local(spans: Spans, ids: np.ndarray) -> np.ndarray:
    """Where indices of the whole stand along one dimension of a part; -1 where they do not."""
    found, start = np.full(len(ids), -1), 0
    for span in spans:
        inside = (ids >= span.start) & (ids < span.stop)
        found[inside] = ids[inside] - span.start + start
        start += len(span)
    return found
