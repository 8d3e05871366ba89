"""The curves of ``ostinato bench race`` as a picture: ``python -m lab.race.picture OUT.svg DATA.json..``"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

LOOKS = {"ours": ("ostinato", "tab:blue"), "trl": ("TRL", "tab:orange")}


def main(out: Path, data: Sequence[Path]) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "race"
    from matplotlib import pyplot

    figure, places = pyplot.subplots(1, len(data), figsize=(5.5 * len(data), 4), squeeze=False)
    for axes, file in zip(places[0], data, strict=True):
        result = json.loads(file.read_text(encoding="utf-8"))
        for name, runs in result["runs"].items():
            label, color = LOOKS[name]
            for run in runs:
                axes.plot(run["wall_s"][1:], run["scores"][1:], color=color, alpha=0.3, linewidth=0.8)
            times, scores = (np.mean([run[key] for run in runs], axis=0)[1:] for key in ("wall_s", "scores"))
            axes.plot(times, scores, color=color, linewidth=2.2, marker="o", markersize=3, label=label)
        if "compared" in result:
            for share, row in result["compared"]["shares"].items():
                axes.axhline(row["target"], color="grey", linestyle=":", linewidth=0.8)
                axes.annotate(f"{float(share):.0%}", (0, row["target"]), xycoords=("axes fraction", "data"))
        axes.set_xscale("log")
        axes.set_xlabel("seconds from the first step")
        axes.set_ylabel("held-out score")
        axes.set_title(f"{result['settings']['recipe']}, {len(result['settings']['seeds'])} seeds")
        axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(word) for word in sys.argv[2:]])
