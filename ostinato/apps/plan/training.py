"""Seconds of the trainer's phases: forward and backward of microbatches through the stages, then an update.

A layer of a kind costs the same wherever it stands, so kinds are priced and layers added up by stage. T below
are rows of a microbatch of one data rank, over its context and tensor ranks together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from ostinato.apps.plan.cluster import peak
from ostinato.apps.plan.comm import Layer, Message, Talk, layers_of, ring
from ostinato.apps.plan.imbalance import straggler
from ostinato.apps.plan.leaves import end_sizes, gathered_values, gradient_messages, gradient_sizes
from ostinato.apps.plan.memory import weight_bytes
from ostinato.apps.plan.parts import layer_elements, stage_elements
from ostinato.apps.plan.problem import DType, Problem, Recompute, Setup
from ostinato.apps.plan.roofline import Efficiency, Wires
from ostinato.model.config import ModelConfig
from ostinato.model.flops import LayerRates, Part, layer_rates
from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.layout import Layout

AXIS_TERMS = {"t": "tensor", "c": "context", "e": "expert exchange", "f": "weight gather", "p": "pipeline"}
HEAD_SWEEPS = 6.0  # times that a chunk of logits is read or written, in fp32
OPTIMIZER_BYTES = 28.0  # read and written per value by AdamW: weight, both moments, and the gradient read

Terms = defaultdict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A layer as the planner prices it; ``count`` and places are with the model."""

    messages: Layer
    rates: LayerRates


@lru_cache(maxsize=32)
def kinds_of(config: ModelConfig, adapter: AdapterSpec | None) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """(kinds of layers, the kind of every layer)."""
    kinds: list[Kind] = []
    places: list[int] = []
    flags = layers_of(config, adapter)
    for place, rates in enumerate(layer_rates(config, adapter)):
        like = next(
            (n for n, one in enumerate(kinds) if (one.messages, one.rates) == (flags[place], rates)), None
        )
        if like is None:
            like = len(kinds)
            kinds.append(Kind(messages=flags[place], rates=rates))
        places.append(like)
    return tuple(kinds), tuple(places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One microbatch of one data rank."""

    rows: float
    pairs: float  # (query, key) pairs of attention
    logits: float  # rows of the loss
    number: int  # such microbatches in an optimizer step


def load_of(problem: Problem, setup: Setup) -> Load:
    """The work of an optimizer step, cut over data ranks and into microbatches that are alike."""
    work, data = problem.work, setup.layout.data
    per_rank = work.rows / work.updates / data
    number = max(1, math.ceil(per_rank / setup.microbatch)) if setup.microbatch else 1
    share = 1 / (work.updates * data * number)
    return Load(
        rows=work.rows * share,
        pairs=all_pairs(problem) * share,
        logits=work.trained_tokens * share,
        number=number,
    )


def all_pairs(problem: Problem) -> float:
    """(query, key) pairs of one forward over the whole batch."""
    work = problem.work
    prompts = work.prompts if work.prompt_once else work.num_answers
    squares = sum(n * n for n in work.answers) / len(work.answers)
    answer = (squares + work.mean_answer) / 2 + work.mean_answer * work.prompt_tokens
    return work.num_answers * answer + prompts * work.prompt_tokens * (work.prompt_tokens + 1) / 2


def train_seconds(
    problem: Problem, setup: Setup, efficiency: Efficiency, *, backward: bool = True
) -> dict[str, float]:
    """Of all optimizer steps of an RL step by term; without ``backward`` of the forwards that score all but
    the first minibatch by the policy before it."""
    work = problem.work
    steps = work.updates if backward else work.updates - 1
    if not steps:
        return {}
    load = load_of(problem, setup)
    price = _Price(problem=problem, setup=setup, efficiency=efficiency, load=load)
    stages = price.stages(backward)
    sums = [sum(stage.values()) for stage in stages]
    slowest = max(range(len(sums)), key=sums.__getitem__)
    terms = _terms({term: s * load.number for term, s in stages[slowest].items()})
    fill = (sum(sums) - sums[slowest]) / setup.layout.virtual
    if fill:
        terms["bubble"] = fill
    if backward:
        _add(terms, price.update(slowest))
    return {term: s * steps for term, s in terms.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Price:
    """Seconds of what a rank does for one microbatch."""

    problem: Problem
    setup: Setup
    efficiency: Efficiency
    load: Load

    @property
    def layout(self) -> Layout:
        return self.setup.layout

    @property
    def talk(self) -> Talk:
        return Talk(
            config=self.problem.config, layout=self.layout, width=self.problem.precision.compute.num_bytes
        )

    @property
    def wires(self) -> Wires:
        return Wires(layout=self.layout, cluster=self.problem.cluster, efficiency=self.efficiency)

    def stages(self, backward: bool) -> list[Terms]:
        """Terms of every stage for one microbatch."""
        layout, config = self.layout, self.problem.config
        kinds, places = kinds_of(config, self.problem.adapter)
        priced = [self.layer(kind, backward) for kind in kinds]
        found = [_terms() for _ in range(layout.pipeline)]
        passed = (1 + backward) * self.seconds(self.talk.pass_on(self.load.rows))
        for chunk, layers in enumerate(layout.chunk_layers(config.num_layers)):
            stage = found[chunk % layout.pipeline]
            for kind, count in Counter(places[layer] for layer in layers).items():
                _add(stage, priced[kind], count)
            if layout.pipeline > 1:
                stage["pipeline"] += passed
        found[0]["tensor"] += self.seconds(self.talk.embed(self.load.rows))
        _add(found[-1], self.head(backward))
        return found

    def layer(self, kind: Kind, backward: bool) -> Terms:
        terms = self.run(kind, kind.rates.forward, 1.0)
        self.say(terms, self.talk.forward(kind.messages, self.load.rows) + self.gather(kind))
        if not backward:
            return terms
        if self.setup.recompute == Recompute.FULL and kind.rates.needed:
            _add(terms, dict(terms))  # the forward again, messages and all
        if kind.rates.needed:
            _add(terms, self.run(kind, kind.rates.backward, 2.0))
            self.say(terms, self.talk.backward(kind.messages, self.load.rows))
            if self.problem.adapter is None:
                self.say(terms, self.gather(kind, "reduce_scatter"))
        return terms

    def run(self, kind: Kind, rates: Mapping[Part, object], sweeps: float) -> Terms:
        """Products and elementwise work of one way through a layer."""
        problem, e = self.problem, self.efficiency
        rows, tensor = self.load.rows / self.layout.context, self.layout.tensor
        flops = {part: getattr(rates.get(part), "tokens", 0.0) * rows for part in Part}
        pairs = getattr(rates.get(Part.ATTENTION), "pairs", 0.0) * self.load.pairs
        speed = peak(problem.cluster.gpu, problem.precision.compute)
        hbm = problem.cluster.gpu.hbm * e.memory
        width = problem.precision.compute.num_bytes
        routed = self.routed(flops[Part.EXPERTS], kind)
        dense = flops[Part.ATTENTION] + flops[Part.MLP] + flops[Part.EXPERTS] - routed
        passes = sweeps if problem.adapter is None else 1.0  # of frozen weights no gradient is computed
        alike = replicated(problem.config) * (flops[Part.ATTENTION] > 0) * rows * passes
        own = dense / tensor + alike * (1 - 1 / tensor) + flops[Part.LORA] * (1 + 1 / tensor) / 2
        weights, experts = self.weights(kind)
        terms = _terms(
            {
                "products": max(own / (speed * e.products), weights / hbm),
                "attention": pairs / (self.layout.context * tensor) / (speed * e.attention),
                "elementwise": sweeps * self.swept(kind) * rows / tensor * width / hbm,
            }
        )
        if kind.messages.mixture:
            terms["experts"] = max(routed / tensor / (speed * e.grouped), experts / hbm)
            terms["imbalance"] = (self.straggler - 1) * terms["experts"]
        missing = sweeps * e.layer - sum(terms.values()) * e.ahead
        if missing > 0:
            terms["launch"] = missing
        return terms

    def routed(self, flops: float, kind: Kind) -> float:
        """Of the FLOPs of an expert layer those of routed experts, not of its router and shared ones."""
        moe, config = self.problem.config.moe, self.problem.config
        if not kind.messages.mixture or moe is None:
            return 0.0
        products = 3 * config.hidden_size * moe.intermediate_size * moe.top_k
        others = config.hidden_size * (moe.num_experts + 3 * moe.shared_intermediate_size)
        return flops * products / (products + others)

    def swept(self, kind: Kind) -> float:
        """Values per row that elementwise work goes over, forward."""
        config, moe = self.problem.config, self.problem.config.moe
        width = config.intermediate_size
        if kind.messages.mixture and moe is not None:
            width = moe.top_k * moe.intermediate_size + moe.shared_intermediate_size
        return self.efficiency.sweeps * config.hidden_size + 5.0 * width

    def weights(self, kind: Kind) -> tuple[float, float]:
        """Bytes of a layer's weights on this rank: (those of all but routed experts, of routed experts)."""
        found = layer_elements(self.problem.config, None, self.layout, moe=kind.messages.mixture)
        width = self.problem.precision.base.num_bytes
        return (found.matrices + found.routers + found.vectors) * width, found.experts * width

    @property
    def straggler(self) -> float:
        moe = self.problem.config.moe
        if moe is None or self.layout.expert == 1:
            return 1.0
        return straggler(moe.num_experts, self.layout.expert).mean

    def gather(self, kind: Kind, operation: str = "all_gather") -> list[Message]:
        values = gathered_values(self.problem.config, self.layout, moe=kind.messages.mixture)
        return ring(operation, "f", self.layout.shard, values * self.problem.precision.base.num_bytes)

    def say(self, terms: Terms, messages: Iterable[Message]) -> None:
        """Add messages to terms, what stragglers add to exchanges apart."""
        for one in messages:
            seconds = one.calls * self.wires.of(one)
            terms[AXIS_TERMS[one.axis]] += seconds
            if one.axis == "e":
                terms["imbalance"] += (self.straggler - 1) * seconds

    def seconds(self, messages: Iterable[Message]) -> float:
        return self.wires.seconds(messages)

    def head(self, backward: bool) -> Terms:
        """Log-probabilities of the rows of a microbatch, on the last stage."""
        problem, e, layout = self.problem, self.efficiency, self.layout
        config, rows = problem.config, self.load.logits / layout.context
        products = 1.0 if not backward else 2.0 if problem.adapter is not None else 4.0
        flops = 2.0 * config.vocab_size * config.hidden_size * rows / layout.tensor * products
        values = rows * config.vocab_size / layout.tensor
        weights = end_sizes(config, layout).get("head", 0) * problem.precision.base.num_bytes
        hbm = problem.cluster.gpu.hbm * e.memory
        speed = peak(problem.cluster.gpu, problem.precision.compute) * e.products
        terms = _terms(
            {"head": max(flops / speed, weights * products / hbm) + HEAD_SWEEPS * 4 * values / hbm}
        )
        terms["tensor"] += self.seconds(self.head_messages(backward))
        return terms

    def head_messages(self, backward: bool) -> list[Message]:
        talk, load = self.talk, self.load
        passes = 2 if backward and self.problem.adapter is None else 1
        found = talk.head(load.logits, load.rows, passes=passes)
        return found + (talk.head_back(load.rows) if backward else [])

    def update(self, stage: int) -> Terms:
        """Sums of gradients, and the optimizer, of one stage."""
        problem, e = self.problem, self.efficiency
        width = problem.precision.gradient.num_bytes
        sums = gradient_messages(problem.config, problem.adapter, self.layout, stage, width)
        terms = _terms({"gradients": self.seconds(sums)})
        values = sum(gradient_sizes(problem.config, problem.adapter, self.layout, stage).values())
        terms["optimizer"] = values * OPTIMIZER_BYTES / (problem.cluster.gpu.hbm * e.memory)
        return terms


def _terms(found: Mapping[str, float] | None = None) -> Terms:
    return defaultdict(float, found or {})


def _add(to: Terms, found: Mapping[str, float], times: float = 1.0) -> None:
    for term, seconds in found.items():
        to[term] += times * seconds


@lru_cache(maxsize=32)
def replicated(config: ModelConfig) -> float:
    """FLOPs per row that every tensor rank runs alike: the down-projections to latents, which are not cut."""
    mla = config.mla
    if mla is None:
        return 0.0
    return 2.0 * config.hidden_size * ((mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.rope_head_dim)


@lru_cache(maxsize=32)
def trained_values(config: ModelConfig, adapter: AdapterSpec | None) -> int:
    """Trained values of the whole model."""
    alone = Layout()
    return sum(gradient_sizes(config, adapter, alone, 0).values())


def local_bytes(problem: Problem, layout: Layout, dtype: DType) -> float:
    """Base weights of the fullest rank."""
    found = (stage_elements(problem.config, None, layout, stage) for stage in range(layout.pipeline))
    return max(weight_bytes(elements, dtype, layout.shard) for elements in found)
