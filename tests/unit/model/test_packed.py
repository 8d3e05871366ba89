"""Packed attention equals attention under a dense mask, forward and backward, whatever the segments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding import rounding
from torch import Tensor

from ostinato.model.packed import FLASH_CPU, FLASH_CUDA, MATH, PackedAttention
from ostinato.types import Segment


def dense_mask(segments: tuple[Segment, ...]) -> Tensor:
    """[T, T] bool: may row t see row s?"""
    total = segments[-1].stop
    mask = torch.zeros(total, total, dtype=torch.bool)
    for segment in segments:
        rows = slice(segment.start, segment.stop)
        mask[rows, rows] = torch.ones(total, total, dtype=torch.bool)[rows, rows].tril()
        mask[rows, segment.prefix_start : segment.prefix_stop] = True
    return mask


def dense_attention(mask: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The obvious twin: one softmax over all rows."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    probs = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", probs, v)


@st.composite
def segment_lists(draw: st.DrawFn) -> tuple[Segment, ...]:
    """Prompts followed by siblings, and lone sequences; some siblings branch off a part of the prompt."""
    segments, row = [], 0
    for siblings in draw(st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=4)):
        prompt = draw(st.integers(1, 6))
        segments.append(Segment(start=row, stop=row + prompt))
        prefix_start, prefix_stop = row, row + draw(st.sampled_from([prompt, prompt, (prompt + 1) // 2]))
        row += prompt
        for length in siblings:
            segments.append(
                Segment(start=row, stop=row + length, prefix_start=prefix_start, prefix_stop=prefix_stop)
            )
            row += length
    return tuple(segments)


def random_inputs(
    rows: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(rows)
    shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]), (heads[0], dims[1]))
    return [torch.randn(rows, *s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def run(attend, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> list[Tensor]:
    """Output and the gradients of q, k, v."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


@settings(max_examples=40, deadline=None)
@given(
    segments=segment_lists(),
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    dims=st.sampled_from([(8, 8), (24, 16), (8, 16)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    window=st.sampled_from([None, 1, 3, 8]),
)
def test_packed_equals_dense_mask(segments, heads, dims, dtype, window) -> None:
    inputs = random_inputs(segments[-1].stop, heads, dims, dtype)
    packed, mask = PackedAttention(segments), dense_mask(segments)
    if window is not None:
        lengths = [(s, s.prefix_stop - s.prefix_start, s.stop - s.start) for s in segments]
        places = torch.cat([torch.arange(before, before + own) for _, before, own in lengths])
        mask = mask & (places[:, None] - places[None, :] < window)
    got = run(lambda q, k, v: packed(0, q, k, v, 0.4, window), *inputs)
    want = run(lambda q, k, v: dense_attention(mask, q, k, v, 0.4), *inputs)
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


TREE = (
    Segment(start=0, stop=20),
    *(Segment(start=s, stop=s + 16, prefix_start=0, prefix_stop=20) for s in range(20, 100, 16)),
    Segment(start=100, stop=111),
    Segment(start=111, stop=140, prefix_start=100, prefix_stop=111),
)


def test_bf16_is_as_close_as_its_rounding() -> None:
    """Against the twin in float64 on the same inputs: an error of the size of one bf16 rounding, 2^-8."""
    inputs = random_inputs(TREE[-1].stop, (9, 3), (64, 64), torch.bfloat16)
    packed, mask = PackedAttention(TREE), dense_mask(TREE)
    got = run(lambda q, k, v: packed(0, q, k, v, 0.125), *inputs)
    want = run(lambda q, k, v: dense_attention(mask, q, k, v, 0.125), *(x.double() for x in inputs))
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.double(), other, atol=2**-8 * other.abs().max().item(), rtol=2**-7)


@pytest.mark.parametrize("causal", [True, False])
def test_flash_equals_its_math_twin_for_a_larger_key_set(causal: bool) -> None:
    """The lse handed to backward may count keys of another part: both kernels then give the same share."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, h, 7, 16, generator=generator) for h in (4, 2, 2, 4))
    results = []
    for kernel in (MATH, FLASH_CPU):
        out, lse, state = kernel.forward(q, k, v, 0.25, causal)
        results.append([out, lse, *kernel.backward(grad, q, k, v, out * 0.5, lse + 0.7, state, 0.25, causal)])
    for one, other in zip(*results, strict=True):
        # scores over 16, softmax and values over 7 keys, and back over 7 queries of 2 heads
        bound = rounding(torch.float32, 16 + 7 + 7 + 2 * 7, other)
        torch.testing.assert_close(one, other, atol=bound, rtol=0)


def test_equal_siblings_share_their_calls() -> None:
    answers = [Segment(start=s, stop=s + 3, prefix_start=0, prefix_stop=5) for s in range(5, 29, 3)]
    parts = PackedAttention((Segment(start=0, stop=5), *answers)).parts
    assert [(p.count, p.length, p.key_length, p.is_causal) for p in parts] == [
        (1, 5, 5, True),
        (8, 3, 3, True),
        (1, 24, 5, False),
    ]


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ((), "do not start at row 0"),
        ((Segment(start=0, stop=2), Segment(start=3, stop=4)), "does not start where"),
        ((Segment(start=0, stop=0),), "is empty"),
        ((Segment(start=0, stop=2, prefix_start=1, prefix_stop=2),), "is not before it"),
    ],
)
def test_impossible_segments_are_refused(segments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedAttention(segments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)])
def test_cuda_flash_equals_the_cpu(dims: tuple[int, int]) -> None:
    inputs = random_inputs(TREE[-1].stop, (8, 2), dims, torch.bfloat16)
    packed = PackedAttention(TREE)
    want = run(lambda q, k, v: packed(0, q, k, v, 0.125), *inputs)
    got = run(lambda q, k, v: packed(0, q, k, v, 0.125), *(x.cuda() for x in inputs))
    assert FLASH_CUDA is not MATH
    for one, other in zip(got, want, strict=True):
        bound = 2**-7 * other.abs().max().item()
        torch.testing.assert_close(one.cpu(), other, atol=bound, rtol=2**-6)
