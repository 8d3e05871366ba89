"""Ranks with the same rows and each a part of the weights give what one rank gives, in any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from small_shards import config_of
from small_world import KERNELS
from thread_links import on_threads

from ostinato.model.moe import ExpertLora, experts
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS
from ostinato.parallel.layout import Layout
from ostinato.parallel.replicated import OwnExperts, VocabularyPart, added_up, check_layout, replicated_ops

E, D, F_, K = 8, 16, 12, 3


def weights(
    seed: int, dtype: torch.dtype, scheme: str
) -> tuple[torch.Tensor, torch.Tensor, ExpertLora | None]:
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) * 0.3

    gate_up, down = new(E, 2 * F_, D), new(E, D, F_)
    if scheme == "none":
        return gate_up, down, None
    shared = scheme == "shared_outer"
    a, b = (new(4, D), new(D, 2)) if shared else (new(E, 4, D), new(E, D, 2))
    return gate_up, down, ExpertLora(a, new(E, 2 * F_, 4), new(E, 2, F_), b, 0.5)


def part(layout: Layout, rank: int, whole: tuple[Any, Any, ExpertLora | None]) -> tuple[Any, Any, Any]:
    """What a rank keeps: its experts, and of them its part of gate, of up and of the inputs of down."""
    gate_up, down, lora = whole
    e, size = layout.place("e", rank), E // layout.expert
    x, width = layout.coords(rank).tensor if layout.expert_tensor > 1 else 0, F_ // layout.expert_tensor
    ids, own = slice(e * size, (e + 1) * size), slice(x * width, (x + 1) * width)

    def outputs(stacked: torch.Tensor) -> torch.Tensor:
        return torch.cat([half[ids][:, own] for half in stacked.chunk(2, dim=1)], dim=1)

    if lora is not None:
        a = lora.gate_up_a if lora.gate_up_a.dim() == 2 else lora.gate_up_a[ids]
        b = lora.down_b if lora.down_b.dim() == 2 else lora.down_b[ids]
        lora = ExpertLora(a, outputs(lora.gate_up_b), lora.down_a[ids][..., own], b, lora.scale)
    return outputs(gate_up), down[ids][..., own], lora


def on_ranks_of(
    layout: Layout, kernels: Kernels | None, whole: Any, x: Any, ids: Any, w: Any
) -> torch.Tensor:
    base = kernels.ops.experts if kernels else experts

    def work(links: Any) -> torch.Tensor:
        rank = links.place("e") * links.size("t") + links.place("t")
        return OwnExperts(base, links, layout)(x, ids, w, *part(layout, rank, whole))

    results = on_threads(layout.world, work, tensor=layout.expert_tensor)
    assert all(torch.equal(results[0], other) for other in results[1:])
    return results[0]


@pytest.mark.parametrize("text", ["d2e2", "d4e4", "t2x2", "d2t2e2x2"])
@pytest.mark.parametrize("scheme", ["none", "shared_outer", "per_expert"])
@given(rows=st.integers(1, 9), seed=st.integers(0, 99), skewed=st.booleans())
def test_experts_over_ranks_are_the_mixture(
    text: str, scheme: str, rows: int, seed: int, skewed: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = weights(seed, torch.float64, scheme)
    x = torch.randn(rows, D, generator=generator, dtype=torch.float64)
    order = torch.rand(rows, E, generator=generator).argsort(-1)
    ids = torch.arange(K).expand(rows, K).contiguous() if skewed else order[:, :K]
    w = torch.rand(rows, K, generator=generator)
    found = on_ranks_of(Layout.parse(text), None, whole, x, ids, w)
    torch.testing.assert_close(found, experts(x, ids, w, *whole), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("text", ["d4e4", "d2t2e2x2"])
def test_a_row_is_the_same_in_any_batch(text: str, kernels: Kernels | None) -> None:
    """Bit for bit with native kernels, which compute row by row; to rounding with torch's."""
    generator = torch.Generator().manual_seed(0)
    whole = weights(1, torch.float32, "shared_outer")
    x = torch.randn(33, D, generator=generator)
    ids = torch.rand(33, E, generator=generator).argsort(-1)[:, :K]
    w = torch.rand(33, K, generator=generator)
    together = on_ranks_of(Layout.parse(text), kernels, whole, x, ids, w)
    for row in (0, 7, 32):
        one = slice(row, row + 1)
        alone = on_ranks_of(Layout.parse(text), kernels, whole, x[one], ids[one], w[one])
        if kernels is not None:
            assert torch.equal(alone, together[one])
        else:
            torch.testing.assert_close(alone, together[one])


@given(ranks=st.sampled_from([2, 3, 4]), rows=st.integers(1, 40), seed=st.integers(0, 99))
def test_sums_do_not_depend_on_the_place_in_the_buffer(ranks: int, rows: int, seed: int) -> None:
    """The twin: part by part, in the order of ranks."""
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(ranks, rows, 5, generator=generator) * 10.0 ** torch.arange(ranks).view(-1, 1, 1)

    def work(links: Any) -> torch.Tensor:
        return added_up(links, parts[links.place("t")], "t")

    def narrow(links: Any) -> torch.Tensor:
        return added_up(links, parts[links.place("t")].bfloat16(), "t")

    expected = parts[0]
    for other in parts[1:]:
        expected = expected + other
    for found in on_threads(ranks, work, tensor=ranks):
        assert torch.equal(found, expected)
    half = on_threads(ranks, narrow, tensor=ranks)
    rounded = parts.bfloat16().float()
    expected = rounded[0]
    for other in rounded[1:]:
        expected = expected + other
    assert torch.equal(half[0], expected.bfloat16())  # rounded once


def test_a_vocabulary_in_parts_is_looked_up_exactly() -> None:
    table, tokens = torch.randn(12, 4), torch.tensor([0, 11, 5, 6, 3, 3])

    def work(links: Any) -> torch.Tensor:
        place = links.place("t")
        return VocabularyPart(links)(tokens, table[place * 4 : place * 4 + 4])

    for found in on_threads(3, work, tensor=3):
        assert torch.equal(found, F.embedding(tokens, table))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("p2", r"engine\.layout is 'p2' with p2"),
        ("c2", r"engine\.layout is 'c2' with c2"),
        ("d2f2e2", r"with f2"),
        ("d2", r"2 ranks would do the same work"),
        ("d2t2e2", r"2 ranks would do the same work"),
        ("t3", r"cuts num_attention_heads \(8\) by t times c = 3"),
    ],
)
def test_what_a_sampler_cannot_have_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_layout(Layout.parse(text), config_of("qwen3_moe"))


@pytest.mark.parametrize(
    "text", ["1", "t2", "t4", "d2e2", "t2e2", "t4e2", "t2x2", "d2t2e4", "d2t2e2x2", "d8e8"]
)
def test_what_it_can_have(text: str) -> None:
    check_layout(Layout.parse(text), config_of("qwen3_moe"))


def test_one_rank_computes_as_ever() -> None:
    """No sums, no parts: the identity."""
    ops = on_threads(1, lambda links: replicated_ops(TORCH_OPS, links, Layout()))[0]
    assert ops == TORCH_OPS
