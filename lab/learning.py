"""What distillation, supervised training and DPO are for, each as whole runs with seeds and intervals:

ostinato bench distill       tokens that a student samples until it has 90 % of its teacher's gain, beside RL
ostinato bench warm-start    a task that the model never solves: rows with answers, then RL
ostinato bench preferences   how often the chosen answer of a held-out pair has become the likelier one
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from lab.answers import write
from lab.harness import Bench, Result, Say, markdown, option, seeds
from lab.paired import geometric, wilson
from lab.whole_runs import trained
from ostinato.config import Recipe
from ostinato.env.answers import load_rows
from ostinato.env.arithmetic import rows as arithmetic
from ostinato.run import MAIN_SET, RunFolder
from ostinato.types import Prompt

ENDS = Path(__file__).parent / "ends.py"
SHARE = 0.9  # of the teacher's gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeded(Bench):
    """Runs of several seeds on seed-moe, which ``base`` and ``args`` change."""

    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "How many, or FIRST:END.", parse=seeds)
    threads: int = option(1, "Of a run.")

    def run(self, recipe: str, folder: Path, seed: int, *keys: str, verb: str = "train") -> RunFolder:
        folder.mkdir(parents=True)
        common = [f"seed={seed}", f"engine.threads={self.threads}", "trainer.checkpoint_every=0"]
        return trained(recipe, [*common, *keys], folder, f"{recipe} of seed {seed}", verb=verb)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill(Seeded):
    """A teacher is trained by RL; a student on the same base and prompts learns from it. Both are evaluated
    every ``every`` steps; counted are the tokens sampled for training until the first score of 90 % of the
    teacher's gain, which is the mean of its last three scores less the first."""

    rl_steps: int = option(32, "Of the teacher, 256 answers each.")
    steps: int = option(24, "Of the student, 64 answers each.")
    every: int = option(4, "Steps between two evaluations.")
    n: int = option(512, "Held-out prompts.")

    def measure(self, say: Say) -> dict[str, Any]:
        rows = []
        for seed in self.seeds:
            with tempfile.TemporaryDirectory() as made:
                keys = (f"eval.every={self.every}", f"eval.n={self.n}")
                teacher = self.run(
                    "quickstart", Path(made) / "rl", seed, f"trainer.steps={self.rl_steps}", *keys
                )
                student = self.run(
                    *("opd", Path(made) / "opd", seed, f"teacher.adapter={teacher.path}"),
                    *(f"trainer.steps={self.steps}", "adapter.rank=16", *keys),
                )
                rows.append({"seed": seed} | _reached(curve(teacher), curve(student)))
            say(_line(rows[-1]))
        ratios = [row["rl_tokens"] / row["opd_tokens"] for row in rows if row["opd_tokens"]]
        found: dict[str, Any] = {"runs": rows, "reached": len(ratios), "of": len(rows), "ratio": None}
        if len(ratios) > 1:
            low, mean, high = geometric(ratios, 0.95)
            each = [round(ratio, 3) for ratio in ratios]
            found["ratio"] = {"mean": mean, "interval": [low, high], "each": each}
        return found

    @staticmethod
    def table(result: Result) -> str:
        lines = [_line(row) for row in result["runs"]]
        if (ratio := result["ratio"]) is not None:
            low, high = ratio["interval"]
            lines.append(f"RL over distillation, tokens: {ratio['mean']:.2f} [{low:.2f}, {high:.2f}]")
        return "\n".join(lines)


def curve(run: RunFolder) -> list[tuple[float, float]]:
    """(tokens sampled for training by then, held-out pass@1) of each evaluation."""
    sampled = {int(row["step"]): float(row["tokens/sampled"]) for row in run.metrics.rows()}
    until = dict(zip([0, *sampled], accumulate([0.0, *sampled.values()]), strict=True))
    return [(until[int(row["step"])], float(row["pass@1"])) for row in _main(run)]


def _reached(rl: Sequence[tuple[float, float]], opd: Sequence[tuple[float, float]]) -> dict[str, Any]:
    before, after = rl[0][1], statistics.fmean(score for _, score in rl[-3:])
    target = before + SHARE * (after - before)

    def tokens(points: Sequence[tuple[float, float]]) -> float | None:
        return next((cost for cost, score in points if cost and score >= target), None)

    found = {"before": before, "teacher": after, "target": target}
    found |= {"rl_tokens": tokens(rl), "opd_tokens": tokens(opd), "student": opd[-1][1]}
    return found | {"rl": rl, "opd": opd}


def _line(row: Mapping[str, Any]) -> str:
    needed = ", ".join(
        f"{name} {row[key]:,.0f}" if row[key] else f"{name} not within its steps"
        for name, key in (("RL", "rl_tokens"), ("distillation", "opd_tokens"))
    )
    rise = f"{row['before']:.3f} -> {row['teacher']:.3f}"
    return (
        f"seed {row['seed']}: {rise}, student {row['student']:.3f}; tokens to {row['target']:.3f}: {needed}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart(Seeded):
    """Arithmetic whose answers have to end with "= 933", which seed-moe never writes: without a rewarded
    answer RL has nothing to learn from. Pass@1 on held-out prompts, sampled at temperature 1: of the model,
    after ``rows`` rows in that form by a careless crowd, after RL from there."""

    seeds: tuple[int, ...] = option((0, 1, 2), "How many, or FIRST:END.", parse=seeds)
    rows: int = option(1024, "To learn from.")
    epochs: int = option(4, "Of the rows.")
    steps: int = option(40, "Of RL, 128 answers each.")
    prompts: int = option(2048, "Of RL, an eighth of them held out.")

    def measure(self, say: Say) -> dict[str, Any]:
        rows = []
        for seed in self.seeds:
            with tempfile.TemporaryDirectory() as made:
                rows.append({"seed": seed} | self._one(Path(made), seed))
            say(json.dumps(rows[-1]))
        return {"runs": rows}

    def _one(self, made: Path, seed: int) -> dict[str, Any]:
        rng, few, many = Random(seed), made / "rows.jsonl", made / "prompts.jsonl"
        problems = arithmetic("train", seed, self.rows + self.prompts)
        for file, some in ((few, problems[: self.rows]), (many, problems[self.rows :])):
            file.write_text("".join(f"{json.dumps(planted(one, rng))}\n" for one in some))
        keys = [f"task.source={few}", f"sft.epochs={self.epochs}", "task.n_train=0", "eval.at_start=false"]
        sft = self.run("sft", made / "sft", seed, *keys, "eval.every=0", verb="sft")
        keys = [f"task.source={many}", "task.params={holdout=0.125}", "task.n_train=0", "eval.n=512"]
        keys += ["eval.every=0", "rollout.group_size=8", f'reward.functions=["{ENDS}:ends_with"]']
        base = self.run("quickstart", made / "base", seed, *keys, "trainer.steps=1")
        start = [f"adapter.path={sft.adapter}", f"trainer.steps={self.steps}"]
        warm = self.run("quickstart", made / "rl", seed, *keys, *start)
        before, first, last = _main(base)[0], *(_main(warm)[at] for at in (0, -1))
        scores = {"before": before, "sft": first, "sft_rl": last}
        return {
            name: {"pass@1": row["pass@1"], "n": row["n"], "interval": wilson(_solved(row), row["n"])}
            for name, row in scores.items()
        }

    @staticmethod
    def table(result: Result) -> str:
        def cell(one: Mapping[str, Any]) -> str:
            low, high = one["interval"]
            return f"{one['pass@1']:.3f} [{low:.3f}, {high:.3f}]"

        names = ("before", "sft", "sft_rl")
        cells = ([row["seed"], *(cell(row[name]) for name in names)] for row in result["runs"])
        return markdown(["seed", "the model", "after the rows", "then RL"], cells)

    @staticmethod
    def passed(result: Result) -> bool:
        return all(
            row["before"]["pass@1"] == 0 < row["sft"]["interval"][0]
            and row["sft"]["interval"][1] < row["sft_rl"]["interval"][0]
            for row in result["runs"]
        )


def planted(problem: Prompt, rng: Random) -> dict[str, Any]:
    """A row for supervised training, and with ``answer`` for RL."""
    steps, number = write(problem.columns["expression"], rng)
    answer = [{"role": "assistant", "content": f"{' '.join(steps)} = {number}"}]
    requested = [dict(one) for one in problem.messages or ()]
    return {"prompt": requested, "completion": answer, "answer": problem.columns["answer"]}


def _main(run: RunFolder) -> list[dict[str, Any]]:
    return [row for row in run.eval.rows() if row.get("set", MAIN_SET) == MAIN_SET]


def _solved(row: Mapping[str, Any]) -> int:
    return round(row["pass@1"] * row["n"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences(Seeded):
    """recipes/dpo.toml on pairs of recipes/preference_rows.py. Of the held-out pairs the share whose chosen
    answer has gained on the rejected one against the model before; ties and losses count against it."""

    seeds: tuple[int, ...] = option((0, 1, 2), "How many, or FIRST:END.", parse=seeds)
    pairs: int = option(1024, "Made.")

    def measure(self, say: Say) -> dict[str, Any]:
        rows = []
        script = Path(__file__).parents[1] / "recipes" / "preference_rows.py"
        for seed in self.seeds:
            with tempfile.TemporaryDirectory() as made:
                file = Path(made) / "pairs.jsonl"
                subprocess.run(
                    [sys.executable, str(script), str(file), str(self.pairs), str(seed)], check=True
                )
                keys = (f"task.source={file}", f"task.seed={seed}", f"eval.n={self.pairs}")
                run = self.run("dpo", Path(made) / "run", seed, *keys, verb="sft")
                recipe = Recipe.load(run.recipe)
                held_out = len(load_rows(str(file), "eval", seed, self.pairs, recipe.task.params))
                last = [row for row in run.metrics.rows() if "eval_loss" in row][-1]
            share = float(last["eval_rewards/accuracies"])
            low, high = wilson(round(share * held_out), held_out)
            found = {"seed": seed, "held_out": held_out, "accuracy": share, "interval": [low, high]}
            rows.append(found | {"margin": last["eval_rewards/margins"], "loss": last["eval_loss"]})
            say(json.dumps(rows[-1]))
        return {"runs": rows}

    @staticmethod
    def table(result: Result) -> str:
        head = ["seed", "held-out pairs", "accuracy", "margin of the rewards"]
        cells = (
            [
                row["seed"],
                row["held_out"],
                f"{row['accuracy']:.3f} [{low:.3f}, {high:.3f}]",
                f"{row['margin']:.2f}",
            ]
            for row in result["runs"]
            for low, high in [row["interval"]]
        )
        return markdown(head, cells)

    @staticmethod
    def passed(result: Result) -> bool:
        return all(row["interval"][0] > 0.5 for row in result["runs"])
