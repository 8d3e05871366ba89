"""PEFT's format gives our logits on the transformers model; our own comes back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.model.attention import CausalAttention
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model
from ostinato.model.lora import Adapters, AdapterSpec, init_adapters
from ostinato.model.peft_io import export_merged, load_peft, save_peft

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

TOKENS = torch.tensor([3, 17, 5, 42, 90, 8, 8, 61, 2, 33, 70, 12, 49])
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "mlp_only_layers": [1]}),
    "mixtral": ("Mixtral", {"num_local_experts": 6}),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "deepseek_v3": ("DeepseekV3", LATENT),
}
# peft 0.21 looks for the keys of rank_pattern among modules only, though it applies them to parameters.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"
)
MIXTURES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3")
ALL = ("attn", "mlp", "shared", "experts")


def make_base(family: str, folder: Path, seed: int = 0) -> Decoder:
    kind, extra = FAMILIES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **extra})
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return load_model(folder)


def make_adapters(decoder: Decoder, **spec: Any) -> Adapters:
    """Random, with a B that is not zero."""
    adapters = init_adapters(decoder.config, AdapterSpec(**{"rank": 3, "alpha": 6.0, "targets": ALL, **spec}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in adapters.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.15)
    return adapters


@torch.no_grad()
def our_logits(decoder: Decoder, adapters: Adapters | None = None) -> Tensor:
    hidden, _ = decoder(TOKENS, torch.arange(len(TOKENS)), CausalAttention(), adapters=adapters)
    return decoder.logits(hidden)


@torch.no_grad()
def check_peft(decoder: Decoder, adapters: Adapters, tmp_path: Path) -> None:
    save_peft(adapters, decoder, tmp_path / "adapter", base_name="base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    want = our_logits(decoder, adapters)
    assert (want - our_logits(decoder)).abs().max() > 0.05  # the adapter does something
    torch.testing.assert_close(model(TOKENS[None]).logits[0], want, atol=1e-4, rtol=0)
    trained = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert set(adapters_on_disk(tmp_path)) == {name.replace(".default", "") for name in trained}


def adapters_on_disk(tmp_path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", framework="pt") as file:
        return list(file.keys())


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_gives_our_logits(family: str, tmp_path: Path) -> None:
    decoder = make_base(family, tmp_path / "base")
    check_peft(decoder, make_adapters(decoder, expert_rank=2), tmp_path)


@pytest.mark.parametrize("family", MIXTURES)
def test_peft_gives_our_logits_per_expert_with_the_router(family: str, tmp_path: Path) -> None:
    decoder = make_base(family, tmp_path / "base")
    check_peft(
        decoder, make_adapters(decoder, expert_scheme="per_expert", targets=(*ALL, "router")), tmp_path
    )


@pytest.mark.parametrize(
    "targets",
    [("experts",), ("experts.gate",), ("experts.up", "attn.q"), ("experts.down",), ("mlp", "router")],
)
def test_single_maps_of_a_mixture(targets: tuple[str, ...], tmp_path: Path) -> None:
    """Half of a fused parameter, or one of the two that PEFT would nest."""
    decoder = make_base("qwen3_moe", tmp_path / "base")
    check_peft(decoder, make_adapters(decoder, targets=targets), tmp_path)


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    """Same shapes, other weights: it would load and silently be nonsense."""
    decoder = make_base("llama", tmp_path / "base")
    save_peft(make_adapters(decoder), decoder, tmp_path / "adapter", base_name="org/model")
    other = make_base("llama", tmp_path / "other", seed=1)
    with pytest.raises(ValueError, match=r"belongs to another base \(org/model\)"):
        load_peft(tmp_path / "adapter", other)


def test_a_foreign_or_damaged_adapter_is_refused(tmp_path: Path) -> None:
    decoder = make_base("llama", tmp_path / "base")
    with pytest.raises(ValueError, match=r"has no ostinato_adapter\.safetensors"):
        load_peft(tmp_path, decoder)
    save_peft(make_adapters(decoder), decoder, tmp_path)
    path = tmp_path / "ostinato_adapter.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated or not an adapter"):
        load_peft(tmp_path, decoder)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_merged_export_loads_in_transformers(family: str, tmp_path: Path) -> None:
    decoder = make_base(family, tmp_path / "base")
    adapters = make_adapters(decoder)
    export_merged(decoder, adapters, tmp_path / "merged", tokenizer_from=tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(
            model(TOKENS[None]).logits[0], our_logits(decoder, adapters), atol=1e-4, rtol=0
        )
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["model_type"] == family
