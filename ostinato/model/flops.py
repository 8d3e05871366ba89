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
from ostinato.model.shapes import STACKED, AdapterSpec, ExpertScheme, adapter_shapes, linear_shapes
from ostinato.types import Segment

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Work:
    """The size of a forward: the three amounts that its FLOPs are linear in."""

    tokens: float = 0  # rows through the layers
    pairs: float = 0  # (query, key) pairs of attention: those of one head in one layer
    logits: float = 0  # rows through the head

    @classmethod
    def packed(cls, segments: Iterable[Segment], logits: int) -> Work:
        """The work of packed rows, ``logits`` of which go through the head. A shared prompt runs once; the
        rows of every segment that has it as a prefix attend to it."""
        tokens = pairs = 0
        for segment in segments:
            rows = segment.stop - segment.start
            tokens += rows
            pairs += rows * (rows + 1) // 2 + rows * (segment.prefix_stop - segment.prefix_start)
        return cls(tokens, pairs, logits)

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
        """FLOPs of ``work``."""
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
    """FLOPs of a model and of its training; made by ``of``."""

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
        """The FLOPs of training ``adapter`` on a frozen base; None: of training all parameters.

        ``recompute``: backward repeats the forward of every layer that has a gradient. ``entropy_gradient``:
        the loss has an entropy term (an additional product at a frozen head).
        Raises ValueError for an adapter that does not fit the model.
        """
        layers = layer_rates(config, adapter)
        parts = {part: _sum(layer.forward.get(part, Rates()) for layer in layers) for part in Part}
        backward = _sum(rates for layer in layers for rates in layer.backward.values())
        if recompute:
            backward += _sum(rates for layer in layers if layer.needed for rates in layer.forward.values())
        head = 2.0 * config.vocab_size * config.hidden_size
        products = 3 if adapter is None else 1 + entropy_gradient
        parts[Part.HEAD] = Rates(logits=head)
        return cls(parts=parts, backward_rates=backward + Rates(logits=products * head))

    def forward(self, work: Work) -> float:
        """FLOPs of one forward of ``work``, adapters applied unmerged, as engine and trainer run it."""
        return _sum(self.parts.values()).of(work)

    def backward(self, work: Work) -> float:
        """FLOPs that training adds to the forward."""
        return self.backward_rates.of(work)

    def base(self, work: Work) -> float:
        """FLOPs of one forward without adapters, as for the reference policy."""
        return _sum(rates for part, rates in self.parts.items() if part is not Part.LORA).of(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRates:
    """FLOPs of one layer by part: of its forward, and of its backward without recomputation."""

    forward: Mapping[Part, Rates]
    backward: Mapping[Part, Rates]
    needed: bool  # whether anything in or below it is trained; only then is it recomputed


def layer_rates(config: ModelConfig, adapter: AdapterSpec | None) -> tuple[LayerRates, ...]:
    """The rates of every layer; with ``adapter`` None all parameters are trained. Raises ValueError for an
    adapter that does not fit."""
    ranks = {name: a[-2] for name, (a, _) in adapter_shapes(config, adapter).items()} if adapter else {}
    shapes = linear_shapes(config)
    needs_gradient, rates = adapter is None, []  # the embedding is trained too
    for index in range(config.num_layers):
        prefix = f"layers.{index}."
        layer = _Layer(config, _select_prefix(prefix, shapes), _select_prefix(prefix, ranks), adapter)
        needs_gradient = layer.run(needs_gradient)
        rates.append(LayerRates(forward=layer.parts, backward=layer.backward, needed=needs_gradient))
    return tuple(rates)


@dataclass(slots=True)
class _Layer:
    """One layer as the decoder runs it. Every method that multiplies takes and returns whether the activation
    needs a gradient; ``shapes`` and ``ranks`` are those of the maps of this layer, by name within it."""

    config: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    ranks: Mapping[str, int]
    adapter: AdapterSpec | None
    parts: dict[Part, Rates] = field(default_factory=dict)
    backward: dict[Part, Rates] = field(default_factory=dict)

    def run(self, x: bool) -> bool:
        """Count the whole layer; ``x``: whether the residual stream needs a gradient."""
        x = self.attention(x) or x
        return (self.mixture(x) if "router" in self.shapes else self.mlp("", Part.MLP, x)) or x

    def attention(self, x: bool) -> bool:
        part, mla, heads = Part.ATTENTION, self.config.mla, self.config.num_heads
        if mla is None:
            inputs = self.linear(part, "qkv", x)
        else:
            q = self.linear(part, "q", x) if mla.q_lora_rank is None else self.linear(part, "q_a", x)
            if mla.q_lora_rank is not None:
                q = self.linear(part, "q_b", q)
            kv = self.linear(part, "kv_a", x)
            inputs = self.linear(part, "kv_b", kv) or q or kv
        keys, values = 2.0 * heads * self.config.head_dim, 2.0 * heads * self.config.v_head_dim
        self.add(part, Rates(pairs=keys + values), self.parts)
        if inputs:  # q k^T once more, dO v^T; dv, dq, dk
            self.add(part, Rates(pairs=3 * keys + 2 * values), self.backward)
        return self.linear(part, "o", inputs)

    def mlp(self, role: str, part: Part, x: bool) -> bool:
        return self.linear(part, f"{role}down", self.linear(part, f"{role}gate_up", x))

    def mixture(self, x: bool) -> bool:
        weights = self.linear(Part.EXPERTS, "router", x)
        out = self.experts(x, weights)
        if "shared.down" in self.shapes:
            out = self.mlp("shared_", Part.EXPERTS, x) or out
        return out

    def experts(self, x: bool, weights: bool) -> bool:
        """Count ``moe.experts``; ``weights``: whether the mixture weights need a gradient."""
        moe, hidden = self.config.moe, self.config.hidden_size
        assert moe is not None
        width, trains_base = moe.top_k * moe.intermediate_size, self.adapter is None
        is_adapted = any(name.startswith("experts.") for name in self.ranks)
        act = self.product(Part.EXPERTS, 2.0 * hidden * 2 * width, x, trains_base)
        if is_adapted:
            act = self.expert_up(x) or act
        out = self.product(Part.EXPERTS, 2.0 * width * hidden, act, trains_base)
        out = self.mixed(Part.EXPERTS, hidden, out, weights)
        return (self.expert_down(act, weights) if is_adapted else False) or out

    def expert_up(self, x: bool) -> bool:
        moe, adapter = self.config.moe, self.adapter
        assert moe is not None and adapter is not None
        rank = sum(self.ranks.get(f"experts.{name}", 0) for name in ("gate", "up"))
        is_trained = rank > 0  # otherwise a zero update with one A for all experts is computed
        is_shared = not is_trained or adapter.expert_scheme == ExpertScheme.SHARED_OUTER
        rank = rank or adapter.rank_of(".experts.")
        low = 2.0 * self.config.hidden_size * rank * (1 if is_shared else moe.top_k)
        out = 2.0 * rank * 2 * moe.intermediate_size * moe.top_k
        return self.product(Part.LORA, out, self.product(Part.LORA, low, x, is_trained), is_trained)

    def expert_down(self, act: bool, weights: bool) -> bool:
        moe, adapter, hidden = self.config.moe, self.adapter, self.config.hidden_size
        assert moe is not None and adapter is not None
        is_trained = "experts.down" in self.ranks  # otherwise a zero update with one B for all is computed
        rank = adapter.rank_of(".experts.")
        low = 2.0 * moe.intermediate_size * rank * moe.top_k
        low = self.product(Part.LORA, low, act, is_trained)
        if not is_trained or adapter.expert_scheme == ExpertScheme.SHARED_OUTER:
            return self.product(
                Part.LORA, 2.0 * rank * hidden, self.mixed(Part.LORA, rank, low, weights), is_trained
            )
        out = self.product(Part.LORA, 2.0 * rank * hidden * moe.top_k, low, is_trained)
        return self.mixed(Part.LORA, hidden, out, weights)

    def mixed(self, part: Part, width: int, rows: bool, weights: bool) -> bool:
        """The weighted sum of the top_k rows of a token, a product of two activations."""
        assert self.config.moe is not None
        return self.product(part, 2.0 * self.config.moe.top_k * width, rows, weights)

    def linear(self, part: Part, stored: str, x: bool) -> bool:
        """Count a stored matrix of ``lora.STACKED`` with the adapters of its members."""
        members = STACKED[stored]
        inputs, outputs = self.shapes[members[0]][-1], sum(self.shapes[name][-2] for name in members)
        rank = sum(self.ranks.get(name, 0) for name in members)
        out = self.product(part, 2.0 * inputs * outputs, x, self.adapter is None)
        if not rank:
            return out
        low = self.product(Part.LORA, 2.0 * inputs * rank, x, True)
        return self.product(Part.LORA, 2.0 * rank * outputs, low, True) or out

    def product(self, part: Part, flops: float, x: bool, w: bool) -> bool:
        """Count ``flops`` per token to multiply x and w, once more for each of the two that needs a
        gradient."""
        self.add(part, Rates(tokens=flops), self.parts)
        self.add(part, Rates(tokens=flops * (x + w)), self.backward)
        return x or w

    def add(self, part: Part, rates: Rates, to: dict[Part, Rates]) -> None:
        to[part] = to.get(part, Rates()) + rates


def _sum(rates: Iterable[Rates]) -> Rates:
    return sum(rates, Rates())


def _select_prefix(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
