"""The engine over several ranks of one host that all see the same rows and each keep a part of the weights.

    LocalEngine    schedules, drafts, keeps the prefix tree, samples        rank 0
    ShardedRunner  tells the others of each pass, and runs rank 0's part    rank 0
    follower.py    runs its part                                            ranks 1 and up

Each rank has keys and values of its own heads, under the same block numbers. Ranks meet in the sums of
``parallel.replicated``; logits, of which each has its part of the vocabulary, are collected on rank 0. What
comes out is what one rank gives, but for the order in which partial sums are added.

A publish is cut by ``share.placed``; every rank proves with a fingerprint that it serves its part.
The fingerprint of the policy is that of the whole adapters, as without ranks.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch

from ostinato.engine.follower import load_share
from ostinato.engine.followers import Allocate, Begin, Draw, Followers, Pass, Serve
from ostinato.engine.paged import KVStore, Rows
from ostinato.engine.runner import Runner
from ostinato.engine.sampler import Drawn, Settings
from ostinato.model.config import read_config
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS
from ostinato.model.share import Share
from ostinato.model.wire import check_finite, fingerprint, pack
from ostinato.parallel.layout import Layout
from ostinato.parallel.links import Links
from ostinato.parallel.own_mesh import OwnMesh
from ostinato.parallel.pieces import own_adapters
from ostinato.parallel.replicated import check_layout, replicated_ops
from ostinato.parallel.shares import shares_of
from ostinato.parallel.watch import RankLost


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """The ranks of a sampler, loaded: for ``LocalEngine(shards.decoder, runner=shards.runner)``."""

    decoder: Decoder  # of rank 0
    layout: Layout
    shares: tuple[Share, ...]  # by rank
    links: Links
    followers: Followers

    def runner(self, decoder: Decoder, kernels: Kernels | None, store: KVStore) -> ShardedRunner:
        """What the engine runs passes with."""
        return ShardedRunner(self, decoder, kernels, store)

    def close(self) -> None:
        """End the other ranks. They also end with this process, however it does."""
        self.followers.close()


def start_ranks(
    folder: Path,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float32,
    fp32_head: bool = False,
    native: bool = False,
    shared: Collection[int] = (),
    timeout_s: float = 300.0,
    start_s: float = 300.0,
) -> Shards:
    """Start the ranks of ``layout`` but this process, rank 0, all on the CPU, with the model in ``folder``.

    ``native``: the others compute with native kernels, as the engine must then. ``shared``: ranks that
    map the copy that their host has of their share (``model.shared``). ``timeout_s``: for any collective or
    answer; ``start_s``: for the others to load. Raises ValueError for a layout that does not fit, and
    RankLost for a rank that does not come up.
    """
    config = read_config(folder)
    check_layout(layout, config)
    mesh = OwnMesh(layout, 0, port=0, timeout_s=timeout_s)
    begin = Begin(
        folder=str(Path(folder).absolute()),
        dtype=str(dtype).removeprefix("torch."),
        fp32_head=fp32_head,
        layout=str(layout),
        rank=0,
        port=mesh.port,
        timeout_s=timeout_s,
        native=native,
        shared=0 in shared,
    )
    begins = [replace(begin, rank=rank, shared=rank in shared) for rank in range(1, layout.world)]
    followers = Followers(begins, threads=_threads(layout.world), timeout_s=timeout_s)
    with _together(followers, "its start"):
        followers.answers(start_s)
        mesh.connect()
        decoder = load_share(begin)
        followers.answers(start_s)
    shares = tuple(shares_of(layout, config, rank)[0] for rank in range(layout.world))
    return Shards(decoder, layout, shares, Links(mesh), followers)


class ShardedRunner(Runner):
    """``Runner`` of rank 0, which takes the other ranks along. Raises RankLost where one is lost, and for
    everything after that."""

    def __init__(self, shards: Shards, decoder: Decoder, kernels: Kernels | None, store: KVStore) -> None:
        self._shards, self._followers, self.links = shards, shards.followers, shards.links
        self._copies: list[tuple[list[int], list[int]]] = []
        self.published_bytes = 0  # to the other ranks, so far
        with self._together("its start"):
            self._followers.tell(Allocate(store.keys.shape[1]))
        base = kernels.ops if kernels else TORCH_OPS
        ops = replicated_ops(base, self.links, shards.layout)
        super().__init__(decoder, kernels, store, fused=False, ops=ops, join=self._collect)

    def serve(self, adapters: Adapters | None) -> None:
        """Run, on all ranks, with copies of their parts of ``adapters``; NotFinite: still with the last."""
        if adapters is not None:
            check_finite(adapters)
        with self._together("a publish"):
            wanted = []
            for place, share in enumerate(self._shards.shares[1:]):
                part = _part(adapters, share)
                payload = pack(part)
                self._followers.tell(Serve(payload), place)
                self.published_bytes += len(payload)
                wanted.append(fingerprint(part))
            super().serve(_part(adapters, self._shards.shares[0]))
            if (served := self._followers.answers()) != wanted:
                raise RankLost(f"the ranks of the sampler serve {served}, and were sent {wanted}")
            self._fingerprint = fingerprint(adapters)

    def load(self, path: Path) -> None:
        """Raises ValueError: whole policies are not cut."""
        raise ValueError(
            f"engine.layout is {str(self._shards.layout)!r} with all weights to publish ({path}); train an "
            "adapter, or drop engine.layout"
        )

    def close(self) -> None:
        self._followers.close()

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        self._copies.append((sources, targets))
        super().copy_blocks(sources, targets)

    def forward(
        self, tokens: np.ndarray, positions: np.ndarray, rows: Rows
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        copies, self._copies = self._copies, []
        told = {field.name: getattr(rows, field.name) for field in fields(rows)}
        arrays = {name: tensor.cpu().numpy() for name, tensor in told.items() if tensor is not None}
        with self._together(f"a pass of {len(tokens)} rows"):
            self._followers.tell(Pass(tokens=tokens, positions=positions, rows=arrays, copies=copies))
            return super().forward(tokens, positions, rows)

    def draw(
        self,
        hidden: torch.Tensor,
        settings: Settings,
        u: np.ndarray,
        banned: Sequence[tuple[int, list[int]]] = (),
        *,
        rows: np.ndarray | None = None,
        want_support: bool = False,
    ) -> Drawn:
        with self._together(f"a draw of {len(u)} tokens"):
            self._followers.tell(Draw(rows))
            return super().draw(hidden, settings, u, banned, rows=rows, want_support=want_support)

    def _collect(self, logits: torch.Tensor) -> torch.Tensor:
        """Each rank's part [R, V / t] -> [R, V]."""
        parts = self.links.collected(logits, "t", 0)
        assert parts is not None
        return parts.transpose(0, 1).flatten(1)

    def _together(self, doing: str) -> AbstractContextManager[None]:
        return _together(self._followers, doing)


@contextmanager
def _together(followers: Followers, doing: str) -> Iterator[None]:
    """Around what all ranks do. Whatever goes wrong in it ends them all."""
    followers.check()
    try:
        yield
    except BaseException as error:
        found = followers.broken(doing, error)
        if found is error:
            raise
        raise found from error


def _part(adapters: Adapters | None, share: Share) -> Adapters | None:
    """What a rank serves of ``adapters``."""
    if adapters is None:
        return None
    state = {name: tensor.cpu() for name, tensor in adapters.state_dict().items()}
    return own_adapters(adapters.config, [share], adapters.spec, state)


def _threads(ranks: int) -> int:
    """Of each of the other ranks: as many as this one computes with, while there are cores for all."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), cores // ranks))


__all__ = ["ShardedRunner", "Shards", "start_ranks"]
