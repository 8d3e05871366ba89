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
from ostinato.parallel.memory import Training, estimate_fragmentation, weight_bytes


def microbatches(problem: Problem, setup: Setup) -> int:
    """Return the number of microbatches of a data rank in an optimizer step."""
    work = problem.work
    return max(1, math.ceil(work.rows / work.updates / setup.layout.data / max(1, setup.microbatch)))


def training(problem: Problem, setup: Setup) -> Training:
    """Return the trainer of a setup, for ``parallel.memory``."""
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
    """Return the memory of the fullest stage, without that of a colocated sampler."""
    stage, terms = training(problem, setup).fullest(backward=phase == Phase.TRAIN)
    return Memory(terms={**terms, "context": problem.context}, stage=stage)


def trainer_rest(problem: Problem, train: Setup, stage: int) -> dict[str, float]:
    """Return the trainer's bytes while it does not run: weights, adapters, optimizer; no gradients."""
    terms = training(problem, train).state(stage)
    return {name: size for name, size in terms.items() if name != "gradients"}


def sampler_weights(problem: Problem, setup: Setup) -> dict[str, float]:
    """Return the bytes of a sampler's weights, and of adapters in the form that its forward uses."""
    elements = stage_elements(problem.config, problem.adapter, as_kept(setup.layout), 0)
    terms = {"sampler weights": weight_bytes(elements, problem.precision.sampler)}
    if problem.adapter is not None:
        terms["sampler adapters"] = elements.copies * problem.precision.compute.num_bytes
    return terms


def sampler_workspace(problem: Problem, setup: Setup) -> float:
    """Return the bytes of a prefill pass and of the logits of all sequences."""
    layout, sampler, hidden = setup.layout, problem.sampler, problem.config.hidden_size
    c, t = local(problem.config, as_kept(layout)), layout.tensor
    width = float(max(c.intermediate_size, c.num_heads * (c.head_dim + c.v_head_dim)))
    if c.moe is not None:
        straggler = expected_straggler(c.moe.num_experts, layout.expert).high
        width = max(width, straggler * c.moe.top_k * (hidden / t + c.moe.intermediate_size))
    rows = sampler.prefill_rows * (3 * width + 4 * hidden) * problem.precision.compute.num_bytes
    return rows + sampler.sequences * problem.config.vocab_size / t * FP32 * 2


def kv_values(config: ModelConfig, *, latent: bool) -> int:
    """Return how many numbers the cache keeps per token, over all layers. Their bytes depend on its dtype.

    ``latent``: MLA caches its latent and the one rotary key (arXiv 2405.04434 section 2.1.2, as vLLM does);
    otherwise keys and values of all heads, as our own engine does.
    """
    if config.mla is not None and latent:
        return config.num_layers * (config.mla.kv_lora_rank + config.mla.rope_head_dim)
    return config.num_layers * config.num_kv_heads * (config.head_dim + config.v_head_dim)


def kv_bytes(problem: Problem, setup: Setup) -> float:
    """Return the cache bytes of a token on a GPU. Latents are not cut by t, heads are."""
    latent = problem.sampler.latent_kv
    num_cuts = 1 if problem.config.mla is not None and latent else setup.layout.tensor
    return kv_values(problem.config, latent=latent) / num_cuts * problem.precision.kv.num_bytes


@lru_cache(maxsize=1024)
def tokens_in_flight(work: Work, over: int = 1) -> float:
    """Return the mean cached tokens per sequence in decoding: its share of the prompt, which a group's
    answers on the same of ``over`` replicas have together, and a part of its answer. That part is the larger
    of the most that is cached at once where all answers start together, and E[L^2] / (2 E[L]), where answers
    follow each other."""
    lengths = sorted(work.answers)
    number = len(lengths)
    peak_tokens = max(length * (number - index) / number for index, length in enumerate(lengths))
    mean_tokens = sum(length * length for length in lengths) / (2 * sum(lengths))
    num_sharing = min(work.group, max(1.0, work.num_answers / over)) if work.prompt_once else 1
    return work.prompt_tokens / num_sharing + max(peak_tokens, mean_tokens)


def sequences_for(problem: Problem, setup: Setup, free: float) -> int:
    """Return how many sequences a data rank decodes at once in ``free`` bytes of cache; 0 where the longest
    sequence that may occur does not fit."""
    token_bytes, replicas = kv_bytes(problem, setup), setup.layout.data
    if free < token_bytes * problem.work.longest:
        return 0
    max_sequences = int(free / (token_bytes * tokens_in_flight(problem.work, replicas)))
    return min(problem.sampler.sequences, math.ceil(problem.work.num_answers / replicas), max_sequences)


def cache_bytes(problem: Problem, setup: Setup) -> float:
    """Return the cache bytes of ``setup.sequences``, or of a longest sequence if that is more."""
    sequence_tokens = tokens_in_flight(problem.work, setup.layout.data)
    return max(setup.sequences * sequence_tokens, problem.work.longest) * kv_bytes(problem, setup)


def sampler_memory(problem: Problem, setup: Setup, *, shared: float = 0.0) -> Memory:
    """Return the memory of a sampler alone; ``shared``: bytes of the trainer's base that it reads in place of
    its own weights."""
    terms = sampler_weights(problem, setup)
    if shared:
        terms = {"base weights": shared, **terms, "sampler weights": 0.0}
    terms |= {"KV cache": cache_bytes(problem, setup), "prefill": sampler_workspace(problem, setup)}
    terms |= {"context": problem.context, "fragmentation": estimate_fragmentation(terms)}
    return Memory(terms={name: size for name, size in terms.items() if size})


def shares_base(problem: Problem, train: Setup, rollout: Setup) -> str:
    """Return why trainer and sampler cannot read the same copy of the base; "" where they can.

    They can if every GPU of the sampler needs only tensors that the trainer keeps there, in an engine that
    reads the tensors of others. ``maps_once`` tells which engine does.
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
    """Return whether Ostinato holds one copy for both. Its own engine does, in the process that trains; vLLM
    keeps its own weights."""
    one_process = train.layout.world == rollout.layout.world == 1
    return problem.sampler.name == LOCAL and one_process and not shares_base(problem, train, rollout)


def memory(problem: Problem, arrangement: Arrangement, phase: Phase, trained: Memory | None = None) -> Memory:
    """The memory of the fullest GPU in ``phase``. ``trained``: ``trainer_memory`` of TRAIN, if known."""
    setup, is_colocated = arrangement.setup(phase), arrangement.placement == Placement.COLOCATED
    per_node, base = problem.cluster.per_node, arrangement.base
    if phase != Phase.ROLLOUT:
        known_memory = trained if phase == Phase.TRAIN else None
        own_memory = known_memory or trainer_memory(problem, phase, setup)
        extra = sampler_weights(problem, arrangement.rollout) if is_colocated else {}
        copy = extra.get("sampler weights", 0.0)
        if base != Base.TWO:
            extra.pop("sampler weights", None)
        host = per_node * (copy + own_memory.terms["base weights"]) if base == Base.SWAPPED else 0.0
        return Memory(terms={**own_memory.terms, **extra}, stage=own_memory.stage, host=host)
    if not is_colocated:
        return sampler_memory(problem, setup)
    train = arrangement.train
    stages = [trainer_rest(problem, train, stage) for stage in training(problem, train).stages()]
    state_terms = max(stages, key=lambda terms: sum(terms.values()))
    weights = state_terms.pop("base weights")
    own_memory = sampler_memory(problem, setup, shared=weights if base == Base.SHARED else 0.0)
    trainer_terms = {f"trainer's {name}": size for name, size in state_terms.items()}
    if base == Base.TWO:
        trainer_terms["trainer's base weights"] = weights
    # Both stay in host memory, as frozen weights need not be written back.
    host = per_node * (weights + own_memory.terms["sampler weights"]) if base == Base.SWAPPED else 0.0
    return Memory(terms={**own_memory.terms, **trainer_terms}, host=host)


def limit(problem: Problem) -> float:
    """Return the bytes of a GPU."""
    return problem.cluster.gpu.memory


def margin(problem: Problem, memory: Memory) -> float:
    """Return the bytes of a GPU that are left; below 0 the memory does not fit."""
    return limit(problem) - memory.total


def host_margin(problem: Problem, memory: Memory) -> float:
    """Return the bytes of a node's host memory that are left."""
    return problem.cluster.host_memory * problem.cluster.usable_host - memory.host
