"""The pool's verdicts: which losses are of the workers, which of a prompt, and when it cannot go on."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loops import jumping, now
from small_pool import Fault, Link, SlowEngine, World, answers, expected, group, mixed, tokens_of

from ostinato.engine.pool import EnginePool
from ostinato.engine.serve import SamplerServer
from ostinato.observe.timeline import Kind
from ostinato.rollout.schedule import least_loaded
from ostinato.types import Publication, Request, Stop
from ostinato.workers.lost import WorkerKind, WorkerLost
from ostinato.workers.suspects import Key, Suspects


def long_answer(tokens: int) -> Request:
    """Of more than so many tokens."""
    groups = (group(place, longest=10 * tokens) for place in range(999))
    return next(one for siblings in groups for one in siblings if len(expected(one)) > tokens)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@example(workers=1, placement=None, slots=16, at_once=True)
@example(workers=3, placement=None, slots=16, at_once=True)
@example(workers=1, placement=None, slots=1, at_once=True)
@given(
    workers=st.integers(1, 3),
    placement=st.one_of(st.none(), st.integers(0, 1000)),
    slots=st.sampled_from([1, 3, 16]),
    at_once=st.booleans(),
)
@jumping
async def test_eight_prompts_that_break_workers_do_not_use_up_the_budget_of_the_workers(
    workers: int, placement: int | None, slots: int, at_once: bool
) -> None:
    """Each kills a worker several times before it is found, which ended the run as five workers lost."""
    places = [place for place in range(99) if len(expected(group(place, 1)[0])) > 2][:16]
    breaking = {f"p{place}" for place in places[::2]}

    place = least_loaded if placement is None else mixed(placement)
    pool = World(make=lambda: SlowEngine(poison=breaking)).pool(workers, place=place, slots=slots)
    calls = [answers(pool, group(one, 1), 0.0 if at_once else 2.0 * one) for one in places]
    found = await asyncio.gather(*calls)
    await pool.close()
    for place, [one] in zip(places, found, strict=True):
        if f"p{place}" in breaking:
            assert one.stop is Stop.ERROR and f"prompt p{place} is quarantined" in one.error
        else:
            assert one.tokens.tolist() == expected(group(place, 1)[0])
    assert pool.counters["workers/quarantined"] == len(breaking) == 8


@pytest.mark.parametrize("blips", [1, 2, 3, 4])
@jumping
async def test_workers_that_are_lost_together_blame_nobody(blips: int) -> None:
    """After two of them all that was in flight ran one prompt at a time, for ever so long."""
    world = World({(number, life): Fault("raise", at=4) for number in range(3) for life in range(blips)})
    groups = [group(place, 1, longest=60) for place in range(18)]
    pool = world.pool(3)
    found = await asyncio.gather(*(answers(pool, requests) for requests in groups))
    assert [tokens_of(one) for one in found] == [[expected(request) for request in one] for one in groups]
    assert pool.counters["workers/quarantined"] == 0
    at = now()
    await pool.close()
    longest = max(len(expected(request)) for [request] in groups)
    undisturbed = blips * (4 + 2 + 4) + 2 + longest
    assert at <= undisturbed + (0 if blips < 4 else longest), "at the worst one half after the other"


@jumping
async def test_a_prompt_whose_host_was_killed_twice_is_not_guilty() -> None:
    """The longest answer is alone on its worker at last: each loss was a try and the proof at once."""
    world = World({(0, 0): Fault("raise", at=9), (0, 1): Fault("raise", at=9)})
    request = long_answer(30)
    pool = world.pool(1)
    found = await answers(pool, [request])
    await pool.close()
    assert tokens_of(found) == [expected(request)]


@jumping
async def test_a_prompt_is_quarantined_in_its_round_and_may_come_again() -> None:
    poison = {"p1"}
    first, again, later = (group(1, 2, step=step) for step in (1, 1, 2))

    pool = World(make=lambda: SlowEngine(poison=poison)).pool(1)
    found = [*await answers(pool, first), *await answers(pool, again)]
    assert [one.stop for one in found] == [Stop.ERROR] * 4
    poison.clear()
    found = await answers(pool, later)
    await pool.close()
    assert tokens_of(found) == [expected(request) for request in later]
    assert pool.counters["workers/quarantined"] == 1


@dataclass(eq=False)
class Bursting(Link):
    """Has no room for a policy beside the calls that run; in all lives but the last."""

    last: bool = False

    async def publish(self, publication: Publication) -> str:
        if self.engine.running and not self.last:
            raise MemoryError("no room for the policy")
        return await super().publish(publication)


@jumping
async def test_a_worker_that_is_lost_to_a_policy_blames_no_prompt() -> None:
    lives: list[Bursting] = []

    async def spawn(number: int) -> Bursting:
        engine = SlowEngine()
        lives.append(Bursting(SamplerServer(engine, "sampler-0", int), engine, last=len(lives) == 3))
        return lives[-1]

    request = long_answer(30)
    pool = EnginePool(spawn, 1, place=least_loaded, publication=numbered)
    calls = asyncio.create_task(answers(pool, [request]))
    for version in range(4):
        pool.publish(0, version)
        await asyncio.sleep(20.0)
    found = await calls
    await pool.close()
    assert tokens_of(found) == [expected(request)] and len(lives) == 4


def numbered(weight: int, version: int) -> Publication:
    return Publication(
        version=version, fingerprint=f"{weight:016x}" if weight else "", payload=b"%d" % weight, size=1
    )


def key(place: int) -> Key:
    return f"p{place}", (0, 1, place)


def test_a_verdict_waits_until_a_cause_that_others_share_has_shown() -> None:
    """A blip strikes a suspect that is alone in its cell: the others are lost a second later."""
    suspects = Suspects(15.0)
    for at in (0.0, 100.0):
        assert not suspects.blame(0, at, [key(1)], "killed")
    assert suspects.blame(0, 200.0, [key(1)], "killed") and suspects.accused
    assert not suspects.judge(214.0)
    suspects.blame(1, 201.0, [key(2)], "killed too")
    assert not suspects.judge(215.0) and not suspects.accused and not suspects.quarantined
    assert suspects.blame(0, 300.0, [key(1)], "out of memory")
    assert suspects.judge(315.0) == [key(1)] and "4 samplers were lost" not in suspects.quarantined[key(1)]


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 64), data=st.data())
def test_the_guilty_one_of_n_is_found_in_log2_n_losses(count: int, data: st.DataObject) -> None:
    breaking = key(data.draw(st.integers(0, count - 1)))
    suspects, lost, held = Suspects(0.0), 0, [key(place) for place in range(count)]
    while breaking not in suspects.quarantined:
        suspects.blame(0, float(lost), held, "out of memory")
        suspects.judge(float(lost))
        lost += 1
        if suspects.cells:  # the cell of the breaking one breaks its worker, the others answer
            held = [one for one in held if suspects.cells[one] == suspects.cells[breaking]]
    assert lost <= 2 + max(1, (count - 1).bit_length()) and [*suspects.quarantined] == [breaking]
    suspects.forget(breaking)
    assert breaking not in suspects.cells and not suspects.accused


@jumping
async def test_a_sampler_that_never_comes_up_is_named_while_another_serves() -> None:
    """The run waited for it for ever, where no worker starts before all are ready."""
    world = World({(1, life): Fault("stillborn") for life in range(99)})
    pool = world.pool(2, max_restarts=2)
    with pytest.raises(WorkerLost, match=r"1 of 2 samplers .* more than 2 times") as error:
        await asyncio.wait_for(pool.ready(), 60)
    await pool.close()
    assert str(error.value).endswith("sampler-1: OSError: no such host")
    assert len(world.links[1]) == 3


@pytest.mark.parametrize("when", ["starts", "works"])
@jumping
async def test_what_no_worker_survives_ends_the_run_as_itself(when: str) -> None:
    """The loss of Ray's head was reported as that of so many samplers."""
    world = World()

    def lost() -> bool:
        return now() >= (1 if when == "starts" else 5)

    async def spawn(number: int) -> Link:
        link = await world.spawn(number)
        collect = link.collect

        async def until(wait_s: float) -> object:
            if lost():
                raise WorkerLost(WorkerKind.CLUSTER, "the head has not answered for 15 s", final=True)
            return await collect(wait_s)

        if lost():
            raise WorkerLost(WorkerKind.CLUSTER, "the head has not answered for 15 s", final=True)
        link.collect = until  # type: ignore[method-assign]
        return link

    pool = EnginePool(spawn, 3, place=least_loaded, publication=numbered)
    calls = [asyncio.create_task(answers(pool, group(place, longest=90))) for place in range(4)]
    for one in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(one, WorkerLost) and one.kind is WorkerKind.CLUSTER
    assert now() < 10
    await pool.close()
    assert pool.counters["workers/restarts"] == 0


@dataclass(eq=False)
class Loading(Link):
    """Its first policy takes a while."""

    async def publish(self, publication: Publication) -> str:
        if not self.engine.version:
            await asyncio.sleep(10.0)
        return await super().publish(publication)


@jumping
async def test_a_policy_is_booked_when_those_who_serve_have_proved_it() -> None:
    """One that was starting had minutes to do so: they were reported as the seconds of a publication. They
    are a part of its start."""
    clock, lives = time.time(), [0, 0]

    async def spawn(number: int) -> Link:
        engine, lives[number] = SlowEngine(), lives[number] + 1
        fault = Fault("raise", at=20) if (number, lives[number]) == (1, 1) else None
        return Loading(SamplerServer(engine, f"sampler-{number}", int), engine, fault)

    pool = EnginePool(spawn, 2, place=least_loaded, publication=numbered)
    pool.publish(7, 1)
    await pool.ready()
    await asyncio.sleep(12.0)  # sampler-1 is lost, and begins anew
    pool.publish(8, 2)
    await asyncio.sleep(1.0)
    [booked] = pool.take_publications()
    assert (booked.version, booked.bytes) == (2, 1)
    await pool.ready()
    assert not pool.take_publications()
    gauges = pool.gauges()
    assert gauges["workers/restarts"] == 0, "a row without losses says so"
    await pool.close()
    spans = [span for span in pool.take_spans() if span.kind is Kind.START]
    assert len(spans) == 3 and all(span.start >= clock for span in spans)
