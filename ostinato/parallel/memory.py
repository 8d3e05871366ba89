"""Bytes that one rank of a trainer keeps by term, from shapes alone; no torch.

Weights, adapters, gradients and optimizer are exact (``parallel.elements``). Activations follow what our
trainer keeps (``parallel.activations``) and how many microbatches of a stage are in flight
(``parallel.schedule``). The old log-probabilities run the training forward with gradients on
(``train/trainer.py``), so they keep as much for one microbatch.

These terms are estimates: "working set" (tensors that exist only while one layer or the head runs),
"dispatch", "pipeline buffers", "gathered weights", "fragmentation".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ostinato.model.config import ModelConfig
from ostinato.model.shapes import AdapterSpec
from ostinato.parallel.activations import (
    CHUNK,
    FP32,
    Rows,
    count_boundary,
    count_ends,
    count_rotary,
    saved_bytes,
    slots_of,
)
from ostinato.parallel.elements import (
    Elements,
    chunk_layers,
    is_moe,
    layer_elements,
    layer_of,
    layers_by_kind,
    local,
    stage_elements,
)
from ostinato.parallel.layout import Layout
from ostinato.parallel.load import distinct_ranks, expected_straggler
from ostinato.parallel.schedule import Schedule, count_in_flight

FRAGMENTATION = 0.06  # of what is allocated and freed every step: 5 to 8 %
DYNAMIC_TERMS = ("activations", "working set", "dispatch", "pipeline buffers", "prefill", "adapter copies")
DYNAMIC_TERMS += ("gathered weights",)


class DType(StrEnum):
    """Storage format of numbers."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"  # blocks of 128 x 128 with one fp32 scale, as DeepSeek-V3's and Kimi K2's checkpoints
    INT8 = "int8"  # one fp32 scale per row, as model/quantise.py; the scale is neglected here
    INT4 = "int4"  # groups of 32 with one bf16 scale

    @property
    def num_bytes(self) -> float:
        """Bytes of one value, with its share of the scales."""
        return _BYTES[self]


_BYTES = {
    DType.FP32: 4.0,
    DType.BF16: 2.0,
    DType.FP8: 1.0 + 4.0 / 128**2,
    DType.INT8: 1.0,
    DType.INT4: 0.5 + 2.0 / 32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Storage formats of everything. The defaults are those of our trainer over a BF16 base."""

    base: DType = DType.BF16  # weights that are not trained; of full-parameter training those that compute
    sampler: DType = DType.BF16  # the sampler's weights
    compute: DType = DType.BF16  # activations, and the copy of adapters that a forward uses
    gradient: DType = DType.FP32
    master: DType = DType.FP32  # of what is trained; no second copy where the weights are fp32 themselves
    moments: DType = DType.FP32  # each of Adam's two
    kv: DType = DType.BF16


def weight_bytes(elements: Elements, dtype: DType, shard: int = 1) -> float:
    """Bytes of base weights in ``dtype``; routers, norms, embedding and head are never quantised. Matrices
    and routers are cut over ``shard`` ranks."""
    unquantised_bytes = (dtype if dtype in (DType.FP32, DType.BF16) else DType.BF16).num_bytes
    sharded_bytes = (elements.matrices * dtype.num_bytes + elements.routers * unquantised_bytes) / shard
    whole_bytes = (elements.ends + elements.vectors) * unquantised_bytes + elements.untrained * FP32
    return sharded_bytes + elements.experts * dtype.num_bytes + whole_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A trainer; ``adapter`` None trains all parameters."""

    config: ModelConfig
    adapter: AdapterSpec | None
    precision: Precision = field(default_factory=Precision)
    layout: Layout = field(default_factory=Layout)
    microbatch: int = 0  # rows of one microbatch of one data rank, over its context and tensor ranks
    recompute: bool = False
    trained: float = 1.0  # share of the rows that go through the head
    microbatches: int = 1  # of one data rank in one optimizer step

    def state(self, stage: int = 0) -> dict[str, float]:
        """Bytes of weights, gradients and optimizer of a rank of ``stage``, by term, without those that are
        0."""
        precision, shard = self.precision, self.layout.shard
        elements = stage_elements(self.config, self.adapter, self.layout, stage)
        num_trained: float = elements.adapters
        if self.adapter is None:
            num_trained = elements.trainable - (elements.matrices + elements.routers) * (1 - 1 / shard)
        master_bytes = num_trained * precision.master.num_bytes
        if self.adapter is None and precision.base == precision.master:
            master_bytes = 0.0  # the weights themselves
        terms = {
            "base weights": weight_bytes(elements, precision.base, shard),
            "adapters" if self.adapter else "master": master_bytes,
            "gradients": num_trained * precision.gradient.num_bytes,
            "optimizer": 2 * num_trained * precision.moments.num_bytes,
        }
        return {name: size for name, size in terms.items() if size}

    def rows(self) -> Rows:
        """Rows of one microbatch on the rank with the fullest experts, at the 95th percentile of steps."""
        layout, moe, total = self.layout, self.config.moe, float(self.microbatch)
        own = total / layout.row_shards
        received = own if layout.expert_tensor == 1 else total / layout.context
        copies = 0.0
        if moe is not None:
            straggler = expected_straggler(moe.num_experts, layout.expert).high
            copies = received * moe.top_k * straggler
            if layout.expert > 1:
                received *= distinct_ranks(moe.num_experts, moe.top_k, layout.expert) * straggler
        return Rows(
            slice=total / layout.context,
            own=own,
            received=received,
            copies=copies,
            loss=total / layout.context * self.trained,
            tensor=layout.tensor,
            context=layout.context,
            expert=layout.expert,
        )

    def fullest(self, *, backward: bool = True) -> tuple[int, dict[str, float]]:
        """(stage, bytes by term) of the rank that keeps most while it trains or, without ``backward``, scores
        old log-probabilities, among ``stages``."""
        layer_bytes = {moe: self._count_layer_bytes(moe) for moe in (False, True)}
        terms = {stage: self._count_terms(stage, layer_bytes, backward) for stage in self.stages()}
        stage = max(terms, key=lambda candidate: sum(terms[candidate].values()))
        return stage, terms[stage] | {"fragmentation": estimate_fragmentation(terms[stage])}

    def stages(self) -> tuple[int, ...]:
        """Stages that may be fullest: all up to 8, of more the first five (embedding, dense layers, most in
        flight) and the last one (head)."""
        pipeline = self.layout.pipeline
        return tuple(range(pipeline)) if pipeline <= 8 else (*range(5), pipeline - 1)

    def _count_layer_bytes(self, moe: bool) -> float:
        """Bytes that one layer of a kind keeps of one microbatch, not recomputed."""
        layer = layer_of(self.config, moe=moe)
        if layer is None:
            return 0.0
        slots, local_config = slots_of(self.config, self.adapter, layer), local(self.config, self.layout)
        return saved_bytes(local_config, slots, self.rows(), self.precision.compute.num_bytes, moe=moe)

    def _count_terms(self, stage: int, layer_bytes: dict[bool, float], backward: bool) -> dict[str, float]:
        """Bytes of a rank of ``stage`` by term, without fragmentation."""
        config, layout, rows = self.config, self.layout, self.rows()
        width, hidden = self.precision.compute.num_bytes, config.hidden_size
        chunks = chunk_layers(config, layout, stage)
        schedule = Schedule.training(layout.virtual) if backward else Schedule.FORWARD
        num_in_flight = count_in_flight(
            schedule, rank=stage, ranks=layout.pipeline, virtual=layout.virtual, parts=self.microbatches
        )
        residual_bytes, is_first, is_last = (
            count_boundary(config, rows, width),
            stage == 0,
            stage == layout.pipeline - 1,
        )
        layers_bytes = max(
            sum(residual_bytes if self.recompute else layer_bytes[is_moe(config, layer)] for layer in chunk)
            for chunk in chunks
        )
        end_bytes = count_ends(
            config, rows, width, is_first=is_first, is_last=is_last, is_full=self.adapter is None
        )
        terms = self.state(stage)
        terms["activations"] = num_in_flight * (
            layers_bytes + count_rotary(config, rows, width) + max(end_bytes, 0.0)
        )
        if self.adapter is not None:
            copies = stage_elements(config, self.adapter, layout, stage).copies
            terms["adapter copies"] = num_in_flight * copies / len(chunks) * width
        terms["working set"] = self._estimate_working_set(stage, layer_bytes, backward)
        if layout.shard > 1:  # one layer at a time, twice: its gathered pieces, and the matrices made of them
            elements_by_kind = (
                layer_elements(config, self.adapter, layout, moe=moe) for moe in self._list_kinds(stage)
            )
            terms["gathered weights"] = (
                2 * max(elements.matrices + elements.routers for elements in elements_by_kind) * width
            )
        if layout.expert > 1 and config.moe is not None:
            sent_rows = rows.received / expected_straggler(config.moe.num_experts, layout.expert).high
            terms["dispatch"] = 2 * (sent_rows + rows.received) * hidden * width
        if layout.pipeline > 1:
            # residual streams that were received and not used, and those that were sent and not confirmed
            num_tensors = 5 if layout.virtual == 1 else 8
            terms["pipeline buffers"] = num_tensors * rows.own * hidden * width
        return terms

    def _list_kinds(self, stage: int) -> list[bool]:
        """The kinds of layers on a stage: whether each is a mixture."""
        return [moe for moe, count in layers_by_kind(self.config, self.layout, stage).items() if count]

    def _estimate_working_set(self, stage: int, layer_bytes: dict[bool, float], backward: bool) -> float:
        """Bytes of the larger of the head's logits with slopes, and of a layer's backward beside slopes."""
        rows, width = self.rows(), self.precision.compute.num_bytes
        is_last = stage == self.layout.pipeline - 1
        num_hidden = rows.loss * self.config.hidden_size * is_last
        vocabulary = self.config.vocab_size / self.layout.tensor
        logits_bytes = (2 if self.adapter is not None else 5) * CHUNK * vocabulary * FP32 * is_last
        if not backward:
            return logits_bytes
        layer_backward_bytes = max(
            self._estimate_backward(rows, moe) + (layer_bytes[moe] if self.recompute else 0.0)
            for moe in self._list_kinds(stage)
        )
        return (
            max(logits_bytes + 2 * num_hidden * FP32, num_hidden * FP32 + layer_backward_bytes)
            + num_hidden * width
        )

    def _estimate_backward(self, rows: Rows, moe: bool) -> float:
        """Bytes that the backward of one layer allocates and frees: gradients of its largest tensors."""
        config, value_bytes = local(self.config, self.layout), self.precision.compute.num_bytes
        attention_width = config.num_heads * (config.head_dim + config.v_head_dim) + config.num_kv_heads * (
            config.head_dim + config.v_head_dim
        )
        attention_bytes = rows.slice * (
            attention_width * (FP32 + value_bytes) + config.hidden_size * value_bytes
        )
        expert_elements, width = 0.0, config.intermediate_size
        if moe and config.moe is not None:
            expert_elements = rows.copies * (2 * config.hidden_size + 3 * config.moe.intermediate_size)
            expert_elements, width = (
                expert_elements + rows.received * config.hidden_size,
                config.moe.shared_intermediate_size,
            )
        mlp_elements = expert_elements + rows.slice * (3 * width + config.hidden_size)
        return (
            max(attention_bytes, mlp_elements * value_bytes) + 2 * rows.own * config.hidden_size * value_bytes
        )


def estimate_fragmentation(terms: dict[str, float]) -> float:
    """Estimated bytes lost between blocks."""
    return FRAGMENTATION * sum(size for name, size in terms.items() if name in DYNAMIC_TERMS)
