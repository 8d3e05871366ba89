"""Shares of a model: what each rank keeps, that they make up the whole, and what a rank reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from worlds import DEEPSEEK

from ostinato.model import published
from ostinato.model.config import ModelConfig, QKNorm, parse_config
from ostinato.model.decoder import Decoder
from ostinato.model.hf import fill_decoder, load_model, save_model
from ostinato.model.hf_names import list_stored_tensors
from ostinato.model.lora import init_adapters
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.model.share import Share, count_elements, find_spans
from ostinato.model.weights import Moe
from ostinato.parallel.layout import Layout
from ostinato.parallel.pieces import copy_part, fresh_adapters, own_adapters, write_part
from ostinato.parallel.shares import shares_of

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LATENT = {**DEEPSEEK, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {**LATENT, "q_lora_rank": 24, "n_group": 4, "topk_group": 2},
    "deepseek_v3-plain-q": {**LATENT, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
}
DENSE = ("1", "t2", "t4", "p2", "p4", "p2v2t2", "d2t2")
SPARSE = ("d2e2", "d2t2e4", "d2t2e2x2", "t2x2", "p2d2e2", "p2v2t2e2")
HEADLESS = ("p2", "d2e2", "d8e8", "p2d2e2")  # cut no heads: all heads are normed at once in olmoe


def config_of(family: str, **changed: Any) -> ModelConfig:
    return parse_config({**SMALL, **FAMILIES[family], **changed})


def layouts_of(family: str) -> tuple[str, ...]:
    """That can cut this family."""
    config = config_of(family)
    if config.qk_norm == QKNorm.FULL:
        return HEADLESS
    return DENSE if config.moe is None else (*DENSE, *SPARSE)


def model_of(family: str, dtype: torch.dtype = torch.float32, **changed: Any) -> Decoder:
    """Random weights, every vector too: what is alike everywhere would hide what is in the wrong place."""
    decoder = Decoder(config_of(family, **changed), dtype=dtype).init_weights(3)
    generator = torch.Generator().manual_seed(4)
    for name, weight in decoder.named_parameters():
        if name.endswith("norm") or name.endswith("bias"):
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator).to(dtype)
    for block in decoder.blocks:
        if isinstance(block.mlp, Moe) and block.mlp.correction_bias is not None:
            block.mlp.correction_bias.data.normal_(0, 0.3, generator=generator)
    return decoder


def saved(decoder: Decoder, folder: Path, shard_bytes: float = 5e9) -> Path:
    save_model(decoder, folder, shard_bytes=shard_bytes)
    return folder


CASES = [(family, layout) for family in FAMILIES for layout in layouts_of(family)]


def all_shares(family: str, text: str) -> Iterator[Share]:
    layout = Layout.parse(text)
    for rank in range(layout.world):
        yield from shares_of(layout, config_of(family), rank)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A saved model of each family, in several files."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = saved(model_of(family), tmp_path_factory.mktemp(family), shard_bytes=20_000)
        return made[family]

    return folder


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_shares_put_together_are_the_model(family: str, layout: str, folders: Callable[[str], Path]) -> None:
    whole, config = model_of(family), config_of(family)
    wanted = dict(whole.named_parameters())
    found = {name: torch.full_like(weight, torch.nan) for name, weight in wanted.items()}
    for share in all_shares(family, layout):
        part = load_model(folders(family), share=share)
        for name, weight in part.named_parameters():
            write_part(found[name], find_spans(config, share, name, wanted[name].shape), weight)
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name


class Counted:
    """A safetensors file, or a tensor in it, that counts the bytes that are taken from it."""

    def __init__(self, inner: Any, chosen: list[int]) -> None:
        self._inner, self._taken = inner, chosen
        self.keys = getattr(inner, "keys", None)
        self.get_shape = getattr(inner, "get_shape", None)

    def get_tensor(self, name: str) -> Any:
        return self._count(self._inner.get_tensor(name))

    def get_slice(self, name: str) -> Counted:
        return Counted(self._inner.get_slice(name), self._taken)

    def __getitem__(self, box: Any) -> Any:
        return self._count(self._inner[box])

    def _count(self, found: Any) -> Any:
        self._taken.append(found.nbytes)
        return found


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_bytes_read_are_those_kept(
    family: str, layout: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all ranks: what is cut once, what several keep once for each of them; other files stay closed."""
    opened: list[str] = []
    chosen: list[int] = []

    @contextmanager
    def counting(path: Path, framework: str) -> Iterator[Counted]:
        opened.append(path.name)
        with safe_open(path, framework=framework) as file:
            yield Counted(file, chosen)

    monkeypatch.setattr(published, "safe_open", counting)
    config, folder = config_of(family), folders(family)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    read = kept = 0
    replicas: Counter[str] = Counter()
    for share in all_shares(family, layout):
        opened.clear()
        decoder = Decoder(config, share=share)
        read += fill_decoder(decoder, folder)
        kept += sum(weight.nbytes for weight in decoder.parameters())
        for name, one in list_stored_tensors(decoder).items():
            part = count_elements(one.spans) / prod(one.shape)
            replicas[name] += part  # type: ignore[assignment] - a share of a tensor
        own = {
            index[name]
            for name, one in list_stored_tensors(decoder).items()
            if name in one.names and name in index
        }
        assert set(opened) == own
    size = {
        name: tensor.nbytes
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    assert sum(chosen) == read == kept == sum(round(replicas[name], 6) * size[name] for name in size)
    if layout in ("p2", "p4") and not config.tie_embeddings:  # no rank keeps what another one does
        assert read == sum(size.values())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("layout", ["t2", "d2e2", "d2t2e2x2"])
def test_experts_in_one_tensor(family: str, layout: str, tmp_path: Path) -> None:
    """transformers v5 may write all experts of a layer into two tensors."""
    folder = saved(model_of(family), tmp_path)
    state = load_file(folder / "model.safetensors")
    fused, whole = dict(state), model_of(family)
    for name, one in list_stored_tensors(whole).items():
        if name not in one.names:
            for old in one.names:
                fused.pop(old)
            fused[name] = one.view.detach().clone()
    assert len(fused) < len(state)
    for share in all_shares(family, layout):
        expected = dict(load_model(folder, share=share).named_parameters())
        save_file(fused, folder / "model.safetensors")
        read = fill_decoder(again := Decoder(config_of(family), share=share), folder)
        save_file(state, folder / "model.safetensors")
        assert read == sum(weight.nbytes for weight in expected.values())
        for name, weight in again.named_parameters():
            assert torch.equal(weight, expected[name]), name


def test_missing_is_told_by_whoever_keeps_it(tmp_path: Path) -> None:
    """A tensor of the second stage is nothing to the first; one that no rank knows is refused by all."""
    folder = saved(model_of("qwen3_moe"), tmp_path)
    path = folder / "model.safetensors"
    state = load_file(path)
    gone = "model.layers.3.mlp.experts.6.up_proj.weight"
    save_file({name: tensor for name, tensor in state.items() if name != gone}, path)
    first = next(all_shares("qwen3_moe", "p2d2e2"))
    for share in all_shares("qwen3_moe", "p2d2e2"):
        if 3 in share.layers and share.experts is not None and 6 in share.experts[2]:
            with pytest.raises(ValueError, match=rf"lacks 1 tensors .* the first is {gone}"):
                load_model(folder, share=share)
        else:
            load_model(folder, share=share)
    save_file({**state, "model.layers.0.mlp.bonus": torch.zeros(2)}, path)
    for share in all_shares("qwen3_moe", "d2e2"):
        with pytest.raises(ValueError, match=r"has 1 tensors .* model\.layers\.0\.mlp\.bonus"):
            load_model(folder, share=share)
    save_file({**state, "model.embed_tokens.weight": torch.zeros(62, 32)}, path)
    with pytest.raises(ValueError, match=r"shape \[62, 32\], config\.json calls for \[64, 32\]"):
        load_model(folder, share=next(all_shares("qwen3_moe", "t2")))
    with pytest.raises(ValueError, match="a share of a model is no model"):
        save_model(Decoder(config_of("qwen3_moe"), share=first), tmp_path / "again")


# what ranks keep, in memory

CUT = [case for case in CASES if case[0] in ("llama", "qwen2", "qwen3_moe", "deepseek_v3")]


@pytest.mark.parametrize("scheme", list(ExpertScheme))
@pytest.mark.parametrize(("family", "text"), CUT)
def test_the_adapters_of_ranks_are_parts_of_one(family: str, text: str, scheme: ExpertScheme) -> None:
    config, layout = config_of(family), Layout.parse(text)
    spec = AdapterSpec(rank=2, expert_scheme=scheme, targets=("attn", "mlp", "shared", "experts", "router"))
    one = init_adapters(config, spec, seed=5)
    state = one.state_dict()
    again = {name: torch.full_like(value, torch.nan) for name, value in state.items()}
    for rank in range(layout.world):
        shares = shares_of(layout, config, rank)
        own, fresh = own_adapters(config, shares, spec, state), fresh_adapters(config, shares, spec, seed=5)
        for name, part in own.state_dict().items():
            assert torch.equal(part, fresh.state_dict()[name])
            write_part(again[name], find_spans(config, shares[0], name, state[name].shape), part)
        own.prepare(torch.float32)  # the shapes of a local config
    for name, value in state.items():
        assert torch.equal(again[name], value), name


@given(st.permutations(range(8)))
def test_any_placement_of_experts_is_kept_in_its_order(order: list[int]) -> None:
    config, layout = config_of("qwen3_moe"), Layout.parse("d4e4")
    placement = [[order[i : i + 2] for i in range(0, 8, 2)]] * len(config.moe.layers if config.moe else ())
    whole = torch.arange(8.0)[:, None, None].expand(8, 32, 32)
    for rank in range(4):
        (share,) = shares_of(layout, config, rank, placement)
        part = copy_part(whole, find_spans(config, share, "layers.0.moe.gate_up", whole.shape))
        assert part[:, 0, 0].tolist() == order[2 * rank : 2 * rank + 2]


def test_a_placement_that_forgets_an_expert_is_refused() -> None:
    config, layout = config_of("qwen3_moe"), Layout.parse("d2e2")
    placement = [[[0, 1, 2, 3], [4, 5, 6, 6]]] * 3
    with pytest.raises(ValueError, match="does not give each of 8 experts"):
        shares_of(layout, config, 0, placement)
