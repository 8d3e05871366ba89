"""The parts of the pool and of the engine on vLLM, each by itself; what they do together is in the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from small_pool import Fault, World, group, publication, run

from ostinato.engine.pool_calls import Results
from ostinato.engine.pool_dispatch import OpenCalls
from ostinato.engine.pool_publications import Publications
from ostinato.engine.pool_worker import Fleet, Worker
from ostinato.engine.serve import empty
from ostinato.engine.vllm_http import Reply, Unreachable
from ostinato.engine.vllm_served import Lives, Policy, Served
from ostinato.jobs import least_loaded
from ostinato.types import Stop
from ostinato.workers.lost import WorkerLost
from ostinato.workers.restarts import Restarts

ADAPTER = Policy(version=1, fingerprint="f1", folder=Path("a"), digest="d1")


def test_a_policy_is_published_when_every_worker_of_its_time_has_proved_it() -> None:
    books = Publications(publication)
    books.remember("p0", 3, [])
    assert books.publish(7, 1, {0, 1, 2}).answers == (("p0", 3, ()),)
    books.proved(0, 1)
    assert not books.publish(88, 2, {0, 1}).answers
    books.proved(1, 2)  # the first one was replaced before it was sent
    assert not books.take()
    books.lost(2)
    assert [(one.version, one.workers, one.bytes) for one in books.take()] == [(1, 1, 1)]
    books.proved(0, 2)
    assert [(one.version, one.workers, one.bytes) for one in books.take()] == [(2, 2, 4)]


def test_calls_are_dealt_answered_once_and_leave() -> None:
    one = Worker(0, Mock(), 2, 1.0, Mock(), Mock())  # it sends nothing
    queue, calls = Results(), OpenCalls(least_loaded, lambda: {0: one}, 0.0, Counter())
    first, second, third = (calls.add(i, request, 0.0, queue) for i, request in enumerate(group(0, 3)))
    calls.place()
    assert [*one.calls] == [first.id, second.id] and [*calls.waiting] == [third.id] and len(calls) == 3
    assert calls.answered(one, second.id, empty(Stop.EOS))
    assert queue.get_nowait()[0] == 1  # type: ignore[index]
    with pytest.raises(WorkerLost, match="which it does not have"):
        calls.answered(one, second.id, empty(Stop.EOS))
    calls.abandon([first])
    calls.fail(RuntimeError("closed"))
    assert isinstance(queue.get_nowait(), RuntimeError) and queue.empty() and len(calls) == 1


def test_a_worker_is_replaced_in_its_place_until_the_end() -> None:
    losses, failures = list[str](), list[str]()

    def proved(worker: Worker, version: int) -> None:
        fleet.proved(worker.id)

    fleet = Fleet(
        count=2,
        spawn=World({(1, 0): Fault("raise", at=5)}).spawn,
        new_worker=partial(Worker, slots=8, silence_s=20.0, on_reply=Mock(), on_proof=proved),
        policy=lambda: publication(0, 0),
        start_s=50.0,
        restarts=Restarts(most=1),
        on_loss=lambda place, worker, lost: losses.append(f"{place.id}: {lost}"),
        on_failure=lambda error: failures.append(str(error)),
    )

    async def main() -> None:
        fleet.begin()
        await fleet.ready()
        await asyncio.sleep(20.0)
        assert sorted(fleet.serving) == [0, 1] and losses == ["1: ConnectionError: the actor died"]
        await fleet.close()

    run(main())
    assert failures == ["the pool was closed"] and not fleet.serving


class Scripted(Served):
    """Notes its calls, and answers them without a network; ``digest`` is of what it has read."""

    calls, label_there, digest = list[str](), "default", "d1"

    def _call(self, method: str, path: str, body: Any = None) -> Reply:
        self.calls.append(path.partition("?")[0].split("/")[-1])
        self.label_there = (body or {}).get("new_version", self.label_there)
        told = {"data": [], "weight_version": self.label_there, "results": [self.digest]}
        return Reply(status=200, body=told)


def test_an_adapter_is_replaced_between_pause_and_label_and_versions_are_by_label() -> None:
    served = Scripted(Mock(), 1.0)
    served.install(ADAPTER)
    replaced = ["models", "load_lora_adapter", "collective_rpc"]
    assert served.calls == ["pause", *replaced, "update_weight_version", "resume", "weight_info"]
    spans = [{"version": "1:f1", "start": 0, "end": 2}]
    assert served.versions(ADAPTER, {"token_ids": [5, 6], "weight_versions": spans}).tolist() == [1, 1]
    with pytest.raises(Unreachable, match="answered as policy -1"):
        served.versions(ADAPTER, {"token_ids": [5], "weight_versions": None})
    served.digest = "d9"
    with pytest.raises(WorkerLost, match="where d1 was written"):
        served.install(ADAPTER)


def test_a_lost_server_gets_its_policy_in_the_next_life_at_most_so_often() -> None:
    gone, counters, restarts = Unreachable("gone"), Counter[str](), Restarts(most=2)
    server, install = Mock(why=lambda: "no log"), Mock(side_effect=[gone, None, None, gone])
    lives = Lives(server=server, start=Mock(), install=install, restarts=restarts, counters=counters)
    lives.publish(ADAPTER)
    lives.recover(0, "found lost in the life before")
    assert install.call_count == 2 and lives.epoch == counters["workers/restarts"] == 1
    restarts.worked()
    lives.recover(1, "silent")
    with pytest.raises(WorkerLost, match="lost 3 times in a row: gone; no log"):
        lives.recover(2, "silent")
