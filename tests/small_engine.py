"""A decoder so small that an engine on it answers in milliseconds: mixture of experts, grouped queries, and
weights large enough that it says different things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, AdapterSpec, init_adapters

VOCAB = 61
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXY"


def tiny(
    moe: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool = True,
    vocab: int = VOCAB,
) -> Decoder:
    config: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "vocab_size": vocab,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [] if moe else [0, 1],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "initializer_range": 0.3,
    }
    return Decoder(parse_config(config), dtype=dtype).init_weights(seed)


def adapters_of(decoder: Decoder, seed: int) -> Adapters:
    """Adapters that change what it says."""
    adapters = init_adapters(decoder.config, AdapterSpec(rank=4), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in adapters.tensors.values():
            b.normal_(0, 0.2, generator=generator)
    return adapters


def decode(tokens: Sequence[int]) -> str:
    """A letter for each token."""
    return "".join(ALPHABET[token] for token in tokens)
