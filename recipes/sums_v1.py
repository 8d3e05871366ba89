"""An environment of the library verifiers (0.4), written for it alone: nothing in it is of Ostinato.

540 sums of two numbers below 100 as a taskset, and a harness that asks each once by OpenAI's client.
``verifiers_sums.toml`` trains on it as it is.
"""

from __future__ import annotations

import random
import re
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["SumsHarness", "SumsTaskset"]


class SumData(vf.TaskData):
    total: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """1.0 where the last number of the answer is the sum."""
        text = "".join(str(message.content) for message in trace.assistant_messages)
        numbers = re.findall(r"\d+", text)
        return float(bool(numbers) and int(numbers[-1]) == self.data.total)


class SumsConfig(vf.TasksetConfig):
    n: int = 540


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        pairs = random.Random(0).sample(range(100 * 100), self.config.n)
        return [
            SumTask(SumData(prompt=f"What is {pair // 100} + {pair % 100}?", total=pair // 100 + pair % 100))
            for pair in pairs
        ]


class SumsHarnessConfig(vf.HarnessConfig):
    pass


class SumsHarness(vf.Harness[SumsHarnessConfig]):
    APPENDS_SYSTEM_PROMPT, NEEDS_CONTAINER = True, False

    async def launch(
        self,
        ctx: Any,
        trace: vf.Trace,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        **options: Any,
    ) -> vf.ProgramResult:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            messages: list[Any] = [{"role": "user", "content": data.prompt}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
