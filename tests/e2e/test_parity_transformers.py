"""The decoder is the model that transformers trained: tiny random models of every family, both ways.

Weights are drawn large (std 0.2), so that logits, norms and routers are far from trivial.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.naive_cache import NaiveCache

from ostinato.model.attention import CausalAttention
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model, save_model

transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([3, 17, 5, 42, 90, 8, 8, 61, 2, 33, 70, 12, 49])
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 3}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-bias-linear": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        },
    ),
    "llama-llama3": ("Llama", {"head_dim": 24, "rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k}}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3_moe": ("Qwen3Moe", {**MOE, "head_dim": 16, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "qwen3_moe-mixed": (
        "Qwen3Moe",
        {**MOE, "head_dim": 16, "moe_intermediate_size": 32, "norm_topk_prob": False, "mlp_only_layers": [1]},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "olmoe": ("Olmoe", {**MOE, "num_key_value_heads": 4}),
    "olmoe-clip-norm": ("Olmoe", {**MOE, "clip_qkv": 0.8, "norm_topk_prob": True}),
    "deepseek_v3": ("DeepseekV3", {**LATENT, "q_lora_rank": 24, "n_group": 4, "topk_group": 2}),
    "deepseek_v3-yarn-plain-q": (
        "DeepseekV3",
        {**LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": YARN},
    ),
}


def reference(name: str) -> Any:
    """A tiny random transformers model, its norms and router biases moved away from 1 and 0."""
    kind, extra = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **extra})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in key or key.endswith("bias"):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model


def ours(decoder: Decoder) -> torch.Tensor:
    hidden, _ = decoder(TOKENS, torch.arange(len(TOKENS)), CausalAttention())
    return decoder.logits(hidden)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_same_logits_both_ways(name: str, tmp_path: Path) -> None:
    """Their folder -> our logits, in full and with a cache; our folder -> their logits."""
    model = reference(name)
    expected = model(TOKENS[None]).logits[0]
    model.save_pretrained(tmp_path / "theirs")
    decoder = load_model(tmp_path / "theirs")
    torch.testing.assert_close(ours(decoder), expected, atol=1e-4, rtol=0)

    cache, positions = NaiveCache(), torch.arange(len(TOKENS))
    pieces = [(0, 5), (5, 6), (6, 7), (7, len(TOKENS))]
    steps = [decoder.logits(decoder(TOKENS[a:b], positions[a:b], cache)[0]) for a, b in pieces]
    theirs, past = [], None
    for a, b in pieces:
        output = model(TOKENS[None, a:b], past_key_values=past, use_cache=True)
        past = output.past_key_values
        theirs.append(output.logits[0])
    torch.testing.assert_close(torch.cat(steps), torch.cat(theirs), atol=1e-4, rtol=0)

    save_model(decoder, tmp_path / "ours", shard_bytes=30_000)
    again = type(model).from_pretrained(tmp_path / "ours").eval()
    torch.testing.assert_close(again(TOKENS[None]).logits[0], expected, atol=0, rtol=0)


@torch.no_grad()
def test_routing_is_theirs() -> None:
    """The experts that we report are those that transformers' router chose, layer by layer."""
    for name in ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3"):
        model = reference(name)
        chosen: list[torch.Tensor] = []

        def keep(_module: Any, _input: Any, output: Any, chosen: list[torch.Tensor] = chosen) -> None:
            chosen.append(output[2])

        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(keep)
        model(TOKENS[None])
        decoder = from_transformers(model)
        _, routing = decoder(TOKENS, torch.arange(len(TOKENS)), CausalAttention())
        assert routing is not None
        for layer, ids in enumerate(chosen):
            assert torch.equal(routing[:, layer].long().sort(-1).values, ids.sort(-1).values), name


def from_transformers(model: Any, dtype: torch.dtype = torch.float32) -> Decoder:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_model(folder, dtype)


@torch.no_grad()
def test_bfloat16_stays_close() -> None:
    """In bf16 we round where transformers rounds: the difference is within a few bf16 steps of the logits."""
    model = reference("llama")
    decoder = from_transformers(model, torch.bfloat16)
    expected = model.to(torch.bfloat16)(TOKENS[None]).logits[0].float()
    exact = reference("llama")(TOKENS[None]).logits[0]
    assert (ours(decoder).float() - exact).abs().mean() < 1.5 * (expected - exact).abs().mean()
