"""The parts of a pool, each by itself: publications, calls that have not ended, lives of workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from small_pool import Fault, World, group, publication, run

from ostinato.engine.pool_calls import Results
from ostinato.engine.pool_dispatch import OpenCalls
from ostinato.engine.pool_publications import Publications
from ostinato.engine.pool_worker import Fleet, Place, State, Worker, sampler_lost
from ostinato.engine.serve import empty
from ostinato.jobs import Job, Plan, least_loaded
from ostinato.jobs import Worker as JobWorker
from ostinato.types import Completion, Stop
from ostinato.workers.lost import WorkerLost
from ostinato.workers.restarts import Restarts

# ---- publications


def test_a_policy_is_published_when_every_worker_of_its_time_has_proved_it() -> None:
    books = Publications(publication)
    books.publish(7, 1, {0, 1, 2})
    books.proved(0, 1)
    books.publish(88, 2, {0, 1})
    books.proved(1, 2)  # the first one was replaced before it was sent
    assert not books.take()
    books.lost(2)
    [first] = books.take()
    assert (first.version, first.workers, first.bytes) == (1, 1, 1)
    books.proved(0, 2)
    [second] = books.take()
    assert (second.version, second.workers, second.bytes) == (2, 2, 4) and not books.take()


def test_what_no_worker_serves_yet_is_a_part_of_their_start() -> None:
    books = Publications(publication)
    books.publish(7, 1, ())
    assert books.current.version == 1 and not books.take()
    books.publish(8, 2, {0})
    books.forget()
    books.proved(0, 2)
    assert not books.take()


def test_answers_go_once_and_a_policy_that_cannot_be_packed_changes_nothing() -> None:
    def packed(weight: Any, version: int) -> Any:
        if weight is None:
            raise ValueError("not finite")
        return publication(weight, version)

    books = Publications(packed)
    books.remember("p0", 3, [])
    with pytest.raises(ValueError, match="not finite"):
        books.publish(None, 1, {0})
    assert books.current.version == 0
    assert books.publish(7, 1, {0}).answers == (("p0", 3, ()),) and not books.current.answers
    assert not books.publish(8, 2, {0}).answers


# ---- calls


def worker(id: int, slots: int = 8) -> Worker:
    """One that is dealt to, and sends nothing."""
    return Worker(id, None, slots=slots, silence_s=1.0, on_reply=print, on_proof=print)  # type: ignore[arg-type]


def open_calls(*workers: Worker, place: Any = least_loaded) -> OpenCalls:
    return OpenCalls(place, lambda: {one.id: one for one in workers}, 0.0, Counter())


def results_of(queue: Results) -> list[tuple[int, Completion]]:
    found = []
    while not queue.empty():
        result = queue.get_nowait()
        assert not isinstance(result, BaseException)
        found.append(result)
    return found


def test_calls_are_dealt_answered_once_and_leave() -> None:
    one, queue = worker(0, slots=2), Results()
    calls = open_calls(one)
    first, second, third = (calls.add(i, request, 0.0, queue) for i, request in enumerate(group(0, 3)))
    calls.place()
    assert [*one.calls] == [first.id, second.id] and [*calls.waiting] == [third.id] and len(calls) == 3
    assert calls.answered(one, second.id, empty(Stop.EOS))
    assert not calls.answered(one, first.id, empty(Stop.ERROR, "no"))
    with pytest.raises(WorkerLost, match="which it does not have"):
        calls.answered(one, second.id, empty(Stop.EOS))
    assert [index for index, _ in results_of(queue)] == [1, 0] and len(calls) == 1
    again = calls.add(0, second.request, 0.0, queue)
    assert again.home == 0, "where its beginning is"


def test_whoever_gives_up_leaves_nothing_behind() -> None:
    one, queue = worker(0, slots=1), Results()
    calls = open_calls(one)
    mine = [calls.add(i, request, 0.0, queue) for i, request in enumerate(group(0, 3))]
    calls.place()
    calls.abandon(mine)
    assert not len(calls) and not calls.waiting and not one.all_calls and queue.empty()
    calls.add(0, group(1)[0], 0.0, queue)
    calls.fail(RuntimeError("closed"))
    assert isinstance(queue.get_nowait(), RuntimeError) and queue.empty()


@pytest.mark.parametrize("there", [True, False])
def test_a_call_moves_with_what_it_has(there: bool) -> None:
    def to_the_other(waiting: list[Job], workers: list[JobWorker]) -> Plan:
        held = [(job.id, 1) for one in workers for job in one.jobs if one.id == 0]
        return Plan(starts=tuple((job.id, 0) for job in waiting), moves=tuple(held))

    one, other, queue = worker(0), worker(1), Results()
    alive = {0: one, 1: other}
    counters = Counter[str]()
    calls = OpenCalls(to_the_other, lambda: alive, 0.0, counters)  # type: ignore[arg-type]
    call = calls.add(0, group(0)[0], 0.0, queue)
    calls.place()
    one._outbox.clear()  # it was sent
    call.handed, call.generated = True, 3
    calls.place()
    assert call.going_to == 1 and call in one.all_calls
    if not there:
        del alive[1]
    assert not calls.answered(one, call.id, empty(Stop.ABORT))
    assert (call in other.all_calls) == there and (call.id in calls.waiting) != there
    assert counters["workers/migrated"] == 1 and queue.empty()


def test_a_prompt_that_was_lost_with_others_runs_alone_and_is_quarantined_at_last() -> None:
    queue, lives = Results(), 0
    broken, sound = group(0, 1)[0], group(1, 1)[0]
    alive: dict[int, Worker] = {}
    counters = Counter[str]()
    calls = OpenCalls(least_loaded, lambda: alive, 0.0, counters)
    for index, request in enumerate((broken, sound)):
        calls.add(index, request, 0.0, queue)
    while calls.waiting and lives < 9:
        alive[0] = one = worker(0)
        calls.place()
        for call in [*one.calls.values()]:
            call.handed = True
        if any(call.request is broken for call in one.calls.values()):
            lives += 1
            calls.take_back(one, sampler_lost("died"), float(lives))
            calls.judge(float(lives))
        else:
            [id] = one.calls
            assert calls.answered(one, id, empty(Stop.EOS))
    found = dict(results_of(queue))
    assert found[1].stop is Stop.EOS and "prompt p0 is quarantined" in found[0].error and lives <= 4
    assert counters["workers/quarantined"] == 1 and counters["workers/redispatched"] >= lives
    calls.add(0, replace(broken, seed=(*broken.seed[:-1], 5)), 0.0, queue)
    assert "quarantined" in results_of(queue)[0][1].error and not len(calls)


# ---- lives


def fleet(world: World, count: int, **options: Any) -> tuple[Fleet, list[str], list[Exception]]:
    """Its losses and its failures are noted."""
    losses, failures = list[str](), list[Exception]()

    def lost(place: Place, held: Worker | None, error: WorkerLost) -> None:
        losses.append(f"{place.id}: {error} {'with' if held else 'without'} calls")
        place.restarts.in_a_row += 1

    def new_worker(id: int, sampler: Any) -> Worker:
        def proved(one: Worker, version: int) -> None:
            made.proved(id)

        return Worker(id, sampler, slots=8, silence_s=20.0, on_reply=lambda *one: None, on_proof=proved)

    settings: dict[str, Any] = {"start_s": 50.0, "restarts": Restarts(most=1), **options}
    made = Fleet(
        count=count,
        spawn=world.spawn,
        new_worker=new_worker,
        policy=lambda: publication(0, 0),
        on_loss=lost,
        on_failure=failures.append,
        **settings,
    )
    return made, losses, failures


def test_a_worker_is_replaced_in_its_place() -> None:
    async def main() -> None:
        workers, losses, failures = fleet(World({(1, 0): Fault("raise", at=5)}), 2)
        workers.begin()
        await workers.ready()
        assert [place.status()["state"] for place in workers.places] == ["serving", "serving"]
        assert sorted(workers.serving) == [0, 1] and not workers.proved(0)
        await asyncio.sleep(20.0)
        assert losses == ["1: ConnectionError: the actor died with calls"] and not failures
        assert sorted(workers.serving) == [0, 1] and workers.places[1].cause.endswith("the actor died")
        await workers.close()
        assert [str(error) for error in failures] == ["the pool was closed"] and not workers.serving
        assert {place.state for place in workers.places} == {State.LOST}

    run(main())


def test_it_ends_when_the_budget_of_all_places_is_spent() -> None:
    async def main() -> None:
        faults = {(place, life): Fault("stillborn") for place in range(2) for life in range(9)}
        workers, losses, failures = fleet(World(faults), 2)
        workers.begin()
        with pytest.raises(WorkerLost, match="of 2 samplers were lost more than 1 times"):
            await workers.ready()
        await asyncio.sleep(20.0)
        assert len(losses) == 4 and len(failures) == 1 and workers.failure is failures[0]

    run(main())


def test_a_final_loss_and_a_fault_of_the_supervision_itself_end_it_at_once() -> None:
    async def main(error: Exception) -> Exception:
        async def spawn(id: int) -> Any:
            return (await World().spawn(id)) if id else None

        def broken(id: int, sampler: Any) -> Worker:
            raise error

        workers, losses, failures = fleet(World(), 1)
        workers = Fleet(
            count=2,
            spawn=spawn,
            new_worker=broken,
            policy=lambda: publication(0, 0),
            start_s=9.0,
            restarts=Restarts(most=1),
            on_loss=lambda *one: losses.append("lost"),
            on_failure=failures.append,
        )
        workers.begin()
        with pytest.raises(type(error)):
            await workers.ready()
        assert not losses
        return failures[0]

    for error in (sampler_lost("the cluster is gone", final=True), KeyError("a bug")):
        assert run(main(error)) is error
