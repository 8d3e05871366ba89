"""What a layer keeps for its backward, tensor by tensor, as our decoder under autograd keeps it.

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
        """Is the input of this matrix kept?"""
        return self.full or self.low(slot) > 0


@lru_cache(maxsize=1024)
def slots_of(config: ModelConfig, adapter: AdapterSpec | None, layer: int) -> Slots:
    """Of ``layer``; ``adapter`` None is full-parameter training."""
    if adapter is None:
        return Slots({}, True, False)
    prefix = f"layers.{layer}."
    by_name = {
        name: a[-2] for name, (a, _) in adapter_shapes(config, adapter).items() if name.startswith(prefix)
    }
    ranks = {slot: sum(by_name.get(prefix + name, 0) for name in names) for slot, names in STACKED.items()}
    ranks["experts_gate_up"] = sum(by_name.get(f"{prefix}experts.{name}", 0) for name in ("gate", "up"))
    ranks["experts_down"] = by_name.get(f"{prefix}experts.down", 0)
    if ranks["experts_gate_up"] and not ranks["experts_down"]:  # a zero update stands in
        ranks["experts_idle"] = adapter.rank_of(prefix + "experts.down")
    return Slots(ranks, False, adapter.expert_scheme == ExpertScheme.SHARED_OUTER)


def saved(config: ModelConfig, slots: Slots, rows: Rows, width: float, *, moe: bool) -> float:
    """Bytes that one layer keeps of one microbatch until its backward. ``config``: of the rank's own part
    (``share.local_config``); ``width``: bytes of an activation."""
    b, hidden = width, config.hidden_size
    residual = 2 * rows.own * (hidden * b + FP32)  # what the two norms read, and their inverse roots
    attention = _latent(config, slots, rows, b) if config.mla else _grouped(config, slots, rows, b)
    if moe:
        return residual + attention + _mixture(config, slots, rows, b)
    return residual + attention + _mlp(config, slots, rows, b, config.intermediate_size, "")


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
    kept = norm * last
    if first:
        kept += rows.slice * INT64 if full else -norm
    return kept


def _grouped(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """Grouped-query attention."""
    t, heads, groups, dk = rows.slice, c.num_heads, c.num_kv_heads, c.head_dim
    stacked = t * (heads + 2 * groups) * dk
    kept = t * c.hidden_size * slots.reads("qkv") + t * slots.low("qkv")
    copies = (c.qk_norm == QKNorm.FULL) + (c.clip_qkv is not None)  # each reads one qkv and makes another
    exchanged = rows.context > 1
    if not exchanged or c.qk_norm == QKNorm.HEAD:
        copies += 1  # the last one lives on in v, and in what is normed
    kept += copies * stacked
    rotated = t * (heads + groups) * dk
    kept += stacked if exchanged else rotated  # heads that came, all of q, k and v; else v is a view
    inverse = {QKNorm.NONE: 0, QKNorm.HEAD: heads + groups, QKNorm.FULL: 2}[c.qk_norm]
    return kept * b + t * inverse * FP32 + _attended(c, slots, rows, b)


def _latent(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """Multi-head latent attention with keys and values expanded."""
    mla, t, heads = c.mla, rows.slice, c.num_heads
    assert mla is not None
    reads = slots.reads("q") if mla.q_lora_rank is None else slots.reads("q_a")
    kept = t * c.hidden_size * (reads or slots.reads("kv_a"))
    kept += t * (slots.low("q") + slots.low("q_a") + slots.low("q_b") + slots.low("kv_a") + slots.low("kv_b"))
    if mla.q_lora_rank is not None:
        kept += t * mla.q_lora_rank * (1 + slots.reads("q_b"))
    kept += t * (mla.kv_lora_rank + mla.rope_head_dim) + t * mla.kv_lora_rank * slots.reads("kv_b")
    queries, values = heads * c.head_dim, heads * mla.v_head_dim
    # v is a view of all that kv_b gave, unless heads are exchanged
    kept += t * (2 * queries + (values if rows.context > 1 else heads * (mla.nope_head_dim + mla.v_head_dim)))
    return kept * b + t * (1 + (mla.q_lora_rank is not None)) * FP32 + _attended(c, slots, rows, b)


def _attended(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """The output of attention, its log-sum-exp, and what the map behind it keeps."""
    t, values = rows.slice, c.num_heads * c.v_head_dim
    out = t * values * (1 + (rows.context > 1 and slots.reads("o")))
    return (out + t * slots.low("o")) * b + t * c.num_heads * FP32


def _mlp(c: ModelConfig, slots: Slots, rows: Rows, b: float, width: int, role: str) -> float:
    t, gate_up, down = rows.slice, f"{role}gate_up", f"{role}down"
    kept = t * c.hidden_size * slots.reads(gate_up) + t * slots.low(gate_up)
    kept += t * 2 * width + t * width * slots.reads(down) + t * slots.low(down)
    return kept * b


def _mixture(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    moe = c.moe
    assert moe is not None
    kept = _router(c, slots, rows, b) + _experts(c, slots, rows, b)
    own = rows.own * c.hidden_size * b * _reads_own(slots, rows, b)
    if not moe.shared_intermediate_size:
        return kept + own
    if rows.tensor == 1 and slots.reads("shared_gate_up"):
        own = 0.0  # the shared experts keep the very same tensor
    return kept + own + _mlp(c, slots, rows, b, moe.shared_intermediate_size, "shared_")


def _reads_own(slots: Slots, rows: Rows, b: float) -> bool:
    """Is the input of the mixture itself kept, by the router or by a factor that all experts share?"""
    router = slots.low("router") > 0 or (slots.full and b == FP32)
    return router or (rows.expert == 1 and slots.low("experts_gate_up") > 0 and slots.shared_outer)


def _router(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    """Logits, scores, the choice and its weights in fp32; and the router's weight, widened."""
    moe = c.moe
    assert moe is not None
    t, k, narrow = rows.own, moe.top_k, b < FP32
    wide = 1 if moe.scoring == Scoring.SOFTMAX else 4  # a sigmoid that is spelled out keeps every step
    kept = t * (moe.num_experts * wide * FP32 + k * INT64)
    kept += t * (k + 1) * FP32 * moe.norm_topk
    kept += moe.num_experts * c.hidden_size * FP32 * narrow
    kept += t * c.hidden_size * FP32 * (slots.full and narrow)
    return kept + t * slots.low("router") * b


def _experts(c: ModelConfig, slots: Slots, rows: Rows, b: float) -> float:
    moe, hidden = c.moe, c.hidden_size
    assert moe is not None
    n, up, down = rows.copies, slots.low("experts_gate_up"), slots.low("experts_down")
    kept = n * 2 * moe.intermediate_size + n * hidden  # what the gate reads, and what is summed with weights
    if slots.full:
        kept += n * hidden + n * moe.intermediate_size
    if up:
        kept += n * up
        if not slots.shared_outer:
            kept += n * hidden
        elif rows.expert > 1:
            kept += rows.received * hidden
    if down:
        kept += n * moe.intermediate_size + n * down
        kept += rows.received * down if slots.shared_outer else n * hidden
    kept += n * slots.low("experts_idle")
    sums = 1 + (up > 0 or down > 0)
    indices = INT64 * (n + sums * n if rows.expert == 1 else 5 * n)
    indices += moe.num_experts / rows.expert * FP32  # where the rows of each expert end
    weights = rows.own * moe.top_k * b * (sums if b < FP32 else 1)
    return kept * b + indices + weights
