"""The recipe's reward functions, in children of this process or of a worker, which needs no torch for it."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from ostinato.config import Recipe
from ostinato.reward.remote import GraderServer
from ostinato.reward.workers import Scorer, WorkerGrader
from ostinato.workers.host import here
from ostinato.workers.remote import WorkerFault


def new_grader(
    recipe: Recipe, scorers: Mapping[str, Scorer] = MappingProxyType({}), counters: Counter[str] | None = None
) -> WorkerGrader:
    """``scorers``: the judges among its functions, which count in ``counters``."""
    return WorkerGrader(
        list(recipe.reward.functions),
        weights=list(recipe.reward.weights) or None,
        timeout_s=recipe.reward.timeout_s,
        workers=recipe.reward.workers,
        isolation=recipe.reward.isolation,
        judges={one.name: one.rewards for one in recipe.task.mix if one.rewards},
        scorers=scorers,
        counters=counters,
        max_steps=recipe.trainer.steps,
    )


def grader(recipe: str, name: str) -> GraderServer:
    """A worker of a cluster (see ``launch.workers``) that grades; ``name`` is its own in the timeline.

    Raises WorkerFault where the rewards cannot be imported: on its host, for the driver's has done so.
    """
    made = new_grader(Recipe.parse(tomllib.loads(recipe)))
    try:
        made.check()
    except ValueError as error:
        made.close()
        raise WorkerFault(f"{name} on {here().host}: {error}") from error
    return GraderServer(made, name)
