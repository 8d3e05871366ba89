"""The scheduler by itself: no model, no torch; a "pass" computes what was scheduled and samples one token."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.cache import BLOCK, KVCache, Match, OutOfBlocks
from ostinato.engine.counters import Counters
from ostinato.engine.requests import Limits, new_sequence
from ostinato.engine.scheduler import Scheduler
from ostinato.engine.sequences import Sequence, SequenceTable
from ostinato.types import Request, Sampling

CONTEXT = 256
PROMPT = st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 2))  # tokens, answer, kind


ONLY = {"": 0}


def sequence(prompt: int, *, tokens: int = 8, uid: str = "p", first: int = 1) -> Sequence:
    limits = Limits(context=CONTEXT, vocab_size=1000, blocks=1000, has_text=False, policies={"": 0})
    ids = np.arange(first, first + prompt, dtype=np.int32)
    sampling = Sampling(max_tokens=tokens)
    return new_sequence(
        Request(tokens=ids, sampling=sampling, seed=(0,), uid=uid), limits, results=asyncio.Queue()
    )


def new_scheduler(*, blocks: int = 100, batch: int = 8, step_tokens: int = 64) -> Scheduler:
    return Scheduler(SequenceTable(batch, CONTEXT), KVCache(blocks), Counters(), step_tokens=step_tokens)


def one_pass(scheduler: Scheduler) -> list[Sequence]:
    """Admit, schedule, "compute", sample a token for each that is ready; those that have ended."""
    scheduler.admit()
    chosen, counts = scheduler.schedule()
    table, ended = scheduler.table, []
    for slot in chosen[scheduler.mark_computed(chosen, counts)].tolist():
        table.text[slot, table.length[slot]] = 7
        table.length[slot] += 1
        if table.length[slot] == table.limit[slot]:
            scheduler.keep_prefix(slot)
            ended.append(scheduler.remove(slot))
    return ended


def owned(scheduler: Scheduler) -> list[list[int]]:
    return [scheduler.table.get_sequence(slot).blocks for slot in scheduler.table.order]


def test_it_needs_no_torch() -> None:
    code = "import sys, ostinato.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0


def test_decoding_comes_before_prompts_and_prompts_are_cut_to_the_budget() -> None:
    scheduler = new_scheduler(step_tokens=10)
    scheduler.add([sequence(4), sequence(30, first=100)])
    scheduler.admit()
    chosen, counts = scheduler.schedule()
    assert counts.tolist() == [4, 6]
    ready = scheduler.mark_computed(chosen, counts)
    assert ready.tolist() == [0]
    scheduler.table.length[chosen[0]] += 1
    again, counts = scheduler.schedule()
    assert again.tolist() == chosen.tolist() and counts.tolist() == [1, 9]


def test_siblings_wait_for_the_first_of_them_and_share_its_prompt() -> None:
    scheduler = new_scheduler()
    scheduler.add([sequence(33), sequence(33), sequence(33)])
    scheduler.admit()
    assert len(scheduler.table) == 1 and len(scheduler.waiting) == 2
    one_pass(scheduler)
    one_pass(scheduler)
    first, *others = owned(scheduler)
    assert len(others) == 2 and all(blocks[:2] == first[:2] for blocks in others)


def test_out_of_blocks_the_youngest_is_preempted_and_first_in_the_queue() -> None:
    scheduler = new_scheduler(blocks=5)
    old, young = sequence(2 * BLOCK, tokens=2 * BLOCK), sequence(BLOCK, tokens=40, first=500)
    scheduler.add([old, young, sequence(BLOCK, first=700)])
    seen: list[int] = []
    scheduler._before_preemption = seen.append
    while scheduler.waiting or len(scheduler.table) > 1:
        one_pass(scheduler)
        if seen:
            break
    assert seen and scheduler.waiting[0] in (young, old) and not scheduler.waiting[0].blocks


@given(
    prompts=st.lists(PROMPT, min_size=1, max_size=12),
    blocks=st.integers(7, 30),
    batch=st.integers(1, 6),
    step_tokens=st.integers(1, 80),
)
def test_everything_ends_and_every_block_comes_back(
    prompts: list[tuple[int, int, int]], blocks: int, batch: int, step_tokens: int
) -> None:
    scheduler = new_scheduler(blocks=blocks, batch=batch, step_tokens=step_tokens)
    scheduler.add([sequence(n, tokens=m, first=1 + 100 * kind) for n, m, kind in prompts])
    ended, passes = [], 0
    while len(scheduler):
        ended += one_pass(scheduler)
        scheduler.cache.check(owned(scheduler))
        passes += 1
        assert passes < 20_000, "sequences preempt each other for ever"
    assert sorted(len(one.text) for one in ended) == sorted(n + m for n, m, _ in prompts)
    scheduler.cache.forget()
    scheduler.cache.check([])
    assert scheduler.cache.num_free == blocks


def test_the_longest_are_begun_first_and_the_preempted_before_all() -> None:
    scheduler = Scheduler(
        SequenceTable(1, CONTEXT), KVCache(50), Counters(), step_tokens=64,
        expect=lambda request: float(request.uid),
    )  # fmt: skip
    scheduler.add([sequence(5, uid="3"), sequence(6, uid="30"), sequence(7, uid="10")])
    assert [one.request.uid for one in scheduler.waiting] == ["30", "10", "3"]
    scheduler.waiting[2].sampled = (np.empty(0), np.empty(0), np.empty(0))
    scheduler.add([sequence(8, uid="90")])
    assert [one.request.uid for one in scheduler.waiting] == ["3", "90", "30", "10"]


# ---- the KV cache against its rules


def fill(cache: KVCache, tokens: list[int]) -> list[int]:
    """What the engine does on admission: share, copy, allocate, insert. Returns the sequence's blocks."""
    match = cache.match(tokens)
    cache.share(match.blocks)
    blocks = list(match.blocks)
    try:
        while len(blocks) * BLOCK < len(tokens):
            blocks.append(cache.allocate())
    except OutOfBlocks:
        cache.release(blocks)
        raise
    cache.insert(tokens, blocks)
    return blocks


def test_a_sibling_shares_full_blocks_and_copies_the_partial_one() -> None:
    cache = KVCache(8)
    prompt = list(range(BLOCK + 5))
    blocks = fill(cache, prompt)
    match = cache.match(prompt)
    assert match == Match((blocks[0],), BLOCK + 4, source=blocks[1], copied=4)  # the last token must run
    cache.check([blocks])


def test_the_next_turn_finds_everything_that_was_said() -> None:
    cache = KVCache(8)
    prompt = list(range(20))
    blocks = fill(cache, prompt)
    output = prompt + [90, 91, 92, 93] * 4
    blocks += [cache.allocate()]
    cache.insert(output, blocks)  # the partial leaf of the prompt grows into a full block
    cache.release(blocks)
    cache.check([])
    assert cache.match([*output, 7, 7]).tokens == len(output)
    assert cache.match([*prompt, 5, 5]).tokens == len(prompt)


def test_a_prefix_that_is_being_computed_is_waited_for() -> None:
    cache = KVCache(8)
    prompt = list(range(20))
    match = cache.match(prompt)
    assert match == Match((), 0)
    blocks = [cache.allocate(), cache.allocate()]
    nodes = cache.insert(prompt, blocks, ready=False)
    assert cache.match(prompt).pending
    for node in nodes:
        node.ready = True
    assert cache.match(prompt).tokens == 19


def test_an_abandoned_prefill_leaves_nothing_to_wait_for() -> None:
    """A sequence that was preempted before its first forward once left nodes that never became ready: its
    siblings waited for them for ever."""
    cache = KVCache(8)
    prompt = list(range(40))
    blocks = [cache.allocate() for _ in range(3)]
    nodes = cache.insert(prompt, blocks, ready=False)
    cache.discard(nodes)
    cache.release(blocks)
    cache.check([])
    assert cache.match(prompt) == Match((), 0)
    assert cache.num_available == 8


def test_a_long_abandoned_prefill_is_no_deep_recursion() -> None:
    """Discarding node by node called itself for the node below: a preempted prompt of 16,000 tokens, a chain
    of 1,000 blocks, ended the run with a RecursionError."""
    cache = KVCache(3000)
    prompt = list(range(3000 * BLOCK))
    blocks = [cache.allocate() for _ in range(3000)]
    cache.discard(cache.insert(prompt, blocks, ready=False))
    cache.release(blocks)
    cache.check([])
    assert cache.num_free == 3000


def test_eviction_takes_the_oldest_leaf_and_never_a_block_in_use() -> None:
    cache = KVCache(4)
    old, new = list(range(100, 100 + BLOCK)), list(range(200, 200 + BLOCK))
    for tokens in (old, new):
        cache.release(fill(cache, tokens))
    assert cache.match([*new, 1]).tokens == BLOCK
    held = [cache.allocate() for _ in range(3)]
    assert cache.match([*old, 1]).tokens == 0 and cache.match([*new, 1]).tokens == BLOCK
    held.append(cache.allocate())
    with pytest.raises(OutOfBlocks, match="4 KV blocks"):
        cache.allocate()
    cache.check([held])


class ScanCache:
    """The slow twin of ``match``: the longest common prefix with any known sequence, capped below the last
    token.
    """

    def __init__(self) -> None:
        self.known: list[list[int]] = []

    def match(self, tokens: list[int]) -> int:
        def common(a: list[int]) -> int:
            return next(
                (i for i, (x, y) in enumerate(zip(a, tokens, strict=False)) if x != y),
                min(len(a), len(tokens)),
            )

        return min(max(map(common, self.known), default=0), len(tokens) - 1)


token_lists = st.lists(st.integers(0, 2), min_size=2, max_size=60)


@given(st.lists(token_lists, min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_the_match_is_the_longest_known_prefix(sequences: list[list[int]]) -> None:
    cache, scan = KVCache(1000), ScanCache()
    alive = []
    for tokens in sequences:
        assert cache.match(tokens).tokens == scan.match(tokens)
        alive.append(fill(cache, tokens))
        scan.known.append(tokens)
        cache.check(alive)


@given(st.lists(st.tuples(st.sampled_from(["begin", "end", "forget"]), token_lists), max_size=40))
@settings(max_examples=50, deadline=None)
def test_no_block_is_lost_or_shared_by_mistake(events: list[tuple[str, list[int]]]) -> None:
    cache = KVCache(12)
    alive: list[tuple[list[int], list[int]]] = []
    for event, tokens in events:
        if event == "begin":
            try:
                alive.append((tokens, fill(cache, tokens)))
            except OutOfBlocks:
                assert cache.num_available < 4  # no sequence here needs more
        elif event == "end" and alive:
            output, blocks = alive.pop()
            cache.insert(output, blocks)
            cache.release(blocks)
        elif event == "forget":
            cache.forget()
        cache.check([blocks for _, blocks in alive])
