"""The closed history: its search against brute force, its limits, its file."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_drafts import compiled as has_compiler

from ostinato.history import blocks
from ostinato.history.blocks import CONTEXT, END, PROBS, Block
from ostinato.history.native import library as native
from ostinato.history.store import OVERHEAD, History, hash_prompt
from ostinato.types import HistoryEntry

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler here")
EXAMPLES = settings(max_examples=40, deadline=None)
DEPTH = 64  # tokens after which two suffixes count as equal
Span = tuple[int, int]  # places [low, high) of ``Block.order``


def past(tokens: Sequence[int], context: Sequence[int] = (), reward: float | None = None) -> HistoryEntry:
    """A response whose intervals are identified by its tokens."""
    array = np.array(tokens, np.int32)
    return HistoryEntry(
        context=np.array(context, np.int32),
        tokens=array,
        probs=(1 / (1 + array % 7)).astype(np.float32),
        edges=(array % 5 / 10).astype(np.float32),
        reward=reward,
    )


@st.composite
def pasts(draw: st.DrawFn) -> list[HistoryEntry]:
    """Responses in a small alphabet, some of them loops longer than DEPTH, in 16 and in 32 bits."""
    wide = draw(st.sampled_from([0, 70_000]))
    tokens = st.lists(st.integers(0, 2), min_size=1, max_size=30)
    loops = st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=3), st.integers(1, 90)).map(
        lambda loop: (loop[0] * loop[1])[:130]
    )
    response = st.tuples(st.lists(st.integers(0, 2), max_size=11), st.one_of(tokens, loops))
    return [
        past([wide + token for token in responses], [wide + token for token in context])
        for context, responses in draw(st.lists(response, min_size=1, max_size=4))
    ]


def documents(block: Block) -> list[list[int]]:
    return [block.text[low:high].tolist() for low, high in zip(block.starts, block.starts[1:], strict=False)]


def suffix(block: Block, place: int) -> list[int]:
    """The tokens from a place to the END of its document."""
    position = block.order[place]
    return block.text[position : block.starts[np.searchsorted(block.starts, position, side="right")]].tolist()


class Native:
    """The search of native/blocks.cpp in the block of one step."""

    def __init__(self, history: History, uid: str, step: int) -> None:
        self.library, self.history = native.load_library(), history  # which keeps the block
        self.block = self.library.history_block(history.native, hash_prompt(uid), step)
        assert self.block

    def find(self, context: Sequence[int]) -> Span:
        return self._span("find", _int32(context), len(context))

    def narrow(self, span: Span, depth: int, token: int) -> Span:
        return self._span("narrow", depth, token, span=span)

    def longest(self, context: Sequence[int], least: int) -> tuple[int, Span]:
        span = native.Span()
        length = self.library.history_longest(self.block, _int32(context), len(context), least, span)
        return length, (span.low, span.high)

    def next_at(self, place: int, depth: int) -> native.Next:
        out = native.Next()
        self.library.history_next(self.block, place, depth, out)
        return out

    def _span(self, name: str, *given: object, span: Span = (0, 0)) -> Span:
        """``find`` takes its span last, ``narrow`` first."""
        out = native.Span(*span)
        arguments = (*given, out) if name == "find" else (out, *given)
        getattr(self.library, f"history_{name}")(self.block, *arguments)
        return out.low, out.high


def _int32(tokens: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(tokens))(*tokens)


def searched(responses: Sequence[HistoryEntry]) -> tuple[Block, Native]:
    """A sorted block of these responses, and its search."""
    history = History()
    history.add("p", 1, responses)
    [block] = history.blocks("p")
    return block, Native(history, "p", 1)


# ---- one block ----


@EXAMPLES
@given(pasts())
def test_documents_are_context_response_end(responses: list[HistoryEntry]) -> None:
    block = blocks.make_block(3, responses)
    assert documents(block) == [[*p.context[-CONTEXT:].tolist(), *p.tokens.tolist(), END] for p in responses]
    assert block.wide == any((p.tokens >= 70_000).any() for p in responses)
    assert block.num_sampled == sum(len(p.tokens) for p in responses)
    ends = block.starts[1:] - 1
    inside = [slice(end - len(p.tokens), end) for p, end in zip(responses, ends, strict=True)]
    for p, part in zip(responses, inside, strict=True):
        assert abs(block.edges[part] * blocks.EDGE_STEP - p.edges).max() <= blocks.EDGE_STEP / 2
        assert (PROBS[block.probs[part]] > 0).all()
    assert np.count_nonzero(block.probs) == block.num_sampled  # context and END have no probability


@EXAMPLES
@given(pasts())
def test_order_is_sorted_to_the_depth_and_then_by_position(responses: list[HistoryEntry]) -> None:
    block, _ = searched(responses)
    keys = [(suffix(block, place)[:DEPTH], int(block.order[place])) for place in range(block.size)]
    assert keys == sorted(keys)
    assert sorted(block.order.tolist()) == np.flatnonzero(block.text != END).tolist()


@EXAMPLES
@given(
    responses=pasts(),
    context=st.lists(st.integers(0, 2), min_size=1, max_size=90),
    start=st.none() | st.integers(0, 30),
    least=st.integers(1, 4),
)
def test_the_search_finds_what_brute_force_finds(
    responses: list[HistoryEntry], context: list[int], start: int | None, least: int
) -> None:
    """All places of a context and no other, at once and token by token; the longest suffix that goes on; and
    what comes next. Contexts are of the text (from ``start`` on) or of anywhere."""
    block, search = searched(responses)
    context = [token + 70_000 * block.wide for token in context]
    if start is not None:
        context = responses[0].tokens.tolist()[start:] or context
    tails = {place: suffix(block, place) for place in range(block.size)}
    places, span = [*tails], (0, block.size)
    for depth, token in enumerate(context[: DEPTH - 1]):
        span = search.narrow(span, depth, token)
        places = [place for place in places if tails[place][depth : depth + 1] == [token]]
        assert [*range(*span)] == places == [*range(*search.find(context[: depth + 1]))]
        for place in {*places[:1], *places[-1:]}:
            come, position = search.next_at(place, depth), int(block.order[place]) + depth
            assert (come.token, come.edge) == (token, block.edges[position] * blocks.EDGE_STEP)
            assert come.prob == np.float32(PROBS[block.probs[position]])
    texts = [document[:-1] for document in documents(block)]
    lengths = [
        length
        for length in range(least, min(len(context), DEPTH - 1) + 1)
        if any(
            context[-length:] == text[at : at + length] for text in texts for at in range(len(text) - length)
        )
    ]
    length, span = search.longest(context, least)
    assert length == max(lengths, default=0)
    assert span == (search.find(context[len(context) - length :]) if length else (0, 0))


# ---- quantisation ----


@EXAMPLES
@given(st.lists(st.floats(0, 1, width=32), min_size=1))
def test_probabilities_are_kept_to_half_a_step(probs: list[float]) -> None:
    given_ = np.array(probs, np.float32)
    kept = PROBS[blocks.encode_probs(given_)]
    usual = given_ >= PROBS[1]
    assert (abs(kept / np.maximum(given_, PROBS[1]) - 1)[usual] <= 0.026).all()
    assert (abs(kept - given_) <= 0.0151).all()  # what it means for the end of an interval


@pytest.mark.parametrize(
    ("rewards", "signs"),
    [
        ([1.0, 0.0, 0.0], [1, -1, -1]),
        ([0.1 + 0.2, 0.3, 0.3], [0, 0, 0]),  # equal, but for rounding
        ([None, 2.0, 4.0], [0, -1, 1]),
        ([None, None], [0, 0]),
        ([1.0], [0]),
    ],
)
def test_rewards_are_kept_against_their_mean(rewards: list[float | None], signs: list[int]) -> None:
    block, search = searched([past([1, 2], reward=reward) for reward in rewards])
    assert block.rewards.tolist() == signs
    places = [int(np.flatnonzero(block.order == start)[0]) for start in block.starts[:-1]]
    assert [search.next_at(place, 1).reward for place in places] == signs


@pytest.mark.parametrize("missing", ["probs", "edges"])
def test_a_response_without_its_intervals_is_refused(missing: str) -> None:
    whole = past([1, 2, 3])
    parts = {name: getattr(whole, name) for name in ("context", "tokens", "probs", "edges")}
    with pytest.raises(ValueError, match="engine reports both"):
        History().add("p", 1, [HistoryEntry(**{**parts, missing: np.zeros(0, np.float32)})])


# ---- the store ----


def test_a_prompt_keeps_its_newest_epochs() -> None:
    history = History(epochs=2)
    for step in (1, 5, 9, 7):
        history.add("p", step, [past([step, 2, 3])])
    assert [block.step for block in history.blocks("p")] == [9, 7]
    assert history.num_tokens == 6
    assert history.counters["outdated_blocks"] == 2 and history.counters["outdated_tokens"] == 6
    assert history.blocks("another") == []


def test_a_step_that_is_told_again_replaces_what_was_there() -> None:
    """A resumed run plays its last steps again."""
    history = History()
    history.add("p", 1, [past([1, 2])])
    history.add("p", 2, [past([3, 4]), past([5])])
    history.add("p", 2, [past([6])])
    assert [block.text.tolist() for block in history.blocks("p")] == [[6, END], [1, 2, END]]
    assert history.counters["replaced_tokens"] == 3 and history.num_tokens == 3
    history.add("p", 1, [])
    assert [block.step for block in history.blocks("p")] == [2]


@EXAMPLES
@given(data=st.data())
def test_bytes_are_counted_and_bounded(data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, 6000))
    history = History(memory_mb=limit / 2**20, epochs=2)
    additions = st.tuples(st.sampled_from("abcde"), st.integers(1, 4), st.integers(0, 300))
    for uid, step, length in data.draw(st.lists(additions, max_size=12)):
        history.add(uid, step, [past([1] * length)])
        kept = [block for uid in "abcde" for block in history.blocks(uid)]
        assert history.num_bytes == sum(block.memory.nbytes + OVERHEAD for block in kept) <= limit
        assert history.num_tokens == sum(block.num_sampled for block in kept)
    came, went = history.counters["added_tokens"], ("outdated_tokens", "replaced_tokens", "evicted_tokens")
    assert came - sum(history.counters[why] for why in went) == history.num_tokens


def test_a_round_larger_than_the_memory_keeps_its_share() -> None:
    """Least recently used would have dropped every block just before its prompt came round again."""
    each = blocks.count_bytes(101, 1, False) + OVERHEAD
    history = History(memory_mb=20 * each / 2**20)
    found = []
    for step in range(120):
        uid = str(step % 40)
        found.append(bool(history.blocks(uid)))
        history.add(uid, step, [past([1] * 100)])
    assert sum(found[40:]) >= 0.45 * len(found[40:])


def test_adding_moves_nothing_that_is_kept() -> None:
    """A drafter holds spans while groups finish: what is kept stays; ``generation`` says ask again."""
    uid, library, history = "held", native.load_library(), History()
    history.add(uid, 1, [past([1, 2, 3, 1, 2, 4])])
    before = Native(history, uid, 1).find([1, 2])
    generation = library.history_generation(history.native)
    for step in range(2, 4):
        history.add(uid, step, [past([1, 2, 9])])
        history.add(f"{uid} {step}", step, [past([1, 2, 9])])
    assert library.history_generation(history.native) > generation
    assert Native(history, uid, 1).find([1, 2]) == before
    history.add(uid, 4, [past([5])])  # epochs=3: step 1 goes
    assert not library.history_block(history.native, hash_prompt(uid), 1)


# ---- the file ----


def test_a_saved_history_comes_back(tmp_path: Path) -> None:
    history = History()
    history.add("p", 1, [past([1, 2, 3], context=[4], reward=1.0), past([1, 2], reward=0.0)])
    history.add("p", 2, [past([70_000, 2])])
    history.add("q", 2, [past([9])])
    history.lengths.observe("p", [3, 2])
    history.build_now()
    history.save(tmp_path / "history")
    again = History.load(tmp_path / "history")
    for uid in ("p", "q"):
        for old, new in zip(history.blocks(uid), again.blocks(uid), strict=True):
            assert (old.step, old.wide, old.memory.tobytes()) == (new.step, new.wide, new.memory.tobytes())
    assert (again.num_bytes, again.num_tokens) == (history.num_bytes, history.num_tokens)
    assert again.lengths.state() == history.lengths.state() and not again.counters
    smaller = History.load(tmp_path / "history", epochs=1)
    assert [block.step for block in smaller.blocks("p")] == [2]


def test_a_run_that_goes_back_has_not_yet_sampled_what_followed(tmp_path: Path) -> None:
    """The history is in no checkpoint: where the newest one was damaged, the run went on from an older one
    with drafts from answers that it had yet to sample."""

    def after(steps: int) -> History:
        history = History(epochs=4)
        for step in range(1, steps + 1):
            for uid in ("p", "q" if step < 3 else "r"):
                history.add(uid, step, [past([step, 2, 3])])
                history.lengths.observe(uid, [3 * step], step=step)
        return history

    after(4).save(tmp_path / "history")
    straight = after(2)
    back = History.load(tmp_path / "history", epochs=4)
    back.forget_after(2)
    for uid in "pqr":
        old, new = straight.blocks(uid), back.blocks(uid)
        assert [(one.step, one.text.tolist()) for one in old] == [
            (one.step, one.text.tolist()) for one in new
        ]
    assert (back.num_bytes, back.num_tokens) == (straight.num_bytes, straight.num_tokens)
    assert back.lengths.state() == straight.lengths.state() and back.counters["undone_blocks"] == 4


@EXAMPLES
@given(data=st.data())
def test_a_damaged_file_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    history = History()
    history.add("p", 1, [past([1, 2, 3])])
    history.save(path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), label="cut"):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with pytest.raises(ValueError, match="delete it to begin an empty one"):
        History.load(path)


def test_a_key_is_the_same_everywhere() -> None:
    assert hash_prompt("arithmetic/3") == 5161345964430083096  # pinned: files name prompts by it
