"""Runs side by side: each is learned in a thread of its own, on one frozen base and one engine.

    recipes -> check_shared -> open_base -> a thread a run: the ordinary session, with its view of the engine
                                   |
              the engine's thread: passes with the sequences of all runs, and between them training steps

Samples, batches and weights of a run are those that it has alone, bit for bit: on a CPU no row of a pass
depends on others, and noise is addressed. Runs take turns with training steps in the order in which they ask;
between two microbatches of a step the engine runs a pass of what the others sample.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.config import Recipe, check_files
from ostinato.launch.machine import configure_threads, resolve_auto
from ostinato.launch.session import WORKERS, Outcome, open_new_folder, run_session
from ostinato.pipeline.signals import SignalRelay, raise_at_sigterm
from ostinato.terminal import Screen, announce_work

if TYPE_CHECKING:
    from ostinato.launch.shared_base import SharedBase

logger = logging.getLogger(__name__)
END_S = 10.0  # for runs that a second Ctrl-C has cancelled
OWN_KEYS = {("model", "chat_template_kwargs")}  # of [model] and [engine], in which runs may differ
ONE_RUN = {"wandb", "trackio"}  # writers that have one run in a process


@dataclass(slots=True)
class SideRun:
    """A run among others, in its thread; at the end it has an ``outcome`` or an ``error``."""

    recipe: Recipe
    folder: Path
    outcome: Outcome | None = None
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)


def check_shared(recipes: Sequence[Recipe]) -> None:
    """Raises ValueError, naming the first key, for recipes that cannot share a base and an engine."""
    first = recipes[0].model_dump(mode="json")
    for recipe in recipes:
        tree = recipe.model_dump(mode="json")
        for section in ("model", "engine"):
            for key, own in tree[section].items():
                if own != (other := first[section][key]) and (section, key) not in OWN_KEYS:
                    raise ValueError(
                        f"{section}.{key} is {own!r} in {recipe.name!r} and {other!r} in "
                        f"{recipes[0].name!r}; runs side by side share base and engine: give it one value"
                    )
        needed = {
            "engine.native = true": recipe.engine.native,
            'adapter.kind = "lora"': recipe.adapter.kind == "lora",
            'engine.backend = "local"': recipe.engine.backend == "local",
            'model.backend = "native"': recipe.model.backend == "native",
            "cluster.samplers = 0": not recipe.cluster.samplers,
            'parallel.layout = ""': not recipe.parallel.sharded,
            "pipeline.overlap = false": not recipe.pipeline.overlap,
            'sft.loss = "off"': recipe.sft.loss == "off",
            'teacher.model = "" and teacher.url = ""': not recipe.teacher.model and not recipe.teacher.url,
            f"log.writers without {' and '.join(sorted(ONE_RUN))}": ONE_RUN.isdisjoint(recipe.log.writers),
        }
        for setting, is_set in needed.items():
            if not is_set:
                raise ValueError(f"runs side by side need {setting}; set it in {recipe.name!r}")


@raise_at_sigterm()
def learn_side_by_side(
    recipes: Sequence[Recipe], *, shares: Sequence[float] = (), quiet: bool = False
) -> list[SideRun]:
    """Train by all ``recipes`` at once, each in a new run folder, and return the runs in their order: a run
    that fails has its error, and the others go on. ``shares``: of the engine's slots by run, by default
    equal.

    Raises ValueError, before any run begins, for recipes that cannot share a base and for what is wrong with
    one of them; KeyboardInterrupt after a second Ctrl-C.
    """
    shares = shares or [1.0] * len(recipes)
    if len(shares) != len(recipes) or not all(0 < share < math.inf for share in shares):
        raise ValueError(
            f"shares are {list(shares)}; give a number above 0 for each of {len(recipes)} recipes"
        )
    for recipe in recipes:
        check_files(recipe)
    threads = configure_threads(recipes[0])
    recipes = [resolve_auto(recipe) for recipe in recipes]
    check_shared(recipes)
    if any(recipe.draft.enabled for recipe in recipes):
        logger.info("runs side by side draft nothing (draft.enabled): same tokens, each pass one a sequence")
    from ostinato.launch.shared_base import open_base

    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(open_new_folder(recipe)) for recipe in recipes]
        relay = SignalRelay()
        with announce_work("loading the model that the runs share"):
            base = stack.enter_context(open_base(recipes, threads, relay))
        stack.enter_context(relay)
        runs = [SideRun(recipe, folder) for recipe, folder in zip(recipes, folders, strict=True)]
        for run, share in zip(runs, shares, strict=True):
            run.thread = threading.Thread(
                target=_learn, args=(run, base, share, quiet), name=run.folder.name, daemon=True
            )
            run.thread.start()
        _wait(runs)
    if base.start.broken:
        raise next(run.error for run in runs if run.error is not None)
    return runs


def _learn(run: SideRun, base: SharedBase, share: float, quiet: bool) -> None:
    """Train in this thread, and store the outcome or the error. A run that fails before all can begin ends
    the others, which then have no error of their own."""
    from ostinato.launch.shared_base import SharedPlace

    name = run.folder.name
    place = SharedPlace(base, str(run.folder), share)  # folders of two log.dir may have one name
    try:
        console = Screen(quiet=quiet, prefix=f"{name}: ")
        run.outcome = run_session(run.recipe, run.folder, console, workers=WORKERS, place=place)
    except threading.BrokenBarrierError:
        pass
    except BaseException as error:  # also KeyboardInterrupt, which ends a thread like any other
        error.add_note(f"in the recipe {run.recipe.name!r}")
        run.error = error
        if not place.has_begun:
            base.start.abort()


def _wait(runs: Sequence[SideRun]) -> None:
    """Wait for the threads; after a second Ctrl-C only END_S for all, as what they do cannot be ended."""
    try:
        for run in runs:
            run.thread.join()
    except KeyboardInterrupt:
        for run in runs:
            run.thread.join(END_S / len(runs))
        raise
