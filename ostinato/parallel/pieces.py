"""Cutting of whole tensors into the parts that a rank keeps, and back, by ``share.find_spans`` alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ostinato.model.config import ModelConfig
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.shapes import AdapterSpec, compute_adapter_shapes
from ostinato.model.share import Share, Spans, find_spans, iterate_blocks, make_local_config


def copy_part(whole: Tensor, spans: Sequence[Spans]) -> Tensor:
    """A copy of the part of ``whole`` at ``spans``, which has an entry for each dimension; the spans of one
    dimension are joined in their order."""
    for dim, spans_of_dim in enumerate(spans):
        if spans_of_dim != (range(whole.shape[dim]),):
            parts = [whole.narrow(dim, span.start, len(span)) for span in spans_of_dim]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole.clone(memory_format=torch.contiguous_format)


def write_part(whole: Tensor, spans: Sequence[Spans], part: Tensor) -> None:
    """Write ``part`` into its place in ``whole``: the inverse of ``copy_part``."""
    for whole_index, part_index in iterate_blocks(spans):
        whole[whole_index].copy_(part[part_index])


def layers_of(shares: Sequence[Share]) -> frozenset[int]:
    """All layers that a rank keeps, over its chunks."""
    return frozenset(layer for share in shares for layer in share.layers)


def own_adapters(
    config: ModelConfig, shares: Sequence[Share], spec: AdapterSpec, whole: Mapping[str, Tensor]
) -> Adapters:
    """The part of an adapter that a rank trains, as leaves with gradients.

    ``whole``: the factors of the model as ``Adapters.state_dict`` names them; those of other layers may be
    absent. Shares of one rank differ in their layers only.
    """
    share, layers = shares[0], layers_of(shares)
    tensors = {}
    for name, shapes in compute_adapter_shapes(config, spec).items():
        if int(name.split(".")[1]) in layers:
            a_factor, b_factor = (
                copy_part(whole[f"{name}.{part}"], find_spans(config, share, f"{name}.{part}", shape))
                for part, shape in zip("AB", shapes, strict=True)
            )
            tensors[name] = (a_factor.requires_grad_(), b_factor.requires_grad_())
    return Adapters(spec, tensors, make_local_config(config, share))


def fresh_adapters(
    config: ModelConfig, shares: Sequence[Share], spec: AdapterSpec, seed: int = 0
) -> Adapters:
    """A rank's part of ``lora.init_adapters``: the same values, one whole factor in memory at a time."""
    share, layers = shares[0], layers_of(shares)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (a_shape, b_shape) in compute_adapter_shapes(config, spec).items():
        a_factor = (torch.rand(a_shape, generator=generator) * 2 - 1) / math.sqrt(a_shape[-1])
        if int(name.split(".")[1]) in layers:
            b_spans = find_spans(config, share, f"{name}.B", b_shape)
            b_factor = torch.zeros([sum(len(span) for span in spans) for spans in b_spans])
            a_factor = copy_part(a_factor, find_spans(config, share, f"{name}.A", a_shape))
            tensors[name] = (a_factor.requires_grad_(), b_factor.requires_grad_())
    return Adapters(spec, tensors, make_local_config(config, share))


@torch.no_grad()
def own_decoders(whole: Decoder, shares: Sequence[Share]) -> list[Decoder]:
    """A frozen decoder for each share, with copies of the weights: what loading it from the folder gives."""
    weights = dict(whole.named_parameters())
    decoders = []
    for share in shares:
        decoder = Decoder(
            whole.config, dtype=whole.dtype, device=whole.device, fp32_head=whole.fp32_head, share=share
        )
        for name, parameter in decoder.named_parameters():
            parameter.copy_(
                copy_part(weights[name], find_spans(whole.config, share, name, weights[name].shape))
            )
        decoders.append(decoder)
    return decoders
