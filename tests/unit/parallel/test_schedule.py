"""Pipeline schedules: each computation once and in order, no deadlock, the published bubbles and bounds.

Laws over P ranks, V chunks per rank and M microbatches, drawn by hypothesis; the small ones also all of them.
"""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.plain_schedule import bubble, peaks, rendezvous, timing

from ostinato.parallel.schedule import (
    Compute,
    Deadlock,
    Pass,
    Receive,
    Schedule,
    Send,
    count_in_flight,
    list_actions,
    order_computes,
)

SIZES = st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 40))


def training(virtual: int) -> Schedule:
    return Schedule.training(virtual)


def forwards(order: tuple[Compute, ...]) -> list[Compute]:
    return [one for one in order if one.is_forward]


@given(SIZES)
def test_every_chunk_sees_every_microbatch_once_in_each_direction_and_in_order(sizes):
    ranks, virtual, parts = sizes
    order = order_computes(training(virtual), ranks=ranks, virtual=virtual, parts=parts)
    for rank, own in enumerate(order):
        assert {one.chunk for one in own} == set(range(rank, ranks * virtual, ranks))
        for chunk, direction in product(range(rank, ranks * virtual, ranks), Pass):
            seen = [one.part for one in own if one.chunk == chunk and one.direction is direction]
            assert seen == list(range(parts))  # the order in which gradients are summed


@given(SIZES)
def test_the_order_of_forwards_is_the_same_on_all_ranks_and_without_backwards(sizes):
    ranks, virtual, parts = sizes
    order = order_computes(training(virtual), ranks=ranks, virtual=virtual, parts=parts)
    alone = order_computes("forward", ranks=ranks, virtual=virtual, parts=parts)
    as_rank_0 = [(one.chunk, one.part) for one in forwards(order[0])]
    for rank in range(ranks):
        assert [(one.chunk - rank, one.part) for one in forwards(order[rank])] == as_rank_0
        assert list(alone[rank]) == forwards(order[rank])


@given(SIZES, st.booleans())
def test_no_deadlock_where_nothing_is_buffered(sizes, train):
    ranks, virtual, parts = sizes
    name = training(virtual) if train else Schedule.FORWARD
    rendezvous(list_actions(name, ranks=ranks, virtual=virtual, parts=parts))


@given(SIZES, st.booleans())
def test_both_ends_of_every_transfer_are_there_and_in_one_order(sizes, train):
    ranks, virtual, parts = sizes
    name = training(virtual) if train else Schedule.FORWARD
    lists = list_actions(name, ranks=ranks, virtual=virtual, parts=parts)
    for a, b in product(range(ranks), repeat=2):
        sent = [one.compute for one in lists[a] if isinstance(one, Send) and one.receiver == b]
        assert sent == [one.compute for one in lists[b] if isinstance(one, Receive) and one.source == a]
    hops = (ranks * virtual - 1) * parts * (ranks > 1)
    transfers = sum(isinstance(one, Send) for listed in lists for one in listed)
    assert transfers == (2 if train else 1) * hops


@given(SIZES)
def test_1f1b_keeps_what_is_left_of_the_pipeline_in_flight(sizes):
    ranks, _, parts = sizes
    for rank, listed in enumerate(list_actions("1f1b", ranks=ranks, parts=parts)):
        assert peaks(listed).in_flight == min(parts, ranks - rank)
        assert peaks(listed).waiting <= 2  # boundary tensors: one in use next, one announced
        assert count_in_flight("1f1b", rank=rank, ranks=ranks, parts=parts) == min(parts, ranks - rank)


@given(SIZES)
def test_in_flight_is_what_counting_says(sizes):
    ranks, virtual, parts = sizes
    for name in (training(virtual), Schedule.FORWARD):
        for rank, listed in enumerate(list_actions(name, ranks=ranks, virtual=virtual, parts=parts)):
            formula = count_in_flight(name, rank=rank, ranks=ranks, virtual=virtual, parts=parts)
            assert formula == peaks(listed).in_flight


@given(SIZES)
def test_one_rank_is_the_plain_loop(sizes):
    _, _, parts = sizes
    (own,) = list_actions("1f1b", ranks=1, parts=parts)
    both = (Pass.FORWARD, Pass.BACKWARD)
    assert list(own) == [Compute(direction, 0, part) for part in range(parts) for direction in both]
    assert timing("1f1b", ranks=1, parts=parts).bubble == 0


@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 6))
def test_interleaved_keeps_what_the_paper_says(ranks, virtual, groups):
    """arXiv 2104.04473 section 2.2.2, of whole groups; rank 0 keeps (1 + (P - 1) / (P V)) times 1F1B."""
    sizes = {"ranks": ranks, "virtual": virtual, "parts": groups * ranks}
    pairs = count_in_flight("interleaved", rank=0, **sizes)
    limit = ranks * virtual + ranks - 1  # pairs of 1 / (P V) of the layers; 1F1B keeps P of 1 / P
    assert pairs == min(limit, virtual * groups * ranks)
    assert limit / (ranks * virtual) == pytest.approx(1 + (ranks - 1) / (ranks * virtual))


@given(st.integers(1, 8), st.integers(1, 60), st.floats(0.1, 5), st.floats(0.1, 5))
def test_the_bubble_of_1f1b_is_the_published_one(ranks, parts, forth, back):
    found = timing("1f1b", ranks=ranks, parts=parts, seconds=lambda one: forth if one.is_forward else back)
    assert found.seconds == pytest.approx((parts + ranks - 1) * (forth + back))
    assert found.bubble == pytest.approx(bubble(ranks=ranks, parts=parts))
    assert found.bubble == pytest.approx((ranks - 1) / (parts + ranks - 1))


@given(st.integers(1, 8), st.integers(2, 4), st.integers(0, 30))
def test_the_bubble_of_interleaved_is_the_published_one(ranks, virtual, more):
    """Published for multiples of P, and here the same for every M from P on."""
    sizes = {"ranks": ranks, "virtual": virtual, "parts": ranks + more}
    found = timing("interleaved", **sizes)
    assert found.bubble == pytest.approx(bubble(**sizes))
    waits = (found.seconds - found.busy[0]) / found.busy[0]
    assert waits == pytest.approx((ranks - 1) / (virtual * sizes["parts"]))  # t_pb / t_id of the paper
    forward = timing("forward", **sizes)
    assert forward.seconds == pytest.approx(virtual * sizes["parts"] + ranks - 1)


@given(SIZES)
def test_the_formula_of_the_bubble_is_a_lower_bound(sizes):
    ranks, virtual, parts = sizes
    found = timing(training(virtual), ranks=ranks, virtual=virtual, parts=parts)
    assert found.bubble >= bubble(ranks=ranks, virtual=virtual, parts=parts) - 1e-9


@given(SIZES, st.floats(0, 3))
def test_transfers_that_take_time_never_make_it_shorter(sizes, transfer):
    ranks, virtual, parts = sizes
    plain = timing(training(virtual), ranks=ranks, virtual=virtual, parts=parts)
    slow = timing(training(virtual), ranks=ranks, virtual=virtual, parts=parts, transfer=transfer)
    assert slow.seconds >= plain.seconds - 1e-9
    assert slow.busy == pytest.approx(plain.busy)


def test_the_slowest_stage_sets_the_pace():
    def seconds(one: Compute) -> float:
        return (2.0 if one.chunk == 3 else 1.0) * (1.0 if one.is_forward else 2.0)  # with the head

    found = timing("1f1b", ranks=4, parts=100, seconds=seconds)
    assert found.busy[3] == pytest.approx(600) and found.busy[0] == pytest.approx(300)
    assert 600 + 3 * 3 <= found.seconds <= 600 + 3 * 6


@pytest.mark.parametrize(("parts", "groups"), [(11, (6, 5)), (8, (4, 4)), (5, (5,)), (7, (7,)), (3, (3,))])
def test_groups_where_microbatches_do_not_come_out_even(parts, groups):
    (first, *_) = order_computes("forward", ranks=4, virtual=2, parts=parts)
    runs, size = [], 1
    for before, after in pairwise(first):
        if before.chunk == after.chunk:
            size += 1
        else:
            runs, size = [*runs, size], 1
    runs.append(size)
    assert tuple(runs[::2]) == groups and tuple(runs[1::2]) == groups  # through the first chunk, the second


def test_a_ring_of_ranks_that_wait_is_found_and_named():
    there, back = Compute(Pass.FORWARD, 0, 0), Compute(Pass.BACKWARD, 1, 0)
    lists = (
        [there, Send(there, 1), Receive(back, 1)],
        [Compute(Pass.FORWARD, 1, 0), Send(back, 0), Receive(there, 0)],
    )
    with pytest.raises(ValueError, match="rank 1 runs the forward of microbatch 0 through chunk 1 before"):
        rendezvous(lists)
    lists[1].pop(0)
    with pytest.raises(Deadlock, match=r"rank 0 waits to send the forward of .* to rank 1; rank 1"):
        rendezvous(lists)


@pytest.mark.parametrize(
    ("name", "changed", "output"),
    [
        ("1f1b", {"virtual": 2}, "1f1b was requested with 2 chunks per rank; use interleaved"),
        ("gpipe", {}, "'gpipe'; use one of 1f1b, interleaved, forward"),
        ("1f1b", {"parts": 0}, "parts 0; use at least 1"),
        ("forward", {"ranks": 0}, "ranks 0; use at least 1"),
    ],
)
def test_what_is_refused(name, changed, output):
    with pytest.raises(ValueError, match=output):
        order_computes(name, **{"ranks": 2, "virtual": 1, "parts": 3, **changed})
