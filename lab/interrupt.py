"""``ostinato bench interrupt``: what forced interruption of thinking does to truncation, answers and tokens.

    long          answers may take all the tokens that they want
    cut           a tight limit: who has not answered by then is truncated
    interrupted   the same limit, spent otherwise: a thinking budget, the phrase, and room for the answer
    added         phrase and room come on top of the limit of "cut": who is truncated there is told here

    base policy   the arms on the same problems with the same noise, untrained
    training      ``ostinato train`` with each, the same steps and seeds; each is scored as it was trained

A truncated answer is worth nothing and teaches nothing about its thought; an interrupted one is worth what it
guesses. Which is better for the policy in the end is what the table is for.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table

from lab.epochs import Model
from lab.harness import Bench, Result, Say, option, seeds
from lab.whole_runs import trained
from ostinato.engine.local import LocalEngine
from ostinato.env.dialogue import Dialogue
from ostinato.env.tasks import load_tasks
from ostinato.model.named import model_folder
from ostinato.pipeline.evaluate import Evaluation, evaluate
from ostinato.render import Renderer
from ostinato.reward.verify import exact, numeric
from ostinato.rollout.interrupt import Interruption
from ostinato.rollout.rollout import RolloutContext
from ostinato.run import MAIN_SET, RunFolder
from ostinato.types import Group, Reward, Sampling

LONG, CUT, INTERRUPTED, ADDED = ARMS = ("long", "cut", "interrupted", "added")
LAST = 10  # steps of a run that say where it has come to


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model, and limits that are tight for it."""

    model: str
    budget: tuple[int, int]  # tokens of thinking, of the arm that is interrupted
    answer: int  # tokens after it
    phrase: str
    think_end: str
    long: int  # tokens that nearly every answer ends within
    reward: str = "exact"
    temperature: float = 1.0
    families: tuple[str, ...] = ("sum", "difference", "product", "remainder", "chain")  # of arithmetic
    digits: int = 3

    def limit(self) -> int:
        """Tokens of the longest answer of the arms "cut" and "interrupted"."""
        return self.budget[1] + len(Renderer(model_folder(self.model)).encode(self.phrase)) + self.answer

    def thinking(self, arm: str) -> tuple[int, int] | None:
        """Shortest and longest thinking budget of an arm; None where nobody is interrupted."""
        return {INTERRUPTED: self.budget, ADDED: (self.limit(), self.limit())}.get(arm)


SEED_MOE = Setting(
    model="asset:seed-moe", budget=(12, 15), answer=8, phrase=" ####", think_end="####", long=48
)
SMOLLM = Setting(
    model="smollm2-135m",
    budget=(32, 40),
    answer=24,
    phrase=" So the final answer is",
    think_end="",
    long=192,
    reward="numeric",
    temperature=0.6,
    families=("sum", "difference"),
    digits=2,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt(Bench):
    """``base``: settings of the untrained policies; ``recipe`` is trained under the limits of the first."""

    base: tuple[Setting, ...] = (SEED_MOE, SMOLLM)
    recipe: str = option("quickstart", "A recipe of seed-moe, by name or file.")
    steps: int = option(60, "Training steps of every run; 0 for none.")
    seeds: tuple[int, ...] = option((0, 1, 2), "How many, or FIRST:END.", parse=seeds)
    held_out: int = option(256, "Problems that every policy is scored on.")  # problems, an answer each
    overrides: tuple[str, ...] = ()

    def quick(self) -> Interrupt:
        return replace(self, base=self.base[:1], steps=3, seeds=self.seeds[:1], held_out=32)

    def measure(self, say: Say) -> dict[str, Any]:
        base = [row for setting in self.base for row in untrained(setting, self.held_out, say)]
        runs: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as root:
            for seed in self.seeds if self.steps else ():
                for arm in ARMS:
                    keys = (f"seed={seed}", *_of_run(self), *overrides(self.base[0], arm), *self.overrides)
                    folder = trained(self.recipe, keys, Path(root) / f"{arm}-{seed}", f"{arm}, seed {seed}")
                    runs.append({"arm": arm, "seed": seed} | facts(folder))
                    say(_line(runs[-1]))
        return {
            "base": base,
            "runs": runs,
            "arms": summed(runs),
            "limits": {setting.model: setting.limit() for setting in self.base},
        }

    @staticmethod
    def table(result: Result) -> RenderableType:
        settings = result["settings"]
        limits = ", ".join(f"{model} {limit} tokens" for model, limit in result["limits"].items())
        base = Table(
            "model", "arm", "truncated", "interrupted", "pass@1", "tokens", "saved",
            title=f"base policies on {settings['held_out']} problems, limit {limits}",
        )  # fmt: skip
        long = {row["model"]: row["tokens"] for row in result["base"] if row["arm"] == LONG}
        for row in result["base"]:
            base.add_row(
                row["model"],
                row["arm"],
                f"{row['truncated']:.1%}",
                f"{row['interrupted']:.1%}",
                f"{row['score']:.3f} ± {row['score_error']:.3f}",
                f"{row['tokens']:.1f}",
                f"{1 - row['tokens'] / long[row['model']]:.0%}",
            )
        if not result["arms"]:
            return base
        seeds = ", ".join(map(str, settings["seeds"]))
        runs = Table(
            "arm", "truncated: all", f"first {LAST}", f"last {LAST}", "interrupted", "reward", f"last {LAST}",
            "tokens", "saved", "held-out before -> after",
            title=f"{settings['recipe']}, {settings['steps']} steps, seeds {seeds}",
        )  # fmt: skip
        for arm in result["arms"]:
            runs.add_row(
                arm["arm"],
                f"{arm['truncated_all']:.1%}",
                f"{arm['truncated_first']:.1%}",
                f"{arm['truncated_last']:.1%}",
                f"{arm['interrupted_all']:.1%}",
                f"{arm['reward_all']:.3f}",
                f"{arm['reward_last']:.3f}",
                f"{arm['tokens_all']:.1f}",
                f"{arm['tokens_saved']:.0%}",
                f"{arm['before']:.3f} -> {arm['score']:.3f} ± {arm['score_error']:.3f}",
            )
        return Stack(base, runs)


# ---- the base policy


def untrained(setting: Setting, held_out: int, say: Say) -> list[dict[str, Any]]:
    """A row for each arm: the model as it is, on held-out arithmetic."""
    folder = model_folder(setting.model)
    renderer = Renderer(folder)
    model = Model.load(str(folder), dtype="bfloat16", fp32_head=True, say=say)
    engine = LocalEngine(
        model.decoder, kernels=model.kernels, decode=renderer.decode, max_batch=64, context_limit=512
    )
    params = {"families": setting.families, "digits": setting.digits}
    prompts = load_tasks("arithmetic", "eval", 0, held_out, params)
    rows = []
    for arm in ARMS:
        sampling = Sampling(
            temperature=setting.temperature,
            max_tokens=setting.long if arm == LONG else setting.limit(),
            stop_tokens=renderer.stop_tokens,
        )
        stage = RolloutContext(
            engine=engine,
            env=lambda prompt: Dialogue(prompt, renderer),
            grader=_Marks(setting.reward),
            sampling=sampling,
            context_limit=engine.context_limit,
            interruption=interruption(setting, arm, renderer),
        )
        found = asyncio.run(evaluate(stage, Evaluation(split="eval", prompts=prompts, sampling=sampling), 0))
        rows.append({"model": setting.model, "arm": arm} | answered(found))
        say(f"{setting.model}, {arm}: {_told(rows[-1])}")
    return rows


def interruption(setting: Setting, arm: str, renderer: Renderer) -> Interruption | None:
    if (thinking := setting.thinking(arm)) is None:
        return None
    return Interruption(
        shortest=thinking[0],
        longest=thinking[1],
        answer_tokens=setting.answer,
        phrase=renderer.encode(setting.phrase),
        think_end=setting.think_end,
        words=renderer,
    )


class _Marks:
    """A grader: the reward function of a name, in this process."""

    def __init__(self, reward: str) -> None:
        self._reward = {"exact": exact, "numeric": numeric}[reward]

    async def grade(self, group: Group) -> list[Reward]:
        texts = [trajectory.turns[-1].completion.text for trajectory in group.trajectories]
        marks = self._reward(texts, [group.prompt.columns["answer"]] * len(texts))
        return [Reward(value=mark) for mark in marks]


def answered(row: Mapping[str, Any]) -> dict[str, Any]:
    """Of a row of eval.jsonl what the table shows. Tokens are sampled ones; those that were put in are beside
    them, per answer."""
    return {
        "truncated": row["completions/clipped_ratio"],
        "interrupted": row["interrupt/rate"],
        "ended_then": row.get("interrupt/answered", math.nan),
        "score": row["pass@1"],
        "score_error": row["stderr"],
        "tokens": row["completions/mean_length"],
        "put_in": row["tokens/injected"] / row["rollout/trajectories"],
    }


# ---- whole runs


def _of_run(bench: Interrupt) -> tuple[str, ...]:
    quiet = ("trainer.checkpoint_every=0", "log.mismatch_every=0", "log.trajectories_every=0")
    return (f"trainer.steps={bench.steps}", "eval.every=0", f"eval.n={bench.held_out}", *quiet)


def overrides(setting: Setting, arm: str) -> tuple[str, ...]:
    """What a recipe needs to be trained as ``arm``."""
    if (thinking := setting.thinking(arm)) is None:
        return (f"rollout.max_tokens={setting.long if arm == LONG else setting.limit()}",)
    return (
        f"rollout.interrupt_after={list(thinking)}",
        f"rollout.answer_tokens={setting.answer}",
        f'rollout.interrupt_phrase="{setting.phrase}"',
        f'rollout.think_end="{setting.think_end}"',
    )


def facts(folder: RunFolder) -> dict[str, Any]:
    """What a finished run comes to: over all steps, over the last ones, and its held-out score."""
    rows = list(folder.metrics.rows())
    evals = [row for row in folder.eval.rows() if row.get("set", MAIN_SET) == MAIN_SET]

    def mean(name: str, some: Sequence[Mapping[str, Any]] = rows) -> float:
        return statistics.fmean(row[name] for row in some)

    sampled, put_in = (sum(row[f"tokens/{name}"] for row in rows) for name in ("sampled", "injected"))
    return {
        "steps": len(rows),
        "truncated_all": mean("completions/clipped_ratio"),
        "truncated_first": mean("completions/clipped_ratio", rows[:LAST]),
        "truncated_last": mean("completions/clipped_ratio", rows[-LAST:]),
        "interrupted_all": mean("interrupt/rate"),
        "reward_all": mean("reward"),
        "reward_last": mean("reward", rows[-LAST:]),
        "tokens_all": sampled / sum(row["rollout/trajectories"] for row in rows),
        "sampled_tokens": sampled,
        "put_in_tokens": put_in,
        "before": evals[0]["pass@1"],
        **answered(evals[-1]),
    }


def summed(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per arm: means over seeds. ``score_error`` is the standard error of that mean: from the spread
    of the seeds, of one seed from its held-out problems. ``tokens_saved`` is the share of the sampled tokens
    of the first arm that this one did without, over the same seeds and steps."""
    found: list[dict[str, Any]] = []
    for arm in dict.fromkeys(one["arm"] for one in runs):
        own = [one for one in runs if one["arm"] == arm]
        scores = [one["score"] for one in own]
        error = statistics.stdev(scores) / math.sqrt(len(own)) if len(own) > 1 else own[0]["score_error"]
        names = [key for key in own[0] if key not in ("arm", "seed")]
        row = {"arm": arm, "seeds": len(own)} | {
            key: statistics.fmean(one[key] for one in own) for key in names
        }
        first = found[0]["sampled_tokens"] if found else row["sampled_tokens"]
        found.append(row | {"score_error": error, "tokens_saved": 1 - row["sampled_tokens"] / first})
    return found


# ---- for people


def _told(row: Mapping[str, Any]) -> str:
    return (
        f"{row['truncated']:.1%} truncated, pass@1 {row['score']:.3f} +- {row['score_error']:.3f}, "
        f"{row['tokens']:.1f} tokens"
    )


def _line(one: Mapping[str, Any]) -> str:
    return (
        f"{one['arm']}, seed {one['seed']}: held-out {one['before']:.3f} -> {_told(one)}; in training "
        f"{one['truncated_all']:.1%} truncated, {one['tokens_all']:.1f} tokens an answer"
    )
