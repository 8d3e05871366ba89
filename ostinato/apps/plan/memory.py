"""Bytes of the fullest GPU by term, for each phase of an RL step, and of host memory.

Weights, adapters, gradients and optimizer are exact (``plan.parts``). Activations follow what our trainer
keeps (``plan.activations``) and how many microbatches of a stage are in flight (``parallel.schedule``). The
old log-probabilities run the training forward with gradients on (``train/trainer.py``), so they keep as much
for one microbatch.

A term that an estimate makes says so: "working set" (what lives only while one layer or the head runs),
"dispatch", "KV cache" (of sequences in flight on average), "context", "fragmentation".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from ostinato.apps.plan import parts
from ostinato.apps.plan.activations import CHUNK, FP32, Rows, boundary, ends, once, saved, slots_of
from ostinato.apps.plan.counts import kv_values
from ostinato.apps.plan.engines import LOCAL, as_kept
from ostinato.apps.plan.imbalance import distinct_ranks, straggler
from ostinato.apps.plan.parts import Elements
from ostinato.apps.plan.problem import (
    Arrangement,
    Base,
    DType,
    Memory,
    Phase,
    Placement,
    Problem,
    Recompute,
    Setup,
    Work,
)
from ostinato.parallel.schedule import Schedule, in_flight

DYNAMIC = ("activations", "working set", "dispatch", "pipeline buffers", "prefill", "adapter copies")
_PLAIN = (DType.FP32, DType.BF16)


def weight_bytes(elements: Elements, dtype: DType, shard: int = 1) -> float:
    """Of base weights in ``dtype``; routers, norms, embedding and head are never quantised."""
    plain = (dtype if dtype in _PLAIN else DType.BF16).num_bytes
    cut = (elements.matrices * dtype.num_bytes + elements.routers * plain) / shard
    rest = (elements.ends + elements.vectors) * plain + elements.untrained * FP32
    return cut + elements.experts * dtype.num_bytes + rest


def trained_elements(problem: Problem, elements: Elements, shard: int) -> float:
    """Values that a rank updates."""
    if problem.adapter is not None:
        return elements.adapters
    return elements.trainable - (elements.matrices + elements.routers) * (1 - 1 / shard)


def state_terms(problem: Problem, elements: Elements, setup: Setup) -> dict[str, float]:
    """Bytes by term of weights, gradients and optimizer of one rank."""
    precision, shard = problem.precision, setup.layout.shard
    trained = trained_elements(problem, elements, shard)
    gradients, moments = trained * precision.gradient.num_bytes, 2 * trained * precision.moments.num_bytes
    terms = {"base weights": weight_bytes(elements, precision.base, shard)}
    master = trained * precision.master.num_bytes
    if problem.adapter is None and precision.base == precision.master:
        master = 0.0  # the weights themselves
    names = (
        ("adapters", "gradients", "optimizer") if problem.adapter else ("master", "gradients", "optimizer")
    )
    held = (master, gradients, moments)
    return terms | {name: size for name, size in zip(names, held, strict=True) if size}


def microbatches(problem: Problem, setup: Setup) -> int:
    """Of one data rank in one optimizer step."""
    work = problem.work
    return max(1, math.ceil(work.rows / work.updates / setup.layout.data / setup.microbatch))


def rows_of(problem: Problem, setup: Setup) -> Rows:
    """Of one microbatch on one rank, that of the fullest experts (95 % of steps)."""
    layout, moe, total = setup.layout, problem.config.moe, float(setup.microbatch)
    own = total / layout.row_shards
    received = own if layout.expert_tensor == 1 else total / layout.context
    copies = 0.0
    if moe is not None:
        uneven = straggler(moe.num_experts, layout.expert).high
        copies = received * moe.top_k * uneven
        if layout.expert > 1:
            received *= distinct_ranks(moe.num_experts, moe.top_k, layout.expert) * uneven
    share = min(1.0, problem.work.trained_tokens / problem.work.rows)
    return Rows(
        slice=total / layout.context,
        own=own,
        received=received,
        copies=copies,
        loss=total / layout.context * share,
        tensor=layout.tensor,
        context=layout.context,
        expert=layout.expert,
    )


def kept_by_layer(problem: Problem, setup: Setup, rows: Rows, *, moe: bool) -> float:
    """Bytes that one layer of a kind keeps of one microbatch, not recomputed."""
    layer = parts.layer_of(problem.config, moe=moe)
    if layer is None:
        return 0.0
    slots = slots_of(problem.config, problem.adapter, layer)
    return saved(parts.local(problem.config, setup.layout), slots, rows, problem.precision.compute, moe=moe)


def kinds_kept(problem: Problem, setup: Setup) -> dict[bool, float]:
    """``kept_by_layer`` of dense layers (False) and of expert layers (True)."""
    rows = rows_of(problem, setup)
    return {moe: kept_by_layer(problem, setup, rows, moe=moe) for moe in (False, True)}


def trainer_terms(
    problem: Problem, phase: Phase, setup: Setup, stage: int, kept: Mapping[bool, float] | None = None
) -> dict[str, float]:
    """Bytes by term of a rank of ``stage`` while it trains or scores old log-probabilities.
    ``kept``: ``kinds_kept``, which is the same for all stages."""
    layout, config = setup.layout, problem.config
    elements = parts.stage_elements(config, problem.adapter, layout, stage)
    terms = state_terms(problem, elements, setup)
    rows, compute = rows_of(problem, setup), problem.precision.compute
    kinds = kept or kinds_kept(problem, setup)
    chunks = parts.chunk_layers(config, layout, stage)
    flying = _flying(problem, phase, setup, stage)
    edge = boundary(config, rows, compute)
    again = setup.recompute == Recompute.FULL

    def held(layers: tuple[int, ...]) -> float:
        return sum(edge if again else kinds[parts.is_moe(config, layer)] for layer in layers)

    first, last = stage == 0, stage == layout.pipeline - 1
    beside = ends(config, rows, compute, first=first, last=last, full=problem.adapter is None)
    terms["activations"] = flying * (max(map(held, chunks)) + once(config, rows, compute) + max(beside, 0.0))
    if problem.adapter is not None:
        terms["adapter copies"] = flying * elements.copies / len(chunks) * compute.num_bytes
    terms["working set"] = _working_set(problem, phase, setup, stage, rows, kinds)
    if layout.shard > 1:
        present = {parts.is_moe(config, layer) for layer in chunks[0]}
        gathered = [_gathered(problem, setup, moe) for moe in present]
        terms["gathered weights"] = 2 * max(
            gathered
        )  # one layer at a time, and once more while it is put together
    if layout.expert > 1:
        sent = rows.received / straggler(config.moe.num_experts, layout.expert).high  # type: ignore[union-attr]
        terms["dispatch"] = 2 * (sent + rows.received) * config.hidden_size * compute.num_bytes
    if layout.pipeline > 1:
        tensors = 5 if layout.virtual == 1 else 8  # received and not used yet, sent and not confirmed
        terms["pipeline buffers"] = tensors * rows.own * config.hidden_size * compute.num_bytes
    return terms


def _flying(problem: Problem, phase: Phase, setup: Setup, stage: int) -> int:
    """(chunk, microbatch) pairs in flight on a stage."""
    layout = setup.layout
    name = Schedule.FORWARD if phase == Phase.LOGPROBS else Schedule.training(layout.virtual)
    return in_flight(
        name, rank=stage, ranks=layout.pipeline, virtual=layout.virtual, parts=microbatches(problem, setup)
    )


def _gathered(problem: Problem, setup: Setup, moe: bool) -> float:
    """Bytes of the matrices of one layer, whole: FSDP leaves routed experts alone."""
    elements = parts.layer_elements(problem.config, problem.adapter, setup.layout, moe=moe)
    return (elements.matrices + elements.routers) * problem.precision.compute.num_bytes


def _working_set(
    problem: Problem, phase: Phase, setup: Setup, stage: int, rows: Rows, kinds: Mapping[bool, float]
) -> float:
    """The larger of the head's logits with slopes, and of a layer's backward beside slopes."""
    config, compute = problem.config, problem.precision.compute.num_bytes
    last = stage == setup.layout.pipeline - 1
    slopes = rows.loss * config.hidden_size * FP32 * last
    vocabulary = config.vocab_size / setup.layout.tensor
    logits = (2 if problem.adapter is not None else 5) * CHUNK * vocabulary * FP32 * last
    if phase == Phase.LOGPROBS:
        return logits
    layers = [layer for chunk in parts.chunk_layers(config, setup.layout, stage) for layer in chunk]
    present = {parts.is_moe(config, layer) for layer in layers}
    again = setup.recompute == Recompute.FULL
    layer = max(_backward(problem, setup, rows, moe) + (kinds[moe] if again else 0.0) for moe in present)
    return max(logits + 2 * slopes, slopes + layer) + rows.loss * config.hidden_size * compute * last


def _backward(problem: Problem, setup: Setup, rows: Rows, moe: bool) -> float:
    """What the backward of one layer makes and frees: gradients of the largest tensors at a time."""
    c, b = parts.local(problem.config, setup.layout), problem.precision.compute.num_bytes
    values = c.num_heads * (c.head_dim + c.v_head_dim) + c.num_kv_heads * (c.head_dim + c.v_head_dim)
    attention = rows.slice * (values * (FP32 + b) + c.hidden_size * b)
    if moe and c.moe is not None:
        wide = rows.copies * (2 * c.hidden_size + 3 * c.moe.intermediate_size) + rows.received * c.hidden_size
        width = c.moe.shared_intermediate_size
    else:
        wide, width = 0.0, c.intermediate_size
    mlp = wide + rows.slice * (3 * width + c.hidden_size)
    return max(attention, mlp * b) + 2 * rows.own * c.hidden_size * b


def trainer_memory(problem: Problem, phase: Phase, setup: Setup) -> Memory:
    """Of the fullest stage, without whatever a colocated sampler keeps."""
    found, kept = [], kinds_kept(problem, setup)
    for stage in _stages(setup.layout.pipeline):
        terms = trainer_terms(problem, phase, setup, stage, kept)
        found.append((sum(terms.values()), terms, stage))
    _, terms, stage = max(found, key=lambda one: one[0])
    return _reserved(problem, Memory(terms=terms, stage=stage))


def _stages(pipeline: int) -> tuple[int, ...]:
    """Of many stages those that may be fullest: the first ones (embedding, dense layers, most in flight) and
    the last one (head)."""
    return tuple(range(pipeline)) if pipeline <= 8 else (*range(5), pipeline - 1)


def _reserved(problem: Problem, memory: Memory) -> Memory:
    """With what no formula of the model gives."""
    dynamic = sum(
        size for name, size in memory.terms.items() if name in DYNAMIC or name == "gathered weights"
    )
    reserve = {"context": problem.context, "fragmentation": problem.reserve.fragmentation * dynamic}
    return Memory(terms={**memory.terms, **reserve}, stage=memory.stage, host=memory.host)


def sampler_weights(problem: Problem, setup: Setup) -> dict[str, float]:
    """Of a sampler: its weights, and adapters as its forward uses them."""
    layout = as_kept(setup.layout)
    elements = parts.stage_elements(problem.config, problem.adapter, layout, 0)
    terms = {"sampler weights": weight_bytes(elements, problem.precision.sampler)}
    if problem.adapter is not None:
        terms["sampler adapters"] = elements.copies * problem.precision.compute.num_bytes
    return terms


def sampler_workspace(problem: Problem, setup: Setup) -> float:
    """Bytes of a prefill pass and of the logits of all sequences."""
    c, t, b = (
        parts.local(problem.config, as_kept(setup.layout)),
        setup.layout.tensor,
        problem.precision.compute.num_bytes,
    )
    width = max(c.intermediate_size, c.num_heads * (c.head_dim + c.v_head_dim))
    if c.moe is not None:
        uneven = straggler(c.moe.num_experts, setup.layout.expert).high
        width = max(width, uneven * c.moe.top_k * (problem.config.hidden_size / t + c.moe.intermediate_size))
    rows = problem.sampler.prefill_rows * (3 * width + 4 * c.hidden_size) * b
    return rows + problem.sampler.sequences * problem.config.vocab_size / t * FP32 * 2


def kv_bytes(problem: Problem, setup: Setup) -> float:
    """Of one token on one GPU. Latents are not cut by t, heads are."""
    layout, sampler = setup.layout, problem.sampler
    values = float(kv_values(problem.config, latent=sampler.latent_kv))
    if problem.config.mla is None or not sampler.latent_kv:
        values /= layout.tensor
    return values * problem.precision.kv.num_bytes


@lru_cache(maxsize=1024)
def tokens_in_flight(work: Work, over: int = 1) -> float:
    """Cached tokens per sequence in decoding, on average: its share of the prompt, which answers of a group
    that are on one of ``over`` replicas have together, and of its answer what is there when most is (a batch
    that starts together) or, with others in turn, E[L^2] / (2 E[L])."""
    lengths = sorted(work.answers)
    number = len(lengths)
    together = max(length * (number - index) / number for index, length in enumerate(lengths))
    in_turn = sum(length * length for length in lengths) / (2 * sum(lengths))
    alike = min(work.group, max(1.0, work.num_answers / over)) if work.prompt_once else 1
    return work.prompt_tokens / alike + max(together, in_turn)


def sequences_for(problem: Problem, setup: Setup, free: float) -> int:
    """How many sequences one data rank decodes at once in ``free`` bytes of cache; 0 where the longest one
    that may occur does not fit."""
    each = kv_bytes(problem, setup)
    if free < each * problem.work.longest:
        return 0
    over = setup.layout.data
    needed = math.ceil(problem.work.num_answers / over)
    fitting = int(free / (each * tokens_in_flight(problem.work, over)))
    return min(problem.sampler.sequences, needed, fitting)


def cache_bytes(problem: Problem, setup: Setup) -> float:
    """Of ``setup.sequences``, at least one of the longest."""
    each = tokens_in_flight(problem.work, setup.layout.data)
    tokens = max(setup.sequences * each, problem.work.longest)
    return tokens * kv_bytes(problem, setup)


def sampler_memory(problem: Problem, setup: Setup, *, shared: float = 0.0) -> Memory:
    """Of a sampler alone; ``shared``: bytes of the trainer's base that it reads instead of its own."""
    terms = sampler_weights(problem, setup)
    if shared:
        terms["sampler weights"] = 0.0
        terms = {"base weights": shared, **terms}
    terms |= {"KV cache": cache_bytes(problem, setup), "prefill": sampler_workspace(problem, setup)}
    return _reserved(problem, Memory(terms={name: size for name, size in terms.items() if size}))


def shares_base(problem: Problem, train: Setup, rollout: Setup) -> str:
    """Why trainer and sampler cannot read one copy of the base; empty where they can.

    By the tensors they can where every GPU of the sampler needs a part of what the trainer keeps there, in an
    engine that reads those of others. Which one does is another question (``mapped``).
    """
    a, b, precision = train.layout, as_kept(rollout.layout), problem.precision
    if problem.adapter is None:
        return "all weights are trained"
    if precision.base != precision.sampler:
        return f"the base is {precision.base}, the sampler's weights are {precision.sampler}"
    if a.world != b.world:
        return f"{a.world} ranks train, {b.world} sample"
    if a.pipeline > 1:
        return "a stage of the trainer has only some of the layers"
    if a.shard > 1:
        return "the trainer's weights lie in pieces (f)"
    if a.tensor not in (1, b.tensor):
        return f"weights are cut by t{a.tensor} and t{b.tensor}"
    if problem.config.moe is not None and (a.expert, a.expert_tensor) != (b.expert, b.expert_tensor):
        return f"experts are cut by e{a.expert}x{a.expert_tensor} and e{b.expert}x{b.expert_tensor}"
    return ""


def mapped(problem: Problem, train: Setup, rollout: Setup) -> bool:
    """Does Ostinato hold one copy for both? Its own engine does, in the process that trains; vLLM keeps its
    own weights."""
    one_process = train.layout.world == rollout.layout.world == 1
    return problem.sampler.name == LOCAL and one_process and not shares_base(problem, train, rollout)


def memory(problem: Problem, arrangement: Arrangement, phase: Phase, trained: Memory | None = None) -> Memory:
    """Of the fullest GPU that takes part in ``phase``. ``trained``: ``trainer_memory`` of TRAIN, if known."""
    setup, colocated = arrangement.setup(phase), arrangement.placement == Placement.COLOCATED
    each = problem.cluster.per_node
    if phase != Phase.ROLLOUT:
        known = trained if phase == Phase.TRAIN else None
        found = known or trainer_memory(problem, phase, setup)
        extra = sampler_weights(problem, arrangement.rollout) if colocated else {}
        host = 0.0
        if arrangement.base == Base.SWAPPED:
            host = each * (extra.pop("sampler weights", 0.0) + found.terms["base weights"])
        elif arrangement.base == Base.SHARED:
            extra.pop("sampler weights", None)
        return Memory(terms={**found.terms, **extra}, stage=found.stage, host=host)
    if not colocated:
        return sampler_memory(problem, setup)
    train = arrangement.train
    stages = [trainer_rest(problem, train, stage) for stage in _stages(train.layout.pipeline)]
    rest = max(stages, key=lambda terms: sum(terms.values()))
    base = rest.pop("base weights")
    found = sampler_memory(problem, setup, shared=base if arrangement.base == Base.SHARED else 0.0)
    kept = {f"trainer's {name}": size for name, size in rest.items()}
    if arrangement.base == Base.TWO:
        kept["trainer's base weights"] = base
    host = 0.0
    if arrangement.base == Base.SWAPPED:  # both stay in host memory: what is frozen need not be written back
        host = each * (base + found.terms["sampler weights"])
    return Memory(terms={**found.terms, **kept}, host=host)


def trainer_rest(problem: Problem, train: Setup, stage: int) -> dict[str, float]:
    """What the trainer holds while it does not run: weights, adapters, optimizer; no gradients."""
    elements = parts.stage_elements(problem.config, problem.adapter, train.layout, stage)
    terms = state_terms(problem, elements, train)
    terms.pop("gradients", None)
    return terms


def limit(problem: Problem) -> float:
    """Bytes of one GPU."""
    return problem.cluster.gpu.memory


def margin(problem: Problem, found: Memory) -> float:
    """Bytes of one GPU that are left; below 0 it does not fit."""
    return limit(problem) - found.total


def host_margin(problem: Problem, found: Memory) -> float:
    """Bytes of a node's memory that are left."""
    return problem.cluster.host_memory * problem.cluster.usable_host - found.host
