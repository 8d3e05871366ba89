"""The names of tensors in a Hugging Face checkpoint, and the place of each in a decoder.

One function, ``list_hf_tensors``, names every tensor as a view into the decoder's weights. Loading copies
files into the views and saving writes the views to files, so the two cannot disagree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ostinato.model.config import ModelConfig
from ostinato.model.decoder import Decoder
from ostinato.model.shapes import compute_linear_shapes
from ostinato.model.share import Spans, find_spans
from ostinato.model.weights import Attention, Block, Moe

_HF_ROLES = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_a": "self_attn.q_a_proj",
    "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_b": "self_attn.kv_b_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "shared.gate": "mlp.shared_experts.gate_proj",
    "shared.up": "mlp.shared_experts.up_proj",
    "shared.down": "mlp.shared_experts.down_proj",
    "router": "mlp.gate",
    "experts.gate": "mlp.experts.{}.gate_proj",
    "experts.up": "mlp.experts.{}.up_proj",
    "experts.down": "mlp.experts.{}.down_proj",
}
_MIXTRAL_ROLES = {
    "router": "block_sparse_moe.gate",
    "experts.gate": "block_sparse_moe.experts.{}.w1",
    "experts.up": "block_sparse_moe.experts.{}.w3",
    "experts.down": "block_sparse_moe.experts.{}.w2",
}


def name_hf_module(logical: str, model_type: str) -> str:
    """Name the module of a logical map: ``layers.3.attn.q`` is ``model.layers.3.self_attn.q_proj``. The name
    of an expert's module has ``{}`` for the index of the expert."""
    _, layer, role = logical.split(".", 2)
    roles = _HF_ROLES | _MIXTRAL_ROLES if model_type == "mixtral" else _HF_ROLES
    return f"model.layers.{layer}.{roles[role]}"


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, of which a decoder keeps all or a part."""

    view: Tensor  # its place in the decoder's weights
    spans: tuple[Spans, ...]  # the part that is kept
    shape: tuple[int, ...]  # of the tensor in the file
    names: frozenset[str]  # those of ``list_hf_tensors`` that it contains


def list_hf_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in a checkpoint, view into the decoder's weights) for every tensor that the decoder
    keeps."""
    for name, _, _, view in _list_tensors(decoder):
        yield name, view


def list_stored_tensors(decoder: Decoder) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint of which ``decoder`` keeps a part, by name: those of
    ``list_hf_tensors``, and all experts of a layer as two tensors, as transformers v5 has them in memory."""
    config, share = decoder.config, decoder.share
    shapes, tensors_by_name = _collect_whole_shapes(config), {}
    spans: dict[str, tuple[Spans, ...]] = {}
    for name, logical, expert, view in _list_tensors(decoder):
        shape = shapes.get(logical, tuple(view.shape))
        if logical not in spans:
            spans[logical] = find_spans(config, share, logical, shape)
        skipped_dims = expert is not None  # a file per expert has no dimension of experts
        tensors_by_name[name] = StoredTensor(
            view, spans[logical][skipped_dims:], shape[skipped_dims:], frozenset((name,))
        )
    for layer, block in zip(share.layers, decoder.blocks, strict=True):
        if isinstance(block.mlp, Moe):
            tensors_by_name |= _fuse_experts(decoder, shapes, layer, block.mlp)
    return tensors_by_name


def normalise_name(name: str, config: ModelConfig) -> str:
    """Return the name that this module uses for a tensor. transformers v5 calls Mixtral's block ``mlp`` in
    memory, and a file may have either name."""
    return name.replace(".mlp.", ".block_sparse_moe.") if config.model_type == "mixtral" else name


def is_extra_layer(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor is of a layer after the last, as DeepSeek-V3 files have them for multi-token
    prediction."""
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return config.mla is not None and match is not None and int(match[1]) >= config.num_layers


def is_redundant(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor is not needed: a head that config.json ties to the embedding, or rotary
    frequencies, which are computed."""
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")


def _list_tensors(decoder: Decoder) -> Iterator[tuple[str, str, int | None, Tensor]]:
    """Yield (name in a checkpoint, name in ``share.find_spans``, expert or None, view) for every tensor that
    the decoder keeps."""
    config, share = decoder.config, decoder.share
    if share.has_embedding or (share.has_head and config.tie_embeddings):
        yield "model.embed_tokens.weight", "embed", None, decoder.embed
    for layer, block in zip(share.layers, decoder.blocks, strict=True):
        for name, role, weight in _list_vectors(block):
            yield f"model.layers.{layer}.{name}", f"layers.{layer}.{role}", None, weight
    for logical, linear in decoder.named_linears().items():
        module = name_hf_module(logical, config.model_type)
        if linear.weight.dim() == 3:
            for expert, weight in zip(_list_experts(decoder, logical), linear.weight.unbind(), strict=True):
                yield f"{module.format(expert)}.weight", logical, expert, weight
            continue
        yield f"{module}.weight", logical, None, linear.weight
        if linear.bias is not None:
            yield f"{module}.bias", f"{logical}.bias", None, linear.bias
    if share.has_head:
        yield "model.norm.weight", "norm", None, decoder.norm
        if not config.tie_embeddings:
            yield "lm_head.weight", "head", None, decoder.head


def _list_vectors(block: Block) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (name in a checkpoint, name in the decoder, weight) for the norms and the correction bias of a
    layer."""
    attn = block.attn
    yield "input_layernorm.weight", "attn_norm", block.attn_norm
    if block.attn_out_norm is None or block.mlp_out_norm is None:
        yield "post_attention_layernorm.weight", "mlp_norm", block.mlp_norm
    else:
        yield "post_attention_layernorm.weight", "attn_out_norm", block.attn_out_norm
        yield "pre_feedforward_layernorm.weight", "mlp_norm", block.mlp_norm
        yield "post_feedforward_layernorm.weight", "mlp_out_norm", block.mlp_out_norm
    norms = (
        {"q_norm": attn.q_norm, "k_norm": attn.k_norm}
        if isinstance(attn, Attention)
        else {"q_a_layernorm": attn.q_a_norm, "kv_a_layernorm": attn.kv_a_norm}
    )
    for norm, weight in norms.items():
        if weight is not None:
            yield f"self_attn.{norm}.weight", f"attn.{norm.replace('layernorm', 'norm')}", weight
    if isinstance(block.mlp, Moe) and block.mlp.correction_bias is not None:
        yield "mlp.gate.e_score_correction_bias", "moe.correction_bias", block.mlp.correction_bias


def _list_experts(decoder: Decoder, logical: str) -> Sequence[int]:
    """Return the ids of the experts of a layer that the share keeps, in its order."""
    moe, ids = decoder.config.moe, decoder.share.experts
    assert moe is not None
    return range(moe.num_experts) if ids is None else ids[moe.layers.index(int(logical.split(".")[1]))]


def _fuse_experts(
    decoder: Decoder, shapes: dict[str, tuple[int, ...]], layer: int, moe: Moe
) -> dict[str, StoredTensor]:
    """Return all experts of a layer as two tensors: gate and up together, and down."""
    config, tensors_by_name = decoder.config, {}
    for name, roles, view in (("gate_up", ("gate", "up"), moe.gate_up), ("down", ("down",), moe.down)):
        logical = [f"layers.{layer}.experts.{role}" for role in roles]
        modules = [name_hf_module(logical_name, config.model_type) for logical_name in logical]
        num_experts, outputs, inputs = shapes[logical[0]]
        shape = (num_experts, outputs * len(roles), inputs)
        spans = find_spans(config, decoder.share, f"layers.{layer}.moe.{name}", shape)
        ids = _list_experts(decoder, logical[0])
        names = frozenset(f"{module.format(expert)}.weight" for module in modules for expert in ids)
        assert isinstance(view, Tensor)  # codes are made of a decoder that has been loaded
        tensors_by_name[f"{modules[0].partition('{}')[0]}{name}_proj"] = StoredTensor(
            view, spans, shape, names
        )
    return tensors_by_name


def _collect_whole_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes, in the whole model, of the tensors that ranks may cut: linear maps, their biases,
    embedding and head."""
    linears = compute_linear_shapes(config)
    biases = {f"{name}.bias": (shape[-2],) for name, shape in linears.items()}
    table = (config.vocab_size, config.hidden_size)
    return linears | biases | {"embed": table, "head": table}
