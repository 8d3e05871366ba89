"""``ostinato place``: which expert rank keeps which experts, from the routes that a run has recorded.

The answer is a file for ``parallel.placement``; what it is worth, beside neighbours and a placement that is
in use, is printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ostinato.parallel.load import expert_loads, imbalance, ranks_per_token
from ostinato.parallel.placement import contiguous, owner_of, place, placed_experts
from ostinato.parallel.placement_file import read, write
from ostinato.parallel.together import chosen_together, gathered
from ostinato.run import RunFolder, recorded_routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of the command."""

    run: Path
    ranks: int
    out: Path
    nodes: int = 1
    current: Path | None = None


def command(asked: Asked) -> None:
    """Read, place, write, tell. Raises ValueError for a run without routes, or ranks that do not fit."""
    from ostinato.config import Recipe
    from ostinato.model.hf import read_config
    from ostinato.model.named import model_folder

    folder = RunFolder.open(asked.run)
    recipe = Recipe.load(folder.recipe)
    config = read_config(model_folder(recipe.model.path))
    if config.moe is None:
        raise ValueError(f"{recipe.model.path} has no experts to place; name a run of a mixture of experts")
    routes = list(recorded_routes(folder).values())
    if len(routes) < 2:
        raise ValueError(
            f"{asked.run} has kept routes of {len(routes)} steps; two at least are needed, so train with "
            "log.trajectories_every=1 and trainer.replay on"
        )
    windows = np.stack([expert_loads(one, config.moe.num_experts) for one in routes])
    layers, experts = windows.shape[1:]
    neighbours = contiguous(layers, experts, asked.ranks)
    after = _placed(routes[::2], windows[::2].sum(0), asked)
    owners = {"neighbours": neighbours, "placed": after}
    if asked.current is not None:
        owners["current"] = owner_of(read(asked.current, asked.ranks))
    _tell(windows[1::2].sum(0), np.concatenate(routes[1::2]), owners, asked)
    write(asked.out, placed_experts(after, asked.ranks))
    print(f"wrote {asked.out}: use it with parallel.placement={asked.out}")


def _placed(routes: Sequence[np.ndarray], loads: np.ndarray, asked: Asked) -> np.ndarray:
    """Even loads first, then what tokens choose together; with nodes even loads alone, on nodes and ranks."""
    owner = place(loads, asked.ranks, nodes=asked.nodes)
    if asked.nodes > 1:
        return owner
    pairs = sum(chosen_together(one, loads.shape[1]) for one in routes)
    return gathered(owner, loads, np.asarray(pairs), asked.ranks)


def _tell(judged: np.ndarray, routes: np.ndarray, owners: Mapping[str, np.ndarray], asked: Asked) -> None:
    print(
        f"straggler factor (largest load of a rank / mean) under {asked.ranks} expert ranks, judged by steps"
    )
    print("that had no say in the placement:")
    for name, owner in owners.items():
        found = imbalance(judged, owner, asked.ranks)
        copies = ranks_per_token(routes, owner).mean()
        print(
            f"  {name:<11} {found.straggler:.3f}, worst layer {found.worst_straggler:.3f}; "
            f"a token's experts are on {copies:.3f} ranks"
        )


__all__ = ["Asked", "command"]
