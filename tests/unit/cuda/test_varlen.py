"""Attention over packed segments in Triton is that of ``model.packed``, whatever the segments are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.model.cuda import varlen
from ostinato.model.cuda.varlen import Blocks, Shape, Tiles, VarlenAttention
from ostinato.model.packed import PackedAttention
from ostinato.types import Segment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Shape(*[Blocks(16, 16, 4)] * 3)  # several tiles of a few rows


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shape, "of", lambda *_: SMALL)


def packed(families: list[tuple[int, list[int]]]) -> tuple[Segment, ...]:
    """Prompts, 0 rows for none, each with answers of these lengths behind it."""
    found: list[Segment] = []
    at = 0
    for prompt, answers in families:
        first = at
        if prompt:
            found.append(Segment(start=at, stop=at + prompt))
            at += prompt
        for length in answers:
            found.append(Segment(start=at, stop=at + length, prefix_start=first, prefix_stop=first + prompt))
            at += length
    return tuple(found)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def results(attention: type, segments: tuple[Segment, ...], inputs: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of q, k, v."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    q, k, v = leaves
    out = attention(segments)(0, q, k, v, 0.3)
    return [out.detach(), *torch.autograd.grad((out * drawn(9, *out.shape)).sum(), leaves)]


def check(segments: tuple[Segment, ...], heads: int, groups: int, key: int, value: int, seed: int) -> None:
    rows = segments[-1].stop
    shapes = ((rows, heads, key), (rows, groups, key), (rows, groups, value))
    inputs = [drawn(seed + i, *shape) for i, shape in enumerate(shapes)]
    ours, theirs = (results(one, segments, inputs) for one in (VarlenAttention, PackedAttention))
    for bound, found, wanted in zip((1e-5, 1e-4, 1e-4, 1e-4), ours, theirs, strict=True):
        # of a row that sees itself alone the gradient of q is 0
        assert (found - wanted).abs().max() <= bound * wanted.abs().max().clamp_min(1e-2)


families = st.lists(
    st.tuples(st.integers(0, 35), st.lists(st.integers(1, 30), max_size=3)).filter(lambda f: f[0] or f[1]),
    min_size=1,
    max_size=2,
)


@pytest.mark.slow
@settings(max_examples=8)
@given(
    families,
    st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    st.sampled_from([(8, 8), (20, 12)]),
    st.integers(0, 9),
)
def test_it_is_the_twin(
    found: list[tuple[int, list[int]]], heads: tuple[int, int], widths: tuple[int, int], seed: int
) -> None:
    check(packed(found), *heads, *widths, seed)


@pytest.mark.parametrize("found", [[(0, [1])], [(1, [1, 1, 1])], [(16, [16])], [(0, [5, 1]), (17, [])]])
def test_single_tokens_and_whole_tiles(found: list[tuple[int, list[int]]]) -> None:
    check(packed(found), 1, 1, 16, 16, 0)


def test_any_part_may_be_a_prefix() -> None:
    """Not only a whole segment: a key tile has readers with different parts of it."""
    segments = (
        Segment(start=0, stop=18),
        Segment(start=18, stop=23, prefix_start=3, prefix_stop=17),
        Segment(start=23, stop=25, prefix_start=20, prefix_stop=23),
    )
    check(segments, 1, 1, 8, 8, 1)


def test_heads_that_lie_inside_of_wider_rows() -> None:
    """Queries, keys and values are views of one projection, as in the decoder."""
    segments, qkv = packed([(10, [4, 2])]), drawn(3, 16, 6, 8)
    out = [
        attention(segments)(0, qkv[:, :4], qkv[:, 4:5], qkv[:, 5:], 0.3)
        for attention in (VarlenAttention, PackedAttention)
    ]
    assert (out[0] - out[1]).abs().max() <= 1e-5 * out[1].abs().max()


def test_nothing_behind_the_last_row_is_read() -> None:
    segments, rows = packed([(3, [2])]), 5
    inputs = [torch.full((rows + 40, 1, 8), torch.nan, device=DEVICE) for _ in range(3)]
    for index, x in enumerate(inputs):
        x[:rows] = drawn(index, rows, 1, 8)
    found = results(VarlenAttention, segments, [x[:rows] for x in inputs])
    assert all(one.isfinite().all() for one in found)


def test_gradients_are_the_same_bits_every_time() -> None:
    segments = packed([(17, [5, 1])])
    inputs = [drawn(i, 23, 1, 8) for i in range(3)]
    first, second = (results(VarlenAttention, segments, inputs) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_program_has_rows_of_one_prefix_and_the_longest_come_first() -> None:
    tiles = Tiles.of(packed([(20, [4, 40]), (3, [2])]), 16, 16, torch.device("cpu"))
    rows = tiles.queries.tolist()
    assert sorted(row for a, z, *_ in rows for row in range(a, z)) == list(range(69))
    assert rows[0] == [52, 64, 0, 20]
    assert tiles.keys[:, :2].tolist()[0] == [
        16,
        32,
    ]  # half of it a prompt's, half the answer that it ends with


def test_float64_and_wide_heads_take_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_forward_kernel", None)
    segments, x = packed([(2, [1])]), drawn(0, 3, 1, 8).double()
    assert torch.equal(VarlenAttention(segments)(0, x, x, x, 1.0), PackedAttention(segments)(0, x, x, x, 1.0))
    with pytest.raises(ValueError, match="take both from one batch"):
        VarlenAttention(segments)(0, x[:2].float(), x.float(), x.float(), 1.0)
