"""The layouts to choose from, and how engines run the layouts of sampling.

    vllm    tensor ranks, and data ranks that are replicas. Experts are cut by width over t (e1), or spread
            over all ranks of d and t of one engine: e = t k is k data ranks an engine; the layout then has
            d / k engines. No context, no pieces, no virtual stages, and x cannot be chosen
    local   Ostinato's own engine samples in one process; d is the number of such samplers

Layouts are the divisors of the number of GPUs, without those that are never fastest: tensor and context ranks
beyond a node (their exchanges would leave NVLink in every layer); context parallelism for sequences below
8,192 tokens; more than 4 virtual stages; weights in pieces (f) over other than 1 or all data ranks of a node
or of the stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ostinato.apps.plan.problem import Phase, Problem, Sampler
from ostinato.model.config import ModelConfig
from ostinato.parallel.layout import Layout

LOCAL = "local"
LONG = 8192  # from this many tokens on, rows of a sequence may be cut over context ranks
VIRTUAL = (1, 2, 4)


def as_kept(layout: Layout) -> Layout:
    """Return the layout of the weights: vLLM cuts the width of experts over t if it does not spread them."""
    if layout.expert > 1 or layout.expert_tensor > 1:
        return layout
    return replace(layout, expert_tensor=layout.tensor)


def engine_layout(config: ModelConfig, layout: Layout) -> tuple[Layout, int]:
    """Return (the layout of a vLLM server, the number of servers). Data ranks that share the same experts are
    a server; the data ranks of a dense model are a single server, too."""
    if config.moe is None:
        return layout, 1
    data_per_server = max(1, layout.expert // layout.tensor)
    return replace(layout, data=data_per_server), layout.data // data_per_server


def vllm_flags(layout: Layout) -> list[str]:
    """Return the command-line flags of a server with this layout."""
    sizes = {"tensor": layout.tensor, "data": layout.data}
    pairs = [(f"--{name}-parallel-size", str(size)) for name, size in sizes.items() if size > 1]
    words = [word for pair in pairs for word in pair]
    return words + (["--enable-expert-parallel"] if layout.expert > 1 else [])


def refuse(sampler: Sampler, config: ModelConfig, layout: Layout) -> None:
    """Raise ValueError, in a sentence, for a layout of sampling that the engine does not have."""
    axes = {"c": layout.context, "v": layout.virtual, "f": layout.shard, "p": layout.pipeline}
    if letters := [letter for letter, size in axes.items() if size > 1]:
        raise ValueError(
            f"layout {layout} has {letters[0]}{axes[letters[0]]}, but {sampler.name} samples without it; use "
            "d, t and e"
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
    data_per_server, remainder = divmod(layout.expert, layout.tensor)  # data ranks that share experts
    if layout.expert > 1 and (remainder or layout.data % data_per_server):
        raise ValueError(
            f"layout {layout} has e{layout.expert}, but vLLM spreads experts over all ranks of an engine or "
            f"none; use a multiple of t{layout.tensor} that divides the {layout.stage_ranks} ranks, or drop e"
        )
    if config.moe is not None:
        as_kept(layout).refuse(config)


def divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def layouts(problem: Problem, world: int, phase: Phase) -> Iterator[Layout]:
    """Yield all layouts of ``world`` ranks that can cut the model and that the phase can use."""
    config, per_node = problem.config, problem.cluster.per_node
    sampling = phase == Phase.ROLLOUT
    for tensor in divisors(world):
        if tensor > per_node or config.num_heads % tensor or config.num_kv_heads % tensor:
            continue
        pipelines = divisors(world // tensor)
        pipelines = tuple(p for p in pipelines if p <= config.num_layers)
        for pipeline in (1,) if sampling else pipelines:
            ranks = world // tensor // pipeline
            for context in (1,) if sampling else _list_contexts(problem, tensor, ranks):
                data = ranks // context
                axes = product(
                    _list_expert_cuts(config, data * context * tensor, tensor),
                    (1,) if sampling else _list_virtual_stages(config, pipeline),
                    (1,) if sampling else _list_shards(data, per_node, tensor * context),
                )
                for (expert, expert_tensor), virtual, shard in axes:
                    layout = Layout(
                        data=data,
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        expert=expert,
                        expert_tensor=expert_tensor,
                        virtual=virtual,
                        shard=shard,
                    )
                    if _is_possible(problem, layout, sampling=sampling):
                        yield layout


def _list_contexts(problem: Problem, tensor: int, ranks: int) -> tuple[int, ...]:
    if problem.work.longest < LONG:
        return (1,)
    return tuple(c for c in divisors(ranks) if c * tensor <= problem.cluster.per_node)


def _list_expert_cuts(config: ModelConfig, ranks: int, tensor: int) -> tuple[tuple[int, int], ...]:
    """Return the possible (e, x)."""
    moe = config.moe
    if moe is None:
        return ((1, 1),)
    cuts = [(e, 1) for e in divisors(ranks) if moe.num_experts % e == 0]
    if tensor > 1 and moe.intermediate_size % tensor == 0:
        cuts += [(e, tensor) for e in divisors(ranks // tensor) if moe.num_experts % e == 0]
    return tuple(cuts)


def _list_virtual_stages(config: ModelConfig, pipeline: int) -> tuple[int, ...]:
    if pipeline == 1:
        return (1,)
    return tuple(v for v in VIRTUAL if v * pipeline <= config.num_layers)


def _list_shards(data: int, per_node: int, ranks_per_replica: int) -> tuple[int, ...]:
    in_node = max(1, per_node // ranks_per_replica)
    return tuple(sorted({1, data, in_node if data % in_node == 0 else 1}))


def _is_possible(problem: Problem, layout: Layout, *, sampling: bool) -> bool:
    try:
        layout.refuse(problem.config)
        if sampling:
            refuse(problem.sampler, problem.config, layout)
    except ValueError:
        return False
    return True
