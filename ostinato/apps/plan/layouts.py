"""Which layouts there are to choose from: divisors of the number of GPUs, less what never pays.

What is left out, and why: tensor and context ranks beyond a node (their exchanges would leave NVLink in
every layer); context parallelism for sequences below 8,192 tokens; more than 4 virtual stages; weights in
pieces (f) over other than 1 or all data ranks of a node or of the stage. Of sampling also what its engine
does not have (``plan.engines``).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ostinato.apps.plan.engines import refuse
from ostinato.apps.plan.problem import Phase, Problem
from ostinato.model.config import ModelConfig
from ostinato.parallel.layout import Layout

LONG = 8192  # tokens of a sequence from which on its rows may be cut over context ranks
VIRTUAL = (1, 2, 4)


def divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def layouts(problem: Problem, world: int, phase: Phase) -> Iterator[Layout]:
    """All layouts of ``world`` ranks that the model can be cut by and the phase can use."""
    config, per_node = problem.config, problem.cluster.per_node
    sampling = phase == Phase.ROLLOUT
    for tensor in divisors(world):
        if tensor > per_node or config.num_heads % tensor or config.num_kv_heads % tensor:
            continue
        pipelines = divisors(world // tensor)
        pipelines = tuple(p for p in pipelines if p <= config.num_layers)
        for pipeline in (1,) if sampling else pipelines:
            ranks = world // tensor // pipeline
            for context in (1,) if sampling else _contexts(problem, tensor, ranks):
                data = ranks // context
                axes = product(
                    _experts(config, data * context * tensor, tensor),
                    (1,) if sampling else _virtual(config, pipeline),
                    (1,) if sampling else _shards(data, per_node, tensor * context),
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
                    if _possible(problem, layout, sampling=sampling):
                        yield layout


def _contexts(problem: Problem, tensor: int, ranks: int) -> tuple[int, ...]:
    if problem.work.longest < LONG:
        return (1,)
    return tuple(c for c in divisors(ranks) if c * tensor <= problem.cluster.per_node)


def _experts(config: ModelConfig, ranks: int, tensor: int) -> tuple[tuple[int, int], ...]:
    """(e, x)."""
    moe = config.moe
    if moe is None:
        return ((1, 1),)
    found = [(e, 1) for e in divisors(ranks) if moe.num_experts % e == 0]
    if tensor > 1 and moe.intermediate_size % tensor == 0:
        found += [(e, tensor) for e in divisors(ranks // tensor) if moe.num_experts % e == 0]
    return tuple(found)


def _virtual(config: ModelConfig, pipeline: int) -> tuple[int, ...]:
    if pipeline == 1:
        return (1,)
    return tuple(v for v in VIRTUAL if v * pipeline <= config.num_layers)


def _shards(data: int, per_node: int, inner: int) -> tuple[int, ...]:
    in_node = max(1, per_node // inner)
    return tuple(sorted({1, data, in_node if data % in_node == 0 else 1}))


def _possible(problem: Problem, layout: Layout, *, sampling: bool) -> bool:
    try:
        layout.refuse(problem.config)
        if sampling:
            refuse(problem.sampler, problem.config, layout)
    except ValueError:
        return False
    return True
