"""Small passes as graphs: the layers captured once, then replayed on static buffers.

A pass of up to MOST_ROWS rows is filled up to a power of two. A row that fills up has the first row's token,
sees one position of the first sequence, and stores nothing; its result is ignored. There is a graph for each
(policy, rows, blocks of a table), captured when it is first needed; a pass with rows of several policies has
SEVERAL for the policy. All that differs between two passes, and the factors of adapters, is written into
fixed memory: ``fill`` and ``overwrite_factors``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ostinato.engine.paged import KVStore, Places, Rows, TritonPaged
from ostinato.model.config import ModelConfig
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, Prepared, put_adapters, stack_adapters

if TYPE_CHECKING:
    from ostinato.model.cuda import CudaKernels
    from ostinato.model.cuda.graphs import Graph

MOST_ROWS = 256  # of a graph; with more, the card takes longer than the host needs to launch
TABLE = 32  # blocks of the smallest table: 512 positions, a split of attention
SEVERAL = -1  # in the place of a policy's number


@dataclass(frozen=True, slots=True)
class PolicyMix:
    """Adapters of several policies (``lora.stack_adapters``) with room for ``size`` of them, and the place of
    each row's policy ([T] int32); rows of a policy are consecutive."""

    prepared: Prepared
    size: int
    owners: np.ndarray


class Stack:
    """The adapters of all policies, stacked in memory that graphs read; each policy has a place in it."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype
        self._prepared: Prepared | None = None
        self._size = 0  # a power of two
        self._entries: dict[int, tuple[int, Adapters | None]] = {}  # (place, adapters) by policy

    def update(self, policies: Mapping[int, Adapters | None]) -> bool:
        """Store the adapters of ``policies`` by number (None: the base), and no others. Returns False if new
        memory was allocated, since the policies or their shapes did not fit: graphs that read the old memory
        are stale."""
        entries = {number: self._entries[number] for number in policies if number in self._entries}
        free = iter(sorted({*range(self._size)} - {place for place, _ in entries.values()}))
        if self._prepared is not None and len(policies) <= self._size:
            for number, adapters in policies.items():
                place = entries[number][0] if number in entries else next(free)
                if number not in entries or entries[number][1] is not adapters:
                    if not put_adapters(self._prepared, place, adapters):
                        break
                    entries[number] = place, adapters
            else:
                self._entries = entries
                return True
        self._prepared = None  # frees the old memory before the new one is allocated
        self._size = 1 << (len(policies) - 1).bit_length()
        padded = [*policies.values(), *[None] * (self._size - len(policies))]
        self._prepared = stack_adapters(padded, self._config, self._dtype)
        self._entries = {
            number: (place, adapters) for place, (number, adapters) in enumerate(policies.items())
        }
        return False

    def mix(self, spans: Sequence[tuple[int, int, int]]) -> PolicyMix:
        """Return the mix for a pass over ``spans`` of (number, first row, last row + 1)."""
        assert self._prepared is not None
        places = np.array([self._entries[number][0] for number, _, _ in spans], np.int32)
        return PolicyMix(self._prepared, self._size, np.repeat(places, [b - a for _, a, b in spans]))


def can_mix(decoder: Decoder, kernels: CudaKernels) -> bool:
    """Return whether a pass may have rows of several policies: not with ``exact``, whose products a trainer
    shares, nor over weights of fewer bits than rows have, whose experts have no kernel."""
    return kernels.mixes and not kernels.exact and not decoder.quantised and decoder.storage == decoder.dtype


class Buffers:
    """The inputs of passes whose tables have ``blocks`` blocks, in fixed memory."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        self.wide = torch.zeros(3, MOST_ROWS, dtype=torch.int64, device=device)
        self.narrow = torch.zeros(7, MOST_ROWS, dtype=torch.int32, device=device)
        self.tables = torch.zeros(MOST_ROWS, blocks, dtype=torch.int32, device=device)

    def fill(
        self,
        rows: int,
        group: int,
        tokens: np.ndarray,
        positions: np.ndarray,
        where: Places,
        owners: np.ndarray | None,
    ) -> None:
        """Write the inputs of T rows, padded to ``rows``; ``group``: query heads of a key head; ``owners``:
        [T] places of the policies, None for a single policy. A row of padding has the first row's token,
        sees one position and has slot -1."""
        from ostinato.model.cuda.paged import cut_tiles

        num_tokens = len(tokens)
        longs, ints = np.zeros((3, rows), np.int64), np.zeros((7, rows), np.int32)
        longs[0], longs[2], ints[1] = tokens[0], -1, 1  # of padding: token, slot, positions seen
        longs[:, :num_tokens] = tokens, positions, where.slots
        starts = np.diff(where.owners, prepend=-1) != 0
        ints[0, :num_tokens], ints[1, :num_tokens] = np.cumsum(starts) - 1, where.seen
        tiles = cut_tiles(ints[0], group)
        ints[2:4, : tiles.shape[1]] = tiles  # tiles after these have no rows
        if owners is not None:
            ints[4, :num_tokens], ints[4, num_tokens:] = owners, owners[-1]
            tiles = cut_tiles(ints[4], 1)
            ints[5:, : tiles.shape[1]] = tiles
        tables = where.tables[where.owners[starts]]
        padded = np.zeros((len(tables), self.tables.shape[1]), np.int32)
        padded[:, : tables.shape[1]] = tables[:, : padded.shape[1]]
        _write(self.wide[:, :rows], longs)
        _write(self.narrow[:, :rows], ints)
        _write(self.tables[: len(padded)], padded)


def _write(target: Tensor, values: np.ndarray) -> None:
    """Copy ``values`` without waiting for earlier work of a GPU."""
    source = torch.from_numpy(values)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


@dataclass(slots=True)
class Pass:
    """A graph, with the outputs of its layers: hidden states [rows, D] and routes [rows, L_moe, K]."""

    graph: Graph
    hidden: Tensor | None = None
    routing: Tensor | None = None


class PassGraphs:
    """The layers of ``decoder`` on ``store`` in graphs that ``graph`` makes."""

    def __init__(
        self, decoder: Decoder, store: KVStore, kernels: CudaKernels, graph: Callable[[], Graph]
    ) -> None:
        self._decoder, self._store, self._kernels, self._graph = decoder, store, kernels, graph
        self._group = decoder.local.num_heads // decoder.kv_shape[0]
        self._buffers: dict[int, Buffers] = {}
        self._passes: dict[tuple[int, int, int], Pass] = {}
        self._memory = (0, 0)  # addresses of keys and values that the graphs read

    def forget(self, policy: int) -> None:
        """Drop the graphs of a policy, whose tensors have been replaced."""
        self._passes = {key: graph_pass for key, graph_pass in self._passes.items() if key[0] != policy}

    def forward(
        self,
        policy: int,
        adapters: Prepared | PolicyMix | None,
        tokens: np.ndarray,
        positions: np.ndarray,
        where: Places,
    ) -> tuple[Tensor, Tensor | None]:
        """Run ``Decoder.forward`` for a pass of at most MOST_ROWS rows, and return copies of its results;
        ``policy``: its number, or SEVERAL. The graph is captured if there is none for this shape. All graphs
        are dropped first if keys and values have moved in memory."""
        if self._memory != (memory := (self._store.keys.data_ptr(), self._store.values.data_ptr())):
            self._passes, self._memory = {}, memory
        rows = 1 << (len(tokens) - 1).bit_length()
        blocks = max(TABLE, 1 << (int(where.seen.max()) - 1).bit_length() >> 4)
        if (buffers := self._buffers.get(blocks)) is None:
            buffers = self._buffers[blocks] = Buffers(blocks, self._decoder.device)
        owners = adapters.owners if isinstance(adapters, PolicyMix) else None
        buffers.fill(rows, self._group, tokens, positions, where, owners)
        key = (policy, rows, blocks)
        if (graph_pass := self._passes.get(key)) is None:
            graph_pass = self._passes[key] = self._capture(adapters, buffers, rows)
        graph_pass.graph.replay()
        assert graph_pass.hidden is not None
        routing = None if graph_pass.routing is None else graph_pass.routing[: len(tokens)].clone()
        return graph_pass.hidden[: len(tokens)].clone(), routing

    def _capture(self, adapters: Prepared | PolicyMix | None, buffers: Buffers, rows: int) -> Pass:
        """Capture the layers on the first ``rows`` rows of ``buffers``."""
        from ostinato.model.cuda import mix_ops
        from ostinato.model.cuda.paged import TILE_M, Tiles

        tokens, positions, slots = buffers.wide[:, :rows]
        sequence, lengths, first, count, owners, owner_first, owner_count = buffers.narrow[:, :rows]
        ops, prepared = self._kernels.ops, adapters.prepared if isinstance(adapters, PolicyMix) else adapters
        if isinstance(adapters, PolicyMix):
            # full tiles of rows, and a partial one of every further policy
            max_tiles = min(rows, -(-rows // TILE_M) + adapters.size - 1)
            ops = mix_ops(ops, owners, Tiles(owner_first[:max_tiles], owner_count[:max_tiles]))
        places, tiles = Rows(slots, buffers.tables, sequence, lengths), Tiles(first, count)
        attend = TritonPaged(self._store, places, tiles, exact=self._kernels.exact).attend
        graph_pass = Pass(self._graph())

        def run_layers() -> None:
            graph_pass.hidden, graph_pass.routing = self._decoder.forward(
                tokens, positions, attend, adapters=prepared, ops=ops
            )

        graph_pass.graph.capture(run_layers)
        return graph_pass


def overwrite_factors(old: Prepared | None, new: Prepared | None) -> bool:
    """Copy the factors of ``new`` into the memory of ``old``, which graphs read, and return True. Returns
    False, changing nothing, if they differ in more than values."""
    old_parts, new_parts = list(_iterate_parts(old)), list(_iterate_parts(new))
    if [_describe_part(part) for part in old_parts] != [_describe_part(part) for part in new_parts]:
        return False
    for old_part, new_part in zip(old_parts, new_parts, strict=True):
        if isinstance(old_part, Tensor) and isinstance(new_part, Tensor):
            old_part.copy_(new_part)
    return True


def _iterate_parts(value: object) -> Iterator[object]:
    """Yield the tensors and numbers of prepared adapters, in their order."""
    if is_dataclass(value):
        for field in fields(value):
            yield from _iterate_parts(getattr(value, field.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from _iterate_parts(part)
    else:
        yield value


def _describe_part(part: object) -> object:
    """Return what must be equal for one part to be written over another."""
    return (part.shape, part.dtype) if isinstance(part, Tensor) else part
