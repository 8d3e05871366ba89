"""``ostinato train``, ``sft`` and ``resume``: run, then print what came of it."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ostinato.cli.report import write_report
from ostinato.cli.restarts import LOST, session_of, supervise
from ostinato.config import Recipe, find_recipe
from ostinato.failure import Lost
from ostinato.launch import RunFailed
from ostinato.launch.machine import configure_threads
from ostinato.launch.ranks import find_follower, follow_run
from ostinato.launch.session import Outcome, learn
from ostinato.launch.session import resume as resume_run
from ostinato.model.named import is_model_name
from ostinato.observe.concerns import failed_rewards, unsolved
from ostinato.pipeline.signals import Ended
from ostinato.run import MAIN_SET, RunFolder, new_run_path
from ostinato.terminal import say, show_log

KEY = re.compile(r"[\w.]+\s*=")  # section.key=value

# signals: 128 + number, as in shells
EXIT = {"interrupted": 130, "terminated": 143, "collapsed": 1, "forgot": 1}


def train(recipe: str, overrides: Sequence[str], restarts: int = 0, folder: Path | None = None) -> int:
    """Returns the exit code. Of several ranks that torchrun has started, all but the first follow.
    ``folder``: as in ``learn``."""
    if (place := find_follower()) is not None:
        return follow_run(place)
    if restarts:
        loaded = Recipe.load(recipe, *overrides)
        path = new_run_path(Path(loaded.log.dir).absolute(), loaded.name)
        return supervise(path, restarts, session_of(path, "--recipe", recipe, *overrides))
    return finish(lambda: learn(recipe, *overrides, folder=folder))


@show_log()
def finish(work: Callable[[], Outcome]) -> int:
    try:
        outcome = work()
    except KeyboardInterrupt as stop:
        why = stop.why if isinstance(stop, Ended) else "interrupted"
        how = "stopped at once" if why == "interrupted" else why
        say(f"ostinato: {how}; {str(stop) or 'nothing had begun'}", error=True)
        return EXIT[why]
    return show_end(outcome)


def show_end(outcome: Outcome) -> int:
    """Write the report of a run, print what came of it, and return its exit code."""
    write_report(RunFolder.open(outcome.folder))
    outcome.show()
    say(*_summarize_end(outcome))
    return EXIT.get(outcome.why, 0)


def train_all(words: Sequence[str], restarts: int, shares: str) -> int:
    """Train by the recipes among ``words``, side by side if there are several; the others are keys of all.
    ``shares``: numbers with commas. Returns the exit code. Raises ValueError for what does not fit."""
    first, *others = words  # paths may have = in them
    keys = [word for word in others if KEY.match(word)]
    recipes = [first, *(word for word in others if not KEY.match(word))]
    if len(recipes) == 1 and shares:
        raise ValueError(f"--shares is {shares!r} with one recipe; leave it out, or give more recipes")
    if len(recipes) == 1:
        return train(recipes[0], keys, restarts)
    try:
        numbers = [float(word) for word in shares.split(",")] if shares else []
    except ValueError:
        raise ValueError(f"--shares is {shares!r}; give numbers, as 2,1") from None
    return train_side_by_side(recipes, keys, numbers, restarts)


@show_log(by_thread=True)
def train_side_by_side(
    recipes: Sequence[str], overrides: Sequence[str], shares: Sequence[float], restarts: int
) -> int:
    """Train by several recipes at once. Returns the exit code of the first run that has not ended well."""
    if restarts:
        raise ValueError(
            f"--restarts is {restarts} with {len(recipes)} recipes; leave it out, each resumes alone"
        )
    from ostinato.launch.side_by_side import learn_side_by_side

    try:
        runs = learn_side_by_side([Recipe.load(recipe, *overrides) for recipe in recipes], shares=shares)
    except KeyboardInterrupt as stop:
        why = stop.why if isinstance(stop, Ended) else "interrupted"
        say(f"ostinato: stopped at once; {str(stop) or 'runs that had begun can be resumed'}", error=True)
        return EXIT[why]
    codes = [show_end(run.outcome) for run in runs if run.outcome is not None]
    for run in runs:
        if run.error is not None:
            if not isinstance(run.error, (ValueError, RunFailed, OSError)):  # ours: with its traceback
                traceback.print_exception(run.error)
            notes = getattr(run.error, "__notes__", ())
            say(*notes, f"ostinato: {run.folder.name}: {' '.join(str(run.error).splitlines())}", error=True)
            codes.append(LOST if isinstance(run.error.__cause__, Lost) else 1)
    return next((code for code in codes if code), 0)


def _summarize_end(outcome: Outcome) -> Iterator[str]:
    """Lines on what failed, and on where and why the run has ended early."""
    yield from _explain_verdicts(RunFolder(outcome.folder))
    yield f"talk to it   ostinato serve {outcome.folder}"
    if outcome.why in EXIT:
        yield f"{outcome.why} after step {outcome.step}; to go on: ostinato resume {outcome.folder}"
    if outcome.why == "enough":
        reason = "by its own forecast the rest is not worth its compute"
        command = f"ostinato resume {outcome.folder} forecast.stop=false"
        yield f"stopped after step {outcome.step}: {reason}; to go on all the same: {command}"


def _explain_verdicts(run: RunFolder) -> Iterator[str]:
    """Warnings about an unsolved held-out set, and each failed reward function, with its last traceback."""
    if why := unsolved([row for row in run.eval.rows() if row.get("set") == MAIN_SET]):
        yield f"warning      {why}"
    for failed in failed_rewards(list(run.failed.rows())):
        yield from filter(None, (f"warning      {failed.sentence}", failed.trace, failed.answer))


def sft(target: str, overrides: Sequence[str], *, preference: bool) -> int:
    """Run supervised training; returns the exit code. A model as ``target`` means the packaged recipe with
    it, on all rows."""
    if is_model_name(target) or (Path(target).expanduser() / "config.json").is_file():
        packaged = "dpo" if preference else "sft"
        recipe = Recipe.load(packaged, f"model.path={target}", "task.n_train=0", *overrides)
    else:
        recipe = Recipe.load(find_recipe(target), *overrides)
    loss = "dpo" if preference else "tokens" if recipe.sft.loss == "off" else recipe.sft.loss
    return run(recipe.model_copy(update={"sft": recipe.sft.model_copy(update={"loss": loss})}), None)


def resume(path: Path, overrides: Sequence[str], restarts: int = 0) -> int:
    """Resume a run, supervised or not; returns the exit code."""
    recipe = Recipe.load(RunFolder.open(path).recipe, *overrides)
    if restarts:
        return supervise(path, restarts, session_of(path, *overrides))
    if recipe.sft.loss != "off":
        return run(recipe, path)
    if (place := find_follower()) is not None:
        return follow_run(place)
    return finish(lambda: resume_run(path, *overrides))


@show_log()
def run(recipe: Recipe, path: Path | None, ended: Callable[[Path], None] = lambda folder: None) -> int:
    """Train in a new folder or in ``path``, and call ``ended`` with it. Returns the exit code."""
    configure_threads(recipe)
    from ostinato.launch.sft import train_supervised

    try:
        folder, step, why = train_supervised(recipe, path)
    except KeyboardInterrupt as stop:
        why = stop.why if isinstance(stop, Ended) else "interrupted"
        say(f"ostinato: {why}; {str(stop) or 'nothing had begun'}", error=True)
        return EXIT[why]
    ended(folder)
    written, key = RunFolder.open(folder), "model" if recipe.adapter.kind == "full" else "adapter"
    lines = [
        f"{key:<13}{written.adapter}",
        f"report       {write_report(written)}",
        f"talk to it   ostinato serve {folder}",
        f"warm start   ostinato train RECIPE {key}.path={written.adapter}",
    ]
    lines += [f"{why} after step {step}; to go on: ostinato resume {folder}"] if why in EXIT else []
    say(*lines)
    return EXIT.get(why, 0)
