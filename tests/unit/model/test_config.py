"""config.json: every key is understood, harmless, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from worlds import DEEPSEEK, tiny_dense, tiny_moe

from ostinato.model.config import QKNorm, RopeType, parse_config, read_config
from ostinato.model.config_keys import find_unknown_keys

SMALL = tiny_dense(num_hidden_layers=4, tie_word_embeddings=False)
QWEN3_MOE = tiny_moe(num_hidden_layers=4, num_experts=8)
LATENT = {**SMALL, **DEEPSEEK, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}


def refusal(**changes: Any) -> str:
    with pytest.raises(ValueError) as error:
        parse_config({**SMALL, **changes})
    return str(error.value)


def test_smollm2_as_published() -> None:
    """SmolLM2's config.json has keys of exporters and of old transformers; none of them matters."""
    config = parse_config(
        {
            **SMALL,
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "hidden_act": "silu",
            "initializer_range": 0.041666666666666664,
            "is_llama_config": True,
            "mlp_bias": False,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            "use_cache": True,
        }
    )
    assert config.tie_embeddings
    assert config.rope.theta == 100000
    assert (config.head_dim, config.num_kv_heads, config.qk_norm, config.moe) == (8, 2, QKNorm.NONE, None)
    assert config.raw["rope_theta"] == 100000


def test_families_differ_where_they_do() -> None:
    assert parse_config({**SMALL, "model_type": "qwen2"}).qkv_bias
    assert not parse_config({**SMALL, "model_type": "qwen2"}).o_bias
    assert parse_config({**SMALL, "model_type": "qwen3"}).head_dim == 128
    assert parse_config({**SMALL, "model_type": "qwen3"}).qk_norm == QKNorm.HEAD
    olmoe = parse_config({**SMALL, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2})
    assert olmoe.qk_norm == QKNorm.FULL
    mixtral = parse_config(
        {**SMALL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    )
    assert mixtral.rope.theta == 1e6
    assert (
        mixtral.moe is not None
        and mixtral.moe.norm_topk
        and olmoe.moe is not None
        and not olmoe.moe.norm_topk
    )


def test_rope_in_both_spellings() -> None:
    new = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    new |= {"original_max_position_embeddings": 64, "rope_theta": 5e5}
    old = {key: value for key, value in new.items() if key != "rope_theta"}
    v5 = parse_config({**SMALL, "rope_parameters": new})
    v4 = parse_config({**SMALL, "rope_scaling": old, "rope_theta": 5e5})
    oldest = parse_config({**SMALL, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5})
    assert v5.rope == v4.rope
    assert v5.rope.rope_type == RopeType.LLAMA3
    assert (oldest.rope.rope_type, oldest.rope.factor) == (RopeType.LINEAR, 2.0)


def test_two_forms_of_rope_agree_or_are_refused() -> None:
    """``rope_scaling``, which Qwen's model card tells users to add for long contexts, was ignored beside the
    ``rope_parameters`` that transformers 5 writes: logits were 9.6 off, without a word."""
    plain = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.raises(ValueError, match=r"rope_scaling .* rope_parameters"):
        parse_config({**SMALL, "rope_parameters": plain, "rope_scaling": YARN})
    with pytest.raises(ValueError, match=r"rope_scaling .* rope_parameters"):  # the base would become 10000
        parse_config({**SMALL, "rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": YARN})
    both = parse_config(
        {**SMALL, "rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": YARN, "rope_theta": 1e6}
    )
    assert (both.rope.rope_type, both.rope.theta) == (RopeType.YARN, 1e6)
    assert parse_config({**SMALL, "rope_parameters": plain, "rope_scaling": None}).rope.theta == 1e6


# Keys of config.json that are set in public model repositories (86 files of the newest models were read), by
# family; these in all of them.
EVERYWHERE = (
    "architectures eos_token_id hidden_act hidden_size initializer_range intermediate_size "
    "max_position_embeddings model_type num_attention_heads num_hidden_layers num_key_value_heads "
    "rms_norm_eps rope_theta torch_dtype transformers_version use_cache vocab_size "
)
PUBLISHED = {
    "llama": ("_name_or_path bos_token_id pretraining_tp rope_scaling "),
    "qwen3": ("bos_token_id head_dim max_window_layers quantization_config tie_word_embeddings "),
    "qwen3_moe": (
        "bos_token_id decoder_sparse_step head_dim max_window_layers moe_intermediate_size norm_topk_prob "
        "num_experts num_experts_per_tok quantization_config router_aux_loss_coef use_qk_norm "
    ),
    "mixtral": ("bos_token_id num_experts_per_tok num_local_experts router_aux_loss_coef "),
    "deepseek_v3": (
        "auto_map ep_size first_k_dense_replace kv_lora_rank moe_intermediate_size moe_layer_freq n_group "
        "n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_nextn_predict_layers "
        "q_lora_rank qk_nope_head_dim qk_rope_head_dim quantization_config rope_scaling "
        "routed_scaling_factor scoring_func topk_group topk_method v_head_dim "
    ),
    "kimi_k2": (
        "auto_map aux_loss_alpha bos_token_id first_k_dense_replace kv_lora_rank moe_intermediate_size "
        "moe_layer_freq n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok "
        "pretraining_tp q_lora_rank qk_nope_head_dim qk_rope_head_dim quantization_config rope_scaling "
        "routed_scaling_factor scoring_func seq_aux topk_group topk_method v_head_dim "
    ),
    "mistral": "num_key_value_heads return_dict max_length top_k top_p temperature num_beams id2label",
    "qwen2": "num_key_value_heads max_window_layers sliding_window attention_dropout",
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_keys_of_published_models_are_known(family: str) -> None:
    keys = f"{EVERYWHERE} {PUBLISHED[family]}".split()
    family = "deepseek_v3" if family == "kimi_k2" else family
    assert not list(find_unknown_keys(dict.fromkeys(keys, True), family))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ("model_type", "gpt2", "llama")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ({"tie_word_embeddings": "maybe"}, ("tie_word_embeddings", "maybe", "true or false")),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": 128}},
            ("weight_block_size", "16-bit"),
        ),
        ({"max_position_embeddings": 2**40}, ("max_position_embeddings", str(2**40))),  # was a petabyte
        ({"logit_scale": 0.5}, ("logit_scale", "0.5", "llama")),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        ({"rope_parameters": {"rope_type": "longrope"}}, ("rope_type", "longrope", "yarn")),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 3}}, ("beta", "3", "linear")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers", "0", "positive")),
        ({"vocab_size": None}, ("vocab_size", "None")),
        ({"num_key_value_heads": 3}, ("num_key_value_heads", "3", "4")),
        ({**QWEN3_MOE, "num_experts_per_tok": 9}, ("num_experts_per_tok", "9", "8")),
        ({**LATENT, "topk_method": "greedy"}, ("topk_method", "greedy", "noaux_tc")),
        ({**LATENT, "n_group": 3}, ("n_group", "3", "8")),
        ({**LATENT, "topk_group": 5}, ("topk_group", "5", "4")),
        ({**LATENT, "topk_group": 1}, ("num_experts_per_tok", "3", "1 of 4 groups")),
        ({**LATENT, "attention_bias": True}, ("attention_bias", "True")),
    ],
)
def test_refusals_name_field_and_value(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    message = refusal(**changes)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(ValueError, match="not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert read_config(tmp_path).hidden_size == 32


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}
NAN = float("nan")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rms_norm_eps": NAN}, "rms_norm_eps is nan; config.json needs a finite number above 0 and up to 1"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; "),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"initializer_range": float("inf")}, "initializer_range is inf"),
        ({"rope_theta": 0}, "rope_theta is 0; config.json needs a finite number above 1"),
        ({"rope_theta": NAN}, "rope_theta is nan"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta is -1.0"),
        ({"rope_scaling": {**YARN, "factor": -1}}, "factor is -1; config.json needs a finite number of 1 or"),
        ({"rope_scaling": {**YARN, "factor": "4"}}, "factor is '4'"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, "embeddings is 0; "),
        ({"rope_scaling": {**YARN, "beta_fast": 0.5}}, "beta_slow is 1; it must be at most beta_fast (0.5)"),
        ({"rope_scaling": {**YARN, "attention_factor": NAN}}, "attention_factor is nan"),
        ({"rope_scaling": {**YARN, "mscale": [1]}}, "mscale is [1]"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor is 4; it must be below"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
        (
            {"hidden_size": 10**12},
            "hidden_size is 1000000000000; config.json needs an integer up to 16777216",
        ),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        (
            {"num_hidden_layers": 10**7},
            "num_hidden_layers is 10000000; config.json needs an integer up to 10000",
        ),
        ({"max_position_embeddings": "128"}, "max_position_embeddings is '128'"),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (
            {**QWEN3_MOE, "mlp_only_layers": 3},
            "mlp_only_layers is 3; config.json needs a list of layer numbers",
        ),
        ({**QWEN3_MOE, "num_experts": 10**9}, "num_experts is 1000000000"),
        ({**QWEN3_MOE, "use_sliding_window": True, "sliding_window": "all"}, "sliding_window is 'all'"),
        ({**LATENT, "moe_layer_freq": 0}, "moe_layer_freq is 0"),
        ({**LATENT, "n_group": "4"}, "n_group is '4'"),
        ({**LATENT, "routed_scaling_factor": NAN}, "routed_scaling_factor is nan"),
        ({**LATENT, "q_lora_rank": -1}, "q_lora_rank is -1"),
        ({**LATENT, "n_shared_experts": -1}, "n_shared_experts is -1"),
        ({**LATENT, "first_k_dense_replace": 1.5}, "first_k_dense_replace is 1.5"),
    ],
)
def test_numbers_that_no_model_has_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    """They loaded: a model of NaN, or one with the default in place of what was written. Huge ones ended in
    the error of an allocator, and some of mixtures in a ZeroDivisionError or a TypeError."""
    assert words in refusal(**changes)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a": ' * 500 + "1" + "}" * 500, '{"model_type": "\\ud83d"}']
)
def test_a_config_that_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    """Brackets enough were a RecursionError."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json is not valid JSON .*; download the model again"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 32}, [32] * 4),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "mistral"}, [None] * 4),  # transformers' own window, 4096, is longer
        ({"model_type": "mistral", "max_position_embeddings": 8192}, [4096] * 4),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
            [32] * 4,
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2},
            [None, None, 32, 32],
        ),
        ({"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32}, [None] * 4),
        ({"model_type": "qwen3", "sliding_window": 32, "layer_types": ["sliding_attention"] * 4}, [32] * 4),
        ({"model_type": "qwen3", "sliding_window": 32, "layer_types": ["full_attention"] * 4}, [None] * 4),
        (
            {"model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 2},
            [32, None, 32, None],
        ),
    ],
)
def test_windows_of_layers(changes: dict[str, Any], windows: list[int | None]) -> None:
    """Models with a sliding window were refused, later only contexts beyond it."""
    config = parse_config({**SMALL, "max_position_embeddings": 128, "num_hidden_layers": 4, **changes})
    assert [config.get_window(layer) for layer in range(4)] == windows
    assert config.windowless_config.max_positions == next(filter(None, windows), config.max_positions)
