"""The part of a model that one rank keeps, and where that part lies in the whole.

Everything about sharding follows from ``find_spans``: the parts of a checkpoint that are read, the cuts of an
adapter's factors, the assembly of shards for a checkpoint or a publish, and the counts of a planner.
Names and shapes of the whole are those of ``shapes.compute_linear_shapes`` and of the decoder's parameters;
the shapes of a rank are those of ``make_local_config``. No torch here: a planner imports it.

Cut by tensor ranks, after Megatron-LM (arXiv 1909.08053 section 3): the outputs of maps that read the hidden
state (q, k, v, gate, up, the up-projections of latents), the inputs of maps that write it (o, down), the rows
of embedding and head. Whole everywhere: norms, routers, down-projections to latents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod

from ostinato.model.config import ModelConfig

OUTPUTS = (
    "attn.q",
    "attn.k",
    "attn.v",
    "attn.q_b",
    "attn.kv_b",
    "mlp.gate",
    "mlp.up",
    "shared.gate",
    "shared.up",
)
INPUTS = ("attn.o", "mlp.down", "shared.down")

# parameter of the decoder -> the logical maps that are stacked in it, output by output
MEMBERS = {
    "attn.qkv": ("attn.q", "attn.k", "attn.v"),
    "mlp.gate_up": ("mlp.gate", "mlp.up"),
    "shared.gate_up": ("shared.gate", "shared.up"),
    "moe.gate_up": ("experts.gate", "experts.up"),
    "moe.down": ("experts.down",),
    "moe.router": ("router",),
}

Spans = tuple[range, ...]  # along one dimension of the whole: the indices that are kept, in their order


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part that a rank keeps: some layers, of these a part of heads, widths and vocabulary, some experts.

    ``experts``: by MoE layer of the model (not of the share), the ids that are kept, in their order here;
    None: all of them. Every layer keeps equally many.
    """

    layers: tuple[int, ...]
    has_embedding: bool = True  # keeps the embedding: its layers are the first
    has_head: bool = True  # keeps the final norm and the head: its layers are the last
    tensor: int = 1
    tensor_rank: int = 0
    experts: tuple[tuple[int, ...], ...] | None = None
    expert_tensor: int = 1
    expert_tensor_rank: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether its layers are here whole."""
        return self.tensor == 1 and self.expert_tensor == 1 and self.experts is None

    @classmethod
    def all(cls, config: ModelConfig) -> Share:
        return cls(layers=tuple(range(config.num_layers)))


def make_local_config(config: ModelConfig, share: Share) -> ModelConfig:
    """Make the config that a share would have if it were a whole model: its heads, widths, vocabulary rows
    and kept experts. Layers keep their numbers and routers their outputs."""
    tensor_ranks, moe = share.tensor, config.moe
    if moe is not None:
        moe = replace(
            moe,
            num_kept=None if share.experts is None else len(share.experts[0]),
            intermediate_size=moe.intermediate_size // share.expert_tensor,
            shared_intermediate_size=moe.shared_intermediate_size // tensor_ranks,
        )
    return replace(
        config,
        vocab_size=config.vocab_size // tensor_ranks,
        intermediate_size=config.intermediate_size // tensor_ranks,
        num_heads=config.num_heads // tensor_ranks,
        num_kv_heads=config.num_kv_heads // tensor_ranks,
        moe=moe,
    )


def find_spans(config: ModelConfig, share: Share, name: str, shape: Sequence[int]) -> tuple[Spans, ...]:
    """Find, for each dimension of a tensor of the whole model, the indices that the share keeps, in its
    order.

    ``name``: of a logical map ("layers.3.attn.q"), of its bias (with ".bias"), of an adapter's factor
    ("layers.3.attn.q.A"), or of a parameter of the decoder ("layers.3.attn.qkv", "embed"). ``shape``: of the
    whole tensor. The share must keep the layer of the tensor, or its embedding or head.
    """
    spans: list[Spans] = [(range(size),) for size in shape]
    if name in ("embed", "head"):
        spans[0] = (_cut_part(shape[0], share.tensor, share.tensor_rank),)
        return tuple(spans)
    if not name.startswith("layers."):
        return tuple(spans)
    _, layer, role = name.split(".", 2)
    role, _, suffix = role.rpartition(".") if role.endswith((".A", ".B", ".bias")) else (role, "", "")
    if role.endswith("_bias"):  # of a parameter: qkv_bias, gate_up_bias, o_bias, down_bias
        role, suffix = role.removesuffix("_bias"), "bias"
    members = MEMBERS.get(role, (role,))
    if members[0].startswith("experts.") and len(shape) == 3 and share.experts is not None and config.moe:
        ids = share.experts[config.moe.layers.index(int(layer))]
        spans[0] = _merge_runs(ids)
    output_dim = {"A": None, "B": -2, "bias": -1}.get(suffix, -2)
    input_dim = {"A": -1, "B": None, "bias": None}.get(suffix, -1)
    cut_side = _find_cut_side(members[0], share)
    if cut_side == "outputs" and output_dim is not None:
        spans[output_dim] = _cut_stacked(config, members, shape[output_dim], *_locate_part(members[0], share))
    elif cut_side == "inputs" and input_dim is not None:
        spans[input_dim] = (_cut_part(shape[input_dim], *_locate_part(members[0], share)),)
    return tuple(spans)


def is_cut(share: Share, name: str, shape: Sequence[int]) -> bool:
    """Return whether the share keeps a part of this tensor that other tensor ranks do not keep (see
    ``find_spans``)."""
    if name in ("embed", "head"):
        return share.tensor > 1
    if not name.startswith("layers."):
        return False
    role = name.split(".", 2)[2]
    role, _, suffix = role.rpartition(".") if role.endswith((".A", ".B", ".bias")) else (role, "", "")
    if role.endswith("_bias"):
        role, suffix = role.removesuffix("_bias"), "bias"
    first_member = MEMBERS.get(role, (role,))[0]
    if _locate_part(first_member, share)[0] == 1:
        return False
    cut_side = _find_cut_side(first_member, share)
    return (cut_side == "outputs" and suffix != "A") or (cut_side == "inputs" and suffix not in ("B", "bias"))


def is_expert(name: str, shape: Sequence[int]) -> bool:
    """Return whether this tensor has a part for every expert. The shared factors of shared_outer have
    none."""
    return len(shape) == 3 and (".experts." in name or ".moe." in name)


def count_elements(spans: Sequence[Spans]) -> int:
    """Count the elements in the spans of a tensor."""
    return prod(sum(len(span) for span in ranges) for ranges in spans)


def _find_cut_side(member: str, share: Share) -> str:
    """Return the side of a logical map that is cut: "outputs", "inputs", or "" if neither is."""
    if member in OUTPUTS or member in ("experts.gate", "experts.up"):
        return "outputs"
    return "inputs" if member in INPUTS or member == "experts.down" else ""


def _locate_part(member: str, share: Share) -> tuple[int, int]:
    """Return (number of parts into which this map is cut, index of the part that the share keeps)."""
    if member.startswith("experts."):
        return share.expert_tensor, share.expert_tensor_rank
    return share.tensor, share.tensor_rank


def _cut_stacked(
    config: ModelConfig, members: Sequence[str], num_outputs: int, num_parts: int, part_idx: int
) -> Spans:
    """Return the spans of the same part of each of several maps, which are stacked above each other in
    ``num_outputs`` outputs."""
    if members[0] == "attn.q" and len(members) == 3:
        head_counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        map_sizes = [num_heads * config.head_dim for num_heads in head_counts]
    else:
        map_sizes = [num_outputs // len(members)] * len(members)
    starts = [sum(map_sizes[:index]) for index in range(len(map_sizes) + 1)]
    return tuple(_cut_part(stop - start, num_parts, part_idx, start) for start, stop in pairwise(starts))


def _cut_part(size: int, num_parts: int, part_idx: int, start: int = 0) -> range:
    """Return the span of one of equal parts of the indices from ``start`` on."""
    part_size = size // num_parts
    return range(start + part_idx * part_size, start + (part_idx + 1) * part_size)


def _merge_runs(ids: Sequence[int]) -> Spans:
    """Merge consecutive ids into ranges."""
    runs: list[range] = []
    for index in ids:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return tuple(runs)


Box = tuple[slice, ...]


def iterate_blocks(spans: Sequence[Spans]) -> Iterator[tuple[Box, Box]]:
    """Yield (place in the whole, place in the part) for every contiguous block of a part, in the order of the
    part."""
    pairs_by_dim = []
    for ranges in spans:
        place_pairs, start = [], 0
        for span in ranges:
            place_pairs.append((slice(span.start, span.stop), slice(start, start + len(span))))
            start += len(span)
        pairs_by_dim.append(place_pairs)
    for block in product(*pairs_by_dim):
        yield tuple(whole_place for whole_place, _ in block), tuple(part_place for _, part_place in block)


def is_whole(spans: Sequence[Spans], shape: Sequence[int]) -> bool:
    """Return whether the part is all of ``shape``, in its own order."""
    return all(ranges == (range(size),) for ranges, size in zip(spans, shape, strict=True))
