"""``ostinato bench race``: wall clock, device time, FLOPs and memory to an equal held-out score, ours and
TRL's, each in the best setting of a search of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lab.harness import Bench, Result, Say, markdown, option, seeds
from lab.race.contenders import Heat, Setting
from lab.race.curves import COSTS, SHARES, compared
from lab.race.search import Axis, Search, step_s
from lab.settings import torch_threads
from ostinato.config import Recipe

NAMES = {"wall_s": "wall s", "from_start_s": "s from its start", "device_s": "device s", "flops": "FLOPs"}
NAMES |= {"peak_mb": "peak MB"}
OURS = ("trainer.lr", "rollout.prompts_per_step", "trainer.minibatches")


@dataclass(frozen=True, slots=True, kw_only=True)
class Race(Bench):
    """Both train the same model on the same prompts in the same order with the same reward; at every
    checkpoint, with the clock stopped, the adapter is saved, and one scorer answers the held-out prompts."""

    seeds: tuple[int, ...] = option((0, 1, 2, 3, 4), "How many, or FIRST:END.", parse=seeds)
    recipe: str = option("quickstart", "A recipe with one reward, by name or file.")
    keys: tuple[str, ...] = option((), "Keys of the recipe that differ for both, as KEY=VALUE.")
    steps: int = option(30, "Of a run.")
    trl_steps: int = option(0, "Of TRL's; 0: as many.")
    every: int = option(3, "Steps between two checkpoints.")
    n: int = option(512, "Held-out prompts, one answer each.")
    trl_python: str | None = option(None, "The python of an environment with trl.")
    search: bool = option(True, "A search by each, on a seed of its own.")
    search_steps: int = option(15, "Of a trial that learns.")
    ours: str = option("{}", "JSON: a value, or a list of those to be tried, of keys of a recipe.")
    trl: str = option("{}", "JSON: the same of threads, dtype, batch, paged, experts, loss, lr ...")
    search_seed: int = 100

    def quick(self) -> Race:
        return replace(self, seeds=(0,), steps=2, every=1, n=32, search=False)

    def measure(self, say: Say) -> dict[str, Any]:
        found: dict[str, Any] = {"searches": {}, "settings_used": {}, "runs": {"ours": [], "trl": []}}
        names = ("ours", "trl") if self.trl_python else ("ours",)
        for name in names:
            say(f"the search of {name}")
            search = self._search(name, say)
            found["settings_used"][name] = search.best(self._axes(name))
            found["searches"][name] = search.trials
        for seed in self.seeds:
            for name in names:
                steps = (self.trl_steps if name == "trl" else 0) or self.steps
                last = seed == self.seeds[-1]
                heat = self._heat(steps, self.every, check=last)
                run = getattr(heat, name)(found["settings_used"][name], seed)
                found["runs"][name].append({"seed": seed} | run)
                say(f"{name}, seed {seed}: {_line(run)}")
                say(json.dumps(found["runs"][name][-1]))
        if "trl" in names:
            found |= {"compared": compared(found["runs"]["ours"], found["runs"]["trl"])}
        return found

    def _heat(self, steps: int, every: int, check: bool = False) -> Heat:
        return Heat(
            recipe=self.recipe,
            overrides=self.keys,
            steps=steps,
            every=every,
            eval_n=self.n,
            trl_python=self.trl_python,
            check=check,
        )

    def _search(self, name: str, say: Say) -> Search:
        def trial(setting: Setting, learns: bool, limit_s: float) -> Mapping[str, Any]:
            heat = self._heat(self.search_steps, self.every) if learns else self._heat(3, 0)
            return getattr(replace(heat, limit_s=limit_s), name)(setting, self.search_seed)

        return Search(trial=trial, say=say)

    def _axes(self, name: str) -> list[Axis]:
        """Values that are given stand for those of an axis; without a search each has its first one."""
        named = json.loads(getattr(self, name)).items()
        given = {key: value if isinstance(value, list) else [value] for key, value in named}
        axes = [replace(axis, values=given.pop(axis.name, axis.values)) for axis in self._all_axes(name)]
        axes += [Axis(name=key, values=values) for key, values in given.items()]
        return axes if self.search else [replace(axis, values=axis.values[:1]) for axis in axes]

    def _all_axes(self, name: str) -> list[Axis]:
        recipe = Recipe.load(self.recipe, *self.keys)
        lr, prompts = recipe.trainer.lr, recipe.rollout.prompts_per_step
        lrs = Axis(name="lr", values=[lr, lr / 3, lr * 3, lr * 10], learns=True)
        batches = Axis(name="prompts", values=[prompts, prompts // 2], learns=True)
        minibatches = Axis(name="minibatches", values=[1, 2], learns=True)
        learned = (lrs, batches, minibatches)
        if name == "ours":
            keys = {axis.name: key for axis, key in zip(learned, OURS, strict=True)}
            tokens = recipe.trainer.tokens_per_microbatch
            return [
                Axis(name="model.dtype", values=["auto", "float32"]),
                Axis(name="trainer.tokens_per_microbatch", values=[tokens, tokens // 2, tokens * 2]),
                *(replace(axis, name=keys[axis.name]) for axis in learned),
            ]
        whole = prompts * recipe.rollout.group_size
        own = recipe.algo.name if recipe.algo.name in ("grpo", "dr_grpo", "dapo") else "grpo"
        experts = [True, False] if "experts" in recipe.adapter.targets else [True]
        return [
            Axis(name="threads", values=list(torch_threads())),
            Axis(name="dtype", values=["float32", "bfloat16", "autocast"]),
            Axis(name="batch", values=[whole // 4, whole // 8, whole // 2]),
            Axis(name="paged", values=[False, True]),
            Axis(name="experts", values=experts, learns=True),
            Axis(name="loss", values=[own, "dapo"] if own != "dapo" else [own], learns=True),
            *learned,
        ]

    @staticmethod
    def table(result: Result) -> str:
        lines = [f"{name}: {_line(run)}" for name, runs in result["runs"].items() for run in runs]
        return "\n".join([*lines, page(result)] if "compared" in result else lines)


def page(result: Result) -> str:
    """The table of the page."""
    found = result["compared"]
    rows = []
    for share in map(str, SHARES):
        for cost in COSTS:
            one = found["shares"][share][cost]
            least = f" ({one['at_least']} lower bounds)" if one["at_least"] else ""
            cells = [_cell(one[name], one["of"]) for name in ("ours", "trl")]
            rows.append([f"{float(share):.0%} ({found['shares'][share]['target']:.3f})", NAMES[cost], *cells,
                         _cell(one["ratio"], one["of"]) + least])  # fmt: skip
    return markdown(["share of the gain", "cost", "ours", "TRL", "TRL / ours"], rows)


def _cell(one: Mapping[str, Any] | None, of: int) -> str:
    if one is None:
        return f"never (0 of {of})"
    low, high = one["interval"]
    within = "" if low is None or math.isnan(low) else f" [{low:.3g}, {high:.3g}]"
    return f"{one['mean']:.3g}{within}" + ("" if one["n"] == of else f" ({one['n']} of {of})")


def _line(run: Mapping[str, Any]) -> str:
    scores: Sequence[float] = run["scores"]
    pace = f"{run['wall_s'][-1]:.1f} s, {step_s(run):.2f} s a step, peak {run['peak_mb'][-1]:.0f} MB"
    return f"{scores[0]:.3f} -> {scores[-1]:.3f} in {pace}"
