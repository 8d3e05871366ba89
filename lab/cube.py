"""``ostinato bench cube``: drafts from history, HistoPipe and overlap, each on and off, on two cores.

All eight ways train the same recipe on the same prompts, which come back every few steps, so that there are
drafts and lengths to predict. Two samplers have a core each; the trainer, in the process that runs the loop,
takes from both what it needs. A round is a seed: all eight ways once, another one first each time, and every
ratio is of one round. The baseline is synchronous, least-loaded, without drafts.

Beside each way stands what the simulator makes of its answers. Seconds of a pass, of a trained token and of
the loop are those of the round's baseline; with overlap, where trainer and samplers slow each other, those of
the round's run with overlap alone. Tokens and rows of a pass with drafts are of the run itself.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from lab.harness import Bench, Result, Say, columns, option, seeds
from lab.pipeline_work import SMOLLM2, Window, Work, figures, write_prompts
from lab.simulator.events import Mode, Setup, simulate
from lab.simulator.policies import Policy
from lab.simulator.recorded import answers, batched, calibrated, longer, pass_cost
from lab.simulator.sampler import Cost
from lab.whole_runs import allowed_cores, trained
from ostinato.apps.scaling.noise import student_90
from ostinato.config import Recipe
from ostinato.launch.cluster import AHEAD
from ostinato.launch.dtype import resolved
from ostinato.launch.models import load_decoder
from ostinato.model.named import model_folder
from ostinato.observe.timeline import Span
from ostinato.run import RunFolder

FACTORS = {
    "drafts": ("draft.enabled=true",),
    "histopipe": ("pipeline.placement=histopipe",),
    "overlap": ("pipeline.overlap=true", "pipeline.staleness=2"),
}
CELLS = tuple(product((0, 1), repeat=len(FACTORS)))
WORKS = {
    "seed-moe": replace(Work(), prompts=16, distinct=72, max_tokens=160, slots=32, scored=64),
    "smollm2-135m": replace(SMOLLM2, max_tokens=128, distinct=8, slots=4, scored=8),  # passes wait for memory
}
RUN_LIMIT_S = 1200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cube(Bench):
    """Steps per second of each of the eight ways over the baseline's, and of each part over its absence."""

    model: str = option("seed-moe", f"One of {', '.join(WORKS)}.")
    seeds: tuple[int, ...] = option((0, 1, 2), "Rounds: how many, or FIRST:END.", parse=seeds)
    steps: int = option(20, "Of every run; the first five and the last three are not measured.")
    keep: str = option("", "Folder that keeps the runs; empty: they are deleted.")

    def __post_init__(self) -> None:
        if self.model not in WORKS:
            raise ValueError(f"model is {self.model!r}; use one of {', '.join(WORKS)}")
        _ = self.window

    @property
    def window(self) -> Window:
        return Window(steps=self.steps, warm_up=5, drain=3)

    def quick(self) -> Cube:
        return replace(self, seeds=self.seeds[:1], steps=10)

    def measure(self, say: Say) -> dict[str, Any]:
        work, runs = WORKS[self.model], []
        folders: dict[tuple[int, tuple[int, ...]], RunFolder] = {}
        model = resolved(Recipe.load(work.recipe)).model
        cost = pass_cost(load_decoder(model, model_folder(model.path)))
        kept = nullcontext(self.keep) if self.keep else tempfile.TemporaryDirectory(prefix="ostinato-bench-")
        with kept as place:
            root = Path(place)
            root.mkdir(parents=True, exist_ok=True)
            prompts = write_prompts(work, root / "prompts.jsonl")
            for seed, cell in turns(self.seeds):
                name = f"{named(cell)}, seed {seed}"
                keys = (
                    *work.overrides(prompts),
                    *overrides(cell),
                    f"seed={seed}",
                    f"trainer.steps={self.steps}",
                )
                logs = root / f"{seed}-{''.join(map(str, cell))}"
                if logs.exists():
                    raise ValueError(f"{logs} is of another call; name an empty folder for --keep")
                folder = trained(
                    work.recipe, keys, logs, name, cores=allowed_cores()[:2], limit_s=RUN_LIMIT_S
                )
                folders[seed, cell] = folder
                runs.append({"cell": list(cell), "seed": seed} | figures(folder, self.window))
                say(f"{name}: {runs[-1]['steps_per_s']:.3f} steps/s, reward {runs[-1]['reward']:.3f}")
            for run in runs:
                here, first = (
                    folders[run["seed"], cell] for cell in (tuple(run["cell"]), plain(run["cell"]))
                )
                run["simulated"] = simulated(work, here, first, cost, self.window)
        return {"runs": runs, **compared(runs)}

    @staticmethod
    def table(result: Result) -> Any:
        rows = [
            [name, f"{one['steps_per_s']:.3f}", _times(one["ratio"]), *_beside(one), f"{one['reward']:.3f}"]
            for name, one in result["cells"].items()
        ]
        rows += [
            [f"{name}, over its absence", "", _times(one), "", "", ""]
            for name, one in result["effects"].items()
        ]
        names = ("", "steps/s", "ratio [90 %]", "simulated steps/s", "off by", "reward")
        return columns("two cores, two samplers", names, rows)


def plain(cell: Sequence[int]) -> tuple[int, ...]:
    """The way whose seconds a simulation has: least-loaded without drafts, synchronous or with overlap."""
    return (0, 0, cell[2])


def simulated(
    work: Work, folder: RunFolder, baseline: RunFolder, cost: Cost, window: Window
) -> dict[str, float]:
    """Steps per second of the answers of ``folder``, by the seconds of the run ``baseline``, and the mean
    tokens of a sequence in a pass. ``cost``: of a pass by its rows."""
    recipe, first = Recipe.load(folder.recipe), answers(baseline, work.siblings)
    setup = Setup(
        workers=recipe.cluster.samplers,
        ahead=AHEAD,
        cost=batched(cost, work.slots),
        prompts=work.prompts,
        steps=window.steps,
        mode=Mode.PIPELINE if recipe.pipeline.overlap else Mode.LOCKSTEP,
        staleness=recipe.pipeline.staleness,
        warmup=0,
    )
    setup = calibrated(setup, first, [Span.of(row) for row in baseline.timeline.rows()])
    stream, per_pass = answers(folder, work.siblings), 1.0
    if recipe.draft.enabled:
        kept = list(folder.metrics.rows())
        sampled, drafted = (
            sum(row.get(f"tokens/{name}", 0.0) for row in kept) for name in ("sampled", "drafted")
        )
        per_pass = statistics.fmean(row.get("draft/tokens_per_pass") or 1.0 for row in kept)
        more = setup.cost.base[work.slots] - batched(cost, work.slots).base[work.slots]
        setup = replace(
            setup,
            cost=longer(batched(cost, work.slots, 1 + drafted / sampled * per_pass), more),
            train_token_s=setup.train_token_s * per_pass,
        )
        stream = replace(stream, lengths=np.ceil(stream.lengths / per_pass).astype(int))
    ends = simulate(replace(setup, policy=Policy(recipe.pipeline.placement)), stream).steps_s
    rate = window.measured / (ends[window.steps - window.drain - 1] - ends[window.warm_up - 1])
    return {"steps_per_s": rate, "tokens_per_pass": per_pass}


def overrides(cell: Sequence[int]) -> tuple[str, ...]:
    """What a way changes of the recipe: the later key wins."""
    workers = ("engine.threads=1", "cluster.samplers=2", "cluster.pin=true", "log.trajectories_every=1")
    return (*workers, *(key for keys, on in zip(FACTORS.values(), cell, strict=True) if on for key in keys))


def named(cell: Sequence[int]) -> str:
    return " + ".join(name for name, on in zip(FACTORS, cell, strict=True) if on) or "baseline"


def turns(rounds: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    for seed in rounds:
        shift = seed * 3 % len(CELLS)
        yield from ((seed, cell) for cell in (*CELLS[shift:], *CELLS[:shift]))


def compared(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Ratios of steps per second within each round: of every cell over the baseline, and of every part over
    its absence (the mean of logarithms over the four settings of the other two)."""
    logs = {(tuple(run["cell"]), run["seed"]): math.log(run["steps_per_s"]) for run in runs}
    rounds = sorted({run["seed"] for run in runs})
    cells = {
        named(cell): {
            "steps_per_s": statistics.median(math.exp(logs[cell, seed]) for seed in rounds),
            "ratio": interval([logs[cell, seed] - logs[CELLS[0], seed] for seed in rounds]),
            "simulated": statistics.median(
                run["simulated"]["steps_per_s"] for run in runs if tuple(run["cell"]) == cell
            ),
            "reward": statistics.fmean(run["reward"] for run in runs if tuple(run["cell"]) == cell),
        }
        for cell in CELLS
    }
    effects = {
        name: interval(
            [
                statistics.fmean((1 if cell[place] else -1) * logs[cell, seed] for cell in CELLS) * 2
                for seed in rounds
            ]
        )
        for place, name in enumerate(FACTORS)
    }
    return {"cells": cells, "effects": effects}


def interval(logs: Sequence[float]) -> dict[str, float | None]:
    """Geometric mean of ratios, with its 90 % interval (Student's); none of a single round."""
    middle, n = statistics.fmean(logs), len(logs)
    half = student_90(n - 1) * statistics.stdev(logs) / math.sqrt(n) if n > 1 else None
    return {
        "ratio": math.exp(middle),
        "low": None if half is None else math.exp(middle - half),
        "high": None if half is None else math.exp(middle + half),
    }


def _beside(one: Mapping[str, float]) -> tuple[str, str]:
    return f"{one['simulated']:.3f}", f"{one['simulated'] / one['steps_per_s'] - 1:+.0%}"


def _times(one: Mapping[str, float | None]) -> str:
    spread = "" if one["low"] is None else f" [{one['low']:.2f}, {one['high']:.2f}]"
    return f"{one['ratio']:.2f}x{spread}"
