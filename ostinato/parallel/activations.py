"""Bytes that a layer keeps for its backward, tensor by tensor, as our decoder under autograd keeps them.

The list follows the code: ``model/decoder.py``, ``lora.lora_linear`` (of an adapted map its input and the low
projection), ``elementwise`` (the input alone), ``packed`` (q, k, v, out, lse), ``moe`` and
``parallel/experts.py``. Of a map that is neither adapted nor trained nothing is kept. A test counts the
tensors that autograd really saves.

Rows of a microbatch of T, on one rank (``train/sharded.py``):
    slice     T / c        attention and MLP, after ``enter``
    own       T / (c t)    residual stream, norms, routers
    received  rows that come to this rank's experts, once each
    copies    pairs of a received row and an expert of this rank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ostinato.model.config import ModelConfig, QKNorm, Scoring
from ostinato.model.shapes import STACKED, AdapterSpec, ExpertScheme, compute_adapter_shapes

FP32, INT64 = 4.0, 8.0
CHUNK = 256  # rows of the head at a time, as algo/logprobs.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one microbatch on one rank, see the module, and sizes of its axes. ``loss``: the rows that go
    through the head."""

    slice: float
    own: float
    received: float
    copies: float
    loss: float
    tensor: int = 1
    context: int = 1
    expert: int = 1


@dataclass(frozen=True, slots=True)
class Slots:
    """Ranks of the adapters of one layer by stored matrix; 0 where nothing is adapted."""

    ranks: Mapping[str, int]
    full: bool  # all parameters are trained
    shared_outer: bool

    def low(self, slot: str) -> int:
        return self.ranks.get(slot, 0)

    def reads(self, slot: str) -> bool:
        """Whether the input of this matrix is kept for its backward."""
        return self.full or self.low(slot) > 0


@lru_cache(maxsize=1024)
def slots_of(config: ModelConfig, adapter: AdapterSpec | None, layer: int) -> Slots:
    """The slots of decoder layer ``layer``; ``adapter`` None is full-parameter training."""
    if adapter is None:
        return Slots({}, True, False)
    prefix = f"layers.{layer}."
    rank_by_name = {
        name: a_shape[-2]
        for name, (a_shape, _) in compute_adapter_shapes(config, adapter).items()
        if name.startswith(prefix)
    }
    ranks = {
        slot: sum(rank_by_name.get(prefix + name, 0) for name in names) for slot, names in STACKED.items()
    }
    ranks["experts_gate_up"] = sum(rank_by_name.get(f"{prefix}experts.{name}", 0) for name in ("gate", "up"))
    ranks["experts_down"] = rank_by_name.get(f"{prefix}experts.down", 0)
    if ranks["experts_gate_up"] and not ranks["experts_down"]:  # a zero update stands in
        ranks["experts_idle"] = adapter.get_rank(prefix + "experts.down")
    return Slots(ranks, False, adapter.expert_scheme == ExpertScheme.SHARED_OUTER)


def saved_bytes(config: ModelConfig, slots: Slots, rows: Rows, width: float, *, moe: bool) -> float:
    """Bytes that one layer keeps of one microbatch until its backward. ``config``: of the rank's own part
    (``share.make_local_config``); ``width``: bytes of an activation."""
    b, hidden = width, config.hidden_size
    residual = 2 * rows.own * (hidden * b + FP32)  # what the two norms read, and their inverse roots
    attention = (
        _count_latent_attention(config, slots, rows, b)
        if config.mla
        else _count_grouped_attention(config, slots, rows, b)
    )
    if moe:
        return residual + attention + _count_mixture(config, slots, rows, b)
    return residual + attention + _count_mlp(config, slots, rows, b, config.intermediate_size, "")


def count_boundary(config: ModelConfig, rows: Rows, width: float) -> float:
    """Bytes that a recomputed layer keeps of one microbatch: the residual stream before it."""
    return rows.own * config.hidden_size * width


def count_rotary(config: ModelConfig, rows: Rows, width: float) -> float:
    """Bytes that a microbatch keeps for all its layers together: cosines and sines."""
    rotary = config.mla.rope_head_dim if config.mla else config.head_dim
    return 2 * rows.slice * rotary * width


def count_ends(
    config: ModelConfig, rows: Rows, width: float, *, is_first: bool, is_last: bool, is_full: bool
) -> float:
    """Bytes that a microbatch keeps beside its layers: the input of the norm before the head, on the last
    stage, and the tokens, on the first stage if the embedding is trained (``is_full``). If it is not, bytes
    are subtracted: the first norm keeps nothing, since no parameter before it needs a gradient."""
    norm_bytes = rows.own * (config.hidden_size * width + FP32)
    num_bytes = norm_bytes * is_last
    if is_first:
        num_bytes += rows.slice * INT64 if is_full else -norm_bytes
    return num_bytes


def _count_grouped_attention(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """Bytes that grouped-query attention keeps."""
    t, heads, groups, dk = rows.slice, c.num_heads, c.num_kv_heads, c.head_dim
    stacked_elements = t * (heads + 2 * groups) * dk
    elements = t * c.hidden_size * slots.reads("qkv") + t * slots.low("qkv")
    copies = (c.qk_norm == QKNorm.FULL) + (c.clip_qkv is not None)  # each reads one qkv and makes another
    exchanges_heads = rows.context > 1
    if not exchanges_heads or c.qk_norm == QKNorm.HEAD:
        copies += 1  # the last copy is kept: v and the inputs of the norms are views of it
    elements += copies * stacked_elements
    rotated_elements = t * (heads + groups) * dk
    # q, k and v of the heads that this rank got; without an exchange v is a view
    elements += stacked_elements if exchanges_heads else rotated_elements
    inverse_norms = {QKNorm.NONE: 0, QKNorm.HEAD: heads + groups, QKNorm.FULL: 2}[c.qk_norm]
    return elements * b + t * inverse_norms * FP32 + _count_attention_output(c, slots, rows, b)


def _count_latent_attention(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """Bytes that multi-head latent attention keeps, with keys and values expanded."""
    mla, t, heads = c.mla, rows.slice, c.num_heads
    assert mla is not None
    reads_input = slots.reads("q") if mla.q_lora_rank is None else slots.reads("q_a")
    elements = t * c.hidden_size * (reads_input or slots.reads("kv_a"))
    elements += t * (
        slots.low("q") + slots.low("q_a") + slots.low("q_b") + slots.low("kv_a") + slots.low("kv_b")
    )
    if mla.q_lora_rank is not None:
        elements += t * mla.q_lora_rank * (1 + slots.reads("q_b"))
    elements += t * (mla.kv_lora_rank + mla.rope_head_dim) + t * mla.kv_lora_rank * slots.reads("kv_b")
    queries, values = heads * c.head_dim, heads * mla.v_head_dim
    # v is a view of all that kv_b gave, unless heads are exchanged
    elements += t * (
        2 * queries + (values if rows.context > 1 else heads * (mla.nope_head_dim + mla.v_head_dim))
    )
    return (
        elements * b
        + t * (1 + (mla.q_lora_rank is not None)) * FP32
        + _count_attention_output(c, slots, rows, b)
    )


def _count_attention_output(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """Bytes of the output of attention, its log-sum-exp, and what the output projection keeps."""
    t, values = rows.slice, c.num_heads * c.v_head_dim
    out = t * values * (1 + (rows.context > 1 and slots.reads("o")))
    return (out + t * slots.low("o")) * b + t * c.num_heads * FP32


def _count_mlp(c: ModelConfig, slots: Slots, rows: Rows, b: float, width: int, role: str) -> float:
    """Bytes that a gated MLP keeps; ``role``: the prefix of its slots."""
    num_rows, gate_up, down = rows.slice, f"{role}gate_up", f"{role}down"
    elements = num_rows * c.hidden_size * slots.reads(gate_up) + num_rows * slots.low(gate_up)
    elements += num_rows * 2 * width + num_rows * width * slots.reads(down) + num_rows * slots.low(down)
    return elements * b


def _count_mixture(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """Bytes that a mixture of experts keeps, with its router and its shared experts."""
    moe = c.moe
    assert moe is not None
    num_bytes = _count_router(c, slots, rows, b) + _count_experts(c, slots, rows, b)
    input_bytes = rows.own * c.hidden_size * b * _keeps_mixture_input(slots, rows, b)
    if not moe.shared_intermediate_size:
        return num_bytes + input_bytes
    if rows.tensor == 1 and slots.reads("shared_gate_up"):
        input_bytes = 0.0  # the shared experts keep the very same tensor
    return num_bytes + input_bytes + _count_mlp(c, slots, rows, b, moe.shared_intermediate_size, "shared_")


def _keeps_mixture_input(slots: Slots, rows: Rows, b: float) -> bool:
    """Whether the input of the mixture is kept, by the router or by a factor that all experts share."""
    is_read_by_router = slots.low("router") > 0 or (slots.full and b == FP32)
    return is_read_by_router or (rows.expert == 1 and slots.low("experts_gate_up") > 0 and slots.shared_outer)


def _count_router(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """Bytes of logits, scores, the choice and its weights in fp32, and of the router's weight, widened."""
    moe = c.moe
    assert moe is not None
    num_rows, top_k, is_narrow = rows.own, moe.top_k, b < FP32
    # a sigmoid that is spelled out keeps every step
    score_tensors = 1 if moe.scoring == Scoring.SOFTMAX else 4
    num_bytes = num_rows * (moe.num_experts * score_tensors * FP32 + top_k * INT64)
    num_bytes += num_rows * (top_k + 1) * FP32 * moe.norm_topk
    num_bytes += moe.num_experts * c.hidden_size * FP32 * is_narrow
    num_bytes += num_rows * c.hidden_size * FP32 * (slots.full and is_narrow)
    return num_bytes + num_rows * slots.low("router") * b


def _count_experts(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """Bytes that the routed experts of this rank keep."""
    moe, hidden = c.moe, c.hidden_size
    assert moe is not None
    num_copies, up_rank, down_rank = rows.copies, slots.low("experts_gate_up"), slots.low("experts_down")
    # what the gate reads, and what is summed with weights
    elements = num_copies * 2 * moe.intermediate_size + num_copies * hidden
    if slots.full:
        elements += num_copies * hidden + num_copies * moe.intermediate_size
    if up_rank:
        elements += num_copies * up_rank
        if not slots.shared_outer:
            elements += num_copies * hidden
        elif rows.expert > 1:
            elements += rows.received * hidden
    if down_rank:
        elements += num_copies * moe.intermediate_size + num_copies * down_rank
        elements += rows.received * down_rank if slots.shared_outer else num_copies * hidden
    elements += num_copies * slots.low("experts_idle")
    num_sums = 1 + (up_rank > 0 or down_rank > 0)
    indices = INT64 * (num_copies + num_sums * num_copies if rows.expert == 1 else 5 * num_copies)
    indices += moe.num_experts / rows.expert * FP32  # where the rows of each expert end
    weights = rows.own * moe.top_k * b * (num_sums if b < FP32 else 1)
    return elements * b + indices + weights
