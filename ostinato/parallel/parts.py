"""The chunks that a rank keeps, cut from a decoder that is there as a whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ostinato.model.decoder import Decoder
from ostinato.model.share import Share, placed
from ostinato.parallel.pieces import cut


@torch.no_grad()
def own_decoders(whole: Decoder, shares: Sequence[Share]) -> list[Decoder]:
    """A frozen decoder for each share, with copies of the weights: what loading it from the folder gives."""
    weights = dict(whole.named_parameters())
    found = []
    for share in shares:
        part = Decoder(
            whole.config,
            dtype=whole.dtype,
            device=whole.device,
            fp32_head=whole.fp32_head,
            share=share,
        )
        for name, parameter in part.named_parameters():
            parameter.copy_(cut(weights[name], placed(whole.config, share, name, weights[name].shape)))
        found.append(part)
    return found


__all__ = ["own_decoders"]
