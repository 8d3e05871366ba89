"""Bytes that a layer keeps for its backward, tensor by tensor, as our decoder under autograd keeps them.

The list follows the code: ``model/decoder.py``, ``lora.lora_linear`` (of an adapted map its input and the low
projection), ``elementwise`` (the input alone), ``packed`` (q, k, v, out, lse), ``moe`` and
``parallel/experts.py``. Of a map that is neither adapted nor trained nothing is kept. A test counts the
tensors that autograd really saves.

Rows of a microbatch of T, on one rank (``train/sharded.py``):
    slice     T / c        attention and MLP, after ``enter``
    own       T / (c t)    residual stream, norms, routers
    received  rows that come to the experts here, once each        copies  (row, expert here) pairs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ostinato.model.config import ModelConfig, QKNorm, Scoring
from ostinato.model.shapes import STACKED, AdapterSpec, ExpertScheme, adapter_shapes

FP32, INT64 = 4.0, 8.0
CHUNK = 256  # rows of the head at a time, as algo/logprobs.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of one microbatch on one rank; see the module. ``loss``: those that go through the head."""

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
        name: a[-2] for name, (a, _) in adapter_shapes(config, adapter).items() if name.startswith(prefix)
    }
    ranks = {
        slot: sum(rank_by_name.get(prefix + name, 0) for name in names) for slot, names in STACKED.items()
    }
    ranks["experts_gate_up"] = sum(rank_by_name.get(f"{prefix}experts.{name}", 0) for name in ("gate", "up"))
    ranks["experts_down"] = rank_by_name.get(f"{prefix}experts.down", 0)
    if ranks["experts_gate_up"] and not ranks["experts_down"]:  # a zero update stands in
        ranks["experts_idle"] = adapter.rank_of(prefix + "experts.down")
    return Slots(ranks, False, adapter.expert_scheme == ExpertScheme.SHARED_OUTER)


def saved_bytes(config: ModelConfig, slots: Slots, rows: Rows, width: float, *, moe: bool) -> float:
    """Bytes that one layer keeps of one microbatch until its backward. ``config``: of the rank's own part
    (``share.local_config``); ``width``: bytes of an activation."""
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


def boundary(config: ModelConfig, rows: Rows, width: float) -> float:
    """Bytes that one layer keeps of one microbatch where it is recomputed: the residual before it."""
    return rows.own * config.hidden_size * width


def once(config: ModelConfig, rows: Rows, width: float) -> float:
    """Bytes that a microbatch keeps for all its layers together: cosines and sines."""
    rotary = config.mla.rope_head_dim if config.mla else config.head_dim
    return 2 * rows.slice * rotary * width


def ends(config: ModelConfig, rows: Rows, width: float, *, first: bool, last: bool, full: bool) -> float:
    """Bytes that a microbatch keeps beside its layers: what the norm before the head reads, and the tokens
    where the embedding is trained. Where it is not, nothing is kept of the first norm, since nothing below
    it waits for a gradient."""
    norm = rows.own * (config.hidden_size * width + FP32)
    num_bytes = norm * last
    if first:
        num_bytes += rows.slice * INT64 if full else -norm
    return num_bytes


def _count_grouped_attention(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """Bytes that grouped-query attention keeps."""
    t, heads, groups, dk = rows.slice, c.num_heads, c.num_kv_heads, c.head_dim
    stacked_elements = t * (heads + 2 * groups) * dk
    elements = t * c.hidden_size * slots.reads("qkv") + t * slots.low("qkv")
    copies = (c.qk_norm == QKNorm.FULL) + (c.clip_qkv is not None)  # each reads one qkv and makes another
    exchanges_heads = rows.context > 1
    if not exchanges_heads or c.qk_norm == QKNorm.HEAD:
        copies += 1  # the last one lives on in v, and in what is normed
    elements += copies * stacked_elements
    rotated_elements = t * (heads + groups) * dk
    # heads that came, all of q, k and v; else v is a view
    elements += stacked_elements if exchanges_heads else rotated_elements
    inverse_norms = {QKNorm.NONE: 0, QKNorm.HEAD: heads + groups, QKNorm.FULL: 2}[c.qk_norm]
    return elements * b + t * inverse_norms * FP32 + _count_attention_output(c, slots, rows, b)


def _count_latent_attention(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """Bytes that multi-head latent attention keeps, with keys and values expanded."""
    mla, t, heads = c.mla, rows.slice, c.num_heads
    assert mla is not None
    reads = slots.reads("q") if mla.q_lora_rank is None else slots.reads("q_a")
    elements = t * c.hidden_size * (reads or slots.reads("kv_a"))
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
    t, gate_up, down = rows.slice, f"{role}gate_up", f"{role}down"
    elements = t * c.hidden_size * slots.reads(gate_up) + t * slots.low(gate_up)
    elements += t * 2 * width + t * width * slots.reads(down) + t * slots.low(down)
    return elements * b


def _count_mixture(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """Bytes that a mixture of experts keeps, with its router and its shared experts."""
    moe = c.moe
    assert moe is not None
    num_bytes = _count_router(c, slots, rows, b) + _experts(c, slots, rows, b)
    input_bytes = rows.own * c.hidden_size * b * _keeps_mixture_input(slots, rows, b)
    if not moe.shared_intermediate_size:
        return num_bytes + input_bytes
    if rows.tensor == 1 and slots.reads("shared_gate_up"):
        input_bytes = 0.0  # the shared experts keep the very same tensor
    return num_bytes + input_bytes + _count_mlp(c, slots, rows, b, moe.shared_intermediate_size, "shared_")


def _keeps_mixture_input(slots: Slots, rows: Rows, b: float) -> bool:
    """Whether the input of the mixture is kept, by the router or by a factor that all experts share."""
    router = slots.low("router") > 0 or (slots.full and b == FP32)
    return router or (rows.expert == 1 and slots.low("experts_gate_up") > 0 and slots.shared_outer)


def _count_router(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """Bytes of logits, scores, the choice and its weights in fp32, and of the router's weight, widened."""
    moe = c.moe
    assert moe is not None
    t, k, is_narrow = rows.own, moe.top_k, b < FP32
    # a sigmoid that is spelled out keeps every step
    score_tensors = 1 if moe.scoring == Scoring.SOFTMAX else 4
    num_bytes = t * (moe.num_experts * score_tensors * FP32 + k * INT64)
    num_bytes += t * (k + 1) * FP32 * moe.norm_topk
    num_bytes += moe.num_experts * c.hidden_size * FP32 * is_narrow
    num_bytes += t * c.hidden_size * FP32 * (slots.full and is_narrow)
    return num_bytes + t * slots.low("router") * b


def _experts(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """Bytes that the routed experts of this rank keep."""
    moe, hidden = c.moe, c.hidden_size
    assert moe is not None
    n, up, down = rows.copies, slots.low("experts_gate_up"), slots.low("experts_down")
    # what the gate reads, and what is summed with weights
    elements = n * 2 * moe.intermediate_size + n * hidden
    if slots.full:
        elements += n * hidden + n * moe.intermediate_size
    if up:
        elements += n * up
        if not slots.shared_outer:
            elements += n * hidden
        elif rows.expert > 1:
            elements += rows.received * hidden
    if down:
        elements += n * moe.intermediate_size + n * down
        elements += rows.received * down if slots.shared_outer else n * hidden
    elements += n * slots.low("experts_idle")
    sums = 1 + (up > 0 or down > 0)
    indices = INT64 * (n + sums * n if rows.expert == 1 else 5 * n)
    indices += moe.num_experts / rows.expert * FP32  # where the rows of each expert end
    weights = rows.own * moe.top_k * b * (sums if b < FP32 else 1)
    return elements * b + indices + weights
