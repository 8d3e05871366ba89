"""Seconds of an RL step by phase and term: a roofline of every part, with an efficiency where it is known.

    products, experts, head   FLOPs of ``model.flops`` over the peak of the dtype, or the weights' bytes over
                              the memory's bandwidth, whichever is longer, of the parts that a rank keeps
    messages                  bytes of ``plan.traffic`` over the link that a group shares, and a latency
    bubble                    the way through the stages that other microbatches do not fill
    decode                    every step reads weights, caches of the sequences still running, and adapters;
                              as many steps as the longest answers take (``plan.sampling``)

Nothing overlaps but what our code overlaps: messages wait for products and products for messages (exposed
seconds add up); a pipeline's stages work side by side; with a lag, trainer and sampler on GPUs of their own
do. A straggling expert rank holds up the others in every layer, so expert products and exchanges are
multiplied by max over mean load. Microbatches are taken to be alike, as packing makes them. T below are rows
of a microbatch of one data rank, over its context and tensor ranks together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from ostinato.apps.plan.cluster import Efficiency, Wires
from ostinato.apps.plan.layouts import as_kept
from ostinato.apps.plan.memory import microbatches
from ostinato.apps.plan.problem import Arrangement, Base, Phase, Placement, Problem, Setup, Times, Work
from ostinato.apps.plan.sampling import rollout_seconds
from ostinato.apps.plan.traffic import Talk, Traffic, added
from ostinato.model.config import ModelConfig
from ostinato.model.flops import LayerRates, Part, Rates, layer_rates
from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.elements import gradient_sums, is_moe, layer_elements, stage_elements, table_size
from ostinato.parallel.gpus import peak
from ostinato.parallel.layout import Layout
from ostinato.parallel.load import expected_straggler
from ostinato.parallel.memory import DType, weight_bytes

AXIS_TERMS = {"t": "tensor", "c": "context", "e": "expert exchange", "f": "weight gather", "p": "pipeline"}
HEAD_SWEEPS = 6.0  # times that a chunk of logits is read or written, in fp32
OPTIMIZER_BYTES = 28.0  # read and written per value by AdamW: weight, both moments, and the gradient read
# Relative standard deviations of what a term depends on and that have not been measured.
SPREAD: Mapping[str, float] = MappingProxyType(
    {"train": 0.20, "logprobs": 0.20, "rollout": 0.25, "refit": 0.5, "switch": 0.4}
)

Terms = defaultdict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A ``problem.Clock``. ``factors`` multiply the seconds of a phase: those that ``plan.fit`` found."""

    efficiency: Efficiency = field(default_factory=Efficiency)
    factors: Mapping[str, float] = field(default_factory=dict)

    def phase(self, problem: Problem, phase: Phase, setup: Setup) -> Mapping[str, float]:
        """Exposed seconds of one phase of one RL step by term; empty where the phase has nothing to do (our
        trainer is its own old policy in the first of its optimizer steps: one update needs no forward ahead).
        """
        if phase == Phase.ROLLOUT:
            terms = rollout_seconds(problem, setup, self.efficiency)
        else:
            terms = train_seconds(problem, setup, self.efficiency, backward=phase == Phase.TRAIN)
        return self._scale(phase, terms)

    def step(self, problem: Problem, arrangement: Arrangement) -> Times:
        """All of an RL step."""
        terms = {phase.value: self.phase(problem, phase, arrangement.setup(phase)) for phase in Phase}
        terms["refit"] = self._scale("refit", refit_seconds(problem, arrangement, self.efficiency))
        terms["switch"] = self._scale("switch", switch_seconds(problem, arrangement, self.efficiency))
        sums = {name: sum(parts.values()) for name, parts in terms.items()}
        overlapped = 0.0
        if arrangement.placement == Placement.APART and arrangement.lag > 0:
            overlapped = min(sums["rollout"], sums["train"] + sums["logprobs"])
        whole = sum(sums.values()) or 1.0
        spread = math.sqrt(sum((SPREAD.get(name, 0.3) * s) ** 2 for name, s in sums.items())) / whole
        return Times(terms=terms, low=1 / (1 + spread), high=1 + spread, overlapped=overlapped)

    def _scale(self, phase: str, terms: Mapping[str, float]) -> dict[str, float]:
        factor = self.factors.get(phase, 1.0)
        return {term: s * factor for term, s in terms.items() if s}


# ---- the trainer: forward and backward of microbatches through the stages, then an update


@lru_cache(maxsize=32)
def kinds_of(
    config: ModelConfig, adapter: AdapterSpec | None
) -> tuple[tuple[tuple[bool, LayerRates], ...], tuple[int, ...]]:
    """((is it a mixture, FLOPs) of every kind of layer, the kind of every layer)."""
    kinds: list[tuple[bool, LayerRates]] = []
    places: list[int] = []
    for layer, rates in enumerate(layer_rates(config, adapter)):
        kind = (is_moe(config, layer), rates)
        if kind not in kinds:
            kinds.append(kind)
        places.append(kinds.index(kind))
    return tuple(kinds), tuple(places)


@lru_cache(maxsize=1024)
def pairs_of(work: Work) -> float:
    """(query, key) pairs of one forward over the whole batch."""
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
    number = microbatches(problem, setup) if setup.microbatch else 1
    share = 1 / (work.updates * setup.layout.data * number)
    price = _Price(
        problem=problem,
        setup=setup,
        efficiency=efficiency,
        rows=work.rows * share,
        pairs=pairs_of(work) * share,
        targets=work.trained_tokens * share,
    )
    stages = price.stages(backward)
    sums = [sum(stage.values()) for stage in stages]
    slowest = max(range(len(sums)), key=sums.__getitem__)
    terms = _terms({term: s * number for term, s in stages[slowest].items()})
    fill = (sum(sums) - sums[slowest]) / setup.layout.virtual
    if fill:
        terms["bubble"] = fill
    if backward:
        _add(terms, price.update(slowest))
    return {term: s * steps for term, s in terms.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Price:
    """Seconds of what a rank does for one microbatch of one data rank."""

    problem: Problem
    setup: Setup
    efficiency: Efficiency
    rows: float
    pairs: float  # (query, key) pairs of attention
    targets: float  # rows of the loss

    @property
    def wires(self) -> Wires:
        return Wires(layout=self.setup.layout, cluster=self.problem.cluster, efficiency=self.efficiency)

    @property
    def hbm(self) -> float:
        return self.problem.cluster.gpu.hbm * self.efficiency.memory

    @property
    def speed(self) -> float:
        return peak(self.problem.cluster.gpu, self.problem.precision.compute)

    def stages(self, backward: bool) -> list[Terms]:
        """Terms of every stage for one microbatch."""
        layout, config = self.setup.layout, self.problem.config
        talk = talk_of(self.problem, self.setup)
        kinds, places = kinds_of(config, self.problem.adapter)
        priced = [self.layer(talk, moe, rates, backward) for moe, rates in kinds]
        stages = [_terms() for _ in range(layout.pipeline)]
        passed = (1 + backward) * self.wires.seconds(talk.pass_on(self.rows))
        for chunk, layers in enumerate(layout.chunk_layers(config.num_layers)):
            stage = stages[chunk % layout.pipeline]
            for kind, count in Counter(places[layer] for layer in layers).items():
                _add(stage, priced[kind], count)
            if layout.pipeline > 1:
                stage["pipeline"] += passed
        stages[0]["tensor"] += self.wires.seconds(talk.embed(self.rows))
        _add(stages[-1], self.head(talk, backward))
        return stages

    def layer(self, talk: Talk, moe: bool, rates: LayerRates, backward: bool) -> Terms:
        terms = self.run(moe, rates.forward, 1.0)
        self.say(terms, talk.layer(self.rows, moe=moe))
        if not backward or not rates.needed:
            return terms
        if self.setup.recompute:
            _add(terms, dict(terms))  # the forward again, messages and all
        _add(terms, self.run(moe, rates.backward, 2.0))
        self.say(terms, talk.layer(self.rows, moe=moe, backward=True))
        return terms

    def run(self, moe: bool, rates: Mapping[Part, Rates], sweeps: float) -> Terms:
        """Products and elementwise work of one way through a layer."""
        problem, layout, e = self.problem, self.setup.layout, self.efficiency
        config, mixture = problem.config, problem.config.moe if moe else None
        rows, tensor = self.rows / layout.context, layout.tensor
        flops = {part: rates.get(part, Rates()).tokens * rows for part in Part}
        routed = 0.0  # of an expert layer's FLOPs, beside its router and shared experts
        width = config.intermediate_size
        if mixture is not None:
            products = 3 * mixture.intermediate_size * mixture.top_k
            others = mixture.num_experts + 3 * mixture.shared_intermediate_size
            routed = flops[Part.EXPERTS] * products / (products + others)
            width = mixture.top_k * mixture.intermediate_size + mixture.shared_intermediate_size
        dense = flops[Part.ATTENTION] + flops[Part.MLP] + flops[Part.EXPERTS] - routed
        passes = sweeps if problem.adapter is None else 1.0  # of frozen weights no gradient is computed
        alike = replicated(config) * (flops[Part.ATTENTION] > 0) * rows * passes
        own = dense / tensor + alike * (1 - 1 / tensor) + flops[Part.LORA] * (1 + 1 / tensor) / 2
        elements, size = layer_elements(config, None, layout, moe=moe), problem.precision.base.num_bytes
        weights = (elements.matrices + elements.routers + elements.vectors) * size
        pairs = rates.get(Part.ATTENTION, Rates()).pairs * self.pairs / (layout.context * tensor)
        values = e.sweeps * config.hidden_size + 5.0 * width  # that elementwise work goes over, forward
        terms = _terms(
            {
                "products": max(own / (self.speed * e.products), weights / self.hbm),
                "attention": pairs / (self.speed * e.attention),
                "elementwise": sweeps
                * values
                * rows
                / tensor
                * problem.precision.compute.num_bytes
                / self.hbm,
            }
        )
        if moe:
            terms["experts"] = max(
                routed / tensor / (self.speed * e.grouped), elements.experts * size / self.hbm
            )
            terms["imbalance"] = (straggler(config, layout) - 1) * terms["experts"]
        missing = sweeps * e.layer - sum(terms.values()) * e.ahead
        if missing > 0:
            terms["launch"] = missing
        return terms

    def say(self, terms: Terms, traffic: Traffic) -> None:
        """Add messages to terms, what stragglers add to exchanges apart."""
        for (operation, axis), sent in traffic.items():
            seconds = self.wires.seconds({(operation, axis): sent})
            terms[AXIS_TERMS[axis]] += seconds
            if axis == "e":
                terms["imbalance"] += (straggler(self.problem.config, self.setup.layout) - 1) * seconds

    def head(self, talk: Talk, backward: bool) -> Terms:
        """Log-probabilities of the rows of a microbatch, on the last stage."""
        problem, layout = self.problem, self.setup.layout
        config, rows = problem.config, self.targets / layout.context
        products = 1.0 if not backward else 2.0 if problem.adapter is not None else 4.0
        flops = 2.0 * config.vocab_size * config.hidden_size * rows / layout.tensor * products
        values = rows * config.vocab_size / layout.tensor
        weights = table_size(config, layout) * problem.precision.base.num_bytes * (not config.tie_embeddings)
        terms = _terms(
            {
                "head": max(flops / (self.speed * self.efficiency.products), weights * products / self.hbm)
                + HEAD_SWEEPS * 4 * values / self.hbm
            }
        )
        terms["tensor"] += self.wires.seconds(talk.head(self.rows, self.targets, backward=backward))
        return terms

    def update(self, stage: int) -> Terms:
        """Sums of gradients, and the optimizer, of one stage."""
        problem, layout = self.problem, self.setup.layout
        values = gradient_sums(problem.config, problem.adapter, layout, stage).total()
        return _terms(
            {
                "gradients": self.wires.seconds(talk_of(problem, self.setup).update(stage)),
                "optimizer": values * OPTIMIZER_BYTES / self.hbm,
            }
        )


def _terms(terms: Mapping[str, float] | None = None) -> Terms:
    return defaultdict(float, terms or {})


def _add(to: Terms, terms: Mapping[str, float], times: float = 1.0) -> None:
    for term, seconds in terms.items():
        to[term] += times * seconds


def straggler(config: ModelConfig, layout: Layout) -> float:
    """Max over mean load of expert ranks, on average."""
    return expected_straggler(config.moe.num_experts, layout.expert).mean if config.moe else 1.0


@lru_cache(maxsize=32)
def replicated(config: ModelConfig) -> float:
    """FLOPs per row that every tensor rank runs alike: the down-projections to latents, which are not cut."""
    mla = config.mla
    if mla is None:
        return 0.0
    return 2.0 * config.hidden_size * ((mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.rope_head_dim)


def talk_of(problem: Problem, setup: Setup) -> Talk:
    """What a trainer sends."""
    precision = problem.precision
    return Talk(
        config=problem.config,
        adapter=problem.adapter,
        layout=setup.layout,
        width=precision.compute.num_bytes,
        weight=precision.base.num_bytes,
        gradient=precision.gradient.num_bytes,
    )


def step_traffic(problem: Problem, arrangement: Arrangement, stage: int = 0) -> Traffic:
    """What a rank of a stage of the trainer sends in one RL step: training, and old log-probabilities of all
    but its first optimizer step. Publishes, checkpoints and measurements send besides."""
    work, parts = problem.work, list[Traffic]()
    for phase, steps in ((Phase.TRAIN, work.updates), (Phase.LOGPROBS, work.updates - 1)):
        setup, backward = arrangement.setup(phase), phase == Phase.TRAIN
        talk, number = talk_of(problem, setup), microbatches(problem, setup)
        share = 1 / (work.updates * setup.layout.data * number)
        one = talk.microbatch(
            work.rows * share,
            work.trained_tokens * share,
            stage=stage,
            backward=backward,
            recompute=setup.recompute,
        )
        rows, targets = work.rows / work.updates, work.trained_tokens / work.updates
        scores = talk.scores(rows, targets, backward=backward)
        update = talk.update(stage) if backward else {}
        parts.append(added([added([one], number), scores, update], steps))
    return {key: sent for key, sent in added(parts).items() if sent.bytes}


# ---- between trainer and sampler


def refit_bytes(problem: Problem, arrangement: Arrangement) -> float:
    """Bytes that a publish moves to every replica of the sampler together: the adapters in what the forward
    computes in, whole and logical; of full-parameter training the weights. 0 where both are the same tensors.
    """
    values = gradient_sums(problem.config, problem.adapter, Layout(), 0).total()
    if problem.adapter is not None:
        return values * problem.precision.compute.num_bytes
    same = arrangement.train.layout == arrangement.rollout.layout and arrangement.base == Base.SHARED
    colocated = arrangement.placement == Placement.COLOCATED
    return 0.0 if same and colocated else values * problem.precision.sampler.num_bytes


def refit_seconds(problem: Problem, arrangement: Arrangement, efficiency: Efficiency) -> dict[str, float]:
    """Gather and broadcast. Adapters come together at the first rank (their tensors are logical: any sampler
    layout can cut them) and go out down a chain; all weights go from every rank to every rank at once."""
    moved, cluster = refit_bytes(problem, arrangement), problem.cluster
    if not moved:
        return {}
    nodes = -(-arrangement.num_gpus // cluster.per_node)
    pace = (cluster.gpu.nic if nodes > 1 else cluster.gpu.link) * efficiency.network
    if problem.adapter is not None:
        alone = arrangement.train.layout.world == 1
        return {"gather": 0.0 if alone else moved / pace, "broadcast": moved / pace}
    share = local_bytes(problem, as_kept(arrangement.rollout.layout), problem.precision.sampler)
    return {"reshard": share / pace}


def switch_seconds(problem: Problem, arrangement: Arrangement, efficiency: Efficiency) -> dict[str, float]:
    """Between host and devices, once around a step. Frozen weights are only fetched, never put back."""
    if arrangement.placement != Placement.COLOCATED or arrangement.base != Base.SWAPPED:
        return {}
    both = 1.0 if problem.adapter is not None else 2.0
    own = local_bytes(problem, arrangement.train.layout, problem.precision.base)
    sampler = local_bytes(problem, as_kept(arrangement.rollout.layout), problem.precision.sampler)
    return {"base": (both * own + sampler) / (problem.cluster.gpu.pcie * efficiency.pcie)}


def local_bytes(problem: Problem, layout: Layout, dtype: DType) -> float:
    """Base weights of the fullest rank."""
    stages = (stage_elements(problem.config, None, layout, stage) for stage in range(layout.pipeline))
    return max(weight_bytes(elements, dtype, layout.shard) for elements in stages)
