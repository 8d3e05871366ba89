"""The shop of price_list as an agent of pydantic-ai (`pip install "pydantic-ai-slim[openai]"`).

The loop, the messages and the calls of the tool are pydantic-ai's, and
`ostinato train pydantic_agent` trains the model behind it (docs/agents.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent, RunContext, UsageLimits
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from ostinato.env.games import PriceList

CLIENT = AsyncOpenAI(api_key="none", base_url="http://unused", max_retries=0)  # one for all rollouts
LIMITS = UsageLimits(request_limit=4)


@dataclass
class Visit:
    """One episode: the item in question, and whether its price was looked up."""

    shop: PriceList
    item: int
    found: bool = False


AGENT = Agent(deps_type=Visit, output_type=str)


@AGENT.tool
def price(visit: RunContext[Visit], item: int) -> str:
    """The price of an item."""
    visit.deps.found |= item == visit.deps.item
    found = visit.deps.shop.lookup(item)
    return "none" if found is None else str(found)


async def agent(base_url: str, row: Mapping[str, Any]) -> float:
    """0.3 for the right lookup, 0.7 more for the right price behind it."""
    shop = PriceList()
    question, _ = shop.reset(seed=row["seed"], options={})
    visit = Visit(shop, int(re.findall("[0-9]+", question)[0]))
    provider = OpenAIProvider(openai_client=CLIENT.with_options(base_url=base_url))
    model, answer = OpenAIChatModel("policy", provider=provider), ""
    with suppress(UnexpectedModelBehavior, UsageLimitExceeded):  # no final answer: the policy's doing
        answer = (await AGENT.run(question, deps=visit, model=model, usage_limits=LIMITS)).output
    numbers = re.findall("-?[0-9]+", answer)
    right = bool(numbers) and int(numbers[-1]) == shop.lookup(visit.item)
    return 0.3 * visit.found + 0.7 * (right and visit.found)
