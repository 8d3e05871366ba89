"""The chunks of decoder layers that a rank of a pipeline runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ostinato.model.attention import Attend
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.parallel.stages import Forward

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The inputs of every chunk of a rank for a microbatch. ``routing``: experts to replay for own rows, [own
    rows, L, K] over all MoE layers of the model, of which every chunk selects its own."""

    tokens: Tensor  # [T / c]
    positions: Tensor  # [T / c]
    attend: Attend
    routing: Tensor | None = None


def decoder_chunks(
    decoders: Mapping[int, Decoder],
    adapters: Adapters | None,
    rows: Callable[[Part], Rows],
    *,
    ops: Ops = TORCH_OPS,
    recompute: bool = False,
) -> Forward[Part]:
    """The forward that ``stages.Stages`` runs. Its extras are the experts that a chunk chose itself, [own
    rows, L of the chunk, K] int16, or None where it has no MoE layer.

    ``decoders``: by chunk, those of this rank. ``adapters``: of all their layers. ``recompute``: keep one
    activation per layer, where there are gradients. Routing is taken as checked (``moe.check_routing``).
    """
    adapters_by_chunk = {
        chunk: _select_layers_of_adapters(adapters, decoder.share.layers)
        for chunk, decoder in decoders.items()
    }

    def forward(chunk: int, part: Part, x: Tensor | None, /) -> tuple[Tensor, Tensor | None]:
        decoder, part_rows = decoders[chunk], rows(part)
        return decoder(
            part_rows.tokens,
            part_rows.positions,
            part_rows.attend,
            adapters=adapters_by_chunk[chunk],
            routing=_select_routing(decoder, part_rows.routing),
            routing_checked=True,
            ops=ops,
            recompute=recompute and torch.is_grad_enabled(),
            residual=x,
        )

    return forward


def _select_layers_of_adapters(adapters: Adapters | None, layers: tuple[int, ...]) -> Adapters | None:
    """Adapters of ``layers`` alone, with the same leaves: a pass would prepare the others for nothing."""
    if adapters is None:
        return None
    pairs = adapters.tensors.items()
    tensors = {name: pair for name, pair in pairs if int(name.split(".")[1]) in layers}
    return Adapters(adapters.spec, tensors, adapters.config)


def _select_routing(decoder: Decoder, routing: Tensor | None) -> Tensor | None:
    """Routing [own rows, L of the chunk, K] from that of the model: the MoE layers of a chunk are
    adjacent."""
    moe, layers = decoder.config.moe, decoder.share.layers
    if routing is None or moe is None or not decoder.num_moe_layers:
        return None
    first_layer = sum(n < layers[0] for n in moe.layers)
    return routing[:, first_layer : first_layer + decoder.num_moe_layers]
