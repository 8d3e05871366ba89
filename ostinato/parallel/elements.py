"""Numbers of values that one rank keeps of weights, adapters and their prepared copies, by stage, and of
trained values by the ranks over which their gradients are summed.

All of it comes from ``model.share.find_spans``, the function by which shards are loaded, trained and saved; a
layer is counted once for all layers of its kind, since every one of them is cut alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache

from ostinato.model.config import ModelConfig, QKNorm
from ostinato.model.shapes import STACKED, AdapterSpec, compute_adapter_shapes, compute_layer_shapes
from ostinato.model.share import Share, count_elements, find_spans, make_local_config
from ostinato.parallel.layout import Layout
from ostinato.parallel.shares import find_summed_axes

Shape = tuple[int, ...]
Axes = tuple[str, ...]  # over which a gradient is summed, one after the other


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
    copies: int = 0  # factors as a forward uses them: stacked, with a block-diagonal B for each matrix

    def __add__(self, other: Elements) -> Elements:
        return Elements(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )

    def __mul__(self, times: int) -> Elements:
        return Elements(**{field.name: getattr(self, field.name) * times for field in fields(self)})

    @property
    def trainable(self) -> int:
        """Number of values that full-parameter training updates."""
        return self.matrices + self.routers + self.experts + self.ends + self.vectors


def layer_tensors(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """Shapes of all tensors of one layer by name within it: linear maps, biases, norms, the router's bias."""
    linears = compute_layer_shapes(config, layer)
    biased_names = [f"attn.{name}" for name in "qkv" if config.qkv_bias] + ["attn.o"] * config.o_bias
    biased_names += [f"mlp.{name}" for name in ("gate", "up", "down") if config.mlp_bias]
    shapes = dict(linears)
    shapes |= {f"{name}.bias": linears[name][-2:-1] for name in biased_names if name in linears}
    norms = ("attn_norm", "mlp_norm", *(("attn_out_norm", "mlp_out_norm") if config.post_norms else ()))
    shapes |= dict.fromkeys(norms, (config.hidden_size,))
    if config.qk_norm != QKNorm.NONE:
        per_head = config.qk_norm == QKNorm.HEAD
        shapes["attn.q_norm"] = (config.head_dim if per_head else linears["attn.q"][0],)
        shapes["attn.k_norm"] = (config.head_dim if per_head else linears["attn.k"][0],)
    if config.mla is not None:
        shapes["attn.kv_a_norm"] = (config.mla.kv_lora_rank,)
        if config.mla.q_lora_rank is not None:
            shapes["attn.q_a_norm"] = (config.mla.q_lora_rank,)
    if is_moe(config, layer) and config.moe is not None and config.moe.correction_bias:
        shapes["moe.correction_bias"] = (config.moe.num_experts,)
    return shapes


def is_moe(config: ModelConfig, layer: int) -> bool:
    return config.moe is not None and layer in config.moe.layers


@lru_cache(maxsize=64)
def layer_of(config: ModelConfig, *, moe: bool) -> int | None:
    """A layer of this kind, to stand for all of them; None where there is none."""
    return next((layer for layer in range(config.num_layers) if is_moe(config, layer) == moe), None)


def local(config: ModelConfig, layout: Layout) -> ModelConfig:
    """The config of a model that equals one rank's part of this one."""
    return _make_local_config(config, layout.tensor, layout.expert, layout.expert_tensor)


@lru_cache(maxsize=1024)
def _make_local_config(config: ModelConfig, tensor: int, expert: int, expert_tensor: int) -> ModelConfig:
    return make_local_config(config, _make_share(config, tensor, expert, expert_tensor))


def _make_share(config: ModelConfig, tensor: int, expert: int, expert_tensor: int) -> Share:
    """The share of the first rank; all others keep as many values."""
    experts = None
    if config.moe is not None and expert > 1:
        experts = (tuple(range(config.moe.num_experts // expert)),) * len(config.moe.layers)
    return Share(
        layers=tuple(range(config.num_layers)), tensor=tensor, experts=experts, expert_tensor=expert_tensor
    )


@lru_cache(maxsize=8192)
def chunk_layers(config: ModelConfig, layout: Layout, stage: int) -> tuple[tuple[int, ...], ...]:
    """The layers of every chunk of a stage."""
    spans = layout.chunk_layers(config.num_layers)
    return tuple(tuple(spans[chunk]) for chunk in layout.chunks_of(stage))


def layers_by_kind(config: ModelConfig, layout: Layout, stage: int) -> dict[bool, int]:
    """Number of dense layers (False) and of mixtures of experts (True) of a stage."""
    layers = [layer for chunk in chunk_layers(config, layout, stage) for layer in chunk]
    mixtures = sum(is_moe(config, layer) for layer in layers)
    return {False: len(layers) - mixtures, True: mixtures}


@lru_cache(maxsize=65536)
def stage_elements(config: ModelConfig, adapter: AdapterSpec | None, layout: Layout, stage: int) -> Elements:
    """Elements of a rank of ``stage``, before FSDP cuts them."""
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    num_tables = is_first + (is_last and not (config.tie_embeddings and is_first))
    elements = Elements(ends=num_tables * table_size(config, layout), vectors=config.hidden_size * is_last)
    for moe, count in layers_by_kind(config, layout, stage).items():
        elements = elements + layer_elements(config, adapter, layout, moe=moe) * count
    return elements


def table_size(config: ModelConfig, layout: Layout) -> int:
    """Number of values of the embedding, or of the head, on a rank."""
    return config.vocab_size // layout.tensor * config.hidden_size


def layer_elements(
    config: ModelConfig, adapter: AdapterSpec | None, layout: Layout, *, moe: bool
) -> Elements:
    """Elements of one layer of a kind on a rank."""
    expert, expert_tensor = (layout.expert, layout.expert_tensor) if moe else (1, 1)
    return _count_layer(config, adapter, layout.tensor, expert, expert_tensor, moe)


@lru_cache(maxsize=4096)
def _count_layer(
    config: ModelConfig, adapter: AdapterSpec | None, tensor: int, expert: int, expert_tensor: int, moe: bool
) -> Elements:
    """``layer_elements`` by the sizes of the axes that it depends on; none where no layer is of this kind."""
    layer = layer_of(config, moe=moe)
    if layer is None:
        return Elements()
    share, prefix = _make_share(config, tensor, expert, expert_tensor), f"layers.{layer}."
    counts, linears = Counter[str](), compute_layer_shapes(config, layer)
    for name, shape in layer_tensors(config, layer).items():
        kind = "vectors"
        if name in linears:
            kind = "experts" if len(shape) == 3 else "routers" if name == "router" else "matrices"
        kind = "untrained" if name == "moe.correction_bias" else kind
        counts[kind] += count_elements(find_spans(config, share, prefix + name, shape))
    if adapter is not None:
        sizes = {
            name.removeprefix(prefix): count_elements(find_spans(config, share, name, shape))
            for name, shape in _list_trained(config, adapter, layer)
        }
        counts["adapters"] = sum(sizes.values())
        counts["copies"] = _count_copies(config, adapter, share, layer, sizes)
    return Elements(**counts)


def _list_trained(
    config: ModelConfig, adapter: AdapterSpec | None, layer: int
) -> Iterator[tuple[str, Shape]]:
    """(name in the model, such as "layers.3.attn.q.A", shape) of everything in a layer that has a
    gradient."""
    prefix = f"layers.{layer}."
    if adapter is None:
        for name, shape in layer_tensors(config, layer).items():
            if not name.endswith("correction_bias"):
                yield prefix + name, shape
        return
    for name, (a, b) in _list_factors(config, adapter).items():
        if name.startswith(prefix):
            yield f"{name}.A", a
            yield f"{name}.B", b


@lru_cache(maxsize=32)
def _list_factors(config: ModelConfig, adapter: AdapterSpec) -> dict[str, tuple[Shape, Shape]]:
    return compute_adapter_shapes(config, adapter)


def _count_copies(
    config: ModelConfig, adapter: AdapterSpec, share: Share, layer: int, sizes: dict[str, int]
) -> int:
    """Number of values of ``Adapters.prepare`` for one layer, as ``lora._stack`` makes them: the A of a
    stored matrix above each other, its B block-diagonal over all outputs, adapted or not."""
    shapes = compute_layer_shapes(make_local_config(config, share), layer)
    slots = [names for names in STACKED.values() if names[0] in shapes or names[-1] in shapes]
    slots = [names for names in slots if (len(names) == 3) == (config.mla is None) or names[0] != "attn.q"]
    total = 0
    for names in slots:
        adapted_names = [name for name in names if f"{name}.A" in sizes]
        outputs = sum(shapes[name][-2] for name in names if name in shapes)
        total += (
            sum(sizes[f"{name}.A"] for name in adapted_names) + adapter.rank * len(adapted_names) * outputs
        )
    if not any(name.startswith("experts.") for name in sizes):
        return total
    rank, (num_local, width, hidden) = adapter.get_rank(".experts."), shapes["experts.gate"]
    adapted_names = [name for name in ("experts.gate", "experts.up") if f"{name}.A" in sizes]
    first_factors = sum(sizes[f"{name}.A"] for name in adapted_names) if adapted_names else rank * hidden
    total += first_factors + rank * max(1, len(adapted_names)) * 2 * width * num_local
    down_sizes = [sizes[f"experts.down.{side}"] for side in "AB" if f"experts.down.{side}" in sizes]
    return total + (sum(down_sizes) if down_sizes else rank * (num_local * width + hidden))


def gradient_sums(
    config: ModelConfig, adapter: AdapterSpec | None, layout: Layout, stage: int
) -> Counter[Axes]:
    """Number of trained values of a stage on one rank, by the axes over which their gradients are summed
    (``shares.find_summed_axes``); the padding of pieces (f) is not counted."""
    sums = Counter[Axes]()
    for moe, count in layers_by_kind(config, layout, stage).items():
        axis_sizes = (layout.tensor, layout.expert, layout.expert_tensor)
        shard = layout.shard if adapter is None else 1
        for axes, values in (
            _count_layer_sums(config, adapter, *axis_sizes, shard, moe).items() if count else ()
        ):
            sums[axes] += count * values
    if adapter is None:
        is_last = stage == layout.pipeline - 1
        num_tables = (stage == 0) + (is_last and not (config.tie_embeddings and stage == 0))
        sums["s" if layout.tensor == 1 else "dc",] += num_tables * table_size(config, layout)
        sums["s",] += config.hidden_size * is_last
    return sums


@lru_cache(maxsize=4096)
def _count_layer_sums(
    config: ModelConfig,
    adapter: AdapterSpec | None,
    tensor: int,
    expert: int,
    expert_tensor: int,
    shard: int,
    moe: bool,
) -> Counter[Axes]:
    """``gradient_sums`` of one layer of a kind."""
    layer, sums = layer_of(config, moe=moe), Counter[Axes]()
    if layer is None:
        return sums
    share = _make_share(config, tensor, expert, expert_tensor)
    for name, shape in _list_trained(config, adapter, layer):
        num_pieces = shard if len(shape) == 2 else 1
        axes = find_summed_axes(name, shape, share, in_pieces=num_pieces > 1)
        sums[axes] += -(-count_elements(find_spans(config, share, name, shape)) // num_pieces)
    return sums
