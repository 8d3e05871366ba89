"""Norms, rotation and gate in Triton are their torch twins, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostinato.model import elementwise as twin
from ostinato.model.cuda import elementwise as cuda

Function = Callable[..., Any]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def check(ours: Function, theirs: Function, *inputs: Tensor, eps: tuple[float, ...] = ()) -> None:
    """Values to 1e-5, without and with gradients, gradients to 1e-4, relative to the largest."""
    with torch.no_grad():
        plain = _tuple(ours(*inputs, *eps))
    results = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = _tuple(function(*leaves, *eps))
        loss = torch.stack([(x * draw(i, *x.shape)).sum() for i, x in enumerate(out)]).sum()
        results.append((out, torch.autograd.grad(loss, leaves)))
    (values, grads), (expected, expected_grads) = results
    for value, same, want in zip(values, plain, expected, strict=True):
        assert torch.equal(value, same), "the result depends on autograd"
        assert (value - want).abs().max() <= 1e-5 * want.abs().max()
    for grad, want in zip(grads, expected_grads, strict=True):
        assert (grad - want).abs().max() <= 1e-4 * want.abs().max().clamp_min(1e-6)


def _tuple(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


@settings(max_examples=10)
@given(st.integers(1, 9), st.sampled_from([1, 2, 5, 16, 48, 65, 128]), st.integers(0, 99))
def test_rms_norm(rows: int, width: int, seed: int) -> None:
    x, weight = draw(seed, rows, width), draw(seed + 1, width)
    check(cuda.rms_norm, twin.rms_norm, x, weight, eps=(1e-6,))


@settings(max_examples=10)
@given(st.integers(1, 5), st.integers(1, 3), st.sampled_from([2, 6, 64]), st.integers(0, 99))
def test_the_norm_of_heads_inside_of_wider_rows(rows: int, heads: int, width: int, seed: int) -> None:
    inside = draw(seed, rows, heads + 2, width)[:, 1 : 1 + heads]
    weight = draw(seed + 1, width)
    with torch.no_grad():
        assert torch.allclose(
            cuda.rms_norm(inside, weight, 1e-6), twin.rms_norm(inside, weight, 1e-6), atol=1e-5, rtol=1e-5
        )


@settings(max_examples=10)
@given(st.integers(1, 9), st.sampled_from([1, 3, 64, 96]), st.integers(0, 99))
def test_add_rms_norm(rows: int, width: int, seed: int) -> None:
    x, residual, weight = (draw(seed + i, *shape) for i, shape in enumerate([(rows, width)] * 2 + [(width,)]))
    check(cuda.add_rms_norm, twin.add_rms_norm, x, residual, weight, eps=(1e-5,))


@settings(max_examples=10)
@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([2, 6, 64, 80]), st.integers(0, 99))
def test_rope(rows: int, heads: int, width: int, seed: int) -> None:
    x, angle = draw(seed, rows, heads, width), draw(seed + 1, rows, width // 2).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    check(lambda x: cuda.rope(x, cos, sin), lambda x: twin.rope(x, cos, sin), x)
    wide = draw(seed, rows, heads + 1, width)[:, 1:]
    with torch.no_grad():
        assert torch.allclose(cuda.rope(wide, cos, sin), twin.rope(wide, cos, sin), atol=1e-5)


@settings(max_examples=10)
@given(st.integers(1, 6), st.sampled_from([1, 7, 64, 1025]), st.integers(0, 99))
def test_silu_mul(rows: int, width: int, seed: int) -> None:
    check(cuda.silu_mul, twin.silu_mul, draw(seed, rows, 2 * width))


@pytest.mark.parametrize("shape", [(0, 8), (0, 2, 8)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    x = torch.empty(*shape, device=DEVICE)
    with torch.no_grad():
        assert cuda.rms_norm(x, x.new_ones(8), 1e-6).shape == x.shape
    assert cuda.silu_mul(torch.empty(0, 8, device=DEVICE)).shape == (0, 4)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = draw(0, 40, 96), draw(1, 96)
    with torch.no_grad():
        whole = cuda.rms_norm(x, weight, 1e-6)
        for row in (0, 17, 39):
            assert torch.equal(cuda.rms_norm(x[row : row + 1], weight, 1e-6)[0], whole[row])


def test_float64_takes_the_twin() -> None:
    x = draw(0, 3, 8).double()
    assert torch.equal(cuda.rms_norm(x, x[0], 1e-6), twin.rms_norm(x, x[0], 1e-6))
