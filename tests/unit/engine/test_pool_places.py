"""The pool: who gets what, as its placement says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from small_pool import (
    Fault,
    World,
    answers,
    expected,
    group,
    run,
    said,
)

from ostinato.engine.pool_calls import Call
from ostinato.jobs import Job, Plan, Worker
from ostinato.rollout.schedule import placement
from ostinato.types import Completion, Request, Sampling


def test_calls_wait_in_the_pool_where_placement_can_still_choose() -> None:
    """Longest first by prediction, with one slot: the order of the answers is that of the predictions."""

    def longest_first(waiting: Sequence[Job], workers: Sequence[Worker]) -> Plan:
        order = sorted(waiting, key=lambda job: -job.predicted)
        free = [worker.id for worker in workers for _ in range(worker.slots - len(worker.jobs))]
        return Plan(starts=tuple((job.id, to) for job, to in zip(order, free, strict=False)))

    async def main() -> list[int]:
        pool = World().pool(
            1, slots=1, place=longest_first, expect=lambda request: float(request.seed[2] % 4 + 1)
        )
        await pool.ready()
        order = [index async for index, _ in pool.generate([group(place, 1)[0] for place in range(4)])]
        await pool.close()
        return order

    assert run(main()) == [3, 2, 1, 0]


def test_the_next_turn_of_a_conversation_goes_where_its_beginning_is() -> None:
    world = World()

    async def main() -> list[int]:
        pool = world.pool(3)
        await pool.ready()
        homes = []
        for _ in range(5):
            before = [link.engine.counters["decoded"] for [link] in world.links.values()]
            await answers(pool, group(2, 1))
            after = [link.engine.counters["decoded"] for [link] in world.links.values()]
            homes.append([a > b for a, b in zip(after, before, strict=True)].index(True))
        await pool.close()
        return homes

    assert len(set(run(main()))) == 1


@pytest.mark.parametrize("name", ["least-loaded", "longest-first", "histopipe"])
def test_every_placement_of_a_recipe_gives_the_same_answers(name: str) -> None:
    world = World({(1, 0): Fault("raise", at=9)})
    groups = [group(place, 4, step=1 + place // 6) for place in range(12)]

    async def main() -> list[list[Completion]]:
        pool = world.pool(
            3, place=placement(name), slots=4, expect=lambda request: float(request.seed[2] * 3 % 20)
        )
        found = await asyncio.gather(*(answers(pool, requests) for requests in groups))
        await pool.close()
        return list(found)

    for requests, found in zip(groups, run(main()), strict=True):
        assert said(found) == [expected(request) for request in requests]


def test_a_seed_path_says_who_are_siblings() -> None:
    def job(*seed: int) -> Job:
        request = Request(tokens=np.ones(3, np.int32), sampling=Sampling(), seed=seed)
        call = Call(id=7, index=0, request=request, results=asyncio.Queue(), expected=0.0)
        return call.job()

    assert (job(0, 4, 11, 2).step, job(0, 4, 11, 2).place) == (4, 11)
    assert job(0, -1, 3, 11, 2).place == 11, "an evaluation in lanes"
    assert job(5, 2).place == 7, "nobody's sibling"
    assert job(0, 4, 11, 2).predicted == float("inf")
