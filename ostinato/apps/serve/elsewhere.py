"""Remote agents: a rollout is fetched by a worker or sent to a service; its end is posted or replied.

    worker   --POST /rollouts/next--> {"rollout", "base_url", "model", "row"}        task.agent = "remote"
    trainer  --POST task.agent_url, the same and "api_key"--> {"reward": 0.5}        task.agent_url
    either   --POST {base_url}/end {"reward": 0.5} or {"error": "why"}

A service may answer 202 at once and post the end. A rollout that is fetched and never ended is an error found
by the episode's limit between two calls. Everything here runs in the event loop of the ``AgentServer``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ostinato.access import STRICT, Access, is_loopback
from ostinato.apps.serve.calls import ApiError
from ostinato.apps.serve.server import read_body
from ostinato.inputs import parse_json

if TYPE_CHECKING:
    import httpx2

MODEL = "policy"  # the name of the model that agents use
POLL_S = 20.0  # how long the request of a worker waits for a rollout
ACCEPTED = 202


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The address at which agents reach the server. ``key``: the API key that they must send; "": none."""

    host: str = "127.0.0.1"
    port: int = 0
    address: str = ""  # http://name:port, if agents reach it by another name or port
    key: str = ""
    access: Access = STRICT

    @property
    def full_access(self) -> Access:
        """``access``, which also allows the name in ``address`` for a server on a loopback address."""
        name = urlsplit(self.address).hostname if is_loopback(self.host) else None
        return replace(self.access, hosts=self.access.hosts | {name}) if name else self.access


class RemoteRollouts:
    """The rollouts that wait for a worker, and the ends of those in progress. ``report_begun`` is called with
    the id of a rollout that has been fetched."""

    def __init__(self, key: str, report_begun: Callable[[str], None], wait_s: float) -> None:
        self._key, self._report_begun, self._wait_s = key or "none", report_begun, wait_s
        self._waiting: asyncio.Queue[tuple[dict[str, Any], asyncio.Future[None]]] = asyncio.Queue()
        self._ends: dict[str, asyncio.Future[float | None]] = {}
        self._client: httpx2.AsyncClient | None = None

    async def wait_for_worker(self, base_url: str, row: Mapping[str, Any]) -> float | None:
        """Return the reward of a rollout run by a worker. Raises RuntimeError if the rollout fails, or no
        worker fetches it."""
        fetch_future = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((self._make_order(base_url, row), fetch_future))
        try:
            await asyncio.wait_for(fetch_future, self._wait_s)
        except TimeoutError:
            raise RuntimeError(
                f"no worker has fetched the rollout for {self._wait_s:g} s (task.agent_wait_s)"
            ) from None
        return await self.wait_for_end(base_url)

    async def send_rollout(self, url: str, base_url: str, row: Mapping[str, Any]) -> float | None:
        """Return the reward of a rollout run by the service at ``url``. Raises RuntimeError if the service
        cannot be reached or fails."""
        import httpx2

        if self._client is None:
            limits = httpx2.Limits(max_connections=None)
            self._client = httpx2.AsyncClient(timeout=None, limits=limits, trust_env=False)
        order, key = self._make_order(base_url, row) | {"api_key": self._key}, f"Bearer {self._key}"
        headers = {"Content-Type": "application/json", "Authorization": key}
        end = self._get_end(parse_rollout_id(base_url))  # the end may come before the answer
        try:
            reply = await self._client.post(url, content=format_order(order), headers=headers)
            if reply.status_code == ACCEPTED:
                return await end
            if not reply.is_success:
                raise RuntimeError(f"{url} answered {reply.status_code}: {reply.text[:300]}")
            return _read_reward(reply.content)
        except (httpx2.HTTPError, httpx2.InvalidURL, ApiError) as error:
            raise RuntimeError(f"{url}: {type(error).__name__}: {error}") from error
        finally:
            self._ends.pop(parse_rollout_id(base_url), None)

    async def wait_for_end(self, base_url: str, idle: Callable[[], bool] | None = None) -> float | None:
        """Return the reward posted with the end of a rollout; None if there is none, or once the rollout is
        ``idle``. Raises RuntimeError with the error that the agent posts."""
        end = self._get_end(parse_rollout_id(base_url))
        try:
            while not end.done() and not (idle is not None and idle()):
                await asyncio.wait({end}, timeout=None if idle is None else 1.0)
            return end.result() if end.done() else None
        finally:
            self._ends.pop(parse_rollout_id(base_url), None)

    def _get_end(self, id_: str) -> asyncio.Future[float | None]:
        return self._ends.setdefault(id_, asyncio.get_running_loop().create_future())

    def _make_order(self, base_url: str, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"rollout": parse_rollout_id(base_url), "base_url": base_url, "model": MODEL, "row": dict(row)}

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    # ---- HTTP

    async def give_next(self, request: Request) -> Response:
        """Give the next rollout to the worker that requests it; 204 when there is none for ``POLL_S``."""
        deadline = time.monotonic() + POLL_S
        while (remaining_s := deadline - time.monotonic()) > 0:
            try:
                order, fetch_future = await asyncio.wait_for(self._waiting.get(), remaining_s)
            except (TimeoutError, asyncio.CancelledError):  # the latter when the server closes
                break
            if fetch_future.done():
                continue  # its episode is over
            if await request.is_disconnected():
                self._waiting.put_nowait((order, fetch_future))
                break
            fetch_future.set_result(None)
            self._get_end(order["rollout"])
            self._report_begun(order["rollout"])
            return Response(format_order(order), media_type="application/json")
        return Response(status_code=204)

    async def record_end(self, request: Request) -> Response:
        """Take the end of a rollout from its agent, with a reward or an error; 409 if no end is awaited."""
        body, id_ = await read_body(request), request.path_params["id"]
        end = self._ends.get(id_)
        if end is None or end.done():
            raise ApiError(f"the end of rollout {id_!r} is not awaited", status=409, code="not_awaited")
        reward, error = _read_reward(body), parse_json(body or b"{}").get("error")
        if error:
            end.set_exception(RuntimeError(str(error)[:500]))
        else:
            end.set_result(reward)
        return JSONResponse({"rollout": id_})


def parse_rollout_id(base_url: str) -> str:
    """Return the id of the rollout with this address."""
    return base_url.split("/")[-2]


def format_order(order: Mapping[str, Any]) -> str:
    """Return an order as JSON. Values that JSON does not have (a date in a column) become strings."""
    return json.dumps(order, default=str)


def _read_reward(body: bytes) -> float | None:
    """The reward of {"reward": number or null}; None without one. Raises ApiError for anything else."""
    try:
        value = parse_json(body or b"{}").get("reward")
    except (ValueError, AttributeError) as error:
        raise ApiError('send {"reward": number}, or {"error": text}') from error
    return None if value is None else check_number(value, "reward")


def check_number(value: Any, name: str) -> float:
    """Return ``value`` as a float. Raises ApiError if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
        raise ApiError(f"{name} is {value!r}; send a finite number", param=name)
    return float(value)
