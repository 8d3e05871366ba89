"""Attention over paged keys and values: the ``attend`` argument of ``Decoder.forward``.

Layout (chosen for the CPU kernels, and the same everywhere): keys [layers, blocks, Hkv, Dk / pair, 16, pair]
with pair = 2 for bf16 and 1 for fp32, so that one vector holds a feature of 16 positions; values
[layers, blocks, Hkv, 16, Dv]. A slot is block * 16 + offset.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ostinato.engine.cache import BLOCK
from ostinato.model.attention import Attend, ProjectedAttend
from ostinato.model.native import Kernels
from ostinato.model.packed import choose_kernel, merge_part

if TYPE_CHECKING:
    from ostinato.model.cuda.paged import Tiles

FEW_PROGRAMS = 1024  # tiles times key heads: fewer leave multiprocessors of a card idle
SHORT = 16  # rows of a sequence that a GPU takes row by row: the last token and its draft


def _make_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make zeros; on a CPU, in pages that the system zeroes on first use instead of now."""
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
    by_position: bool = False  # keys and values [layers, blocks, 16, Hkv, D]: the layout of ``TritonPaged``
    key_layers: tuple[Tensor, ...] = field(init=False)
    value_layers: tuple[Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._set_arrays(self.keys, self.values)

    def _set_arrays(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.key_layers, self.value_layers = keys.unbind(0), values.unbind(0)

    @contextmanager
    def lend_memory(self) -> Iterator[None]:
        """Free the memory within the context. After it, also after an error, the arrays are zeros, perhaps
        at another address."""
        sizes, dtype, device = (self.keys.shape, self.values.shape), self.keys.dtype, self.keys.device
        self._set_arrays(self.keys.new_empty(0), self.values.new_empty(0))
        try:
            yield
        finally:
            self._set_arrays(*(_make_zeros(size, dtype, device) for size in sizes))

    @classmethod
    def allocate(
        cls,
        layers: int,
        blocks: int,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        by_position: bool = False,
    ) -> KVStore:
        """Allocate zeros for ``blocks`` blocks; ``shape`` is the decoder's (num_kv_heads, key_dim,
        value_dim). Raises ValueError for keys whose width is not divisible by that of a pair, unless
        ``by_position``.

        On a CPU memory is used only when a block is first written: few of many workers fill their pools.
        """
        heads, key_dim, value_dim = shape
        if by_position:
            sizes = ((layers, blocks, BLOCK, heads, width) for width in (key_dim, value_dim))
            return cls(*(_make_zeros(size, dtype, device) for size in sizes), by_position=True)
        pair = choose_pair_size(dtype)
        if key_dim % pair:
            raise ValueError(f"keys of an odd width ({key_dim}) cannot be cached in {dtype}; use float32")
        keys = _make_zeros((layers, blocks, heads, key_dim // pair, BLOCK, pair), dtype, device)
        return cls(keys, _make_zeros((layers, blocks, heads, BLOCK, value_dim), dtype, device))

    def write(self, layer: int, k: Tensor, v: Tensor, slots: tuple[Tensor, Tensor]) -> None:
        """Put keys [T, heads, Dk] and values of rows into (blocks [T], offsets [T])."""
        (blocks, offsets), keys = slots, self.key_layers[layer]
        keys[blocks, :, :, offsets, :] = k.reshape(len(k), k.shape[1], keys.shape[2], keys.shape[4])
        self.value_layers[layer][blocks, :, offsets] = v

    def read(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the blocks of ``tables`` [S, blocks] int64: keys [S, heads, positions, Dk] and
        values."""
        # [S, blocks, heads, Dk / pair, 16, pair] -> [S, heads, positions, Dk]
        keys = self.key_layers[layer][tables].permute(0, 2, 1, 4, 3, 5).flatten(4, 5).flatten(2, 3)
        return keys, self.value_layers[layer][tables].transpose(1, 2).flatten(2, 3)

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole blocks in every layer."""
        self.keys[:, targets] = self.keys[:, sources]
        self.values[:, targets] = self.values[:, sources]

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values))


def move_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return ``array`` on ``device``: on a CPU its own memory, on a GPU an asynchronous copy."""
    values = torch.from_numpy(array)
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def choose_pair_size(dtype: torch.dtype) -> int:
    """Return the number of interleaved features of keys: what a multiply-add instruction sums."""
    return 2 if dtype == torch.bfloat16 else 1


def count_block_bytes(layers: int, shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Return the bytes of a block over all layers."""
    heads, key_dim, value_dim = shape
    return layers * heads * (key_dim + value_dim) * BLOCK * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Places:
    """``Rows`` on the host. Rows of a sequence are consecutive."""

    slots: np.ndarray  # [T] int64
    tables: np.ndarray  # [S, max_blocks] int32
    owners: np.ndarray  # [T] int32
    seen: np.ndarray  # [T] int32

    def cut_part(self, first_row: int, end_row: int) -> Places:
        """Return rows first to last - 1 as a pass of their own, with all tables."""
        span = slice(first_row, end_row)
        return Places(self.slots[span], self.tables, self.owners[span], self.seen[span])

    def move_to(self, device: torch.device) -> Rows:
        """Return the rows on ``device``, with these arrays for reading on the host."""
        arrays = (self.slots, np.ascontiguousarray(self.tables), self.owners, self.seen)
        return Rows(*(move_to_device(a, device) for a in arrays), owners=self.owners, seen=self.seen)


@dataclass(frozen=True, slots=True)
class Rows:
    """The positions of the rows of a forward. Rows of a sequence are consecutive."""

    slots: Tensor  # [T] int64: where the key and value of row t go
    tables: Tensor  # [S, max_blocks] int32
    sequence: Tensor  # [T] int32: row of ``tables``
    lengths: Tensor  # [T] int32: positions that row t sees, itself included
    owners: np.ndarray | None = None  # ``sequence`` and ``lengths`` on the host, where they come from it:
    seen: np.ndarray | None = None  # to read them from a GPU would wait for it

    def select_rows(self, rows: Tensor | slice, on_host: np.ndarray | slice) -> Rows:
        """Select rows, by indices on the device (``rows``) and the same on the host (``on_host``)."""
        owners, seen = (x if x is None else x[on_host] for x in (self.owners, self.seen))
        sequence, lengths = self.sequence[rows], self.lengths[rows]
        return Rows(self.slots[rows], self.tables, sequence, lengths, owners, seen)

    def read_on_host(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ``sequence`` and ``lengths`` as arrays [T]; waits for a GPU if they did not come from the
        host."""
        owners = self.sequence.cpu().numpy() if self.owners is None else self.owners
        return owners, self.lengths.cpu().numpy() if self.seen is None else self.seen


@dataclass(frozen=True, slots=True)
class NativePaged:
    """Attention by the native kernels. Every row reads its own blocks: its result depends on no other row."""

    kernels: Kernels
    store: KVStore
    rows: Rows

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        keys, values, rows = self.store.key_layers[layer], self.store.value_layers[layer], self.rows
        self.kernels.write_cache(k, v, rows.slots, keys, values)
        places = rows.tables, rows.sequence, rows.lengths
        return self.kernels.paged_attention(q, keys, values, *places, scale, window=window)


class TorchPaged:
    """Attention in torch, on any device. It gathers the blocks of each row's sequence and masks unseen
    positions."""

    def __init__(self, store: KVStore, rows: Rows) -> None:
        self.store, self.slots = store, (rows.slots // BLOCK, rows.slots % BLOCK)
        max_length = int(rows.read_on_host()[1].max())
        self.tables = rows.tables[:, : (max_length + BLOCK - 1) // BLOCK].long()
        self.sequence = rows.sequence.long()
        positions = torch.arange(self.tables.shape[1] * BLOCK, device=rows.tables.device)
        self.before = rows.lengths.unsqueeze(1) - positions  # distance from a row, 1 for its own position
        self.seen = (positions < rows.lengths.unsqueeze(1))[:, None, None, :]
        # Old values beyond a sequence's end may be NaN, and a masked NaN is still NaN in the sum.
        ends = rows.lengths.new_zeros(len(self.tables))
        ends.scatter_reduce_(0, self.sequence, rows.lengths, "amax")
        self.beyond = (positions >= ends.unsqueeze(1))[:, None, :, None]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        self.store.write(layer, k, v, self.slots)
        keys, values = self.read_cached(layer)
        seen = self.seen if window is None else self.seen & (self.before <= window)[:, None, None, :]
        out = F.scaled_dot_product_attention(
            q.unsqueeze(2),  # every row is a batch of its own: [T, H, 1, Dk]
            keys[self.sequence],
            values[self.sequence],
            attn_mask=seen,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.squeeze(2)

    def read_cached(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys [S, heads, positions, Dk] and values of all sequences, 0 beyond their ends."""
        keys, values = self.store.read(layer, self.tables)
        return keys.masked_fill_(self.beyond, 0), values.masked_fill_(self.beyond, 0)


class TritonPaged(ProjectedAttend):
    """Attention by the kernels of ``model.cuda``, for rows of any kind. One launch norms, rotates and
    writes, and one or two attend.

    A row's result depends on no other row. Needs a store by position. ``tiles``: which rows share a tile,
    for the query heads of a key head; None: they are cut from the owners of the rows in the first call.
    ``exact``: attend by the kernels that the trainer uses too, without splits.
    """

    def __init__(
        self, store: KVStore, rows: Rows, tiles: Tiles | None = None, *, exact: bool = False
    ) -> None:
        self.store, self.rows, self._tiles, self._exact = store, rows, tiles, exact

    @property
    def attend(self) -> Attend:
        """The callable for the decoder; with ``exact`` it takes heads that are already normed and rotated."""
        return self.__call__ if self._exact else self

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        from ostinato.model.cuda import paged

        paged.write_cache(k, v, self.rows.slots, self.store.key_layers[layer], self.store.value_layers[layer])
        return self._run_attention(layer, q, scale)

    def project(
        self,
        layer: int,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        turns: tuple[Tensor, Tensor],
        scale: float,
    ) -> Tensor:
        from ostinato.model.cuda import paged

        keys, values = self.store.key_layers[layer], self.store.value_layers[layer]
        q = paged.store_projection(qkv, norms, eps, *turns, self.rows.slots, keys, values)
        return self._run_attention(layer, q, scale)

    def _run_attention(self, layer: int, q: Tensor, scale: float) -> Tensor:
        from ostinato.model.cuda import paged

        keys, values, rows = self.store.key_layers[layer], self.store.value_layers[layer], self.rows
        if self._tiles is None:
            self._tiles = paged.Tiles.of(rows.read_on_host()[0], q.shape[1] // keys.shape[2], q.device)
        is_small = not self._exact and len(self._tiles.first) * keys.shape[2] < FEW_PROGRAMS
        return paged.paged_attention(
            q, keys, values, rows.tables, rows.sequence, rows.lengths, self._tiles, scale, parallel=is_small
        )


class GpuPaged:
    """Attention by torch's kernels on a GPU, without reading from the GPU and without a copy of a prompt for
    each row.

    A run of more than SHORT rows of a sequence (a prompt, or a part of a prompt) is a causal call over its
    own keys and another call over the cached keys, merged by their log-sum-exps. All other rows are a masked
    batch, where the query heads of a key head are the rows. Torch chooses kernels by shapes, so the numbers
    are those of ``TorchPaged`` up to rounding, and not alike in every batch.
    """

    def __init__(self, store: KVStore, rows: Rows) -> None:
        owners, seen = rows.read_on_host()
        firsts = np.flatnonzero(np.diff(owners, prepend=-1))
        ends = np.append(firsts[1:], len(owners))
        is_long = ends - firsts > SHORT
        self.store, self.slots = store, (rows.slots // BLOCK, rows.slots % BLOCK)
        self.chunks = [
            (slice(int(first), int(end)), int(seen[first]) - 1, rows.tables[int(owners[first])].long())
            for first, end in zip(firsts[is_long], ends[is_long], strict=True)
        ]
        is_short = np.repeat(~is_long, ends - firsts)
        self.places = move_to_device(np.flatnonzero(is_short), rows.slots.device) if is_long.any() else None
        short_rows = rows if self.places is None else rows.select_rows(self.places, is_short)
        self.short = TorchPaged(store, short_rows) if is_short.any() else None
        self.alone = len(owners) == len(firsts) == len(rows.tables)  # a row for each sequence, in order

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        self.store.write(layer, k, v, self.slots)
        if self.places is None:
            return self._attend_batch(layer, q, k.shape[1], scale)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        for rows, cached, table in self.chunks:
            out[rows] = self._attend_chunk(layer, q[rows], k[rows], v[rows], scale, cached, table)
        if self.short is not None:
            out[self.places] = self._attend_batch(layer, q[self.places], k.shape[1], scale)
        return out

    def _attend_batch(self, layer: int, q: Tensor, heads: int, scale: float) -> Tensor:
        """Return the attention of every row over the keys of its sequence: [T, H, Dk] -> [T, H, Dv]."""
        assert self.short is not None
        keys, values = self.short.read_cached(layer)
        if not self.alone:
            keys, values = keys[self.short.sequence], values[self.short.sequence]
        # cuDNN, torch's first choice, makes a new plan for every shape, and shapes change with every answer
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            queries = q.unflatten(1, (heads, -1))
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=self.short.seen, scale=scale
            )
        return out.flatten(1, 2)

    def _attend_chunk(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, cached: int, table: Tensor
    ) -> Tensor:
        """Return the attention [n, H, Dv] of rows [n, H, Dk] of a sequence after ``cached`` positions."""
        kernel = choose_kernel(q, v)
        queries, own_k, own_v = (kernel.prepare(x.transpose(0, 1).unsqueeze(0)) for x in (q, k, v))
        out, lse, _ = kernel.forward(queries, own_k, own_v, scale, True)
        if cached:
            blocks = table[: (cached + BLOCK - 1) // BLOCK].unsqueeze(0)
            keys, values = (x[:, :, :cached] for x in self.store.read(layer, blocks))
            cached_out, cached_lse, _ = kernel.forward(
                queries, kernel.prepare(keys), kernel.prepare(values), scale, False
            )
            out, lse = out.float(), lse.clone()
            merge_part(out, lse, cached_out, cached_lse)
        return out.squeeze(0).transpose(0, 1).to(q.dtype)
