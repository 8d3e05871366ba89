"""The pool: whatever works, wherever, whatever breaks, the same answers, each once, within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import hold_up, jumping, now, run
from small_pool import (
    EOS,
    Fault,
    SlowEngine,
    World,
    answers,
    expected,
    fingerprint,
    group,
    mixed,
    publication,
    token_at,
    tokens_of,
)

from ostinato.engine.pool import Call
from ostinato.launch.drafts import SeenLengths
from ostinato.observe.timeline import Kind
from ostinato.protocols import Job, Starts, Worker
from ostinato.rollout.schedule import find_placement, place_least_loaded
from ostinato.types import Completion, Request, Sampling
from ostinato.workers.remote import WorkerLost

ONE_LIFE = ("raise", "hang", "deaf", "pause", "freeze", "old", "forget", "twice", "stale", "mute")


faults = st.dictionaries(
    st.tuples(st.integers(0, 2), st.integers(0, 1)),
    st.builds(Fault, kind=st.sampled_from((*ONE_LIFE, "stillborn")), at=st.floats(0, 40)),
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(
    workers=st.integers(1, 3),
    sizes=st.lists(st.tuples(st.integers(1, 5), st.floats(0, 40)), min_size=1, max_size=6),
    publishes=st.lists(st.floats(0, 40), max_size=5).map(sorted),
    faults=faults,
    placement=st.one_of(st.none(), st.integers(0, 1000)),
    slots=st.integers(1, 8),
)
@jumping
async def test_with_any_workers_placement_and_kills_all_is_answered_by_the_policies_that_it_names(
    workers: int,
    sizes: list[tuple[int, float]],
    publishes: list[float],
    faults: dict[tuple[int, int], Fault],
    placement: int | None,
    slots: int,
) -> None:
    """In flight too; calls hear what came before them, and nothing that was never published."""
    world, place = World(faults), place_least_loaded if placement is None else mixed(placement)
    pool = world.pool(workers, place=place, slots=slots, max_restarts=50)
    pool.publish(7, 0)

    async def publisher() -> None:
        for version, at in enumerate(publishes, start=1):
            await asyncio.sleep(at - now())
            pool.publish(7 + version, version)

    async def ask(number: int, size: int, at: float) -> tuple[int, list[Request], list[Completion]]:
        await asyncio.sleep(at)
        version, requests = pool.served[0], group(number, size)
        return version, requests, await answers(pool, requests)

    publishing = asyncio.create_task(publisher())
    found = await asyncio.gather(*(ask(number, *one) for number, one in enumerate(sizes)))
    await publishing
    await pool.close()
    assert pool.gauges()["workers/calls_waiting"] == 0
    assert not pool._calls, "calls are on their way that were not made"
    for version, requests, completions in found:
        for request, one in zip(requests, completions, strict=True):
            ages = one.versions.tolist()
            assert ages == sorted(ages) and all(version <= age <= len(publishes) for age in ages)
            at = [token_at(request.seed, len(request.tokens) + n, 7 + age) for n, age in enumerate(ages)]
            assert one.tokens.tolist() == at
            assert at[-1] == EOS or len(at) == request.sampling.max_tokens
    assert all(link.engine.most <= slots for lives in world.links.values() for link in lives)


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("raise", "ConnectionError: the actor died"),
        ("raise 7", "ConnectionError: the actor died"),
        ("hang", "silent for 50 s: publishing version 3"),  # it is starting: start_s
        ("hang 1", "silent for 20 s: sampling "),
        ("deaf 1", "silent for 20 s: sampling "),
        ("pause 1", "silent for 20 s: sampling "),
        ("freeze", "no progress for 20 s: sampling 4 calls"),
        ("forget", "no progress for 20 s: sampling 4 calls"),
        ("old", "serves version 2; it was sent version 3"),
        ("stale", "answered prompt p0 with tokens of version -1, where 3 to 3 were served"),
        ("twice", "answered call 0, which it does not have"),
        ("mute", "was sent version 3 (0000000000000007) and serves version 3 (something else)"),
        ("stillborn", "OSError: no such host"),
    ],
)
@jumping
async def test_a_worker_that_fails_is_named_replaced_and_its_calls_are_answered(
    fault: str, cause: str
) -> None:
    kind, _, at = fault.partition(" ")
    world = World({(0, 0): Fault(kind, at=float(at or 0))})
    pool = world.pool(1)
    pool.publish(7, 3)
    found = await answers(pool, group(0))
    at, status = now(), pool.status()[0]
    await pool.close()
    assert tokens_of(found) == [expected(request, 7) for request in group(0)]
    assert at < 90, "longer than silence, a start and the answers together"
    assert cause in status["cause"]
    assert pool.counters["workers/restarts"] == 1
    first, second = world.links[0]
    assert first.closed or kind == "stillborn"
    assert second.closed
    assert status["state"] == "serving" and status["version"] == 3 and status["sampled"] > 0


@jumping
async def test_a_policy_that_cannot_be_sent_is_refused_and_the_old_one_stays() -> None:
    def refusing(weight: int, version: int) -> Any:
        if weight < 0:
            raise RuntimeError("adapter tensor a is not finite, so this policy is not published")
        return publication(weight, version)

    pool = World().pool(2, publication=refusing)
    pool.publish(7, 1)
    await pool.ready()
    with pytest.raises(RuntimeError, match="tensor a is not finite"):
        pool.publish(-1, 2)
    found = await answers(pool, group(0))
    await pool.close()
    assert tokens_of(found) == [expected(request, 7) for request in group(0)]
    assert {version for one in found for version in one.versions.tolist()} == {1}


@jumping
async def test_workers_that_are_lost_again_and_again_end_the_run_by_name_and_in_time() -> None:
    world = World({(number, life): Fault("stillborn") for number in range(2) for life in range(9)})
    pool = world.pool(2, max_restarts=5)
    with pytest.raises(WorkerLost) as error:
        await answers(pool, group(0))
    at = now()
    with pytest.raises(WorkerLost):
        await answers(pool, group(1))
    with pytest.raises(WorkerLost):
        await pool.ready()
    await pool.close()
    sentence = str(error.value)
    assert "2 of 2 samplers were lost more than 5 times in a row" in sentence
    assert "more than 5 times" in sentence
    assert "sampler-0: OSError: no such host; sampler-1: OSError: no such host" in sentence
    assert at < 6 * 2 + (0.5 + 1.5 + 3.5 + 7.5) + 1


@jumping
async def test_a_prompt_that_breaks_every_sampler_ends_the_run_by_name() -> None:
    """Others are answered in between, so that no sampler is ever lost too often in a row."""
    pool = World(make=lambda: SlowEngine(poison={"p0"})).pool(2, max_restarts=3)
    others = [asyncio.create_task(answers(pool, group(place), 20.0 * place)) for place in range(1, 9)]
    with pytest.raises(WorkerLost, match=r"prompt p0 was on 4 samplers that were lost, at last: .*of memory"):
        await answers(pool, group(0))
    await asyncio.gather(*others, return_exceptions=True)
    await pool.close()


@jumping
async def test_one_bad_place_does_not_end_a_run_whose_others_are_at_work() -> None:
    """Its losses were counted against a worker that was sampling a long answer all the time."""
    world = World({(0, life): Fault("stillborn") for life in range(99)})
    request = next(
        one for place in range(99) for one in group(place, longest=400) if len(expected(one)) > 150
    )

    pool = world.pool(2, max_restarts=3)
    found = await answers(pool, [request])
    await pool.close()
    assert tokens_of(found) == [expected(request)]
    assert pool.counters["workers/restarts"] > 3


@jumping
async def test_whoever_still_waits_when_the_pool_is_closed_is_told() -> None:
    pool = World().pool(1)
    requested = asyncio.create_task(answers(pool, group(0, longest=1000)))
    await asyncio.sleep(5)
    await pool.close()
    with pytest.raises(RuntimeError, match="the pool was closed"):
        await requested
    with pytest.raises(RuntimeError, match="the pool was closed"):
        await pool.ready()
    assert [row["state"] for row in pool.status()] == ["lost"]


@jumping
async def test_who_goes_away_leaves_nothing_behind() -> None:
    world = World()
    pool = world.pool(2, slots=2)
    await pool.ready()
    task = asyncio.create_task(answers(pool, group(0, 8, longest=10_000)))
    await asyncio.sleep(3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(5)
    assert pool.gauges()["workers/calls_waiting"] == 0
    assert all(not link.engine.running for [link] in world.links.values())
    assert tokens_of(await answers(pool, group(1))) == [expected(request) for request in group(1)]
    assert pool.counters["workers/restarts"] == 0
    await pool.close()


@jumping
async def test_publications_are_booked_when_all_have_proved_them() -> None:
    world = World()
    pool = world.pool(3)
    await pool.ready()
    pool.remember("p0", 1, ())
    pool.publish(12345, 1)
    assert pool.take_publications() == []
    await asyncio.sleep(5)
    [booked] = pool.take_publications()
    assert (booked.version, booked.bytes) == (1, 3 * 5)
    assert pool.served == (1, fingerprint(12345))
    pool.publish(777, 2)  # overtaken before it is on its way: never sent
    pool.publish(778, 3)
    await asyncio.sleep(1)
    overtaken, booked = pool.take_publications()
    assert (overtaken.version, booked.version, booked.bytes) == (2, 3, 3 * 3)
    assert all(row["version"] == 3 or row["running"] == 0 for row in pool.status())
    await pool.close()
    for [link] in world.links.values():
        assert [reported for one in link.sent for reported in one.answers] == [("p0", 1, ())], "sent once"
    kinds = {(span.worker, span.kind) for span in pool.take_spans()}
    assert {(f"sampler-{n}", Kind.START) for n in range(3)} <= kinds
    assert ("sampler-1", Kind.PUBLISH) in kinds
    assert pool.take_spans() == []


@jumping
async def test_a_placement_that_fails_is_told_to_those_who_wait() -> None:
    """It is called from the event loop, which would only log what it raises: everybody waited for ever."""

    def broken(waiting: Sequence[Job], workers: Sequence[Worker]) -> Starts:
        raise KeyError("no such worker")

    pool = World().pool(1, place=broken)
    with pytest.raises(KeyError, match="no such worker"):
        await answers(pool, group(0))


def test_a_pool_that_was_closed_lives_again_in_another_event_loop() -> None:
    pool = World().pool(1)
    for place in (0, 1):
        assert tokens_of(run(answers(pool, group(place)))) == [expected(request) for request in group(place)]


def test_sizes_are_checked_before_any_work() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        World().pool(0)


@jumping
async def test_a_training_step_that_holds_the_event_loop_up_makes_nobody_silent() -> None:
    """A timer of the wait was due before the reply that lay there had passed its tasks: after every step of
    some minutes in the same process all workers were lost."""
    world = World()
    pool = world.pool(2)
    requested = asyncio.create_task(answers(pool, group(0, 8, longest=100)))
    for _ in range(3):
        await asyncio.sleep(4.4)
        hold_up(300.0)
    assert tokens_of(await requested) == [expected(request) for request in group(0, 8, longest=100)]
    await pool.close()
    assert pool.counters["workers/restarts"] == 0


# ---- the pool: who gets what, as its placement says


@jumping
async def test_calls_wait_in_the_pool_where_placement_can_still_choose() -> None:
    """Longest first by prediction, with one slot: the order of the answers is that of the predictions."""

    def longest_first(waiting: Sequence[Job], workers: Sequence[Worker]) -> Starts:
        order = sorted(waiting, key=lambda job: -job.predicted)
        free = [worker.id for worker in workers for _ in range(worker.slots - len(worker.jobs))]
        return tuple((job.id, to) for job, to in zip(order, free, strict=False))

    pool = World().pool(
        1, slots=1, place=longest_first, expect=lambda request: float(request.seed[2] % 4 + 1)
    )
    await pool.ready()
    order = [index async for index, _ in pool.generate([group(place, 1)[0] for place in range(4)])]
    await pool.close()
    assert order == [3, 2, 1, 0]


@jumping
async def test_a_placement_by_lengths_knows_them_without_drafts() -> None:
    """Lengths were those of the history that drafts come from: without drafts a placement by lengths had
    none, and histopipe dealt the first half of a round to the first worker."""
    lengths = SeenLengths()
    pool = World().pool(1, expect=lengths.expect, on_answer=lengths.observe)
    await pool.ready()
    requests = [replace(group(place, 1)[0], uid=str(place)) for place in range(4)]
    assert [lengths.expect(request) for request in requests] == [0.0] * 4
    taken = {index: len(answer.tokens) async for index, answer in pool.generate(requests)}
    await pool.close()
    means = [lengths.expect(request) for request in requests]
    assert (
        sorted(range(4), key=means.__getitem__) == sorted(range(4), key=taken.__getitem__) and min(means) > 0
    )


@jumping
async def test_the_next_turn_of_a_conversation_goes_where_its_beginning_is() -> None:
    world = World()
    pool = world.pool(3)
    await pool.ready()
    homes = []
    for _ in range(5):
        before = [link.engine.counters["decoded"] for [link] in world.links.values()]
        await answers(pool, group(2, 1))
        after = [link.engine.counters["decoded"] for [link] in world.links.values()]
        homes.append([a > b for a, b in zip(after, before, strict=True)].index(True))
    await pool.close()
    assert len(set(homes)) == 1


@pytest.mark.parametrize("name", ["least-loaded", "longest-first", "histopipe"])
@jumping
async def test_every_placement_of_a_recipe_gives_the_same_answers(name: str) -> None:
    world = World({(1, 0): Fault("raise", at=9)})
    groups = [group(place, 4, step=1 + place // 6) for place in range(12)]
    pool = world.pool(
        3, place=find_placement(name), slots=4, expect=lambda request: float(request.seed[2] * 3 % 20)
    )
    found = await asyncio.gather(*(answers(pool, requests) for requests in groups))
    await pool.close()
    for requests, one in zip(groups, found, strict=True):
        assert tokens_of(one) == [expected(request) for request in requests]


def test_a_seed_path_says_who_are_siblings() -> None:
    def job(*seed: int) -> Job:
        request = Request(tokens=np.ones(3, np.int32), sampling=Sampling(), seed=seed)
        call = Call(id=7, index=0, request=request, results=asyncio.Queue(), expected=0.0)
        return call.make_job()

    assert (job(0, 4, 11, 2).step, job(0, 4, 11, 2).place) == (4, 11)
    assert job(0, -1, 3, 11, 2).place == 11, "an evaluation in lanes"
    assert job(5, 2).place == 7, "without siblings"
    assert job(0, 4, 11, 2).predicted == float("inf")
