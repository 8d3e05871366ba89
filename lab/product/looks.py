"""The true gold of a policy at every look of its run, and how often the run's judge prefers it to the office.

    python -m lab.product.looks FOLDER...           folders of lab.product.planted or lab.product.experiment

Each look kept its adapter. Its answers to PROMPTS held-out problems, the same at every look, are scored by
the truth; the judge compares the first ``--pairs`` of them with those of the policy in office (the proxy).
Kept in looks.jsonl beside the run, step 0 for the policy in office. Nothing of it was known to the loop.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from lab.product.answers import features
from lab.product.users import EPOCH, World, gold
from ostinato.config import Recipe
from ostinato.files import atomic_write
from ostinato.launch.product.watch import Answers, answers, preferred
from ostinato.reward.workers import JUDGE
from ostinato.run import Jsonl, RunFolder

PROMPTS = 512


def measured(run: RunFolder, world: World, ts: float, pairs: int) -> list[dict[str, Any]]:
    """One row of each look, and of the policy in office."""
    recipe = Recipe.load(run.recipe)
    judge = recipe.reward.functions[0].removeprefix(JUDGE)
    kept = sorted((run.path / "looks").iterdir())
    rows, office = [], None
    for step, adapter in [(0, recipe.adapter.path), *((int(one.name), str(one)) for one in kept)]:
        (found,) = answers(recipe, [(adapter, 1 if step else 0)], "", PROMPTS, prompts=0)
        row: dict[str, Any] = {"step": step, "ts": ts, **_truth(found, world, ts)}
        if office is None:
            office = found
        elif pairs:
            seen = preferred(recipe, judge, _first(found, pairs), _first(office, pairs))
            row["proxy"] = float(np.nanmean(seen))
        rows.append(row)
    return rows


def _first(found: Answers, n: int) -> Answers:
    return Answers(messages=found.messages[:n], texts=found.texts[:n], gold=found.gold[:n])


def _truth(found: Answers, world: World, ts: float) -> dict[str, Any]:
    questions = [str(one[-1]["content"]) for one in found.messages]
    of = [features(question, text) for question, text in zip(questions, found.texts, strict=True)]
    worth = np.array([gold(world, one, ts) for one in of])
    names = Counter(name for one in of for name in (*one.named(), one.action.value))
    return {
        "gold": float(worth.mean()),
        "stderr": float(worth.std(ddof=1) / len(worth) ** 0.5),
        "correct": float(np.mean([one.correct for one in of])),
        "shares": {name: count / len(of) for name, count in sorted(names.items())},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--pairs", type=int, default=128, help="judged at each look; 0: none")
    args = parser.parse_args()
    for folder in args.folders:
        seed = int(folder.name.rpartition("-")[2])
        journal = Jsonl(folder / "decisions.jsonl").rows()
        times = {row["before"]["round"]: row["ts"] for row in journal if row["before"]["stage"] == "policy"}
        for file in sorted(folder.glob("round-*/policy/*/recipe.toml")):
            run, to = RunFolder.open(file.parent), file.parent / "looks.jsonl"
            number = int(file.parents[2].name.removeprefix("round-"))
            if not to.exists():
                rows = measured(run, World(seed=seed), times.get(number, EPOCH), args.pairs)
                atomic_write(to, "".join(json.dumps(one) + "\n" for one in rows))


if __name__ == "__main__":
    main()
