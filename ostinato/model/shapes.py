"""Adapter specifications, and the shapes of linear maps and of adapters' factors.

No torch: ``lora`` makes tensors of these shapes, ``flops`` and a planner count with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ostinato.model.config import ModelConfig

ROLES = ("attn", "mlp", "shared", "experts", "router")

# stored matrix -> the logical maps that are stacked in it
STACKED = {
    "qkv": ("attn.q", "attn.k", "attn.v"),
    "q": ("attn.q",),
    "q_a": ("attn.q_a",),
    "q_b": ("attn.q_b",),
    "kv_a": ("attn.kv_a",),
    "kv_b": ("attn.kv_b",),
    "o": ("attn.o",),
    "gate_up": ("mlp.gate", "mlp.up"),
    "down": ("mlp.down",),
    "shared_gate_up": ("shared.gate", "shared.up"),
    "shared_down": ("shared.down",),
    "router": ("router",),
}


class ExpertScheme(StrEnum):
    """Which expert factors are shared by all experts of a layer."""

    SHARED_OUTER = "shared_outer"
    PER_EXPERT = "per_expert"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """Which maps are adapted, at which rank, and with which scale. Raises ValueError for a wrong value.

    ``targets`` are roles (attn, mlp, shared, experts, router) or single maps (attn.q, experts.down). A role
    that a model lacks is skipped; a single map that it lacks is refused by ``compute_adapter_shapes``.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("attn", "mlp", "shared", "experts")
    expert_scheme: ExpertScheme = ExpertScheme.SHARED_OUTER
    expert_rank: int | None = None  # None: rank

    def __post_init__(self) -> None:
        for name in ("rank", "expert_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"adapter.{name} is {value}; use at least 1")
        if self.alpha <= 0:
            raise ValueError(f"adapter.alpha is {self.alpha}; use a positive number")
        if not self.targets:
            raise ValueError(f"adapter.targets is empty; name some of {', '.join(ROLES)}")
        for target in self.targets:
            if target.split(".")[0] not in ROLES:
                raise ValueError(
                    f"adapter.targets has {target!r}; use {', '.join(ROLES)} or single maps like attn.q"
                )
        if self.expert_scheme not in tuple(ExpertScheme):
            raise ValueError(
                f"adapter.expert_scheme is {self.expert_scheme!r}; use {' or '.join(ExpertScheme)}"
            )

    def get_rank(self, name: str) -> int:
        """Return the rank of the adapter of the map with this logical name."""
        return self.expert_rank or self.rank if ".experts." in name else self.rank

    def get_scale(self, name: str) -> float:
        """Return alpha / rank of the adapter of the map with this logical name."""
        return self.alpha / self.get_rank(name)


def compute_linear_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Compute (out, in) of every linear map by logical name, layer by layer; experts have (E, out, in)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(config.num_layers):
        shapes.update(
            {f"layers.{layer}.{name}": shape for name, shape in compute_layer_shapes(config, layer).items()}
        )
    return shapes


def compute_layer_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Compute what ``compute_linear_shapes`` does for one layer, by name within it."""
    hidden_size, num_heads, mla, moe = config.hidden_size, config.num_heads, config.mla, config.moe
    num_query_outputs, num_key_outputs = num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    if mla is None:
        shapes |= {
            "attn.q": (num_query_outputs, hidden_size),
            "attn.k": (num_key_outputs, hidden_size),
            "attn.v": (num_key_outputs, hidden_size),
        }
    else:
        if mla.q_lora_rank is None:
            shapes["attn.q"] = (num_query_outputs, hidden_size)
        else:
            shapes |= {
                "attn.q_a": (mla.q_lora_rank, hidden_size),
                "attn.q_b": (num_query_outputs, mla.q_lora_rank),
            }
        shapes["attn.kv_a"] = (mla.kv_lora_rank + mla.rope_head_dim, hidden_size)
        shapes["attn.kv_b"] = (num_heads * (mla.nope_head_dim + mla.v_head_dim), mla.kv_lora_rank)
    shapes["attn.o"] = (hidden_size, num_heads * config.v_head_dim)

    def add_ffn(role: str, width: int, *experts: int) -> None:
        shapes[f"{role}.gate"] = shapes[f"{role}.up"] = (*experts, width, hidden_size)
        shapes[f"{role}.down"] = (*experts, hidden_size, width)

    if moe is None or layer not in moe.layers:
        add_ffn("mlp", config.intermediate_size)
        return shapes
    shapes["router"] = (moe.num_experts, hidden_size)
    add_ffn("experts", moe.intermediate_size, moe.num_local)
    if moe.shared_intermediate_size:
        add_ffn("shared", moe.shared_intermediate_size)
    return shapes


def compute_adapter_shapes(
    config: ModelConfig, spec: AdapterSpec
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Compute the shapes of (A, B) by logical name. Raises ValueError for a single map that the model does
    not have, and if the targets match no map."""
    linears = compute_linear_shapes(config)
    roles = {name.split(".", 2)[2] for name in linears}
    for target in spec.targets:
        if "." in target and target not in roles:
            raise ValueError(
                f"adapter.targets has {target!r}; {config.model_type} has {', '.join(sorted(roles))}"
            )
    shapes = {}
    for name, (*experts, outputs, inputs) in linears.items():
        role, rank = name.split(".", 2)[2], spec.get_rank(name)
        if not any(role == target or role.startswith(target + ".") for target in spec.targets):
            continue
        is_shared = bool(experts) and spec.expert_scheme == ExpertScheme.SHARED_OUTER
        shares_a, shares_b = is_shared and role != "experts.down", is_shared and role == "experts.down"
        shapes[name] = (
            (*(() if shares_a else experts), rank, inputs),
            (*(() if shares_b else experts), outputs, rank),
        )
    if not shapes:
        raise ValueError(
            f"adapter.targets {spec.targets} match nothing in this {config.model_type} model; add attn"
        )
    return shapes
