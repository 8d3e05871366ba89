"""What a first window of feedback is worth: to a judge, and to a policy by that judge or by accepted answers.

    python -m lab.product.versus FOLDER --model BASE/adapter        after lab.product.experiment FOLDER

Of every seed: the judge that was trained on the window and the pretrained one on the window's last fifth in
time; true gold of the base, of the policy that was trained by RL with that judge (the first round of the arm
``static``) and of the base trained on accepted answers, with as many answers as RL was. Rows of versus.jsonl.
``--arm continual``: gold of what the continual loop serves in the end, beside SFT on all that was accepted by
then. Rows of versus-loop.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.product.answers import features
from lab.product.experiment import HERE, opened
from lab.product.users import World, gold
from ostinato.config import Recipe
from ostinato.files import atomic_write
from ostinato.launch.dtype import resolved
from ostinato.launch.judges import sources
from ostinato.launch.panel import Bench
from ostinato.launch.product.loop import ProductLoop
from ostinato.launch.product.watch import answers
from ostinato.launch.sft import supervise
from ostinato.product.events import Kind
from ostinato.product.judge import Compared, Spec
from ostinato.product.judging import Choice, calibration_error, probability
from ostinato.run import Jsonl, RunFolder

PROMPTS = 1024  # held out, one answer each


# ---- judges


def judged(recipe: Recipe, name: str, like: Spec | None, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of pairs in both orders, ``chosen`` the better: shares, and the calibration error."""
    (source,) = sources(name, like)
    judge = Bench(recipe=resolved(recipe), counters=Counter()).judge(source)

    async def compared() -> list[Compared]:
        each = (judge.compare(one["messages"], [(one["chosen"], one["rejected"])]) for one in rows)
        return [one for (one,) in await asyncio.gather(*each)]

    found = asyncio.run(compared())
    odds = np.array([one.log_odds for one in found if one.log_odds is not None])
    return {
        "right": [int(one.choice is Choice.A) for one in found],
        "single": float(np.mean([(one.ab is Choice.A) + (one.ba is Choice.B) for one in found])) / 2,
        "consistent": float(np.mean([one.choice in (Choice.A, Choice.B, Choice.TIE) for one in found])),
        "odds": float(np.mean(odds > 0)) if len(odds) else None,
        "ece": calibration_error(probability(odds), np.ones(len(odds))) if len(odds) else None,
    }


# ---- policies


def accepted(loop: ProductLoop, until: float) -> list[dict[str, Any]]:
    """Rows of answers that a user of the window accepted."""
    rows = []
    for one in loop.store.joined(until=until):
        kinds = {event.kind for event in one.events}
        if Kind.ACCEPT in kinds and Kind.UNDO not in kinds:
            answer = [{"role": "assistant", "content": one.exchange.output}]
            rows.append({"prompt": [dict(each) for each in one.exchange.messages], "completion": answer})
    return rows


def imitate(
    model: str, rows: Sequence[dict[str, Any]], like: Recipe, answers: int, folder: Path, seed: int
) -> Path:
    """The adapter of SFT of the base on ``rows``, so often that it reads as many ``answers``; its shape and
    rate are those of ``like``."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "rows.jsonl"
    atomic_write(file, "".join(json.dumps(one) + "\n" for one in rows))
    targets = json.dumps(list(like.adapter.targets))
    given = [f"model.path={model}", f"task.source={file}", f"log.dir={folder}", f"seed={seed}"]
    given += ["adapter.kind=lora", f"adapter.targets={targets}", f"adapter.rank={like.adapter.rank}"]
    given += [f"trainer.lr={like.trainer.lr}", "trainer.warmup_steps=5"]
    given += ["engine.threads=1", f"sft.epochs={max(1, round(answers / len(rows)))}"]
    outcome, _, _ = supervise(Recipe.load(HERE / "base.toml", *given), None)
    return RunFolder.open(outcome).adapter


def golds(recipe: Recipe, adapter: str, world: World, ts: float, seed: int) -> dict[str, Any]:
    (found,) = answers(recipe, [(adapter, seed)], "", PROMPTS, prompts=0)
    of = [features(str(m[-1]["content"]), text) for m, text in zip(found.messages, found.texts, strict=True)]
    names = Counter(name for one in of for name in (*one.named(), one.action.value))
    return {
        "gold": [round(gold(world, one, ts), 4) for one in of],
        "correct": float(np.mean([one.correct for one in of])),
        "shares": {name: count / len(of) for name, count in sorted(names.items())},
    }


def compare(folder: Path, seed: int, model: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The first judge, and the policy of the first round."""
    loop = opened(folder / f"static-{seed}", "static", seed, model, overrides)
    first = Jsonl(folder / f"static-{seed}" / "decisions.jsonl").rows()
    at = next(row for row in first if row["before"]["stage"] == "policy")
    judge, ts = at["before"]["judge"], at["before"]["frozen"]
    window = loop.folder / "round-001" / "window"
    recipe = _recipe(loop)
    test = list(Jsonl(window / "test.jsonl").rows())
    spec = sources(loop.judge_of(judge))[0].spec
    row: dict[str, Any] = {"seed": seed, "pairs": len(list(Jsonl(window / "train.jsonl").rows()))}
    row["users"] = len({one["user"] for one in test})
    row["judges"] = {
        "trained": judged(recipe, loop.judge_of(judge), None, test),
        "pretrained": judged(recipe, str(model), spec, test),
    }
    row["rl_seconds"] = at["finding"]["figures"]["seconds"]
    trained = {"rl": str(loop.adapter_of(at["after"]["candidate"]))}
    return row | against(loop, recipe, trained, recipe.trainer.steps, ts, seed, folder / f"sft-{seed}")


def compare_loop(folder: Path, seed: int, model: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """What the continual loop serves in the end, beside what the static one does and SFT on all that the
    users of the continual one had accepted by then; gold of all at one time."""
    loop, static = (
        opened(folder / f"{arm}-{seed}", arm, seed, model, overrides) for arm in ("continual", "static")
    )
    arms = {"rl": loop, "static": static}
    served = {name: str(one.adapter_of(one.at.policy) or "") for name, one in arms.items()}
    trained = sum(1 for _ in Jsonl(loop.folder / "gold.jsonl").rows())
    steps = trained or loop.settings.policy.steps  # a loop that never trained a policy has no number
    row = {"seed": seed, "rounds": loop.at.round, "steps": trained, "promoted": bool(served["rl"])}
    ts, to = loop.live.now(), folder / f"sft-all-{seed}"
    return row | against(loop, _recipe(static), served, steps, ts, seed, to)


def _recipe(loop: ProductLoop) -> Recipe:
    first, *_ = sorted((loop.folder / "round-001" / "policy").glob("*/recipe.toml"))
    return Recipe.load(first)


def against(
    loop: ProductLoop,
    recipe: Recipe,
    trained: Mapping[str, str],
    steps: int,
    ts: float,
    seed: int,
    folder: Path,
) -> dict[str, Any]:
    """Gold at ``ts`` of the base, of adapters by name, and of SFT on as many answers as RL had."""
    rows, start = accepted(loop, ts), time.process_time()
    many = steps * recipe.rollout.prompts_per_step * recipe.rollout.group_size
    imitated = imitate(loop.settings.model, rows, recipe, many, folder, seed)
    took, world = time.process_time() - start, World(seed=seed)
    adapters = {"base": "", **trained, "sft": str(imitated)}
    policies = {name: golds(recipe, one, world, ts, seed) for name, one in adapters.items()}
    return {"accepted": len(rows), "sft_seconds": took, "policies": policies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--arm", choices=("static", "continual"), default="static", help="whose policy")
    parser.add_argument("overrides", nargs="*", help="of product.toml")
    args = parser.parse_intermixed_args()
    work, name = (compare, "versus") if args.arm == "static" else (compare_loop, "versus-loop")
    kept = Jsonl(args.folder / f"{name}.jsonl")
    done = {row["seed"] for row in kept.rows()}
    for seed in args.seed or range(5):
        if seed not in done:
            kept.append(work(args.folder, seed, args.model.absolute(), args.overrides))


if __name__ == "__main__":
    main()
