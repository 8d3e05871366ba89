"""``ostinato place``: which expert rank keeps which experts, from the routes that a run has recorded.

The answer is a file for ``parallel.placement``. From a placement that is in use, experts move only where that
pays by the end of the run; what that is reckoned from is printed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ostinato.parallel.layout import Layout
from ostinato.parallel.load import expert_loads, imbalance, ranks_per_token
from ostinato.parallel.placement import Move, contiguous, owner_of, place, placed_experts, rebalanced
from ostinato.parallel.placement_file import read, write
from ostinato.parallel.together import chosen_together, gathered
from ostinato.run import RunFolder, recorded_routes

if TYPE_CHECKING:
    from ostinato.config import Recipe
    from ostinato.model.config import ModelConfig

WARM_UP = 3  # steps whose seconds do not count
GIGA = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The options of the command."""

    run: Path
    ranks: int
    out: Path
    nodes: int = 1
    current: Path | None = None
    link_gb_s: float = 1.0


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
    if asked.current is None:
        before, after = neighbours, _fresh(routes[::2], windows[::2].sum(0), asked)
    else:
        before = owner_of(read(asked.current, asked.ranks))
        layout = Layout.parse(recipe.parallel.layout)
        ranks = layout.expert * layout.expert_tensor
        found = Found(before=before, windows=windows, ranks=asked.ranks, measured=ranks)
        reckoned = moved(found, recipe, config, list(folder.metrics.rows()), asked.link_gb_s)
        _tell_move(reckoned)
        after = reckoned.move.owner
    owners = {"neighbours": neighbours, "before": before, "after": after}
    _tell(windows[1::2].sum(0), np.concatenate(routes[1::2]), owners, asked)
    write(asked.out, placed_experts(after, asked.ranks))
    print(f"wrote {asked.out}: use it with parallel.placement={asked.out}")


def _fresh(routes: Sequence[np.ndarray], loads: np.ndarray, asked: Asked) -> np.ndarray:
    """Even loads first, then what tokens choose together; with nodes even loads alone, on nodes and ranks."""
    owner = place(loads, asked.ranks, nodes=asked.nodes)
    if asked.nodes > 1:
        return owner
    pairs = sum(chosen_together(one, loads.shape[1]) for one in routes)
    return gathered(owner, loads, np.asarray(pairs), asked.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Experts on ``ranks`` by ``before`` [L, E], and the loads of single steps, ``windows`` [W, L, E], of a
    run whose experts were on ``measured``."""

    before: np.ndarray
    windows: np.ndarray
    ranks: int
    measured: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reckoned:
    """A move, and what it was reckoned from."""

    move: Move
    steps: int
    row_s: float
    expert_bytes: int
    link_gb_s: float


def moved(
    found: Found, recipe: Recipe, config: ModelConfig, rows: Sequence[Mapping[str, Any]], link_gb_s: float
) -> Reckoned:
    """From a placement in use to the one that pays best over the steps that are left."""
    steps = max(0, recipe.trainer.steps - max((int(row["step"]) for row in rows), default=0))
    row_s = pair_seconds(rows, found.windows, config, found.measured)
    size = expert_bytes(config, 4 if recipe.model.dtype == "float32" else 2)
    move = rebalanced(
        found.before,
        found.windows,
        ranks=found.ranks,
        steps=steps,
        row_s=row_s,
        expert_bytes=size,
        bytes_per_s=link_gb_s * GIGA,
    )
    return Reckoned(move=move, steps=steps, row_s=row_s, expert_bytes=size, link_gb_s=link_gb_s)


def _tell_move(found: Reckoned) -> None:
    move, pair_us = found.move, 1e6 * found.row_s
    print(
        f"reckoned from {found.steps} steps to come, {pair_us:.3g} us of a rank for a (token, expert) pair, "
        f"{found.expert_bytes:,} bytes of an expert and links of {found.link_gb_s:g} GB/s:"
    )
    said = f"{move.moved_bytes:,} bytes: {move.cost_s:.3g} s that save {move.gain_s:.3g} s"
    print(f"  {move.moved} experts move, {said}")


def pair_seconds(
    rows: Sequence[Mapping[str, Any]], windows: np.ndarray, config: ModelConfig, ranks: int = 1
) -> float:
    """Seconds of one rank for one (token, expert) pair, forward and backward: the experts' share of the FLOPs
    of a forward, of the median seconds of training, over the recorded pairs of a step. ``ranks``: over how
    many the experts were spread in that run, each of which did its part of the pairs in those seconds."""
    from ostinato.model.flops import FlopModel, Part

    seconds = [row["time/train_s"] for row in rows[WARM_UP:] or rows if "time/train_s" in row]
    parts = FlopModel.of(config, None).parts
    total = sum(rates.tokens + rates.logits for rates in parts.values())
    share = parts[Part.EXPERTS].tokens / total
    return ranks * share * statistics.median(seconds or [0.0]) / float(windows.sum((1, 2)).mean())


def expert_bytes(config: ModelConfig, itemsize: int) -> int:
    """Of the frozen weights of one expert of a layer; its adapters, a hundredth of that, are left out."""
    assert config.moe is not None
    return 3 * config.hidden_size * config.moe.intermediate_size * itemsize


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


__all__ = ["Asked", "Found", "Reckoned", "command", "moved"]
