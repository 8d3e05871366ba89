"""``ostinato bench quickstart``: whole runs of a recipe, each a process of its own, from start to report."""

from __future__ import annotations

import statistics
import tempfile
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.harness import Bench, Result, Say, option, seeds
from lab.whole_runs import trained
from ostinato.run import GREEDY_SET, MAIN_SET


@dataclass(frozen=True, slots=True, kw_only=True)
class Quickstart(Bench):
    """Of each seed: seconds of the process, dtype, steps and their median seconds, and the first and the last
    row of eval.jsonl, sampled and greedy."""

    seeds: tuple[int, ...] = option((0, 1, 2), "How many, or FIRST:END.", parse=seeds)
    recipe: str = option("quickstart", "A recipe, by name or file.")

    def measure(self, say: Say) -> dict[str, Any]:
        runs = []
        for seed in self.seeds:
            with tempfile.TemporaryDirectory() as logs:
                start = time.perf_counter()
                folder = trained(self.recipe, [f"seed={seed}"], Path(logs), f"of seed {seed}")
                seconds = time.perf_counter() - start
                evals = list(folder.eval.rows())
                scores, greedy = (
                    [row for row in evals if row.get("set", MAIN_SET) == name]
                    for name in (MAIN_SET, GREEDY_SET)
                )
                steps = list(folder.metrics.rows())
                dtype = tomllib.loads(folder.recipe.read_text(encoding="utf-8"))["model"]["dtype"]
            runs.append(
                {
                    "seed": seed,
                    "seconds": round(seconds, 1),
                    "dtype": dtype,
                    "steps": len(steps),
                    "step_s": round(statistics.median(row["step_time"] for row in steps), 3),
                    "before": scores[0],
                    "after": scores[-1],
                    "greedy_before": greedy[0],
                    "greedy_after": greedy[-1],
                }
            )
            say(_line(runs[-1]))
        return {"recipe": self.recipe, "runs": runs}

    @staticmethod
    def table(result: Result) -> str:
        return "\n".join(_line(run) for run in result["runs"])


def _line(run: Mapping[str, Any]) -> str:
    before, after = run["before"]["pass@1"], run["after"]["pass@1"]
    return f"seed {run['seed']}: {run['seconds']:.0f} s, held-out pass@1 {before:.3f} -> {after:.3f}"
