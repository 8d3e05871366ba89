"""The in-process engine: continuous batching on the trainer's own base tensors.

    generate -> waiting --admit--> seated --step--> seated | finished
                   ^                 |
                   +---- preempt ----+        (out of blocks: recomputed later, same tokens)

A step is one forward over a flat row of tokens: the last token of every decoding sequence with its draft,
and chunks of prompts within a budget. Sequences with a known prefix begin after it. A group's siblings wait
one step for the first of them, then share its prompt. Nothing a sequence receives depends on the others, or
on drafts: kernels work row by row, noise is addressed, and a draft counts only as far as it is what was
sampled.

In-flight publish: running sequences keep their keys and values and go on under the new adapters; every token
carries the version that sampled it, and such sequences are not added to the prefix tree.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import torch

from ostinato.algo.noise import uniform
from ostinato.engine.answers import completion_of
from ostinato.engine.asked import Limits, Results, longest_first, new_sequence
from ostinato.engine.busy import Busy
from ostinato.engine.cache import BLOCK, KVCache, OutOfBlocks
from ostinato.engine.cost import CostTable
from ostinato.engine.counters import Counters
from ostinato.engine.drafting import Speculation, afford
from ostinato.engine.paged import KVStore, Rows, block_bytes
from ostinato.engine.passes import NO_DRAFTS, Pass, draft_counts, plan_pass
from ostinato.engine.routes import RouteStore
from ostinato.engine.runner import Runner
from ostinato.engine.seats import Seats, Sequence
from ostinato.engine.taking import Taken, take_in
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.native import Kernels
from ostinato.observe.timeline import Span
from ostinato.protocols import Drafter
from ostinato.types import Completion, Drafts, Request, Stop


class LocalEngine:
    """Implements ``protocols.Engine`` on a ``Decoder``; the base weights are the decoder's own tensors.

    ``decode`` turns token ids into text (needed for stop strings and ``Completion.text``). ``context_limit``
    is the largest number of tokens in a sequence. ``drafter`` guesses ahead, in trees of up to ``leaves``
    leaves where few sequences run. ``expect`` predicts how many tokens a request will be answered with (0:
    unknown): the longest are begun first. ``cost`` is what passes take, measured here unless given.
    ``record_routing`` and ``record_support``: completions carry experts, and what their filters had kept.
    ``name`` is the worker's in the timeline.
    Raises ValueError for requests that can never fit.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        kernels: Kernels | None = None,
        decode: Callable[[Seq[int]], str] | None = None,
        kv_memory_mb: int = 512,
        max_batch: int = 256,
        step_tokens: int = 2048,
        context_limit: int = 4096,
        record_routing: bool = True,
        record_support: bool = True,
        drafter: Drafter | None = None,
        leaves: int = 4,
        expect: Callable[[Request], float] | None = None,
        cost: CostTable | None = None,
        name: str = "engine",
    ) -> None:
        if max_batch < 1 or step_tokens < 1:
            raise ValueError(f"engine.max_batch {max_batch} and step_tokens {step_tokens} must be at least 1")
        self.decoder = decoder
        self.counters = Counters()
        self.trace: deque[tuple[int, int, int]] = deque(maxlen=4096)  # (sequences, drafted, emitted) per step
        self.version = 0
        self._decode = decode
        self._max_batch, self._step_tokens, self.context_limit = max_batch, step_tokens, context_limit
        self._leaves, self._expect, self._record_support = leaves, expect, record_support
        layers, shape = decoder.config.num_layers, decoder.kv_shape
        blocks = (kv_memory_mb << 20) // block_bytes(layers, shape, decoder.dtype)
        self._cache = KVCache(blocks)
        self._busy = Busy(name)
        store = KVStore.allocate(layers, blocks, shape, decoder.dtype, decoder.device)
        self._runner = Runner(decoder, kernels, store)
        moe = decoder.config.moe
        self._routes = RouteStore(blocks, moe) if moe is not None and record_routing else None
        self._seats = Seats(max_batch, context_limit)
        self._waiting: deque[Sequence] = deque()
        self._driver: asyncio.Task[None] | None = None
        measure = drafter is not None and cost is None
        self.cost = CostTable.measured(self._runner.seconds) if measure else cost
        self.speculation = self.speculate(drafter) if drafter is not None else None

    def speculate(self, drafter: Drafter, *, always: bool = False) -> Speculation:
        """With ``drafter``; at work once it is this engine's ``speculation``, changed between rollouts."""
        assert self.cost is not None, "an engine made without a drafter has no cost table"
        return Speculation(drafter, self.cost, self._seats, self._leaves, always=always)

    # ---- the protocol

    def publish(self, adapters: Adapters | None, version: int) -> None:
        """Serve a copy of ``adapters`` (None: the base) from the next step on, and forget the prefix tree."""
        self._runner.serve(adapters)
        self.version = version
        self._cache.forget()

    def publish_weights(self, path: Path, version: int) -> None:
        """The same of a whole policy: all weights in ``path`` (``wire.pack_weights``), into the decoder."""
        self._runner.load(path)
        self.publish(None, version)

    def pass_seconds(self, rows: int, context: int) -> float:
        """Of a pass of ``rows`` rows that see ``context`` positions each, timed now: before any request."""
        return self._runner.seconds(rows, context)

    @property
    def served(self) -> tuple[int, str]:
        """(version, fingerprint) of the copy that is served; the base, which nobody sent, has ""."""
        return self.version, self._runner.fingerprint

    async def generate(
        self, requests: Seq[Request], on_token: Callable[[int, int], None] | None = None
    ) -> AsyncIterator[tuple[int, Completion]]:
        """Yield (index, completion) as requests finish; ``on_token(index, token)`` streams. Calls share one
        batch.
        """
        results, limits = Results(), self._limits
        mine = [
            new_sequence(request, limits, index=index, results=results, on_token=on_token)
            for index, request in enumerate(requests)
        ]
        self._leave_other_loops()
        self._waiting.extend(mine)
        if self._expect is not None:
            self._waiting = longest_first(self._waiting, mine, self._expect)
        if self.speculation is not None:
            self.speculation.meet({request.uid for request in requests})
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        try:
            for _ in mine:
                result = await results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            self._abandon(mine)

    def cut(self, requests: Collection[Request]) -> None:
        """End these now, between two passes: they come back as ABORT with what they have, and go on wherever
        that is given as ``Request.said``, to the same answer bit for bit (as far as passes are)."""
        wanted, seats = set(map(id, requests)), self._seats
        seated = [seat for seat in seats.order if id(seats.at(seat).request) in wanted]
        waiting = [sequence for sequence in self._waiting if id(sequence.request) in wanted]
        given_up = [*map(seats.at, seated), *waiting]
        for seat in seated:
            self._finish(seat, Stop.ABORT)
        for sequence in waiting:
            self._hand_out(sequence, sequence.text, sequence.routes, Stop.ABORT)
        self._waiting = deque(sequence for sequence in self._waiting if id(sequence.request) not in wanted)
        if self.speculation is not None:
            self.speculation.close(given_up)

    def under_way(self) -> list[tuple[Request, int]]:
        """Requests that have not ended, and how many tokens of the answer each has."""
        seats = self._seats
        running = [(seats.at(seat), int(seats.length[seat])) for seat in seats.order]
        waiting = [(sequence, len(sequence.text)) for sequence in self._waiting]
        return [(one.request, length - one.prompt_len) for one, length in (*running, *waiting)]

    def take_spans(self) -> list[Span]:
        """What it was busy with since it was last asked."""
        return self._busy.take()

    def _leave_other_loops(self) -> None:
        """Drop what was asked for in an event loop that has been closed; refuse to be shared by two."""
        if self._driver is None or self._driver.done():
            return
        loop = self._driver.get_loop()
        if loop.is_closed():
            self._abandon([*map(self._seats.at, self._seats.order), *self._waiting])
            self._driver = None
        elif loop is not asyncio.get_running_loop():
            raise RuntimeError("the engine is at work in another event loop; make one engine for each loop")

    # ---- life of a sequence

    @property
    def _limits(self) -> Limits:
        return Limits(
            context=self.context_limit,
            vocab_size=self.decoder.config.vocab_size,
            blocks=self._cache.num_blocks,
            has_text=self._decode is not None,
            records_support=self._record_support,
        )

    async def _drive(self) -> None:
        """Step while there is work; an error of a step reaches every caller."""
        try:
            while self._waiting or len(self._seats):
                await asyncio.sleep(0)  # callers submit and consume between steps
                self.step()
        except BaseException as error:
            for sequence in (*self._waiting, *map(self._seats.at, self._seats.order)):
                sequence.results.put_nowait(error)
            if not isinstance(error, Exception):
                raise  # a cancelled loop or Ctrl-C is not ours to swallow; the callers have the rest

    def _abandon(self, sequences: list[Sequence]) -> None:
        """Drop what the caller no longer waits for."""
        dropped = set(map(id, sequences))
        given_up = [sequence for sequence in self._waiting if id(sequence) in dropped]
        for seat in [seat for seat in self._seats.order if id(self._seats.at(seat)) in dropped]:
            given_up.append(self._unseat(seat))
        self._waiting = deque(s for s in self._waiting if id(s) not in dropped)
        if self.speculation is not None:
            self.speculation.close(given_up)

    def _unseat(self, seat: int) -> Sequence:
        """Take a sequence from its seat, and its blocks from it."""
        sequence = self._seats.leave(seat)
        self._cache.discard(sequence.nodes)
        self._cache.release(sequence.blocks)
        sequence.nodes, sequence.blocks = [], []
        return sequence

    # ---- one step

    def step(self) -> None:
        """Admit, draft, run one forward, sample, and hand out what has finished."""
        start = time.perf_counter()
        self._admit()
        chosen, counts = self._schedule()
        if len(chosen) == 0:
            return
        version = self.version  # a callback that publishes changes it for the next step
        drafts = self._draft(chosen, counts)
        plan = plan_pass(self._seats, chosen, counts, drafts, self._cache)
        try:
            self._pass(plan, drafts, chosen, counts, version, start)
        except BaseException:
            for leaf in plan.further:  # sequences keep their blocks in their own books, these stand in none
                self._cache.release(leaf.blocks)
            raise

    def _pass(
        self, plan: Pass, drafts: Drafts, chosen: np.ndarray, counts: np.ndarray, version: int, start: float
    ) -> None:
        """Run it, sample, take in, report."""
        hidden = self._forward(plan)
        seats = self._seats
        seats.computed[chosen] += counts
        ready = np.flatnonzero(seats.computed[chosen] == seats.length[chosen])
        for seat in chosen[ready].tolist():
            if (sequence := seats.at(seat)).nodes:
                for node in sequence.nodes:
                    node.ready = True
                sequence.nodes = []
        self.counters.steps += 1
        self.counters.prefilled += int(counts.sum()) - len(ready)
        self.counters.drafted += len(drafts.tokens)
        if len(ready):
            taken = self._sample(hidden, plan, drafts, ready, version)
            seconds = time.perf_counter() - start
            self._report(plan, drafts, ready, taken, seconds)
        else:
            seconds = time.perf_counter() - start
            self.counters.seconds += seconds
        prefilled = int(counts.sum()) - len(ready)
        self._busy.passed(seconds, prefilled, len(plan.tokens) - prefilled)

    def _admit(self) -> None:
        """Seat waiting sequences while there is room."""
        if not self._waiting or self._seats.full:
            return
        copies: list[tuple[int, int]] = []
        later: deque[Sequence] = deque()
        room = self._cache.available - len(self._seats)  # one spare block for each that runs
        while self._waiting and not self._seats.full:
            sequence = self._waiting.popleft()
            tokens = sequence.text.tolist()
            match = self._cache.match(tokens)
            if match.pending:  # a sibling is computing this prefix right now
                later.append(sequence)
                continue
            # a matched block that only the tree holds was counted as room
            needed = len(tokens) // BLOCK + 1 - sum(self._cache.refs[b] > 1 for b in match.blocks)
            if needed > room and len(self._seats):
                later.append(sequence)
                break
            self._cache.share(match.blocks)
            sequence.blocks = list(match.blocks)
            # The source may be evicted here, even to be the target: it keeps its content until the copies are
            # made below, before any forward.
            if match.copied:
                sequence.blocks.append(self._cache.allocate())
                copies.append((match.source, sequence.blocks[-1]))
            while len(sequence.blocks) * BLOCK < len(tokens):
                sequence.blocks.append(self._cache.allocate())
            sequence.generation = self._cache.generation
            if sequence.sampled is None:
                sequence.cached = min(match.tokens, sequence.prompt_len)
                self.counters.cached += sequence.cached
            else:
                sequence.again.append((min(match.tokens, sequence.computed), sequence.computed))
            sequence.nodes = self._cache.insert(tokens, sequence.blocks, ready=False)
            room -= needed
            self._seats.take(sequence, match.tokens)
        self._waiting.extendleft(reversed(later))
        self._copy_blocks(copies)

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Keys, values and routes of (source, target) blocks."""
        if not copies:
            return
        sources, targets = [s for s, _ in copies], [t for _, t in copies]
        self._runner.copy_blocks(sources, targets)
        if self._routes is not None:
            self._routes.copy_blocks(sources, targets)

    def _schedule(self) -> tuple[np.ndarray, np.ndarray]:
        """(seats, rows of known text) of this step: decoding first, then prompts within the budget."""
        seats = self._seats
        order = np.array(seats.order, np.int64)
        need = seats.length[order] - seats.computed[order]
        order = order[np.argsort(need > 1, kind="stable")]
        need = seats.length[order] - seats.computed[order]
        before = np.cumsum(need) - need
        counts = np.minimum(need, self._step_tokens - before)
        order, counts = order[counts > 0], counts[counts > 0]
        short = seats.num_blocks[order] * BLOCK < seats.length[order]
        preempted: set[int] = set()
        for seat in order[short].tolist():
            if seat not in preempted:
                self._grow(seat, preempted)
        if preempted:
            kept = ~np.isin(order, list(preempted))
            order, counts = order[kept], counts[kept]
        return order, counts

    def _grow(self, seat: int, preempted: set[int]) -> None:
        """Give it the block of its next token; others, or itself, are preempted where nothing is free."""
        sequence, length = self._seats.at(seat), int(self._seats.length[seat])
        while len(sequence.blocks) * BLOCK < length:
            try:
                sequence.blocks.append(self._cache.allocate())
            except OutOfBlocks:
                if self._trim():
                    continue
                youngest = self._seats.order[-1]  # it has the least to lose
                self._keep_routes(youngest)
                victim = self._unseat(youngest)
                preempted.add(youngest)
                self._waiting.appendleft(victim)
                self.counters.preempted += 1
                if victim is sequence:
                    return
        self._seats.show_blocks(seat)

    def _trim(self) -> int:
        """Give back the blocks that drafts have left behind the ends of sequences; how many."""
        seats, freed = self._seats, 0
        for seat in seats.order:
            sequence, keep = seats.at(seat), -(-int(seats.length[seat]) // BLOCK)
            surplus, sequence.blocks[keep:] = sequence.blocks[keep:], []
            self._cache.release(surplus)
            # a block that has just been added is not in the table yet, and has to be shown
            seats.num_blocks[seat] = min(int(seats.num_blocks[seat]), len(sequence.blocks))
            freed += len(surplus)
        return freed

    def _draft(self, chosen: np.ndarray, counts: np.ndarray) -> Drafts:
        """What is worth verifying in this pass, cut to the KV blocks that are free."""
        if self.speculation is None:
            return NO_DRAFTS
        drafts = self.speculation.propose(chosen, counts, len(self._waiting))
        if len(drafts.tokens):
            drafts, cut = afford(self._seats, self._cache, chosen, drafts, self._leaves)
            self.counters.cut_drafts += cut
        return drafts

    # ---- the pass

    def _forward(self, plan: Pass) -> torch.Tensor:
        """Hidden states [T, D] of the rows; their keys, values and routes are in the cache."""
        copies = []
        for leaf in plan.further:
            sequence = self._seats.at(int(plan.seats[leaf.owner]))
            if self._seats.length[plan.seats[leaf.owner]] % BLOCK:
                copies.append((sequence.blocks[leaf.first], leaf.blocks[0]))
        self._copy_blocks(copies)
        rows = Rows(
            slots=self._runner.on_device(plan.slots),
            tables=self._runner.on_device(np.ascontiguousarray(plan.tables)),
            sequence=self._runner.on_device(plan.table),
            lengths=self._runner.on_device((plan.positions + 1).astype(np.int32)),
            write=None if plan.write is None else self._runner.on_device(plan.write),
        )
        hidden, routing = self._runner.forward(plan.tokens, plan.positions, rows)
        if self._routes is not None and routing is not None:
            self._routes.write(plan.slots, routing if plan.write is None else routing[plan.write])
        return hidden

    # ---- taking in

    def _sample(
        self, hidden: torch.Tensor, plan: Pass, drafts: Drafts, ready: np.ndarray, version: int
    ) -> Taken:
        """Draw a token on every row that may emit one, keep what follows from the last one that is real."""
        seats = self._seats
        lengths = draft_counts(drafts, len(plan.seats))[ready] + 1
        heads = plan.firsts[ready] + plan.counts[ready] - lengths  # the row of the last token
        starts = np.cumsum(lengths) - lengths
        owner = np.repeat(np.arange(len(ready)), lengths)
        rows = np.arange(len(owner)) - starts[owner] + heads[owner]
        by_row = plan.seats[ready][owner]
        u = uniform(seats.address[by_row], plan.positions[rows] + 1)
        banned = [
            (row, list(seats.at(int(by_row[row])).request.sampling.stop_tokens))
            for row in np.flatnonzero(plan.positions[rows] + 1 < seats.unstoppable[by_row]).tolist()
        ]
        some, settings = None if len(rows) == len(plan.tokens) else rows, seats.settings(by_row)
        want_support = self._record_support and bool(seats.filtered[by_row].any())
        drawn = self._runner.draw(hidden, settings, u, banned, rows=some, want_support=want_support)
        taken = take_in(seats, plan, drafts, ready, drawn, version, self._decode)
        self._settle_trees(plan, ready, taken)
        self.counters.decoded += int(taken.counts.sum())
        self.counters.accepted += int(taken.accepted.sum())
        self.counters.passes += len(ready)
        if self.speculation is not None and taken.stops:
            self.speculation.tell_end(plan.seats[ready[list(taken.stops)]])
        for r, stop in taken.stops.items():
            self._finish(int(plan.seats[ready[r]]), stop)
        return taken

    def _settle_trees(self, plan: Pass, ready: np.ndarray, taken: Taken) -> None:
        """The winning leaf's blocks become the sequence's; those of the others are free again."""
        place = {int(s): r for r, s in enumerate(ready)}
        settled: set[int] = set()
        for leaf in plan.further:
            path, seat = taken.paths.get(place[leaf.owner], []), int(plan.seats[leaf.owner])
            wins = leaf.owner not in settled and bool(path) and path == leaf.path[: len(path)]
            if wins and not leaf.main.issuperset(path):
                settled.add(leaf.owner)
                sequence = self._seats.at(seat)
                end = leaf.first + len(leaf.blocks)
                own = sequence.blocks[leaf.first : end]
                sequence.blocks[leaf.first : end], leaf.blocks = leaf.blocks, own
                self._seats.num_blocks[seat] = leaf.first
                self._seats.show_blocks(seat)
            self._cache.release(leaf.blocks)
            leaf.blocks = []

    def _report(self, plan: Pass, drafts: Drafts, ready: np.ndarray, taken: Taken, seconds: float) -> None:
        """What the pass was good for; the cost table and the drafter's account learn from it."""
        seats, counters = plan.seats[ready], self.counters
        ended = np.zeros(len(ready), bool)
        ended[list(taken.stops)] = True
        nodes = len(drafts.tokens)
        counters.seconds += seconds
        self.trace.append((len(ready), nodes, int(taken.counts.sum())))
        speculation, cost = self.speculation, self.cost
        watched = speculation is not None and (speculation.awake or counters.steps % 8 == 0)
        if speculation is None or cost is None or not watched:
            counters.seconds_without += seconds
            return
        rows, attended = len(plan.tokens), plan.attended
        if rows - nodes == len(ready) and not taken.stops:  # prefills and farewells are not what a row costs
            cost.observe(rows, attended, seconds - speculation.spent)
        if speculation.awake:
            plain_s = float(cost.seconds(rows - nodes, attended * (rows - nodes) / rows))
            pass_s = float(cost.seconds(rows, attended))
            without_s = speculation.judge(seats, taken.counts, ended, plain_s, pass_s)
            counters.seconds_without += without_s if nodes else seconds - speculation.spent
        else:
            counters.seconds_without += seconds

    def _finish(self, seat: int, stop: Stop) -> None:
        """Hand out the completion and leave its blocks to the prefix tree."""
        seats, sequence = self._seats, self._seats.at(seat)
        computed = int(seats.computed[seat])
        whole = seats.text[seat, : int(seats.length[seat])].copy()
        routes = None if self._routes is None else self._routes.of(sequence, computed, len(whole))
        self.counters.errors += stop is Stop.ERROR
        if stop is Stop.ERROR:
            self._cache.forget()  # its prompt is in the tree, and the numbers of it may be broken
        elif sequence.generation == self._cache.generation and not sequence.nodes:
            self._cache.insert(whole[:computed].tolist(), sequence.blocks)
        self._unseat(seat)
        self._hand_out(sequence, whole, routes, stop)

    def _hand_out(self, sequence: Sequence, whole: np.ndarray, routes: np.ndarray | None, stop: Stop) -> None:
        completion = completion_of(sequence, whole, routes, stop, self._decode)
        sequence.results.put_nowait((sequence.index, completion))

    def _keep_routes(self, seat: int) -> None:
        """Before a preemption: the rows that the tokens so far were sampled through. They are computed again,
        perhaps under another policy, and may choose otherwise: true for what follows, not for what was."""
        seats, sequence = self._seats, self._seats.at(seat)
        if self._routes is not None and seats.length[seat] > seats.prompt[seat]:
            sequence.routes = self._routes.of(sequence, int(seats.computed[seat]))
