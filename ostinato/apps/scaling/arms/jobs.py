"""The runs of an ablation: a folder each, a child process each, some at once, resumed where they stopped.

A job is made as an empty run folder with its recipe in it, and ``python -m ostinato resume`` begins it or
goes on with it, whichever it is. A child holds the lock of its folder (``ostinato.lock``), so that two
ablations, or one whose parent was killed and that is started again, never train into the same one.
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
from ostinato.apps.scaling.arms.kept import backwards, ended, slug
from ostinato.config import Recipe, check_files, dump_toml
from ostinato.every import Every
from ostinato.lock import Locked, locked
from ostinato.pipeline.signals import ending
from ostinato.run import RunFolder

LOG = "train.log"  # what a child prints, in its run folder
PATIENCE_S = 60.0  # for a child to finish its step and save, after SIGTERM
LOOK_S = 1.0  # between looks at the children


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run."""

    arm: str
    seed: int
    folder: Path
    recipe: Recipe


def plan(
    source: str | Path,
    overrides: Sequence[str],
    *,
    seeds: Sequence[int],
    arms: Sequence[str] = (),
    out: Path,
    workers: int = 1,
) -> list[Job]:
    """The runs of the recipe and of its arms (all, or ``arms`` by name), seed after seed.

    Runs of a seed have the seed in common and nothing else is random, so they share prompts, initial adapters
    and noise. Raises ValueError in words for arms that are not there, change nothing, or are no recipes.
    """
    base = Recipe.load(source, *overrides)
    chosen = _choose_arms(base, source, arms)
    made: dict[str, tuple[str, Recipe]] = {}
    for name, own in {REFERENCE: (), **chosen}.items():
        found = slug(name)
        if not found or found in made:
            other = f"that of {made[found][0]!r}" if found else "empty"
            raise ValueError(f"the folder name of arm {name!r} would be {other}; give the arm another name")
        made[found] = (name, arm_recipe(source, overrides, name, own))
        same = made[found][1].model_copy(update={"name": base.name, "seed": base.seed}) == base
        if same and name != REFERENCE:
            raise ValueError(f"arm {name!r} of {source} changes nothing ({list(own)}); change it or drop it")
    threads = _threads(base, workers)
    return [
        Job(
            arm=name,
            seed=seed,
            folder=out / f"{found}-s{seed}",
            recipe=as_run(recipe, f"{found}-s{seed}", seed, out, threads),
        )
        for seed in seeds
        for found, (name, recipe) in made.items()
    ]


def _choose_arms(base: Recipe, source: str | Path, arms: Sequence[str]) -> Mapping[str, Sequence[str]]:
    known = base.ablate.arms
    if not known:
        raise ValueError(
            f"recipe {source} has no arms to compare it with; add a table [ablate.arms] with lines like "
            '"no fp32 head" = ["model.fp32_head=false"]'
        )
    for name in arms:
        if name not in known:
            raise ValueError(f"--arms is {name!r}; the arms of {source} are {', '.join(map(repr, known))}")
    return {name: known[name] for name in arms or known}


def arm_recipe(source: str | Path, overrides: Sequence[str], name: str, own: Sequence[str]) -> Recipe:
    try:
        return Recipe.load(source, *overrides, *own)
    except ValueError as error:
        raise ValueError(f"arm {name!r}: {error}" if own else str(error)) from None


def _threads(base: Recipe, workers: int) -> int | None:
    """Threads of each of several workers; None leaves the recipe as it is."""
    if workers == 1 or base.engine.threads != "auto":
        return None
    return max(1, (os.cpu_count() or 1) // workers)


def as_run(recipe: Recipe, name: str, seed: int, out: Path, threads: int | None) -> Recipe:
    engine = recipe.engine if threads is None else recipe.engine.model_copy(update={"threads": threads})
    log = recipe.log.model_copy(update={"dir": str(out)})
    return recipe.model_copy(update={"name": name, "seed": seed, "engine": engine, "log": log})


def check(jobs: Sequence[Job]) -> None:
    """Raises ValueError for an arm whose algorithm is none, and for folders that hold other runs."""
    from ostinato.launch.checks import check

    for job in jobs:
        try:
            check(job.recipe)
            check_files(job.recipe)
        except ValueError as error:
            raise ValueError(f"arm {job.arm!r}: {error}") from None
        if (job.folder / "recipe.toml").is_file() and (key := _differs(job)):
            raise ValueError(
                f"{job.folder} is a run of another recipe ({key} differs); name another --out or move it away"
            )


def _differs(job: Job) -> str:
    """The first key in which the run that is there has another value; what changes no result is not looked
    at. Empty where there is none."""
    there, planned = Recipe.load(job.folder / "recipe.toml").model_dump(), job.recipe.model_dump()
    for tree in (there, planned):
        del tree["engine"]["threads"], tree["trainer"]["until"]
        for section in ("name", "log", "ablate", "ledger"):
            tree.pop(section, None)
    if planned["model"]["dtype"] == "auto":  # the run has what "auto" became where it began
        planned["model"]["dtype"] = there["model"]["dtype"]
    if planned["model"]["backend"] == "auto":  # likewise; with transformers nothing is drafted
        planned["model"]["backend"] = there["model"]["backend"]
        planned["draft"]["enabled"] &= planned["model"]["backend"] != "transformers"
    for section, value in planned.items():
        if value != there[section]:
            if not isinstance(value, Mapping):
                return section
            keys = [key for key in value | there[section] if value.get(key) != there[section].get(key)]
            return f"{section}.{keys[0]}"
    return ""


# -- at work


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How far a job is, for people."""

    job: Job
    what: str  # waiting, running, done, failed
    step: int = 0
    error: str = ""


@dataclass(kw_only=True, eq=False)
class _Child:
    job: Job
    process: subprocess.Popen[bytes]


def train_command(folder: Path) -> list[str]:
    """What begins the run in ``folder``, or goes on with it."""
    return [sys.executable, "-m", "ostinato", "resume", str(folder)]


def run(
    jobs: Sequence[Job],
    workers: int,
    show: Callable[[Sequence[State]], None],
    *,
    command: Callable[[Path], list[str]] = train_command,
    pause: Callable[[], object] = lambda: time.sleep(LOOK_S),
) -> list[State]:
    """Let all jobs run that have not ended, ``workers`` at once; their last states.

    A run that fails is named and does not keep the others from running. KeyboardInterrupt (Ctrl-C; SIGTERM
    raises one) stops the children, waits until they have saved, and is raised again.
    """
    states = {job.folder: _state(job) for job in jobs}
    waiting = [job for job in jobs if states[job.folder].what != "done"]
    going: list[_Child] = []
    with ending():
        try:
            while waiting or going:
                while waiting and len(going) < workers:
                    job = waiting.pop(0)
                    child, error = _start(job, command)
                    going += [] if child is None else [child]
                    states[job.folder] = State(job=job, what="failed" if error else "running", error=error)
                for child in going:
                    states[child.job.folder] = _look(child)
                # as it was looked at: one that has ended since is looked at again
                going = [child for child in going if states[child.job.folder].what == "running"]
                show(list(states.values()))
                if going:
                    pause()
        finally:
            _end([child.process for child in going])
    return list(states.values())


def _start(job: Job, command: Callable[[Path], list[str]]) -> tuple[_Child | None, str]:
    """(the child, "") or (None, why not)."""
    job.folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked(job.folder):
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
            start_new_session=True,  # Ctrl-C reaches it once, as our SIGTERM
        )
    return _Child(job=job, process=process), ""


def _state(job: Job) -> State:
    return State(job=job, what="done" if has_ended(job) else "waiting", step=_steps(job.folder))


def has_ended(job: Job) -> bool:
    """It has ended, and not for now, at a smaller share of its budget than the job's."""
    run, budget = RunFolder(job.folder), Every.parse(job.recipe.trainer.budget, "trainer.budget")
    end, score = (next(backwards(log), {}) for log in (run.ledger, run.eval))
    short = end.get("why") == "spent" and budget.share(score.get("spent", {})) < job.recipe.trainer.until
    return ended(job.folder) and not short


def _look(child: _Child) -> State:
    code, folder = child.process.poll(), child.job.folder
    what = "running" if code is None else "done" if ended(folder) else "failed"
    error = _last_words(folder, code) if what == "failed" else ""
    return State(job=child.job, what=what, step=_steps(folder), error=error)


def _steps(folder: Path) -> int:
    """Those that a run, which may not have begun, has finished."""
    return next((int(row["step"]) for row in backwards(RunFolder(folder).metrics)), 0)


def _last_words(folder: Path, code: int | None) -> str:
    """Why a child failed: its last line."""
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    printed = [line for line in lines if line.strip()]
    named = [line for line in printed[-20:] if line.startswith("ostinato:")]
    return (named or printed or [""])[-1].removeprefix("ostinato:").strip() or f"exit code {code}"


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM, wait until all have saved, kill what does not."""
    for child in children:
        child.send_signal(signal.SIGTERM)  # finishes its step, or gives it up after a grace
    limit = time.monotonic() + PATIENCE_S
    for child in children:
        try:
            child.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
