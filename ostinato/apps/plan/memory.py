"""Bytes of the fullest GPU by term, for each phase of an RL step, and of host memory.

The trainer's are those of ``parallel.memory``. The sampler's weights are exact; "KV cache" (of sequences in
flight on average), "prefill" and "context" are estimates.
"""

from __future__ import annotations

import math
from functools import lru_cache

from ostinato.apps.plan.layouts import LOCAL, as_kept
from ostinato.apps.plan.problem import Arrangement, Base, Memory, Phase, Placement, Problem, Setup, Work
from ostinato.model.config import ModelConfig
from ostinato.parallel.activations import FP32
from ostinato.parallel.elements import local, stage_elements
from ostinato.parallel.load import expected_straggler
from ostinato.parallel.memory import Training, fragmentation, weight_bytes


def microbatches(problem: Problem, setup: Setup) -> int:
    """Of one data rank in one optimizer step."""
    work = problem.work
    return max(1, math.ceil(work.rows / work.updates / setup.layout.data / max(1, setup.microbatch)))


def training(problem: Problem, setup: Setup) -> Training:
    """The trainer of a setup."""
    return Training(
        config=problem.config,
        adapter=problem.adapter,
        precision=problem.precision,
        layout=setup.layout,
        microbatch=setup.microbatch,
        recompute=setup.recompute,
        trained=min(1.0, problem.work.trained_tokens / problem.work.rows),
        microbatches=microbatches(problem, setup),
    )


def trainer_memory(problem: Problem, phase: Phase, setup: Setup) -> Memory:
    """Of the fullest stage, without whatever a colocated sampler keeps."""
    stage, terms = training(problem, setup).fullest(backward=phase == Phase.TRAIN)
    return Memory(terms={**terms, "context": problem.context}, stage=stage)


def trainer_rest(problem: Problem, train: Setup, stage: int) -> dict[str, float]:
    """What the trainer holds while it does not run: weights, adapters, optimizer; no gradients."""
    terms = training(problem, train).state(stage)
    return {name: size for name, size in terms.items() if name != "gradients"}


def sampler_weights(problem: Problem, setup: Setup) -> dict[str, float]:
    """Of a sampler: its weights, and adapters as its forward uses them."""
    elements = stage_elements(problem.config, problem.adapter, as_kept(setup.layout), 0)
    terms = {"sampler weights": weight_bytes(elements, problem.precision.sampler)}
    if problem.adapter is not None:
        terms["sampler adapters"] = elements.copies * problem.precision.compute.num_bytes
    return terms


def sampler_workspace(problem: Problem, setup: Setup) -> float:
    """Bytes of a prefill pass and of the logits of all sequences."""
    layout, sampler, hidden = setup.layout, problem.sampler, problem.config.hidden_size
    c, t = local(problem.config, as_kept(layout)), layout.tensor
    width = float(max(c.intermediate_size, c.num_heads * (c.head_dim + c.v_head_dim)))
    if c.moe is not None:
        uneven = expected_straggler(c.moe.num_experts, layout.expert).high
        width = max(width, uneven * c.moe.top_k * (hidden / t + c.moe.intermediate_size))
    rows = sampler.prefill_rows * (3 * width + 4 * hidden) * problem.precision.compute.num_bytes
    return rows + sampler.sequences * problem.config.vocab_size / t * FP32 * 2


def kv_values(config: ModelConfig, *, latent: bool) -> int:
    """Numbers that the cache keeps per token, over all layers; times bytes of its dtype.

    ``latent``: MLA caches its latent and the one rotary key (arXiv 2405.04434 section 2.1.2, as vLLM does);
    otherwise keys and values of all heads, as our own engine does.
    """
    if config.mla is not None and latent:
        return config.num_layers * (config.mla.kv_lora_rank + config.mla.rope_head_dim)
    return config.num_layers * config.num_kv_heads * (config.head_dim + config.v_head_dim)


def kv_bytes(problem: Problem, setup: Setup) -> float:
    """Of one token on one GPU. Latents are not cut by t, heads are."""
    latent = problem.sampler.latent_kv
    cut = 1 if problem.config.mla is not None and latent else setup.layout.tensor
    return kv_values(problem.config, latent=latent) / cut * problem.precision.kv.num_bytes


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
    each, over = kv_bytes(problem, setup), setup.layout.data
    if free < each * problem.work.longest:
        return 0
    fitting = int(free / (each * tokens_in_flight(problem.work, over)))
    return min(problem.sampler.sequences, math.ceil(problem.work.num_answers / over), fitting)


def cache_bytes(problem: Problem, setup: Setup) -> float:
    """Of ``setup.sequences``, at least one of the longest."""
    each = tokens_in_flight(problem.work, setup.layout.data)
    return max(setup.sequences * each, problem.work.longest) * kv_bytes(problem, setup)


def sampler_memory(problem: Problem, setup: Setup, *, shared: float = 0.0) -> Memory:
    """Of a sampler alone; ``shared``: bytes of the trainer's base that it reads instead of its own."""
    terms = sampler_weights(problem, setup)
    if shared:
        terms = {"base weights": shared, **terms, "sampler weights": 0.0}
    terms |= {"KV cache": cache_bytes(problem, setup), "prefill": sampler_workspace(problem, setup)}
    terms |= {"context": problem.context, "fragmentation": fragmentation(terms)}
    return Memory(terms={name: size for name, size in terms.items() if size})


def shares_base(problem: Problem, train: Setup, rollout: Setup) -> str:
    """Why trainer and sampler cannot read one copy of the base; empty where they can.

    By the tensors they can where every GPU of the sampler needs a part of what the trainer keeps there, in an
    engine that reads those of others. Which one does is another question (``maps_once``).
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


def maps_once(problem: Problem, train: Setup, rollout: Setup) -> bool:
    """Does Ostinato hold one copy for both? Its own engine does, in the process that trains; vLLM keeps its
    own weights."""
    one_process = train.layout.world == rollout.layout.world == 1
    return problem.sampler.name == LOCAL and one_process and not shares_base(problem, train, rollout)


def memory(problem: Problem, arrangement: Arrangement, phase: Phase, trained: Memory | None = None) -> Memory:
    """Of the fullest GPU that takes part in ``phase``. ``trained``: ``trainer_memory`` of TRAIN, if known."""
    setup, colocated = arrangement.setup(phase), arrangement.placement == Placement.COLOCATED
    each, base = problem.cluster.per_node, arrangement.base
    if phase != Phase.ROLLOUT:
        known = trained if phase == Phase.TRAIN else None
        own = known or trainer_memory(problem, phase, setup)
        extra = sampler_weights(problem, arrangement.rollout) if colocated else {}
        copy = extra.get("sampler weights", 0.0)
        if base != Base.TWO:
            extra.pop("sampler weights", None)
        host = each * (copy + own.terms["base weights"]) if base == Base.SWAPPED else 0.0
        return Memory(terms={**own.terms, **extra}, stage=own.stage, host=host)
    if not colocated:
        return sampler_memory(problem, setup)
    train = arrangement.train
    stages = [trainer_rest(problem, train, stage) for stage in training(problem, train).stages()]
    rest = max(stages, key=lambda terms: sum(terms.values()))
    weights = rest.pop("base weights")
    own = sampler_memory(problem, setup, shared=weights if base == Base.SHARED else 0.0)
    rest_terms = {f"trainer's {name}": size for name, size in rest.items()}
    if base == Base.TWO:
        rest_terms["trainer's base weights"] = weights
    # both stay in host memory: what is frozen need not be written back
    host = each * (weights + own.terms["sampler weights"]) if base == Base.SWAPPED else 0.0
    return Memory(terms={**own.terms, **rest_terms}, host=host)


def limit(problem: Problem) -> float:
    """Bytes of one GPU."""
    return problem.cluster.gpu.memory


def margin(problem: Problem, memory: Memory) -> float:
    """Bytes of one GPU that are left; below 0 it does not fit."""
    return limit(problem) - memory.total


def host_margin(problem: Problem, memory: Memory) -> float:
    """Bytes of a node's memory that are left."""
    return problem.cluster.host_memory * problem.cluster.usable_host - memory.host
