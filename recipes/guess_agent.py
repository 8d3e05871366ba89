"""An agent with OpenAI's own client: it plays GuessNumber with the policy behind ``base_url``.

Nothing in it knows of training; `ostinato train guess_agent` trains the model behind it (docs/agents.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

from ostinato.env.games import GuessNumber

CLIENT = AsyncOpenAI(api_key="none", base_url="http://unused", max_retries=0)  # one for all rollouts


async def agent(base_url: str, row: Mapping[str, Any]) -> float:
    """The reward of one game."""
    client, game = CLIENT.with_options(base_url=base_url), GuessNumber()
    text, _ = game.reset(seed=row["seed"], options={})
    messages: list[Any] = [{"role": "user", "content": text}]
    while True:
        answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0]
        if answer.finish_reason == "length":
            return 0.0
        reply, reward, ended, *_ = game.step(answer.message.content or "")
        if ended:
            return reward
        messages += [answer.message.model_dump(exclude_none=True), {"role": "user", "content": reply}]
