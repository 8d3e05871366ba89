"""What is trained, leaf by leaf, as one rank keeps it: how much of it, and over whom its gradient is summed.

Follows from ``model.share`` alone, as the trainer's own leaves do (``parallel.leaves``). Layers of one kind
have the same leaves, so they are counted once per kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from math import ceil

from ostinato.apps.plan.comm import Message, ring
from ostinato.apps.plan.counts import end_tensors, layer_tensors
from ostinato.apps.plan.parts import is_moe, layer_of, share_of
from ostinato.model.config import ModelConfig
from ostinato.model.shapes import STACKED, AdapterSpec, adapter_shapes, layer_shapes
from ostinato.model.share import Share, placed, size_of
from ostinato.parallel.layout import Layout
from ostinato.parallel.shares import summed_over

Axes = tuple[str, ...]  # over which a gradient is summed, one after the other
Sizes = Counter[Axes]  # values by axes

NORM_BYTES = 8.0  # the sum of squares, in fp64


def layer_sizes(config: ModelConfig, adapter: AdapterSpec | None, layout: Layout, *, moe: bool) -> Sizes:
    """Trained values of one layer of a kind on a rank."""
    cuts = Layout(
        data=layout.stage_ranks // layout.tensor,
        tensor=layout.tensor,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
    )
    return _layer(config, adapter, cuts, layout.shard, moe)


@lru_cache(maxsize=4096)
def _layer(config: ModelConfig, adapter: AdapterSpec | None, cuts: Layout, shard: int, moe: bool) -> Sizes:
    layer, found = layer_of(config, moe=moe), Counter[Axes]()
    if layer is None:
        return found
    share = share_of(config, cuts.tensor, cuts.expert, cuts.expert_tensor)
    for name, shape in _trained(config, adapter, layer):
        in_pieces = shard > 1 and adapter is None and len(shape) == 2
        if not in_pieces:
            axes = summed_over(name, shape, share)
            found[axes] += size_of(placed(config, share, name, shape))
    if shard > 1 and adapter is None:
        for first, values in _stored(config, share, layer):
            name = f"layers.{layer}.{first}"
            axes = summed_over(name, layer_shapes(config, layer)[first], share, in_pieces=True)
            found[axes] += ceil(values / shard)
    return found


def _trained(
    config: ModelConfig, adapter: AdapterSpec | None, layer: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    prefix = f"layers.{layer}."
    if adapter is None:
        for name, shape in layer_tensors(config, layer).items():
            if not name.endswith("correction_bias"):  # no gradient goes there
                yield prefix + name, shape
        return
    for name, (a, b) in _adapters(config, adapter).items():
        if name.startswith(prefix):
            yield f"{name}.A", a
            yield f"{name}.B", b


@lru_cache(maxsize=32)
def _adapters(
    config: ModelConfig, adapter: AdapterSpec
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    return adapter_shapes(config, adapter)


def _stored(config: ModelConfig, share: Share, layer: int) -> Iterator[tuple[str, int]]:
    """(first of its logical maps, values on a rank) of every stored matrix of a layer but the experts'."""
    shapes = layer_shapes(config, layer)
    for slot, members in STACKED.items():
        if slot == ("qkv" if config.mla else "q") or any(one not in shapes for one in members):
            continue
        kept = (placed(config, share, f"layers.{layer}.{one}", shapes[one]) for one in members)
        yield members[0], sum(map(size_of, kept))


def gathered_values(config: ModelConfig, layout: Layout, *, moe: bool) -> int:
    """Values of one layer that lie in pieces over f and are gathered while it runs, padding included: all its
    matrices but the experts', which are cut by e (``parallel.fsdp``). 0 where nothing is cut."""
    return _gathered(config, layout.tensor, layout.shard, moe) if layout.shard > 1 else 0


@lru_cache(maxsize=4096)
def _gathered(config: ModelConfig, tensor: int, shard: int, moe: bool) -> int:
    layer = layer_of(config, moe=moe)
    if layer is None:
        return 0
    share = Share(layers=(layer,), tensor=tensor)
    return sum(ceil(values / shard) * shard for _, values in _stored(config, share, layer))


def end_sizes(config: ModelConfig, layout: Layout) -> dict[str, int]:
    """Values on a rank of what is in no layer, by name."""
    share = share_of(config, layout.tensor, layout.expert, layout.expert_tensor)
    return {name: size_of(placed(config, share, name, shape)) for name, shape in end_tensors(config).items()}


def gradient_sizes(config: ModelConfig, adapter: AdapterSpec | None, layout: Layout, stage: int) -> Sizes:
    """Trained values of a stage on one rank, ends included."""
    spans = layout.chunk_layers(config.num_layers)
    layers = [layer for chunk in layout.chunks_of(stage) for layer in spans[chunk]]
    found: Sizes = Counter()
    for moe in (False, True):
        number = sum(is_moe(config, layer) == moe for layer in layers)
        for axes, values in layer_sizes(config, adapter, layout, moe=moe).items() if number else ():
            found[axes] += number * values
    if adapter is None:
        ends, last = end_sizes(config, layout), stage == layout.pipeline - 1
        tied = config.tie_embeddings and last
        kept = ["embed"] * (stage == 0 or tied) + ["norm", "head"] * last
        for name in kept:
            axes = ("s",) if name == "norm" or layout.tensor == 1 else ("dc",)
            found[axes] += ends.get(name, 0)
    return found


def gradient_messages(
    config: ModelConfig, adapter: AdapterSpec | None, layout: Layout, stage: int, width: float
) -> list[Message]:
    """Sums of gradients once per optimizer step, and of their squares."""
    ranks = {
        "s": layout.stage_ranks,
        "dc": layout.data * layout.context,
        "dcf": layout.data // layout.shard * layout.context,
        "r": layout.expert_replicas,
        "t": layout.tensor,
    }
    sizes = gradient_sizes(config, adapter, layout, stage)
    found = [
        one
        for axes, values in sizes.items()
        for axis in axes
        for one in ring("all_reduce", axis, ranks[axis], values * width)
    ]
    ends = stage in (0, layout.pipeline - 1)
    if adapter is None and config.tie_embeddings and layout.pipeline > 1 and ends:
        found.append(Message("send_recv", "p", end_sizes(config, layout)["embed"] * width))
    return found + ring("all_reduce", "all", layout.world, NORM_BYTES)
