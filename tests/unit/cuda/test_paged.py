"""Paged attention in Triton is attention of one row at a time, and a row depends on no other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.model import elementwise as twin
from ostinato.model.cuda import paged
from ostinato.model.cuda.paged import PAGE, Tiles, count_tile_rows, paged_attention, write_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class World:
    """Sequences in pages of any order, with NaN wherever no sequence has written."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    history: list[tuple[Tensor, Tensor]]  # of each sequence its keys and values [positions, Hkv, D]


def world(lengths: list[int], heads: int, key_dim: int, value_dim: int, seed: int) -> World:
    random, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    pages = [-(-length // PAGE) for length in lengths]
    order = rng.permutation(sum(pages) + 3)
    tables = np.zeros((len(lengths), max(pages)), np.int32)
    keys = torch.full((len(order), PAGE, heads, key_dim), torch.nan, device=DEVICE)
    values = torch.full((len(order), PAGE, heads, value_dim), torch.nan, device=DEVICE)
    history = []
    for sequence, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        tables[sequence, :count], order = order[:count], order[count:]
        k = torch.randn(length, heads, key_dim, generator=random)
        v = torch.randn(length, heads, value_dim, generator=random)
        at = torch.arange(length)
        slots = torch.from_numpy(tables[sequence].astype(np.int64))[at // PAGE] * PAGE + at % PAGE
        write_cache(k.to(DEVICE), v.to(DEVICE), slots.to(DEVICE), keys, values)
        history.append((k, v))
    return World(keys, values, torch.from_numpy(tables).to(DEVICE), history)


def attention_of_row(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [H, Dk] over k [S, Hkv, Dk], v [S, Hkv, Dv] -> [H, Dv] in float64."""
    group = len(q) // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("hd,shd->hs", q.double(), k) * scale
    return torch.einsum("hs,shd->hd", scores.softmax(-1), v)


def run(w: World, q: Tensor, sequence: list[int], lengths: list[int], *, parallel: bool) -> Tensor:
    owner = np.array(sequence, np.int32)
    return paged_attention(
        q,
        w.keys,
        w.values,
        w.tables,
        torch.from_numpy(owner).to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        Tiles.of(owner, q.shape[1] // w.keys.shape[2], q.device),
        0.3,
        parallel=parallel,
    )


@settings(max_examples=10)
@given(
    st.integers(1, 5), st.sampled_from([(4, 2, 8), (3, 1, 10), (2, 2, 64)]), st.booleans(), st.integers(0, 99)
)
def test_a_projection_is_normed_rotated_and_stored_in_one_launch(
    rows: int, shape: tuple[int, int, int], normed: bool, seed: int
) -> None:
    """A row with no slot, which fills up a captured pass, is computed and stored nowhere."""
    heads, kv_heads, size = shape
    random = torch.Generator().manual_seed(seed)
    qkv = torch.randn(rows, heads + 2 * kv_heads, size, generator=random).to(DEVICE)
    angles = torch.randn(rows, size // 2, generator=random).repeat(1, 2).to(DEVICE)
    first, second = torch.randn(2, size, generator=random).to(DEVICE)
    norms = (first, second) if normed else None
    slots = torch.randperm(3 * PAGE, generator=random)[:rows].to(DEVICE)
    slots[0] = -1
    pages = torch.full((2, 3, PAGE, kv_heads, size), torch.nan, device=DEVICE)
    out = paged.store_projection(qkv, norms, 1e-6, angles.cos(), angles.sin(), slots, *pages)
    q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    if norms is not None:
        q, k = twin.rms_norm(q, norms[0], 1e-6), twin.rms_norm(k, norms[1], 1e-6)
    q, k = (twin.rope(x, angles.cos(), angles.sin()) for x in (q, k))
    torch.testing.assert_close(out, q, rtol=1e-5, atol=1e-5)
    stored = pages.flatten(1, 2)
    torch.testing.assert_close(stored[0, slots[1:]], k[1:], rtol=1e-5, atol=1e-5)
    assert torch.equal(stored[1, slots[1:]], qkv[1:, heads + kv_heads :])
    assert int(stored.isnan().all(-1).all(-1).sum()) == 2 * (3 * PAGE - rows + 1)


SHAPES = [(4, 2, 8, 8), (6, 2, 16, 16), (2, 2, 24, 8), (8, 1, 8, 8)]  # H, Hkv, Dk, Dv


@settings(max_examples=4)
@given(st.data(), st.sampled_from(SHAPES), st.integers(0, 99))
def test_rows_of_any_sequences(data: st.DataObject, shape: tuple[int, ...], seed: int) -> None:
    """Decode rows, the last positions of a prompt, and a whole prompt, in one pass."""
    heads, kv_heads, key_dim, value_dim = shape
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    w = world(lengths, kv_heads, key_dim, value_dim, seed)
    counts = [data.draw(st.integers(1, length)) for length in lengths]
    sequence = [s for s, count in enumerate(counts) for _ in range(count)]
    seen = [
        length - count + i + 1 for length, count in zip(lengths, counts, strict=True) for i in range(count)
    ]
    wide = torch.randn(len(seen), heads + 1, key_dim, generator=torch.Generator().manual_seed(seed))
    q = wide.to(DEVICE)[:, 1:]  # inside of wider rows, as a product of q, k and v leaves it
    out = run(w, q, sequence, seen, parallel=bool(seed % 2))
    for row, (s, length) in enumerate(zip(sequence, seen, strict=True)):
        k, v = w.history[s]
        want = attention_of_row(q[row].cpu(), k[:length], v[:length], 0.3)
        assert (out[row].cpu() - want).abs().max() <= 1e-5 * want.abs().max().clamp_min(1)


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits of 16 positions instead of 512: several of them at lengths that the interpreter can do."""
    monkeypatch.setattr(paged, "SPLIT", 16)
    monkeypatch.setattr(paged, "TILE_N", 16)


@pytest.mark.slow
@pytest.mark.usefixtures("short_splits")
def test_a_row_is_the_same_alone_in_any_pass_and_by_either_way() -> None:
    """Of a prompt of 40 positions each row alone with a program for each split is, to the bit, that row in a
    pass of all, in which one program walks the splits: a preempted sequence is computed again as a prompt."""
    length, (heads, kv_heads, key_dim, value_dim) = 40, (6, 2, 8, 8)
    w = world([length, 7], kv_heads, key_dim, value_dim, 0)
    q = torch.randn(length + 1, heads, key_dim, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    lengths = [*range(1, length + 1), 7]
    whole = run(w, q, [0] * length + [1], lengths, parallel=False)
    assert torch.equal(run(w, q, [0] * length + [1], lengths, parallel=True), whole)
    for row in (0, 15, 16, 39):
        for parallel in (True, False):
            alone = run(w, q[row : row + 1], [0], [row + 1], parallel=parallel)
            # the matrix product of the interpreter is BLAS, where a row's place in a tile matters
            assert (alone[0] - whole[row]).abs().max() <= (0 if DEVICE == "cuda" else 1e-6), (row, parallel)
    want = attention_of_row(q[39].cpu(), *w.history[0], 0.3)
    assert (whole[39].cpu() - want).abs().max() < 1e-5


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([1, 3, 4, 8, 16, 20]))
def test_tiles_cover_every_row_once_and_mix_no_sequences(counts: list[int], group: int) -> None:
    sequence = np.repeat(np.arange(len(counts))[::-1], counts).astype(np.int32)
    tiles = Tiles.of(sequence, group, torch.device("cpu"))
    rows = []
    for first, count in zip(tiles.first.tolist(), tiles.count.tolist(), strict=True):
        assert 1 <= count <= count_tile_rows(group)
        assert len({*sequence[first : first + count].tolist()}) == 1
        rows += range(first, first + count)
    assert rows == list(range(len(sequence)))
