"""A plan as the files that start it: ours, verl's Hydra overrides, Megatron-Bridge's fields.

Field names are those of the programs' public releases (verl 0.7, Megatron-Bridge 0.4). What a program cannot
express, Ostinato among them, is said in a comment of the file; nothing is left out silently. Data, rewards
and learning rates are the user's: a plan knows nothing of them.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence

from ostinato.model.config import ModelConfig
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.parallel.layout import Layout
from ostinato.plan.engines import LOCAL, engine_layout, vllm_flags
from ostinato.plan.memory import cache_bytes, mapped
from ostinato.plan.problem import Arrangement, Base, DType, Placement, Problem, Recompute, Setup
from ostinato.toml import dumps

ROUTES = "--enable-return-routed-experts"  # without it vLLM tells no experts to replay
COPIES = {DType.BF16: "bf16", DType.INT8: "int8", DType.FP8: "fp8"}  # engine.weights of the local engine


def ostinato(problem: Problem, arrangement: Arrangement) -> str:
    """A recipe's sections, with the command line that starts every rank of the trainer. What the plan has and
    Ostinato has not is a comment each, "not in Ostinato yet"."""
    base = f", base {arrangement.base}" if arrangement.placement == Placement.COLOCATED else ""
    train = arrangement.train
    said = [f"trainer {train.layout}, sampler {arrangement.rollout.layout}, {arrangement.placement}{base}"]
    said.append("model.path is the name that was planned; give the folder of the weights")
    said += [f"not in Ostinato yet: {one}" for one in lacking(problem, arrangement)]
    command = _torchrun(problem, train.layout) + " -m ostinato train plan.toml"
    return "\n".join([*_comments(said), f"# {command}", "", dumps(sections(problem, arrangement))])


def sections(problem: Problem, arrangement: Arrangement) -> dict[str, dict[str, object]]:
    """What the plan says of a recipe."""
    work, train = problem.work, arrangement.train
    dtype = "float32" if problem.precision.base == DType.FP32 else "bfloat16"
    recipe: dict[str, dict[str, object]] = {
        "model": {"path": problem.model.name, "dtype": dtype},
        "adapter": _adapter(problem.adapter),
        "rollout": {
            "prompts_per_step": work.prompts,
            "group_size": work.group,
            "max_tokens": work.max_answer,
        },
        "trainer": {
            "steps": work.steps,
            "minibatches": work.updates,
            "tokens_per_microbatch": max(1, train.microbatch),
            "recompute": train.recompute == Recompute.FULL,
        },
        "engine": _engine(problem, arrangement),
        "parallel": {"layout": str(train.layout)},
    }
    if arrangement.lag:
        recipe["pipeline"] = {"overlap": True, "staleness": arrangement.lag}
    return recipe


def lacking(problem: Problem, arrangement: Arrangement) -> list[str]:
    """What the plan has and Ostinato has not."""
    return [*_lacking(problem, arrangement), *_engine_lacks(problem, arrangement)]


def _engine(problem: Problem, arrangement: Arrangement) -> dict[str, object]:
    """The section of one sampler."""
    rollout, local = arrangement.rollout, problem.sampler.name == LOCAL
    found: dict[str, object] = {
        "backend": problem.sampler.name,
        "max_batch": max(1, rollout.sequences),
        "kv_memory_mb": math.ceil(cache_bytes(problem, rollout) / 2**20),
    }
    if local:
        copy = _copy(problem)
        return found | ({"weights": copy} if copy and problem.adapter else {})
    flags = vllm_flags(engine_layout(problem.config, rollout.layout)[0])
    flags += [ROUTES] if problem.config.moe is not None else []
    flags += ["--quantization", "fp8"] if problem.precision.sampler == DType.FP8 else []
    return found | ({"server_args": flags} if flags else {})


def _copy(problem: Problem) -> str:
    """``engine.weights`` where the sampler's are not the trainer's; empty where they are, or no copy is."""
    held = DType.FP32 if problem.precision.base == DType.FP32 else DType.BF16
    return "" if problem.precision.sampler == held else COPIES.get(problem.precision.sampler, "")


def _lacking(problem: Problem, arrangement: Arrangement) -> list[str]:
    """What the trainer cannot, and what it cannot together with the sampler."""
    precision, found = problem.precision, list[str]()
    if precision.base not in (DType.BF16, DType.FP32):
        found.append(f"a base in {precision.base}: the trainer holds it in bf16, in more memory than planned")
    if arrangement.train.optimizer_on_host:
        found.append("an optimizer in host memory: it stays on the GPUs")
    if arrangement.slept:
        slept = " and ".join(sorted(arrangement.slept))
        found.append(f"a trainer whose {slept} wait in host memory while the sampler runs: they stay on GPUs")
    if arrangement.placement == Placement.APART:
        flags = (
            " ".join(vllm_flags(engine_layout(problem.config, arrangement.rollout.layout)[0])) or "one rank"
        )
        where = (
            "cluster.samplers and cluster.gpus_per_sampler give samplers their own"
            if problem.sampler.name == LOCAL
            else f"start vLLM there by hand ({flags}) and name it in engine.address alone"
        )
        ranks = arrangement.rollout.layout.world
        found.append(f"one command for trainer and sampler apart (the sampler has {ranks} GPUs): {where}")
    elif arrangement.base == Base.SWAPPED:
        found.append("a base that waits in host memory: trainer and sampler both keep theirs on the GPUs")
    elif arrangement.base == Base.SHARED and not mapped(problem, arrangement.train, arrangement.rollout):
        found.append("one copy of the base on GPUs for trainer and sampler: each keeps its own")
    return found


def _engine_lacks(problem: Problem, arrangement: Arrangement) -> list[str]:
    """What the engine cannot."""
    spec, layout, found = problem.adapter, arrangement.rollout.layout, list[str]()
    sampler = problem.precision.sampler
    if problem.sampler.name == LOCAL:
        if layout.world > 1:
            found.append(f"a sampler of our own over {layout.world} ranks ({layout}): one process samples")
        copy = _copy(problem)
        if sampler == DType.INT4 or (copy and spec is None):
            found.append(f"sampler weights in {sampler} beside this trainer: they are the trainer's own")
        return found
    one, servers = engine_layout(problem.config, layout)
    if servers > 1:
        found.append(f"{servers} vLLM servers for one trainer: engine.server_args are those of one of them")
    if one.world > problem.cluster.per_node:
        found.append(f"a vLLM server over hosts: start its {one.world} ranks by hand, name engine.address")
    if spec is None:
        found.append('all weights for vLLM (adapter.kind "full"): it is sent adapters, the run is refused')
    elif problem.config.moe is not None and any(not one.startswith("attn") for one in spec.targets):
        found.append(
            "vLLM's format of adapters beside those of attention in a mixture of experts: the run is refused "
            'unless adapter.targets is ["attn"]'
        )
    if sampler in (DType.INT8, DType.INT4):
        found.append(f"words for vLLM's weights in {sampler}: its flags belong into engine.server_args")
    return found


def verl(problem: Problem, arrangement: Arrangement) -> str:
    """A shell script: verl's trainer on Megatron with vLLM, as overrides of its configuration."""
    work, cluster = problem.work, problem.cluster
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    train, sample = arrangement.train, arrangement.rollout
    offload = "adapters" in arrangement.slept or arrangement.base == Base.SWAPPED or train.optimizer_on_host
    rows = max(1, train.microbatch // train.layout.context)  # verl multiplies by c alone
    given: dict[str, object] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": work.prompt_tokens,
        "data.max_response_length": work.max_answer,
        "actor_rollout_ref.model.path": problem.model.name,
        **_verl_lora(problem.adapter, latent=problem.config.mla is not None),
        f"{actor}.strategy": "megatron",
        f"{actor}.megatron.use_mbridge": True,
        f"{actor}.megatron.vanilla_mbridge": False,
        **_megatron_sizes(f"{actor}.megatron", train.layout),
        f"{actor}.megatron.param_offload": arrangement.base == Base.SWAPPED,
        f"{actor}.megatron.optimizer_offload": offload,
        f"{actor}.megatron.grad_offload": offload,
        f"{actor}.ppo_mini_batch_size": math.ceil(work.prompts / work.updates),
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": rows,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": work.group,
        f"{rollout}.tensor_model_parallel_size": sample.layout.tensor,
        f"{rollout}.data_parallel_size": _engine_replicas(sample.layout),
        f"{rollout}.expert_parallel_size": sample.layout.expert,
        f"{rollout}.max_num_seqs": max(1, sample.sequences),
        f"{rollout}.free_cache_engine": True,
        f"{rollout}.log_prob_use_dynamic_bsz": True,
        f"{rollout}.log_prob_max_token_len_per_gpu": rows,
        "trainer.nnodes": cluster.nodes,
        "trainer.n_gpus_per_node": cluster.per_node,
    }
    given |= _transformer(f"+{actor}.megatron.override_transformer_config", problem, train)
    lines = [f"    {name}={_hydra(value)}" for name, value in given.items()]
    head = ["#!/usr/bin/env bash", *_comments(_verl_caveats(problem, arrangement))]
    return "\n".join([*head, "python3 -m verl.trainer.main_ppo \\", " \\\n".join(lines), ""])


def megatron_bridge(problem: Problem, arrangement: Arrangement) -> str:
    """Python that sets the trainer's fields: provider, adapter and batch."""
    train, work = arrangement.train, problem.work
    sizes = _sizes(train.layout) | {"sequence_parallel": train.layout.tensor > 1}
    lines = [
        *_comments(["The trainer alone: Megatron-Bridge samples nothing.", *_bridge_caveats(problem, train)]),
        "from megatron.bridge import AutoBridge",
        *(["from megatron.bridge.peft.lora import LoRA"] if problem.adapter else []),
        "",
        f"bridge = AutoBridge.from_hf_pretrained({json.dumps(problem.model.name)})",
        "model = bridge.to_megatron_provider()",
        *(f"model.{name} = {value!r}" for name, value in sizes.items()),
        *(f"model.{name} = {json.dumps(value)}" for name, value in _transformer("", problem, train).items()),
        f"model.seq_length = {work.longest}",
    ]
    if problem.adapter is not None:
        lines += _bridge_lora(problem.adapter, latent=problem.config.mla is not None)
    lines.append(f"# {_torchrun(problem, train.layout)} train.py")
    return "\n".join([*lines, ""])


def _transformer(prefix: str, problem: Problem, train: Setup) -> dict[str, object]:
    """Fields of Megatron's TransformerConfig beside sizes: recomputing, and stages that are not alike."""
    found: dict[str, object] = {}
    if train.recompute == Recompute.FULL:
        found = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if split := _stages(problem.config, train.layout):
        found["pipeline_model_parallel_layout"] = split
    return {f"{prefix}.{name}".removeprefix("."): value for name, value in found.items()}


def _stages(config: ModelConfig, layout: Layout) -> str:
    """The layers of every chunk in Megatron's words, "Et*3|t*3|t*2L" (E embedding, L loss), where chunks are
    not alike: without it Megatron refuses layers that stages do not divide. Empty where they are alike."""
    if config.num_layers % layout.chunks == 0:
        return ""
    chunks = [f"t*{len(layers)}" for layers in layout.chunk_layers(config.num_layers)]
    return f"E{'|'.join(chunks)}L"


def _comments(sentences: Sequence[str]) -> list[str]:
    wrapper = textwrap.TextWrapper(width=100, subsequent_indent="#   ", break_on_hyphens=False)
    return [line for one in sentences for line in wrapper.wrap(f"# {one}")]


def _adapter(spec: AdapterSpec | None) -> dict[str, object]:
    if spec is None:
        return {"kind": "full"}
    own = {"kind": "lora", "rank": spec.rank, "alpha": spec.alpha, "targets": list(spec.targets)}
    return own | {"expert_scheme": str(spec.expert_scheme), "expert_rank": spec.expert_rank or 0}


def _torchrun(problem: Problem, layout: Layout) -> str:
    per_node = min(problem.cluster.per_node, layout.world)
    nodes = -(-layout.world // per_node)
    where = "--rdzv-backend c10d --rdzv-endpoint $HEAD:29500 " if nodes > 1 else ""
    return f"torchrun --nnodes {nodes} --nproc-per-node {per_node} {where}".rstrip()


def _engine_replicas(layout: Layout) -> int:
    """Data ranks of one engine: those whose rows meet at the same experts. Others are engines of their
    own."""
    return max(1, layout.expert // layout.tensor)


def _sizes(layout: Layout) -> dict[str, int | None]:
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }


def _megatron_sizes(prefix: str, layout: Layout) -> dict[str, object]:
    return {f"{prefix}.{name}": value for name, value in _sizes(layout).items()}


def _targets(spec: AdapterSpec, *, latent: bool) -> list[str]:
    """Megatron's names of what is adapted. Of latent attention all five projections: the defaults there would
    adapt the output projection alone."""
    attention = ["linear_qkv"]
    if latent:
        attention = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"]
    roles = {target.split(".")[0] for target in spec.targets}
    found = [*attention, "linear_proj"] if "attn" in roles else []
    found += ["linear_fc1", "linear_fc2"] if roles & {"mlp", "shared", "experts"} else []
    return found + (["router"] if "router" in roles else [])


def _verl_lora(spec: AdapterSpec | None, *, latent: bool) -> dict[str, object]:
    if spec is None:
        return {}
    lora = "actor_rollout_ref.model.lora"
    return {
        f"{lora}.type": "lora",
        f"{lora}.rank": spec.rank,
        f"{lora}.alpha": round(spec.alpha),
        f"{lora}.target_modules": _targets(spec, latent=latent),
        f"{lora}.merge": False,
    }


def _megatron_caveats(problem: Problem, train: Setup) -> list[str]:
    """What neither file says of the trainer."""
    found, precision = list[str](), problem.precision
    if train.layout.shard > 1:
        found.append(f"f{train.layout.shard} of the plan has no counterpart beside Megatron's axes.")
    if train.optimizer_on_host:
        found.append("The plan has the optimizer in host memory while it steps; that is not set here.")
    if precision.base != DType.BF16:
        found.append(f"The plan has a base in {precision.base}; that is not set here, and BF16 is usual.")
    return found


def _verl_caveats(problem: Problem, arrangement: Arrangement) -> list[str]:
    """What verl does otherwise than the plan, in words."""
    found = _megatron_caveats(problem, arrangement.train)
    if arrangement.placement == Placement.APART:
        found.append(
            "The plan has trainer and sampler apart; main_ppo colocates them (see verl's fully_async)."
        )
    if arrangement.base == Base.SHARED:
        found.append(
            "The plan has one copy of the base; verl keeps the trainer's and vLLM's and sleeps in turn."
        )
    if problem.sampler.name == LOCAL:
        found.append("The plan samples with Ostinato's engine, whose layouts vLLM may not have.")
    if (sampler := problem.precision.sampler) != DType.BF16:
        found.append(f"The plan has sampler weights in {sampler}; that is not set here.")
    if (spec := problem.adapter) is not None and problem.config.moe is not None:
        found.append(
            f"Experts: {spec.expert_scheme} of the plan is not a field of verl's; Megatron-Bridge's own "
            "default before 2026-06 is one adapter per expert rank, which changes the model with the layout."
        )
        if spec.expert_rank not in (None, spec.rank):
            found.append(f"Rank {spec.expert_rank} of experts is no field of verl's; all have {spec.rank}.")
    return found


def _bridge_caveats(problem: Problem, train: Setup) -> list[str]:
    """What the trainer's file does not set, in words."""
    rows = f"Microbatches of {train.microbatch:,} packed rows, as planned, are the training script's to make."
    return [*_megatron_caveats(problem, train), rows]


def _bridge_lora(spec: AdapterSpec, *, latent: bool) -> list[str]:
    fields = [
        f"target_modules={_targets(spec, latent=latent)!r}",
        f"dim={spec.rank}",
        f"alpha={round(spec.alpha)}",
    ]
    if spec.expert_scheme == ExpertScheme.SHARED_OUTER:
        fields.append("experts_shared_outer_loras=True")
    else:
        fields.append("share_expert_adapters=False")
    told = []
    if spec.expert_rank not in (None, spec.rank):
        told.append(
            f"# rank {spec.expert_rank} of experts: Megatron-Bridge has normalize_moe_lora (rank / top_k)"
        )
    return ["", *told, f"peft = LoRA({', '.join(fields)})  # expert fields: 2026-06 or later"]


def _hydra(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return "'[" + ",".join(map(str, value)) + "]'"
    return f"'{value}'" if isinstance(value, str) and "*" in value else str(value)


__all__ = ["lacking", "megatron_bridge", "ostinato", "sections", "verl"]
