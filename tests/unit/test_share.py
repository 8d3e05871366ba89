"""What ranks keep: parts that make up the whole, of the shapes that a decoder of the share has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_shards import config_of

from ostinato.model.decoder import Decoder
from ostinato.model.lora import AdapterSpec, ExpertScheme, init_adapters
from ostinato.model.share import is_cut, is_expert, placed
from ostinato.parallel.layout import Layout
from ostinato.parallel.pieces import cut, fresh_adapters, own_adapters, put
from ostinato.parallel.shares import shares_of

DENSE = ["1", "t2", "t4", "p2", "p2v2t2", "d2t2f2", "c2t2"]
SPARSE = ["d2e2", "d2t2e4", "d2t2e2x2", "t2x2", "p2d2e2", "d4t2e4", "p2v2t2e2"]
CASES = [(family, layout) for family in ("llama", "qwen2", "qwen3_moe", "deepseek_v3") for layout in DENSE]
CASES += [(family, layout) for family in ("qwen3_moe", "deepseek_v3") for layout in SPARSE]


@pytest.mark.parametrize("scheme", list(ExpertScheme))
@pytest.mark.parametrize(("family", "text"), CASES)
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
            put(again[name], placed(config, shares[0], name, state[name].shape), part)
        own.prepared(torch.float32)  # the shapes of a local config
    for name, value in state.items():
        assert torch.equal(again[name], value), name


@pytest.mark.parametrize(("family", "text"), CASES)
def test_what_is_cut_is_told(family: str, text: str) -> None:
    """``is_cut`` says for every tensor whether tensor ranks keep different parts of it."""
    config, layout = config_of(family), Layout.parse(text)
    for share in shares_of(layout, config, 0):
        cut_width = share.expert_tensor > 1
        other = replace(share, tensor_rank=int(share.tensor > 1), expert_tensor_rank=int(cut_width))
        for name, value in Decoder(config, device="meta").named_parameters():
            differ = placed(config, share, name, value.shape) != placed(config, other, name, value.shape)
            assert differ == (is_cut(share, name, value.shape) and share.tensor > 1), name


def test_experts_have_a_dimension_of_their_own() -> None:
    config = config_of("qwen3_moe")
    adapters = init_adapters(config, AdapterSpec(rank=2)).state_dict()
    assert is_expert("layers.0.experts.gate.B", adapters["layers.0.experts.gate.B"].shape)
    assert not is_expert("layers.0.experts.gate.A", adapters["layers.0.experts.gate.A"].shape)  # shared outer


@given(st.permutations(range(8)))
def test_any_placement_of_experts_is_kept_in_its_order(order: list[int]) -> None:
    config, layout = config_of("qwen3_moe"), Layout.parse("d4e4")
    placement = [[order[i : i + 2] for i in range(0, 8, 2)]] * len(config.moe.layers if config.moe else ())
    whole = torch.arange(8.0)[:, None, None].expand(8, 32, 32)
    for rank in range(4):
        (share,) = shares_of(layout, config, rank, placement)
        part = cut(whole, placed(config, share, "layers.0.moe.gate_up", whole.shape))
        assert part[:, 0, 0].tolist() == order[2 * rank : 2 * rank + 2]


def test_a_placement_that_forgets_an_expert_is_refused() -> None:
    config, layout = config_of("qwen3_moe"), Layout.parse("d2e2")
    placement = [[[0, 1, 2, 3], [4, 5, 6, 6]]] * 3
    with pytest.raises(ValueError, match="does not give each of 8 experts"):
        shares_of(layout, config, 0, placement)
