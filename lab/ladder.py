"""Courses of the arms of recipes/arms/ladder.toml: ``python -m lab.ladder FOUND.json DATA.json OUT.svg``.

FOUND is what ``ostinato compare --json`` wrote; DATA is the same with the machine, what the page rests on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from lab.settings import machine


def main(found: Path, data: Path, out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "ladder"
    from matplotlib import pyplot

    result = json.loads(found.read_text(encoding="utf-8"))
    data.write_text(json.dumps({"machine": machine(), **result}) + "\n", encoding="utf-8")
    runs = result["runs"]
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for panel, along, label in zip(panels, ("compute", "played"), ("FLOP", "episodes"), strict=True):
        for number, arm in enumerate(dict.fromkeys(run["arm"] for run in runs)):
            mine = [run for run in runs if run["arm"] == arm]
            count = min(len(run[along]) for run in mine)
            scores = np.array([np.array(run["each"])[:count, ::2].mean(1) for run in mine])[:, 1:]
            spent = np.mean([run[along][1:count] for run in mine], axis=0)
            panel.plot(spent, scores.mean(0), marker="o", color=f"C{number}", markersize=3, label=arm)
            panel.fill_between(spent, scores.min(0), scores.max(0), color=f"C{number}", alpha=0.12)
        panel.set_xscale("log")
        panel.set_xlabel(label)
    panels[0].set_ylabel("pass@1, test half")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
