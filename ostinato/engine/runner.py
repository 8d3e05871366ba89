"""Runs the model for the engine: passes over rows, draws of tokens, and the seconds that these take."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ostinato.engine.cache import BLOCK
from ostinato.engine.model_input import ModelInput
from ostinato.engine.paged import (
    GpuPaged,
    KVStore,
    NativePaged,
    Places,
    Rows,
    TorchPaged,
    TritonPaged,
    move_to_device,
)
from ostinato.engine.pass_graphs import MOST_ROWS, SEVERAL, PassGraphs, Stack, can_mix, overwrite_factors
from ostinato.engine.sampler import Drawn, find_likeliest, sample
from ostinato.engine.sequences import Settings
from ostinato.model.attention import Attend
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters, Prepared
from ostinato.model.native import Kernels
from ostinato.model.native.fused import FusedStep
from ostinato.model.ops import TORCH_OPS, Ops
from ostinato.model.wire import check_finite, fingerprint_adapters, fingerprint_weights, load_weights
from ostinato.types import Sampling

if TYPE_CHECKING:
    from ostinato.model.cuda import CudaKernels

_LOGIT_BYTES = 64 << 20  # logits held at once; rows beyond it are sampled in chunks


@dataclass(slots=True)
class ServedPolicy:
    """A served policy: adapters that nobody changes, also prepared for passes."""

    adapters: Adapters | None
    prepared: Prepared | None
    fingerprint: str | None = None  # computed when first requested

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters in both forms."""
        sizes: list[int] = []
        if self.adapters is not None and self.prepared is not None:
            sizes += [factor.nbytes for factor in self.adapters.state_dict().values()]
            self.prepared.map_factors(lambda factor: sizes.append(factor.nbytes) or factor)
        return sum(sizes)


def prepare_policy(adapters: Adapters | None, dtype: torch.dtype) -> ServedPolicy:
    """Prepare adapters that nobody changes for passes in ``dtype``; they are not copied. It may run in any
    thread."""
    with torch.inference_mode():
        return ServedPolicy(adapters, None if adapters is None else adapters.prepare(dtype))


class Runner:
    """A decoder with the policies that are served, by number, on the keys and values of ``store``."""

    def __init__(
        self, decoder: Decoder, kernels: Kernels | CudaKernels | None, store: KVStore, *, fused: bool = True
    ) -> None:
        """``fused``: run all layers in one call if the kernels support the model; otherwise op by op. The
        base is served first."""
        self.decoder, self.store = decoder, store
        self._wants_fused = fused and isinstance(kernels, Kernels)
        self._kernels = kernels
        self._ops = kernels.ops if kernels else TORCH_OPS
        self._graphs: PassGraphs | None = None
        self._stack: Stack | None = None  # where a captured pass may have rows of several policies
        if kernels is not None and not isinstance(kernels, Kernels) and kernels.graph is not None:
            self._graphs = PassGraphs(decoder, store, kernels, kernels.graph)
            self._stack = Stack(decoder.config, decoder.dtype) if can_mix(decoder, kernels) else None
        self._has_loaded = False  # all weights, into the decoder
        self._policies: dict[int, ServedPolicy] = {}
        self._fused: FusedStep | None = None
        self._fused_places: dict[int, int] = {}  # by policy
        self.serve(None)

    def serve(self, adapters: Adapters | ServedPolicy | None, policy: int = 0) -> None:
        """Run ``policy`` with a copy of ``adapters`` (None: the base), or with what ``prepare_policy``
        returned, from now on; captured graphs of it that read other memory are dropped. Raises NotFinite,
        changing nothing."""
        if not isinstance(adapters, ServedPolicy):
            if adapters is not None:
                check_finite(adapters)
            with torch.inference_mode():
                copied_adapters = None if adapters is None else adapters.detach_copy()
            adapters = prepare_policy(copied_adapters, self.decoder.dtype)
        if self._graphs is not None and policy in self._policies:
            old_prepared = self._policies[policy].prepared
            with torch.inference_mode():
                fits = overwrite_factors(old_prepared, adapters.prepared)
            if fits:
                adapters = replace(adapters, prepared=old_prepared)
            else:
                self._graphs.forget(policy)
        self._policies[policy] = adapters
        self._place(policy)

    def model_of(self, policy: int) -> tuple[Decoder, Adapters | None, Ops]:
        return self.decoder, self._policies[policy].adapters, self._ops

    def retire(self, policy: int) -> None:
        """Forget a policy that no request runs under any more, with its graphs."""
        del self._policies[policy]
        if self._graphs is not None:
            self._graphs.forget(policy)
        if self._fused is not None:
            self._fused.put(self._fused_places.pop(policy), None)

    def _place(self, policy: int) -> None:
        """Give the policy a place in the fused step, which runs all layers of all policies in one call; where
        it has no room, build one of twice the size. Without support by the kernels there is none."""
        if not (isinstance(self._kernels, Kernels) and self._wants_fused):
            return
        prepared = {number: served.prepared for number, served in self._policies.items()}
        with torch.inference_mode():
            if self._fused is not None and len(prepared) <= self._fused.size:
                free = iter({*range(self._fused.size)} - {*self._fused_places.values()})
                place = self._fused_places[policy] if policy in self._fused_places else next(free)
                self._fused_places[policy] = place
                self._fused.put(place, prepared[policy])
            else:
                self._fused_places = {number: place for place, number in enumerate(prepared)}
                self._fused = self._kernels.fused(self.decoder, list(prepared.values()))

    def load(self, path: Path) -> None:
        """Copy all weights in ``path`` (``wire.pack_weights``) into the decoder, and serve them without
        adapters."""
        load_weights(self.decoder, path)
        self._has_loaded = True
        self.serve(None)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the copy that is served, computed when it is first requested; "" for the base."""
        base_policy = self._policies[0]
        if base_policy.fingerprint is None:
            is_full = self._has_loaded and base_policy.adapters is None
            base_policy.fingerprint = (
                fingerprint_weights(self.decoder) if is_full else fingerprint_adapters(base_policy.adapters)
            )
        return base_policy.fingerprint

    @property
    def is_fused(self) -> bool:
        return self._fused is not None

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        """Copy keys and values of whole blocks, before the next pass."""
        self.store.copy_blocks(sources, targets)

    def forward(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        host_places: Places,
        policies: Sequence[tuple[int, int, int]] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute hidden states [T, D] and routes [T, L_moe, K] int16 of a pass, and write its keys and
        values; ``policies``: (number, first row, last row + 1), empty for the policy without a name. Rows of
        several policies are a pass for each, unless the fused step or a captured graph mixes them."""
        can_capture = self._graphs is not None and len(tokens) <= MOST_ROWS
        if len(policies) > 1 and self._fused is None and not (can_capture and self._stack):
            parts = [
                self.forward(tokens[a:b], positions[a:b], host_places.cut_part(a, b), [(policy, 0, b - a)])
                for policy, a, b in policies
            ]
            hidden, routing = zip(*parts, strict=True)
            return torch.cat(hidden), None if routing[0] is None else torch.cat(routing)
        policy = policies[0][0] if policies else 0
        prepared = self._policies[policy].prepared
        with torch.inference_mode():
            if self._graphs is not None and can_capture:
                if len(policies) > 1 and self._stack is not None:
                    if not self._stack.update({n: served.adapters for n, served in self._policies.items()}):
                        self._graphs.forget(SEVERAL)
                    mix = self._stack.mix(policies)
                    return self._graphs.forward(SEVERAL, mix, tokens, positions, host_places)
                return self._graphs.forward(policy, prepared, tokens, positions, host_places)
            rows = host_places.move_to(self.decoder.device)
            ids, places = self.on_device(tokens), self.on_device(positions)
            if self._fused is not None:
                spans = [(last, self._fused_places[number]) for number, _, last in policies]
                keys, values = self.store.keys, self.store.values
                hidden, routing = self._fused.forward(ids, places, rows, keys, values, spans)
            else:
                attend = self._attend(rows)
                hidden, routing = self.decoder.forward(ids, places, attend, adapters=prepared, ops=self._ops)
        return hidden, None if routing is None else routing.to(torch.int16)

    def _attend(self, rows: Rows) -> Attend:
        """Return the attention over the store for ``rows``, by the kernels that there are."""
        if isinstance(self._kernels, Kernels):
            return NativePaged(self._kernels, self.store, rows)
        if self._kernels is not None:
            return TritonPaged(self.store, rows, exact=self._kernels.exact).attend
        return (
            GpuPaged(self.store, rows) if self.decoder.device.type == "cuda" else TorchPaged(self.store, rows)
        )

    def run(self, plan: ModelInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run ``forward`` on the rows of a plan."""
        host_places = Places(plan.kv_slots, plan.tables, plan.owner, (plan.positions + 1).astype(np.int32))
        return self.forward(plan.tokens, plan.positions, host_places, plan.policies)

    def draw(
        self,
        hidden: torch.Tensor,
        settings: Settings,
        u: np.ndarray,
        banned: Sequence[tuple[int, list[int] | np.ndarray]] = (),
        *,
        rows: np.ndarray | None = None,
        want_support: bool = False,
        top: int = 0,
    ) -> Drawn:
        """Draw a token for each of ``rows`` of ``hidden`` (None: all). ``banned``: (which of these rows,
        token ids or a mask [V]) that must not be drawn.

        ``want_support``: return the ids that each was drawn from too. ``top``: return so many of the
        likeliest too.
        """
        parts = []
        for span, logits in self.logits(hidden, rows):
            with torch.inference_mode():
                for row, ids in banned:
                    if span.start <= row < span.stop:
                        logits[row - span.start, ids] = -torch.inf
            row_settings = settings.take(span)
            drawn = sample(logits, row_settings, u[span], self._kernels, want_support=want_support)
            parts.append(
                drawn._replace(top=find_likeliest(logits, row_settings, drawn, top)) if top else drawn
            )
        return parts[0] if len(parts) == 1 else Drawn.concatenate(parts)

    def logits(
        self, hidden: torch.Tensor, rows: np.ndarray | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield (span of ``rows``, its logits [R, V] fp32, valid until the next), some rows at a time."""
        with torch.inference_mode():
            states = hidden if rows is None else hidden[self.on_device(rows)]
        chunk = max(1, _LOGIT_BYTES // (4 * self.decoder.config.vocab_size))
        for start in range(0, len(states), chunk):
            span = slice(start, start + chunk)
            with torch.inference_mode():
                logits = self._compute_logits(states[span])
            yield span, logits

    def _compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._fused is not None:  # the fused step writes into memory that is already mapped
            return self._fused.logits(hidden).float()
        return self.decoder.logits(hidden, ops=self._ops).float()

    def on_device(self, array: np.ndarray) -> torch.Tensor:
        return move_to_device(array, self.decoder.device)

    def measure_seconds(self, rows: int, context: int) -> float:
        """Measure the seconds of a pass of ``rows`` rows that see ``context`` positions, for the cost table.

        It writes into the first blocks of the store, so it must come before any sequence.
        """
        return sum(self.measure_parts(rows, context))

    def measure_parts(self, rows: int, context: int) -> tuple[float, float]:
        """Measure the seconds of a pass, as ``measure_seconds`` does, by part: (layers, head and draw)."""
        blocks = min((context + BLOCK - 1) // BLOCK, self.store.keys.shape[1])
        num_own = blocks if blocks * rows <= self.store.keys.shape[1] else 0  # blocks of its own for each row
        tables = np.arange(rows)[:, None] * num_own + np.arange(blocks)
        lengths = np.full(rows, blocks * BLOCK, np.int32)
        host_places = Places(
            tables[:, -1].astype(np.int64) * BLOCK + BLOCK - 1,
            tables.astype(np.int32),
            np.arange(rows, dtype=np.int32),
            lengths,
        )
        settings, u = Settings.of([Sampling()] * rows), np.full(rows, 0.5)
        tokens = np.arange(rows, dtype=np.int64) % self.decoder.config.vocab_size
        start = time.perf_counter()
        hidden, _ = self.forward(tokens, lengths.astype(np.int64) - 1, host_places)
        if hidden.is_cuda:
            torch.cuda.synchronize()
        middle = time.perf_counter()
        self.draw(hidden, settings, u)
        return middle - start, time.perf_counter() - middle


class PolicyRunner(Protocol):
    """A runner of policies by number."""

    def serve(self, adapters: Any, policy: int = 0) -> None: ...

    def retire(self, policy: int) -> None: ...


class Policies:
    """The policies of ``runner``: numbers by name, versions by number. The policy without a name is 0."""

    def __init__(self, runner: PolicyRunner) -> None:
        self.numbers: dict[str, int] = {"": 0}
        self.versions: dict[int, int] = {0: 0}
        self._runner, self._next_number = runner, 1

    def publish(self, adapters: Any, version: int, name: str = "") -> None:
        """Run ``adapters``, as the runner takes them, under ``name`` from now on; a name gets a new number
        each time. Raises NotFinite, changing nothing."""
        number = self._next_number if name else 0
        self._runner.serve(adapters, number)
        self.numbers[name], self.versions[number] = number, version
        self._next_number += number > 0

    def withdraw(self, name: str) -> None:
        """Remove the name, if there is one: no new request can use it."""
        self.numbers.pop(name, None)

    def list_versions(self, numbers: np.ndarray) -> np.ndarray:
        """Return the versions [R] int32 of the policies with these numbers [R]."""
        return np.array([self.versions[number] for number in numbers.tolist()], np.int32)

    def retire(self, running: Iterable[int]) -> list[int]:
        """Drop the policies that have no name any more and no running requests; return their numbers."""
        retired = sorted(self.versions.keys() - {*self.numbers.values(), *running})
        for number in retired:
            del self.versions[number]
            self._runner.retire(number)
        return retired
