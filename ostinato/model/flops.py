"""Floating-point operations of a forward and of its backward, from the model's own shapes.

A product [m, k] x [k, n] is 2 m k n; nothing else is counted, as by ``torch.utils.flop_counter``: no norms,
softmax, sums of losses, optimizer. Matrices count as they are stored and run: q, k, v as one, the B of their
adapters block-diagonal, its zeros too (``lora.STACKED``); of the experts top_k per token. Attention counts
the pairs that the mask leaves. Products that a kernel runs in addition are not counted: the masked half of a
rectangle, the padding of latent values up to the width of keys. The native kernels run the same products.

Backward is what autograd runs. For y = x w it computes dx where x depends on a trained tensor, and dw where w
does or is trained: below the lowest adapter nothing is run, and a frozen matrix has no dw. The exceptions:
attention computes its scores anew (``packed``), a frozen head computes its one dx from the logits of the
forward, a trained head recomputes them by chunks (``algo.logprobs``).

All of it is linear in the three amounts of ``Work``, so that work can be added up first and priced once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from ostinato.model.config import ModelConfig
from ostinato.model.shapes import (
    STACKED,
    AdapterSpec,
    ExpertScheme,
    compute_adapter_shapes,
    compute_linear_shapes,
)
from ostinato.types import Segment

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """The size of a forward: the three amounts that its FLOPs are linear in."""

    tokens: float = 0  # rows through the layers
    pairs: float = 0  # (query, key) pairs of attention: those of one head in one layer
    logits: float = 0  # rows through the head

    @classmethod
    def from_segments(cls, segments: Iterable[Segment], num_logits: int) -> Work:
        """Return the work of packed rows, ``num_logits`` of which go through the head. A shared prompt runs
        once; the rows of every segment that has it as a prefix attend to it."""
        tokens = pairs = 0
        for segment in segments:
            rows = segment.stop - segment.start
            tokens += rows
            pairs += rows * (rows + 1) // 2 + rows * (segment.prefix_stop - segment.prefix_start)
        return cls(tokens, pairs, num_logits)

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.pairs + other.pairs, self.logits + other.logits)


@dataclass(frozen=True, slots=True)
class Rates:
    """FLOPs of one unit of each amount of ``Work``."""

    tokens: float = 0.0
    pairs: float = 0.0
    logits: float = 0.0

    def __add__(self, other: Rates) -> Rates:
        return Rates(self.tokens + other.tokens, self.pairs + other.pairs, self.logits + other.logits)

    def of(self, work: Work) -> float:
        """Return the FLOPs of ``work``."""
        return self.tokens * work.tokens + self.pairs * work.pairs + self.logits * work.logits


class Part(StrEnum):
    """The parts by which the FLOPs of a forward are reported."""

    ATTENTION = "attention"
    MLP = "mlp"  # of dense layers
    EXPERTS = "experts"  # with their routers and shared experts
    LORA = "lora"
    HEAD = "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopModel:
    """FLOPs of a model's forward and of the backward that training adds."""

    parts: Mapping[Part, Rates]  # of one forward
    backward_rates: Rates

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        adapter: AdapterSpec | None,
        *,
        recompute: bool = False,
        entropy_gradient: bool = False,
    ) -> FlopModel:
        """Count the FLOPs of training ``adapter`` on a frozen base, or of training all parameters if it is
        None.

        ``recompute``: backward repeats the forward of every layer that has a gradient. ``entropy_gradient``:
        the loss has an entropy term, which costs an additional product at a frozen head. Raises ValueError
        for an adapter that does not fit the model.
        """
        layers = compute_layer_rates(config, adapter)
        parts = {part: _sum(layer.forward.get(part, Rates()) for layer in layers) for part in Part}
        backward = _sum(rates for layer in layers for rates in layer.backward.values())
        if recompute:
            backward += _sum(
                rates for layer in layers if layer.needs_gradient for rates in layer.forward.values()
            )
        head = 2.0 * config.vocab_size * config.hidden_size
        products = 3 if adapter is None else 1 + entropy_gradient
        parts[Part.HEAD] = Rates(logits=head)
        return cls(parts=parts, backward_rates=backward + Rates(logits=products * head))

    def forward(self, work: Work) -> float:
        """Return the FLOPs of one forward of ``work``, with adapters unmerged, as engine and trainer run
        it."""
        return _sum(self.parts.values()).of(work)

    def backward(self, work: Work) -> float:
        """Return the FLOPs that training adds to the forward."""
        return self.backward_rates.of(work)

    def base(self, work: Work) -> float:
        """Return the FLOPs of one forward without adapters, as for the reference policy."""
        return _sum(rates for part, rates in self.parts.items() if part is not Part.LORA).of(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRates:
    """FLOPs of one layer by part: of its forward, and of its backward without recomputation."""

    forward: Mapping[Part, Rates]
    backward: Mapping[Part, Rates]
    needs_gradient: bool  # whether anything in or below it is trained: otherwise it is not recomputed


def compute_layer_rates(config: ModelConfig, adapter: AdapterSpec | None) -> tuple[LayerRates, ...]:
    """Compute the rates of every layer. With ``adapter`` None all parameters are trained. Raises ValueError
    for an adapter that does not fit the model."""
    ranks = (
        {name: a[-2] for name, (a, _) in compute_adapter_shapes(config, adapter).items()} if adapter else {}
    )
    shapes = compute_linear_shapes(config)
    needs_gradient, rates = adapter is None, []  # the embedding is trained too
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        layer = _LayerCounter(config, _select_prefix(prefix, shapes), _select_prefix(prefix, ranks), adapter)
        needs_gradient = layer.count_layer(needs_gradient)
        rates.append(LayerRates(forward=layer.parts, backward=layer.backward, needs_gradient=needs_gradient))
    return tuple(rates)


@dataclass(slots=True)
class _LayerCounter:
    """Counts the FLOPs of one layer as the decoder runs it: each ``count`` method adds to ``parts`` and
    ``backward``. Such a method takes whether its input needs a gradient and returns whether its output does.
    ``shapes`` and ``ranks`` are those of the maps of this layer, by name within it."""

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    ranks: Mapping[str, int]
    adapter: AdapterSpec | None
    parts: dict[Part, Rates] = field(default_factory=dict)
    backward: dict[Part, Rates] = field(default_factory=dict)

    def count_layer(self, needs_gradient: bool) -> bool:
        """Count the whole layer. ``needs_gradient``: whether the residual stream needs a gradient."""
        needs_gradient = self._count_attention(needs_gradient) or needs_gradient
        return (
            self._count_mixture(needs_gradient)
            if "router" in self.shapes
            else self._count_mlp("", Part.MLP, needs_gradient)
        ) or needs_gradient

    def _count_attention(self, needs_x: bool) -> bool:
        part, mla, heads = Part.ATTENTION, self.config.mla, self.config.num_heads
        if mla is None:
            needs_inputs = self._count_linear(part, "qkv", needs_x)
        else:
            needs_q = (
                self._count_linear(part, "q", needs_x)
                if mla.q_lora_rank is None
                else self._count_linear(part, "q_a", needs_x)
            )
            if mla.q_lora_rank is not None:
                needs_q = self._count_linear(part, "q_b", needs_q)
            needs_kv = self._count_linear(part, "kv_a", needs_x)
            needs_inputs = self._count_linear(part, "kv_b", needs_kv) or needs_q or needs_kv
        key_flops, value_flops = 2.0 * heads * self.config.head_dim, 2.0 * heads * self.config.v_head_dim
        self._add_rates(part, Rates(pairs=key_flops + value_flops), self.parts)
        if needs_inputs:  # products with keys: q k^T once more, dq and dk; with values: dO v^T and dv
            self._add_rates(part, Rates(pairs=3 * key_flops + 2 * value_flops), self.backward)
        return self._count_linear(part, "o", needs_inputs)

    def _count_mlp(self, role: str, part: Part, needs_x: bool) -> bool:
        return self._count_linear(part, f"{role}down", self._count_linear(part, f"{role}gate_up", needs_x))

    def _count_mixture(self, needs_x: bool) -> bool:
        needs_weights = self._count_linear(Part.EXPERTS, "router", needs_x)
        needs_out = self._count_experts(needs_x, needs_weights)
        if "shared.down" in self.shapes:
            needs_out = self._count_mlp("shared_", Part.EXPERTS, needs_x) or needs_out
        return needs_out

    def _count_experts(self, needs_x: bool, needs_weights: bool) -> bool:
        """Count ``moe.experts``. ``needs_weights``: whether the mixture weights need a gradient."""
        moe, hidden = self.config.moe, self.config.hidden_size
        assert moe is not None
        num_inner, trains_base = moe.top_k * moe.intermediate_size, self.adapter is None
        is_adapted = any(name.startswith("experts.") for name in self.ranks)
        needs_act = self._count_product(Part.EXPERTS, 2.0 * hidden * 2 * num_inner, needs_x, trains_base)
        if is_adapted:
            needs_act = self._count_expert_up(needs_x) or needs_act
        needs_out = self._count_product(Part.EXPERTS, 2.0 * num_inner * hidden, needs_act, trains_base)
        needs_out = self._count_weighted_sum(Part.EXPERTS, hidden, needs_out, needs_weights)
        return (self._count_expert_down(needs_act, needs_weights) if is_adapted else False) or needs_out

    def _count_expert_up(self, needs_x: bool) -> bool:
        moe, adapter = self.config.moe, self.adapter
        assert moe is not None and adapter is not None
        rank = sum(self.ranks.get(f"experts.{name}", 0) for name in ("gate", "up"))
        is_trained = rank > 0  # otherwise a zero update with one A for all experts is computed
        is_shared = not is_trained or adapter.expert_scheme == ExpertScheme.SHARED_OUTER
        rank = rank or adapter.get_rank(".experts.")
        a_flops = 2.0 * self.config.hidden_size * rank * (1 if is_shared else moe.top_k)
        b_flops = 2.0 * rank * 2 * moe.intermediate_size * moe.top_k
        return self._count_product(
            Part.LORA, b_flops, self._count_product(Part.LORA, a_flops, needs_x, is_trained), is_trained
        )

    def _count_expert_down(self, needs_act: bool, needs_weights: bool) -> bool:
        moe, adapter, hidden = self.config.moe, self.adapter, self.config.hidden_size
        assert moe is not None and adapter is not None
        is_trained = "experts.down" in self.ranks  # otherwise a zero update with one B for all is computed
        rank = adapter.get_rank(".experts.")
        low = 2.0 * moe.intermediate_size * rank * moe.top_k
        low = self._count_product(Part.LORA, low, needs_act, is_trained)
        if not is_trained or adapter.expert_scheme == ExpertScheme.SHARED_OUTER:
            return self._count_product(
                Part.LORA,
                2.0 * rank * hidden,
                self._count_weighted_sum(Part.LORA, rank, low, needs_weights),
                is_trained,
            )
        out = self._count_product(Part.LORA, 2.0 * rank * hidden * moe.top_k, low, is_trained)
        return self._count_weighted_sum(Part.LORA, hidden, out, needs_weights)

    def _count_weighted_sum(self, part: Part, width: int, needs_rows: bool, needs_weights: bool) -> bool:
        """Count the weighted sum of the top_k rows of a token: a product of two activations."""
        assert self.config.moe is not None
        return self._count_product(part, 2.0 * self.config.moe.top_k * width, needs_rows, needs_weights)

    def _count_linear(self, part: Part, stored_name: str, needs_x: bool) -> bool:
        """Count a stored matrix, a key of ``lora.STACKED``, with the adapters of its members."""
        members = STACKED[stored_name]
        inputs, outputs = self.shapes[members[0]][-1], sum(self.shapes[name][-2] for name in members)
        rank = sum(self.ranks.get(name, 0) for name in members)
        needs_out = self._count_product(part, 2.0 * inputs * outputs, needs_x, self.adapter is None)
        if not rank:
            return needs_out
        needs_low = self._count_product(Part.LORA, 2.0 * inputs * rank, needs_x, True)
        return self._count_product(Part.LORA, 2.0 * rank * outputs, needs_low, True) or needs_out

    def _count_product(self, part: Part, flops: float, needs_x: bool, needs_w: bool) -> bool:
        """Count ``flops`` per token to multiply x and w, once more for each of the two that needs a gradient.
        Return whether the product needs a gradient."""
        self._add_rates(part, Rates(tokens=flops), self.parts)
        self._add_rates(part, Rates(tokens=flops * (needs_x + needs_w)), self.backward)
        return needs_x or needs_w

    def _add_rates(self, part: Part, rates: Rates, rates_by_part: dict[Part, Rates]) -> None:
        rates_by_part[part] = rates_by_part.get(part, Rates()) + rates


def _sum(rates: Iterable[Rates]) -> Rates:
    return sum(rates, Rates())


def _select_prefix(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    """Return the values whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
