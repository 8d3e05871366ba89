"""The runs of an ablation: each a folder and a child process, several at once, resumed where they stopped.

A job is made as an empty run folder with its recipe in it, and ``python -m ostinato resume`` begins it or
goes on with it. A child holds the lock of its folder (``ostinato.lock``), so that two ablations, or an
ablation whose parent was killed and that is started again, never train into the same folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ostinato.apps.scaling.ablation import REFERENCE
from ostinato.apps.scaling.arms.kept import has_own_end, iterate_reversed, make_slug
from ostinato.config import Recipe, check_files, dump_toml
from ostinato.every import Every
from ostinato.lock import Locked, hold_lock
from ostinato.pipeline.signals import raise_at_sigterm
from ostinato.run import RunFolder

LOG = "train.log"  # output of a child, in its run folder
PATIENCE_S = 60.0  # for a child to finish its step and save, after SIGTERM
LOOK_S = 1.0  # between looks at the children


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: an arm with a seed."""

    arm: str
    seed: int
    folder: Path
    recipe: Recipe


def plan_jobs(
    source: str | Path,
    overrides: Sequence[str],
    *,
    seeds: Sequence[int],
    arms: Sequence[str] = (),
    out: Path,
    workers: int = 1,
) -> list[Job]:
    """Plan the runs of the recipe and of its arms (all, or ``arms`` by name), seed after seed.

    Nothing but the seed is random, so runs of a seed share prompts, initial adapters and noise. Raises
    ValueError for arms that are unknown, change nothing, are no recipes, or have no folder name of their own.
    """
    base = Recipe.load(source, *overrides)
    chosen_arms = _choose_arms(base, source, arms)
    recipe_of: dict[str, tuple[str, Recipe]] = {}
    for name, arm_overrides in {REFERENCE: (), **chosen_arms}.items():
        folder = make_slug(name)
        if not folder or folder in recipe_of:
            reason = f"that of {recipe_of[folder][0]!r}" if folder else "empty"
            raise ValueError(f"the folder name of arm {name!r} would be {reason}; give the arm another name")
        recipe_of[folder] = (name, load_arm_recipe(source, overrides, name, arm_overrides))
        is_same = recipe_of[folder][1].model_copy(update={"name": base.name, "seed": base.seed}) == base
        if is_same and name != REFERENCE:
            raise ValueError(
                f"arm {name!r} of {source} changes nothing ({list(arm_overrides)}); change it or drop it"
            )
    threads = _share_threads(base, workers)
    return [
        Job(
            arm=name,
            seed=seed,
            folder=out / f"{folder}-s{seed}",
            recipe=make_run_recipe(recipe, f"{folder}-s{seed}", seed, out, threads),
        )
        for seed in seeds
        for folder, (name, recipe) in recipe_of.items()
    ]


def _choose_arms(base: Recipe, source: str | Path, arms: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Return the named arms of a recipe, or all. Raises ValueError for a recipe without arms and for unknown
    names."""
    arms_of_recipe = base.ablate.arms
    if not arms_of_recipe:
        raise ValueError(
            f"recipe {source} has no arms to compare it with; add a table [ablate.arms] with lines like "
            '"no fp32 head" = ["model.fp32_head=false"]'
        )
    for name in arms:
        if name not in arms_of_recipe:
            raise ValueError(
                f"--arms is {name!r}; the arms of {source} are {', '.join(map(repr, arms_of_recipe))}"
            )
    return {name: arms_of_recipe[name] for name in arms or arms_of_recipe}


def load_arm_recipe(
    source: str | Path, overrides: Sequence[str], name: str, arm_overrides: Sequence[str]
) -> Recipe:
    """Load the recipe of an arm. Raises ValueError for an invalid one, which names the arm if it has
    overrides."""
    try:
        return Recipe.load(source, *overrides, *arm_overrides)
    except ValueError as error:
        raise ValueError(f"arm {name!r}: {error}" if arm_overrides else str(error)) from None


def _share_threads(base: Recipe, workers: int) -> int | None:
    """Return the threads of each of several workers; None for one worker, or if the recipe sets them."""
    if workers == 1 or base.engine.threads != "auto":
        return None
    return max(1, (os.cpu_count() or 1) // workers)


def make_run_recipe(recipe: Recipe, name: str, seed: int, out: Path, threads: int | None) -> Recipe:
    """Return the recipe of a run with its name, seed, folder and threads."""
    engine = recipe.engine if threads is None else recipe.engine.model_copy(update={"threads": threads})
    log = recipe.log.model_copy(update={"dir": str(out)})
    return recipe.model_copy(update={"name": name, "seed": seed, "engine": engine, "log": log})


def check_jobs(jobs: Sequence[Job]) -> None:
    """Raise ValueError for an arm that cannot be trained or whose files are missing, and for a folder that
    has the run of another recipe."""
    from ostinato.launch.checks import check_recipe

    for job in jobs:
        try:
            check_recipe(job.recipe)
            check_files(job.recipe)
        except ValueError as error:
            raise ValueError(f"arm {job.arm!r}: {error}") from None
        if (job.folder / "recipe.toml").is_file() and (key := _find_difference(job)):
            raise ValueError(
                f"{job.folder} is a run of another recipe ({key} differs); name another --out or move it away"
            )


def _find_difference(job: Job) -> str:
    """Return the first key that has another value in the run of the job's folder; "" if there is none. Keys
    that change no result are left out."""
    existing_tree, planned_tree = (
        Recipe.load(job.folder / "recipe.toml").model_dump(),
        job.recipe.model_dump(),
    )
    for tree in (existing_tree, planned_tree):
        del tree["engine"]["threads"], tree["trainer"]["until"]
        for section in ("name", "log", "ablate", "ledger"):
            tree.pop(section, None)
    if (
        planned_tree["model"]["dtype"] == "auto"
    ):  # the run has the value of "auto" on the machine where it began
        planned_tree["model"]["dtype"] = existing_tree["model"]["dtype"]
    if planned_tree["model"]["backend"] == "auto":  # likewise; with transformers nothing is drafted
        planned_tree["model"]["backend"] = existing_tree["model"]["backend"]
        planned_tree["draft"]["enabled"] &= planned_tree["model"]["backend"] != "transformers"
    for section, value in planned_tree.items():
        if value != existing_tree[section]:
            if not isinstance(value, Mapping):
                return section
            keys = [
                key
                for key in value | existing_tree[section]
                if value.get(key) != existing_tree[section].get(key)
            ]
            return f"{section}.{keys[0]}"
    return ""


# -- processes


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a job, for people."""

    job: Job
    what: str  # waiting, running, done, failed
    step: int = 0
    error: str = ""


@dataclass(kw_only=True, eq=False)
class _Child:
    job: Job
    process: subprocess.Popen[bytes]


def make_train_command(folder: Path) -> list[str]:
    """Return the command that begins the run in ``folder``, or goes on with it."""
    return [sys.executable, "-m", "ostinato", "resume", str(folder)]


def run_jobs(
    jobs: Sequence[Job],
    workers: int,
    show: Callable[[Sequence[State]], None],
    *,
    command: Callable[[Path], list[str]] = make_train_command,
    pause: Callable[[], object] = lambda: time.sleep(LOOK_S),
) -> list[State]:
    """Run all jobs that have not ended, ``workers`` at once, and return their last states.

    ``show`` gets all states in each round. A run that fails has its error in its state, and the others run
    on. Any exception, such as KeyboardInterrupt (by Ctrl-C or SIGTERM), stops the children; it is raised
    again once they have saved.
    """
    states = {job.folder: _read_state(job) for job in jobs}
    waiting_jobs = [job for job in jobs if states[job.folder].what != "done"]
    children: list[_Child] = []
    with raise_at_sigterm():
        try:
            while waiting_jobs or children:
                while waiting_jobs and len(children) < workers:
                    job = waiting_jobs.pop(0)
                    child, error = _start_child(job, command)
                    children += [] if child is None else [child]
                    states[job.folder] = State(job=job, what="failed" if error else "running", error=error)
                for child in children:
                    states[child.job.folder] = _read_child_state(child)
                # by the states above, so that a child that has ended since then is looked at once more
                children = [child for child in children if states[child.job.folder].what == "running"]
                show(list(states.values()))
                if children:
                    pause()
        finally:
            _stop_children([child.process for child in children])
    return list(states.values())


def _start_child(job: Job, command: Callable[[Path], list[str]]) -> tuple[_Child | None, str]:
    """Make the run folder of a job, unless it exists, and start its child. Return (the child, ""), or (None,
    the reason) if another process has the folder."""
    job.folder.mkdir(parents=True, exist_ok=True)
    try:
        with hold_lock(job.folder):
            if not (job.folder / "recipe.toml").is_file():
                RunFolder.create(job.folder, dump_toml(job.recipe))
    except Locked as error:
        return None, str(error)
    with (job.folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            [*command(job.folder), f"trainer.until={job.recipe.trainer.until!r}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # so that Ctrl-C reaches it only once, as our SIGTERM
        )
    return _Child(job=job, process=process), ""


def _read_state(job: Job) -> State:
    return State(job=job, what="done" if has_ended(job) else "waiting", step=_read_step(job.folder))


def has_ended(job: Job) -> bool:
    """Whether the run of a job has ended for good, and not because a smaller share of its budget was
    spent."""
    run, budget = RunFolder(job.folder), Every.parse(job.recipe.trainer.budget, "trainer.budget")
    end_row, score_row = (next(iterate_reversed(log), {}) for log in (run.ledger, run.eval))
    is_short = (
        end_row.get("why") == "spent" and budget.share(score_row.get("spent", {})) < job.recipe.trainer.until
    )
    return has_own_end(job.folder) and not is_short


def _read_child_state(child: _Child) -> State:
    code, folder = child.process.poll(), child.job.folder
    what = "running" if code is None else "done" if has_own_end(folder) else "failed"
    error = _read_error(folder, code) if what == "failed" else ""
    return State(job=child.job, what=what, step=_read_step(folder), error=error)


def _read_step(folder: Path) -> int:
    """Read the last step that a run has finished; 0 for a run that has not begun."""
    return next((int(row["step"]) for row in iterate_reversed(RunFolder(folder).metrics)), 0)


def _read_error(folder: Path, code: int | None) -> str:
    """Read the error of a child that failed: its last line, or its exit code without output."""
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    output = [line for line in lines if line.strip()]
    errors = [line for line in output[-20:] if line.startswith("ostinato:")]
    return (errors or output or [""])[-1].removeprefix("ostinato:").strip() or f"exit code {code}"


def _stop_children(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to all children and wait until they have saved. Kill those that do not end in time."""
    for child in children:
        child.send_signal(signal.SIGTERM)  # the child finishes its step, or gives it up after some time
    limit = time.monotonic() + PATIENCE_S
    for child in children:
        try:
            child.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
