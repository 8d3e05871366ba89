"""Read a Hugging Face ``config.json`` into a ``ModelConfig``.

Every key of the file is read, known not to change the function, or refused: a model either is exactly the
model that was trained, or does not load. Every function that reads keys raises ValueError for a wrong value,
and NotNative for what this decoder does not compute. No torch here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from ostinato.inputs import parse_json
from ostinato.model.config_keys import find_unknown_keys, read_quantisation
from ostinato.model.weight_files import has_own_head


class NotNative(ValueError):
    """The model is valid, but this decoder does not compute it."""


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


class Activation(StrEnum):
    """The activation of the gate of an MLP, by the names of transformers."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


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
    num_kept: int | None = None  # how many of the experts are here, on a rank that keeps some; None: all

    @property
    def num_local(self) -> int:
        """The number of experts whose weights are here."""
        return self.num_experts if self.num_kept is None else self.num_kept


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
    """A decoder of one of the supported families. ``raw`` is the content of config.json, for saving."""

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
    activation: Activation = Activation.SILU
    norm_offset: float = 0.0  # what is added to the weights of norms: 1 where they are stored around 0
    post_norms: bool = False  # outputs of attention and MLP are normed before they are added
    embed_scale: float = 1.0
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    local_layers: tuple[int, ...] = ()  # with a window, or a rope of their own
    local_rope: RopeConfig | None = None  # None: the same
    window: int | None = None  # positions that a row of a local layer sees, itself included; None: all
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_untied(self) -> bool:
        """Whether the model has a head of its own although config.json ties it to the embedding."""
        return bool(self.raw.get("tie_word_embeddings")) and not self.tie_embeddings

    @property
    def v_head_dim(self) -> int:
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe.layers) if self.moe else 0

    def get_window(self, layer: int) -> int | None:
        return self.window if layer in self.local_layers else None

    @property
    def windowless_config(self) -> ModelConfig:
        """The model with contexts of at most the window, so that attention is full; itself without a
        window."""
        if self.window is None:
            return self
        return replace(self, window=None, max_positions=self.window)


# Larger sizes are mistakes: the largest models have a tenth of these. Memory is checked against the weights.
_MAX_SIZE = 2**24
_MAX_NUMBER = 1e30
_CONTEXT = "original_max_position_embeddings"
_MAX_SIZES = {"num_hidden_layers": 10_000}

# What transformers assumes when a key is absent from the file.
_COMMON_DEFAULTS = {"hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False}
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
    "gemma3_text": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "attention_bias": False,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
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
_QK_NORM = {"gemma3_text": QKNorm.HEAD, "qwen3": QKNorm.HEAD, "qwen3_moe": QKNorm.HEAD, "olmoe": QKNorm.FULL}


def read_config(folder: str | Path) -> ModelConfig:
    """Read the configuration of the Hugging Face model in ``folder``. If config.json ties the head to the
    embedding but the weights have a different head, that is used, as in transformers, with a warning. Raises
    ValueError, in one sentence, for a missing or broken file, and as ``parse_config`` does."""
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
    if not config.tie_embeddings or not has_own_head(path.parent):
        return config
    warnings.warn(
        f"{folder}: tie_word_embeddings is true, but lm_head.weight is not the embedding; it is used",
        stacklevel=1,
    )
    return replace(config, tie_embeddings=False)


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Make a ModelConfig from the content of a ``config.json``, in the form of transformers v5
    (``rope_parameters``) or an earlier one (``rope_theta``, ``rope_scaling``). Raises ValueError or NotNative
    with field, value and fix."""
    family = _find_family(raw)
    c = {**_COMMON_DEFAULTS, **_DEFAULTS[family], **raw}
    _refuse_unknown(c, family)
    _refuse_unsupported(c, family)
    heads = _read_size(c, "num_attention_heads")
    mla = _read_mla(c) if family == "deepseek_v3" else None
    if mla:
        head_dim = mla.nope_head_dim + mla.rope_head_dim
        kv_heads = heads
    else:
        # `head_dim: null` means derived, as an absent key does
        head_dim = _read_size(c, "head_dim") if c.get("head_dim") else _read_size(c, "hidden_size") // heads
        kv_heads = _read_size(c, "num_key_value_heads") if c.get("num_key_value_heads") else heads
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads is {kv_heads}; it must divide num_attention_heads ({heads})")
    attention_bias = _read_flag(c, "attention_bias")
    rope, gemma = _read_rope(c), _read_gemma(c) if family == "gemma3_text" else {}
    return ModelConfig(
        model_type=family,
        vocab_size=_read_size(c, "vocab_size"),
        hidden_size=_read_size(c, "hidden_size"),
        intermediate_size=_read_size(c, "intermediate_size"),
        num_layers=_read_size(c, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_read_size(c, "max_position_embeddings"),
        rms_norm_eps=_read_number(c, "rms_norm_eps", maximum=1.0, floor=0.0),
        tie_embeddings=_read_flag(c, "tie_word_embeddings"),
        rope=rope,
        qkv_bias=attention_bias or family == "qwen2",
        o_bias=attention_bias,
        mlp_bias=_read_flag(c, "mlp_bias"),
        qk_norm=_QK_NORM.get(family, QKNorm.NONE),
        clip_qkv=None if c.get("clip_qkv") is None else _read_number(c, "clip_qkv", floor=0.0),
        initializer_range=_read_number(c, "initializer_range", minimum=0.0),
        moe=_read_moe(c, family),
        mla=mla,
        **_read_local(c, family),
        **gemma,
        raw=dict(raw),
    )


def _read_gemma(c: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that only Gemma 3 sets (arXiv 2503.19786 section 2)."""
    return {
        "activation": Activation(c["hidden_activation"]),
        "norm_offset": 1.0,
        "post_norms": True,
        "embed_scale": _read_size(c, "hidden_size") ** 0.5,
        "attention_scale": _read_number(c, "query_pre_attn_scalar", floor=0.0) ** -0.5,
        "local_rope": _read_kind_rope(c, "sliding_attention", "rope_local_base_freq"),
    }


def _find_family(raw: Mapping[str, Any]) -> str:
    model_type = raw.get("model_type")
    family = _ALIASES.get(str(model_type), str(model_type))
    if family not in _DEFAULTS:
        names = ", ".join([*_DEFAULTS, *_ALIASES])
        raise NotNative(f"model_type is {model_type!r}; this decoder has {names}")
    return family


def _refuse_unknown(c: Mapping[str, Any], family: str) -> None:
    """Refuse unsupported quantisation, and keys that are not read and by their names change the function."""
    read_quantisation(c)  # only for its ValueError
    for key in find_unknown_keys(c, family):
        fix = "remove the key from config.json if it does not change what the model computes"
        raise NotNative(f"{key} is {c[key]!r}, which this decoder does not know for {family}; {fix}")


def _refuse_unsupported(c: Mapping[str, Any], family: str) -> None:
    is_gemma = family == "gemma3_text"
    key, value = ("hidden_activation", "gelu_pytorch_tanh") if is_gemma else ("hidden_act", "silu")
    if c[key] != value:
        raise NotNative(f"{key} is {c[key]!r}; only {value!r} is supported for {family}")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if c.get(key):
            raise NotNative(f"{key} is {c[key]!r}, which this decoder does not compute")
    if c.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise NotNative(f"partial_rotary_factor is {c['partial_rotary_factor']}; only 1.0 is supported")
    if c.get("use_qk_norm", True) is not True:
        raise NotNative(f"use_qk_norm is {c['use_qk_norm']!r}; only true is supported for {family}")
    if family != "deepseek_v3":
        return
    for key, value in {"attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
        if c[key] != value:
            raise NotNative(f"{key} is {c[key]!r}; only {value!r} is supported for {family}")


def _read_local(c: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Read ``local_layers`` and ``window``; {} without local layers, or where the window has no effect."""
    depth = _read_size(c, "num_hidden_layers")
    if family in ("llama", "olmoe", "deepseek_v3"):
        return {}
    window = None if c.get("sliding_window") is None else _read_size(c, "sliding_window")
    if types := c.get("layer_types"):
        supported = {"sliding_attention", "full_attention"}
        if not isinstance(types, list) or len(types) != depth or not supported.issuperset(types):
            raise NotNative(
                f"layer_types is {types!r}; this decoder has {' and '.join(sorted(supported))}, for each of "
                f"{depth} layers"
            )
        layers = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    elif family == "gemma3_text":
        period = _read_size(c, "sliding_window_pattern")
        layers = tuple(i for i in range(depth) if (i + 1) % period)
    elif family in ("mistral", "mixtral"):
        layers = tuple(range(depth))
    elif c.get("use_sliding_window"):
        layers = tuple(range(0 if family == "qwen3_moe" else _read_count(c, "max_window_layers"), depth))
    else:
        return {}
    if window is not None and window >= _read_size(c, "max_position_embeddings"):
        window = None
    has_own_rope = family == "gemma3_text"  # of local layers, with or without a window
    return {"local_layers": layers, "window": window} if layers and (has_own_rope or window) else {}


def _read_kind_rope(c: Mapping[str, Any], kind: str, theta_key: str) -> RopeConfig:
    """Read the rope of one kind of layers, whose base is the key ``theta_key``, without ``rope_scaling``."""
    parameters = (c.get("rope_parameters") or {}).get(kind)
    return _read_rope({**c, "rope_parameters": parameters, "rope_scaling": None, "rope_theta": c[theta_key]})


def _read_rope(c: Mapping[str, Any]) -> RopeConfig:
    """Read the rope in the new or the old form. Forms that differ are refused: transformers then takes
    ``rope_scaling`` and drops ``rope_theta`` of ``rope_parameters``, so it is unclear what was trained."""
    form, old_form = c.get("rope_parameters"), c.get("rope_scaling")
    if isinstance(form, Mapping) and "full_attention" in form:  # by kinds of layers
        form = form["full_attention"]
    rope = _parse_rope(c, form or old_form or {})
    if form and old_form and _parse_rope(c, old_form) != rope:
        raise ValueError(
            f"rope_scaling is {old_form!r} and rope_parameters {form!r}, which disagree; put all of it, "
            "rope_theta too, into rope_parameters, and remove rope_scaling"
        )
    return rope


def _parse_rope(c: Mapping[str, Any], scaling: Any) -> RopeConfig:
    if not isinstance(scaling, Mapping):
        raise ValueError(f"rope_scaling is {scaling!r}; config.json needs an object there")
    scaling = dict(scaling)
    name = scaling.pop("rope_type", scaling.pop("type", "default"))
    scaling.pop("type", None)
    if name not in tuple(RopeType):
        raise NotNative(f"rope_type is {name!r}; supported are {', '.join(RopeType)}")
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise NotNative("partial_rotary_factor in rope_parameters is not 1.0; only 1.0 is supported")
    thetas = (scaling.pop("rope_theta", None), c.get("rope_theta"), 10000.0)
    theta = _read_number({"rope_theta": next(t for t in thetas if t is not None)}, "rope_theta", floor=1.0)
    rope_type = RopeType(name)
    if rope_type == RopeType.DEFAULT:
        return RopeConfig(theta=theta)
    scaling = {key: value for key, value in scaling.items() if value is not None}
    max_positions = _read_size(c, "max_position_embeddings")
    positions = _read_size({_CONTEXT: scaling.pop(_CONTEXT, max_positions)}, _CONTEXT)
    factor = _read_number({"factor": scaling.pop("factor", max_positions / positions)}, "factor", minimum=1.0)
    allowed_keys = {
        RopeType.LINEAR: (),
        RopeType.LLAMA3: ("low_freq_factor", "high_freq_factor"),
        RopeType.YARN: ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    }[rope_type]
    if extra_keys := sorted(set(scaling) - set(allowed_keys)):
        raise ValueError(
            f"rope_parameters has {extra_keys[0]} = {scaling[extra_keys[0]]!r}, unknown for {name}; remove it"
        )
    rope = RopeConfig(
        rope_type=rope_type,
        theta=theta,
        factor=factor,
        original_max_positions=positions,
        truncate=bool(scaling.pop("truncate", True)),
        **{
            k: _read_number(scaling, k, minimum=0.0) if "mscale" in k else _read_number(scaling, k, floor=0.0)
            for k in scaling
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


def _read_mla(c: Mapping[str, Any]) -> MLAConfig:
    return MLAConfig(
        q_lora_rank=None if c.get("q_lora_rank") is None else _read_size(c, "q_lora_rank"),
        kv_lora_rank=_read_size(c, "kv_lora_rank"),
        nope_head_dim=_read_size(c, "qk_nope_head_dim"),
        rope_head_dim=_read_size(c, "qk_rope_head_dim"),
        v_head_dim=_read_size(c, "v_head_dim"),
        interleaved=_read_flag(c, "rope_interleave"),
    )


def _read_moe(c: Mapping[str, Any], family: str) -> MoEConfig | None:
    depth = _read_size(c, "num_hidden_layers")
    if family == "qwen3_moe":
        period, dense_layers = _read_size(c, "decoder_sparse_step"), _read_indices(c, "mlp_only_layers")
        moe = MoEConfig(
            num_experts=_read_experts(c, "num_experts", "num_local_experts"),
            top_k=_read_size(c, "num_experts_per_tok"),
            intermediate_size=_read_size(c, "moe_intermediate_size"),
            layers=tuple(i for i in range(depth) if i not in dense_layers and (i + 1) % period == 0),
            norm_topk=_read_flag(c, "norm_topk_prob"),
        )
    elif family in ("mixtral", "olmoe"):
        moe = MoEConfig(
            num_experts=_read_experts(c, "num_local_experts", "num_experts"),
            top_k=_read_size(c, "num_experts_per_tok"),
            intermediate_size=_read_size(c, "intermediate_size"),
            layers=tuple(range(depth)),
            norm_topk=family == "mixtral" or _read_flag(c, "norm_topk_prob"),
        )
    elif family == "deepseek_v3":
        moe = _read_deepseek_moe(c, depth)
    else:
        return None
    if moe.top_k > moe.num_experts:
        raise ValueError(f"num_experts_per_tok is {moe.top_k}; there are only {moe.num_experts} experts")
    return moe if moe.layers else None


def _read_deepseek_moe(c: Mapping[str, Any], depth: int) -> MoEConfig:
    start, period = _read_count(c, "first_k_dense_replace"), _read_size(c, "moe_layer_freq")
    num_groups, topk_groups = max(1, _read_count(c, "n_group")), max(1, _read_count(c, "topk_group"))
    num_experts = _read_experts(c, "n_routed_experts", "num_local_experts")
    if num_experts % num_groups or (num_groups > 1 and num_experts // num_groups < 2):
        raise ValueError(
            f"n_group is {num_groups}; it must cut n_routed_experts ({num_experts}) into groups of 2 or more"
        )
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"topk_group is {topk_groups}; it must be between 1 and n_group ({num_groups})")
    top_k = _read_size(c, "num_experts_per_tok")
    # further experts would be from groups that are not chosen
    if topk_groups * num_experts // num_groups < top_k <= num_experts:
        raise ValueError(
            f"num_experts_per_tok is {top_k}; {topk_groups} of {num_groups} groups hold only "
            f"{topk_groups * num_experts // num_groups} experts"
        )
    width = _read_size(c, "moe_intermediate_size")
    return MoEConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=width,
        layers=tuple(i for i in range(depth) if i >= start and i % period == 0),
        scoring=Scoring.SIGMOID,
        norm_topk=_read_flag(c, "norm_topk_prob"),
        scaling=_read_number(c, "routed_scaling_factor", floor=0.0),
        num_groups=num_groups,
        topk_groups=topk_groups,
        correction_bias=True,
        shared_intermediate_size=width * _read_count(c, "n_shared_experts"),
    )


def _read_experts(c: Mapping[str, Any], *names: str) -> int:
    """Read the number of experts. transformers has two names for it: the first in the file counts."""
    return _read_size(c, next((name for name in names if name in c), names[0]))


def _read_flag(c: Mapping[str, Any], key: str) -> bool:
    """Read true or false; a missing key, or null, is false."""
    value = c.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}; config.json needs true or false there")
    return bool(value)


def _read_number(
    c: Mapping[str, Any],
    key: str,
    *,
    minimum: float = -math.inf,
    floor: float = -math.inf,
    maximum: float = math.inf,
) -> float:
    """Read a finite number from ``minimum`` to ``maximum`` that is above ``floor``."""
    value = c.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}; config.json needs a number there")
    if not (abs(value) <= _MAX_NUMBER and minimum <= value <= maximum and value > floor):
        bounds = [
            *([f"of {minimum:g} or more"] if minimum > -math.inf else []),
            *([f"above {floor:g}"] if floor > -math.inf else []),
            *([f"up to {maximum:g}"] if maximum < math.inf else []),
        ]
        raise ValueError(
            f"{key} is {value!r}; config.json needs a finite number {' and '.join(bounds)} there"
        )
    return float(value)


def _read_size(c: Mapping[str, Any], key: str) -> int:
    return _read_count(c, key, minimum=1)


def _read_count(c: Mapping[str, Any], key: str, minimum: int = 0) -> int:
    """Read a whole number of at least ``minimum``. With a minimum of 0 a missing key, or null, is 0."""
    value = c.get(key)
    if value is None and not minimum:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        expected_kind = "a positive integer" if minimum else "an integer of 0 or more"
        raise ValueError(f"{key} is {value!r}; config.json needs {expected_kind} there")
    if value > (max_size := _MAX_SIZES.get(key, _MAX_SIZE)):
        raise ValueError(f"{key} is {value}; config.json needs an integer up to {max_size} there")
    return value


def _read_indices(c: Mapping[str, Any], key: str) -> set[int]:
    value = c[key] or []
    if not isinstance(value, list) or not all(isinstance(index, int) for index in value):
        raise ValueError(f"{key} is {value!r}; config.json needs a list of layer numbers there")
    return set(value)
