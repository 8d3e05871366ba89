"""Tiny models of every family, in folders, and layouts that can cut them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ostinato.model.config import ModelConfig, QKNorm, parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import save_model
from ostinato.model.weights import Moe

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {**DEEPSEEK, "q_lora_rank": 24, "n_group": 4, "topk_group": 2},
    "deepseek_v3-plain-q": {
        **DEEPSEEK,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
    },
}
DENSE = ("1", "t2", "t4", "p2", "p4", "p2v2t2", "d2t2")
SPARSE = ("d2e2", "d2t2e4", "d2t2e2x2", "t2x2", "p2d2e2", "p2v2t2e2")
HEADLESS = ("p2", "d2e2", "d8e8", "p2d2e2")  # cut no heads: all heads are normed at once in olmoe


def config_of(family: str, **changed: Any) -> ModelConfig:
    return parse_config({**SMALL, **FAMILIES[family], **changed})


def layouts_of(family: str) -> tuple[str, ...]:
    """That can cut this family."""
    config = config_of(family)
    if config.qk_norm == QKNorm.FULL:
        return HEADLESS
    return DENSE if config.moe is None else (*DENSE, *SPARSE)


def model_of(family: str, dtype: torch.dtype = torch.float32, **changed: Any) -> Decoder:
    """Random weights, every vector too: what is alike everywhere would hide what is in the wrong place."""
    decoder = Decoder(config_of(family, **changed), dtype=dtype).init_weights(3)
    generator = torch.Generator().manual_seed(4)
    for name, weight in decoder.named_parameters():
        if name.endswith("norm") or name.endswith("bias"):
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator).to(dtype)
    for block in decoder.blocks:
        if isinstance(block.mlp, Moe) and block.mlp.correction_bias is not None:
            block.mlp.correction_bias.data.normal_(0, 0.3, generator=generator)
    return decoder


def saved(decoder: Decoder, folder: Path, shard_bytes: float = 5e9) -> Path:
    save_model(decoder, folder, shard_bytes=shard_bytes)
    return folder
