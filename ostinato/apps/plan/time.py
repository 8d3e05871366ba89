"""Seconds of an RL step by phase and term: a roofline of every part, with an efficiency where it is known.

    products, experts, head   FLOPs of ``model.flops`` over the peak of the dtype, or the weights' bytes over
                              the memory's bandwidth, whichever is longer, of the parts that a rank keeps
    messages                  bytes of ``plan.traffic`` over the link that a group shares, and a latency
    bubble                    the time of a pass through the stages that other microbatches do not fill
    decode                    every step reads weights, caches of the running sequences, and adapters;
                              as many steps as the longest answers take (``plan.sampling``)

Only what our code overlaps does so here: messages wait for products and products for messages (exposed
seconds add up); the stages of a pipeline work side by side, and so do, with a lag, trainer and sampler on
GPUs of their own. A straggling expert rank holds up the others in every layer, so expert products and
exchanges are multiplied by max over mean load. Microbatches are assumed to be alike, as packing makes them.
Rows below are those of a microbatch of a data rank, over its context and tensor ranks together.
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
from ostinato.model.flops import LayerRates, Part, Rates, compute_layer_rates
from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.elements import gradient_sums, is_moe, layer_elements, stage_elements, table_size
from ostinato.parallel.gpus import find_peak
from ostinato.parallel.layout import Layout
from ostinato.parallel.load import expected_straggler
from ostinato.parallel.memory import DType, weight_bytes

AXIS_TERMS = {"t": "tensor", "c": "context", "e": "expert exchange", "f": "weight gather", "p": "pipeline"}
HEAD_SWEEPS = 6.0  # times that a chunk of logits is read or written, in fp32
OPTIMIZER_BYTES = 28.0  # read and written per value by AdamW: weight, both moments, and the gradient read
# Relative standard deviations of a phase's seconds, from efficiencies that have not been measured.
SPREAD: Mapping[str, float] = MappingProxyType(
    {"train": 0.20, "logprobs": 0.20, "rollout": 0.25, "refit": 0.5, "switch": 0.4}
)

Terms = defaultdict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Implements ``problem.Clock``. ``factors``, from ``plan.fit``, multiply the seconds of a phase."""

    efficiency: Efficiency = field(default_factory=Efficiency)
    factors: Mapping[str, float] = field(default_factory=dict)

    def phase(self, problem: Problem, phase: Phase, setup: Setup) -> Mapping[str, float]:
        """Return the exposed seconds of a phase of an RL step by term; empty where the phase has nothing to
        do (in the first of its optimizer steps our trainer is its own old policy, so a single update needs no
        forward for old log-probabilities)."""
        if phase == Phase.ROLLOUT:
            terms = rollout_seconds(problem, setup, self.efficiency)
        else:
            terms = train_seconds(problem, setup, self.efficiency, backward=phase == Phase.TRAIN)
        return self._scale(phase, terms)

    def step(self, problem: Problem, arrangement: Arrangement) -> Times:
        """Return the seconds of a whole RL step."""
        terms = {phase.value: self.phase(problem, phase, arrangement.setup(phase)) for phase in Phase}
        terms["refit"] = self._scale("refit", refit_seconds(problem, arrangement, self.efficiency))
        terms["switch"] = self._scale("switch", switch_seconds(problem, arrangement, self.efficiency))
        sums = {name: sum(parts.values()) for name, parts in terms.items()}
        overlap = 0.0
        if arrangement.placement == Placement.APART and arrangement.lag > 0:
            overlap = min(sums["rollout"], sums["train"] + sums["logprobs"])
        total = sum(sums.values()) or 1.0
        spread = math.sqrt(sum((SPREAD.get(name, 0.3) * s) ** 2 for name, s in sums.items())) / total
        return Times(terms=terms, low=1 / (1 + spread), high=1 + spread, overlapped=overlap)

    def _scale(self, phase: str, terms: Mapping[str, float]) -> dict[str, float]:
        factor = self.factors.get(phase, 1.0)
        return {term: s * factor for term, s in terms.items() if s}


# ---- the trainer: forward and backward of microbatches through the stages, then an update


@lru_cache(maxsize=32)
def kinds_of(
    config: ModelConfig, adapter: AdapterSpec | None
) -> tuple[tuple[tuple[bool, LayerRates], ...], tuple[int, ...]]:
    """Return ((whether it is a mixture, FLOPs) of every kind of layer, the kind of every layer)."""
    kinds: list[tuple[bool, LayerRates]] = []
    places: list[int] = []
    for layer, rates in enumerate(compute_layer_rates(config, adapter)):
        kind = (is_moe(config, layer), rates)
        if kind not in kinds:
            kinds.append(kind)
        places.append(kinds.index(kind))
    return tuple(kinds), tuple(places)


@lru_cache(maxsize=1024)
def pairs_of(work: Work) -> float:
    """Return the (query, key) pairs of a forward over the whole batch."""
    prompts = work.prompts if work.prompt_once else work.num_answers
    squares = sum(n * n for n in work.answers) / len(work.answers)
    answer = (squares + work.mean_answer) / 2 + work.mean_answer * work.prompt_tokens
    return work.num_answers * answer + prompts * work.prompt_tokens * (work.prompt_tokens + 1) / 2


def train_seconds(
    problem: Problem, setup: Setup, efficiency: Efficiency, *, backward: bool = True
) -> dict[str, float]:
    """Return the seconds of all optimizer steps of an RL step by term; without ``backward``, of the forwards
    that score all but the first minibatch by the old policy."""
    work = problem.work
    steps = work.updates if backward else work.updates - 1
    if not steps:
        return {}
    num_microbatches = microbatches(problem, setup) if setup.microbatch else 1
    share = 1 / (work.updates * setup.layout.data * num_microbatches)
    price = _MicrobatchPrice(
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
    terms = _make_terms({term: s * num_microbatches for term, s in stages[slowest].items()})
    bubble = (sum(sums) - sums[slowest]) / setup.layout.virtual
    if bubble:
        terms["bubble"] = bubble
    if backward:
        _add_terms(terms, price.update(slowest))
    return {term: s * steps for term, s in terms.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _MicrobatchPrice:
    """Seconds of the work of a rank for a microbatch of a data rank."""

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
        return find_peak(self.problem.cluster.gpu, self.problem.precision.compute)

    def stages(self, backward: bool) -> list[Terms]:
        """Return the terms of every stage for a microbatch."""
        layout, config = self.setup.layout, self.problem.config
        talk = talk_of(self.problem, self.setup)
        kinds, places = kinds_of(config, self.problem.adapter)
        layer_terms = [self.layer(talk, moe, rates, backward) for moe, rates in kinds]
        stages = [_make_terms() for _ in range(layout.pipeline)]
        pass_seconds = (1 + backward) * self.wires.seconds(talk.pass_on(self.rows))
        for chunk, layers in enumerate(layout.chunk_layers(config.num_layers)):
            stage = stages[chunk % layout.pipeline]
            for kind, count in Counter(places[layer] for layer in layers).items():
                _add_terms(stage, layer_terms[kind], count)
            if layout.pipeline > 1:
                stage["pipeline"] += pass_seconds
        stages[0]["tensor"] += self.wires.seconds(talk.embed(self.rows))
        _add_terms(stages[-1], self.head(talk, backward))
        return stages

    def layer(self, talk: Talk, moe: bool, rates: LayerRates, backward: bool) -> Terms:
        terms = self.run(moe, rates.forward, 1.0)
        self.say(terms, talk.layer(self.rows, moe=moe))
        if not backward or not rates.needs_gradient:
            return terms
        if self.setup.recompute:
            _add_terms(terms, dict(terms))  # the forward again, with its messages
        _add_terms(terms, self.run(moe, rates.backward, 2.0))
        self.say(terms, talk.layer(self.rows, moe=moe, backward=True))
        return terms

    def run(self, moe: bool, rates: Mapping[Part, Rates], sweeps: float) -> Terms:
        """Return products and elementwise work of a pass through a layer, forward or backward."""
        problem, layout, e = self.problem, self.setup.layout, self.efficiency
        config, mixture = problem.config, problem.config.moe if moe else None
        rows, tensor = self.rows / layout.context, layout.tensor
        flops = {part: rates.get(part, Rates()).tokens * rows for part in Part}
        routed = 0.0  # an expert layer's FLOPs without its router and shared experts
        width = config.intermediate_size
        if mixture is not None:
            products = 3 * mixture.intermediate_size * mixture.top_k
            other_values = mixture.num_experts + 3 * mixture.shared_intermediate_size
            routed = flops[Part.EXPERTS] * products / (products + other_values)
            width = mixture.top_k * mixture.intermediate_size + mixture.shared_intermediate_size
        dense = flops[Part.ATTENTION] + flops[Part.MLP] + flops[Part.EXPERTS] - routed
        passes = sweeps if problem.adapter is None else 1.0  # no gradient of frozen weights is computed
        replicated_flops = replicated(config) * (flops[Part.ATTENTION] > 0) * rows * passes
        rank_flops = (
            dense / tensor + replicated_flops * (1 - 1 / tensor) + flops[Part.LORA] * (1 + 1 / tensor) / 2
        )
        elements, size = layer_elements(config, None, layout, moe=moe), problem.precision.base.num_bytes
        weights = (elements.matrices + elements.routers + elements.vectors) * size
        pairs = rates.get(Part.ATTENTION, Rates()).pairs * self.pairs / (layout.context * tensor)
        values = e.sweeps * config.hidden_size + 5.0 * width  # of elementwise work, forward
        terms = _make_terms(
            {
                "products": max(rank_flops / (self.speed * e.products), weights / self.hbm),
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
        launch_seconds = sweeps * e.layer - sum(terms.values()) * e.ahead
        if launch_seconds > 0:
            terms["launch"] = launch_seconds
        return terms

    def say(self, terms: Terms, traffic: Traffic) -> None:
        """Add messages to terms. The seconds that stragglers add to exchanges are a term of their own."""
        for (operation, axis), message in traffic.items():
            seconds = self.wires.seconds({(operation, axis): message})
            terms[AXIS_TERMS[axis]] += seconds
            if axis == "e":
                terms["imbalance"] += (straggler(self.problem.config, self.setup.layout) - 1) * seconds

    def head(self, talk: Talk, backward: bool) -> Terms:
        """Return the terms of a microbatch's log-probabilities, on the last stage."""
        problem, layout = self.problem, self.setup.layout
        config, rows = problem.config, self.targets / layout.context
        products = 1.0 if not backward else 2.0 if problem.adapter is not None else 4.0
        flops = 2.0 * config.vocab_size * config.hidden_size * rows / layout.tensor * products
        values = rows * config.vocab_size / layout.tensor
        weights = table_size(config, layout) * problem.precision.base.num_bytes * (not config.tie_embeddings)
        terms = _make_terms(
            {
                "head": max(flops / (self.speed * self.efficiency.products), weights * products / self.hbm)
                + HEAD_SWEEPS * 4 * values / self.hbm
            }
        )
        terms["tensor"] += self.wires.seconds(talk.head(self.rows, self.targets, backward=backward))
        return terms

    def update(self, stage: int) -> Terms:
        """Return the terms of a stage's sums of gradients and its optimizer."""
        problem, layout = self.problem, self.setup.layout
        values = gradient_sums(problem.config, problem.adapter, layout, stage).total()
        return _make_terms(
            {
                "gradients": self.wires.seconds(talk_of(problem, self.setup).update(stage)),
                "optimizer": values * OPTIMIZER_BYTES / self.hbm,
            }
        )


def _make_terms(terms: Mapping[str, float] | None = None) -> Terms:
    return defaultdict(float, terms or {})


def _add_terms(sums: Terms, terms: Mapping[str, float], times: float = 1.0) -> None:
    for term, seconds in terms.items():
        sums[term] += times * seconds


def straggler(config: ModelConfig, layout: Layout) -> float:
    """Return the expected ratio of max and mean load of expert ranks."""
    return expected_straggler(config.moe.num_experts, layout.expert).mean if config.moe else 1.0


@lru_cache(maxsize=32)
def replicated(config: ModelConfig) -> float:
    """The FLOPs per row that every tensor rank repeats: down-projections to latents, which are not cut."""
    mla = config.mla
    if mla is None:
        return 0.0
    return 2.0 * config.hidden_size * ((mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.rope_head_dim)


def talk_of(problem: Problem, setup: Setup) -> Talk:
    """Return the traffic model of a trainer."""
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
    """Return what a rank of a stage of the trainer sends in an RL step, in training and for old
    log-probabilities of all but the first optimizer step. Publishes, checkpoints and measurements are not
    counted."""
    work, parts = problem.work, list[Traffic]()
    for phase, steps in ((Phase.TRAIN, work.updates), (Phase.LOGPROBS, work.updates - 1)):
        setup, backward = arrangement.setup(phase), phase == Phase.TRAIN
        talk, number = talk_of(problem, setup), microbatches(problem, setup)
        share = 1 / (work.updates * setup.layout.data * number)
        microbatch_traffic = talk.microbatch(
            work.rows * share,
            work.trained_tokens * share,
            stage=stage,
            backward=backward,
            recompute=setup.recompute,
        )
        rows, targets = work.rows / work.updates, work.trained_tokens / work.updates
        scores = talk.scores(rows, targets, backward=backward)
        update = talk.update(stage) if backward else {}
        parts.append(added([added([microbatch_traffic], number), scores, update], steps))
    return {key: message for key, message in added(parts).items() if message.bytes}


# ---- between trainer and sampler


def refit_bytes(problem: Problem, arrangement: Arrangement) -> float:
    """The bytes that a publish moves to all replicas of the sampler together: the whole logical adapters in
    the compute dtype; in full-parameter training the weights. 0 where both are the same tensors."""
    values = gradient_sums(problem.config, problem.adapter, Layout(), 0).total()
    if problem.adapter is not None:
        return values * problem.precision.compute.num_bytes
    is_same = arrangement.train.layout == arrangement.rollout.layout and arrangement.base == Base.SHARED
    is_colocated = arrangement.placement == Placement.COLOCATED
    return 0.0 if is_same and is_colocated else values * problem.precision.sampler.num_bytes


def refit_seconds(problem: Problem, arrangement: Arrangement, efficiency: Efficiency) -> dict[str, float]:
    """Return the seconds of gather and broadcast. Adapters are gathered at the first rank (their tensors are
    logical: any sampler layout can cut them) and sent down a chain; full weights go from every rank to every
    rank at once."""
    size, cluster = refit_bytes(problem, arrangement), problem.cluster
    if not size:
        return {}
    nodes = -(-arrangement.num_gpus // cluster.per_node)
    pace = (cluster.gpu.nic if nodes > 1 else cluster.gpu.link) * efficiency.network
    if problem.adapter is not None:
        is_alone = arrangement.train.layout.world == 1
        return {"gather": 0.0 if is_alone else size / pace, "broadcast": size / pace}
    share = local_bytes(problem, as_kept(arrangement.rollout.layout), problem.precision.sampler)
    return {"reshard": share / pace}


def switch_seconds(problem: Problem, arrangement: Arrangement, efficiency: Efficiency) -> dict[str, float]:
    """The seconds of swaps between host and devices in a step. Frozen weights are fetched, never put back."""
    if arrangement.placement != Placement.COLOCATED or arrangement.base != Base.SWAPPED:
        return {}
    directions = 1.0 if problem.adapter is not None else 2.0
    trainer_bytes = local_bytes(problem, arrangement.train.layout, problem.precision.base)
    sampler_bytes = local_bytes(problem, as_kept(arrangement.rollout.layout), problem.precision.sampler)
    return {
        "base": (directions * trainer_bytes + sampler_bytes) / (problem.cluster.gpu.pcie * efficiency.pcie)
    }


def local_bytes(problem: Problem, layout: Layout, dtype: DType) -> float:
    """Return the bytes of base weights on the fullest rank."""
    stages = (stage_elements(problem.config, None, layout, stage) for stage in range(layout.pipeline))
    return max(weight_bytes(elements, dtype, layout.shard) for elements in stages)
