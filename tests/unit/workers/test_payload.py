"""What rank 0 sends the others arrives as it was: arrays and tensors beside a pickle, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ostinato.workers.remote import ALIGNED, opened, packed, sealed, unpacked

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
    """Both ways. A tensor without an element could not be sent where its stride was not 1."""
    payload, sizes = packed(value)
    assert payload.dtype == np.uint8
    for found in (unpacked(payload, sizes), opened(sealed(value))):
        check(value, found)


def check(value: list[Any], found: list[Any]) -> None:
    for mine, theirs in zip(value, found, strict=True):
        if isinstance(mine, torch.Tensor):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            assert torch.equal(mine, theirs)
        elif isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs)
            assert theirs.flags.writeable
        else:
            assert mine == theirs


def test_arrays_do_not_travel_inside_the_pickle() -> None:
    numbers = np.arange(1 << 16, dtype=np.int64)
    payload, sizes = packed(({"frozen": frozen(numbers)}, torch.from_numpy(numbers)))
    assert sizes[1:] == [numbers.nbytes] * 2
    assert sizes[0] < 1000
    assert len(payload) < 2 * numbers.nbytes + sizes[0] + 3 * ALIGNED
    found, tensor = unpacked(payload, sizes)
    assert np.array_equal(found["frozen"], numbers)
    tensor += 1  # of the receiver alone
    assert numbers[0] == 0


def frozen(numbers: np.ndarray) -> np.ndarray:
    copy = numbers.copy()
    copy.flags.writeable = False
    return copy


@pytest.mark.parametrize("dim", [0, 1])
def test_views_and_gradients_are_left_behind(dim: int) -> None:
    whole = torch.arange(12.0).reshape(3, 4).requires_grad_()
    part = whole.select(dim, 1)
    payload, sizes = packed(part)
    found = unpacked(payload, sizes)
    assert torch.equal(found, part.detach()) and not found.requires_grad
