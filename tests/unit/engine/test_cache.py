"""The KV cache against its rules: reference counts, sharing, eviction, and a slow twin for the prefix
match.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.engine.cache import BLOCK, KVCache, Match, OutOfBlocks


def fill(cache: KVCache, tokens: list[int], *, ready: bool = True) -> list[int]:
    """What the engine does on admission: share, copy, allocate, insert. Returns the sequence's blocks."""
    match = cache.match(tokens)
    cache.share(match.blocks)
    blocks = list(match.blocks)
    while len(blocks) * BLOCK < len(tokens):
        blocks.append(cache.allocate())
    cache.insert(tokens, blocks, ready=ready)
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
    said = prompt + [90, 91, 92, 93] * 4
    blocks += [cache.allocate()]
    cache.insert(said, blocks)  # the partial leaf of the prompt grows into a full block
    cache.release(blocks)
    cache.check([])
    assert cache.match([*said, 7, 7]).tokens == len(said)
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
    assert cache.available == 8


def test_a_long_abandoned_prefill_is_no_deep_recursion() -> None:
    """Discarding node by node called itself for the node below: a preempted prompt of 16,000 tokens, a chain
    of 1,000 blocks, ended the run with a RecursionError."""
    cache = KVCache(3000)
    prompt = list(range(3000 * BLOCK))
    blocks = [cache.allocate() for _ in range(3000)]
    cache.discard(cache.insert(prompt, blocks, ready=False))
    cache.release(blocks)
    cache.check([])
    assert cache.free == 3000


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
                alive.append((tokens, fill_or_release(cache, tokens)))
            except OutOfBlocks:
                assert cache.available < 4  # no sequence here needs more
        elif event == "end" and alive:
            said, blocks = alive.pop()
            cache.insert(said, blocks)
            cache.release(blocks)
        elif event == "forget":
            cache.forget()
        cache.check([blocks for _, blocks in alive])


def fill_or_release(cache: KVCache, tokens: list[int]) -> list[int]:
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
