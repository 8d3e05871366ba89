"""A decoder with its adapter added to its weights."""

from __future__ import annotations

import copy

import torch

from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters


def merge(decoder: Decoder, adapters: Adapters) -> Decoder:
    """A copy of the decoder with alpha / r * B A added to every adapted weight, in fp32 before rounding."""
    merged = copy.deepcopy(decoder)
    linears = merged.named_linears()
    with torch.no_grad():
        for name, (a, b) in adapters.tensors.items():
            weight = linears[name].weight
            update = adapters.spec.scale_of(name) * (b.float() @ a.float())
            weight.copy_(weight.float() + update.to(weight.device))
    return merged


__all__ = ["merge"]
