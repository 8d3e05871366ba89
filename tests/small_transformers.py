"""Tiny random models of families of ``transformers``, saved as it saves them, and LoRA away from zero."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from ostinato.model.lora import Adapters
from ostinato.model.named import find_model_folder
from ostinato.model.shapes import AdapterSpec, ExpertScheme

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXTURES = ("qwen3_moe", "mixtral", "olmoe")
SPEC = AdapterSpec(rank=3, alpha=6, targets=("attn", "mlp", "experts"), expert_scheme=ExpertScheme.PER_EXPERT)


def saved(model_type: str, folder: Path, **own: Any) -> Path:
    """A tiny random model of a family, as transformers saves it."""
    import transformers

    torch.manual_seed(0)
    sizes = {**SIZES, **(EXPERTS if model_type in MIXTURES else {}), **own}
    if model_type in ("mixtral", "olmoe"):  # their experts have intermediate_size
        del sizes["moe_intermediate_size"]
    if model_type == "olmoe":
        sizes["num_key_value_heads"] = 4
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **sizes), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder


def with_tokenizer(folder: Path) -> Path:
    """That of the packaged model beside it."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(find_model_folder("asset:seed-moe") / name, folder / name)
    return folder


def shaken(adapters: Adapters) -> Adapters:
    """With B away from zero, so that the policy is not the base and every factor has a gradient."""
    generator = torch.Generator().manual_seed(2)
    for _, b in adapters.tensors.values():
        b.data = torch.randn(b.shape, generator=generator) * 0.1
    return adapters


# what a family does besides: a window and a soft cap of scores and logits; sinks and experts as [E, in, out]
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "gpt_oss": {**EXPERTS, "sliding_window": 6},
    "minimax": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"]},  # a cache of its own
    "granite": {"logits_scaling": 3.0},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
