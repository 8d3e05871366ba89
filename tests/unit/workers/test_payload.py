"""What goes to a worker or a rank arrives as it was, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.workers.remote import seal, unseal

KINDS = [torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.float64]


@st.composite
def values(draw: Any) -> list[Any]:
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=4))
    made: list[Any] = []
    for shape in shapes:
        numbers = np.random.default_rng(len(made)).standard_normal(shape).astype(np.float32)
        kind = draw(st.sampled_from([None, *KINDS]))
        made.append(numbers if kind is None else torch.from_numpy(numbers).to(kind))
    return [*made, {"words": draw(st.text()), "none": None}]


@given(values())
def test_values_come_back_as_they_were(value: list[Any]) -> None:
    """A tensor without an element could not be sent where its stride was not 1."""
    check(value, unseal(seal(value)))


def check(value: list[Any], found: list[Any]) -> None:
    for mine, theirs in zip(value, found, strict=True):
        if isinstance(mine, torch.Tensor):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(mine, theirs)
        elif isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
        else:
            assert mine == theirs


@pytest.mark.parametrize("dim", [0, 1])
def test_a_view_travels_without_the_rest_of_its_storage(dim: int) -> None:
    part = torch.arange(1 << 16).reshape(1 << 8, 1 << 8).select(dim, 1)
    payload = seal(part)
    assert torch.equal(unseal(payload), part) and len(payload) < 2 * part.nbytes + 1000
