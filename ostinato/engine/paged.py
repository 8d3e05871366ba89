"""Attention over paged keys and values: what the engine hands to ``Decoder.forward``.

Layout (chosen for the CPU kernels, and the same everywhere): keys [layers, blocks, Hkv, Dk / pair, 16, pair]
with pair = 2 for bf16 and 1 for fp32, so that one vector holds a feature of 16 positions; values
[layers, blocks, Hkv, 16, Dv]. A slot is block * 16 + offset.
"""

from __future__ import annotations

import math
import mmap
import sys
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.engine.cache import BLOCK
from ostinato.model.native import Kernels


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.zeros``, but on a CPU in pages that the system zeroes on first use instead of now."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or sys.platform == "win32" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@dataclass(slots=True)
class KVStore:
    """The arrays behind the block ids of ``cache.KVCache``."""

    keys: Tensor
    values: Tensor
    key_layers: tuple[Tensor, ...] = field(init=False)
    value_layers: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.key_layers, self.value_layers = self.keys.unbind(0), self.values.unbind(0)

    @classmethod
    def allocate(
        cls, layers: int, blocks: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> KVStore:
        """Zeros for ``blocks`` blocks; ``shape`` is the decoder's (num_kv_heads, key_dim, value_dim).

        On a CPU memory is taken when a block is first written: of many workers few fill their pools.
        """
        heads, key_dim, value_dim = shape
        pair = key_pair(dtype)
        if key_dim % pair:
            raise ValueError(f"keys of an odd width ({key_dim}) cannot be cached in {dtype}; use float32")
        keys = _zeros((layers, blocks, heads, key_dim // pair, BLOCK, pair), dtype, device)
        return cls(keys, _zeros((layers, blocks, heads, BLOCK, value_dim), dtype, device))

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks in every layer."""
        self.keys[:, targets] = self.keys[:, sources]
        self.values[:, targets] = self.values[:, sources]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values))


def key_pair(dtype: torch.dtype) -> int:
    """Features interleaved in the key layout: what one multiply-add instruction sums."""
    return 2 if dtype == torch.bfloat16 else 1


def block_bytes(layers: int, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    heads, key_dim, value_dim = shape
    return layers * heads * (key_dim + value_dim) * BLOCK * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of one forward stand. Rows of a sequence are consecutive."""

    slots: Tensor  # [T] int64: where the key and value of row t go
    tables: Tensor  # [S, max_blocks] int32
    sequence: Tensor  # [T] int32: row of ``tables``
    lengths: Tensor  # [T] int32: positions that row t sees, itself included

    def part(self, first: int, last: int) -> Rows:
        """Rows first to last - 1 as a pass of their own."""
        return Rows(self.slots[first:last], self.tables, self.sequence[first:last], self.lengths[first:last])


@dataclass(frozen=True, slots=True)
class NativePaged:
    """Every row walks its own blocks, so a row's result does not depend on the batch."""

    kernels: Kernels
    store: KVStore
    rows: Rows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values, rows = self.store.key_layers[layer], self.store.value_layers[layer], self.rows
        self.kernels.write_cache(k, v, rows.slots, keys, values)
        return self.kernels.paged_attention(q, keys, values, rows.tables, rows.sequence, rows.lengths, scale)


@dataclass(frozen=True, slots=True)
class TorchPaged:
    """In torch, on any device: gathers the blocks of every row's sequence and masks what it does not see."""

    store: KVStore
    rows: Rows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values, rows = self.store.key_layers[layer], self.store.value_layers[layer], self.rows
        blocks, offsets = rows.slots // BLOCK, rows.slots % BLOCK
        heads = k.shape[1]
        keys[blocks, :, :, offsets, :] = k.reshape(len(k), heads, keys.shape[2], keys.shape[4])
        values[blocks, :, offsets] = v
        longest = int(rows.lengths.max())
        tables = rows.tables[:, : (longest + BLOCK - 1) // BLOCK].long()
        # [S, blocks, heads, Dk / pair, 16, pair] -> [S, heads, positions, Dk]
        k_all = keys[tables].permute(0, 2, 1, 4, 3, 5).flatten(4, 5).flatten(2, 3)
        v_all = values[tables].transpose(1, 2).flatten(2, 3)
        sequence = rows.sequence.long()
        places = torch.arange(k_all.shape[2], device=q.device)
        seen = places < rows.lengths.unsqueeze(1)
        # What was left behind a sequence's end may be NaN, and a masked NaN is still NaN in the sum.
        ends = rows.lengths.new_zeros(len(tables)).scatter_reduce_(0, sequence, rows.lengths, "amax")
        beyond = (places >= ends.unsqueeze(1))[:, None, :, None]
        k_all, v_all = k_all.masked_fill_(beyond, 0), v_all.masked_fill_(beyond, 0)
        out = F.scaled_dot_product_attention(
            q.unsqueeze(2),  # every row is a batch of its own: [T, H, 1, Dk]
            k_all[sequence],
            v_all[sequence],
            attn_mask=seen[:, None, None, :],
            scale=scale,
            enable_gqa=q.shape[1] != heads,
        )
        return out.squeeze(2)
