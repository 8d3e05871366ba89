"""The in-process engine: continuous batching on the trainer's own base tensors.

A step is schedule -> run -> postprocess: one forward over a flat row of tokens, the last token of every
decoding sequence with its draft and chunks of prompts within a budget. On a CPU tokens of a sequence depend
neither on other sequences nor on drafts: kernels work row by row, noise is addressed, and a draft counts only
as far as it equals the sampled tokens. On a GPU products are summed in an order that depends on the batch, so
another batch, a draft or a preemption may give another token, of the same distribution.

In-flight publish: running sequences keep their keys and values and go on under the new adapters; every token
carries the version that sampled it, and such sequences are not added to the prefix tree.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ostinato.engine.cache import KVCache
from ostinato.engine.cost import CostTable
from ostinato.engine.counters import Busy, Counters
from ostinato.engine.driver import Driver
from ostinato.engine.model_input import NO_DRAFTS, ModelInput, build_model_input
from ostinato.engine.paged import KVStore, count_block_bytes
from ostinato.engine.postprocess import StepOutput, find_sampling_rows, postprocess
from ostinato.engine.requests import Limits, Results, await_result, new_completion, new_sequence
from ostinato.engine.routes import RouteStore
from ostinato.engine.runner import Policies, Runner, ServedPolicy
from ostinato.engine.sampler import Drawn
from ostinato.engine.scheduler import Scheduler
from ostinato.engine.sequences import Sequence, SequenceTable
from ostinato.engine.speculation import Speculation, allocate_drafts
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.native import Kernels
from ostinato.model.ops import Ops
from ostinato.observe.timeline import Span
from ostinato.protocols import Drafter
from ostinato.types import Completion, Drafts, Emitted, Request, Stop

if TYPE_CHECKING:
    from ostinato.model.cuda import CudaKernels


class LocalEngine:
    """Implements ``protocols.Engine`` on a ``Decoder``; the base weights are the decoder's own tensors.

    ``decode`` turns token ids into text (needed for stop strings and ``Completion.text``). ``context_limit``
    is the largest number of tokens in a sequence. ``drafter`` proposes drafts. ``expect``: see
    ``Scheduler``. ``cost`` predicts pass times; measured here unless given. ``record_routing`` and
    ``record_support``: completions carry routed experts, and the token ids that sampling filters kept.
    ``name`` is the worker's in the timeline. Raises ValueError for requests that can never fit.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        kernels: Kernels | CudaKernels | None = None,
        decode: Callable[[Seq[int]], str] | None = None,
        kv_memory_mb: int = 512,
        max_batch: int = 256,
        step_tokens: int = 2048,
        context_limit: int = 4096,
        record_routing: bool = True,
        record_support: bool = True,
        drafter: Drafter | None = None,
        expect: Callable[[Request], float] | None = None,
        cost: CostTable | None = None,
        name: str = "engine",
    ) -> None:
        if max_batch < 1 or step_tokens < 1:
            raise ValueError(f"engine.max_batch {max_batch} and step_tokens {step_tokens} must be at least 1")
        self.decoder, self.context_limit = decoder, context_limit
        self.counters = Counters()
        self.shares: dict[str, float] = {}  # of the slots, by policy; 1 where absent
        self._decode, self._record_support = decode, record_support
        layers, shape = decoder.config.num_layers, decoder.kv_shape
        blocks = (kv_memory_mb << 20) // count_block_bytes(layers, shape, decoder.dtype)
        store = KVStore.allocate(
            layers,
            blocks,
            shape,
            decoder.dtype,
            decoder.device,
            by_position=kernels is not None and not isinstance(kernels, Kernels),
        )
        self._runner, self._busy = Runner(decoder, kernels, store), Busy(name)
        self.policies = Policies(self._runner)
        moe = decoder.config.moe
        self._routes = RouteStore(blocks, moe) if moe is not None and record_routing else None
        self._scheduler = Scheduler(
            SequenceTable(max_batch, context_limit),
            KVCache(blocks),
            self.counters,
            step_tokens=step_tokens,
            expect=expect,
            shares=self.shares,
            before_preemption=self._keep_routes,
        )
        self.driver = Driver(self.step, lambda: bool(len(self._scheduler)), self._fail, self._drop_all)
        needs_cost = drafter is not None and cost is None
        self.cost = CostTable.measure(self._runner.measure_seconds) if needs_cost else cost
        self.speculation = self.speculate(drafter) if drafter is not None else None

    def speculate(self, drafter: Drafter) -> Speculation:
        """Make speculation with ``drafter``; to use it, assign it to ``speculation`` between rollouts."""
        assert self.cost is not None, "an engine made without a drafter has no cost table"
        return Speculation(drafter, self.cost, self._scheduler.table)

    def model_of(self, policy: str) -> tuple[Decoder, Adapters | None, Ops]:
        """Return (decoder, adapters, ops) by which requests of ``policy`` run; adapters None: the base."""
        return self._runner.model_of(self.policies.numbers[policy])

    @property
    def version(self) -> int:
        """The version of the policy without a name."""
        return self.policies.versions[0]

    def publish(self, adapters: Adapters | ServedPolicy | None, version: int, policy: str = "") -> None:
        """Serve a copy of ``adapters`` (None: the base), or what ``prepare_policy`` returned, from the next
        step on. Raises NotFinite, changing nothing.

        Without a name it is the policy being trained: running requests continue under it, and the prefix
        tree is cleared. A named policy is for new requests; running ones end under the policy they began
        with. Policies without a name that no request uses are dropped.
        """
        self.policies.publish(adapters, version, policy)
        self._retire_policies()
        if not policy:
            self._scheduler.cache.forget()

    def withdraw(self, policy: str) -> None:
        """Stop serving a named policy, if there is one; requests that run under it continue to their end."""
        self.policies.withdraw(policy)
        self._retire_policies()

    def _retire_policies(self) -> None:
        """Drop the policies that neither a name nor a request has, with what the prefix tree has of them."""
        for number in self.policies.retire(sequence.policy for sequence in self._scheduler.unfinished):
            self._scheduler.cache.forget_policy(number)

    def publish_weights(self, path: Path, version: int) -> None:
        """Load all weights in ``path`` (``wire.pack_weights``) into the decoder; publish the base."""
        self._runner.load(path)
        self.publish(None, version)

    @property
    def served(self) -> tuple[int, str]:
        """(version, fingerprint) of the copy that is served; the fingerprint of the base is ""."""
        return self.version, self._runner.fingerprint

    async def generate(
        self, requests: Seq[Request], on_tokens: Callable[[int, Emitted], None] | None = None
    ) -> AsyncIterator[tuple[int, Completion]]:
        """Yield (index, completion) as requests finish; ``on_tokens(index, emitted)`` receives new tokens
        after every pass. At the exit other requests are dropped. Raises ValueError for requests that can
        never be answered, RuntimeError if another event loop is at work, and the error of a step."""
        results, limits = Results(), self._limits
        sequences = [
            new_sequence(request, limits, index=index, results=results, on_tokens=on_tokens)
            for index, request in enumerate(requests)
        ]

        def add() -> None:
            self._scheduler.add(sequences)
            if self.speculation is not None:
                self.speculation.begin({request.uid for request in requests})

        with self.driver.working(add, lambda: self._drop(sequences)):
            for _ in sequences:
                yield await await_result(results)

    def cut(self, requests: Collection[Request]) -> None:
        """End these, unless they have ended: ``generate`` yields them as ABORT."""
        slots, waiting = self._scheduler.find_requests(requests)
        sequences = [*map(self._scheduler.table.get_sequence, slots), *waiting]
        for slot in slots:
            self._finish(slot, Stop.ABORT)
        for sequence in waiting:
            self._hand_out(sequence, sequence.text, sequence.routes, Stop.ABORT)
        self._scheduler.drop(waiting)
        if self.speculation is not None:
            self.speculation.close(sequences)

    def under_way(self) -> list[tuple[Request, int]]:
        """Return the requests that have not ended, each with the number of its sampled tokens."""
        table = self._scheduler.table
        running = [(table.get_sequence(slot), int(table.length[slot])) for slot in table.order]
        waiting = [(sequence, len(sequence.text)) for sequence in self._scheduler.waiting]
        return [(sequence.request, length - sequence.prompt_len) for sequence, length in (*running, *waiting)]

    @property
    def queue(self) -> tuple[int, int]:
        """(sequences that run, sequences that wait for a slot); it can be read from any thread."""
        return len(self._scheduler.table), len(self._scheduler.waiting)

    def lend_memory(self) -> AbstractContextManager[None]:
        """Return a context without memory for keys and values, for a training step on this GPU, and forget
        the tree of prefixes; if there are requests nothing changes."""
        if len(self._scheduler):
            return nullcontext()
        self._scheduler.cache.forget()
        return self._runner.store.lend_memory()

    @property
    def free_blocks(self) -> int:
        """KV blocks that are free now or after eviction."""
        return self._scheduler.cache.num_available

    def take_spans(self) -> list[Span]:
        """Return the spans of the passes since the last call, and clear them."""
        return self._busy.take()

    def step(self) -> None:
        """Schedule, run one forward, append the tokens; do nothing if no sequence has a row."""
        start = time.perf_counter()
        scheduler = self._scheduler
        self._copy_blocks(scheduler.admit())
        slots, counts = scheduler.schedule()
        if len(slots) == 0:
            return
        drafts = self._draft(slots, counts)
        plan = build_model_input(scheduler.table, slots, counts, drafts)
        hidden, routing = self._runner.run(plan)
        ready = scheduler.mark_computed(slots, counts)
        num_prefilled = int(counts.sum()) - len(ready)
        self.counters.steps += 1
        self.counters.prefilled += num_prefilled
        self.counters.drafted += len(drafts.tokens)
        drawn = self._sample(hidden, plan, drafts, ready) if len(ready) else None
        if self._routes is not None and routing is not None:  # after the tokens: a single wait for a GPU
            self._routes.write(plan.kv_slots, routing.cpu().numpy())
        output = self._append(plan, drafts, ready, drawn) if drawn is not None else None
        seconds = time.perf_counter() - start
        self.counters.seconds += seconds
        if output is not None:
            without_s, steps = seconds, self.counters.steps
            if self.speculation is not None:
                without_s = self.speculation.account(plan, len(drafts.tokens), ready, output, seconds, steps)
            self.counters.seconds_without += without_s
        self._busy.record_pass(seconds, num_prefilled, len(plan.tokens) - num_prefilled)

    def _draft(self, slots: np.ndarray, counts: np.ndarray) -> Drafts:
        """Return the drafts of this pass for which KV blocks are free, and allocate these."""
        if self.speculation is None:
            return NO_DRAFTS
        scheduler = self._scheduler
        drafts = self.speculation.propose(slots, counts, len(scheduler.waiting))
        if len(drafts.tokens):
            drafts, num_cut = allocate_drafts(scheduler.table, scheduler.cache, slots, drafts)
            self.counters.cut_drafts += num_cut
        return drafts

    def _copy_blocks(self, copies: Seq[tuple[int, int]]) -> None:
        """Copy keys, values and routes of blocks, given as (source, target)."""
        if not copies:
            return
        sources, targets = [s for s, _ in copies], [t for _, t in copies]
        self._runner.copy_blocks(sources, targets)
        if self._routes is not None:
            self._routes.copy_blocks(sources, targets)

    def _sample(self, hidden: torch.Tensor, plan: ModelInput, drafts: Drafts, ready: np.ndarray) -> Drawn:
        """Draw a token for every row that may emit one."""
        sampling = find_sampling_rows(self._scheduler.table, plan, drafts, ready)
        return self._runner.draw(
            hidden,
            sampling.settings,
            sampling.u,
            sampling.banned,
            rows=sampling.rows,
            want_support=self._record_support and sampling.filtered,
            top=sampling.top,
        )

    def _append(self, plan: ModelInput, drafts: Drafts, ready: np.ndarray, drawn: Drawn) -> StepOutput:
        """Verify the drafts, append the new tokens, stream them, and finish the sequences that stop."""
        table = self._scheduler.table
        slots = plan.slots[ready]
        versions = self.policies.list_versions(table.policy[slots])
        output = postprocess(table, plan, drafts, ready, drawn, versions, self._decode)
        for r in np.flatnonzero(table.listened[slots]).tolist():
            sequence = table.get_sequence(int(slots[r]))
            assert sequence.on_tokens is not None
            emitted = output.select_sequence(r, sequence.request.top_logprobs, int(versions[r]))
            sequence.on_tokens(sequence.index, emitted)
        self.counters.decoded += int(output.counts.sum())
        self.counters.accepted += int(output.accepted.sum())
        self.counters.passes += len(ready)
        if self.speculation is not None and output.stops:
            self.speculation.observe_end(plan.slots[ready[list(output.stops)]])
        for r, stop in output.stops.items():
            self._finish(int(plan.slots[ready[r]]), stop)
        return output

    def _finish(self, slot: int, stop: Stop) -> None:
        """End a sequence, keep its prefix, hand out its completion; an error forgets the tree instead."""
        scheduler, table = self._scheduler, self._scheduler.table
        sequence, computed = table.get_sequence(slot), int(table.computed[slot])
        tokens = table.text[slot, : int(table.length[slot])].copy()
        routes = None if self._routes is None else self._routes.read_routes(sequence, computed, len(tokens))
        if stop is Stop.ERROR:
            self.counters.errors += 1
            scheduler.cache.forget()  # its prompt is in the tree, where keys and values may be not finite
        else:
            scheduler.keep_prefix(slot)
        scheduler.remove(slot)
        self._hand_out(sequence, tokens, routes, stop)

    def _hand_out(self, sequence: Sequence, text: np.ndarray, routes: np.ndarray | None, stop: Stop) -> None:
        completion = new_completion(sequence, text, routes, stop, self._decode)
        sequence.results.put_nowait((sequence.index, completion))

    def _keep_routes(self, slot: int) -> None:
        """Store, before a preemption, the routes of the tokens sampled so far. Rows that are computed again
        may have other routes, which are right for later tokens only."""
        table, sequence = self._scheduler.table, self._scheduler.table.get_sequence(slot)
        if self._routes is not None and table.length[slot] > table.prompt[slot]:
            sequence.routes = self._routes.read_routes(sequence, int(table.computed[slot]))

    @property
    def _limits(self) -> Limits:
        return Limits(
            context=self.context_limit,
            vocab_size=self.decoder.config.vocab_size,
            blocks=self._scheduler.cache.num_blocks,
            has_text=self._decode is not None,
            policies=self.policies.numbers,
        )

    def _fail(self, error: BaseException) -> None:
        """Give the error of a step to every caller, whose ``generate`` raises it."""
        for sequence in self._scheduler.unfinished:
            sequence.results.put_nowait(error)

    def _drop(self, sequences: Iterable[Sequence]) -> None:
        """End those that have not ended, without a completion."""
        unfinished = self._scheduler.drop(sequences)
        if self.speculation is not None:
            self.speculation.close(unfinished)

    def _drop_all(self) -> None:
        self._drop(self._scheduler.unfinished)
