"""The curve of ``ostinato bench memory`` as a picture: ``python -m lab.forgetting.picture DATA.json
OUT.svg``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

WHOLE = ("full context", "evidence alone")


def main(data: Path, out: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "memory"
    from matplotlib import pyplot

    rows = json.loads(data.read_text(encoding="utf-8"))["rows"]
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for name in dict.fromkeys(row["contender"] for row in rows):
        mine = [row for row in rows if row["contender"] == name]
        if name in WHOLE or name.startswith(("without", "all parts")):
            continue
        budgets = sorted({row["budget"] for row in mine})
        means = [np.mean([row["accuracy"] for row in mine if row["budget"] == budget]) for budget in budgets]
        bold = name == "trained memory"
        axes.plot(budgets, means, marker="o", linewidth=2.5 if bold else 1.2, label=name)
    axes.axhline(0.2, color="grey", linestyle=":", label="an empty context")
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.set_xlabel("budget of the context, tokens")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
