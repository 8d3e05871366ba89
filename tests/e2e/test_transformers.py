"""Our decoder is the model that transformers trained, both ways; PEFT's format gives our logits on it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from reference.naive_cache import NaiveCache
from torch import Tensor

from ostinato.model.attention import CausalAttention
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model, save_model
from ostinato.model.lora import Adapters, init_adapters
from ostinato.model.peft_io import export_merged, load_peft, save_peft
from ostinato.model.shapes import AdapterSpec

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
    "mistral": ("Mistral", {"sliding_window": 6}),
    "gemma3": (
        "Gemma3Text",
        {
            "sliding_window": 6,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
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


@pytest.mark.parametrize(
    "kind", ["Llama", "Mistral", "Gemma3Text", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral", "Olmoe", "DeepseekV3"]
)
def test_keys_of_bookkeeping_and_sampling_do_not_matter(kind: str) -> None:
    """config.json files with keys that transformers itself has written (``_commit_hash``, a temperature) were
    refused as unknown."""
    sampling = {key: 7 for key in transformers.GenerationConfig().to_dict() if not key.startswith("pad")}
    private = ("_name_or_path", "_model_name_or_path", "_commit_hash", "_attn_implementation")
    written = getattr(transformers, f"{kind}Config")(**SIZES).to_dict()
    base = {key: "x" for key in transformers.PretrainedConfig().to_dict() if key not in written}
    extra = dict.fromkeys(private, "x")
    parse_config({**sampling, **base, **extra, **json.loads(json.dumps(written, default=str))})


def reference(name: str) -> Any:
    """A tiny random transformers model, its norms and router biases moved away from 1 and 0."""
    kind, extra = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **extra})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
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


# ---- pEFT's format gives our logits on the transformers model; our own comes back bit for bit


# peft 0.21 looks for the keys of rank_pattern among modules only, though it applies them to parameters.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*_pattern keys did not match any targeted module:RuntimeWarning",
)
MIXTURES = ("qwen3_moe-mixed", "mixtral", "olmoe", "deepseek_v3")
ALL = ("attn", "mlp", "shared", "experts")


def make_base(family: str, folder: Path, seed: int = 0) -> Decoder:
    kind, extra = CASES[family]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **extra, "initializer_range": 0.1})
    getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).save_pretrained(folder)
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
    peft = pytest.importorskip("peft")
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


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", *MIXTURES])
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
    decoder = make_base("qwen3_moe-mixed", tmp_path / "base")
    check_peft(decoder, make_adapters(decoder, targets=targets), tmp_path)


def test_a_foreign_or_damaged_adapter_is_refused(tmp_path: Path) -> None:
    decoder = make_base("llama", tmp_path / "base")
    with pytest.raises(ValueError, match=r"has no ostinato_adapter\.safetensors and no"):
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
