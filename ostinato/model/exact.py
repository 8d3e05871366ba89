"""The forward of training on the sampler's kernels: the sampler's numbers, bit for bit, with gradients.

The result of a sampler's kernel for a row depends on that row alone (docs/kernels.md, docs/gpu.md), so every
row of a packed microbatch gets the numbers of the sampler, in whatever batch that computed them. Each
operation is a pair: the forward is the sampler's, the backward that of the training kernels, at the same
inputs. Attention reads the rows in blocks like those of the sampler's cache (``Blocks``).
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


def make_exact_ops(
    fast: Ops, slow: Ops, add_nt: Function, attention: Callable[[tuple[Segment, ...]], Attend]
) -> Ops:
    """Make ``slow``, which has gradients, compute its forward by the functions of ``fast``. A function that
    both share stays as it is. ``add_nt``: ``Gemm.add`` of the sampler. ``attention``: ``Ops.attention`` by
    the sampler's kernel."""

    def linear(
        x: Tensor, weight: Weight, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if not torch.is_grad_enabled() or not isinstance(weight, Tensor):
            return fast.linear(x, weight, bias, out_dtype)
        return _Linear.apply(x, weight, bias, out_dtype, fast.linear, slow.gemm.nn)  # type: ignore[return-value]

    def add_lora(y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        def run(function: Function, y: Tensor, *factors: Tensor) -> Tensor:
            return function(y, *factors, scale)

        run_fast = lambda y, *factors: run(fast.add_lora, y.clone(), *factors)  # noqa: E731  # it may overwrite y
        return _apply_pair(run_fast, partial(run, slow.add_lora), y, x, a, b)

    def route(
        logits: Tensor, moe: MoEConfig, bias: Tensor | None = None, routing: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            ids, fast_weights, native = fast.route(logits, moe, bias, routing)
        weights = _apply_pair(
            lambda _: fast_weights, lambda z: slow.route(z, moe, bias, ids.long())[1], logits
        )
        return ids.long(), weights, native.long()

    def experts(
        x: Tensor, ids: Tensor, weights: Tensor, gate_up: Weight, down: Weight, lora: ExpertLora | None = None
    ) -> Tensor:
        def run(ops: Ops, x: Tensor, weights: Tensor, *factors: Tensor) -> Tensor:
            update = ExpertLora(*factors, scale=lora.scale) if lora is not None else None
            return ops.experts(x, ids, weights, gate_up, down, update)

        return _apply_pair(partial(run, fast), partial(run, slow), x, weights, *(lora[:4] if lora else ()))

    return replace(
        slow,
        linear=linear,
        rms_norm=_pair_functions(fast.rms_norm, slow.rms_norm, 1),
        add_rms_norm=_pair_functions(fast.add_rms_norm, slow.add_rms_norm, 1),
        rope=_pair_functions(fast.rope, slow.rope),
        silu_mul=_pair_functions(fast.silu_mul, slow.silu_mul),
        add_lora=add_lora,
        route=route,
        experts=experts,
        gemm=replace(slow.gemm, nt=fast.linear, thin=fast.linear, add=add_nt),
        attention=attention,
        score=fast.score,
    )


def _pair_functions(fast: Function, slow: Function, num_constants: int = 0) -> Function:
    """Pair two functions of tensors, whose last ``num_constants`` arguments are numbers. Return the function
    itself if both are the same."""
    if fast is slow:
        return fast

    def apply_pair(*args: Any) -> Any:
        tensors, numbers = args[: len(args) - num_constants], args[len(args) - num_constants :]
        return _apply_pair(
            lambda *inputs: fast(*inputs, *numbers), lambda *inputs: slow(*inputs, *numbers), *tensors
        )

    return apply_pair


def _apply_pair(fast: Function, slow: Function, *inputs: Tensor) -> Any:
    """Return fast(*inputs). With gradients enabled its gradient is that of slow(*inputs), which is run in the
    backward."""
    return _FunctionPair.apply(fast, slow, *inputs) if torch.is_grad_enabled() else fast(*inputs)


class _FunctionPair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fast: Function, slow: Function, *inputs: Tensor) -> Any:
        ctx.slow = slow
        ctx.save_for_backward(*inputs)
        return fast(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs_gradient = ctx.needs_input_grad[2:]
        inputs = [
            x.detach().requires_grad_(needs)
            for x, needs in zip(ctx.saved_tensors, needs_gradient, strict=True)
        ]
        with torch.enable_grad():
            outputs = ctx.slow(*inputs)
        gradients = iter(torch.autograd.grad(outputs, [x for x in inputs if x.requires_grad], grads))
        return None, None, *(next(gradients) if needs else None for needs in needs_gradient)


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
    """The rows of a microbatch in blocks of a cache. The table of a segment lists the full blocks of its
    prefix, then blocks of its own, of which the first begins with the remaining rows of the prefix. So
    siblings share the blocks of their prompt, except for a last block that is not full."""

    def __init__(self, segments: tuple[Segment, ...]) -> None:
        # for every position of a block the row whose key and value it takes, -1 for none
        self._rows: list[np.ndarray] = []
        self.count = 0
        prefixes: dict[tuple[int, int], np.ndarray] = {}
        tables = []
        for segment in segments:
            prefix = segment.prefix_start, segment.prefix_stop
            length = prefix[1] - prefix[0]
            num_full = length - length % BLOCK
            if prefix not in prefixes:
                prefixes[prefix] = self._add_blocks(np.arange(prefix[0], prefix[0] + num_full))
            tail = np.arange(prefix[0] + num_full, prefix[1])
            own_blocks = self._add_blocks(np.concatenate([tail, np.arange(segment.start, segment.stop)]))
            tables.append(np.concatenate([prefixes[prefix], own_blocks]))
        rows = np.concatenate(self._rows)
        slots = np.flatnonzero(rows >= 0)
        self.slots, self.writers = torch.from_numpy(slots), torch.from_numpy(rows[slots])
        table = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, blocks in zip(table, tables, strict=True):
            row[: len(blocks)] = blocks
        self.tables = torch.from_numpy(table)
        sizes = [segment.stop - segment.start for segment in segments]
        self.sequence = torch.from_numpy(np.repeat(np.arange(len(segments), dtype=np.int32), sizes))
        lengths = [
            np.arange(segment.stop - segment.start) + segment.prefix_stop - segment.prefix_start + 1
            for segment in segments
        ]
        self.lengths = torch.from_numpy(np.concatenate(lengths).astype(np.int32))

    def _add_blocks(self, rows: np.ndarray) -> np.ndarray:
        """Append blocks for ``rows``, padded with -1, and count them; return their numbers."""
        num_new = -(-len(rows) // BLOCK)
        self._rows.append(np.concatenate([rows, np.full(num_new * BLOCK - len(rows), -1)]))
        self.count += num_new
        return np.arange(self.count - num_new, self.count)
