"""What engines make of a layout of sampling: how many replicas it is, where experts are cut, what none has.

    vllm    tensor ranks, and data ranks that are replicas. Experts are cut by width over t (e1), or spread
            over all ranks of d and t of one engine: e = t k is k data ranks an engine; the layout then has
            d / k engines. No context, no pieces, no virtual stages, and x is not to be chosen
    local   Ostinato's own engine samples in one process: d of them are as many samplers

What a layout means to the other rooms of ``plan`` is found here: bytes, seconds and launch files agree.
"""

from __future__ import annotations

from dataclasses import replace

from ostinato.apps.plan.problem import Sampler
from ostinato.model.config import ModelConfig
from ostinato.parallel.layout import Layout

LOCAL = "local"


def as_kept(layout: Layout) -> Layout:
    """The layout by which weights lie: vLLM cuts the width of experts over t if it does not spread them."""
    if layout.expert > 1 or layout.expert_tensor > 1:
        return layout
    return replace(layout, expert_tensor=layout.tensor)


def engine_layout(config: ModelConfig, layout: Layout) -> tuple[Layout, int]:
    """(layout of one vLLM server, how many of them): data ranks whose rows meet at the same experts are one
    server; without experts to share, or without spreading them, data ranks of a dense model are one, too."""
    if config.moe is None:
        return layout, 1
    here = max(1, layout.expert // layout.tensor)
    return replace(layout, data=here), layout.data // here


def vllm_flags(layout: Layout) -> list[str]:
    """Of a server with this layout."""
    sizes = {"tensor": layout.tensor, "data": layout.data}
    found = [(f"--{name}-parallel-size", str(size)) for name, size in sizes.items() if size > 1]
    words = [word for pair in found for word in pair]
    return words + (["--enable-expert-parallel"] if layout.expert > 1 else [])


def refuse(sampler: Sampler, config: ModelConfig, layout: Layout) -> None:
    """Raise ValueError, in one sentence, for a layout of sampling that the engine does not have."""
    odd = {"c": layout.context, "v": layout.virtual, "f": layout.shard, "p": layout.pipeline}
    if found := [letter for letter, size in odd.items() if size > 1]:
        raise ValueError(
            f"layout {layout} has {found[0]}{odd[found[0]]}, but {sampler.name} samples without it; use d, t "
            "and e"
        )
    if sampler.name == LOCAL:
        if layout.data < layout.world or layout.expert > 1:
            raise ValueError(f"layout {layout} cuts a model that the local engine has whole; use d alone")
        return
    if layout.expert_tensor > 1:
        raise ValueError(
            f"layout {layout} has x{layout.expert_tensor}, which vLLM does not take; drop x (without e it "
            "cuts the width of experts by t)"
        )
    shared, rest = divmod(layout.expert, layout.tensor)  # data ranks whose rows meet at the same experts
    if layout.expert > 1 and (rest or layout.data % shared):
        raise ValueError(
            f"layout {layout} has e{layout.expert}, but vLLM spreads experts over all ranks of an engine or "
            f"none; use a multiple of t{layout.tensor} that divides the {layout.stage_ranks} ranks, or drop e"
        )
    if config.moe is not None:
        as_kept(layout).refuse(config)
