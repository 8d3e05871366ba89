"""A decode step as a single native call: all layers for a flat row of tokens, without Python between them.

The twin is ``Decoder.forward`` with the single kernels; every number is the same, bit for bit, because both
call the same compiled functions (see step.cpp). Models that the step does not compute (latent attention,
clipped queries, routing by sigmoid, the special features of Gemma, other devices) have no ``FusedStep``; the
caller uses the twin.
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
from ostinato.model.native.experts import Experts, make_experts_struct
from ostinato.model.native.matrix import Matrix, make_matrix
from ostinato.model.weights import Attention, Block, Moe, Weight

_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_POINTER, _LONG, _DOUBLE = ctypes.c_void_p, ctypes.c_long, ctypes.c_double


class Rows(Protocol):
    """The places of the rows of a pass: ``engine.paged.Rows``. Rows of a sequence are consecutive.

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


def _declare_pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, _POINTER) for name in names]


def _declare_longs(*names: str) -> list[tuple[str, type]]:
    return [(name, _LONG) for name in names]


# The structs of step.cpp.
class _Adapter(ctypes.Structure):
    _fields_ = [*_declare_pointers("a", "b"), *_declare_longs("rank"), ("scale", _DOUBLE)]


class _Linear(ctypes.Structure):
    _fields_ = [
        ("w", Matrix),
        *_declare_pointers("bias"),
        *_declare_longs("out", "into"),
        *_declare_pointers("adapters"),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *_declare_pointers("attn_norm", "mlp_norm", "next_norm", "q_norm", "k_norm"),
        *[(name, _Linear) for name in ("qkv", "o", "gate_up", "down", "router")],
        *_declare_pointers("experts"),
        *_declare_longs("window"),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *_declare_pointers("layers"),
        *_declare_longs(
            "num_layers", "hidden", "heads", "kv_heads", "head_dim", "top_k", "norm_topk", "norm_all"
        ),
        ("embed", Matrix),
        *_declare_pointers("cos", "sin"),
        *_declare_longs("positions"),
        *[(name, _DOUBLE) for name in ("eps", "scale", "scaling")],
        *_declare_longs("policies"),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        *_declare_pointers("tokens", "positions", "slots", "tables", "sequence", "lengths"),
        *_declare_pointers("keys", "values", "hidden", "routing"),
        *_declare_longs("rows", "table_width", "moe_layers", "key_layer", "value_layer"),
        *_declare_pointers("spans"),
        *_declare_longs("num_spans"),
    ]


class FusedStep:
    """A decoder with the prepared adapters of some policies (None: the base). A pass may have rows of all of
    them, and reads the base once. Two threads must not use it at the same time.

    There is room for the next power of two of policies: ``put`` changes one without the others. Weights and
    adapters are not copied: a later change of them in place takes effect.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., int]],
        linear: Callable[..., Tensor],
        decoder: Decoder,
        policies: Sequence[Prepared | None],
    ) -> None:
        config = decoder.config
        self._run_kernel = functions[f"step_{_SUFFIX[decoder.dtype]}"]
        self._linear, self._decoder, self._store = linear, decoder, _PointerStore(decoder.dtype)
        self.size = 1 << max(len(policies) - 1, 0).bit_length()
        layers = [self._store.make_layer(block, self.size) for block in decoder.blocks]
        for index, layer in enumerate(layers):
            layer.window = config.get_window(index) or 0
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
            embed=self._store.make_matrix(decoder.embed),
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            scaling=moe.scaling if moe else 1.0,
            policies=self.size,
        )
        self._factors: dict[int, _PointerStore] = {}  # what keeps the adapters alive, by place
        for place, policy in enumerate(policies):
            self.put(place, policy)
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._logits = torch.empty(0)
        self._rotations: tuple[Tensor, ...] = ()  # cos and sin by position

    def put(self, place: int, policy: Prepared | None) -> None:
        """Run the policy at ``place``, which is below ``size``, with these adapters (None: the base) from the
        next pass on."""
        store = _PointerStore(self._decoder.dtype)
        for idx, (block, layer) in enumerate(zip(self._decoder.blocks, self._layers, strict=True)):
            lora = NO_LORA if policy is None else policy.layers[idx]
            for name, factors in _list_maps(block, lora).items():
                array = (_Adapter * self.size).from_address(getattr(layer, name).adapters)
                array[place] = store.make_adapter(factors)
            if isinstance(block.mlp, Moe):
                experts = (Experts * self.size).from_address(layer.experts)
                experts[place] = store.make_experts(block.mlp.gate_up, block.mlp.down, lora.experts)
        self._factors[place] = store

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        rows: Rows,
        keys: Tensor,
        values: Tensor,
        spans: Sequence[tuple[int, int]] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Run a pass, and return (hidden [T, D] after the final norm, routing [T, L_moe, K] int16 or None).

        tokens, positions: [T] int64. spans: (last row + 1, index of the policy) of consecutive rows; empty:
        all rows are of the first policy. keys, values: the whole cache (``engine.paged.KVStore``), in which
        ``rows.slots`` are written. A workspace that is too small is replaced by a larger one, which later
        passes use.
        """
        config, num_rows = self._decoder.config, tokens.shape[0]
        hidden = torch.empty(num_rows, config.hidden_size, dtype=keys.dtype)
        routing = None
        if config.moe is not None:
            routing = torch.empty(num_rows, config.num_moe_layers, config.moe.top_k, dtype=torch.int16)
        if num_rows == 0:
            return hidden, routing
        numbers = [number for span in (spans or ((num_rows, 0),)) for number in span]
        span_array = (ctypes.c_int32 * len(numbers))(*numbers)
        batch = _Batch(
            spans=ctypes.addressof(span_array),
            num_spans=len(numbers) // 2,
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
            rows=num_rows,
            table_width=rows.tables.stride(0),
            moe_layers=config.num_moe_layers,
            key_layer=keys.stride(0),
            value_layer=values.stride(0),
        )
        model, workspace = ctypes.byref(self._model), self._workspace
        # the kernel returns what it lacks, and 0 when it has run
        while size_request := self._run_kernel(
            model, ctypes.byref(batch), workspace.data_ptr(), workspace.numel()
        ):
            self._allocate_missing(size_request)
            workspace = self._workspace
        return hidden, routing

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute ``Decoder.logits`` [R, V] into memory that the next call overwrites.

        Fresh memory of that size would be mapped page by page at every step: half the cost of the product.
        """
        decoder = self._decoder
        dtype = torch.float32 if decoder.fp32_head else decoder.dtype
        vocab, num_logits = decoder.config.vocab_size, hidden.shape[0] * decoder.config.vocab_size
        if self._logits.numel() < num_logits or self._logits.dtype != dtype:
            self._logits = torch.empty(num_logits, dtype=dtype)
        return self._linear(
            hidden, decoder.head_weight, None, dtype, out=self._logits[:num_logits].view(-1, vocab)
        )

    def _allocate_missing(self, size_request: int) -> None:
        """Allocate what the pass lacks: ``size_request`` bytes of workspace, or if it is negative, rotations
        of at least that many positions."""
        if size_request > 0:
            self._workspace = torch.empty(size_request, dtype=torch.uint8)
            return
        length = max(-size_request, 2 * self._model.positions, 512)
        cos, sin = self._decoder.compute_rotations(torch.arange(length))
        self._rotations = cos, sin
        self._model.cos, self._model.sin, self._model.positions = cos.data_ptr(), sin.data_ptr(), length


class _PointerStore:
    """Makes structs and pointers of tensors for the kernels, for rows of ``dtype``, and keeps the tensors
    alive."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._tensors: list[Weight] = []
        self._arrays: list[ctypes.Array[Any]] = []

    def make_matrix(self, weight: Weight) -> Matrix:
        self._tensors.append(weight)
        return make_matrix(weight, self._dtype)

    def get_pointer(self, tensor: Tensor | None) -> int | None:
        """Return the address of a tensor; None for None."""
        if tensor is None:
            return None
        tensor = tensor.detach().contiguous()  # a parameter is contiguous, so it is not copied
        self._tensors.append(tensor)
        return tensor.data_ptr()

    def make_array(self, structs: Sequence[ctypes.Structure]) -> int:
        """Copy structs into an array, and return its address."""
        memory = (type(structs[0]) * len(structs))(*structs)
        self._arrays.append(memory)
        return ctypes.addressof(memory)

    def make_linear(self, weight: Weight, bias: Tensor | None, policies: int) -> _Linear:
        """A map that no policy adapts yet."""
        outputs, inputs = weight.shape
        return _Linear(
            w=self.make_matrix(weight),
            bias=self.get_pointer(bias),
            out=outputs,
            into=inputs,
            adapters=self.make_array([_Adapter()] * policies),
        )

    def make_adapter(self, lora: Lora | None) -> _Adapter:
        if lora is None:
            return _Adapter()
        return _Adapter(
            a=self.get_pointer(lora.a), b=self.get_pointer(lora.b), rank=lora.a.shape[0], scale=lora.scale
        )

    def make_experts(self, gate_up: Weight, down: Weight, lora: ExpertLora | None) -> Experts:
        self._tensors += [gate_up, down, *(lora[:4] if lora is not None else ())]
        return make_experts_struct(gate_up, down, lora, self._dtype)

    def make_layer(self, block: Block, policies: int) -> _Layer:
        attn, mlp = block.attn, block.mlp
        assert isinstance(attn, Attention)
        dense_mlp = mlp.shared if isinstance(mlp, Moe) else mlp
        layer = _Layer(
            attn_norm=self.get_pointer(block.attn_norm),
            mlp_norm=self.get_pointer(block.mlp_norm),
            next_norm=self.get_pointer(block.next_norm),
            q_norm=self.get_pointer(attn.q_norm),
            k_norm=self.get_pointer(attn.k_norm),
            qkv=self.make_linear(attn.qkv, attn.qkv_bias, policies),
            o=self.make_linear(attn.o, attn.o_bias, policies),
        )
        if dense_mlp is not None:
            layer.gate_up = self.make_linear(dense_mlp.gate_up, dense_mlp.gate_up_bias, policies)
            layer.down = self.make_linear(dense_mlp.down, dense_mlp.down_bias, policies)
        if isinstance(mlp, Moe):
            layer.router = self.make_linear(mlp.router, None, policies)
            layer.experts = self.make_array([self.make_experts(mlp.gate_up, mlp.down, None)] * policies)
        return layer


def _list_maps(block: Block, lora: LayerLora) -> dict[str, Lora | None]:
    """The adapters of a layer by field of ``_Layer``, for the maps that the layer has."""
    maps = {"qkv": lora.qkv, "o": lora.o}
    if not isinstance(block.mlp, Moe):
        return {**maps, "gate_up": lora.gate_up, "down": lora.down}
    if block.mlp.shared is not None:
        maps |= {"gate_up": lora.shared_gate_up, "down": lora.shared_down}
    return {**maps, "router": lora.router}


# The fields that the step reads, and those that change no pass. If any other field is not at its default, the
# decoder computes: so a new family is never computed without its new features.
_READ_FIELDS = {
    ModelConfig: "model_type vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads "
    "head_dim max_positions rms_norm_eps tie_embeddings rope qkv_bias o_bias mlp_bias qk_norm "
    "initializer_range moe local_layers window raw",
    MoEConfig: "num_experts top_k intermediate_size layers norm_topk scaling topk_groups "
    "shared_intermediate_size",
    Block: "attn_norm attn mlp_norm mlp next_norm",
}


def has_only_read_fields(value: Any, kind: type) -> bool:
    """Return whether all fields of ``value`` that the step does not read have their defaults. ``kind``: its
    type, a key of ``_READ_FIELDS``."""
    names = frozenset(_READ_FIELDS[kind].split())
    return all(
        getattr(value, field.name) == field.default for field in fields(value) if field.name not in names
    )


def is_supported(decoder: Decoder) -> bool:
    """Return whether ``FusedStep`` computes this decoder."""
    config = decoder.config
    return (
        decoder.device.type == "cpu"
        and decoder.dtype in _SUFFIX
        and has_only_read_fields(config, ModelConfig)
        and (config.moe is None or has_only_read_fields(config.moe, MoEConfig))
        and all(has_only_read_fields(block, Block) for block in decoder.blocks)
        and decoder.inv_freq.shape[0] * 2 == config.head_dim
        and all(parameter.is_contiguous() for parameter in decoder.parameters())
    )
