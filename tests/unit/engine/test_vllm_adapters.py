"""The files of an adapter, read as vLLM 0.32 reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from worlds import adapters_of, tiny_decoder

from ostinato.engine.vllm_adapters import list_expert_kinds, write_adapters
from ostinato.model.lora import Adapters
from ostinato.model.shapes import AdapterSpec

PREFIX = "base_model.model.model.layers.0."
Q_A = PREFIX + "self_attn.q_proj.lora_A.weight"
NAMES = {
    "shared_outer": ("w1", "w3", "w2"),
    "per_expert": ("{}.gate_proj", "{}.up_proj", "{}.down_proj"),
}


def update(adapters: Adapters, name: str) -> torch.Tensor:
    """[E, out, in], as we apply it."""
    a, b = adapters.tensors[name]
    return (adapters.spec.get_scale(name) * (b @ a)).detach()


def read_update(folder: Path, name: str, num_experts: int) -> torch.Tensor:
    """[E, out, in], packed as ``PackedLoRALayerWeights.pack_moe`` does (a tensor an expert, in order) or
    ``pack_moe_stacked`` (a factor of one expert is broadcast)."""
    about = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    each = range(num_experts) if "{}" in name else ()
    pair = list[torch.Tensor]()
    for part in "AB":
        of = [tensors[f"{PREFIX}mlp.experts.{name.format(expert)}.lora_{part}.weight"] for expert in each]
        pair.append(torch.stack(of) if of else tensors[f"{PREFIX}mlp.experts.{name}.lora_{part}.weight"])
    assert {factor.dim() for factor in pair} == {3} and {1, num_experts} >= {len(factor) for factor in pair}
    return about["lora_alpha"] / about["r"] * (pair[1] @ pair[0])


@pytest.mark.parametrize("expert_rank", [None, 3])
@pytest.mark.parametrize("scheme", NAMES)
def test_adapters_of_experts_are_what_vllm_makes_of_their_files(
    scheme: str, expert_rank: int | None, tmp_path: Path
) -> None:
    decoder = tiny_decoder(num_hidden_layers=1)
    spec = {"rank": 2, "alpha": 8.0, "expert_scheme": scheme, "expert_rank": expert_rank}
    adapters = adapters_of(decoder, 1, 0.3, targets=("attn", "experts"), **spec)
    write_adapters(adapters, tmp_path, torch.float32)
    assert decoder.config.moe is not None
    for name, role in zip(NAMES[scheme], ("gate", "up", "down"), strict=True):
        read = read_update(tmp_path, name, decoder.config.moe.num_experts)
        torch.testing.assert_close(read, update(adapters, f"layers.0.experts.{role}"))
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert torch.equal(stored[Q_A], adapters.tensors["layers.0.attn.q"][0])


def test_a_server_in_bf16_gets_half_the_bytes(tmp_path: Path) -> None:
    decoder = tiny_decoder(num_hidden_layers=1)
    adapters = adapters_of(decoder, 1, 0.3, rank=2, alpha=8.0, targets=("attn",))
    write_adapters(adapters, tmp_path, torch.bfloat16)
    read = load_file(tmp_path / "adapter_model.safetensors")[Q_A]
    assert torch.equal(read, adapters.tensors["layers.0.attn.q"][0].bfloat16())


def test_maps_of_experts_alone_are_refused() -> None:
    config = tiny_decoder(num_hidden_layers=1).config
    assert len(list_expert_kinds(config, AdapterSpec(targets=("attn", "experts")))) == 3
    assert list_expert_kinds(config, AdapterSpec(targets=("attn",))) == []
    with pytest.raises(ValueError, match="gate, up and down of experts together"):
        list_expert_kinds(config, AdapterSpec(targets=("experts.gate",)))
