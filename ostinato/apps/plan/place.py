"""``ostinato place``: which expert rank keeps which experts, from the routes that a run has recorded.

The answer is a file for ``parallel.placement``; what it is worth, beside neighbours and a placement that is
in use, is printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ostinato.parallel.load import expert_loads, imbalance
from ostinato.parallel.placement import (
    contiguous,
    owner_of,
    place,
    placed_experts,
    read_placement,
    write_placement,
)
from ostinato.run import RunFolder, recorded_routes


def command(run: Path, ranks: int, out: Path, *, nodes: int = 1, current: Path | None = None) -> None:
    """Read, place, write, print. Raises ValueError for a run without routes, or ranks that do not fit."""
    from ostinato.config import Recipe
    from ostinato.model.hf import read_config
    from ostinato.model.named import model_folder

    folder = RunFolder.open(run)
    recipe = Recipe.load(folder.recipe)
    config = read_config(model_folder(recipe.model.path))
    if config.moe is None:
        raise ValueError(f"{recipe.model.path} has no experts to place; name a run of a mixture of experts")
    routes = list(recorded_routes(folder).values())
    if len(routes) < 2:
        raise ValueError(
            f"{run} has kept routes of {len(routes)} steps; two at least are needed, so train with "
            "log.trajectories_every=1 and trainer.replay on"
        )
    windows = np.stack([expert_loads(one, config.moe.num_experts) for one in routes])
    layers, experts = windows.shape[1:]
    neighbours = contiguous(layers, experts, ranks)
    after = place(windows[::2].sum(0), ranks, nodes=nodes)
    owners = {"neighbours": neighbours, "placed": after}
    if current is not None:
        owners["current"] = owner_of(read_placement(current, ranks))
    _print(windows[1::2].sum(0), owners, ranks)
    write_placement(out, placed_experts(after, ranks))
    print(f"wrote {out}: use it with parallel.placement={out}")


def _print(judged: np.ndarray, owners: Mapping[str, np.ndarray], ranks: int) -> None:
    print(f"straggler factor (largest load of a rank / mean) under {ranks} expert ranks, judged by steps")
    print("that had no say in the placement:")
    for name, owner in owners.items():
        uneven = imbalance(judged, owner, ranks)
        print(f"  {name:<11} {uneven.straggler:.3f}, worst layer {uneven.worst_straggler:.3f}")
