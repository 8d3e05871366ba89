"""A proof, before a training run on a card, that each kernel gives the numbers and gradients of its twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ostinato.model.decoder import Decoder
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.types import Segment

ROWS = 140  # more than a tile of attention
SEGMENTS = tuple(
    Segment(start=start, stop=stop, prefix_stop=40 if start else 0)
    for start, stop in ((0, 40), (40, 41), (41, 120), (120, ROWS))
)
Call = Callable[[Ops], tuple[Tensor, ...]]


def find_fault(ours: Callable[[], Tensor], twin: Callable[[], Tensor], dtype: torch.dtype) -> str:
    """Why the one is not the other; "" where it is, up to a few roundings."""
    expected = twin().float()
    try:
        found = ours().float()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler, a driver or a launch: whatever it is, torch can do without
        return f"fails ({type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]})"
    apart = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    bound = 1e-4 if dtype == torch.float32 else 3e-2
    return "" if apart <= bound else f"differs from torch by {apart:.1e} of the largest value"


def prove_ops(decoder: Decoder, ops: Ops) -> tuple[Ops, list[str]]:
    """``ops`` with torch's function in the place of each that fails on the decoder's device, and a sentence
    for each."""
    said = []
    for name, call in _cases(decoder):
        twin = call(TORCH_OPS)
        largest = [float(x.abs().max()) or 1.0 for x in twin]
        ours = partial(_at_scale, ops, call, largest)
        why = find_fault(ours, partial(_scaled, twin, largest), decoder.dtype)
        if why:
            said.append(f"{name} in Triton {why}; the trainer takes torch's")
            ops = replace(ops, **{name: getattr(TORCH_OPS, name)})
    return ops, said


def _at_scale(ops: Ops, call: Call, largest: Sequence[float]) -> Tensor:
    return _scaled(call(ops), largest)


def _scaled(results: Sequence[Tensor], largest: Sequence[float]) -> Tensor:
    """All results as one, each as a share of its twin's largest value."""
    return torch.cat([(x.float() / size).flatten() for x, size in zip(results, largest, strict=True)])


def _cases(decoder: Decoder) -> Iterator[tuple[str, Call]]:
    """By field of ``Ops``: a call, whose results are the output and the gradients of all inputs."""
    c, eps = decoder.local, decoder.config.rms_norm_eps
    groups, key_dim, value_dim = decoder.kv_shape
    weight = decoder.blocks[0].attn_norm.detach()
    x, y = draw_values(decoder, ROWS, c.hidden_size), draw_values(decoder, ROWS, c.hidden_size, seed=1)
    q = draw_values(decoder, ROWS, c.num_heads, key_dim, seed=2)
    k, v = (
        draw_values(decoder, ROWS, groups, key_dim, seed=3),
        draw_values(decoder, ROWS, groups, value_dim, seed=4),
    )
    turned = draw_values(decoder, ROWS, c.num_heads, 2 * len(decoder.inv_freq), seed=2)
    turns = decoder.rotations(torch.arange(ROWS, device=decoder.device))
    wide = draw_values(decoder, ROWS, 2 * c.intermediate_size, seed=5)
    yield "rms_norm", lambda ops: _slopes(lambda one: ops.rms_norm(one, weight, eps), x)
    yield (
        "add_rms_norm",
        lambda ops: _slopes(lambda one, other: torch.cat(ops.add_rms_norm(one, other, weight, eps)), x, y),
    )
    yield "rope", lambda ops: _slopes(lambda one: ops.rope(one, *turns), turned)
    yield "silu_mul", lambda ops: _slopes(ops.silu_mul, wide)
    yield (
        "attention",
        lambda ops: _slopes(lambda q, k, v: ops.attention(SEGMENTS)(0, q, k, v, key_dim**-0.5), q, k, v),
    )
    targets = torch.arange(ROWS, device=decoder.device) % decoder.config.vocab_size
    logits = 3 * draw_values(decoder, ROWS, decoder.config.vocab_size, seed=6).float()
    yield "head", lambda ops: _scored(ops, logits.clone(), targets)


def _slopes(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = function(*leaves)
    ramp = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype).expand_as(out)
    return out.detach(), *torch.autograd.grad(out, leaves, ramp)


def _scored(ops: Ops, logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Log-probability and entropy, and slopes."""
    if ops.head is not None:
        return ops.head(logits, targets), logits
    log_p = logits.log_softmax(-1)
    own = log_p.gather(1, targets[:, None])
    slopes = (-log_p.exp()).scatter_(1, targets[:, None], -torch.expm1(own))
    return torch.cat((own, -(log_p.exp() * log_p).sum(-1, keepdim=True)), dim=1), slopes


def draw_values(decoder: Decoder, *shape: int, seed: int = 0) -> Tensor:
    """Normal ones, on the device and in the dtype of the decoder."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(decoder.device, decoder.dtype)
