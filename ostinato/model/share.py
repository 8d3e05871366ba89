"""The part of a model that one rank keeps, and where that part lies in the whole.

Everything about sharding follows from ``find_spans``: the parts of a checkpoint that are read, the cuts of an
adapter's factors, the assembly of shards for a checkpoint or a publish, and the counts of a planner.
Names and shapes of the whole are those of ``lora.linear_shapes`` and of the decoder's parameters; a rank's
own shapes are those of ``local_config``. No torch here: a planner imports it.

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
        """Whether everything of its layers is here."""
        return self.tensor == 1 and self.expert_tensor == 1 and self.experts is None

    @classmethod
    def all(cls, config: ModelConfig) -> Share:
        return cls(layers=tuple(range(config.num_layers)))


def local_config(config: ModelConfig, share: Share) -> ModelConfig:
    """The model as if a share were all of it: its heads, widths, vocabulary rows, kept experts. Layers keep
    their numbers and routers their outputs."""
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
    """For each dimension of a tensor of the whole model, the indices that the share keeps, in its order.

    ``name``: of a logical map ("layers.3.attn.q"), of its bias (with ".bias"), of an adapter's factor
    ("layers.3.attn.q.A"), or of a parameter of the decoder ("layers.3.attn.qkv", "embed"). ``shape``: of the
    whole tensor. A tensor that a share does not keep at all (another layer's) is not requested.
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
    outputs = {"A": None, "B": -2, "bias": -1}.get(suffix, -2)
    inputs = {"A": -1, "B": None, "bias": None}.get(suffix, -1)
    cut = _find_cut_side(members[0], share)
    if cut == "outputs" and outputs is not None:
        spans[outputs] = _cut_stacked(config, members, shape[outputs], *_locate_part(members[0], share))
    elif cut == "inputs" and inputs is not None:
        spans[inputs] = (_cut_part(shape[inputs], *_locate_part(members[0], share)),)
    return tuple(spans)


def is_cut(share: Share, name: str, shape: Sequence[int]) -> bool:
    """Whether the share keeps a part of this tensor that other tensor ranks do not (see ``find_spans``)."""
    if name in ("embed", "head"):
        return share.tensor > 1
    if not name.startswith("layers."):
        return False
    role = name.split(".", 2)[2]
    role, _, suffix = role.rpartition(".") if role.endswith((".A", ".B", ".bias")) else (role, "", "")
    if role.endswith("_bias"):
        role, suffix = role.removesuffix("_bias"), "bias"
    first = MEMBERS.get(role, (role,))[0]
    if _locate_part(first, share)[0] == 1:
        return False
    cut = _find_cut_side(first, share)
    return (cut == "outputs" and suffix != "A") or (cut == "inputs" and suffix not in ("B", "bias"))


def is_expert(name: str, shape: Sequence[int]) -> bool:
    """Whether this tensor has a part for every expert. The shared factors of shared_outer have none."""
    return len(shape) == 3 and (".experts." in name or ".moe." in name)


def size_of(spans: Sequence[Spans]) -> int:
    """The number of elements in the spans of a tensor."""
    return prod(sum(len(span) for span in ranges) for ranges in spans)


def _find_cut_side(member: str, share: Share) -> str:
    """The side of a logical map that is cut: "outputs", "inputs", or empty for neither."""
    if member in OUTPUTS or member in ("experts.gate", "experts.up"):
        return "outputs"
    return "inputs" if member in INPUTS or member == "experts.down" else ""


def _locate_part(member: str, share: Share) -> tuple[int, int]:
    """(number of parts into which this map is cut, index of the part that the share keeps)."""
    if member.startswith("experts."):
        return share.expert_tensor, share.expert_tensor_rank
    return share.tensor, share.tensor_rank


def _cut_stacked(config: ModelConfig, members: Sequence[str], size: int, parts: int, part: int) -> Spans:
    """The spans, in ``size`` outputs of maps that are stacked above each other, of the same part of each
    map."""
    if members[0] == "attn.q" and len(members) == 3:
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        sizes = [number * config.head_dim for number in heads]
    else:
        sizes = [size // len(members)] * len(members)
    starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    return tuple(_cut_part(stop - start, parts, part, start) for start, stop in pairwise(starts))


def _cut_part(size: int, parts: int, part: int, start: int = 0) -> range:
    width = size // parts
    return range(start + part * width, start + (part + 1) * width)


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


def blocks(spans: Sequence[Spans]) -> Iterator[tuple[Box, Box]]:
    """(place in the whole, place in the part) of every contiguous block of a part, in the order of the
    part."""
    by_dimension = []
    for ranges in spans:
        places, start = [], 0
        for span in ranges:
            places.append((slice(span.start, span.stop), slice(start, start + len(span))))
            start += len(span)
        by_dimension.append(places)
    for block in product(*by_dimension):
        yield tuple(whole for whole, _ in block), tuple(part for _, part in block)


def is_whole(spans: Sequence[Spans], shape: Sequence[int]) -> bool:
    """Whether the part is all of ``shape``, in its own order."""
    return all(ranges == (range(size),) for ranges, size in zip(spans, shape, strict=True))
