"""PriceList as an agent with a tool: OpenAI's own client, a function in ``tools``, calls in ``tool_calls``.

Its episodes are those of `ostinato train price_list`, where the same shop is a built-in environment
(docs/agents.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from ostinato.env.games import PriceList

KEY = os.environ.get("OPENAI_API_KEY", "none")  # of a trainer elsewhere
CLIENT = AsyncOpenAI(api_key=KEY, base_url="http://unused", max_retries=0)  # one for all rollouts
PARAMETERS = {"type": "object", "properties": {"item": {"type": "integer"}}, "required": ["item"]}
PRICE = {"name": "price", "description": "The price of an item.", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": PRICE}]


async def agent(base_url: str, row: Mapping[str, Any]) -> float:
    """The rewards of one episode, added up."""
    return await visit(PriceList(), CLIENT.with_options(base_url=base_url), row["seed"])


async def visit(shop: PriceList, client: AsyncOpenAI, seed: int) -> float:
    """Ask, look up what the policy calls for, and judge what it says in the end."""
    total = 0.0
    question, _ = shop.reset(seed=seed, options={})
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        answer = completion.choices[0]
        if answer.finish_reason == "length":
            return total
        message = answer.message
        calls: list[Any] = message.tool_calls or []
        items = [json.loads(call.function.arguments)["item"] for call in calls]
        text = "".join([message.content or "", *(f"{item}=" for item in items)])
        reply, reward, ended, *_ = shop.step(text)
        total += reward
        if ended:
            return total
        replies = [{"role": "tool", "tool_call_id": call.id, "content": reply} for call in calls]
        messages += [message.model_dump(exclude_none=True), *replies]
