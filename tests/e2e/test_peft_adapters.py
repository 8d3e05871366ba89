"""Adapters that PEFT itself has written: what they compute here, or why they are refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.hf.factors import read_folder, write_folder
from ostinato.hf.model import TransformersModel, load_transformers
from ostinato.model.attention import CausalAttention
from ostinato.model.hf import load_model
from ostinato.model.lora import Adapters
from ostinato.model.packed import PackedAttention
from ostinato.model.peft_io import load_peft, save_peft
from ostinato.types import Segment

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*_pattern keys did not match any targeted module:RuntimeWarning"  # peft 0.21 and parameters
)

TOKENS = torch.tensor([3, 17, 5, 42, 90, 8, 8, 61, 2, 33, 70, 12, 49])
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Llama": {"mlp_bias": True},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 16, "moe_intermediate_size": 32},
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "all-linear": ("Qwen2", {"target_modules": "all-linear"}),
    "two-maps": ("Llama", {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 7}),
    "rslora": ("Qwen2", {"target_modules": DENSE, "use_rslora": True}),
    "patterns": (
        "Qwen2",
        {
            "target_modules": DENSE,
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
            "alpha_pattern": {"v_proj": 3, "o_proj": 24},
        },
    ),
    "rslora-patterns": (
        "Llama",
        {
            "target_modules": DENSE,
            "use_rslora": True,
            "rank_pattern": {"k_proj": 3},
            "alpha_pattern": {"up_proj": 5},
        },
    ),
    "some-layers": ("Qwen2", {"target_modules": DENSE, "layers_to_transform": [0, 2]}),
    "expression": ("Llama", {"target_modules": r".*\.[12]\.self_attn\.(q|o)_proj"}),
    "dropout-gaussian": (
        "Qwen2",
        {"target_modules": DENSE, "lora_dropout": 0.1, "init_lora_weights": "gaussian"},
    ),
    "experts": ("Qwen3Moe", {"target_modules": ATTENTION, "target_parameters": EXPERTS}),
    "experts-down": ("Qwen3Moe", {"target_modules": [], "target_parameters": EXPERTS[1:]}),
    "experts-patterns": (
        "Qwen3Moe",
        {
            "target_modules": ATTENTION,
            "target_parameters": EXPERTS,
            "rank_pattern": {"mlp.experts.gate_up_proj": 2},
            "alpha_pattern": {"mlp.experts.gate_up_proj": 9},
        },
    ),
    "mixtral": ("Mixtral", {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}),
    "router-pattern": (
        "Qwen3Moe",
        {
            "target_modules": ATTENTION,
            "target_parameters": ["mlp.gate.weight"],
            "alpha_pattern": {"mlp.gate.weight": 24},
        },
    ),
    "router": ("Qwen3Moe", {"target_modules": ATTENTION, "target_parameters": ["mlp.gate.weight"]}),
}


def new_base(family: str, folder: Path) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(folder)
    return model


def new_adapter(model: Any, folder: Path, **settings: Any) -> Any:
    """PEFT's model with random factors, saved in ``folder``."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **settings})
    adapted = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in adapted.named_parameters():
            if "lora_" in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.15)
    adapted.save_pretrained(folder)
    return adapted


@torch.no_grad()
def logits_of(decoder: Any, adapters: Adapters | None) -> Tensor:
    hidden, _ = decoder(TOKENS, torch.arange(len(TOKENS)), CausalAttention(), adapters=adapters)
    return decoder.logits(hidden)


def assert_equal_outputs(logits: Tensor, want: Tensor) -> None:
    """Within 1e-5 of the largest logit: sums are in another order."""
    assert (logits - want).abs().max() <= 1e-5 * want.abs().max()


EVERYDAY = ("patterns", "experts-patterns")


@pytest.mark.parametrize(
    "form", [form if form in EVERYDAY else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
@torch.no_grad()
def test_an_adapter_of_peft_computes_what_it_does_there(form: str, tmp_path: Path) -> None:
    """The guide promised PEFT's adapters, and every one that PEFT itself had written was refused. What is
    loaded is saved again as PEFT reads it, and computes the same there."""
    family, settings = FORMS[form]
    theirs = new_adapter(new_base(family, tmp_path / "base"), tmp_path / "theirs", **settings)
    want = theirs(TOKENS[None]).logits[0]
    decoder = load_model(tmp_path / "base")
    adapters = load_peft(tmp_path / "theirs", decoder)
    assert (want - logits_of(decoder, None)).abs().max() > 0.01  # the adapter does something
    assert_equal_outputs(logits_of(decoder, adapters), want)

    save_peft(adapters, decoder, tmp_path / "ours", base_name="base")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        if settings["target_modules"]:  # it warned that ranks of parameters were ignored, which it applied
            warnings.simplefilter("error", RuntimeWarning)
        again = peft.PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    assert_equal_outputs(again(TOKENS[None]).logits[0], want)

    if not form.startswith("router"):  # of transformers' own a router is no linear map
        model = load_transformers(tmp_path / "base", dtype=torch.float32, device="cpu")
        factors = read_folder(tmp_path / "theirs", model.sites, "cpu")
        assert_equal_outputs(_by_transformers(model, factors), want)
        write_folder(factors, tmp_path / "written", "base")
        written = read_folder(tmp_path / "written", model.sites, "cpu")
        assert_equal_outputs(_by_transformers(model, written), want)


def _by_transformers(model: TransformersModel, factors: Adapters) -> Tensor:
    rows = PackedAttention((Segment(start=0, stop=len(TOKENS)),))
    return model.logits(model(TOKENS, torch.arange(len(TOKENS)), rows, adapters=factors)[0])


def test_what_was_not_adapted_stays_so_in_training(tmp_path: Path) -> None:
    """Maps, layers and ranks that PEFT's adapter does not have are zeros here, and have no gradient."""
    settings = {"target_modules": DENSE, "layers_to_transform": [1], "rank_pattern": {"q_proj": 2}}
    new_adapter(new_base("Qwen2", tmp_path / "base"), tmp_path / "theirs", **settings)
    decoder = load_model(tmp_path / "base")
    adapters = load_peft(tmp_path / "theirs", decoder)
    hidden, _ = decoder(TOKENS, torch.arange(len(TOKENS)), CausalAttention(), adapters=adapters)
    decoder.logits(hidden).logsumexp(-1).sum().backward()
    for name, (a, b) in adapters.tensors.items():
        assert a.grad is not None and b.grad is not None
        rank = 0 if ".1." not in name else 2 if name.endswith("attn.q") else 4
        assert not a[rank:].any() and not b[:, rank:].any(), name
        assert not a.grad[rank:].any() and not b.grad[:, rank:].any(), name
        assert a.grad[:rank].any() == b.grad[:, :rank].any() == bool(rank), name


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"target_modules": DENSE, "use_dora": True}, "use_dora True"),
    "bias": ({"target_modules": DENSE, "bias": "lora_only"}, "bias 'lora_only'"),
    "saved-modules": ({"target_modules": DENSE, "modules_to_save": ["lm_head"]}, "modules_to_save"),
    "embeddings": ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    "pissa": ({"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
    "tokens": ({"target_modules": DENSE, "trainable_token_indices": [1, 2]}, "trainable_token_indices"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_what_would_be_another_function_is_refused_by_name(form: str, tmp_path: Path) -> None:
    settings, words = REFUSED[form]
    new_adapter(new_base("Qwen2", tmp_path / "base"), tmp_path / "theirs", **settings)
    with pytest.raises(ValueError, match=words):
        load_peft(tmp_path / "theirs", load_model(tmp_path / "base"))


def test_other_kinds_other_bases_and_damage_are_refused(tmp_path: Path) -> None:
    base = load_model(new_base("Qwen2", tmp_path / "base") and tmp_path / "base")
    new_adapter(new_base("Qwen2", tmp_path / "again"), tmp_path / "theirs", target_modules=DENSE)
    settings = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    (tmp_path / "theirs" / "adapter_config.json").write_text(json.dumps({**settings, "peft_type": "IA3"}))
    with pytest.raises(ValueError, match="peft_type 'IA3'"):
        load_peft(tmp_path / "theirs", base)
    (tmp_path / "theirs" / "adapter_config.json").write_text(json.dumps(settings))
    mixture = load_model(new_base("Qwen3Moe", tmp_path / "mixture") and tmp_path / "mixture")
    with pytest.raises(ValueError, match=r"this model has|no linear map"):
        load_peft(tmp_path / "theirs", mixture)
    tensors = tmp_path / "theirs" / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    with pytest.raises(ValueError, match="truncated"):
        load_peft(tmp_path / "theirs", base)
