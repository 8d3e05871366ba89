"""Plays the rollouts of a run elsewhere (task.agent = "remote") with an agent here, and without Ostinato.

    OPENAI_API_KEY=... python agent_worker.py http://trainer:8100 price_agent.py 8      # eight at once

The file has a coroutine function ``agent(base_url, row)``, as in docs/agents.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

KEY = os.environ.get("OPENAI_API_KEY", "none")
AGAIN_S = 2.0  # where the trainer is not there


def post(url: str, body: Any = None) -> Any:
    """The JSON of the answer; None for an empty one."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read() or b"null")


def next_rollout(address: str) -> Any:
    """{"rollout", "base_url", "model", "row"}, or None where there is none now."""
    try:
        return post(f"{address}/rollouts/next")
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{address}: {error.code} {error.read().decode(errors='replace')}") from None
    except OSError:
        return time.sleep(AGAIN_S)


async def play(order: Any, agent: Callable[[str, Any], Awaitable[float | None]]) -> Any:
    """What is posted at the end."""
    try:
        return {"reward": await agent(order["base_url"], order["row"])}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


async def work(address: str, agent: Callable[[str, Any], Awaitable[float | None]], at_once: int) -> None:
    """Fetch and play, until it is cancelled."""
    loop = asyncio.get_running_loop()

    async def one() -> None:
        while True:
            order = await loop.run_in_executor(pool, next_rollout, address)
            if order is None:
                continue
            end = await play(order, agent)
            try:
                await loop.run_in_executor(pool, post, f"{order['base_url']}/end", end)
            except OSError as error:  # the rollout has ended without it
                print(f"rollout {order['rollout']}: {error}", file=sys.stderr)

    with ThreadPoolExecutor(at_once) as pool:
        await asyncio.gather(*(one() for _ in range(at_once)))


if __name__ == "__main__":
    where, file, *rest = sys.argv[1:]
    asyncio.run(work(where.rstrip("/"), runpy.run_path(file)["agent"], int(rest[0]) if rest else 4))
