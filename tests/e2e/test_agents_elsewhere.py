"""Agents elsewhere: fetched, sent, recorded by a proxy; what is lost is a fault and never a reward of 0."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai")
import httpx2
import toy_agents as agents
import uvicorn
from episodes import PROMPT, World, turns_of
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ostinato.apps.serve.agent_server import AgentServer
from ostinato.apps.serve.elsewhere import Place
from ostinato.apps.serve.proxy import Proxy
from ostinato.apps.serve.served import ServiceSpec, open_service
from ostinato.apps.serve.server import format_address, open_socket
from ostinato.apps.serve.service import Limits
from ostinato.config import Recipe
from ostinato.launch.policy import load_policy
from ostinato.run import JsonlZst
from ostinato.types import Stop

sys.path.append(str(Path(__file__).parents[2] / "recipes"))
agent_worker: Any = import_module("agent_worker")


@pytest.fixture(scope="module")
def policy() -> Any:
    return load_policy("asset:seed-moe", "model.dtype=float32")


@contextmanager
def started(policy: Any, **options: Any) -> Iterator[World]:
    server = AgentServer(policy.renderer, **options)
    try:
        yield World(policy, server)
    finally:
        server.close()


@contextmanager
def worker(address: str, agent: Callable[[str, Any], Awaitable[Any]], at_once: int = 2) -> Iterator[None]:
    """``recipes/agent_worker.py`` in a thread."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(agent_worker.work(address, agent, at_once))

    def run() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)


@contextmanager
def service(play: Callable[[Request], Awaitable[Response]]) -> Iterator[str]:
    """The address of an agent's own service."""
    app = Starlette(routes=[Route("/run", play, methods=["POST"])])
    with open_socket("127.0.0.1", 0) as listening:
        runner = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=lambda: runner.run(sockets=[listening]), daemon=True)
        thread.start()
        yield f"{format_address(listening)}/run"
        runner.should_exit = True
        thread.join(20)


def fetched(world: World, **options: Any) -> Any:
    return world.agent(world.server.remote_rollouts.wait_for_worker, is_queued=True, **options)


def test_a_worker_elsewhere_plays_the_episodes_of_an_agent_in_the_process(policy: Any) -> None:
    with started(policy) as world, worker(world.server.address, agents.guess):
        inside = World(policy, world.server)
        assert turns_of(world.play(fetched(world))) == turns_of(inside.play(inside.agent(agents.guess)))


def test_a_worker_that_has_hung_up_is_given_no_rollout(policy: Any) -> None:
    """It would be silent there, and a fault."""
    with started(policy) as world:
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(f"{world.server.address}/rollouts/next", json={}, timeout=0.3)
        with worker(world.server.address, agents.guess):
            assert not world.play(fetched(world, silence_s=5.0), size=1).trajectories[0].error


def test_what_no_worker_fetches_or_ends_is_a_fault_with_its_name(policy: Any) -> None:
    with started(policy, wait_s=0.3) as world:
        lost = world.play(fetched(world), size=1).trajectories[0]
        assert "no worker has fetched the rollout for 0.3 s" in lost.error and lost.reward is None
    with started(policy) as world, worker(world.server.address, agents.hangs):
        hung = world.play(fetched(world, silence_s=0.3), size=1).trajectories[0]
        assert "the agent made no call for 0.3 s" in hung.error and hung.reward is None
    with started(policy) as world, worker(world.server.address, agents.breaks):
        broken = world.play(fetched(world), size=1).trajectories[0]
        assert broken.stop is Stop.ERROR and "KeyError: 'no such tool'" in broken.error


def test_a_service_plays_what_it_is_sent_and_its_faults_have_names(policy: Any) -> None:
    async def play(request: Request) -> Response:
        order = await request.json()
        assert request.headers["authorization"] == "Bearer secret" and order["api_key"] == "secret"
        if order["row"]["uid"] == "broken":
            return Response("no tools today", status_code=503)
        reward = await agents.guess(order["base_url"], order["row"], order["api_key"])
        if order["row"]["uid"] == "later":
            body, header = {"reward": 0.75}, {"Authorization": "Bearer secret"}
            async with httpx2.AsyncClient() as http:
                sent = await http.post(order["base_url"] + "/end", json=body, headers=header)
            assert sent.status_code == 200
            return JSONResponse({}, status_code=202)
        return JSONResponse({"reward": reward})

    with service(play) as url, started(policy, place=Place(key="secret")) as world:
        refused = httpx2.post(f"{world.server.address}/rollouts/next")
        assert refused.status_code == 401

        async def sent(base_url: str, row: Any) -> Any:
            return await world.server.remote_rollouts.send_rollout(url, base_url, row)

        with started(policy) as inside:
            group = world.play(world.agent(sent))
            assert turns_of(group) == turns_of(inside.play(inside.agent(agents.guess)))
        later = world.play(world.agent(sent), replace(PROMPT, uid="later"), size=1).trajectories[0]
        assert later.env_reward == 0.75
        broken = world.play(world.agent(sent), replace(PROMPT, uid="broken"), size=1).trajectories[0]
        assert "answered 503: no tools today" in broken.error and broken.reward is None


def test_a_proxy_records_rollouts_by_id_and_an_id_is_a_seed(tmp_path: Path) -> None:
    recipe = Recipe.parse({"rollout": {"max_tokens": 16}})

    def recorded(name: str, ids: list[str], idle_s: float = 60.0, **how: Any) -> list[dict[str, Any]]:
        out = JsonlZst(tmp_path / name)
        asyncio.run(played(out, ids, idle_s, **how))
        return list(out.rows())

    async def played(
        out: JsonlZst, ids: list[str], idle_s: float, agent: Any = agents.guess, recipe: Recipe = recipe
    ) -> None:
        end, begun, where = asyncio.Event(), asyncio.Event(), []
        serving = ServiceSpec(
            target="asset:seed-moe", overrides=("model.dtype=float32",), limits=Limits(context=0)
        )
        with open_service(serving) as served:
            proxy = Proxy(served, recipe, out, Place(), idle_s)
            running = asyncio.create_task(
                proxy.run(end, lambda at: (where.append(at), begun.set(), None)[-1])
            )
            await begun.wait()
            async with httpx2.AsyncClient() as http:
                for id_ in ids:
                    base = f"{where[0]}/rollout/{id_}/v1"
                    reward = await agent(base, {"seed": 5})
                    assert (await http.post(f"{base}/reward", json={"value": reward})).status_code == 200
                    if id_ != ids[-1]:  # what is open at the end is written as it is
                        assert (await http.post(f"{base}/end")).status_code == 200
                first = f"{where[0]}/rollout/{ids[0]}/v1/chat/completions"
                while len(ids) > 1 and (again := await http.post(first, json=CHAT)).status_code != 410:
                    assert again.status_code == 404  # it is about to end
                while idle_s < 1 and not out.path.exists():  # who says nothing more has ended
                    await asyncio.sleep(0.05)
            end.set()
            await running

    rows = recorded("a.zst", ["one", "two"])
    assert [row["uid"] for row in rows] == ["one", "two"] and rows[0]["error"] == ""
    assert rows[0]["reward"] == rows[0]["env_reward"] and rows[0]["prompt"].endswith("assistant\n")
    turn = rows[0]["turns"][0]
    assert len(turn["tokens"]) == len(turn["logprobs"]) == len(turn["versions"]) and turn["experts"]
    again = recorded("b.zst", ["two", "one"])
    assert again[1]["turns"] == rows[0]["turns"] and again[0]["turns"] == rows[1]["turns"]
    assert json.dumps(rows[0]["turns"]) != json.dumps(rows[1]["turns"])
    (idle,) = recorded("c.zst", ["one"], idle_s=0.1)
    assert idle["turns"] == rows[0]["turns"] and idle["reward"] == rows[0]["reward"]

    remembering = Recipe.parse(recipe.model_dump() | {"task": {"memory": True}, "memory": {"budget": 220}})
    (row,) = recorded("d.zst", ["one"], agent=agents.watches, recipe=remembering)
    length = 0
    for turn in row["turns"]:
        length = len(turn["context"]) + (0 if turn["new_row"] else length)
        assert length <= 220
        length += len(turn["tokens"])
    assert len(row["turns"]) == 12 and sum(turn["new_row"] for turn in row["turns"]) >= 2


CHAT = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}]}


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ('agent = "remote"\nagent_url = "http://a"', "only one can be given"),
        ('agent_url = "a:80"', "give it as"),
        ('agent = "a.py:agent"\nagent_host = "10.0.0.1"', "for agents elsewhere"),
        ('agent = "remote"\nagent_host = "0.0.0.0"', "set task.agent_address"),
        ('agent = "a.py:agent"\nagent_tool_calls = "equals"', 'set rollout.stop to ["="]'),
    ],
)
def test_recipes_that_cannot_be_are_refused(task: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("[", r"\[")):
        Recipe.parse(tomllib.loads(f"[task]\n{task}"))


def test_another_address_than_this_machines_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from ostinato.apps.serve.server import KEY_VARIABLE, choose_key

    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert choose_key("127.0.0.1", "task.agent_host") == ""
    with pytest.raises(ValueError, match=r"task\.agent_host 10\.0\.0\.1 can be reached by other machines"):
        choose_key("10.0.0.1", "task.agent_host")
