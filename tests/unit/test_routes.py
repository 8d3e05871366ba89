"""Routes as bytes: every number of experts round, none wider than it needs to be."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.routes import (
    id_bits,
    pack_ids,
    route_bytes,
    route_dtype,
    routes_from_json,
    routes_to_json,
    unpack_ids,
)
from ostinato.types import NO_EXPERT

EXPERTS = st.sampled_from([2, 3, 8, 32, 127, 128, 129, 255, 256, 257, 384, 512, 1023, 1024])


def some(rows: int, experts: int, seed: int, gaps: float = 0.0) -> np.ndarray:
    """[rows, 3, K] different ids, of which the highest is one, in the type that memory has for them."""
    rng = np.random.default_rng(seed)
    ids = rng.random((rows, 3, experts)).argsort(-1)[..., : min(experts, 5)].astype(route_dtype(experts))
    ids[:1] = experts - 1 - np.arange(ids.shape[-1])
    ids[rng.random(rows) < gaps] = NO_EXPERT
    return ids


@pytest.mark.parametrize(("experts", "dtype"), [(1, "i1"), (128, "i1"), (129, "i2"), (256, "i2")])
def test_the_narrowest_type_holds_every_id_and_its_absence(experts: int, dtype: str) -> None:
    chosen = route_dtype(experts)
    assert chosen == np.dtype(dtype)
    assert np.array([experts - 1, NO_EXPERT], chosen).tolist() == [experts - 1, NO_EXPERT]
    with pytest.raises(ValueError, match="num_experts is 40000"):
        route_dtype(40000)


@settings(max_examples=50, deadline=None)
@given(experts=EXPERTS, rows=st.integers(0, 20), seed=st.integers(0, 99), gaps=st.sampled_from([0, 0.4, 1]))
def test_there_and_back(experts: int, rows: int, seed: int, gaps: float) -> None:
    before = some(rows, experts, seed, gaps)
    row = json.loads(json.dumps(routes_to_json(before)))
    after = routes_from_json(row)
    assert after.dtype == before.dtype and row["bits"] <= id_bits(experts)
    np.testing.assert_array_equal(after, before)


@settings(max_examples=50, deadline=None)
@given(bits=st.integers(1, 15), count=st.integers(0, 40), seed=st.integers(0, 99))
def test_bits_lie_as_the_obvious_packing_lays_them(bits: int, count: int, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(0, 1 << bits, count).astype(np.int16)

    def obvious(ids: np.ndarray, bits: int) -> bytes:
        flat = [int(i) >> b & 1 for i in [*ids, *[0] * (-count % 8)] for b in range(bits)]
        return np.packbits(np.array(flat, np.uint8), bitorder="little").tobytes()

    low = ids.astype(np.uint8).tobytes() if bits > 8 else b""
    data = pack_ids(ids, bits)
    assert data == low + (obvious(ids >> 8, bits - 8) if bits > 8 else obvious(ids, bits))
    np.testing.assert_array_equal(unpack_ids(data, count, bits), ids)


@pytest.mark.parametrize("experts", [2, 8, 32, 128, 256, 384, 1024])
def test_sizes_are_what_they_are_said_to_be(experts: int) -> None:
    routes = some(800, experts, 0)
    memory, packed = route_bytes(3, routes.shape[-1], experts)
    assert routes.nbytes == 800 * memory
    assert len(routes_to_json(routes)["routes"]) * 3 / 4 == pytest.approx(800 * packed, abs=3)


def test_sizes_of_published_models() -> None:
    """Qwen3-30B-A3B; DeepSeek-V3, whose 256 experts leave no NO_EXPERT in a byte; Mixtral 8x7B."""
    assert route_bytes(48, 8, 128) == (384, 336.125)
    assert route_bytes(58, 8, 256) == (928, 464.125)
    assert route_bytes(32, 2, 8) == (64, 24.125)


def test_a_row_that_is_known_in_part_is_refused() -> None:
    routes = some(3, 8, 0)
    routes[1, 2] = NO_EXPERT
    with pytest.raises(ValueError, match="in all layers or in none"):
        routes_to_json(routes)
