"""``ostinato bench side``: runs side by side on one base, against the same runs one after the other.

Every way is processes of their own, watched from outside: seconds from start to end, processor seconds, and
the most memory that a process and its children had. The runs differ in their seeds.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from lab.harness import Bench, Result, Say, columns, option
from lab.race.meter import Meter
from lab.whole_runs import output
from ostinato.config import Recipe, dump_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Side(Bench):
    """Seconds, processor seconds and peak MB of runs side by side, and of each of them alone."""

    runs: int = option(4, "How many.")
    recipe: str = option("quickstart", "A recipe, by name or file.")
    steps: int = option(10, "Of each run.")
    drafts: bool = option(True, "Of the runs alone; side by side there are none.")
    keys: tuple[str, ...] = option(("eval.at_start=false", "eval.every=0"), "Of all runs, with commas.")

    def quick(self) -> Side:
        return replace(self, runs=2, steps=2)

    def measure(self, say: Say) -> dict[str, Any]:
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            recipes = [self._write(Path(folder), seed) for seed in range(self.runs)]
            for recipe in recipes:
                rows.append(
                    {
                        "name": f"{recipe.stem} alone",
                        **_measure([recipe], [f"draft.enabled={str(self.drafts).lower()}"]),
                    }
                )
                say(_line(rows[-1]))
            rows.append({"name": f"{self.runs} side by side", **_measure(recipes, [])})
            say(_line(rows[-1]))
        *alone, side = rows
        ratios = {
            "wall": side["wall_s"] / sum(row["wall_s"] for row in alone),
            "memory": side["peak_mb"] / max(row["peak_mb"] for row in alone),
        }
        return {"recipe": self.recipe, "rows": rows, "ratios": ratios}

    def _write(self, folder: Path, seed: int) -> Path:
        words = [f"seed={seed}", f"trainer.steps={self.steps}", f"log.dir={folder / 'runs'}", *self.keys]
        file = folder / f"seed-{seed}.toml"
        file.write_text(dump_toml(Recipe.load(self.recipe, *words)))
        return file

    @staticmethod
    def table(result: Result) -> Table:
        names = ("wall_s", "cpu_s", "peak_mb")
        rows = [(row["name"], *(f"{row[name]:,.1f}" for name in names)) for row in result["rows"]]
        ratios = result["ratios"]
        title = (
            f"{result['recipe']}: side by side takes {ratios['wall']:.2f} of the time of one after the other "
            f"and {ratios['memory']:.2f} of the memory of one"
        )
        return columns(title, ("runs", *names), rows)


def _measure(recipes: Sequence[Path], keys: Sequence[str]) -> dict[str, float]:
    """What ``ostinato train`` takes with these recipes. Raises ContenderFailed."""
    command = [sys.executable, "-m", "ostinato", "train", *map(str, recipes), *keys]
    with contextlib.closing(Meter()) as meter:
        start = time.perf_counter()
        output(f"the run of {recipes[0].name}", command, started=meter.follow)
        wall_s = time.perf_counter() - start
    cpu_s, peak_mb = meter.at(time.time())
    return {"wall_s": wall_s, "cpu_s": cpu_s, "peak_mb": peak_mb}


def _line(row: dict[str, Any]) -> str:
    return f"{row['name']}: {row['wall_s']:.1f} s, {row['cpu_s']:.1f} CPU s, {row['peak_mb']:,.0f} MB"
