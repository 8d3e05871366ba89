"""Adapters: names, shapes, counts, and the refusals of what does not fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from worlds import tiny_dense

from ostinato.model.config import parse_config
from ostinato.model.lora import init_adapters
from ostinato.model.shapes import AdapterSpec, compute_adapter_shapes

BASE = tiny_dense(tie_word_embeddings=False, max_position_embeddings=64)
QWEN3_MOE = parse_config(
    {**BASE, "model_type": "qwen3_moe", "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16, "mlp_only_layers": [0]}
)
LLAMA = parse_config(BASE)


def test_roles_that_a_model_lacks_are_skipped_and_single_maps_refused() -> None:
    assert {name.split(".", 2)[2] for name in compute_adapter_shapes(LLAMA, AdapterSpec())} == {
        "attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"experts\.down.*llama has attn\.k"):
        compute_adapter_shapes(LLAMA, AdapterSpec(targets=("attn", "experts.down")))
    with pytest.raises(ValueError, match="match nothing"):
        compute_adapter_shapes(LLAMA, AdapterSpec(targets=("experts", "router")))
    assert not any("router" in name for name in compute_adapter_shapes(QWEN3_MOE, AdapterSpec()))
    assert "layers.1.router" in compute_adapter_shapes(QWEN3_MOE, AdapterSpec(targets=("router",)))


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
    lora = adapters.prepare(torch.float32).layers[1].qkv
    assert lora is not None and lora.a.shape == (4, 32) and lora.b.shape == (32 + 16 + 16, 4)
    (qa, qb), (va, vb) = adapters.tensors["layers.1.attn.q"], adapters.tensors["layers.1.attn.v"]
    torch.testing.assert_close(lora.b @ lora.a, torch.cat((qb @ qa, torch.zeros(16, 32), vb @ va)))
    assert adapters.prepare(torch.float32).layers[1].gate_up is None
