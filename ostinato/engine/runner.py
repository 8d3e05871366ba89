"""The model as the engine runs it: a pass over rows, tokens drawn from it, and how long that takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from ostinato.engine.cache import BLOCK
from ostinato.engine.model_input import ModelInput
from ostinato.engine.paged import KVStore, NativePaged, Rows, TorchPaged
from ostinato.engine.sampler import Drawn, sample
from ostinato.engine.sequences import Settings
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import TORCH_OPS
from ostinato.model.wire import check_finite, fingerprint, fingerprint_weights, load_weights
from ostinato.types import Sampling

_LOGIT_BYTES = 64 << 20  # logits held at once; rows beyond it are sampled in chunks


class Runner:
    """A decoder with the adapters that are served, on the keys and values of ``store``."""

    def __init__(
        self,
        decoder: Decoder,
        kernels: Kernels | None,
        store: KVStore,
        *,
        fused: bool = True,
    ) -> None:
        """``fused``: all layers in one call, where the kernels know the model; otherwise op by op."""
        self.decoder, self.store = decoder, store
        self._want_fused = fused and kernels is not None
        self._kernels = kernels
        self._ops = kernels.ops if kernels else TORCH_OPS
        self._has_loaded = False  # all weights, into the decoder
        self.serve(None)

    def serve(self, adapters: Adapters | None) -> None:
        """Run with a copy of ``adapters`` from now on; None: the base. NotFinite: still with the last."""
        if adapters is not None:
            check_finite(adapters)
        self._fingerprint: str | None = None
        with torch.inference_mode():
            self._served = None if adapters is None else adapters.detach_copy()
            self._prepared = None if self._served is None else self._served.prepared(self.decoder.dtype)
            self._fused = None
            if self._kernels is not None and self._want_fused:
                self._fused = self._kernels.fused(self.decoder, self._prepared)

    def load(self, path: Path) -> None:
        """Run with all weights in ``path`` (``wire.pack_weights``), which are copied into the decoder."""
        load_weights(self.decoder, path)
        self._has_loaded = True
        self.serve(None)

    @property
    def fingerprint(self) -> str:
        """Of the copy that is served, computed when it is first asked for; "" for the base."""
        if self._fingerprint is None:
            whole = self._has_loaded and self._served is None
            self._fingerprint = fingerprint_weights(self.decoder) if whole else fingerprint(self._served)
        return self._fingerprint

    @property
    def is_fused(self) -> bool:
        return self._fused is not None

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copy keys and values of whole blocks, before the next pass."""
        self.store.copy_blocks(sources, targets)

    def forward(
        self, tokens: np.ndarray, positions: np.ndarray, rows: Rows
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """Hidden states [T, D] and routes [T, L_moe, K] int16 of a pass."""
        with torch.inference_mode():
            ids, places = self.on_device(tokens), self.on_device(positions)
            if self._fused is not None:
                hidden, routing = self._fused.forward(ids, places, rows, self.store.keys, self.store.values)
            else:
                kernels = self._kernels
                attend = (
                    TorchPaged(self.store, rows)
                    if kernels is None
                    else NativePaged(kernels, self.store, rows)
                )
                hidden, routing = self.decoder.forward(
                    ids, places, attend, adapters=self._prepared, ops=self._ops
                )
        return hidden, None if routing is None else routing.to(torch.int16).cpu().numpy()

    def run(self, plan: ModelInput) -> tuple[torch.Tensor, np.ndarray | None]:
        """Of the rows of a plan: as ``forward``."""
        rows = Rows(
            slots=self.on_device(plan.slots),
            tables=self.on_device(np.ascontiguousarray(plan.tables)),
            sequence=self.on_device(plan.table),
            lengths=self.on_device((plan.positions + 1).astype(np.int32)),
            write=None if plan.write is None else self.on_device(plan.write),
        )
        return self.forward(plan.tokens, plan.positions, rows)

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
        """A token for each of ``rows`` of ``hidden`` (None: all); ``banned``: (which of them, token ids) that
        must not be drawn.

        ``want_support``: with the ids that each was drawn from.
        """
        parts = []
        for some, logits in self.logits(hidden, rows):
            with torch.inference_mode():
                for row, ids in banned:
                    if some.start <= row < some.stop:
                        logits[row - some.start, ids] = -torch.inf
            drawn = sample(logits, settings.take(some), u[some], self._kernels, want_support=want_support)
            parts.append(drawn)
        return parts[0] if len(parts) == 1 else Drawn.concatenate(parts)

    def logits(
        self, hidden: torch.Tensor, rows: np.ndarray | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """(which of ``rows``, their logits [R, V] fp32, valid until the next ones), some rows at a time."""
        with torch.inference_mode():
            picked = hidden if rows is None else hidden[self.on_device(rows)]
        chunk = max(1, _LOGIT_BYTES // (4 * self.decoder.config.vocab_size))
        for first in range(0, len(picked), chunk):
            some = slice(first, first + chunk)
            with torch.inference_mode():
                logits = self._logits(picked[some])
            yield some, logits

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._fused is not None:  # into memory that is mapped already
            return self._fused.logits(hidden).float()
        return self.decoder.logits(hidden, adapters=self._prepared, ops=self._ops).float()

    def on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.decoder.device)

    def seconds(self, rows: int, context: int) -> float:
        """Of a pass of ``rows`` rows that see ``context`` positions: what the cost table is made of.

        It writes into the first blocks of the store, so it must come before any sequence.
        """
        return sum(self.parts(rows, context))

    def parts(self, rows: int, context: int) -> tuple[float, float]:
        """The same by part: (layers, head and draw)."""
        blocks = min((context + BLOCK - 1) // BLOCK, self.store.keys.shape[1])
        own = blocks if blocks * rows <= self.store.keys.shape[1] else 0  # blocks of its own for each row
        tables = np.arange(rows)[:, None] * own + np.arange(blocks)
        lengths = np.full(rows, blocks * BLOCK, np.int32)
        where = Rows(
            slots=self.on_device(tables[:, -1].astype(np.int64) * BLOCK + BLOCK - 1),
            tables=self.on_device(tables.astype(np.int32)),
            sequence=self.on_device(np.arange(rows, dtype=np.int32)),
            lengths=self.on_device(lengths),
        )
        settings, u = Settings.of([Sampling()] * rows), np.full(rows, 0.5)
        tokens = np.arange(rows, dtype=np.int64) % self.decoder.config.vocab_size
        start = time.perf_counter()
        hidden, _ = self.forward(tokens, lengths.astype(np.int64) - 1, where)
        middle = time.perf_counter()
        self.draw(hidden, settings, u)
        return middle - start, time.perf_counter() - middle
