"""``engine.layout``: the ranks of one sampler, of our engine or of vLLM.

For our engine they are this process and further ones that it starts on its host, wherever the engine is: in
``ostinato train``, ``generate`` and ``eval``, or in each sampler of a cluster. For vLLM the layout becomes
flags of its server.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ostinato.config import Recipe
from ostinato.model.config import read_config
from ostinato.model.named import model_folder
from ostinato.parallel.layout import Layout
from ostinato.parallel.shares import shares_of

if TYPE_CHECKING:
    from ostinato.engine.sharded import Shards

# a size of the layout -> vLLM's flag and its short form
_VLLM = {
    "tensor": ("--tensor-parallel-size", "-tp"),
    "pipeline": ("--pipeline-parallel-size", "-pp"),
    "data": ("--data-parallel-size", "-dp"),
}
_EXPERTS = ("--enable-expert-parallel", "-ep")


def check_engine_layout(recipe: Recipe) -> None:
    """Raises ValueError, in one sentence, for a layout of the sampler that cannot be had."""
    engine, text = recipe.engine, recipe.engine.layout
    try:
        layout = Layout.parse(text)
    except ValueError as error:
        raise ValueError(f"engine.{error}") from error
    if engine.backend == "vllm":
        _check_vllm(recipe, layout)
        return
    if layout.world == 1:
        return
    if recipe.adapter.kind == "full":
        raise ValueError(
            f'engine.layout is {text!r} with adapter.kind "full", which sends the sampler all weights '
            "as one file; train an adapter, or drop engine.layout"
        )
    if engine.weights != "model":
        raise ValueError(
            f'engine.layout is {text!r} with engine.weights "{engine.weights}", and its ranks load the model '
            'as it is; set engine.weights to "model", or drop engine.layout'
        )
    if recipe.model.device.startswith("cuda"):
        raise ValueError(
            f"engine.layout is {text!r} with model.device {recipe.model.device!r}, and ranks of this engine "
            'compute on the CPU; set engine.backend to "vllm", which takes such a layout, or drop it'
        )


def start_shards(recipe: Recipe, *, native: bool, shared: bool) -> Shards:
    """The ranks that the recipe asks for, loaded; ``shared``: over what other samplers of the host map.
    Raises as ``engine.sharded.start_ranks`` does."""
    import torch

    from ostinato.engine.sharded import start_ranks

    layout = Layout.parse(recipe.engine.layout)
    others = range(1, layout.world) if same_shares(recipe) else ()
    mapped = range(layout.world) if shared else others
    return start_ranks(
        model_folder(recipe.model.path),
        layout,
        dtype=getattr(torch, recipe.model.dtype),
        fp32_head=recipe.model.fp32_head,
        native=native,
        shared=mapped,
        timeout_s=recipe.parallel.timeout_s,
        start_s=recipe.cluster.start_s,
    )


def same_shares(recipe: Recipe) -> bool:
    """Do ranks of the trainer and of the sampler keep the same parts of a frozen base? Those on one host then
    map one copy of it (``model.shared``); but not rank 0, whose process has the whole of it."""
    section = recipe.parallel
    layouts = [Layout.parse(text) for text in (section.layout, recipe.engine.layout)]
    frozen = recipe.adapter.kind == "lora" and layouts[0].shard == 1 and not section.placement
    local = recipe.engine.backend == "local" and min(layout.world for layout in layouts) > 1
    if not (recipe.cluster.share_weights and frozen and local):
        return False
    config = read_config(model_folder(recipe.model.path))
    trainer, sampler = (
        {share for rank in range(layout.world) for share in shares_of(layout, config, rank)}
        for layout in layouts
    )
    return sys.platform == "linux" and not trainer.isdisjoint(sampler)


def vllm_layout(recipe: Recipe) -> tuple[str, ...]:
    """What the layout is to vLLM's server."""
    layout = Layout.parse(recipe.engine.layout)
    sizes = [(flags[0], getattr(layout, name)) for name, flags in _VLLM.items()]
    words = [word for flag, size in sizes if size > 1 for word in (flag, str(size))]
    return (*words, *_EXPERTS[: layout.expert > 1])


def _check_vllm(recipe: Recipe, layout: Layout) -> None:
    engine, text = recipe.engine, recipe.engine.layout
    if layout == Layout():
        return
    if engine.address:
        raise ValueError(
            f"engine.layout is {text!r} with engine.address {engine.address!r}, where somebody else starts "
            "the server; give it its flags there, and drop engine.layout"
        )
    others = {"c": layout.context, "x": layout.expert_tensor, "v": layout.virtual, "f": layout.shard}
    if odd := [letter for letter, size in others.items() if size > 1]:
        raise ValueError(
            f'engine.layout is {text!r} with engine.backend "vllm", which has no {odd[0]}; use d, t, p and e'
        )
    ranks = layout.data * layout.tensor
    if layout.expert not in (1, ranks):
        raise ValueError(
            f"engine.layout is {text!r}, but vLLM cuts experts over all ranks of d and t or over none; use "
            f"e{ranks}, or drop e"
        )
    taken = {flag for flags in (*_VLLM.values(), _EXPERTS) for flag in flags}
    given = [word for word in engine.server_args if word.partition("=")[0] in taken]
    if given:
        raise ValueError(
            f"engine.server_args has {given[0]!r} beside engine.layout {text!r}, which says the same; drop "
            "one of them"
        )


__all__ = ["check_engine_layout", "start_shards", "vllm_layout"]
