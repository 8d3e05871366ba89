"""Graders of a recipe's reward functions, which run in children of this process or of a worker, without
torch."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from ostinato.config import Recipe
from ostinato.reward.remote import GraderServer
from ostinato.reward.workers import Scorer, WorkerGrader
from ostinato.workers.host import own_place
from ostinato.workers.remote import WorkerFault


def new_grader(
    recipe: Recipe, scorers: Mapping[str, Scorer] = MappingProxyType({}), counters: Counter[str] | None = None
) -> WorkerGrader:
    """Make the grader of a recipe; its children are not started yet. ``scorers``: the judges among its
    functions, by name. ``counters``: what grader and judges count in, None for counters of its own."""
    return WorkerGrader(
        list(recipe.reward.functions),
        weights=list(recipe.reward.weights) or None,
        timeout_s=recipe.reward.timeout_s,
        workers=recipe.reward.workers,
        isolation=recipe.reward.isolation,
        judges={task.name: task.rewards for task in recipe.task.mix if task.rewards},
        scorers=scorers,
        counters=counters,
        max_steps=recipe.trainer.steps,
    )


def grader(recipe: str, name: str) -> GraderServer:
    """Make the part of a cluster's worker (see ``launch.workers``) that grades; start its children and import
    the rewards of ``recipe`` (TOML) in them. ``name`` is its name in the timeline.

    Raises WorkerFault if a reward cannot be used on this host, as the driver has already tried it on its own.
    """
    worker_grader = new_grader(Recipe.parse(tomllib.loads(recipe)))
    try:
        worker_grader.check()
    except ValueError as error:
        worker_grader.close()
        raise WorkerFault(f"{name} on {own_place().host}: {error}") from error
    return GraderServer(worker_grader, name)
