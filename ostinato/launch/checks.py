"""Whether the keys of a recipe fit each other and this machine, where that takes no model."""

from __future__ import annotations

import os
from importlib.util import find_spec

from ostinato.algo.advantages import check_group_size
from ostinato.algo.algorithms import Algorithm, algorithm
from ostinato.config import Recipe
from ostinato.engine.vllm_answers import COLDEST
from ostinato.model.decoder import Decoder
from ostinato.parallel.launch import Place
from ostinato.parallel.layout import Layout

MASKS, ROUTES = "--return-sampling-mask", "--enable-return-routed-experts"


def check(recipe: Recipe) -> Algorithm:
    """The algorithm that the recipe asks for, checked against the rest of it."""
    chosen = algorithm(recipe.algo.name, **recipe.algo.overrides)
    try:
        check_group_size(recipe.rollout.group_size, chosen.baseline, chosen.scale, chosen.drop_zero_variance)
    except ValueError as error:
        raise ValueError(f"rollout.group_size: {error}") from error
    check_ranks(recipe)
    if recipe.cluster.samplers:
        check_cluster(recipe)
    if recipe.engine.backend == "vllm":
        check_vllm(recipe)
    if recipe.pipeline.overlap and recipe.adapter.kind == "full" and not recipe.cluster.samplers:
        raise ValueError(
            'pipeline.overlap is true with adapter.kind "full" in one process, where the sampler would read '
            "weights that the trainer is changing; set cluster.samplers to 1 or more, or train an adapter"
        )
    return chosen


def check_cluster(recipe: Recipe) -> None:
    """Raises ValueError for what workers elsewhere cannot do, with one sentence."""
    section = recipe.cluster
    if find_spec("ray") is None:
        raise ValueError(
            f"cluster.samplers is {section.samplers}, which needs Ray: pip install 'ostinato[ray]', or set "
            "it to 0 to run in one process"
        )
    if recipe.engine.backend == "vllm":
        raise ValueError(
            f'engine.backend is "vllm" with cluster.samplers {section.samplers}, but vLLM places workers of '
            "its own (engine.server_args); set cluster.samplers to 0"
        )
    if recipe.adapter.kind == "full" and (section.remote_trainer or section.address):
        key = "remote_trainer" if section.remote_trainer else "address"
        raise ValueError(
            f'adapter.kind is "full" with cluster.{key}, but a trainer in this process publishes all '
            "weights, as a file of this host; drop it, or train an adapter"
        )
    if recipe.model.device.startswith("cuda") and not section.gpus_per_sampler:
        raise ValueError(
            f"model.device is {recipe.model.device!r} with cluster.gpus_per_sampler 0, so samplers would see "
            "no GPU; set it to 1, or to a share of one"
        )


def check_ranks(recipe: Recipe) -> None:
    """Raises ValueError where torchrun has started other ranks than the layout has."""
    layout, place = Layout.parse(recipe.parallel.layout), Place.of(os.environ)
    if place is not None and place.world != layout.world:
        raise ValueError(
            f'parallel.layout is "{recipe.parallel.layout}", of {layout.world} in all, but torchrun has '
            f"started {place.world} ranks (WORLD_SIZE); start {layout.world}, or choose another layout"
        )


def check_vllm(recipe: Recipe) -> None:
    """Raises ValueError for what cannot be had with vLLM, with one sentence."""
    engine, rollout = recipe.engine, recipe.rollout
    if find_spec("httpx2") is None:
        raise ValueError('engine.backend is "vllm", which needs a package: pip install "ostinato[vllm]"')
    if recipe.adapter.kind == "full":
        raise ValueError(
            'engine.backend is "vllm" with adapter.kind "full"; vLLM is sent adapters: use "lora"'
        )
    if engine.weights != "model":
        raise ValueError(
            f'engine.weights is "{engine.weights}" with engine.backend "vllm", which has weights of its own; '
            "leave it at model, and say what vLLM is to quantise in engine.server_args"
        )
    filters = {"top_k": rollout.top_k > 0, "top_p": rollout.top_p < 1, "min_p": rollout.min_p > 0}
    if (used := [name for name, on in filters.items() if on]) and MASKS not in engine.server_args:
        raise ValueError(
            f"rollout.{used[0]} cuts what is sampled from, and training has to know what was kept; add "
            f'"{MASKS}" to engine.server_args (a GPU build of vLLM), or switch it off'
        )
    for name, temperature in (("rollout", rollout.temperature), ("eval", recipe.eval.temperature)):
        if 0 < temperature < COLDEST:
            raise ValueError(
                f"{name}.temperature is {temperature}; vLLM takes 0 (greedy) or {COLDEST} and more"
            )


def check_model(recipe: Recipe, decoder: Decoder) -> None:
    """The same, of what the model has to be known for."""
    if decoder.num_moe_layers == 0:
        return
    if recipe.trainer.replay is not False and ROUTES not in recipe.engine.server_args:
        raise ValueError(
            f"trainer.replay is {recipe.trainer.replay!r}, but vLLM tells no experts unless it is asked to; "
            f'add "{ROUTES}" to engine.server_args (a GPU build of vLLM), or set it to false'
        )
    others = [target for target in recipe.adapter.targets if not target.startswith("attn")]
    if others:
        raise ValueError(
            f'adapter.targets has "{others[0]}", and vLLM reads adapters of a mixture of experts in a format '
            'that is not written; use adapter.targets=["attn"]'
        )
