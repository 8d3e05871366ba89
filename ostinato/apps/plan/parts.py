"""How much of a model one rank keeps: elements of weights, adapters and their prepared copies, by stage.

All of it comes from ``model.share.placed``, the function by which shards are loaded, trained and saved; a
layer is counted once for all layers of its kind, since every one of them is cut alike.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

from ostinato.apps.plan.counts import layer_tensors
from ostinato.model.config import ModelConfig
from ostinato.model.shapes import STACKED, AdapterSpec, adapter_shapes, layer_shapes
from ostinato.model.share import Share, local_config, placed, size_of
from ostinato.parallel.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Numbers of values that a rank keeps."""

    matrices: int = 0  # linear maps outside of routed experts: what FSDP cuts, and what may be quantised
    routers: int = 0  # FSDP cuts them too; never quantised
    experts: int = 0  # cut by e and x; may be quantised
    ends: int = 0  # embedding and head
    vectors: int = 0  # norms and biases
    untrained: int = 0  # fp32: the router's correction bias, which no gradient moves
    adapters: int = 0  # factors
    copies: int = 0  # of factors as a forward uses them: stacked, the B of one matrix block-diagonal

    def __add__(self, other: Elements) -> Elements:
        return Elements(
            **{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)}
        )

    def __mul__(self, times: int) -> Elements:
        return Elements(**{one.name: getattr(self, one.name) * times for one in fields(self)})

    @property
    def trainable(self) -> int:
        """In full-parameter training."""
        return self.matrices + self.routers + self.experts + self.ends + self.vectors


def local(config: ModelConfig, layout: Layout) -> ModelConfig:
    """The model as if one rank's part were all of it."""
    return _local(config, layout.tensor, layout.expert, layout.expert_tensor)


@lru_cache(maxsize=1024)
def _local(config: ModelConfig, tensor: int, expert: int, expert_tensor: int) -> ModelConfig:
    return local_config(config, share_of(config, tensor, expert, expert_tensor))


@lru_cache(maxsize=8192)
def chunk_layers(config: ModelConfig, layout: Layout, stage: int) -> tuple[tuple[int, ...], ...]:
    """The layers of every chunk of a stage."""
    spans = layout.chunk_layers(config.num_layers)
    return tuple(tuple(spans[chunk]) for chunk in layout.chunks_of(stage))


@lru_cache(maxsize=65536)
def stage_elements(config: ModelConfig, adapter: AdapterSpec | None, layout: Layout, stage: int) -> Elements:
    """What a rank of ``stage`` keeps, before FSDP cuts it."""
    layers = [layer for chunk in chunk_layers(config, layout, stage) for layer in chunk]
    sparse = sum(is_moe(config, layer) for layer in layers)
    first, last = stage == 0, stage == layout.pipeline - 1
    return (
        layer_elements(config, adapter, layout, moe=False) * (len(layers) - sparse)
        + layer_elements(config, adapter, layout, moe=True) * sparse
        + _ends(config, layout.tensor, first, last)
    )


def is_moe(config: ModelConfig, layer: int) -> bool:
    return config.moe is not None and layer in config.moe.layers


@lru_cache(maxsize=64)
def layer_of(config: ModelConfig, *, moe: bool) -> int | None:
    """A layer of this kind, to stand for all of them; None where there is none."""
    return next((layer for layer in range(config.num_layers) if is_moe(config, layer) == moe), None)


def layer_elements(
    config: ModelConfig, adapter: AdapterSpec | None, layout: Layout, *, moe: bool
) -> Elements:
    """Of one layer of a kind."""
    expert, expert_tensor = (layout.expert, layout.expert_tensor) if moe else (1, 1)
    return _layer(config, adapter, layout.tensor, expert, expert_tensor, moe)


@lru_cache(maxsize=4096)
def _layer(
    config: ModelConfig, adapter: AdapterSpec | None, tensor: int, expert: int, expert_tensor: int, moe: bool
) -> Elements:
    layer = layer_of(config, moe=moe)
    if layer is None:
        return Elements()
    share, prefix = share_of(config, tensor, expert, expert_tensor), f"layers.{layer}."

    def kept(name: str, shape: tuple[int, ...]) -> int:
        return size_of(placed(config, share, prefix + name, shape))

    found = dict.fromkeys((one.name for one in fields(Elements)), 0)
    linears = layer_shapes(config, layer)
    for name, shape in layer_tensors(config, layer).items():
        kind = "vectors"
        if name in linears:
            kind = "experts" if len(shape) == 3 else "routers" if name == "router" else "matrices"
        found["untrained" if name == "moe.correction_bias" else kind] += kept(name, shape)
    if adapter is not None:
        factors = _factors(config, adapter, prefix)
        sizes = {
            (name, part): kept(f"{name}.{part}", shape)
            for name, pair in factors.items()
            for part, shape in zip("AB", pair, strict=True)
        }
        found["adapters"] = sum(sizes.values())
        found["copies"] = _copies(config, adapter, share, layer, sizes)
    return Elements(**found)


def _factors(
    config: ModelConfig, adapter: AdapterSpec, prefix: str
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    shapes = adapter_shapes(config, adapter)
    return {name.removeprefix(prefix): pair for name, pair in shapes.items() if name.startswith(prefix)}


def _copies(
    config: ModelConfig, adapter: AdapterSpec, share: Share, layer: int, sizes: dict[tuple[str, str], int]
) -> int:
    """Elements of ``Adapters.prepared`` for one layer, as ``lora._stack`` makes them: the A of a stored
    matrix above each other, its B block-diagonal over all outputs, adapted or not."""
    shapes = layer_shapes(local_config(config, share), layer)
    slots = [members for members in STACKED.values() if members[0] in shapes or members[-1] in shapes]
    slots = [names for names in slots if (len(names) == 3) == (config.mla is None) or names[0] != "attn.q"]
    total = 0
    for members in slots:
        adapted = [name for name in members if (name, "A") in sizes]
        rank = adapter.rank * len(adapted)
        outputs = sum(shapes[name][-2] for name in members if name in shapes)
        total += sum(sizes[name, "A"] for name in adapted) + rank * outputs
    if not any(name.startswith("experts.") for name, _ in sizes):
        return total
    rank, (here, width, hidden) = adapter.rank_of(".experts."), shapes["experts.gate"]
    adapted = [name for name in ("experts.gate", "experts.up") if (name, "A") in sizes]
    total += (sum(sizes[name, "A"] for name in adapted) if adapted else rank * hidden) + (
        rank * max(1, len(adapted)) * 2 * width * here
    )
    if ("experts.down", "A") in sizes:
        return total + sizes["experts.down", "A"] + sizes["experts.down", "B"]
    return total + rank * (here * width + hidden)


def _ends(config: ModelConfig, tensor: int, first: bool, last: bool) -> Elements:
    share = share_of(config, tensor, 1, 1)
    table = size_of(placed(config, share, "embed", (config.vocab_size, config.hidden_size)))
    tables = first + (last and not (config.tie_embeddings and first))
    return Elements(ends=tables * table, vectors=config.hidden_size * last)


def share_of(config: ModelConfig, tensor: int, expert: int, expert_tensor: int) -> Share:
    """Of the first rank: all others keep as much."""
    kept = None
    if config.moe is not None and expert > 1:
        kept = (tuple(range(config.moe.num_experts // expert)),) * len(config.moe.layers)
    return Share(
        layers=tuple(range(config.num_layers)), tensor=tensor, experts=kept, expert_tensor=expert_tensor
    )
