"""Adapters: names, shapes, counts, and the refusals of what does not fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from worlds import tiny_dense

from ostinato.model.config import ModelConfig, parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import AdapterSpec, ExpertScheme, adapter_shapes, init_adapters, linear_shapes

BASE = tiny_dense(tie_word_embeddings=False, max_position_embeddings=64)
QWEN3_MOE = parse_config(
    {**BASE, "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16, "mlp_only_layers": [0]}
)
LLAMA = parse_config(BASE)


def count(config: ModelConfig, *targets: str, **spec: Any) -> int:
    """Parameters per unit of rank."""
    shapes = adapter_shapes(config, AdapterSpec(rank=1, targets=targets, **spec))
    return sum(math.prod(shape) for pair in shapes.values() for shape in pair)


def test_logical_names_are_those_of_the_decoder() -> None:
    """Shapes computed from the config alone are the shapes of the stored views."""
    for config in (LLAMA, QWEN3_MOE):
        views = Decoder(config, device="meta").named_linears()
        assert linear_shapes(config) == {name: tuple(view.weight.shape) for name, view in views.items()}


def test_counts_of_published_models() -> None:
    """Adapter parameters per unit of rank, as published for these models' MLPs (shared-outer experts)."""
    qwen = parse_config(
        {
            **BASE,
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        }
    )
    assert count(qwen, "experts", "mlp", "shared") == 14_450_688
    kimi = parse_config(
        {
            **BASE,
            "model_type": "kimi_k2",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "n_routed_experts": 384,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        }
    )
    assert count(kimi, "experts", "mlp", "shared") == 144_583_680
    assert count(kimi, "attn") == 61 * 62_528
    assert count(kimi, "attn.q_a", "attn.kv_a", "attn.o") == 1_940_288
    per_expert = 60 * 3 * (7168 + 2048) * 384
    assert count(kimi, "experts", expert_scheme=ExpertScheme.PER_EXPERT) == per_expert


def test_shared_outer_shares_what_touches_the_hidden_dimension() -> None:
    shapes = adapter_shapes(QWEN3_MOE, AdapterSpec(rank=4, expert_rank=2, targets=("experts", "attn.q")))
    assert shapes == {
        "layers.0.attn.q": ((4, 32), (32, 4)),
        "layers.1.attn.q": ((4, 32), (32, 4)),
        "layers.1.experts.gate": ((2, 32), (6, 16, 2)),
        "layers.1.experts.up": ((2, 32), (6, 16, 2)),
        "layers.1.experts.down": ((6, 2, 16), (32, 2)),
    }
    spec = AdapterSpec(rank=4, expert_rank=2, alpha=8.0)
    assert (spec.scale_of("layers.1.attn.q"), spec.scale_of("layers.1.experts.up")) == (2.0, 4.0)


def test_roles_that_a_model_lacks_are_skipped_and_single_maps_refused() -> None:
    assert {name.split(".", 2)[2] for name in adapter_shapes(LLAMA, AdapterSpec())} == {
        "attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"experts\.down.*llama has attn\.k"):
        adapter_shapes(LLAMA, AdapterSpec(targets=("attn", "experts.down")))
    with pytest.raises(ValueError, match="match nothing"):
        adapter_shapes(LLAMA, AdapterSpec(targets=("experts", "router")))
    assert not any("router" in name for name in adapter_shapes(QWEN3_MOE, AdapterSpec()))
    assert "layers.1.router" in adapter_shapes(QWEN3_MOE, AdapterSpec(targets=("router",)))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"expert_rank": 0}, "expert_rank is 0"),
        ({"alpha": 0.0}, "alpha is 0"),
        ({"targets": ()}, "targets is empty"),
        ({"targets": ("q_proj",)}, "'q_proj'.*attn"),
        ({"expert_scheme": "per_rank"}, "expert_scheme is 'per_rank'.*shared_outer"),
    ],
)
def test_bad_specs_are_refused(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AdapterSpec(**spec)


def test_initial_values() -> None:
    """A is kaiming-uniform as in PEFT, bound 1/sqrt(in), B is zero; drawn from the seed alone."""
    one, same, other = (init_adapters(QWEN3_MOE, AdapterSpec(rank=16), seed=s) for s in (0, 0, 1))
    a, b = one.tensors["layers.0.attn.q"]
    assert a.requires_grad and b.requires_grad and a.dtype == torch.float32
    assert 0.9 / math.sqrt(32) < a.abs().max() <= 1 / math.sqrt(32)
    assert not b.any()
    assert torch.equal(a, same.tensors["layers.0.attn.q"][0])
    assert not torch.equal(a, other.tensors["layers.0.attn.q"][0])
    assert one.num_parameters == sum(p.numel() for p in one.parameters())


def test_state_round_trip_and_published_copies() -> None:
    one, other = (init_adapters(QWEN3_MOE, AdapterSpec(rank=2), seed=s) for s in (0, 1))
    published = one.detach_copy()
    one.load_state_dict(other.state_dict())
    assert torch.equal(one.tensors["layers.1.attn.k"][0], other.tensors["layers.1.attn.k"][0])
    assert not any(p.requires_grad for p in published.parameters())
    assert not torch.equal(published.tensors["layers.1.attn.k"][0], one.tensors["layers.1.attn.k"][0])
    assert all(p.is_leaf and p.requires_grad for p in one.to("cpu").parameters())


def test_state_of_another_adapter_is_refused_by_name() -> None:
    adapters = init_adapters(QWEN3_MOE, AdapterSpec(rank=2))
    smaller = init_adapters(QWEN3_MOE, AdapterSpec(rank=2, targets=("attn",)))
    deeper = init_adapters(QWEN3_MOE, AdapterSpec(rank=4))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down\.A is missing"):
        adapters.load_state_dict(smaller.state_dict())
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down\.A is unknown"):
        smaller.load_state_dict(adapters.state_dict())
    with pytest.raises(ValueError, match=r"has shape \(4, 32\).*\(2, 32\)"):
        adapters.load_state_dict(deeper.state_dict())


def test_stacked_maps_with_gaps() -> None:
    """q and v adapted, k not: k's rows of the stored matrix get no update, and each map meets its own A."""
    adapters = init_adapters(LLAMA, AdapterSpec(rank=2, targets=("attn.q", "attn.v")))
    with torch.no_grad():
        for _, b in adapters.tensors.values():
            b.normal_()
    lora = adapters.prepared(torch.float32).layers[1].qkv
    assert lora is not None and lora.a.shape == (4, 32) and lora.b.shape == (32 + 16 + 16, 4)
    (qa, qb), (va, vb) = adapters.tensors["layers.1.attn.q"], adapters.tensors["layers.1.attn.v"]
    torch.testing.assert_close(lora.b @ lora.a, torch.cat((qb @ qa, torch.zeros(16, 32), vb @ va)))
    assert adapters.prepared(torch.float32).layers[1].gate_up is None


@pytest.mark.parametrize("targets", [("experts.down",), ("experts.up",), ("experts.gate", "experts.down")])
@pytest.mark.parametrize("scheme", list(ExpertScheme))
def test_single_expert_maps(targets: tuple[str, ...], scheme: ExpertScheme) -> None:
    adapters = init_adapters(QWEN3_MOE, AdapterSpec(rank=2, targets=targets, expert_scheme=scheme))
    lora = adapters.prepared(torch.float32).layers[1].experts
    assert lora is not None
    up = torch.matmul(lora.gate_up_b, lora.gate_up_a)
    assert up.shape == (6, 32, 32)
    assert torch.matmul(lora.down_b, lora.down_a).shape == (6, 32, 16)
