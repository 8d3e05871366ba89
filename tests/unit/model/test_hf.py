"""Hugging Face folders: round trips, other spellings of experts, damage; and what a model may be called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from worlds import DEEPSEEK, tiny_dense

from ostinato.model.attention import CausalAttention
from ostinato.model.config import parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import load_model, save_model
from ostinato.model.named import find_model_folder, is_hub_name, is_model_name

BASE = tiny_dense(tie_word_embeddings=False, max_position_embeddings=64, initializer_range=0.2)
MOE = {"num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True, "mlp_bias": True, "attention_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3_moe": {"model_type": "qwen3_moe", **MOE, "moe_intermediate_size": 16, "head_dim": 8},
    "mixtral": {"model_type": "mixtral", **MOE},
    "deepseek_v3": {**DEEPSEEK, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}


def tiny(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(parse_config({**BASE, **MODELS[name]}), dtype=dtype).init_weights(3)


def hidden(decoder: Decoder) -> torch.Tensor:
    with torch.no_grad():
        return decoder(torch.tensor([3, 17, 5, 42]), torch.arange(4), CausalAttention())[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shard_bytes", [5e9, 9000])
def test_round_trip_is_exact(name: str, shard_bytes: float, tmp_path: Path) -> None:
    decoder = tiny(name, torch.bfloat16)
    save_model(decoder, tmp_path, shard_bytes=shard_bytes)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes < 1e6)
    again = load_model(tmp_path, torch.bfloat16)
    for (key, one), (other_key, other) in zip(
        decoder.named_parameters(), again.named_parameters(), strict=True
    ):
        assert key == other_key and torch.equal(one, other), key
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {**BASE, **MODELS[name], "dtype": "bfloat16"}


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_in_one_tensor(name: str, tmp_path: Path) -> None:
    """transformers v5 holds experts fused, and calls Mixtral's block mlp; a file may look like its memory."""
    decoder = tiny(name)
    save_model(decoder, tmp_path)
    state = {
        key.replace(".block_sparse_moe.", ".mlp."): tensor
        for key, tensor in load_file(tmp_path / "model.safetensors").items()
        if ".experts." not in key
    }
    for layer, block in enumerate(decoder.blocks):
        gate_up, down = block.mlp.gate_up, block.mlp.down
        assert isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)
        state[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = gate_up.detach()
        state[f"model.layers.{layer}.mlp.experts.down_proj"] = down.detach()
    save_file(state, tmp_path / "model.safetensors")
    assert torch.equal(hidden(load_model(tmp_path)), hidden(decoder))


def edit(folder: Path, drop: str = "", add: dict[str, torch.Tensor] | None = None) -> None:
    state = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in state.items() if k != drop} | (add or {}), folder / "model.safetensors")


def test_multi_token_prediction_layers_are_left_out_loudly(tmp_path: Path) -> None:
    decoder = tiny("deepseek_v3")
    save_model(decoder, tmp_path)
    edit(tmp_path, add={"model.layers.2.eh_proj.weight": torch.zeros(4, 4)})
    with pytest.warns(UserWarning, match="1 tensors of multi-token-prediction"):
        assert torch.equal(hidden(load_model(tmp_path)), hidden(decoder))


def test_damage_is_named(tmp_path: Path) -> None:
    save_model(tiny("qwen2"), tmp_path)
    key, path = "model.layers.1.self_attn.k_proj.bias", tmp_path / "model.safetensors"
    whole = path.read_bytes()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"drop": key}, rf"lacks 1 tensors .* {key}"),
        (
            {"add": {"model.layers.1.mlp.gate_proj.bias": torch.zeros(48)}},
            r"has 1 tensors .*1\.mlp\.gate_proj\.bias",
        ),
        ({"add": {key: torch.zeros(3)}}, rf"{key} .* shape \[3\], config\.json calls for \[16\]"),
        ({"add": {key: torch.zeros(16, dtype=torch.int8)}}, "torch.int8; quantised"),
        ({"add": {key: torch.zeros(16).to(torch.float8_e4m3fn)}}, "float8_e4m3fn; quantised"),
    ]
    for change, words in cases:
        edit(tmp_path, **change)
        with pytest.raises(ValueError, match=words):
            load_model(tmp_path)
        path.write_bytes(whole)
    for cut in (len(whole) // 2, 100, 4):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
            load_model(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors does not exist"):
        load_model(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_model(tiny("llama"), tmp_path, shard_bytes=9000)
    next(iter(sorted(tmp_path.glob("model-00002-*")))).unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-\d+\.safetensors does not exist"):
        load_model(tmp_path)


def test_old_shards_beside_a_newer_file_are_refused(tmp_path: Path) -> None:
    """The shards of an old save won over the ``model.safetensors`` that was trained later, which transformers
    loads: the older model was used without a word."""
    save_model(tiny("llama"), tmp_path, shard_bytes=9000)
    save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"two sets of weights.*model\.safetensors\.index\.json"):
        load_model(tmp_path)


def same_logits(one: Decoder, other: Decoder) -> bool:
    return torch.equal(one.logits(hidden(one)), other.logits(hidden(other)))


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_of_tensors_are_read_and_others_are_not(zipped: bool, tmp_path: Path) -> None:
    """A folder with ``pytorch_model.bin`` alone was refused. Nothing but tensors is taken from a pickle."""
    decoder, path = tiny("llama"), tmp_path / "pytorch_model.bin"
    save_model(decoder, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    assert same_logits(load_model(tmp_path), decoder)
    torch.save({**tensors, "lm_head.weight": Path("x")}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match="no pickle of tensors alone"):
        load_model(tmp_path)


def test_a_tied_head_may_lie_in_another_pickle_than_the_embedding(tmp_path: Path) -> None:
    """It was looked for in the head's own file alone, and the advice was to say that it is not tied."""
    decoder = tiny("llama")
    save_model(decoder, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    embedding = "model.embed_tokens.weight"
    for head in (tensors[embedding].clone(), tensors[embedding] + 1):
        parts = {"a.bin": {**tensors}, "b.bin": {"lm_head.weight": head}}
        for name, part in parts.items():
            torch.save(part, tmp_path / name)
        index = {"weight_map": {tensor: name for name, part in parts.items() for tensor in part}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        if torch.equal(head, tensors[embedding]):
            assert same_logits(load_model(tmp_path), decoder)
        else:
            with pytest.raises(ValueError, match="tie_word_embeddings true"):
                load_model(tmp_path)


def test_blocks_of_float8_are_widened(tmp_path: Path) -> None:
    """As DeepSeek-V3 publishes its weights: codes, and a scale per block."""
    decoder, blocks = tiny("llama"), (16, 24)
    save_model(decoder, tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, wide = load_file(file), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name]
        scale = torch.empty(*(-(-size // block) for size, block in zip(weight.shape, blocks, strict=True)))
        codes, exact = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                here = slice(i * 16, i * 16 + 16), slice(j * 24, j * 24 + 24)
                scale[i, j] = weight[here].abs().max() / 448
                codes[here] = (weight[here] / scale[i, j]).to(torch.float8_e4m3fn)
                exact[here] = codes[here].float() * scale[i, j]
        wide[name] = exact
        tensors |= {name: codes, f"{name}_scale_inv": scale}
    save_file(tensors, file)
    form = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": blocks}
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": form}))
    read = load_model(tmp_path)
    save_model(read, tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(saved[name], weight) for name, weight in wide.items())
    assert "quantization_config" not in (tmp_path / "again" / "config.json").read_text()
    assert same_logits(load_model(tmp_path / "again"), read)
    ours, theirs = (one.logits(hidden(one)) for one in (read, decoder))
    assert 0 < (ours - theirs).norm() < 0.1 * theirs.norm()
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match="up_proj"):
        load_model(tmp_path)


@pytest.mark.parametrize("shard_bytes", [5e9, 9000])
def test_a_head_that_differs_from_a_tied_embedding_is_used(shard_bytes: float, tmp_path: Path) -> None:
    """A merged adapter may leave a head of its own in a folder that still calls it tied: it was dropped, and
    all logits were another model's. transformers compares, and unties where they differ."""
    decoder = Decoder(parse_config({**BASE, **MODELS["qwen2"]})).init_weights(3)
    save_model(decoder, tmp_path, shard_bytes=shard_bytes)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        untied = load_model(tmp_path)
    assert torch.equal(untied.logits(hidden(untied)), decoder.logits(hidden(decoder)))
    save_model(untied, tmp_path / "again")
    again = load_model(tmp_path / "again")
    assert torch.equal(again.logits(hidden(again)), decoder.logits(hidden(decoder)))


def test_a_copy_of_the_embedding_is_a_tied_head(tmp_path: Path) -> None:
    decoder = tiny("llama")
    save_model(decoder, tmp_path)
    edit(tmp_path, add={"lm_head.weight": decoder.embed.detach().clone()})
    assert load_model(tmp_path).config.tie_embeddings


def test_saving_over_an_earlier_save_leaves_no_shard_behind(tmp_path: Path) -> None:
    save_model(tiny("llama"), tmp_path, shard_bytes=9000)
    decoder = tiny("llama").init_weights(9)
    save_model(decoder, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(hidden(load_model(tmp_path)), hidden(decoder))


def test_a_config_that_is_larger_than_the_weights_takes_no_memory(tmp_path: Path) -> None:
    """Memory was taken before the weights were looked at: the error was an allocator's, of 70 TB."""
    save_model(Decoder(parse_config({**BASE, **MODELS["mixtral"]})), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    sizes = {"vocab_size": 2**24, "hidden_size": 2**20}
    for change, words in ((sizes, "of different models"), ({"num_hidden_layers": 50}, "lacks")):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=words):
            load_model(tmp_path)


# ---- what a user may call a model


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("asset:no-such-asset", "not packaged"),
        ("nowhere", "no Hugging Face folder"),
        ("a/b/c", "no Hugging Face folder"),
        ("", "no Hugging Face folder"),
    ],
)
def test_what_is_no_model_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        find_model_folder(name)


def test_names_of_models_and_of_recipes_are_told_apart() -> None:
    assert all(map(is_model_name, ("asset:seed-moe", "smollm2-135m", "Qwen/Qwen3-0.6B")))
    assert not any(map(is_model_name, ("quickstart", "recipes/mine.toml", "runs", "tests/unit")))


def test_a_hub_name_is_not_a_folder_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter trained on a hub model names its base by the hub name, not by this machine's cache."""
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("Qwen/Qwen3-0.6B")
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert not is_hub_name("Qwen/Qwen3-0.6B")
    assert not any(map(is_hub_name, ("asset:seed-moe", "smollm2-135m", "/tmp/a/b", "a")))
