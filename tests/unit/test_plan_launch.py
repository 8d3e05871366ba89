"""Launch files of a plan: what they say, word for word, and that ours is a recipe."""

from __future__ import annotations

import tomllib
from dataclasses import replace

from plan_world import arrangement, problem

from ostinato.config import Recipe
from ostinato.model.shapes import AdapterSpec, ExpertScheme
from ostinato.plan import launch
from ostinato.plan.memory import cache_bytes
from ostinato.plan.problem import Base, DType, Placement, Precision, Recompute, Sampler, Work

WORK = Work(prompts=64, group=16, prompt_tokens=1024, answers=(2048,), max_answer=8192, updates=2, steps=300)
KIMI = problem("kimi-k2", "64xH800-80", adapter=AdapterSpec(rank=32, alpha=64.0), work=WORK)
PLAN = arrangement("p8t8e8", "d8t8e64", base=Base.SWAPPED, slept=frozenset({"adapters"}))
PLAN = replace(PLAN, train=replace(PLAN.train, recompute=Recompute.FULL))

VERL = """\
#!/usr/bin/env bash
# Experts: shared_outer of the plan is not a field of verl's; Megatron-Bridge's own default before
#   2026-06 is one adapter per expert rank, which changes the model with the layout.
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_batch_size=64 \\
    data.max_prompt_length=1024 \\
    data.max_response_length=8192 \\
    actor_rollout_ref.model.path=kimi-k2 \\
    actor_rollout_ref.model.lora.type=lora \\
    actor_rollout_ref.model.lora.rank=32 \\
    actor_rollout_ref.model.lora.alpha=64 \\
    actor_rollout_ref.model.lora.target_modules='[linear_q_down_proj,linear_q_up_proj,linear_kv_down_proj,linear_kv_up_proj,linear_proj,linear_fc1,linear_fc2]' \\
    actor_rollout_ref.model.lora.merge=False \\
    actor_rollout_ref.actor.strategy=megatron \\
    actor_rollout_ref.actor.megatron.use_mbridge=True \\
    actor_rollout_ref.actor.megatron.vanilla_mbridge=False \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=8 \\
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=8 \\
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null \\
    actor_rollout_ref.actor.megatron.context_parallel_size=1 \\
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \\
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \\
    actor_rollout_ref.actor.megatron.param_offload=True \\
    actor_rollout_ref.actor.megatron.optimizer_offload=True \\
    actor_rollout_ref.actor.megatron.grad_offload=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=16 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \\
    actor_rollout_ref.rollout.data_parallel_size=8 \\
    actor_rollout_ref.rollout.expert_parallel_size=64 \\
    actor_rollout_ref.rollout.max_num_seqs=32 \\
    actor_rollout_ref.rollout.free_cache_engine=True \\
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \\
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=16384 \\
    trainer.nnodes=8 \\
    trainer.n_gpus_per_node=8 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.pipeline_model_parallel_layout='Et*8|t*8|t*8|t*8|t*8|t*7|t*7|t*7L'
"""  # noqa: E501

BRIDGE = """\
# The trainer alone: Megatron-Bridge samples nothing.
# Microbatches of 16,384 packed rows, as planned, are the training script's to make.
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA

bridge = AutoBridge.from_hf_pretrained("kimi-k2")
model = bridge.to_megatron_provider()
model.tensor_model_parallel_size = 8
model.pipeline_model_parallel_size = 8
model.virtual_pipeline_model_parallel_size = None
model.context_parallel_size = 1
model.expert_model_parallel_size = 8
model.expert_tensor_parallel_size = 1
model.sequence_parallel = True
model.recompute_granularity = "full"
model.recompute_method = "uniform"
model.recompute_num_layers = 1
model.pipeline_model_parallel_layout = "Et*8|t*8|t*8|t*8|t*8|t*7|t*7|t*7L"
model.seq_length = 9216

peft = LoRA(target_modules=['linear_q_down_proj', 'linear_q_up_proj', 'linear_kv_down_proj', \
'linear_kv_up_proj', 'linear_proj', 'linear_fc1', 'linear_fc2'], dim=32, alpha=64, \
experts_shared_outer_loras=True)  # expert fields: 2026-06 or later
# torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint $HEAD:29500 train.py
"""

OURS = """\
# trainer t8p8e8, sampler d8t8e64, colocated, base swapped
# model.path is the name that was planned; give the folder of the weights
"""


def test_verl() -> None:
    assert launch.verl(KIMI, PLAN) == VERL


def test_megatron_bridge() -> None:
    assert launch.megatron_bridge(KIMI, PLAN) == BRIDGE


def test_ours_is_a_recipe() -> None:
    text = launch.ostinato(KIMI, PLAN)
    assert text.startswith(OURS)
    recipe = Recipe.model_validate(tomllib.loads(text))
    assert recipe.parallel.layout == "t8p8e8"
    assert (recipe.adapter.rank, recipe.trainer.minibatches, recipe.trainer.recompute) == (32, 2, True)
    assert (recipe.rollout.prompts_per_step, recipe.rollout.group_size) == (64, 16)


def lacking(text: str) -> str:
    """The comments of a recipe, unwrapped."""
    return "\n".join(line for line in text.replace("\n#   ", " ").splitlines() if line.startswith("#"))


def recipe_of(text: str) -> Recipe:
    return Recipe.model_validate(tomllib.loads(text))


def test_ours_starts_the_engine_that_was_planned() -> None:
    text = launch.ostinato(KIMI, PLAN)
    engine = recipe_of(text).engine
    assert (engine.backend, engine.max_batch) == ("vllm", 32)
    sizes = "--tensor-parallel-size 8 --data-parallel-size 8 --enable-expert-parallel"
    assert engine.server_args == (*sizes.split(), launch.ROUTES)
    assert 0 <= (engine.kv_memory_mb << 20) - cache_bytes(KIMI, PLAN.rollout) < 1 << 20
    one = replace(problem(gpus="1xcpu"), sampler=Sampler(name="local", latent_kv=False))
    text = launch.ostinato(one, arrangement("1", "1"))
    assert recipe_of(text).engine.backend == "local"
    assert "not in Ostinato yet" not in text  # one process: one base is mapped


def test_ours_says_what_ostinato_has_not() -> None:
    said = lacking(launch.ostinato(KIMI, PLAN))
    assert "not in Ostinato yet: a base that waits in host memory" in said
    assert "not in Ostinato yet: a trainer whose adapters wait in host memory" in said
    assert "not in Ostinato yet: a vLLM server over hosts: start its 64 ranks by hand" in said
    assert 'unless adapter.targets is ["attn"]' in said
    narrow = Precision(base=DType.FP8, sampler=DType.FP8)
    host = replace(PLAN, base=Base.SHARED, train=replace(PLAN.train, optimizer_on_host=True))
    text = launch.ostinato(replace(KIMI, precision=narrow), host)
    assert "a base in fp8: the trainer holds it in bf16" in lacking(text)
    assert "an optimizer in host memory" in lacking(text)
    assert "one copy of the base on GPUs for trainer and sampler" in lacking(text)
    assert recipe_of(text).model.dtype == "bfloat16"
    assert recipe_of(text).engine.server_args[-2:] == ("--quantization", "fp8")
    int4 = replace(KIMI, precision=Precision(sampler=DType.INT4))
    assert "words for vLLM's weights in int4" in lacking(launch.ostinato(int4, PLAN))


def test_ours_is_one_server_and_apart_is_by_hand() -> None:
    apart = arrangement("d8", "d4t2e4", placement=Placement.APART, base=Base.TWO)
    text = launch.ostinato(replace(KIMI, adapter=None), apart)
    assert "2 vLLM servers for one trainer" in lacking(text)
    flags = "--tensor-parallel-size 2 --data-parallel-size 2 --enable-expert-parallel"
    assert recipe_of(text).engine.server_args == (*flags.split(), launch.ROUTES)
    assert f"start vLLM there by hand ({flags})" in lacking(text)
    assert "all weights for vLLM" in lacking(text)


def test_the_local_engine_is_one_process_and_may_have_a_copy() -> None:
    ours = replace(problem(gpus="4xH100-80"), sampler=Sampler(name="local", latent_kv=False))
    text = launch.ostinato(ours, arrangement("d4e4", "d4e4"))
    assert "a sampler of our own over 4 ranks (d4e4): one process samples" in lacking(text)
    eight = replace(ours, precision=Precision(sampler=DType.INT8))
    assert recipe_of(launch.ostinato(eight, arrangement("1", "1"))).engine.weights == "int8"
    full = replace(eight, adapter=None)
    assert "sampler weights in int8" in lacking(launch.ostinato(full, arrangement("1", "1")))


def test_stages_that_are_not_alike_are_written_out() -> None:
    split = "pipeline_model_parallel_layout"
    odd = launch.megatron_bridge(KIMI, arrangement("p4v4d4", "d8t8e64"))
    (line,) = [line for line in odd.splitlines() if split in line]
    chunks = line.split('"')[1].strip("EL").split("|")
    sizes = [int(chunk.removeprefix("t*")) for chunk in chunks]
    assert len(sizes) == 16 and sum(sizes) == 61 and sizes == sorted(sizes, reverse=True)
    even = problem("qwen3-8b", "8xH100-80")  # 36 layers
    for write in (launch.verl, launch.megatron_bridge):
        assert split not in write(even, arrangement("p4d2", "d8"))
        assert split in write(even, arrangement("p8", "d8"))


def test_tokens_of_a_gpu_are_those_of_a_context_rank() -> None:
    text = launch.verl(KIMI, arrangement("t4c2d8", "d8t8e64"))
    assert "ppo_max_token_len_per_gpu=8192 " in text and "log_prob_max_token_len_per_gpu=8192 " in text


def test_ours_without_an_adapter_and_late() -> None:
    full = replace(KIMI, adapter=None)
    late = arrangement("d8", "d8", placement=Placement.APART, base=Base.TWO, lag=2)
    recipe = Recipe.model_validate(tomllib.loads(launch.ostinato(full, late)))
    assert recipe.adapter.kind == "full"
    assert recipe.pipeline.overlap and recipe.pipeline.staleness == 2


def test_what_a_program_lacks_is_said() -> None:
    apart = arrangement("d8f8", "d8", placement=Placement.APART, base=Base.TWO)
    text = launch.verl(KIMI, apart)
    assert "main_ppo colocates" in text and "f8 of the plan has no counterpart" in text
    assert "lora" not in launch.verl(replace(KIMI, adapter=None), apart)
    per_expert = replace(KIMI, adapter=AdapterSpec(expert_scheme=ExpertScheme.PER_EXPERT, expert_rank=2))
    text = launch.megatron_bridge(per_expert, apart)
    assert "share_expert_adapters=False" in text and "normalize_moe_lora" in text
    assert "Microbatches of 16,384 packed rows" in text
    narrow = replace(per_expert, precision=Precision(base=DType.FP8, sampler=DType.INT4))
    text = launch.verl(narrow, replace(apart, train=replace(apart.train, optimizer_on_host=True)))
    text = text.replace("\n#   ", " ")
    for words in (
        "a base in fp8; that is not set here",
        "sampler weights in int4; that is not set here",
        "the optimizer in host memory while it steps",
        "Rank 2 of experts is no field of verl's",
    ):
        assert words in text
