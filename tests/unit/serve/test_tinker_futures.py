"""Promises of the Tinker server: order, idempotency, and what a restart finds. Needs no SDK."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest

from ostinato.apps.tinker.futures import SAMPLE, Futures
from ostinato.apps.tinker.registry import DONE, FAILED, PENDING, Registry, Result, StoredRequest, UserError


def answer(stored: StoredRequest) -> Result:
    return Result((stored.body or b"").upper())


def play(path: Path, script: Callable[[Futures, Registry, list[str]], Awaitable[None]]) -> list[str]:
    """Run ``script``; the ids of requests in the order in which they were run."""
    ran: list[str] = []

    async def run(stored: StoredRequest) -> Result:
        ran.append(stored.id)
        await asyncio.sleep(0)
        if stored.body == b"wrong":
            raise ValueError("no")
        if stored.body == b"broken":
            raise RuntimeError("ouch")
        if stored.body == b"long":
            await asyncio.Event().wait()
        return answer(stored)

    async def main() -> None:
        registry = Registry(path)
        futures = Futures(registry, run)
        futures.resume()
        try:
            await script(futures, registry, ran)
        finally:
            await futures.close()
            registry.close()

    asyncio.run(main())
    return ran


def test_requests_of_a_model_run_in_their_order_whenever_they_arrive(tmp_path: Path) -> None:
    async def script(futures: Futures, registry: Registry, ran: list[str]) -> None:
        for seq in (2, 3, 0):
            futures.submit(f"m:{seq}", "m", seq, "optim_step", b"%d" % seq)
        waiting = await futures.wait_for_result("m:2", 0.05)
        assert waiting is not None and waiting.state == PENDING and ran == ["m:0"]
        futures.submit("m:1", "m", 1, "optim_step", b"x")
        last = await futures.wait_for_result("m:3", 20)
        assert last is not None and last.state == DONE and last.result == b"3"

    assert play(tmp_path / "r", script) == ["m:0", "m:1", "m:2", "m:3"]


def test_samples_wait_for_nobody_and_a_retry_is_the_same_promise(tmp_path: Path) -> None:
    async def script(futures: Futures, registry: Registry, ran: list[str]) -> None:
        for _ in range(3):
            futures.submit("s:7", "s", 7, SAMPLE, b"a")
        stored = await futures.wait_for_result("s:7", 20)
        assert stored is not None and stored.result == b"A"
        with pytest.raises(UserError, match="seq_id 7 of s was used for another request"):
            futures.submit("s:7", "s", 7, SAMPLE, b"b")
        assert await futures.wait_for_result("s:8", 0.01) is None

    assert play(tmp_path / "r", script) == ["s:7"]


def test_a_failure_is_a_result_and_the_next_one_runs(tmp_path: Path) -> None:
    async def script(futures: Futures, registry: Registry, ran: list[str]) -> None:
        for seq, body in enumerate((b"wrong", b"broken", b"fine")):
            futures.submit(f"m:{seq}", "m", seq, "optim_step", body)
        found = [await futures.wait_for_result(f"m:{seq}", 20) for seq in range(3)]
        assert [one.state for one in found if one] == [FAILED, FAILED, DONE]
        assert found[0] and found[0].result == b'{"error": "no", "category": "user"}'
        assert found[1] and b'"category": "server"' in (found[1].result or b"")

    play(tmp_path / "r", script)


def test_a_restart_runs_what_was_pending_and_nothing_twice(tmp_path: Path) -> None:
    async def first(futures: Futures, registry: Registry, ran: list[str]) -> None:
        futures.submit("m:0", "m", 0, "optim_step", b"a")
        futures.submit("m:1", "m", 1, "optim_step", b"long")
        futures.submit("s:0", "s", 0, SAMPLE, b"long")
        while len(ran) < 3:
            await asyncio.sleep(0.01)
        with closing(sqlite3.connect(tmp_path / "r")) as file:
            file.execute("update requests set body = ? where body = ?", (b"b", b"long"))
            file.commit()

    async def second(futures: Futures, registry: Registry, ran: list[str]) -> None:
        found = [await futures.wait_for_result(id, 20) for id in ("m:0", "m:1", "s:0")]
        assert [one.result for one in found if one] == [b"A", b"B", b"B"]

    play(tmp_path / "r", first)
    assert sorted(play(tmp_path / "r", second)) == ["m:1", "s:0"]


def test_what_ends_the_server_twice_is_failed_and_the_others_go_on(tmp_path: Path) -> None:
    """A request of 206 bytes took all memory, and as it was pending it did so again at every restart: the
    adapters of all clients were lost."""

    async def live(number: int) -> list[str]:
        """A process that dies in the course of "m:1": the next one finds what is in the file then."""
        registry, ran, died = Registry(tmp_path / str(number)), list[str](), asyncio.Event()

        async def run(stored: StoredRequest) -> Result:
            ran.append(stored.id)
            if stored.id == "m:1":
                with (
                    closing(sqlite3.connect(tmp_path / str(number))) as here,
                    closing(sqlite3.connect(tmp_path / str(number + 1))) as file,
                ):
                    here.backup(file)
                died.set()
                await asyncio.Event().wait()
            return answer(stored)

        futures = Futures(registry, run)
        futures.resume()
        if number == 0:
            for seq in range(3):
                futures.submit(f"m:{seq}", "m", seq, "optim_step", b"a")
        if number < 2:
            await asyncio.wait_for(died.wait(), 20)
        else:
            ended = [await futures.wait_for_result(id, 20) for id in ("m:0", "m:1", "m:2")]
            assert [stored.state for stored in ended if stored] == [DONE, FAILED, DONE]
        await futures.close()
        registry.close()
        return ran

    assert asyncio.run(live(0)) == ["m:0", "m:1"]
    assert "m:1" in asyncio.run(live(1))
    assert "m:1" not in asyncio.run(live(2))


def test_a_registry_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    """It did not count starts."""
    with closing(sqlite3.connect(tmp_path / "r")) as old:
        old.execute("create table requests (id text primary key, owner text, seq integer, kind text)")
        old.commit()
    with pytest.raises(ValueError, match=r"cannot be opened as the registry.* no .*starts.* older version"):
        Registry(tmp_path / "r")


def test_a_sample_that_is_cancelled_has_failed(tmp_path: Path) -> None:
    async def script(futures: Futures, registry: Registry, ran: list[str]) -> None:
        futures.submit("s:0", "s", 0, SAMPLE, b"long")
        await asyncio.sleep(0.01)
        futures.cancel("s:0")
        stored = await futures.wait_for_result("s:0", 20)
        assert stored is not None and stored.state == FAILED
        await asyncio.sleep(0.01)
        assert futures.num_samples == 0

    play(tmp_path / "r", script)


def test_bodies_go_with_a_snapshot_and_results_once_they_are_old(tmp_path: Path) -> None:
    async def script(futures: Futures, registry: Registry, ran: list[str]) -> None:
        for seq in range(4):
            futures.submit(f"m:{seq}", "m", seq, "optim_step", b"a")
        futures.submit("s:0", "s", 0, SAMPLE, b"a")
        await futures.wait_for_result("m:3", 20)
        await futures.wait_for_result("s:0", 20)
        registry.forget_bodies("m", 2)
        bodies = [(registry.get_request(f"m:{seq}") or pytest.fail("gone")).body for seq in range(4)]
        assert bodies == [b"a", None, None, b"a"]  # the first makes the model, the last is in no snapshot
        assert [one.seq for one in registry.list_ended("m", 2)] == [3]
        registry.purge(3600, 3600)
        assert registry.get_request("s:0") is not None
        registry.purge(-1, 3600)
        assert registry.get_request("s:0") is None and registry.get_request("m:3") is not None

    play(tmp_path / "r", script)


def test_things_are_kept_by_kind_and_owner(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "r")
    registry.put("model", "a", {"x": 1}, owner="s")
    registry.put("model", "b", {"x": 2}, owner="t")
    registry.put("model", "a", {"x": 3}, owner="s")
    assert registry.get("model", "a") == {"x": 3} and registry.get("sampler", "a") is None
    assert [id for id, _, _ in registry.list_all("model")] == ["b", "a"]
    assert [id for id, _, _ in registry.list_all("model", "s")] == ["a"]
    registry.delete("model", "a")
    registry.close()
    assert [id for id, _, _ in Registry(tmp_path / "r").list_all("model")] == ["b"]


def test_polls_end_when_the_server_does(tmp_path: Path) -> None:
    async def script(futures: Futures, registry: Registry, ran: list[str]) -> None:
        futures.submit("m:0", "m", 0, "optim_step", b"long")
        poll = asyncio.create_task(futures.wait_for_result("m:0", 600))
        while not ran or not futures._end_events:
            await asyncio.sleep(0)
        futures.end_waits()
        for waiting in (await poll, await futures.wait_for_result("m:0", 600)):
            assert waiting is not None and waiting.state == PENDING

    play(tmp_path / "r", script)
