"""A decode step as one native call: all layers for a flat row of tokens, with no Python or torch in between.

The twin is ``Decoder.forward`` with the single kernels; every number is the same, bit for bit, because both
are made of the same compiled functions (see step.cpp). What the step does not know (latent attention, clipped
queries, routing by sigmoid, what Gemma has besides, other devices) has no ``FusedStep``; the caller takes the
twin.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch
from torch import Tensor

from ostinato.model.config import ModelConfig, MoEConfig, QKNorm
from ostinato.model.decoder import Decoder
from ostinato.model.lora import NO_LORA, LayerLora, Lora, Prepared
from ostinato.model.moe import ExpertLora
from ostinato.model.native.experts import experts_struct
from ostinato.model.native.matrix import Matrix, matrix
from ostinato.model.weights import Attention, Block, Moe, Weight

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_long, ctypes.c_double


class Rows(Protocol):
    """Where the rows of a pass stand: ``engine.paged.Rows``. Rows of a sequence are consecutive.

    Slot slots[t] of the cache (block * 16 + offset) takes key and value of row t, which sees the first
    lengths[t] positions, itself included, of the blocks tables[sequence[t]].
    """

    @property
    def slots(self) -> Tensor: ...  # [T] int64
    @property
    def tables(self) -> Tensor: ...  # [S, blocks] int32
    @property
    def sequence(self) -> Tensor: ...  # [T] int32
    @property
    def lengths(self) -> Tensor: ...  # [T] int32


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, _POINTER) for name in names]


def _longs(*names: str) -> list[tuple[str, type]]:
    return [(name, _LONG) for name in names]


# The structs of step.cpp.
class _Adapter(ctypes.Structure):
    _fields_ = [*_pointers("a", "b"), *_longs("rank"), ("scale", _DOUBLE)]


class _Linear(ctypes.Structure):
    _fields_ = [("w", Matrix), *_pointers("bias"), *_longs("out", "into"), *_pointers("adapters")]


class _Layer(ctypes.Structure):
    _fields_ = [
        *_pointers("attn_norm", "mlp_norm", "next_norm", "q_norm", "k_norm"),
        *[(name, _Linear) for name in ("qkv", "o", "gate_up", "down", "router")],
        *_pointers("experts"),
        *_longs("window"),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *_pointers("layers"),
        *_longs("num_layers", "hidden", "heads", "kv_heads", "head_dim", "top_k", "norm_topk", "norm_all"),
        ("embed", Matrix),
        *_pointers("cos", "sin"),
        *_longs("positions"),
        *[(name, _DOUBLE) for name in ("eps", "scale", "scaling")],
        *_longs("policies"),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *_pointers("tokens", "positions", "slots", "tables", "sequence", "lengths"),
        *_pointers("keys", "values", "hidden", "routing"),
        *_longs("rows", "table_width", "moe_layers", "key_layer", "value_layer"),
        *_pointers("spans"),
        *_longs("num_spans"),
    ]


class FusedStep:
    """A decoder with the prepared adapters of some policies (None: the base), ready to run passes whose rows
    may be of all of them: the base is read once. Not for two threads at once.

    Weights and adapters are read where they lie: a later change of them in place is seen.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., int]],
        linear: Callable[..., Tensor],
        decoder: Decoder,
        policies: Sequence[Prepared | None],
    ) -> None:
        config = decoder.config
        self._run = functions[f"step_{_SUFFIX[decoder.dtype]}"]
        self._linear, self._decoder, self._kept = linear, decoder, _Kept(decoder.dtype)
        layers = [
            self._kept.layer(block, [NO_LORA if one is None else one.layers[i] for one in policies])
            for i, block in enumerate(decoder.blocks)
        ]
        for index, layer in enumerate(layers):
            layer.window = config.window_of(index) or 0
        self._layers = (_Layer * len(layers))(*layers)
        moe = config.moe
        self._model = _Model(
            layers=ctypes.addressof(self._layers),
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            top_k=moe.top_k if moe else 0,
            norm_topk=moe is not None and moe.norm_topk,
            norm_all=config.qk_norm == QKNorm.FULL,
            embed=self._kept.matrix(decoder.embed),
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            scaling=moe.scaling if moe else 1.0,
            policies=len(policies),
        )
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._logits = torch.empty(0)
        self._turns: tuple[Tensor, ...] = ()  # cos and sin by position

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Rows,
        keys: Tensor,
        values: Tensor,
        spans: Sequence[tuple[int, int]] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """One pass: (hidden [T, D] after the final norm, routing [T, L_moe, K] int16 or None).

        tokens, positions: [T] int64. spans: (last row + 1, which policy) of consecutive rows; empty: all are
        of the first. keys, values: the whole cache (``engine.paged.KVStore``), in which
        ``rows.slots`` are written.
        """
        config, total = self._decoder.config, tokens.shape[0]
        hidden = torch.empty(total, config.hidden_size, dtype=keys.dtype)
        routing = None
        if config.moe is not None:
            routing = torch.empty(total, config.num_moe_layers, config.moe.top_k, dtype=torch.int16)
        if total == 0:
            return hidden, routing
        pairs = [number for span in (spans or ((total, 0),)) for number in span]
        where = (ctypes.c_int32 * len(pairs))(*pairs)
        batch = _Batch(
            spans=ctypes.addressof(where),
            num_spans=len(pairs) // 2,
            tokens=tokens.data_ptr(),
            positions=positions.data_ptr(),
            slots=rows.slots.data_ptr(),
            tables=rows.tables.data_ptr(),
            sequence=rows.sequence.data_ptr(),
            lengths=rows.lengths.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            hidden=hidden.data_ptr(),
            routing=None if routing is None else routing.data_ptr(),
            rows=total,
            table_width=rows.tables.stride(0),
            moe_layers=config.num_moe_layers,
            key_layer=keys.stride(0),
            value_layer=values.stride(0),
        )
        model, room = ctypes.byref(self._model), self._workspace
        while needed := self._run(model, ctypes.byref(batch), room.data_ptr(), room.numel()):
            self._grow(needed)
            room = self._workspace
        return hidden, routing

    def logits(self, hidden: Tensor) -> Tensor:
        """``Decoder.logits`` [R, V] into memory of its own: read it before the next call.

        Fresh memory of that size is mapped page by page at every step: half the cost of the product again.
        """
        decoder = self._decoder
        dtype = torch.float32 if decoder.fp32_head else decoder.dtype
        vocab, needed = decoder.config.vocab_size, hidden.shape[0] * decoder.config.vocab_size
        if self._logits.numel() < needed or self._logits.dtype != dtype:
            self._logits = torch.empty(needed, dtype=dtype)
        return self._linear(
            hidden, decoder.head_weight, None, dtype, out=self._logits[:needed].view(-1, vocab)
        )

    def _grow(self, needed: int) -> None:
        """What the pass needs: bytes of workspace, or with a minus the rotations of more positions."""
        if needed > 0:
            self._workspace = torch.empty(needed, dtype=torch.uint8)
            return
        length = max(-needed, 2 * self._model.positions, 512)
        cos, sin = self._decoder.rotations(torch.arange(length))
        self._turns = cos, sin
        self._model.cos, self._model.sin, self._model.positions = cos.data_ptr(), sin.data_ptr(), length


class _Kept:
    """Turns tensors into pointers, for rows of ``dtype``, and keeps them alive."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tensors: list[Weight] = []
        self._arrays: list[ctypes.Array[Any]] = []

    def matrix(self, weight: Weight) -> Matrix:
        self._tensors.append(weight)
        return matrix(weight, self._dtype)

    def pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.detach().contiguous()  # parameters are: nothing is copied
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def array(self, structs: Sequence[ctypes.Structure]) -> int:
        """Where they lie one behind the other."""
        made = (type(structs[0]) * len(structs))(*structs)
        self._arrays.append(made)
        return ctypes.addressof(made)

    def linear(self, weight: Weight, bias: Tensor | None, loras: Sequence[Lora | None]) -> _Linear:
        adapters = None
        if any(lora is not None for lora in loras):
            adapters = self.array([self._adapter(lora) for lora in loras])
        out, into = weight.shape
        return _Linear(w=self.matrix(weight), bias=self.pointer(bias), out=out, into=into, adapters=adapters)

    def _adapter(self, lora: Lora | None) -> _Adapter:
        if lora is None:
            return _Adapter()
        return _Adapter(
            a=self.pointer(lora.a), b=self.pointer(lora.b), rank=lora.a.shape[0], scale=lora.scale
        )

    def experts(self, gate_up: Weight, down: Weight, loras: Sequence[ExpertLora | None]) -> int:
        self._tensors += [
            gate_up,
            down,
            *(factor for lora in loras if lora is not None for factor in lora[:4]),
        ]
        return self.array([experts_struct(gate_up, down, lora, self._dtype) for lora in loras])

    def layer(self, block: Block, loras: Sequence[LayerLora]) -> _Layer:
        attn, mlp = block.attn, block.mlp
        assert isinstance(attn, Attention)
        dense = mlp.shared if isinstance(mlp, Moe) else mlp
        shared = isinstance(mlp, Moe)
        gate_up = [lora.shared_gate_up if shared else lora.gate_up for lora in loras]
        down = [lora.shared_down if shared else lora.down for lora in loras]
        layer = _Layer(
            attn_norm=self.pointer(block.attn_norm),
            mlp_norm=self.pointer(block.mlp_norm),
            next_norm=self.pointer(block.next_norm),
            q_norm=self.pointer(attn.q_norm),
            k_norm=self.pointer(attn.k_norm),
            qkv=self.linear(attn.qkv, attn.qkv_bias, [lora.qkv for lora in loras]),
            o=self.linear(attn.o, attn.o_bias, [lora.o for lora in loras]),
        )
        if dense is not None:
            layer.gate_up = self.linear(dense.gate_up, dense.gate_up_bias, gate_up)
            layer.down = self.linear(dense.down, dense.down_bias, down)
        if isinstance(mlp, Moe):
            layer.router = self.linear(mlp.router, None, [lora.router for lora in loras])
            layer.experts = self.experts(mlp.gate_up, mlp.down, [lora.experts for lora in loras])
        return layer


# What the step computes by, and what changes no pass. A field that is not here stands at its default, or the
# decoder computes: a family that is added is never computed without what is new in it.
_READ = {
    ModelConfig: "model_type vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads "
    "head_dim max_positions rms_norm_eps tie_embeddings rope qkv_bias o_bias mlp_bias qk_norm "
    "initializer_range moe local_layers window raw",
    MoEConfig: "num_experts top_k intermediate_size layers norm_topk scaling topk_groups "
    "shared_intermediate_size",
    Block: "attn_norm attn mlp_norm mlp next_norm",
}


def reads(value: Any, of: type) -> bool:
    """Whether the step reads all that ``value``, an object ``of`` a type of ``_READ``, says of a model."""
    names = frozenset(_READ[of].split())
    return all(getattr(value, f.name) == f.default for f in fields(value) if f.name not in names)


def supported(decoder: Decoder) -> bool:
    """Whether ``FusedStep`` computes this decoder."""
    config = decoder.config
    return (
        decoder.device.type == "cpu"
        and decoder.dtype in _SUFFIX
        and reads(config, ModelConfig)
        and (config.moe is None or reads(config.moe, MoEConfig))
        and all(reads(block, Block) for block in decoder.blocks)
        and decoder.inv_freq.shape[0] * 2 == config.head_dim
        and all(parameter.is_contiguous() for parameter in decoder.parameters())
    )
