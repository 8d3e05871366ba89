"""``ostinato bench experts``: what the placement of experts on ranks is worth.

    recorded   routes that a run has recorded, step by step. Placed by the first half of the steps, judged
               by the second: straggler factor (largest load of a rank over the mean, of every layer and
               step), and over how many ranks the experts of a token are spread
    drawn      log-normal popularity of 384 experts, as published figures have it; placed by loads of one
               sample of tokens, judged by another
    timed      the mixture layers forward and backward on ranks of this machine, one core each: experts as
               they come against experts placed, the same rows, in turn

Steps are independent looks at one popularity, so the second half is what a placement meets in use.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table

from lab.contender import ContenderFailed
from lab.experts_timed import Case, timed
from lab.settings import Clock, machine
from lab.whole_runs import trained
from ostinato.parallel.load import expert_loads, rank_loads, ranks_per_token, stragglers
from ostinato.parallel.placement import contiguous, lower_bound, place, rebalanced, scattered
from ostinato.parallel.together import chosen_together, gathered
from ostinato.run import RunFolder, recorded_routes
from ostinato.types import NO_EXPERT

Say = Callable[[str], None]
ARRANGED = ("contiguous", "random", "placed", "together", "redone", "hindsight")
REDONE_EVERY, LOOKED_BACK = 5, 10  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``run``: a folder with trajectories of every step; empty: ``steps`` of ``recipe`` are trained."""

    run: str = ""
    recipe: str = "quickstart"
    steps: int = 40
    ranks: tuple[int, ...] = (2, 4, 8, 16)
    drawn_ranks: tuple[int, ...] = (8, 16, 32, 64)
    draws: int = 200
    experts: int = 384
    top_k: int = 8
    sigma: float = 0.7  # of the logarithm of popularity
    tokens: int = 65_536  # of a drawn step
    sizes: tuple[tuple[int, int], ...] = (
        (256, 128),
        (512, 512),
    )  # hidden, width of an expert; of what is timed
    rows: int = 2048  # of each rank, timed
    rounds: int = 11
    clock: Clock = Clock.WALL
    limit_s: float = 900.0

    def shortened(self) -> Plan:
        """Whether it works, not what it says."""
        return replace(self, steps=4, draws=5, rows=128, rounds=2, sizes=self.sizes[:1])


def run(plan: Plan, say: Say = print) -> dict[str, Any]:
    """Measure, and return the JSON of the command. Raises ContenderFailed where a run or a rank does not end
    well, ValueError for a run without routes."""
    if plan.run:
        steps, num_experts = recorded(RunFolder.open(Path(plan.run)))
    else:
        with tempfile.TemporaryDirectory(prefix="ostinato-bench-") as root:
            steps, num_experts = recorded(_trained(plan, Path(root)))
    say(f"{sum(map(len, steps))} tokens of {len(steps)} steps have routes, to {num_experts} experts")
    possible = [ranks for ranks in plan.ranks if num_experts % ranks == 0]
    return {
        "recorded": {
            "steps": len(steps),
            "tokens": sum(map(len, steps)),
            "experts": num_experts,
            "largest_over_mean": float(np.mean(stragglers(windows_of(steps, num_experts)))),
            "factors": [row for ranks in possible for row in of_recorded(steps, num_experts, ranks)],
        },
        "drawn": [row for ranks in plan.drawn_ranks for row in of_drawn(plan, ranks)],
        "timed": [_timed(plan, case, say) for case in cases(plan, steps, num_experts)],
        "settings": asdict(plan),
        "machine": machine(),
    }


# ---- recorded routes


def _trained(plan: Plan, logs: Path) -> RunFolder:
    overrides = [
        f"trainer.steps={plan.steps}",
        "trainer.checkpoint_every=0",
        "eval.every=0",
        "eval.n=1",
        "log.mismatch_every=0",
        "log.trajectories_every=1",
    ]
    return trained(plan.recipe, overrides, logs, f"that records {plan.steps} steps", limit_s=plan.limit_s)


def recorded(folder: RunFolder) -> tuple[list[np.ndarray], int]:
    """(by step the routes [T, L, K] of its answers, how many experts there are). The expert that nobody chose
    in a whole run is not counted where it is the last one. Raises ValueError where there are none."""
    whole = list(recorded_routes(folder).values())
    if len(whole) < 2:
        raise ValueError(
            f"{folder.path} has routes of {len(whole)} steps; record two at least, of a mixture of experts, "
            "with log.trajectories_every=1"
        )
    return whole, 1 + max(int(routes.max()) for routes in whole)


def windows_of(steps: Sequence[np.ndarray], num_experts: int) -> np.ndarray:
    """[W, L, E]: the loads of every step."""
    return np.stack([expert_loads(routes, num_experts) for routes in steps])


def of_recorded(steps: Sequence[np.ndarray], num_experts: int, ranks: int) -> list[dict[str, Any]]:
    """A row for each arrangement of the experts on ``ranks``."""
    half = len(steps) // 2
    windows = windows_of(steps, num_experts)
    seen, judged = windows[:half].sum(0), windows[half:].sum(0)
    found = {name: [owner] * (len(steps) - half) for name, owner in _arranged(seen, judged, ranks)}
    pairs = chosen_together(np.concatenate(steps[:half]), num_experts)
    found["together"] = [gathered(found["placed"][0], seen, pairs, ranks)] * (len(steps) - half)
    found["redone"] = _redone(windows, found["placed"][0], ranks, half)
    rows = []
    for name in ARRANGED:
        owners = found[name]
        by_rank = [rank_loads(one, owner, ranks) for one, owner in zip(windows[half:], owners, strict=True)]
        spread = [ranks_per_token(one, owner).mean() for one, owner in zip(steps[half:], owners, strict=True)]
        moved = sum(int((after != before).sum()) for before, after in pairwise(owners))
        rows.append(
            {"ranks": ranks, "placement": name, **_factors(np.stack(by_rank))}
            | {"ranks_per_token": float(np.mean(spread)), "moved": moved}
        )
    judged = windows[half:]
    bound = float(lower_bound(judged.sum(0), ranks).sum() / (judged.sum((0, 2)) / ranks).sum())
    return [row | {"bound": bound} for row in rows]


def _redone(windows: np.ndarray, owner: np.ndarray, ranks: int, start: int) -> list[np.ndarray]:
    """For each window from ``start`` on the placement that is in use: every few windows moved on from the one
    before, by the latest windows, wherever that saves anything at all."""
    owners = []
    for step in range(start, len(windows)):
        if step > start and (step - start) % REDONE_EVERY == 0:
            latest = windows[max(0, step - LOOKED_BACK) : step]
            owner = rebalanced(
                owner, latest, ranks=ranks, steps=1, row_s=1.0, expert_bytes=0, bytes_per_s=1.0
            ).owner
        owners.append(owner)
    return owners


def _arranged(seen: np.ndarray, judged: np.ndarray, ranks: int) -> Iterator[tuple[str, np.ndarray]]:
    """Placements of experts whose loads [L, E] were ``seen`` before the ``judged`` ones."""
    layers, experts = seen.shape
    yield "contiguous", contiguous(layers, experts, ranks)
    yield "random", scattered(layers, experts, ranks)
    yield "placed", place(seen, ranks)
    yield "hindsight", place(judged, ranks)  # by what it is judged by: how much was left to gain


def _factors(by_rank: np.ndarray) -> dict[str, float]:
    """Of loads [W, L, R]. ``straggler``: what the layers of all steps take together, over what they would
    take evenly; ``windowless``: of all steps added up, where the luck of single steps averages out."""
    whole = by_rank.sum(0)
    return {
        "straggler": float(by_rank.max(-1).sum() / by_rank.mean(-1).sum()),
        "windowless": float(whole.max(-1).sum() / whole.mean(-1).sum()),
        "worst_layer": float((by_rank.max(-1).sum(0) / by_rank.mean(-1).sum(0)).max()),
    }


# ---- drawn popularity


def of_drawn(plan: Plan, ranks: int) -> list[dict[str, Any]]:
    """A row for each arrangement, over ``draws`` layers with a popularity of their own."""
    rng = np.random.default_rng(0)
    popularity = rng.lognormal(0.0, plan.sigma, (plan.draws, plan.experts))
    shares = popularity / popularity.sum(axis=1, keepdims=True)
    seen, judged = (rng.multinomial(plan.tokens * plan.top_k, shares) for _ in range(2))
    rows = []
    for name, owner in _arranged(seen, judged, ranks):
        found = stragglers(rank_loads(judged, owner, ranks))
        low, high = np.quantile(found, [0.05, 0.95])
        rows.append(
            {"ranks": ranks, "placement": name, "straggler": float(found.mean()), "low": low, "high": high}
        )
    bound = float((lower_bound(judged, ranks) / (judged.sum(1) / ranks)).mean())
    return [row | {"bound": bound} for row in rows]


# ---- timed


def cases(plan: Plan, steps: Sequence[np.ndarray], num_experts: int) -> list[Case]:
    """Recorded routes of later steps, at each size, and eight experts of drawn popularity, where ranks are
    uneven indeed."""
    half, ranks = len(steps) // 2, 2
    later = np.concatenate(steps[half:])
    later = later[later[:, 0, 0] != NO_EXPERT]
    routes = later[:: max(1, len(later) // (ranks * plan.rows))][: ranks * plan.rows]  # of all these steps
    placed = place(windows_of(steps[:half], num_experts).sum(0), ranks)
    sizes = [{"hidden": hidden, "width": width} for hidden, width in plan.sizes]
    found = [
        Case(name="recorded", routes=routes, experts=num_experts, ranks=ranks, placed=placed, **size)
        for size in sizes
    ]
    seen, drawn = (_drawn_routes(plan, len(routes), seed) for seed in (1, 2))
    placed = place(expert_loads(seen, 8), ranks)
    return [*found, Case(name="drawn", routes=drawn, experts=8, ranks=ranks, placed=placed, **sizes[-1])]


def _drawn_routes(plan: Plan, tokens: int, seed: int) -> np.ndarray:
    """[T, 1, 2]: two of eight experts, without replacement (Gumbel top-2), the same popularity whatever the
    seed, in descending order."""
    popularity = np.sort(np.random.default_rng(0).lognormal(0.0, plan.sigma, 8))[::-1]
    noisy = np.log(popularity) + np.random.default_rng(seed).gumbel(size=(tokens, 8))
    return np.argsort(-noisy, axis=1)[:, None, :2].astype(np.int8)


def _timed(plan: Plan, case: Case, say: Say) -> dict[str, Any]:
    say(f"{case.name}: {len(case.routes)} rows, hidden {case.hidden}, experts of width {case.width}")
    return timed(case, plan.rounds, plan.limit_s, plan.clock)


# ---- tables


def table(result: Mapping[str, Any]) -> RenderableType:
    recorded, settings = result["recorded"], result["settings"]
    of_recorded = Table(
        title=f"Recorded routes: {recorded['tokens']:,} tokens, {recorded['experts']} experts, judged by the "
        f"second half of {recorded['steps']} steps; straggler = largest load / mean",
        title_justify="left",
    )
    for column in (
        "ranks",
        "experts",
        "straggler",
        "worst layer",
        "all steps at once",
        "bound",
        "ranks/token",
        "moved",
    ):
        of_recorded.add_column(column, justify="left" if column == "experts" else "right")
    for row in recorded["factors"]:
        names = ("straggler", "worst_layer", "windowless", "bound", "ranks_per_token")
        of_recorded.add_row(
            str(row["ranks"]), row["placement"], *(f"{row[name]:.3f}" for name in names), str(row["moved"])
        )
    drawn = Table(
        title=f"{settings['experts']} experts, log-normal({settings['sigma']}) popularity, "
        f"{settings['draws']} draws, {settings['tokens']:,} tokens",
        title_justify="left",
    )
    for column in ("ranks", "experts", "straggler", "5 to 95 %", "bound"):
        drawn.add_column(column, justify="left" if column == "experts" else "right")
    for row in result["drawn"]:
        span = f"{row['low']:.2f} to {row['high']:.2f}"
        drawn.add_row(
            str(row["ranks"]), row["placement"], f"{row['straggler']:.3f}", span, f"{row['bound']:.3f}"
        )
    return Stack(of_recorded, drawn, _timed_table(result["timed"]))


def _timed_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    shown = Table(
        title="Two ranks, one thread each: mixture layers, forward and backward", title_justify="left"
    )
    for column in (
        "routes",
        "hidden x width",
        "straggler",
        "placed",
        "ms",
        "placed ms",
        "ratio",
        "predicted",
    ):
        shown.add_column(column, justify="left" if column == "routes" else "right")
    for row in rows:
        time = row["time"]
        shown.add_row(
            row["name"],
            f"{row['hidden']} x {row['width']}",
            f"{row['straggler']:.3f}",
            f"{row['straggler_placed']:.3f}",
            f"{1e3 * time['base_s']:.1f}",
            f"{1e3 * time['other_s']:.1f}",
            f"{time['ratio']:.3f} [{time['low']:.3f}, {time['high']:.3f}]",
            f"{row['straggler_placed'] / row['straggler']:.3f}",
        )
    return shown


__all__ = ["ContenderFailed", "Plan", "run", "table"]
