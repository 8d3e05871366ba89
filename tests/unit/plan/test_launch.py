"""Launch files of a plan: what they say, word for word, and that ours is a recipe."""

from __future__ import annotations

import tomllib
from dataclasses import replace

from plan_world import arrangement, problem

from ostinato.config import Recipe
from ostinato.model.shapes import AdapterSpec
from ostinato.plan import launch
from ostinato.plan.memory import cache_bytes
from ostinato.plan.problem import Base, DType, Precision, Recompute, Sampler, Work

WORK = Work(prompts=64, group=16, prompt_tokens=1024, answers=(2048,), max_answer=8192, updates=2, steps=300)
KIMI = problem("kimi-k2", "64xH800-80", adapter=AdapterSpec(rank=32, alpha=64.0), work=WORK)
PLAN = arrangement("p8t8e8", "d8t8e64", base=Base.SWAPPED)
PLAN = replace(PLAN, train=replace(PLAN.train, recompute=Recompute.FULL))


OURS = """\
# trainer t8p8e8, sampler d8t8e64, colocated, base swapped
# model.path is the name that was planned; give the folder of the weights
"""


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
    assert "not in Ostinato yet: a vLLM server over hosts: start its 64 ranks by hand" in said
    assert 'unless adapter.targets is ["attn"]' in said
    narrow = Precision(base=DType.FP8, sampler=DType.FP8)
    host = replace(PLAN, base=Base.SHARED)
    text = launch.ostinato(replace(KIMI, precision=narrow), host)
    assert "a base in fp8: the trainer holds it in bf16" in lacking(text)
    assert "one copy of the base on GPUs for trainer and sampler" in lacking(text)
    assert recipe_of(text).model.dtype == "bfloat16"
    assert recipe_of(text).engine.server_args[-2:] == ("--quantization", "fp8")
    int4 = replace(KIMI, precision=Precision(sampler=DType.INT4))
    assert "words for vLLM's weights in int4" in lacking(launch.ostinato(int4, PLAN))


def test_the_local_engine_is_one_process_and_may_have_a_copy() -> None:
    ours = replace(problem(gpus="4xH100-80"), sampler=Sampler(name="local", latent_kv=False))
    text = launch.ostinato(ours, arrangement("d4e4", "d4"))
    assert "4 samplers of our own beside one trainer: one process samples" in lacking(text)
    eight = replace(ours, precision=Precision(sampler=DType.INT8))
    assert recipe_of(launch.ostinato(eight, arrangement("1", "1"))).engine.weights == "int8"
    full = replace(eight, adapter=None)
    assert "sampler weights in int8" in lacking(launch.ostinato(full, arrangement("1", "1")))
