"""The closed history: the responses to prompts in earlier steps, compact, searchable and bounded.

Drafts from it are guesses that a forward pass checks, so the history can never change a token: a lost or
damaged history costs time only.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from io import BufferedReader
from pathlib import Path
from typing import Self

import numpy as np

from ostinato.history.blocks import Block, count_bytes, make_block
from ostinato.history.lengths import Lengths
from ostinato.history.native.library import NativeStore, load_library
from ostinato.inputs import parse_json
from ostinato.run import atomic_write
from ostinato.types import HistoryEntry

MAGIC = b"ostinato history 2\n"
OVERHEAD = 640  # bytes that a block takes besides its arrays, in Python and C++


def hash_prompt(uid: str) -> int:
    """Return a 64-bit key of a prompt, the same in every process and on every machine."""
    return int.from_bytes(blake2b(uid.encode(), digest_size=8).digest(), "little")


class History:
    """Blocks by prompt, newest first: at most ``epochs`` per prompt and ``memory_mb`` (MiB) in all.

    Blocks beyond that are evicted in this order: those whose prompt has a newer block, the oldest step
    first; then whole prompts, by a fixed hash. Prompts recur once per epoch. In an epoch larger than the
    memory the least recently used block is needed next, so evicting that block would never give a hit, while
    the hash always keeps the same prompts, as many as fit into memory.

    Several engines and drafters, and their threads, may share one History: see native/library.py. Blocks are
    sorted when they are first requested, so that unused blocks cost next to nothing; ``build_now`` sorts
    them ahead of time.
    """

    def __init__(self, *, memory_mb: float = 256, epochs: int = 3) -> None:
        """Raises BuildError where there is no compiler, ValueError for a limit out of range."""
        if not memory_mb > 0:
            raise ValueError(f"memory_mb is {memory_mb}; use a positive number of MiB")
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}; use 1 or more")
        self.counters: Counter[str] = Counter()  # blocks and tokens added and dropped
        self.lengths = Lengths()  # of the same responses; saved with them
        self.num_bytes = 0
        self.num_tokens = 0  # sampled tokens of responses
        self._limit = memory_mb * 2**20
        self._epochs = epochs
        self._blocks: dict[int, list[Block]] = {}
        self._store = NativeStore(load_library())

    @property
    def native(self) -> int:
        """Pointer to the ``Store`` of native/blocks.h, alive as long as this object is."""
        return self._store.pointer

    def add(self, uid: str, step: int, pasts: Sequence[HistoryEntry]) -> None:
        """Store the responses to prompt ``uid`` in ``step``, in place of those stored for that step, and
        evict blocks beyond the limits, perhaps this one.

        Empty responses are left out. Raises ValueError as ``blocks.make_block`` does.
        """
        key, responses = hash_prompt(uid), [past for past in pasts if len(past.tokens)]
        block = make_block(step, responses) if responses else None
        for old_block in [old_block for old_block in self._blocks.get(key, []) if old_block.step == step]:
            self._drop(key, old_block, "replaced")
        if block is not None:
            self._insert(key, block)
        self._make_room()

    def forget_after(self, step: int) -> None:
        """Drop the responses of later steps, and their lengths: a run that resumes from ``step`` will sample
        them again. Older responses that they displaced are lost."""
        for key, blocks in list(self._blocks.items()):
            for block in [block for block in blocks if block.step > step]:
                self._drop(key, block, "undone")
        self.lengths.forget_after(step)

    def blocks(self, uid: str) -> list[Block]:
        """Return the blocks of a prompt, newest first, after sorting those that are not sorted."""
        key = hash_prompt(uid)
        blocks = list(self._blocks.get(key, []))
        for block in blocks:
            self._store.sort(key, block.step)
        return blocks

    def build_now(self) -> None:
        """Sort all blocks that are not sorted yet."""
        for key, blocks in self._blocks.items():
            for block in blocks:
                self._store.sort(key, block.step)

    def save(self, path: Path) -> None:
        """Write all but the suffix arrays to ``path``, with the lengths. Suffix arrays would be nearly half
        of every checkpoint, and to sort a requested block again takes 0.1 us per token."""
        atomic_write(path, self._write_file)

    @classmethod
    def load(cls, path: Path, *, memory_mb: float = 256, epochs: int = 3) -> Self:
        """Read a file of ``save``, cut to these limits; its counters begin at 0. Raises OSError if it cannot
        be read, BuildError if there is no compiler, and ValueError for a file that is damaged or of another
        kind."""
        history = cls(memory_mb=memory_mb, epochs=epochs)
        with path.open("rb") as file:
            for key, block in _read_blocks(file, path, history.lengths):
                history._insert(key, block)
        history._make_room()
        history.counters.clear()
        return history

    def _insert(self, key: int, block: Block) -> None:
        """Add a block and its counts, and drop the blocks of its prompt beyond ``epochs``."""
        blocks = self._blocks.setdefault(key, [])
        blocks.append(block)
        blocks.sort(key=lambda block: -block.step)
        self._store.add(key, block)
        self.num_bytes += block.memory.nbytes + OVERHEAD
        self.num_tokens += block.num_sampled
        self.counters["added_blocks"] += 1
        self.counters["added_tokens"] += block.num_sampled
        for old_block in blocks[self._epochs :]:
            self._drop(key, old_block, "outdated")

    def _drop(self, key: int, block: Block, reason: str) -> None:
        """Remove a block and its counts, and count it under ``reason``."""
        self._store.drop(key, block.step)  # before its memory is freed
        self._blocks[key].remove(block)
        if not self._blocks[key]:
            del self._blocks[key]
        self.num_bytes -= block.memory.nbytes + OVERHEAD
        self.num_tokens -= block.num_sampled
        self.counters[f"{reason}_blocks"] += 1
        self.counters[f"{reason}_tokens"] += block.num_sampled

    def _make_room(self) -> None:
        """Evict blocks until the memory is within its limit."""
        victims = self._order_evictions()
        while self.num_bytes > self._limit:
            key = next(victims)
            self._drop(key, self._blocks[key][-1], "evicted")

    def _order_evictions(self) -> Iterator[int]:
        """Yield keys of the prompts whose oldest block is evicted next, in order."""
        old_blocks = sorted((block.step, key) for key, blocks in self._blocks.items() for block in blocks[1:])
        yield from (key for _, key in old_blocks)
        yield from sorted(self._blocks, reverse=True)  # a key is a hash

    def _write_file(self, path: Path) -> None:
        blocks = [(key, block) for key, blocks in self._blocks.items() for block in blocks]
        rows = [[key, block.step, block.length, block.documents, block.wide] for key, block in blocks]
        header = json.dumps({"blocks": rows, "lengths": self.lengths.state()}).encode()
        parts = [
            MAGIC,
            len(header).to_bytes(8, "little"),
            header,
            *(_view_unsorted(block) for _, block in blocks),
        ]
        crc = 0
        with path.open("wb") as file:
            for part in parts:
                file.write(part)
                crc = zlib.crc32(part, crc)
            file.write(crc.to_bytes(4, "little"))


def _view_unsorted(block: Block) -> memoryview:
    """Return the memory of a block after its ``order``."""
    return block.memory[4 * block.size :].data


def _compute_crc(file: BufferedReader, count: int) -> int:
    """Compute the checksum of the next ``count`` bytes."""
    crc = 0
    while count > 0 and (part := file.read(min(count, 1 << 20))):
        crc, count = zlib.crc32(part, crc), count - len(part)
    return crc


def _read_blocks(file: BufferedReader, path: Path, lengths: Lengths) -> Iterator[tuple[int, Block]]:
    """Yield (key, block) of a saved history, and restore ``lengths`` from it."""
    if file.read(len(MAGIC)) != MAGIC:
        raise ValueError(f"{path} is no history of this version; delete it to begin an empty one")
    file.seek(0)
    if _compute_crc(file, path.stat().st_size - 4) != int.from_bytes(file.read(4), "little"):
        raise ValueError(f"the history {path} is damaged; delete it to begin an empty one")
    file.seek(len(MAGIC))
    header = parse_json(file.read(int.from_bytes(file.read(8), "little")), surrogates=True)
    lengths.restore(header["lengths"])
    for key, step, length, documents, wide in header["blocks"]:
        memory = np.empty(count_bytes(length, documents, wide), np.uint8)
        block = Block(step=step, length=length, documents=documents, wide=wide, memory=memory)
        file.readinto(_view_unsorted(block))
        yield key, block
