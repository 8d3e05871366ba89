"""Which keys of a ``config.json`` are read, and which others change what a decoder computes. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Keys that are read, for every family and by family.
_COMMON_KEYS = (
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    " num_key_value_heads head_dim max_position_embeddings rms_norm_eps tie_word_embeddings hidden_act"
    " initializer_range quantization_config rope_theta rope_scaling rope_parameters partial_rotary_factor"
)
_FAMILY_KEYS = {
    "llama": "attention_bias mlp_bias",
    "mistral": "sliding_window layer_types",
    "gemma3_text": "attention_bias sliding_window sliding_window_pattern _sliding_window_pattern layer_types"
    " query_pre_attn_scalar hidden_activation rope_local_base_freq attn_logit_softcapping"
    " final_logit_softcapping use_bidirectional_attention",
    "qwen2": "use_sliding_window sliding_window max_window_layers layer_types",
    "qwen3": "attention_bias use_sliding_window sliding_window max_window_layers layer_types",
    "qwen3_moe": "attention_bias use_sliding_window sliding_window max_window_layers decoder_sparse_step"
    " mlp_only_layers moe_intermediate_size num_experts num_local_experts num_experts_per_tok norm_topk_prob"
    " use_qk_norm",
    "mixtral": "sliding_window num_local_experts num_experts num_experts_per_tok",
    "olmoe": "attention_bias clip_qkv num_experts num_local_experts num_experts_per_tok norm_topk_prob",
    "deepseek_v3": "attention_bias moe_intermediate_size n_routed_experts num_local_experts n_shared_experts"
    " num_experts_per_tok n_group topk_group norm_topk_prob routed_scaling_factor first_k_dense_replace"
    " moe_layer_freq scoring_func topk_method kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim"
    " qk_head_dim v_head_dim rope_interleave",
}
# Keys of training, bookkeeping and the choice of kernels: none of them changes what the decoder computes.
# Dropout and router jitter act only in pre-training, and multi-token-prediction layers are extra heads.
_HARMLESS_KEYS = (
    "architectures auto_map dtype torch_dtype transformers_version _name_or_path name_or_path use_cache"
    " _model_name_or_path _commit_hash attention_dropout hidden_dropout"
    " attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset"
    " _flash_attn_2_enabled experts_implementation _experts_implementation _experts_implementation_internal"
    " pretraining_tp"
    " output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux ep_size router_jitter_noise"
    " num_nextn_predict_layers num_mtp_layers id2label label2id num_labels problem_type return_dict"
    " tokenizer_class task_specific_params is_llama_config transformers.js_config unsloth_fixed"
    " unsloth_version model_max_length output_attentions _output_attentions output_hidden_states"
    " chunk_size_feed_forward finetuning_task prefix sep_token_id torchscript tf_legacy_loss use_bfloat16"
    " is_decoder tie_encoder_decoder _from_model_config"
)
# Keys of transformers' GenerationConfig, of which config.json may hold a copy.
_SAMPLING_KEYS = (
    "max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample"
    " num_beams use_mtp cache_implementation cache_config max_cache_len temperature top_k top_p min_p top_h"
    " typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty length_penalty"
    " no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id forced_eos_token_id"
    " remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"
    " sequence_bias token_healing guidance_scale watermarking_config num_return_sequences output_scores"
    " output_logits return_dict_in_generate pad_token_id bos_token_id eos_token_id"
    " encoder_no_repeat_ngram_size decoder_start_token_id is_assistant num_assistant_tokens"
    " num_assistant_tokens_schedule assistant_confidence_threshold prompt_lookup_num_tokens"
    " max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind"
    " assistant_ensemble_weight speculation_type compile_config disable_compile continuous_batching_config"
    " low_memory penalty_alpha dola_layers diversity_penalty num_beam_groups constraints force_words_ids"
    " prefill_chunk_size"
)

# Words in keys that describe the computation, over all families of transformers; keys of vision and audio are
# excluded.
_FUNCTION_WORDS = re.compile(
    "^(?!.*(?:vision|visual|image|video|audio|speech|mm_)).*(?:"
    "act|alibi|alpha|att|beta|bias|block|cap|causal|clip|compr|conv|cross|chunk|delta|dim|embed|eps|exp|fac|ff|gat|"
    "glob|group|head|hid|index|interl|kern|la[tyn]|lin|loc|log|lo|lru|mamba|mask|mla|mlp|moe|multi|norm|par|pat|pos|q|"
    "rank|rec|res|ro|scal|sh|sin|siz|sli|sof|sp|ss|sta|ste|str|theta|tie|top|win)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """The format of quantised weights, as ``quantization_config`` describes it."""

    method: str  # of model.published.FORMS
    bits: int = 4
    blocks: tuple[int, int] = (0, 0)  # fp8: rows and columns that share a scale
    zero_shift: int = 0  # gptq: added to the zeros that its files store


MODELOPT = {"FP8": "fp8-rows", "NVFP4": "nvfp4-modelopt"}
COMPRESSED = {  # format: (row of model.published.FORMS, type of its numbers, their bits, strategies)
    "pack-quantized": ("compressed-tensors", "int", {4, 8}, {"group", "channel"}),
    "float-quantized": ("fp8-rows", "float", {8}, {"channel", "tensor"}),
    "nvfp4-pack-quantized": ("nvfp4", "float", {4}, {"tensor_group"}),
}


def _parse_compressed_tensors(form: Mapping[str, Any], checks: dict[str, Any]) -> Quantisation:
    """Parse ``form``. For each key that is checked, store in ``checks`` whether its value is read."""
    groups = (form.get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups]
    bits: set[Any] = {weight.get("num_bits") for weight in weights}
    name = str(form.get("format"))
    method, number_type, allowed_bits, allowed_strategies = COMPRESSED.get(
        name, ("", "", set[int](), set[str]())
    )
    checks["format"] = bool(method) and all(group.get("format") in (None, name) for group in groups)
    checks["config_groups"] = (
        len(bits) == 1
        and bits <= allowed_bits
        and all(weight.get("type", "int") == number_type for weight in weights)
        and all(weight.get("strategy", "channel") in allowed_strategies for weight in weights)
    )
    checks["transform_config"] = not form.get("transform_config")  # extra linear maps between layers
    checks["sparsity_config"] = (form.get("sparsity_config") or {}).get("format", "dense") == "dense"
    return Quantisation(method=method, bits=bits.pop() if checks["config_groups"] else 0)


def read_quantisation(c: Mapping[str, Any]) -> Quantisation | None:
    """Read the quantisation in a config.json; None for plain weights. Raises ValueError, naming a key whose
    value is not read."""
    form = c.get("quantization_config") or (c.get("text_config") or {}).get("quantization_config")
    if not form:
        return None
    if not isinstance(form, Mapping):
        raise ValueError(f"quantization_config is {form!r}; config.json needs an object there")
    method: Any = form.get("quant_method")
    bits: Any = form.get("bits", form.get("w_bit", 4))
    checks: dict[str, Any] = {}
    match method:
        case "fp8" if form.get("weight_block_size") is None:
            quantisation = Quantisation(method="fp8-map")
        case "fp8":
            block_size: Any = form["weight_block_size"]
            checks["weight_block_size"] = (
                isinstance(block_size, list | tuple)
                and len(block_size) == 2
                and all(type(n) is int and n > 0 for n in block_size)
            )
            quantisation = Quantisation(
                method=method, blocks=tuple(block_size) if checks["weight_block_size"] else (0, 0)
            )
        case "fbgemm_fp8":
            quantisation = Quantisation(method="fp8-rows")
        case "modelopt":
            checks["quant_algo"] = form.get("quant_algo") in MODELOPT
            quantisation = Quantisation(method=MODELOPT.get(str(form.get("quant_algo")), ""))
        case "compressed-tensors":
            quantisation = _parse_compressed_tensors(form, checks)
        case "gptq":
            checkpoint_format = form.get("checkpoint_format", "gptq")
            checks |= {
                "bits": bits in (2, 4, 8),
                "checkpoint_format": checkpoint_format in ("gptq", "gptq_v2"),
            }
            quantisation = Quantisation(method=method, bits=bits, zero_shift=int(checkpoint_format == "gptq"))
        case "awq":
            checks |= {"bits": bits == 4, "version": str(form.get("version", "gemm")).lower() == "gemm"}
            checks["backend"] = form.get("backend", "autoawq") in ("autoawq", "auto")
            quantisation = Quantisation(method=method)
        case "mxfp4":
            quantisation = Quantisation(method=method)
        case _:
            checks["quant_method"] = False
            quantisation = None
    for key, is_readable in checks.items():
        if not is_readable:
            raise ValueError(
                f"quantization_config has {key} = {form.get(key)!r}"
                + (f" with quant_method {method!r}" if key != "quant_method" else "")
                + "; what is read is fp8, compressed-tensors pack-, float- and nvfp4-pack-quantized, "
                "modelopt FP8 and NVFP4, gptq, awq gemm and mxfp4; use one of these, or the 16-bit weights"
            )
    return quantisation


def find_unknown_keys(c: Mapping[str, Any], family: str) -> Iterator[str]:
    """Yield the keys that are set, are not read for ``family``, and whose names suggest that they change what
    the model computes."""
    read_keys = set(f"{_COMMON_KEYS} {_FAMILY_KEYS[family]} {_HARMLESS_KEYS} {_SAMPLING_KEYS}".split())
    for key, value in c.items():
        if key not in read_keys and value not in (None, False, 0, "", [], {}) and _FUNCTION_WORDS.search(key):
            yield key
