"""Exact parameter counts: of a model by structural role, of adapters by scheme, of the cache per token.

Everything is a sum over ``logical_shapes``, the tensors that the decoder really has, so there is no second
formula that could drift from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from ostinato.model.config import ModelConfig, QKNorm
from ostinato.model.shapes import AdapterSpec, adapter_shapes, layer_shapes


class Role(StrEnum):
    """What a parameter belongs to."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "dense MLP"
    SHARED = "shared experts"
    EXPERTS = "routed experts"
    ROUTER = "router"
    NORM = "norms"
    HEAD = "head"


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of one layer by name within it: linear maps, biases, norms, the router's bias."""
    linears = layer_shapes(config, layer)
    biased = [f"attn.{name}" for name in "qkv" if config.qkv_bias] + ["attn.o"] * config.o_bias
    biased += [f"mlp.{name}" for name in ("gate", "up", "down") if config.mlp_bias]
    shapes = dict(linears)
    shapes |= {f"{name}.bias": linears[name][-2:-1] for name in biased if name in linears}
    shapes |= {"attn_norm": (config.hidden_size,), "mlp_norm": (config.hidden_size,)}
    if config.qk_norm != QKNorm.NONE:
        per_head = config.qk_norm == QKNorm.HEAD
        shapes["attn.q_norm"] = (config.head_dim if per_head else linears["attn.q"][0],)
        shapes["attn.k_norm"] = (config.head_dim if per_head else linears["attn.k"][0],)
    if config.mla is not None:
        shapes["attn.kv_a_norm"] = (config.mla.kv_lora_rank,)
        if config.mla.q_lora_rank is not None:
            shapes["attn.q_a_norm"] = (config.mla.q_lora_rank,)
    if config.moe is not None and layer in config.moe.layers and config.moe.correction_bias:
        shapes["moe.correction_bias"] = (config.moe.num_experts,)
    return shapes


def end_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of what is in no layer."""
    ends: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, config.hidden_size),
        "norm": (config.hidden_size,),
    }
    return ends if config.tie_embeddings else ends | {"head": ends["embed"]}


def logical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a model by logical name, e.g. "layers.3.attn.q.bias"."""
    layers = {
        f"layers.{layer}.{name}": shape
        for layer in range(config.num_layers)
        for name, shape in layer_tensors(config, layer).items()
    }
    return end_tensors(config) | layers


def role_of(name: str) -> Role:
    """Of a tensor by its logical name."""
    if name in ("embed", "head"):
        return Role.EMBEDDING if name == "embed" else Role.HEAD
    short = name.split(".", 2)[2] if name.startswith("layers.") else name
    if short.endswith("norm"):
        return Role.NORM
    first = short.split(".")[0]
    named = {"attn": Role.ATTENTION, "mlp": Role.MLP, "shared": Role.SHARED, "experts": Role.EXPERTS}
    return named.get(first, Role.ROUTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Parameters of a model."""

    roles: Mapping[Role, int]
    active: int  # that one token goes through, head and embedding included

    @property
    def total(self) -> int:
        return sum(self.roles.values())


def counts(config: ModelConfig) -> Counts:
    """Parameters of ``config`` by role; tied heads count once, as the embedding."""
    roles = dict.fromkeys(Role, 0)
    for name, shape in logical_shapes(config).items():
        roles[role_of(name)] += prod(shape)
    idle, moe = 0, config.moe
    if moe is not None:
        idle = roles[Role.EXPERTS] // moe.num_experts * (moe.num_experts - moe.top_k)
    return Counts(
        roles={role: number for role, number in roles.items() if number}, active=sum(roles.values()) - idle
    )


def adapter_counts(config: ModelConfig, spec: AdapterSpec) -> dict[Role, int]:
    """Parameters of our adapters by the role of what they adapt."""
    found: dict[Role, int] = {}
    for name, pair in adapter_shapes(config, spec).items():
        role = role_of(name)
        found[role] = found.get(role, 0) + sum(prod(factor) for factor in pair)
    return found


def kv_values(config: ModelConfig, *, latent: bool) -> int:
    """Numbers that the cache keeps per token, over all layers; times bytes of its dtype.

    ``latent``: MLA caches its latent and the one rotary key (arXiv 2405.04434 section 2.1.2, as vLLM does);
    otherwise keys and values of all heads, as our own engine does.
    """
    if config.mla is not None and latent:
        return config.num_layers * (config.mla.kv_lora_rank + config.mla.rope_head_dim)
    return config.num_layers * config.num_kv_heads * (config.head_dim + config.v_head_dim)
