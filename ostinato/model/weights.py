"""The weights of a decoder: those that read the same input share a matrix (q, k, v; gate, up; all experts).

The fields of the classes are parameters that ``Decoder`` registers under dotted names. ``iterate_linears``
yields the maps that an adapter or a checkpoint names, as views.

D hidden size, H query heads, G key-value heads, F width of an MLP, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.model.config import ModelConfig, QKNorm


class ParameterMaker(Protocol):
    """Makes a frozen parameter, by default in the dtype of the decoder, and registers it with the decoder.

    The result is Any, because a linear map may be quantised.
    """

    def __call__(self, name: str, *shape: int, dtype: torch.dtype = ...) -> Any: ...


@dataclass(frozen=True, slots=True)
class Quantised:
    """The weight of a linear map as codes of 8 bits: w[..., n, k] = scale[..., n] * codes[..., n, k].

    Every code is exact in bf16. The weight is frozen: it has no gradient. Its only views are those of an
    expert. Codes are stored in the order in which the kernels read them (native/codes.h): in tiles of 16 rows
    by 4 columns, padded with zeros.
    """

    tiles: Tensor  # [..., N / 16, K / 4, 64] int8 or float8_e4m3fn
    scale: Tensor  # [..., N] fp32
    inputs: int  # K
    samples: Tensor | None = None  # every ``compute_fingerprint_stride``-th value before quantising, bf16

    @staticmethod
    def of(codes: Tensor, scale: Tensor, samples: Tensor | None = None) -> Quantised:
        """Make a weight from codes [..., N, K] int8 or float8_e4m3fn."""
        num_outputs, num_inputs = codes.shape[-2:]
        padded_codes = F.pad(codes.view(torch.uint8), (0, -num_inputs % 4, 0, -num_outputs % 16))
        blocks = padded_codes.unflatten(-1, (-1, 2, 2)).unflatten(-4, (-1, 4, 4))
        tiles = blocks.movedim((-3, -2), (-5, -3)).flatten(-4).contiguous()
        return Quantised(tiles.view(codes.dtype), scale.contiguous(), num_inputs, samples)

    @staticmethod
    def like(weight: Tensor) -> Quantised:
        """Make an uninitialised weight of the shape of ``weight`` [..., N, K], on its device."""
        *leading_dims, num_outputs, inputs = weight.shape
        tiles = weight.new_empty(*leading_dims, -(-num_outputs // 16), -(-inputs // 4), 64, dtype=torch.int8)
        samples = weight.new_empty(
            -(-weight.numel() // compute_fingerprint_stride(weight.numel())), dtype=torch.bfloat16
        )
        return Quantised(
            tiles, weight.new_empty(*leading_dims, num_outputs, dtype=torch.float32), inputs, samples
        )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.scale.shape, self.inputs))

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes + self.scale.nbytes

    @property
    def codes(self) -> Tensor:
        """The codes [..., N, K], in new memory."""
        blocks = self.tiles.view(torch.uint8).unflatten(-1, (4, 2, 4, 2)).movedim((-5, -3), (-3, -2))
        codes = blocks.flatten(-3).flatten(-4, -2)[..., : self.scale.shape[-1], : self.inputs]
        return codes.contiguous().view(self.tiles.dtype)

    def __getitem__(self, expert: int) -> Quantised:
        return Quantised(self.tiles[expert], self.scale[expert], self.inputs)

    def product(self, x: Tensor) -> Tensor:
        """Compute x [T, K] -> x w^T [T, N] fp32: the codes are multiplied and summed first, then scaled."""
        return (x.float() @ self.codes.float().T) * self.scale

    def transposed_product(self, x: Tensor) -> Tensor:
        """Compute x [T, N] -> x w [T, K] fp32: x is scaled, and then multiplied by the codes."""
        return (x.float() * self.scale) @ self.codes.float()


Weight = Tensor | Quantised


def save_weight(ctx: Any, weight: Weight, *tensors: Tensor) -> None:
    """Save ``tensors`` and, after them, a frozen weight for the backward of an autograd function. A weight in
    codes is stored in ``ctx.coded``, since it is no tensor."""
    ctx.coded = weight if isinstance(weight, Quantised) else None
    ctx.save_for_backward(*tensors, *(() if isinstance(weight, Quantised) else (weight,)))


def load_saved_weight(ctx: Any) -> tuple[Any, ...]:
    """Return what ``save_weight`` saved: the tensors, then the weight. Checkpointing allows one call per
    backward."""
    return ctx.saved_tensors if ctx.coded is None else (*ctx.saved_tensors, ctx.coded)


def is_quantised(name: str, shape: Sequence[int]) -> bool:
    """Return whether a stored weight of this name is quantised: linear maps are, but not embedding, head and
    router."""
    return len(shape) >= 2 and name.rpartition(".")[2] not in ("embed", "head", "router")


def compute_fingerprint_stride(num_values: int, num_samples: int = 64) -> int:
    """Compute the stride at which the fingerprint of a base samples the values of a flattened tensor."""
    return max(1, num_values // num_samples)


class Linear(NamedTuple):
    """A logical linear map: views into the stored weights. Experts have weight [E, out, in]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(slots=True)
class Attention:
    """Stored weights of grouped-query attention."""

    qkv: Weight  # [(H + 2G) * head_dim, D]
    qkv_bias: Tensor | None
    o: Weight
    o_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(slots=True)
class LatentAttention:
    """Stored weights of multi-head latent attention."""

    q: Weight | None  # [H * head_dim, D] without a query latent, else q_a and q_b
    q_a: Weight | None
    q_a_norm: Tensor | None
    q_b: Weight | None
    kv_a: Weight  # [kv_lora_rank + rope_head_dim, D]
    kv_a_norm: Tensor
    kv_b: Weight  # [H * (nope_head_dim + v_head_dim), kv_lora_rank]
    o: Weight


@dataclass(slots=True)
class Mlp:
    """Stored weights of a SwiGLU network."""

    gate_up: Weight  # [2F, D]
    gate_up_bias: Tensor | None
    down: Weight  # [D, F]
    down_bias: Tensor | None


@dataclass(slots=True)
class Moe:
    """Stored weights of a mixture of experts."""

    router: Tensor  # [E, D]
    correction_bias: Tensor | None  # [E] fp32, never trained
    gate_up: Weight  # [E, 2F, D]
    down: Weight  # [E, D, F]
    shared: Mlp | None
    slots: Tensor | None = None  # [E] int64: place of an expert among those that ranks keep; None: its id


@dataclass(slots=True)
class Block:
    """A layer. Its weights are plain attributes, because to look one up in nn.Module costs as much as a small
    kernel."""

    attn_norm: Tensor
    attn: Attention | LatentAttention
    mlp_norm: Tensor
    mlp: Mlp | Moe
    # of the next layer, or the final norm, which is fused with the addition to the residual; None if not here
    next_norm: Tensor | None
    attn_out_norm: Tensor | None = None  # of the outputs, before they are added
    mlp_out_norm: Tensor | None = None


def make_block(c: ModelConfig, make: ParameterMaker, layer: int, next_norm: Tensor | None) -> Block:
    """Allocate layer ``layer``. ``next_norm`` is the norm that follows it, if it is here."""
    moe, name = c.moe, f"layers.{layer}"
    mlp: Mlp | Moe
    if moe is None or layer not in moe.layers:
        mlp = _make_mlp(make, f"{name}.mlp", c.hidden_size, c.intermediate_size, c.mlp_bias)
    else:
        shared_size = moe.shared_intermediate_size
        mlp = Moe(
            router=make(f"{name}.moe.router", moe.num_experts, c.hidden_size),
            correction_bias=make(f"{name}.moe.correction_bias", moe.num_experts, dtype=torch.float32)
            if moe.correction_bias
            else None,
            gate_up=make(f"{name}.moe.gate_up", moe.num_local, 2 * moe.intermediate_size, c.hidden_size),
            down=make(f"{name}.moe.down", moe.num_local, c.hidden_size, moe.intermediate_size),
            shared=_make_mlp(make, f"{name}.shared", c.hidden_size, shared_size, False)
            if shared_size
            else None,
        )
    return Block(
        attn_norm=make(f"{name}.attn_norm", c.hidden_size),
        attn=_make_latent_attention(c, make, name) if c.mla else _make_attention(c, make, name),
        mlp_norm=make(f"{name}.mlp_norm", c.hidden_size),
        mlp=mlp,
        next_norm=next_norm,
        attn_out_norm=make(f"{name}.attn_out_norm", c.hidden_size) if c.post_norms else None,
        mlp_out_norm=make(f"{name}.mlp_out_norm", c.hidden_size) if c.post_norms else None,
    )


def _make_mlp(make: ParameterMaker, name: str, hidden_size: int, inner_size: int, has_bias: bool) -> Mlp:
    return Mlp(
        gate_up=make(f"{name}.gate_up", 2 * inner_size, hidden_size),
        gate_up_bias=make(f"{name}.gate_up_bias", 2 * inner_size) if has_bias else None,
        down=make(f"{name}.down", hidden_size, inner_size),
        down_bias=make(f"{name}.down_bias", hidden_size) if has_bias else None,
    )


def _make_attention(c: ModelConfig, make: ParameterMaker, name: str) -> Attention:
    num_query_outputs, num_key_outputs = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    q_norm = k_norm = None
    if c.qk_norm != QKNorm.NONE:
        is_per_head = c.qk_norm == QKNorm.HEAD
        q_norm = make(f"{name}.attn.q_norm", c.head_dim if is_per_head else num_query_outputs)
        k_norm = make(f"{name}.attn.k_norm", c.head_dim if is_per_head else num_key_outputs)
    return Attention(
        qkv=make(f"{name}.attn.qkv", num_query_outputs + 2 * num_key_outputs, c.hidden_size),
        qkv_bias=make(f"{name}.attn.qkv_bias", num_query_outputs + 2 * num_key_outputs)
        if c.qkv_bias
        else None,
        o=make(f"{name}.attn.o", c.hidden_size, num_query_outputs),
        o_bias=make(f"{name}.attn.o_bias", c.hidden_size) if c.o_bias else None,
        q_norm=q_norm,
        k_norm=k_norm,
    )


def _make_latent_attention(c: ModelConfig, make: ParameterMaker, name: str) -> LatentAttention:
    mla = c.mla
    assert mla is not None
    num_query_outputs, rank = c.num_heads * c.head_dim, mla.q_lora_rank
    num_kv_outputs = c.num_heads * (mla.nope_head_dim + mla.v_head_dim)
    return LatentAttention(
        q=make(f"{name}.attn.q", num_query_outputs, c.hidden_size) if rank is None else None,
        q_a=make(f"{name}.attn.q_a", rank, c.hidden_size) if rank else None,
        q_a_norm=make(f"{name}.attn.q_a_norm", rank) if rank else None,
        q_b=make(f"{name}.attn.q_b", num_query_outputs, rank) if rank else None,
        kv_a=make(f"{name}.attn.kv_a", mla.kv_lora_rank + mla.rope_head_dim, c.hidden_size),
        kv_a_norm=make(f"{name}.attn.kv_a_norm", mla.kv_lora_rank),
        kv_b=make(f"{name}.attn.kv_b", num_kv_outputs, mla.kv_lora_rank),
        o=make(f"{name}.attn.o", c.hidden_size, c.num_heads * mla.v_head_dim),
    )


def iterate_linears(
    c: ModelConfig, blocks: Sequence[Block], layers: Sequence[int]
) -> Iterator[tuple[str, Linear]]:
    """Yield every linear map by logical name, layer by layer (names and shapes as
    ``shapes.compute_linear_shapes``). Raises ValueError for a quantised map."""
    for layer, block in zip(layers, blocks, strict=True):
        name, attn, mlp = f"layers.{layer}", block.attn, block.mlp
        if isinstance(attn, Attention):
            queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
            yield from _slice_members(
                f"{name}.attn", ("q", "k", "v"), (queries, keys, keys), attn.qkv, attn.qkv_bias
            )
            yield f"{name}.attn.o", Linear(_require_tensor(attn.o), attn.o_bias)
        else:
            for part in ("q", "q_a", "q_b", "kv_a", "kv_b", "o"):
                if getattr(attn, part) is not None:
                    yield f"{name}.attn.{part}", Linear(_require_tensor(getattr(attn, part)), None)
        if isinstance(mlp, Moe):
            yield f"{name}.router", Linear(mlp.router, None)
            yield from _slice_ffn(f"{name}.experts", mlp.gate_up, None, mlp.down, None)
            if mlp.shared is not None:
                yield from _slice_ffn(f"{name}.shared", mlp.shared.gate_up, None, mlp.shared.down, None)
        else:
            yield from _slice_ffn(f"{name}.mlp", mlp.gate_up, mlp.gate_up_bias, mlp.down, mlp.down_bias)


def _slice_ffn(
    name: str, gate_up: Weight, gate_up_bias: Tensor | None, down: Weight, down_bias: Tensor | None
) -> Iterator[tuple[str, Linear]]:
    width = gate_up.shape[-2] // 2
    yield from _slice_members(name, ("gate", "up"), (width, width), gate_up, gate_up_bias)
    yield f"{name}.down", Linear(_require_tensor(down), down_bias)


def _slice_members(
    name: str, parts: tuple[str, ...], sizes: tuple[int, ...], weight: Weight, bias: Tensor | None
) -> Iterator[tuple[str, Linear]]:
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        piece = None if bias is None else bias.narrow(0, start, size)
        yield f"{name}.{part}", Linear(_require_tensor(weight).narrow(-2, start, size), piece)
        start += size


def _require_tensor(weight: Weight) -> Tensor:
    """Return ``weight``. Raises ValueError if it is quantised."""
    if isinstance(weight, Quantised):
        raise ValueError('quantised weights have no views; load the model with model.storage="same"')
    return weight


@torch.no_grad()
def fill_initial_values(
    parameters: Iterable[tuple[str, Tensor]], std: float, seed: int, *, norm: float = 1.0
) -> None:
    """Fill parameters with initial values, which are equal on any device: normal(0, std), norms ``norm``,
    biases 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in parameters:
        role = name.rpartition(".")[2]
        if role.endswith("norm"):
            parameter.fill_(norm)
        elif role.endswith("bias"):
            parameter.zero_()
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
