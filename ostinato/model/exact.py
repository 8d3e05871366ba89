"""The forward of training on the kernels that sample: bit for bit the sampler's numbers, with gradients.

What a sampler's kernel makes of a row depends on that row alone (docs/kernels.md, docs/gpu.md), so a packed
microbatch gives every row what the sampler gave it, in whatever batch that was. Each operation is a pair: the
forward is the sampler's, the backward that of the training kernels, at the same inputs. Attention reads the
rows in blocks like those of the sampler's cache (``Blocks``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ostinato.model.attention import Attend
from ostinato.model.config import MoEConfig
from ostinato.model.moe import ExpertLora
from ostinato.model.ops import Ops
from ostinato.model.weights import Weight
from ostinato.types import Segment

BLOCK = 16  # positions, as in the sampler's cache
Function = Callable[..., Any]


def exact_ops(
    fast: Ops, slow: Ops, add_nt: Function, attention: Callable[[tuple[Segment, ...]], Attend]
) -> Ops:
    """``slow``, which has gradients, with the forward of ``fast``; a function that is in both has both.
    ``add_nt``: ``Gemm.add`` of the sampler; ``attention``: ``Ops.attention`` by the sampler's kernel."""

    def linear(
        x: Tensor, weight: Weight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if not torch.is_grad_enabled() or not isinstance(weight, Tensor):
            return fast.linear(x, weight, bias, out_dtype)
        return _Linear.apply(x, weight, bias, out_dtype, fast.linear, slow.gemm.nn)  # type: ignore[return-value]

    def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        def run(of: Function, y: Tensor, *factors: Tensor) -> Tensor:
            return of(y, *factors, scale)

        kept = lambda y, *factors: run(fast.add_lora, y.clone(), *factors)  # noqa: E731  # it may overwrite y
        return _paired(kept, partial(run, slow.add_lora), y, x, a, b)

    def route(
        logits: Tensor, moe: MoEConfig, bias: Tensor | None = None, given: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            ids, chosen, native = fast.route(logits, moe, bias, given)
        weights = _paired(lambda _: chosen, lambda z: slow.route(z, moe, bias, ids.long())[1], logits)
        return ids.long(), weights, native.long()

    def experts(
        x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight, lora: ExpertLora | None = None
    ) -> Tensor:
        def run(ops: Ops, x: Tensor, weights: Tensor, *factors: Tensor) -> Tensor:
            update = ExpertLora(*factors, scale=lora.scale) if lora is not None else None
            return ops.experts(x, ids, weights, gate_up, down, update)

        return _paired(partial(run, fast), partial(run, slow), x, weights, *(lora[:4] if lora else ()))

    return replace(
        slow,
        linear=linear,
        rms_norm=_both(fast.rms_norm, slow.rms_norm, 1),
        add_rms_norm=_both(fast.add_rms_norm, slow.add_rms_norm, 1),
        rope=_both(fast.rope, slow.rope),
        silu_mul=_both(fast.silu_mul, slow.silu_mul),
        add_lora=add_lora,
        route=route,
        experts=experts,
        gemm=replace(slow.gemm, nt=fast.linear, thin=fast.linear, add=add_nt),
        attention=attention,
        score=fast.score,
    )


def _both(fast: Function, slow: Function, constants: int = 0) -> Function:
    """The pair of two functions, whose last arguments are ``constants`` numbers."""
    if fast is slow:
        return fast

    def pair(*args: Any) -> Any:
        tensors, rest = args[: len(args) - constants], args[len(args) - constants :]
        return _paired(lambda *x: fast(*x, *rest), lambda *x: slow(*x, *rest), *tensors)

    return pair


def _paired(fast: Function, slow: Function, *inputs: Tensor) -> Any:
    """fast(*inputs), with the gradient of slow(*inputs), whose forward is run again for it."""
    return _Paired.apply(fast, slow, *inputs) if torch.is_grad_enabled() else fast(*inputs)


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fast: Function, slow: Function, *inputs: Tensor) -> Any:
        ctx.slow = slow
        ctx.save_for_backward(*inputs)
        return fast(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(own) for x, own in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            outputs = ctx.slow(*inputs)
        found = iter(torch.autograd.grad(outputs, [x for x in inputs if x.requires_grad], grads))
        return None, None, *(next(found) if own else None for own in needed)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: Any, nt: Any, nn: Any):
        ctx.save_for_backward(weight)
        ctx.nn, ctx.dtype = nn, x.dtype
        return nt(x, weight, bias, out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        assert not any(ctx.needs_input_grad[1:3]), "the weights are frozen"
        wide = weight if weight.dtype == torch.bfloat16 else weight.to(grad.dtype)
        return ctx.nn(grad, wide).to(ctx.dtype), None, None, None, None, None


class Blocks:
    """The rows of a microbatch in blocks: every segment has a table of those of its prefix that are full, and
    behind them blocks of its own, which begin with what is left of the prefix. So a prompt lies there once
    for its siblings, but for the block in which it ends."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        self._rows: list[np.ndarray] = []  # whose keys and values go into the blocks, -1 for none
        self.count = 0
        prefixes: dict[tuple[int, int], np.ndarray] = {}
        tables = []
        for one in segments:
            prefix = one.prefix_start, one.prefix_stop
            length = prefix[1] - prefix[0]
            full = length - length % BLOCK
            if prefix not in prefixes:
                prefixes[prefix] = self._blocks(np.arange(prefix[0], prefix[0] + full))
            left = np.arange(prefix[0] + full, prefix[1])
            own = self._blocks(np.concatenate([left, np.arange(one.start, one.stop)]))
            tables.append(np.concatenate([prefixes[prefix], own]))
        rows = np.concatenate(self._rows)
        slots = np.flatnonzero(rows >= 0)
        self.slots, self.writers = torch.from_numpy(slots), torch.from_numpy(rows[slots])
        table = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for to, blocks in zip(table, tables, strict=True):
            to[: len(blocks)] = blocks
        self.tables = torch.from_numpy(table)
        sizes = [one.stop - one.start for one in segments]
        self.sequence = torch.from_numpy(np.repeat(np.arange(len(segments), dtype=np.int32), sizes))
        seen = [np.arange(one.stop - one.start) + one.prefix_stop - one.prefix_start + 1 for one in segments]
        self.lengths = torch.from_numpy(np.concatenate(seen).astype(np.int32))

    def _blocks(self, rows: np.ndarray) -> np.ndarray:
        """New blocks for ``rows``, by number."""
        count = -(-len(rows) // BLOCK)
        self._rows.append(np.concatenate([rows, np.full(count * BLOCK - len(rows), -1)]))
        self.count += count
        return np.arange(self.count - count, self.count)
