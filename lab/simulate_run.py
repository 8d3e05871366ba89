"""``ostinato bench simulate --run RUN``: a run of several workers, and what the simulator makes of it.

Lengths and prompts are the run's (``log.trajectories_every = 1``). The seconds of the trainer, publications
and of the loop's own books are the timeline's. A cost table gives the shape of a pass; its height is fitted,
so that a simulated token takes the samplers the seconds that a token of the run took them. When what is done,
and who waits for whom, is then the simulator's own.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from lab.pipeline_work import Window, figures
from lab.simulate import DATA
from lab.simulator.events import Outcome, Setup, simulate
from lab.simulator.policies import Policy
from lab.simulator.sampler import Cost
from lab.simulator.traces import Stream, read_cost
from ostinato.config import Recipe
from ostinato.observe.timeline import Kind, Span, pool_of
from ostinato.run import RunFolder

FITS = 4  # rounds of fitting the height of the cost table
SAMPLING = (Kind.PREFILL, Kind.DECODE)


def run(path: Path, shape: str) -> dict[str, Any]:
    """Both, side by side. ``shape``: the recorded trace whose cost table is taken, by name."""
    folder = RunFolder(path)
    recipe = Recipe.load(str(path / "recipe.toml"))
    spans = [Span.of(row) for row in folder.timeline.rows()]
    cost = read_cost(DATA / f"simulator-{shape}.json", recipe.engine.max_batch)
    stream = recorded(folder, recipe.rollout.group_size)
    staleness, prompts = recipe.pipeline.staleness, recipe.rollout.prompts_per_step
    steps = len(stream.uids) // prompts
    setup = Setup(
        workers=len({span.worker for span in spans if pool_of(span.worker) == "samplers"}),
        cost=cost,
        prompts=prompts,
        steps=steps,
        staleness=staleness,
        policy=Policy(recipe.pipeline.placement),
        trained_s=train_seconds(spans),
        books_s=books_seconds(spans),
        publish_s=publish_seconds(spans),
        warmup=min(2 + staleness, steps - staleness - 1),
    )
    setup, found = fitted(setup, stream, token_seconds(spans, stream))
    drain = setup.steps - setup.last
    real = figures(folder, Window(steps=steps, warm_up=setup.warmup, drain=drain))
    return {"run": path.name, "workers": setup.workers, "staleness": staleness} | beside(real, found)


def recorded(folder: RunFolder, siblings: int) -> Stream:
    """The groups of a run in the order of the stream. ValueError where some were not kept."""
    lengths: dict[int, dict[int, int]] = defaultdict(dict)
    prompts: dict[int, tuple[str, int]] = {}
    for row in folder.trajectories.rows():
        _, _, place, sample = row["seed"]
        lengths[place][sample] = max(1, sum(len(turn["tokens"]) for turn in row["turns"]))
        prompts[place] = row["uid"], len(row["turns"][0]["context"])
    steps = sum(1 for _ in folder.metrics.rows())
    whole = [place for place in sorted(lengths) if len(lengths[place]) == siblings]
    if not whole or len({row["step"] for row in folder.trajectories.rows()}) < steps:
        raise ValueError(
            f"{folder.path.name} has not kept the answers of all steps; train with log.trajectories_every = 1"
        )
    return Stream(
        lengths=np.array([[lengths[place][i] for i in range(siblings)] for place in whole]),
        prompts=np.array([prompts[place][1] for place in whole]),
        uids=[prompts[place][0] for place in whole],
    )


def train_seconds(spans: Sequence[Span]) -> tuple[float, ...]:
    """Of each step, from the first on."""
    found: dict[int, float] = defaultdict(float)
    for span in spans:
        if span.kind in (Kind.TRAIN, Kind.PACK):
            found[span.step] += span.seconds
    return tuple(found[step] for step in sorted(found) if step > 0)


def books_seconds(spans: Sequence[Span]) -> float:
    """Mean time between two steps in which the trainer neither works nor waits for answers."""
    mine = [span for span in spans if pool_of(span.worker) == "trainer"]
    work = sorted((s for s in mine if s.kind in (Kind.TRAIN, Kind.PACK)), key=lambda span: span.start)
    between = []
    for before, after in itertools.pairwise(work):
        if before.step != after.step:
            waits = (s.seconds for s in mine if s.kind is Kind.WAIT and before.stop <= s.start < after.start)
            between.append(max(0.0, after.start - before.stop - sum(waits)))
    return statistics.fmean(between) if between else 0.0


def publish_seconds(spans: Sequence[Span]) -> float:
    seconds = [
        span.seconds for span in spans if span.kind is Kind.PUBLISH and pool_of(span.worker) == "samplers"
    ]
    return statistics.fmean(seconds) if seconds else 0.0


def token_seconds(spans: Sequence[Span], stream: Stream) -> float:
    """Seconds of the samplers, all together, per sampled token."""
    busy = sum(s.seconds for s in spans if s.kind in SAMPLING and pool_of(s.worker) == "samplers")
    return busy / float(stream.lengths.sum())


def fitted(setup: Setup, stream: Stream, token_s: float) -> tuple[Setup, Outcome]:
    """With a cost table so high that a token takes ``token_s``."""
    found = simulate(setup, stream)
    for _ in range(FITS):
        height = token_s / found.token_s
        cost = setup.cost
        higher = Cost(
            base=tuple(height * seconds for seconds in cost.base),
            attended_s=height * cost.attended_s,
            prefill_s=height * cost.prefill_s,
        )
        setup = replace(setup, cost=higher)
        found = simulate(setup, stream)
    return setup, found


def beside(real: Mapping[str, Any], found: Outcome) -> dict[str, Any]:
    """What the run and the simulator say of the same steps. Shares are of time."""
    samplers = [share for name, share in real["utilisation"].items() if name != "trainer"]
    step_s = 1 / real["steps_per_s"]
    return {
        "real_step_s": step_s,
        "simulated_step_s": found.step_s,
        "step_difference": found.step_s / step_s - 1,
        "real_bubble_share": 1 - statistics.fmean(samplers),
        "simulated_bubble_share": found.bubble_share,
        "real_trainer_idle_share": 1 - real["utilisation"]["trainer"],
        "simulated_trainer_idle_share": found.trainer_idle_share,
        "real_staleness_mean": real["staleness_mean"],
        "simulated_staleness_mean": found.staleness_mean,
    }


def table(result: Mapping[str, Any]) -> Table:
    shown = Table(title=f"{result['run']}: {result['workers']} samplers, staleness {result['staleness']}")
    for name in ("", "the run", "simulated"):
        shown.add_column(name, justify="right" if name else "left")
    for name, how in (
        ("step_s", ".3f"),
        ("bubble_share", ".1%"),
        ("trainer_idle_share", ".1%"),
        ("staleness_mean", ".2f"),
    ):
        shown.add_row(name, f"{result[f'real_{name}']:{how}}", f"{result[f'simulated_{name}']:{how}}")
    return shown
