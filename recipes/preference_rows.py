"""Pairs of answers for ``dpo.toml``, made by a reward: seed-moe answers each problem eight times, and where
one answer is right and one is wrong, the first of each are a pair.

python preference_rows.py [FILE] [ROWS] [SEED]      preferences.jsonl with 1024 rows
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from ostinato.env.tasks import load_tasks
from ostinato.launch.engine import AnyEngine
from ostinato.launch.policy import load_policy, serve_policy
from ostinato.render import Renderer
from ostinato.reward.verify import exact
from ostinato.types import Prompt, Request, Sampling

ANSWERS = 8
TOGETHER = 64  # prompts


def answered(engine: AnyEngine, renderer: Renderer, prompts: list[Prompt], seed: int) -> list[list[str]]:
    """The texts of ``ANSWERS`` answers to each prompt, at temperature 1."""
    sampling = Sampling(max_tokens=48, stop_tokens=renderer.stop_tokens)
    requests = [
        Request(tokens=renderer.prompt(prompt), sampling=sampling, seed=(seed, place, k))
        for place, prompt in enumerate(prompts)
        for k in range(ANSWERS)
    ]

    async def texts() -> dict[int, str]:
        return {index: done.text async for index, done in engine.generate(requests)}

    found = asyncio.run(texts())
    return [[found[place * ANSWERS + k] for k in range(ANSWERS)] for place in range(len(prompts))]


def pairs(count: int, seed: int) -> Iterator[dict[str, object]]:
    """``count`` rows in TRL's form."""
    policy = load_policy("asset:seed-moe")
    engine = serve_policy(policy)
    prompts = load_tasks("arithmetic", "train", seed, 4 * count, {})
    for first in range(0, len(prompts), TOGETHER):
        some = prompts[first : first + TOGETHER]
        for prompt, texts in zip(some, answered(engine, policy.renderer, some, seed + first), strict=True):
            rewards = exact(texts, [prompt.columns["answer"]] * len(texts))
            if set(rewards) != {0.0, 1.0}:
                continue
            row = {"chosen": texts[rewards.index(1.0)], "rejected": texts[rewards.index(0.0)]}
            turns = {name: [{"role": "assistant", "content": text}] for name, text in row.items()}
            yield {"prompt": list(prompt.messages or ()), **turns}
            if (count := count - 1) == 0:
                return


def write(file: Path, count: int, seed: int = 0) -> None:
    """Raises ValueError where too few problems have both kinds of answers."""
    rows = list(pairs(count, seed))
    if len(rows) < count:
        raise ValueError(f"only {len(rows)} of {4 * count} problems gave a pair; ask for fewer rows")
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    given = dict(enumerate(sys.argv[1:]))
    write(Path(given.get(0, "preferences.jsonl")), int(given.get(1, 1024)), int(given.get(2, 0)))
