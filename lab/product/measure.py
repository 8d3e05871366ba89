"""What a run (or a model) does in the world, by sampling.

python -m lab.product.measure policy RUN                       shares of manners, gold utility, correctness
python -m lab.product.measure judge RUN held_out.jsonl         accuracy, both orders, grounding
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.product.answers import features
from lab.product.corpora import Comparison, judge_rows, question_of
from lab.product.users import DAY, EPOCH, World, gold
from ostinato.env.arithmetic import rows
from ostinato.product.judging import parse_verdict, tally

Chat = Sequence[Mapping[str, Any]]


def completions(
    target: str, chats: Sequence[Chat], *, temperature: float, max_tokens: int, seed: int = 0
) -> list[str]:
    """One answer to each chat of the policy of ``target``, a run, a recipe or a model, as text."""
    from ostinato.launch import threads  # chosen before torch is loaded
    from ostinato.launch.models import recipe_of

    threads.configure(recipe_of(target)[0])
    from ostinato.launch.policy import load_policy, serve
    from ostinato.types import Prompt, Request, Sampling

    policy = load_policy(target)
    engine, stops = serve(policy), policy.renderer.stop_tokens
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens, stop_tokens=stops)
    prompts = [
        Prompt(uid=str(at), messages=tuple(dict(one) for one in chat)) for at, chat in enumerate(chats)
    ]
    requests = [
        Request(tokens=policy.renderer.prompt(prompt), sampling=sampling, seed=(seed, at))
        for at, prompt in enumerate(prompts)
    ]

    async def sampled() -> list[str]:
        found = {at: one.text async for at, one in engine.generate(requests)}
        return [found[at] for at in range(len(requests))]

    return asyncio.run(sampled())


def policy(target: str, prompts: int = 256, samples: int = 4) -> dict[str, Any]:
    """Held-out problems at temperature 1: share of each action and feature, mean gold utility on the first
    day and behind the drift, with its standard error over problems."""
    world, problems = World(), rows("eval", 0, prompts)
    chats = [prompt.messages or () for prompt in problems for _ in range(samples)]
    questions = [question_of(prompt) for prompt in problems for _ in range(samples)]
    texts = completions(target, chats, temperature=1.0, max_tokens=96)
    found = [features(question, text) for question, text in zip(questions, texts, strict=True)]
    names = [name for one in found for name in (str(one.action), *one.named())]
    result: dict[str, Any] = {"answers": len(found), "correct": _mean([one.correct for one in found])}
    result |= {name: round(names.count(name) / len(found), 4) for name in sorted(set(names))}
    for day in (0.0, world.drift_days):
        worth = np.array([gold(world, one, EPOCH + day * DAY) for one in found]).reshape(prompts, samples)
        error = worth.mean(1).std(ddof=1) / prompts**0.5
        result[f"gold_day_{day:g}"] = f"{worth.mean():.3f} +- {error:.3f}"
    return result


def judge(target: str, file: Path) -> dict[str, Any]:
    """Greedy verdicts on pairs in both orders. ``single``: accuracy of one order;
    ``recomputed``: right steps; ``true``: critiques that are word for word as they should be."""
    given = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    rows = judge_rows(
        [Comparison(question=r["prompt"], chosen=r["chosen"], rejected=r["rejected"]) for r in given]
    )
    texts = completions(target, [row["prompt"] for row in rows], temperature=0.0, max_tokens=160)
    wanted = [row["completion"][0]["content"] for row in rows]
    said, labels = ([parse_verdict(text) for text in some] for some in (texts, wanted))
    whole = tally(list(zip(said[::2], said[1::2], strict=True)), labels[::2])
    return {
        "pairs": whole.n,
        "accuracy": round(whole.accuracy, 4),
        "consistency": round(whole.consistency, 4),
        "first": round(whole.first, 4),
        "verdicts": dict(whole.counts),
        "single": _mean([one == label for one, label in zip(said, labels, strict=True)]),
        "true": _mean([text.strip() == one for text, one in zip(texts, wanted, strict=True)]),
        "recomputed": _mean(
            [t.split("\n")[0] == w.split("\n")[0] for t, w in zip(texts, wanted, strict=True)]
        ),
    }


def _mean(values: Sequence[bool]) -> float:
    return round(float(np.mean(values)), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a run does in the simulated product.")
    parser.add_argument("what", choices=["policy", "judge"])
    parser.add_argument("target", help="a run, a recipe or a model")
    parser.add_argument("file", type=Path, nargs="?", help="rows of a judge")
    args = parser.parse_args()
    print(json.dumps(judge(args.target, args.file) if args.what == "judge" else policy(args.target)))


if __name__ == "__main__":
    main()
