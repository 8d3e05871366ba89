"""Survival and scores of recipes/arms/collapse.toml: ``python -m lab.collapse OUT.jsonl [RUNS ...]``.

RUNS are folders that ``ostinato ablate --out`` filled, one for each engine.weights; their runs become the
lines of OUT, and the tables are made of OUT alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from lab.paired import wilson
from ostinato.ablate.kept import ended, folders_in, slug
from ostinato.observe.report.reading import column, read_run
from ostinato.observe.stability import COLLAPSES, Watch
from ostinato.run import RunFolder, atomic_write

SMOOTH, LASTING, AT_LEAST = 5, 20, 5  # steps


def collapse_step(reward: Sequence[float]) -> int | None:
    """The first step (from 1) of a collapse, by the rule of lab/studies/2026-11-20-collapse: the mean
    of 5 steps below half of its own maximum so far, for 20 steps or, for 5 and more, to the end."""
    best, below = 0.0, 0
    for step in range(1, len(reward) + 1):
        mean = float(np.mean(reward[max(0, step - SMOOTH) : step]))
        best = max(best, mean)
        below = below + 1 if mean < best / 2 else 0
        if below == LASTING or (step == len(reward) and below >= AT_LEAST):
            return step - below + 1
    return None


def line(folder: Path, dose: str) -> dict[str, Any]:
    data, watch = read_run(RunFolder.open(folder)), Watch()
    alarms = [alarm for row in data.metrics for alarm in watch.see(row) if alarm.rule in COLLAPSES]
    reward = [one for one in column(data.metrics, "reward") if one is not None]
    done, last = ended(folder), data.exported or data.evals[-1]
    named = {slug(name): name for name in data.setting("ablate.arms")}
    return {
        "arm": named.get(folder.name.rpartition("-s")[0], "default"),
        "dose": dose,
        "seed": data.setting("seed", 0),
        "before": data.evals[0]["pass@1"],
        "after": last["pass@1"] if done else 0.0,
        "collapsed": collapse_step(reward) if done else len(reward),
        "watch": [[alarm.rule, alarm.since] for alarm in alarms],
        "reward": [round(one, 3) for one in reward],
        "measured": [
            {"step": row["step"], "differ": row["routers"]["differ"]}
            | {name: [arm["k3"], arm["abs_max"]] for name, arm in row["arms"].items()}
            for row in data.mismatch
        ],
    }


def tables(rows: Sequence[dict[str, Any]]) -> None:
    arms, doses = (list(dict.fromkeys(row[key] for row in rows)) for key in ("arm", "dose"))
    found = {(row["arm"], row["dose"], row["seed"]): row for row in rows}
    for dose in doses:
        print(f"\n| {dose} | survive | watch | final score | less none's | by seed |")
        print("|---|---|---|---|---|---|")
        for arm in arms:
            mine = [row for row in rows if (row["arm"], row["dose"]) == (arm, dose)]
            if not mine:
                continue
            alive, quiet = (sum(not row[key] for row in mine) for key in ("collapsed", "watch"))
            low, high = wilson(alive, len(mine))
            base = [found.get(("none", dose, row["seed"])) for row in mine]
            less = [row["after"] - one["after"] for row, one in zip(mine, base, strict=True) if one]
            print(
                f"| {arm} | {alive}/{len(mine)} ({low:.2f} to {high:.2f}) | {quiet}/{len(mine)} |"
                f" {mean([row['after'] for row in mine])} | {mean(less) if arm != 'none' else ''} |"
                f" {' '.join(format(row['after'], '.3f') for row in mine)} |"
            )


def mean(values: Sequence[float]) -> str:
    """With its 95 % interval by Student's t."""
    if len(values) < 2:
        return f"{np.mean(values):.3f}" if values else ""
    half = student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.3f} ({np.mean(values) - half:.3f} to {np.mean(values) + half:.3f})"


if __name__ == "__main__":
    out = Path(sys.argv[1])
    new = [line(one, root.name) for root in map(Path, sys.argv[2:]) for one in folders_in(root)]
    if new:
        atomic_write(out, "".join(json.dumps(row) + "\n" for row in new).encode())
    tables([json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()])
