"""Parameters of models and adapters against published numbers, and against the decoder itself.

Tinker: the table in tinker-cookbook's ``hyperparam_utils.py``. Macaron: what the safetensors headers of the
released adapters hold. Both as quoted in the project's notes on LoRA over mixtures, section 4 and 3.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import KINDS, SIZES

from ostinato.model.config import ModelConfig, parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import AdapterSpec, ExpertScheme, init_adapters
from ostinato.plan.counts import (
    adapter_counts,
    counts,
    logical_shapes,
)
from ostinato.plan.named import find_model, known_models

FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {**SIZES, "model_type": "llama"},
    "biased": {**SIZES, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {**SIZES, "model_type": "qwen2", "tie_word_embeddings": True},
    "latent": {**SIZES, **KINDS["sigmoid-bias-groups"], "q_lora_rank": 8},
    **{kind: {**SIZES, **more} for kind, more in KINDS.items()},
}


def config_of(name: str) -> ModelConfig:
    return find_model(name).config


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_the_decoder(family: str) -> None:
    """In number and by role: nothing that a decoder stores is left out, nothing is counted twice."""
    config = parse_config(FAMILIES[family])
    decoder = Decoder(config, device="meta")
    assert sum(map(prod, logical_shapes(config).values())) == sum(p.numel() for p in decoder.parameters())
    assert counts(config).total == sum(p.numel() for p in decoder.parameters())
    views = decoder.named_linears()
    shapes = logical_shapes(config)
    assert all(shapes[name] == tuple(one.weight.shape) for name, one in views.items())


@pytest.mark.parametrize(
    ("name", "total"),
    [
        # model.safetensors.index.json of the published checkpoints, in parameters
        ("smollm2-135m", 134_515_008),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("olmoe", 6_919_161_856),
    ],
)
def test_totals_of_published_checkpoints(name: str, total: int) -> None:
    assert counts(config_of(name)).total == total


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("deepseek-v3", 671.0, 37.6),  # "671B, 37B activated" (arXiv 2412.19437), both embeddings counted
        ("qwen3-30b-a3b", 30.5, 3.3),  # model card
        ("qwen3-235b-a22b", 235.1, 22.2),  # model card: 235B, 22B
        ("olmoe", 6.9, 1.3),  # arXiv 2409.02060: 6.9B, 1.3B
    ],
)
def test_active_parameters(name: str, billions: float, active: float) -> None:
    found = counts(config_of(name))
    assert found.total / 1e9 == pytest.approx(billions, abs=0.06)
    assert found.active / 1e9 == pytest.approx(active, abs=0.06)


def mlp_unit(config: ModelConfig) -> int:
    """Per unit of rank: experts in the shared-outer form, shared experts, dense layers."""
    found = adapter_counts(config, AdapterSpec(rank=1, targets=("mlp", "shared", "experts")))
    return sum(found.values())


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("kimi-k2", 144_583_680),
        ("deepseek-v3", 94_307_328),
        ("qwen3-30b-a3b", 14_450_688),
        ("qwen3-235b-a22b", 56_598_528),
    ],
)
def test_tinker_counts_of_mlp_adapters(name: str, published: int) -> None:
    assert mlp_unit(config_of(name)) == published


@given(
    rank=st.integers(1, 4),
    expert_rank=st.sampled_from([None, 2]),
    scheme=st.sampled_from(ExpertScheme),
    family=st.sampled_from(sorted(FAMILIES)),
)
def test_adapter_counts_are_those_of_tensors(
    rank: int, expert_rank: int | None, scheme: ExpertScheme, family: str
) -> None:
    config = parse_config(FAMILIES[family])
    spec = AdapterSpec(rank=rank, expert_rank=expert_rank, expert_scheme=scheme)
    made = init_adapters(config, spec)
    assert sum(adapter_counts(config, spec).values()) == made.num_parameters


def test_models_by_name(tmp_path: Any) -> None:
    assert "kimi-k2" in known_models()
    assert find_model("asset:seed-moe").config == config_of("seed-moe")
    with pytest.raises(ValueError, match="did you mean kimi-k2"):
        find_model("kimi-k")
    broken = tmp_path / "config.json"
    broken.write_text("[1]")
    with pytest.raises(ValueError, match="holds a list"):
        find_model(str(broken))
    broken.write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        find_model(str(broken))
