"""Agents for tests: programs with OpenAI's own client."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from openai import APIStatusError, AsyncOpenAI

from ostinato.env.games import GuessNumber

CLIENT = AsyncOpenAI(api_key="none", base_url="http://127.0.0.1:9", max_retries=0)
CLIENTS: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncOpenAI] = WeakKeyDictionary()


def client() -> AsyncOpenAI:
    """Of the event loop that runs."""
    loop = asyncio.get_running_loop()
    return CLIENTS.setdefault(loop, AsyncOpenAI(api_key="none", base_url="http://127.0.0.1:9", max_retries=0))


async def guess(base_url: str, row: Mapping[str, Any], key: str = "none") -> float:
    """Plays ``GuessNumber`` as the built-in environment does."""
    openai, game = client().with_options(base_url=base_url, api_key=key), GuessNumber()
    text, _ = game.reset(seed=row["seed"], options=row)
    messages: list[Any] = [{"role": "user", "content": text}]
    while True:
        answer = await openai.chat.completions.create(model="policy", messages=messages)
        reply_, total = answer.choices[0], 0.0
        if reply_.finish_reason == "length":
            return total
        reply, reward, ended, *_ = game.step(reply_.message.content or "")
        if ended:
            return reward
        messages += [reply_.message.model_dump(exclude_none=True), {"role": "user", "content": reply}]


async def two_rows(base_url: str, row: Mapping[str, Any]) -> float:
    """A question, another conversation, the same one a second time, and the first one again."""
    client = CLIENT.with_options(base_url=base_url)
    first: list[Any] = [{"role": "user", "content": "1+1="}]
    other: list[Any] = [{"role": "user", "content": "2+2="}]
    for messages in (first, other, other):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        if messages is other:
            messages.pop()
    first.append({"role": "user", "content": "3+3="})
    await client.chat.completions.create(model="policy", messages=first)
    return 1.0


async def watches(base_url: str, row: Mapping[str, Any], lines: int = 12, **options: Any) -> float:
    """A conversation that grows by a line of a log at each call."""
    openai = client().with_options(base_url=base_url)
    messages: list[Any] = [{"role": "user", "content": "Watch the log of plant 42."}]
    for n in range(lines):
        answer = await openai.chat.completions.create(model="policy", messages=messages, **options)
        content = f"Line {n}: sensor {7 * n} shows {20 + n} degrees."
        messages += [
            answer.choices[0].message.model_dump(exclude_none=True),
            {"role": "user", "content": content},
        ]
    return 1.0


async def dialects(base_url: str, row: Mapping[str, Any]) -> None:
    """Responses, messages, a stream; the reward by an event."""
    from anthropic import AsyncAnthropic

    client = CLIENT.with_options(base_url=base_url)
    await client.responses.create(model="policy", input="1+1=")
    async with AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key="none") as other:
        await other.messages.create(
            model="policy", max_tokens=9, messages=[{"role": "user", "content": "2+2="}]
        )
    async for _ in await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "3+3="}], stream=True
    ):
        pass
    await client.post("/reward", body={"value": 0.5}, cast_to=object)


async def silent(base_url: str, row: Mapping[str, Any]) -> float:
    return 1.0


async def hangs(base_url: str, row: Mapping[str, Any]) -> float:
    await asyncio.sleep(1000)
    return 1.0


async def breaks(base_url: str, row: Mapping[str, Any]) -> float:
    raise KeyError("no such tool")


async def wrong_model(base_url: str, row: Mapping[str, Any]) -> float:
    await CLIENT.with_options(base_url=base_url).chat.completions.create(
        model="gpt-4", messages=[{"role": "user", "content": "1+1="}]
    )
    return 1.0


async def for_ever(base_url: str, row: Mapping[str, Any]) -> float:
    client = CLIENT.with_options(base_url=base_url)
    while True:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "1+1="}])


async def hangs_up(base_url: str, row: Mapping[str, Any]) -> float:
    """Leaves its first call, waits with the second until somebody answers, and goes on."""
    client, messages = CLIENT.with_options(base_url=base_url), [{"role": "user", "content": "1+1="}]
    await leave(base_url, stream=row["seed"] % 2 == 0)
    for _ in range(2):
        reply_ = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
        messages += [reply_.choices[0].message.model_dump(exclude_none=True)]
        messages += [{"role": "user", "content": "2+2="}]
    return 1.0


async def only_hangs_up(base_url: str, row: Mapping[str, Any]) -> float:
    for _ in range(2):
        await leave(base_url, stream=False)
    return 1.0


async def leave(base_url: str, *, stream: bool) -> None:
    """Make a call, and hang up before its answer."""
    import json

    host, _, rest = base_url.removeprefix("http://").partition("/")
    name, _, port = host.partition(":")
    body = json.dumps({"messages": [{"role": "user", "content": "1+1="}], "stream": stream}).encode()
    _, writer = await asyncio.open_connection(name, int(port))
    kind = "Content-Type: application/json\r\n"
    head = (
        f"POST /{rest}/chat/completions HTTP/1.1\r\nHost: {host}\r\n{kind}Content-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await writer.wait_closed()


async def two_writers(base_url: str, row: Mapping[str, Any]) -> float:
    """Three calls at once, and two rewards at once: of these one counts."""
    client = CLIENT.with_options(base_url=base_url)
    calls = [
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": f"{k}+{k}="}])
        for k in range(3)
    ]
    assert len({answer.system_fingerprint for answer in await asyncio.gather(*calls)}) == 1

    async def reward(value: float) -> float:
        try:
            await client.post("/reward", body={"value": value}, cast_to=object)
        except APIStatusError as error:
            assert error.status_code == 409 and "the rollout has its reward" in str(error)
            return 0.0
        return value

    (given,) = [value for value in await asyncio.gather(reward(0.25), reward(0.75)) if value]
    row["kept"].append(given)
    return 9.0  # what was posted counts


async def wants_a_grammar(base_url: str, row: Mapping[str, Any]) -> float:
    body: Any = {"type": "json_object"}
    await CLIENT.with_options(base_url=base_url).chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "1+1="}], response_format=body
    )
    return 1.0


def plain(base_url: str, row: Mapping[str, Any]) -> float:
    """Not a coroutine: runs in a thread."""
    import httpx2

    body = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}]}
    reply = httpx2.post(f"{base_url}/chat/completions", json=body, timeout=60)
    rewards = [
        httpx2.post(f"{base_url}/reward", json={"value": 0.25}, timeout=60).status_code for _ in range(2)
    ]
    assert rewards == [200, 409] and os.getpid()
    return float(reply.status_code == 200)
