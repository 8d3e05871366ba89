"""Write a plan as the recipe that starts it. Each feature that Ostinato lacks is a comment.

Data, rewards and learning rates are the user's: a plan has none, and its recipe names them as comments.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from tomli_w import dumps

from ostinato.apps.plan.layouts import LOCAL, engine_layout, vllm_flags
from ostinato.apps.plan.memory import cache_bytes, maps_once
from ostinato.apps.plan.problem import Arrangement, Base, Placement, Problem
from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.layout import Layout
from ostinato.parallel.memory import DType

YOURS = """\
# Fill in what to learn; without it the run learns the built-in arithmetic:
# [task]
# source = "rows.jsonl"     # or a .parquet file, "hf:NAME", "gym:NAME"
# [reward]
# functions = ["exact"]     # compares with the column "answer"; or "rewards.py:function"
"""
COPIES = {DType.BF16: "bf16", DType.INT8: "int8", DType.FP8: "fp8"}  # engine.weights of the local engine


def ostinato(problem: Problem, arrangement: Arrangement) -> str:
    """Write a recipe's sections, with the command line that starts every rank of the trainer. Each part of
    the plan that Ostinato lacks is a comment, "not in Ostinato yet"."""
    base = f", base {arrangement.base}" if arrangement.placement == Placement.COLOCATED else ""
    train = arrangement.train
    lines = [f"trainer {train.layout}, sampler {arrangement.rollout.layout}, {arrangement.placement}{base}"]
    lines += [f"not in Ostinato yet: {lack}" for lack in list_lacks(problem, arrangement)]
    command = _write_torchrun(problem, train.layout) + " -m ostinato train plan.toml"
    return "\n".join(
        [*_wrap_comments(lines), f"# {command}", "", dumps(sections(problem, arrangement)), YOURS]
    )


def sections(problem: Problem, arrangement: Arrangement) -> dict[str, dict[str, object]]:
    """Return the sections of a recipe that the plan decides."""
    work, train = problem.work, arrangement.train
    dtype = "float32" if problem.precision.base == DType.FP32 else "bfloat16"
    recipe: dict[str, dict[str, object]] = {
        "model": {"path": problem.model.path, "dtype": dtype},
        "adapter": _make_adapter_section(problem.adapter),
        "rollout": {
            "prompts_per_step": work.prompts,
            "group_size": work.group,
            "max_tokens": work.max_answer,
        },
        "trainer": {
            "steps": work.steps,
            "minibatches": work.updates,
            "tokens_per_microbatch": max(1, train.microbatch),
            "recompute": train.recompute,
        },
        "engine": _make_engine_section(problem, arrangement),
        "parallel": {"layout": str(train.layout)},
    }
    if arrangement.lag:
        recipe["pipeline"] = {"overlap": True, "staleness": arrangement.lag}
    return recipe


def list_lacks(problem: Problem, arrangement: Arrangement) -> list[str]:
    """List the parts of the plan that Ostinato lacks."""
    return [*_list_trainer_lacks(problem, arrangement), *_list_engine_lacks(problem, arrangement)]


def _make_engine_section(problem: Problem, arrangement: Arrangement) -> dict[str, object]:
    """Return the section of a sampler."""
    rollout, local = arrangement.rollout, problem.sampler.name == LOCAL
    section: dict[str, object] = {
        "backend": problem.sampler.name,
        "max_batch": max(1, rollout.sequences),
        "kv_memory_mb": math.ceil(cache_bytes(problem, rollout) / 2**20),
    }
    if local:
        copy = _choose_copy(problem)
        return section | ({"weights": copy} if copy and problem.adapter else {})
    flags = vllm_flags(engine_layout(problem.config, rollout.layout)[0])
    flags += ["--quantization", "fp8"] if problem.precision.sampler == DType.FP8 else []
    return section | ({"server_args": flags} if flags else {})


def _choose_copy(problem: Problem) -> str:
    """Return ``engine.weights`` where the sampler's copy has another dtype than the trainer's; else ""."""
    trainer_dtype = DType.FP32 if problem.precision.base == DType.FP32 else DType.BF16
    return "" if problem.precision.sampler == trainer_dtype else COPIES.get(problem.precision.sampler, "")


def _list_trainer_lacks(problem: Problem, arrangement: Arrangement) -> list[str]:
    """List what the trainer lacks, by itself and together with the sampler."""
    precision, lacks = problem.precision, list[str]()
    if precision.base not in (DType.BF16, DType.FP32):
        lacks.append(f"a base in {precision.base}: the trainer holds it in bf16, in more memory than planned")
    if arrangement.placement == Placement.APART:
        flags = (
            " ".join(vllm_flags(engine_layout(problem.config, arrangement.rollout.layout)[0])) or "one rank"
        )
        fix = (
            "cluster.samplers and cluster.gpus_per_sampler give samplers their own"
            if problem.sampler.name == LOCAL
            else f"start vLLM there by hand ({flags}) and name it in engine.address alone"
        )
        ranks = arrangement.rollout.layout.world
        lacks.append(f"one command for trainer and sampler apart (the sampler has {ranks} GPUs): {fix}")
    elif arrangement.base == Base.SWAPPED:
        lacks.append("a base that waits in host memory: trainer and sampler both keep theirs on the GPUs")
    elif arrangement.base == Base.SHARED and not maps_once(problem, arrangement.train, arrangement.rollout):
        lacks.append("one copy of the base on GPUs for trainer and sampler: each keeps its own")
    return lacks


def _list_engine_lacks(problem: Problem, arrangement: Arrangement) -> list[str]:
    """List what the engine lacks."""
    spec, layout, lacks = problem.adapter, arrangement.rollout.layout, list[str]()
    sampler = problem.precision.sampler
    if problem.sampler.name == LOCAL:
        if layout.world > 1:
            lacks.append(f"{layout.world} samplers of our own beside one trainer: one process samples")
        copy = _choose_copy(problem)
        if sampler == DType.INT4 or (copy and spec is None):
            lacks.append(f"sampler weights in {sampler} beside this trainer: they are the trainer's own")
        return lacks
    server_layout, servers = engine_layout(problem.config, layout)
    if servers > 1:
        lacks.append(f"{servers} vLLM servers for one trainer: engine.server_args are those of one of them")
    if server_layout.world > problem.cluster.per_node:
        lacks.append(
            f"a vLLM server over hosts: start its {server_layout.world} ranks by hand, name engine.address"
        )
    if spec is None:
        lacks.append('all weights for vLLM (adapter.kind "full"): it is sent adapters, the run is refused')
    if sampler in (DType.INT8, DType.INT4):
        lacks.append(f"words for vLLM's weights in {sampler}: its flags belong into engine.server_args")
    return lacks


def _wrap_comments(sentences: Sequence[str]) -> list[str]:
    wrapper = textwrap.TextWrapper(width=100, subsequent_indent="#   ", break_on_hyphens=False)
    return [line for sentence in sentences for line in wrapper.wrap(f"# {sentence}")]


def _make_adapter_section(spec: AdapterSpec | None) -> dict[str, object]:
    if spec is None:
        return {"kind": "full"}
    section = {"kind": "lora", "rank": spec.rank, "alpha": spec.alpha, "targets": list(spec.targets)}
    return section | {"expert_scheme": str(spec.expert_scheme), "expert_rank": spec.expert_rank or 0}


def _write_torchrun(problem: Problem, layout: Layout) -> str:
    per_node = min(problem.cluster.per_node, layout.world)
    nodes = -(-layout.world // per_node)
    rendezvous = "--rdzv-backend c10d --rdzv-endpoint $HEAD:29500 " if nodes > 1 else ""
    return f"torchrun --nnodes {nodes} --nproc-per-node {per_node} {rendezvous}".rstrip()
