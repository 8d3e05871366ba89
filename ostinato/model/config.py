"""What a Hugging Face ``config.json`` says, in our words.

Every key of the file is understood, known not to change the function, or refused by name: a model is
either exactly the one that was trained, or it does not load. No torch here.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from ostinato.inputs import parse_json
from ostinato.model.weight_files import has_own_head


class NotNative(ValueError):
    """A model that is well described, and that this decoder does not compute."""


class RopeType(StrEnum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


class QKNorm(StrEnum):
    """Where queries and keys are normalised: nowhere, per head (Qwen3) or over all heads at once (OLMoE)."""

    NONE = "none"
    HEAD = "head"
    FULL = "full"


class Scoring(StrEnum):
    """How router logits become scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: frequencies theta ** (-2i / dim), stretched by ``rope_type``."""

    rope_type: RopeType = RopeType.DEFAULT
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0  # llama3 and yarn: the context before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: multiplies cos and sin; None means derived from factor
    mscale: float = 0.0  # yarn, DeepSeek
    mscale_all_dim: float = 0.0  # yarn, DeepSeek: also sharpens the attention scale
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Routed experts. ``layers`` are the indices of the MoE layers, in order; the others are dense."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    layers: tuple[int, ...]
    scoring: Scoring = Scoring.SOFTMAX
    norm_topk: bool = True  # weights of the chosen experts sum to 1
    scaling: float = 1.0  # multiplies the weights after normalisation
    num_groups: int = 1  # DeepSeek: experts are chosen from the best topk_groups of num_groups
    topk_groups: int = 1
    correction_bias: bool = False  # DeepSeek: added to the scores for the choice only
    shared_intermediate_size: int = 0  # all shared experts together; 0 without
    kept: int | None = None  # how many of the experts are here, on a rank that keeps some; None: all

    @property
    def here(self) -> int:
        """Experts whose weights are here."""
        return self.num_experts if self.kept is None else self.kept


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""

    q_lora_rank: int | None  # None: queries straight from the hidden state
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    interleaved: bool  # rotary pairs lie side by side in the weights instead of half a head apart


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder of one of the supported families. ``raw`` is the file, written back unchanged on save."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of a dense MLP
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    max_positions: int
    rms_norm_eps: float
    tie_embeddings: bool
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    clip_qkv: float | None = None
    initializer_range: float = 0.02
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_untied(self) -> bool:
        """Whether there is a head of its own that config.json denies."""
        return bool(self.raw.get("tie_word_embeddings")) and not self.tie_embeddings

    @property
    def v_head_dim(self) -> int:
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe.layers) if self.moe else 0


# Beyond these a size is a slip: the largest models have a tenth of it. Memory is checked against the weights.
_MOST = 2**24
_LARGEST = 1e30
_ORIGINAL = "original_max_position_embeddings"
_MOST_OF = {"num_hidden_layers": 10_000}

# What transformers assumes when a key is absent from the file.
_COMMON = {"hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "mistral": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "max_window_layers": 28},
    "qwen3": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "head_dim": 128,
        "attention_bias": False,
        "max_window_layers": 28,
    },
    "qwen3_moe": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
    },
    "mixtral": {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6},
    "olmoe": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "norm_topk_prob": False,
        "clip_qkv": None,
    },
    "deepseek_v3": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "rope_interleave": True,
        "q_lora_rank": 1536,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
}
_ALIASES = {"kimi_k2": "deepseek_v3"}
_QK_NORM = {"qwen3": QKNorm.HEAD, "qwen3_moe": QKNorm.HEAD, "olmoe": QKNorm.FULL}

# Keys that are read, for every family and by family.
_UNDERSTOOD = (
    "model_type vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    " num_key_value_heads head_dim max_position_embeddings rms_norm_eps tie_word_embeddings hidden_act"
    " initializer_range rope_theta rope_scaling rope_parameters partial_rotary_factor"
)
_UNDERSTOOD_BY = {
    "llama": "attention_bias mlp_bias",
    "mistral": "sliding_window layer_types",
    "qwen2": "use_sliding_window sliding_window max_window_layers layer_types",
    "qwen3": "attention_bias use_sliding_window sliding_window max_window_layers layer_types",
    "qwen3_moe": "attention_bias use_sliding_window sliding_window max_window_layers decoder_sparse_step"
    " mlp_only_layers moe_intermediate_size num_experts num_local_experts num_experts_per_tok norm_topk_prob",
    "mixtral": "sliding_window num_local_experts num_experts num_experts_per_tok",
    "olmoe": "attention_bias clip_qkv num_experts num_local_experts num_experts_per_tok norm_topk_prob",
    "deepseek_v3": "attention_bias moe_intermediate_size n_routed_experts num_local_experts n_shared_experts"
    " num_experts_per_tok n_group topk_group norm_topk_prob routed_scaling_factor first_k_dense_replace"
    " moe_layer_freq scoring_func topk_method kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim"
    " qk_head_dim v_head_dim rope_interleave",
}
# Keys of training, bookkeeping and the choice of kernels: none of them changes what the decoder computes.
# Dropout and router jitter act only in pre-training, and multi-token-prediction layers are extra heads.
_HARMLESS = (
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
# What transformers' GenerationConfig has: how to sample, of which config.json may hold a copy.
_SAMPLING = (
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

# Words in keys of what a decoder computes, over all families of transformers; and of inputs that are no text.
_FUNCTION = re.compile(
    "^(?!.*(?:vision|visual|image|video|audio|speech|mm_)).*(?:"
    "act|alibi|alpha|att|beta|bias|block|cap|causal|clip|compr|conv|cross|chunk|delta|dim|embed|eps|exp|fac|ff|gat|"
    "glob|group|head|hid|index|interl|kern|la[tyn]|lin|loc|log|lo|lru|mamba|mask|mla|mlp|moe|multi|norm|par|pat|pos|q|"
    "rank|rec|res|ro|scal|sh|sin|siz|sli|sof|sp|ss|sta|ste|str|theta|tie|top|win)"
)


def read_config(folder: str | Path) -> ModelConfig:
    """The configuration of the Hugging Face model in ``folder``. A head of its own among the weights of one
    that config.json calls tied is used, as transformers does, with a warning.

    Raises ValueError, in one sentence, for a missing or broken file and for anything unsupported.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a folder with a Hugging Face config.json")
    try:
        raw = parse_json(path.read_bytes())
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path} is not valid JSON ({error}); download the model again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}; it must hold a JSON object")
    config = parse_config(raw)
    if config.max_positions < (longest := raw.get("max_position_embeddings", 0)):
        warnings.warn(
            f"{folder}: sliding_window is {config.max_positions}; contexts up to it are computed as the "
            f"model has them, longer ones (it allows {longest}) are refused",
            stacklevel=1,
        )
    if not config.tie_embeddings or not has_own_head(path.parent):
        return config
    warnings.warn(
        f"{folder}: tie_word_embeddings is true, but lm_head.weight is not the embedding; it is used",
        stacklevel=1,
    )
    return replace(config, tie_embeddings=False)


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """A ModelConfig from the content of a ``config.json``.

    Accepts transformers v5 (``rope_parameters``) and earlier (``rope_theta``, ``rope_scaling``) forms.
    Raises ValueError naming the field, its value and the fix.
    """
    family = _family(raw)
    c = {**_COMMON, **_DEFAULTS[family], **raw}
    _refuse_unknown(c, family)
    _refuse_unsupported(c, family)
    heads = _positive(c, "num_attention_heads")
    mla = _mla(c) if family == "deepseek_v3" else None
    if mla:
        head_dim = mla.nope_head_dim + mla.rope_head_dim
        kv_heads = heads
    else:
        # `head_dim: null` means derived, as an absent key does
        head_dim = _positive(c, "head_dim") if c.get("head_dim") else _positive(c, "hidden_size") // heads
        kv_heads = _positive(c, "num_key_value_heads") if c.get("num_key_value_heads") else heads
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads is {kv_heads}; it must divide num_attention_heads ({heads})")
    attention_bias = _flag(c, "attention_bias")
    return ModelConfig(
        model_type=family,
        vocab_size=_positive(c, "vocab_size"),
        hidden_size=_positive(c, "hidden_size"),
        intermediate_size=_positive(c, "intermediate_size"),
        num_layers=_positive(c, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_max_positions(c, family),
        rms_norm_eps=_number(c, "rms_norm_eps", most=1.0, above=0.0),
        tie_embeddings=_flag(c, "tie_word_embeddings"),
        rope=_rope(c),
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=_flag(c, "mlp_bias"),
        qk_norm=_QK_NORM.get(family, QKNorm.NONE),
        clip_qkv=None if c.get("clip_qkv") is None else _number(c, "clip_qkv", above=0.0),
        initializer_range=_number(c, "initializer_range", least=0.0),
        moe=_moe(c, family),
        mla=mla,
        raw=dict(raw),
    )


def _family(raw: Mapping[str, Any]) -> str:
    model_type = raw.get("model_type")
    family = _ALIASES.get(str(model_type), str(model_type))
    if family not in _DEFAULTS:
        known = ", ".join([*_DEFAULTS, *_ALIASES])
        raise NotNative(f"model_type is {model_type!r}; this decoder has {known}")
    return family


def _refuse_unknown(c: Mapping[str, Any], family: str) -> None:
    """A key that is set, that is not understood, and whose name says that it changes what is computed."""
    if c.get("quantization_config"):
        what = f"quantization_config is {c['quantization_config']!r}"
        raise NotNative(f"{what}; quantised weights are not supported, use the model's 16-bit weights")
    understood = set(f"{_UNDERSTOOD} {_UNDERSTOOD_BY[family]} {_HARMLESS} {_SAMPLING}".split())
    for key, value in c.items():
        if key not in understood and value not in (None, False, 0, "", [], {}) and _FUNCTION.search(key):
            fix = "remove the key from config.json if it does not change what the model computes"
            raise NotNative(f"{key} is {value!r}, which this decoder does not know for {family}; {fix}")


def _refuse_unsupported(c: Mapping[str, Any], family: str) -> None:
    if c["hidden_act"] != "silu":
        raise NotNative(f"hidden_act is {c['hidden_act']!r}; only 'silu' is supported")
    if c.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise NotNative(f"partial_rotary_factor is {c['partial_rotary_factor']}; only 1.0 is supported")
    if family != "deepseek_v3":
        return
    for key, only in {"attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
        if c[key] != only:
            raise NotNative(f"{key} is {c[key]!r}; only {only!r} is supported for {family}")


def _max_positions(c: Mapping[str, Any], family: str) -> int:
    """The longest context: within a sliding window attention is full attention, which is what we have."""
    longest = _positive(c, "max_position_embeddings")
    return min(longest, _sliding_window(c, family) or longest)


def _sliding_window(c: Mapping[str, Any], family: str) -> int | None:
    """The window that some layer really uses, or None."""
    if family in ("llama", "olmoe", "deepseek_v3"):
        return None
    window = None if c.get("sliding_window") is None else _positive(c, "sliding_window")
    if window is None:
        return None
    if c.get("layer_types"):
        return window if "sliding_attention" in c["layer_types"] else None
    if family in ("mistral", "mixtral"):
        return window
    if not c.get("use_sliding_window"):
        return None
    first = 0 if family == "qwen3_moe" else _count(c, "max_window_layers")
    return window if first < _positive(c, "num_hidden_layers") else None


def _rope(c: Mapping[str, Any]) -> RopeConfig:
    """transformers obeys ``rope_scaling`` where both forms are given, and then forgets a ``rope_theta`` of
    ``rope_parameters``: what was trained is known only where the two agree."""
    new, old = c.get("rope_parameters"), c.get("rope_scaling")
    rope = _rope_of(c, new or old or {})
    if new and old and _rope_of(c, old) != rope:
        raise ValueError(
            f"rope_scaling is {old!r} and rope_parameters {new!r}, which disagree; put all of it, rope_theta "
            "too, into rope_parameters, and remove rope_scaling"
        )
    return rope


def _rope_of(c: Mapping[str, Any], scaling: Any) -> RopeConfig:
    if not isinstance(scaling, Mapping):
        raise ValueError(f"rope_scaling is {scaling!r}; config.json needs an object there")
    scaling = dict(scaling)
    name = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    if name not in tuple(RopeType):
        raise NotNative(f"rope_type is {name!r}; supported are {', '.join(RopeType)}")
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise NotNative("partial_rotary_factor in rope_parameters is not 1.0; only 1.0 is supported")
    given = (scaling.pop("rope_theta", None), c.get("rope_theta"), 10000.0)
    theta = _number({"rope_theta": next(one for one in given if one is not None)}, "rope_theta", above=1.0)
    rope_type = RopeType(name)
    if rope_type == RopeType.DEFAULT:
        return RopeConfig(theta=theta)
    scaling = {key: value for key, value in scaling.items() if value is not None}
    longest = _positive(c, "max_position_embeddings")
    positions = _positive({_ORIGINAL: scaling.pop(_ORIGINAL, longest)}, _ORIGINAL)
    factor = _number({"factor": scaling.pop("factor", longest / positions)}, "factor", least=1.0)
    needed = {
        RopeType.LINEAR: (),
        RopeType.LLAMA3: ("low_freq_factor", "high_freq_factor"),
        RopeType.YARN: ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    }[rope_type]
    if unknown := sorted(set(scaling) - set(needed)):
        raise ValueError(
            f"rope_parameters has {unknown[0]} = {scaling[unknown[0]]!r}, unknown for {name}; remove it"
        )
    rope = RopeConfig(
        rope_type=rope_type,
        theta=theta,
        factor=factor,
        original_max_positions=positions,
        truncate=bool(scaling.pop("truncate", True)),
        **{
            key: _number(scaling, key, least=0.0) if "mscale" in key else _number(scaling, key, above=0.0)
            for key in scaling
        },
    )
    if rope.low_freq_factor >= rope.high_freq_factor:
        raise ValueError(
            f"low_freq_factor is {rope.low_freq_factor:g}; it must be below high_freq_factor "
            f"({rope.high_freq_factor:g})"
        )
    if rope.beta_slow > rope.beta_fast:  # Kimi K2 has 1 and 1
        raise ValueError(
            f"beta_slow is {rope.beta_slow:g}; it must be at most beta_fast ({rope.beta_fast:g})"
        )
    return rope


def _mla(c: Mapping[str, Any]) -> MLAConfig:
    return MLAConfig(
        q_lora_rank=None if c.get("q_lora_rank") is None else _positive(c, "q_lora_rank"),
        kv_lora_rank=_positive(c, "kv_lora_rank"),
        nope_head_dim=_positive(c, "qk_nope_head_dim"),
        rope_head_dim=_positive(c, "qk_rope_head_dim"),
        v_head_dim=_positive(c, "v_head_dim"),
        interleaved=_flag(c, "rope_interleave"),
    )


def _moe(c: Mapping[str, Any], family: str) -> MoEConfig | None:
    depth = _positive(c, "num_hidden_layers")
    if family == "qwen3_moe":
        step, dense = _positive(c, "decoder_sparse_step"), _indices(c, "mlp_only_layers")
        moe = MoEConfig(
            num_experts=_experts(c, "num_experts", "num_local_experts"),
            top_k=_positive(c, "num_experts_per_tok"),
            intermediate_size=_positive(c, "moe_intermediate_size"),
            layers=tuple(i for i in range(depth) if i not in dense and (i + 1) % step == 0),
            norm_topk=_flag(c, "norm_topk_prob"),
        )
    elif family in ("mixtral", "olmoe"):
        moe = MoEConfig(
            num_experts=_experts(c, "num_local_experts", "num_experts"),
            top_k=_positive(c, "num_experts_per_tok"),
            intermediate_size=_positive(c, "intermediate_size"),
            layers=tuple(range(depth)),
            norm_topk=family == "mixtral" or _flag(c, "norm_topk_prob"),
        )
    elif family == "deepseek_v3":
        moe = _deepseek_moe(c, depth)
    else:
        return None
    if moe.top_k > moe.num_experts:
        raise ValueError(f"num_experts_per_tok is {moe.top_k}; there are only {moe.num_experts} experts")
    return moe if moe.layers else None


def _deepseek_moe(c: Mapping[str, Any], depth: int) -> MoEConfig:
    first, every = _count(c, "first_k_dense_replace"), _positive(c, "moe_layer_freq")
    groups, kept = max(1, _count(c, "n_group")), max(1, _count(c, "topk_group"))
    experts = _experts(c, "n_routed_experts", "num_local_experts")
    if experts % groups or (groups > 1 and experts // groups < 2):
        raise ValueError(
            f"n_group is {groups}; it must cut n_routed_experts ({experts}) into groups of 2 or more"
        )
    if not 1 <= kept <= groups:
        raise ValueError(f"topk_group is {kept}; it must be between 1 and n_group ({groups})")
    top_k = _positive(c, "num_experts_per_tok")
    if kept * experts // groups < top_k <= experts:  # the rest would be experts that are ruled out
        raise ValueError(
            f"num_experts_per_tok is {top_k}; {kept} of {groups} groups hold only "
            f"{kept * experts // groups} experts"
        )
    width = _positive(c, "moe_intermediate_size")
    return MoEConfig(
        num_experts=experts,
        top_k=top_k,
        intermediate_size=width,
        layers=tuple(i for i in range(depth) if i >= first and i % every == 0),
        scoring=Scoring.SIGMOID,
        norm_topk=_flag(c, "norm_topk_prob"),
        scaling=_number(c, "routed_scaling_factor", above=0.0),
        num_groups=groups,
        topk_groups=kept,
        correction_bias=True,
        shared_intermediate_size=width * _count(c, "n_shared_experts"),
    )


def _experts(c: Mapping[str, Any], *names: str) -> int:
    """transformers has two names per family for the number of experts."""
    return _positive(c, next((name for name in names if name in c), names[0]))


def _flag(c: Mapping[str, Any], key: str) -> bool:
    """True or false; a missing one, or null, is false."""
    value = c.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}; config.json needs true or false there")
    return bool(value)


def _number(
    c: Mapping[str, Any],
    key: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
) -> float:
    """A finite number, of at least ``least``, above ``above`` and of at most ``most``."""
    value = c.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}; config.json needs a number there")
    if not (abs(value) <= _LARGEST and least <= value <= most and value > above):
        bounds = [
            *([f"of {least:g} or more"] if least > -math.inf else []),
            *([f"above {above:g}"] if above > -math.inf else []),
            *([f"up to {most:g}"] if most < math.inf else []),
        ]
        raise ValueError(
            f"{key} is {value!r}; config.json needs a finite number {' and '.join(bounds)} there"
        )
    return float(value)


def _positive(c: Mapping[str, Any], key: str) -> int:
    return _count(c, key, least=1)


def _count(c: Mapping[str, Any], key: str, least: int = 0) -> int:
    """A whole number; with ``least`` 0 a missing one, or null, is 0."""
    value = c.get(key)
    if value is None and not least:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive integer" if least else "an integer of 0 or more"
        raise ValueError(f"{key} is {value!r}; config.json needs {kind} there")
    if value > (most := _MOST_OF.get(key, _MOST)):
        raise ValueError(f"{key} is {value}; config.json needs an integer up to {most} there")
    return value


def _indices(c: Mapping[str, Any], key: str) -> set[int]:
    value = c[key] or []
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
        raise ValueError(f"{key} is {value!r}; config.json needs a list of layer numbers there")
    return set(value)
