"""The timeline: rows, fewer rows of the same seconds, what workers came to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.observe.timeline import (
    DETAIL_BYTES,
    MOST_PER_STEP,
    Kind,
    Span,
    coarsen,
    limit_spans,
    merge_spans,
    pool_of,
    select_spans,
    sort_workers,
    usage,
    usages,
)

PART = st.tuples(st.sampled_from(Kind), st.integers(0, 300), st.integers(0, 40), st.integers(0, 9))


def span(worker: str, kind: Kind, start: float, stop: float, **more: int) -> Span:
    return Span(worker=worker, kind=kind, start=start, stop=stop, **more)


@st.composite
def timelines(draw: st.DrawFn) -> list[Span]:
    """Of up to three workers, each doing one thing at a time, reported in turn; hundredths of seconds."""
    made: list[Span] = []
    for worker in ("sampler-0", "sampler-1", "trainer")[: draw(st.integers(1, 3))]:
        at = draw(st.integers(0, 100))
        for kind, seconds, gap, amount in draw(st.lists(PART, max_size=40)):
            made.append(span(worker, kind, at / 100, (at + seconds) / 100, amount=amount))
            at += seconds + gap
    return made


Sums = dict[tuple[str, Kind], float]


def sums(spans: Sequence[Span], until: float = float("inf")) -> Sums:
    """Seconds by worker and kind before ``until``: the slow and obvious way."""
    found: Sums = defaultdict(float)
    for one in spans:
        found[one.worker, one.kind] += max(0.0, min(one.stop, until) - one.start)
    return found


def assert_same(found: Sums, wanted: Sums, by: float = 1e-9) -> None:
    for key in {*found, *wanted}:
        assert found.get(key, 0.0) == pytest.approx(wanted.get(key, 0.0), abs=by), key


@given(timelines())
def test_a_row_comes_back(spans: list[Span]) -> None:
    assert [Span.of(one.to_json()) for one in spans] == spans


def test_neighbours_become_one() -> None:
    passes = [span("sampler-0", Kind.DECODE, i / 10, (i + 1) / 10 - 0.003, amount=4) for i in range(5)]
    (one,) = merge_spans(passes)
    assert (one.start, one.stop, one.amount) == (0.0, 0.497, 20)


@given(timelines(), st.floats(0.01, 5.0))
def test_fewer_spans_come_to_the_same_seconds(spans: list[Span], grain: float) -> None:
    found = coarsen(spans, grain)
    assert_same(sums(found), sums(spans))
    amounts: Counter[tuple[str, Kind]] = Counter()
    for one, sign in [*((each, 1) for each in found), *((each, -1) for each in spans)]:
        amounts[one.worker, one.kind] += sign * one.amount
    assert not any(amounts.values())


@given(timelines(), st.floats(0.01, 5.0), st.floats(0.0, 60.0))
def test_nothing_moves_by_more_than_the_grain(spans: list[Span], grain: float, at: float) -> None:
    """Up to any moment, each kind of work is behind or ahead by less than a grain."""
    assert_same(sums(coarsen(spans, grain), at), sums(spans, at), by=grain + 1e-9)


@given(timelines(), st.floats(0.01, 5.0))
def test_a_worker_still_does_one_thing_at_a_time(spans: list[Span], grain: float) -> None:
    found = coarsen(spans, grain)
    assert [one.start for one in found] == sorted(one.start for one in found)
    for worker in {one.worker for one in found}:
        own = [one for one in found if one.worker == worker]
        assert all(before.stop <= after.start + 1e-9 for before, after in pairwise(own) if after.seconds)


@given(timelines(), st.integers(len(Kind), 40))
def test_fewer_is_few_enough(spans: list[Span], most: int) -> None:
    found = limit_spans(spans, most)
    assert max(Counter(one.worker for one in found).values(), default=0) <= most
    assert_same(sums(found), sums(spans))
    if len(spans) <= len(Kind):
        assert found == spans


def changing(step: int, workers: int, changes: int) -> list[Span]:
    kinds = (Kind.PREFILL, Kind.DECODE)
    return [
        span(f"sampler-{w}", kinds[i % 2], step + i / changes, step + (i + 0.9) / changes)
        for w in range(workers)
        for i in range(changes)
    ]


def test_a_file_grows_with_the_logarithm_of_the_run() -> None:
    """64 workers that change between reading and sampling 10 times a step leave 100,000 steps in 90 MB; a
    worker that changes a thousand times a step counts as one that changes 128 times."""
    row = len('{"worker":"sampler-12","kind":"decode","from":1763650000.1234,"to":1763650000.1234}\n')
    size = written = 0
    for step in range(1, 100_001):
        if step % 2 ** (size // DETAIL_BYTES) == 0:
            size += 640 * row
            written += 1
    assert size < 11 * DETAIL_BYTES and written > 1000
    assert len(select_spans(changing(7, 2, 1000), step=7, file_bytes=0)) <= 2 * MOST_PER_STEP


def test_steps_are_left_out_of_a_large_file() -> None:
    spans = changing(3, 2, 4)
    assert {*select_spans(spans, step=3, file_bytes=DETAIL_BYTES - 1)} == {*spans}
    assert select_spans(spans, step=3, file_bytes=DETAIL_BYTES) == []
    assert select_spans(spans, step=4, file_bytes=DETAIL_BYTES + 1)
    assert select_spans(spans, step=4, file_bytes=3 * DETAIL_BYTES) == []


@given(timelines(), st.floats(0, 40), st.floats(0.1, 40))
def test_usage_is_the_seconds_within_the_window(spans: list[Span], start: float, length: float) -> None:
    found = usage(spans, start, start + length)
    got = {(w, kind): s for w, kinds in found.seconds.items() for kind, s in kinds.items()}
    before = sums(spans, start)
    assert_same(got, {key: s - before[key] for key, s in sums(spans, start + length).items()})
    for worker in found.seconds:
        assert 0 <= found.utilisation(worker) <= 1


@given(timelines(), st.lists(st.floats(0.05, 9), min_size=1, max_size=9))
def test_windows_at_once_are_windows_one_by_one(spans: list[Span], lengths: list[float]) -> None:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    windows = list(zip([0.0, *ends], ends, strict=False))[::2]  # with gaps
    at_once = usages(spans, windows)
    for (start, stop), found in zip(windows, at_once, strict=True):
        alone = usage(spans, start, stop)
        assert found.seconds.keys() == alone.seconds.keys()
        assert found.idle() == pytest.approx(alone.idle())


def test_the_bubble_share_by_hand() -> None:
    """Ten seconds: one sampler works 8, the other 6 of which 1 twice, the trainer trains 3 and waits 5."""
    spans = [
        span("sampler-0", Kind.PREFILL, 0, 2),
        span("sampler-0", Kind.DECODE, 2, 8),
        span("sampler-1", Kind.DECODE, 4, 9),
        span("sampler-1", Kind.PUBLISH, 8, 12),
        span("trainer", Kind.WAIT, 0, 5),
        span("trainer", Kind.TRAIN, 5, 8),
        span("grader-0", Kind.START, 9, 10),
    ]
    found = usage(spans, 0, 10)
    shares = {name: round(found.utilisation(name), 9) for name in found.seconds}
    assert shares == {"sampler-0": 0.8, "sampler-1": 0.6, "trainer": 0.3, "grader-0": 0.0}
    assert list(shares) == ["sampler-0", "sampler-1", "trainer", "grader-0"]
    assert found.idle("samplers") == pytest.approx(0.3)
    assert found.idle("trainer") == pytest.approx(0.7)
    assert found.idle() == pytest.approx((0.2 + 0.4 + 0.7 + 1.0) / 4)
    assert found.idle("nobody") is None


def test_workers_belong_to_pools() -> None:
    names = ["loop", "graders", "grader-1", "trainer", "sampler-10", "sampler-9", "sampler"]
    assert sort_workers(names) == [
        "sampler",
        "sampler-9",
        "sampler-10",
        "trainer",
        "grader-1",
        "graders",
        "loop",
    ]
    pools = ["samplers"] * 3 + ["trainer"] + ["graders"] * 2 + ["loop"]
    assert [pool_of(name) for name in sort_workers(names)] == pools


def test_a_gap_that_is_drawn_over_is_not_worked_through() -> None:
    """Passes of 2 ms with 4 ms of nothing between them were 99.9 % busy once their spans had been joined."""
    passes = [
        Span(worker="sampler-0", kind=Kind.DECODE, start=0.006 * i, stop=0.006 * i + 0.002)
        for i in range(500)
    ]
    (one,) = select_spans(passes, step=1, file_bytes=0)
    read = Span.of(one.to_json())
    assert usage([read], 0.0, 3.0).utilisation("sampler-0") == pytest.approx(1 / 3, rel=0.01)
    assert read.seconds == pytest.approx(1.0, rel=0.01)


def test_what_lies_within_an_earlier_span_counts_once() -> None:
    """A span inside another one of its worker took its seconds off again: 10 of 20 s read as 5."""
    outer, inner = (Span(worker="w", kind=Kind.TRAIN, start=a, stop=b) for a, b in ((0.0, 10.0), (2.0, 5.0)))
    assert usage([outer, inner], 0.0, 20.0).utilisation("w") == pytest.approx(0.5)
