"""Rollout routing replay (R3, arXiv 2510.11370) for mixtures of experts in ``transformers`` v5.

    replay = attach_replay(model)                       # finds every router, or raises UnsupportedRouter
    with replay.using(Routes.padded(routes, mask)):     # the experts of the rollout, for forward and backward
        loss(model(input_ids=ids, attention_mask=mask)).backward()

Expert *ids* are replayed; their weights follow the model's own formula on the live logits, so the gradient to
the router remains. This is done by a forward hook on each router, without queues and without global state: a
hook reads the current routes and its own layer, so checkpointing may run it again any number of times, as
long as the routes are still set. Hence the rule: backward belongs inside ``using``.

Unless routes are set nothing changes, bit for bit: reference models, evaluation and a disabled adapter run
outside of ``using``, or inside of ``replay.native()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from ostinato.algo.routing import THRESHOLD, shared_ids
from ostinato.hf.probe import Site, find_routers
from ostinato.hf.routers import TopKSwap, UnsupportedRouter, WeightRule, fit_rule
from ostinato.hf.routes import Routes

_MAX_DRIFT = (
    4  # later errors of a formula may be this many units in the last place: tensors have other shapes
)


def attach_replay(model: nn.Module, example: Mapping[str, Any] | None = None) -> Replay:
    """Bind the router of every mixture layer of ``model``; undo it with ``.detach()``, or use it as a
    context.

    This watches a forward without gradients of ``model(**example)``, by default of 48 tokens as
    ``input_ids``. A router's formula for weights is fitted to its output, up to rounding; if it returns no
    logits, or follows no known formula, its ``topk`` is swapped, after a test that this is equivalent.

    Attach after PEFT, before or after ``fully_shard``, before ``torch.compile``. Raises UnsupportedRouter
    with class and reason; a model is never replayed in part. Raises ValueError if the model needs an
    example.
    """
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedRouter(
                name,
                type(module).__name__,
                "it is compiled, and would not notice; attach first, then compile",
            )
    sites, idle = find_routers(model, example)
    return Replay(sites, idle)


class Tape:
    """The choices of routers while the tape was set, and the routes that they were to use."""

    def __init__(self, sites: tuple[Site, ...], routes: Routes | None) -> None:
        self._sites, self.routes = sites, routes
        self._native: list[list[Tensor]] = [[] for _ in sites]  # [layer][forward] int16 [N, K]
        self._recomputed: list[
            tuple[Tensor, list[Tensor]]
        ] = []  # recomputed ids, and the forwards to which these may belong
        self._drifts: list[tuple[Site, Tensor, float]] = []
        self._targets: tuple[Tensor, Tensor] | None = None

    def native(self, batch: int = 1) -> Routes:
        """Return the experts that routers chose (not those replayed), with rows in the order of the forwards.

        For a generation with ``batch`` sequences, whose forwards are a prompt and then a token of each, the
        rows of a sequence are together, [batch * length]. Raises RuntimeError if no forward ran, or only a
        part of one.
        """
        self._check_calls()
        # to the CPU, since layers may be on several devices
        by_layer = [
            torch.cat([ids.view(batch, -1, ids.shape[1]) for ids in calls], 1).cpu() for calls in self._native
        ]
        ids = torch.stack(by_layer, dim=2).flatten(0, 1).numpy()
        return Routes.of(ids, max(site.num_experts for site in self._sites))

    def overlap(self) -> np.ndarray:
        """Return the share of native ids that agree with those replayed, [rows, layers]; NaN for rows that
        were not replayed. Raises ValueError on a tape that only records.

        The inputs of a router come from the replayed experts of earlier layers, so this measures the
        mismatch that remains. The gate is ``algo.routing.require_aligned`` on the rows of each sequence.
        """
        if self.routes is None:
            raise ValueError("overlap is of routes that were replayed; this tape only records")
        return shared_ids(self.native().rows(0, len(self.routes)).dense(), self.routes.dense())

    def choose(self, index: int, native: Tensor, recomputing: bool) -> Tensor:
        """Record the ids ``native`` [N, K] that a router chose; return the ids that it is to use: those
        replayed if they are known. Raises ValueError if there are not as many rows of routes."""
        narrow_ids = native.detach().to(torch.int16)
        if recomputing:
            self._recomputed.append((narrow_ids, self._native[index]))
        else:
            self._native[index].append(narrow_ids)
        if self.routes is None:
            return native
        ids, known = self._move_targets(native.device)
        if len(ids) != len(native):
            raise ValueError(
                f"routes have {len(ids)} rows; {self._sites[index].name} sees {len(native)}, padding included"
            )
        return torch.where(known[:, None], ids[:, index].to(native.dtype), native)

    def watch(self, site: Site, drift: Tensor, dtype: torch.dtype) -> None:
        """Record the error of the formula of ``site`` against the weights that it gave its native experts."""
        self._drifts.append((site, drift, _MAX_DRIFT * torch.finfo(dtype).eps))

    def close(self) -> None:
        """Do the checks that are possible only at the end, with a single wait for the device. Raises
        RuntimeError for routers with different numbers of calls and for recomputation of another forward, and
        UnsupportedRouter for formulas that no longer hold."""
        self._check_calls()
        for site, drift, bound in self._drifts:
            if float(drift) > bound:
                raise UnsupportedRouter(
                    site.name,
                    type(site.module).__name__,
                    f"its weights are no longer {site.rule}: {float(drift):.1e} off",
                )
        for ids, calls in self._recomputed:
            agreements = [
                float((ids[..., None] == call_ids[:, None]).any(-1).float().mean())
                for call_ids in calls
                if call_ids.shape == ids.shape
            ]
            if max(agreements, default=0.0) < THRESHOLD:
                raise RuntimeError(
                    "backward recomputed a forward that ran with other routes: keep `using` around both"
                )

    def _check_calls(self) -> None:
        """Raises RuntimeError unless every router was called, and all as often."""
        numbers = [len(forwards) for forwards in self._native]
        if min(numbers) == 0 or min(numbers) != max(numbers):
            counts = {site.name: count for site, count in zip(self._sites, numbers, strict=True)}
            raise RuntimeError(f"every router has to be called once in each forward; calls: {counts}")

    def _move_targets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (ids, known) of the routes on ``device``, moved once for consecutive calls."""
        if self._targets is None or self._targets[0].device != device:
            assert self.routes is not None
            ids = self.routes.ids
            narrow = torch.from_numpy(ids if ids.dtype == np.uint8 else ids.astype(np.int16))
            self._targets = narrow.to(device), torch.from_numpy(self.routes.known).to(device)
        return self._targets


class Replay:
    """The controlled routers of a model; made by ``attach_replay``."""

    def __init__(self, sites: list[Site], idle: list[nn.Module]) -> None:
        self.sites = tuple(sites)
        self._tape: Tape | None = None
        self._last_tapes: list[Tape | None] = [None] * len(sites)  # tape of each router's last forward
        self._handles = [module.register_forward_pre_hook(_make_guard(self)) for module in idle]
        for index, site in enumerate(sites):
            if site.rule is not None:
                self._handles.append(
                    site.module.register_forward_hook(_disable_compile(_make_formula_hook(self, index)))
                )
            else:
                self._handles += _add_swap_hooks(self, index)

    @property
    def layers(self) -> tuple[int, ...]:
        """The decoder layer of each router, by the number in its name."""
        return tuple(site.layer for site in self.sites)

    @property
    def num_experts(self) -> int:
        """The number of experts of the widest router."""
        return max(site.num_experts for site in self.sites)

    @property
    def top_k(self) -> int:
        return self.sites[0].top_k

    @contextmanager
    def using(self, routes: Routes) -> Iterator[Tape]:
        """Replay ``routes`` in every forward inside; they have a row for each row of the routers: B * S with
        padding.

        Backward belongs inside too. Raises ValueError for routes of another shape or if routes are set, and
        RuntimeError after ``detach``; at the end RuntimeError if a router was not called (because a fused
        kernel bypasses it) or a forward was recomputed with other routes, and UnsupportedRouter if a formula
        no longer holds.
        """
        with self._close_at_exit(self.set(routes)) as tape:
            yield tape

    @contextmanager
    def record(self) -> Iterator[Tape]:
        """Record the native routing, for ``tape.native()``. Raises ValueError if routes are set, and at the
        end RuntimeError if routers were not called equally often."""
        if self._tape is not None:
            raise ValueError("routes are set already; clear() first, or leave `using`")
        self._tape = Tape(self.sites, None)
        with self._close_at_exit(self._tape) as tape:
            yield tape

    @contextmanager
    def native(self) -> Iterator[None]:
        """Turn replay off within the context, for a reference model or a disabled adapter inside of
        ``using``."""
        tape, self._tape = self._tape, None
        last_tapes = list(self._last_tapes)
        try:
            yield
        finally:
            self._tape, self._last_tapes = tape, last_tapes

    @property
    def tape(self) -> Tape | None:
        """The tape that is set now."""
        return self._tape

    @contextmanager
    def restore(self, tape: Tape) -> Iterator[None]:
        """Set ``tape`` again within the context, for the layers that checkpointing recomputes after its
        ``using`` has ended."""
        previous, last_tapes = self._tape, self._last_tapes
        self._tape = tape
        self._last_tapes = [tape if tape.routes is not None else None] * len(self.sites)
        try:
            yield
        finally:
            self._tape, self._last_tapes = previous, last_tapes

    def set(self, routes: Routes) -> Tape:
        """Replay ``routes`` as ``using`` does, until ``clear``, for loops that cannot keep a context open.
        Raises RuntimeError after ``detach``, and ValueError if routes are set or have another shape."""
        if not self._handles:
            raise RuntimeError("this replay was detached; attach_replay gives another")
        if self._tape is not None:
            raise ValueError("routes are set already; clear() first, or leave `using`")
        own_shape = len(self.sites), self.top_k, self.num_experts
        shape = *routes.ids.shape[1:], routes.num_experts
        if own_shape != shape:
            raise ValueError(f"routes have (layers, K, experts) {shape}; the model has {own_shape}")
        self._tape = Tape(self.sites, routes)
        return self._tape

    def clear(self) -> None:
        """End ``set``, after backward: routing is native again. Raises like the end of ``using``; does
        nothing if no routes are set."""
        tape, self._tape = self._tape, None
        if tape is not None:
            tape.close()

    def detach(self) -> None:
        """Remove the hooks and the routes; the model is as before."""
        self._tape = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    def __str__(self) -> str:
        return "\n".join(
            f"{site.name}: {type(site.module).__name__}, {site.top_k} of {site.num_experts}, "
            f"{site.rule if site.rule is not None else 'top-k swapped'}"
            for site in self.sites
        )

    @contextmanager
    def _close_at_exit(self, tape: Tape) -> Iterator[Tape]:
        """Yield the tape, and clear it at the end; after an error without the checks of ``clear``."""
        try:
            yield tape
        except BaseException:
            self._tape = None
            raise
        self.clear()

    def current_tape(self, index: int) -> tuple[Tape | None, bool]:
        """Return (current tape for router ``index``, whether this is the second run of checkpointing), and
        store the tape of a first run.

        Raises RuntimeError when a forward that ran with routes is run again without them.
        """
        # the test of autograd's own engine: -1 outside of a backward
        recomputing = torch._C._current_graph_task_id() != -1
        replaying_tape = self._tape if self._tape is not None and self._tape.routes is not None else None
        if not recomputing:
            self._last_tapes[index] = replaying_tape
        elif self._last_tapes[index] is not replaying_tape:
            raise RuntimeError(
                "backward recomputes a forward outside of the `using` it ran in: keep both inside"
            )
        return self._tape, recomputing


def _make_formula_hook(replay: Replay, index: int) -> Callable[..., Any]:
    """Make a hook that replaces the ids of a router, and their weights by its formula."""
    site = replay.sites[index]
    slot_indices = site.slots
    assert slot_indices is not None and site.rule is not None and site.dtypes is not None
    rules = {site.dtypes: site.rule}  # autocast changes where a router rounds

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if module is not site.module:  # a deep copy, such as a reference model, has our hooks too
            return None
        tape, recomputing = replay.current_tape(index)
        if tape is None:
            return None
        logits, weights, native = (output[i] for i in slot_indices)
        ids = tape.choose(index, native, recomputing)
        if tape.routes is None:
            return None
        dtypes = logits.dtype, weights.dtype
        if dtypes not in rules:
            rules[dtypes] = _fit_rule(site, logits, weights, native)
        rule = rules[dtypes]
        if not recomputing:
            tape.watch(site, rule.error(logits, native.long(), weights, module), weights.dtype)
        values = list(output)
        values[slot_indices.weights] = rule.weights(logits, ids.long(), module).to(weights.dtype)
        values[slot_indices.ids] = ids
        return type(output)(values)

    return hook


def _fit_rule(site: Site, *output: Tensor) -> WeightRule:
    try:
        return fit_rule(site.module, *output)
    except LookupError as error:
        raise UnsupportedRouter(site.name, type(site.module).__name__, str(error)) from None


def _add_swap_hooks(replay: Replay, index: int) -> list[Any]:
    """Register hooks that swap the top-k of a router during its forward, and return their handles."""
    site = replay.sites[index]
    active: list[TopKSwap | None] = []  # of nested calls; None: routing is native

    def enter(module: nn.Module, args: Any) -> None:
        if module is not site.module:
            return
        tape, recomputing = replay.current_tape(index)
        if tape is None:
            active.append(None)
            return
        swap = TopKSwap(site.num_experts, site.top_k, lambda native: tape.choose(index, native, recomputing))
        active.append(swap.__enter__())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        swap = active.pop() if module is site.module and active else None
        if swap is not None:
            swap.__exit__(None, None, None)

    # always_call: checkpointing leaves a recomputed forward by an exception once it has all it needs
    return [
        site.module.register_forward_pre_hook(_disable_compile(enter)),
        site.module.register_forward_hook(_disable_compile(leave), always_call=True),
    ]


def _disable_compile(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Make a compiled model leave its graph for a hook: inside, the recorded values would be constants."""
    return cast(Callable[..., Any], torch.compiler.disable(hook))


def _make_guard(replay: Replay) -> Callable[..., None]:
    """Make a hook that refuses the call of a mixture layer without a bound router while a tape is set."""

    def hook(module: nn.Module, args: Any) -> None:
        if replay._tape is not None:
            raise UnsupportedRouter(
                "",
                type(module).__name__,
                "it was not called when replay was attached: give an `example` with it",
            )

    return hook
