"""What a pass may ask of a GPU, counted on a CPU: a read in its middle waits for all that is queued."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import adapters_of, tiny_decoder

from ostinato.engine.paged import GpuPaged, KVStore, Rows

READS = ("_local_scalar_dense", "bincount", "nonzero", "unique", "is_nonzero")


class Operators(TorchDispatchMode):
    """The names of all operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("counts", [(1, 1, 1), (40, 1, 2)], ids=["decoding", "with a prompt and a draft"])
def test_a_pass_reads_nothing_back(counts: tuple[int, ...]) -> None:
    """Every layer read the longest length, and every layer of experts counted rows by ``bincount``: with 48
    layers of a mixture a decode step waited 96 times for the GPU."""
    decoder = tiny_decoder(hidden_size=64, moe_intermediate_size=32)
    store = KVStore.allocate(decoder.config.num_layers, 16, decoder.kv_shape, decoder.dtype, decoder.device)
    owners = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    seen = np.concatenate([np.arange(20, 20 + n, dtype=np.int32) for n in counts])
    tables = np.arange(len(counts) * 4, dtype=np.int32).reshape(-1, 4)
    slots = tables[owners, (seen - 1) // 16].astype(np.int64) * 16 + (seen - 1) % 16
    rows = Rows(*map(torch.from_numpy, (slots, tables, owners, seen)), owners=owners, seen=seen)
    prepared = adapters_of(decoder).prepare(decoder.dtype)
    ids = torch.from_numpy(seen.astype(np.int64))
    with torch.inference_mode(), Operators() as operators:
        hidden, _ = decoder.forward(ids, ids - 1, GpuPaged(store, rows), adapters=prepared)
        decoder.logits(hidden)
    assert not [name for name in operators.names if name in READS]
