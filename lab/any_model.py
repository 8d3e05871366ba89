"""Every causal language model that transformers has, tiny and random, through the transformers backend.

    python -m lab.any_model                 # the table of docs/models.md, in minutes
    python -m lab.any_model mistral gemma2  # these alone, with what was refused in full

For each: three GRPO steps with LoRA (recorded routes replayed where it is a mixture), a checkpoint after two
of them that resumes to the same bits, and an export that PEFT loads.
"""

from __future__ import annotations

from typing import Any

HIDDEN, LAYERS, VOCAB, EXPERTS, TOP_K = 32, 2, 96, 4, 2
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim"), HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "v_head_dim", "attention_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "shared_intermediate_size"), 48),
    **dict.fromkeys(("block_ff_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "expert_dim"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("intermediate_size_mlp", "moe_ffn_hidden_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "moe_k"), TOP_K),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), 1),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("mamba_d_ssm",), 64),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    **dict.fromkeys(("lru_width",), HIDDEN),
    **dict.fromkeys(("hidden_size_per_layer_input",), 8),
    **dict.fromkeys(("max_position_embeddings",), 256),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 6),
    **dict.fromkeys(("rotary_dim",), 8),
    **dict.fromkeys(("moe_latent_size",), 16),
}
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "is_moe", "attn_layers")


def tiny_config(model_type: str, **own: Any) -> Any:
    """The configuration of a type at its defaults, of two layers (more where kinds alternate), small."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    text = config.get_text_config()
    layers = LAYERS
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds:
        layers = min(len(kinds), 1 + max(kinds.index(kind) for kind in set(kinds)))
        layers = max(LAYERS, layers)
    for key, value in {**SMALL, **own}.items():
        if getattr(text, key, None) is None or isinstance(getattr(text, key), list):
            continue
        object.__setattr__(text, text.attribute_map.get(key, key), value)
    for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if hasattr(text, key):
            object.__setattr__(text, text.attribute_map.get(key, key), layers)
    for key in PER_LAYER:
        value = getattr(text, key, None)
        if isinstance(value, list | tuple) and len(value) > layers:
            object.__setattr__(text, key, list(value)[:layers])
    for key in TOKENS:
        if isinstance(getattr(text, key, None), int):
            object.__setattr__(text, key, 0)
    if isinstance(getattr(text, "rope_parameters", None), dict):
        for part in (text.rope_parameters, *text.rope_parameters.values()):
            if isinstance(part, dict) and part.get("rope_type") not in (None, "default"):
                part["rope_type"] = "default"
    return text


def tiny_model(model_type: str, **own: Any) -> Any:
    """Random, float32, so that scores of tokens differ."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **own), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.dim() >= 2 and weight.is_floating_point():
            weight.data.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
    return model.eval()
