"""Check, before a training run on a GPU, that each kernel gives the numbers and gradients of its twin."""

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


def find_fault(kernel: Callable[[], Tensor], twin: Callable[[], Tensor], dtype: torch.dtype) -> str:
    """Return how the result of ``kernel`` differs from that of ``twin``, or the exception that ``kernel``
    raises; "" if they agree up to a few roundings. Raises what ``twin`` raises, and OutOfMemoryError."""
    expected = twin().float()
    try:
        actual = kernel().float()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a compiler, a driver or a launch: torch works without any of them
        return f"fails ({type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]})"
    difference = float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    bound = 1e-4 if dtype == torch.float32 else 3e-2
    return "" if difference <= bound else f"differs from torch by {difference:.1e} of the largest value"


def prove_ops(decoder: Decoder, ops: Ops) -> tuple[Ops, list[str]]:
    """Replace each function of ``ops`` that is wrong or fails on the decoder's device by torch's. Return the
    result, and a sentence for each replacement."""
    faults = []
    for name, call in _list_cases(decoder):
        twin = call(TORCH_OPS)
        max_values = [float(x.abs().max()) or 1.0 for x in twin]
        kernel = partial(_run_scaled, ops, call, max_values)
        fault = find_fault(kernel, partial(_scale_results, twin, max_values), decoder.dtype)
        if fault:
            faults.append(f"{name} in Triton {fault}; the trainer takes torch's")
            ops = replace(ops, **{name: getattr(TORCH_OPS, name)})
    return ops, faults


def _run_scaled(ops: Ops, call: Call, max_values: Sequence[float]) -> Tensor:
    return _scale_results(call(ops), max_values)


def _scale_results(results: Sequence[Tensor], max_values: Sequence[float]) -> Tensor:
    """Divide each result by the largest value of its twin, and concatenate all."""
    return torch.cat(
        [(x.float() / max_value).flatten() for x, max_value in zip(results, max_values, strict=True)]
    )


def _list_cases(decoder: Decoder) -> Iterator[tuple[str, Call]]:
    """Yield (field of ``Ops``, call) for each case. A call returns the output and the gradients of all
    inputs."""
    config, eps = decoder.local, decoder.config.rms_norm_eps
    groups, key_dim, value_dim = decoder.kv_shape
    weight = decoder.blocks[0].attn_norm.detach()
    x, y = (
        draw_values(decoder, ROWS, config.hidden_size),
        draw_values(decoder, ROWS, config.hidden_size, seed=1),
    )
    q = draw_values(decoder, ROWS, config.num_heads, key_dim, seed=2)
    k, v = (
        draw_values(decoder, ROWS, groups, key_dim, seed=3),
        draw_values(decoder, ROWS, groups, value_dim, seed=4),
    )
    rotary_q = draw_values(decoder, ROWS, config.num_heads, 2 * len(decoder.inv_freq), seed=2)
    rotations = decoder.compute_rotations(torch.arange(ROWS, device=decoder.device))
    gate_up = draw_values(decoder, ROWS, 2 * config.intermediate_size, seed=5)
    yield "rms_norm", lambda ops: _compute_slopes(lambda hidden: ops.rms_norm(hidden, weight, eps), x)
    yield (
        "add_rms_norm",
        lambda ops: _compute_slopes(
            lambda hidden, residual: torch.cat(ops.add_rms_norm(hidden, residual, weight, eps)), x, y
        ),
    )
    yield "rope", lambda ops: _compute_slopes(lambda hidden: ops.rope(hidden, *rotations), rotary_q)
    yield "silu_mul", lambda ops: _compute_slopes(ops.silu_mul, gate_up)
    yield (
        "attention",
        lambda ops: _compute_slopes(
            lambda q, k, v: ops.attention(SEGMENTS)(0, q, k, v, key_dim**-0.5), q, k, v
        ),
    )
    targets = torch.arange(ROWS, device=decoder.device) % decoder.config.vocab_size
    logits = 3 * draw_values(decoder, ROWS, decoder.config.vocab_size, seed=6).float()
    yield "head", lambda ops: _score(ops, logits.clone(), targets)


def _compute_slopes(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the output of a function and the gradients of its inputs, for a fixed gradient of the output."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        out = function(*leaves)
    ramp = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype).expand_as(out)
    return out.detach(), *torch.autograd.grad(out, leaves, ramp)


def _score(ops: Ops, logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Compute log-probability and entropy [n, 2], and their slopes in the logits, which a kernel of ``ops``
    writes over the logits."""
    if ops.head is not None:
        return ops.head(logits, targets), logits
    log_p = logits.log_softmax(-1)
    target_log_p = log_p.gather(1, targets[:, None])
    slopes = (-log_p.exp()).scatter_(1, targets[:, None], -torch.expm1(target_log_p))
    return torch.cat((target_log_p, -(log_p.exp() * log_p).sum(-1, keepdim=True)), dim=1), slopes


def draw_values(decoder: Decoder, *shape: int, seed: int = 0) -> Tensor:
    """Draw normal values from ``seed``, on the device and in the dtype of the decoder."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(decoder.device, decoder.dtype)
