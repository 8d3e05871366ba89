"""``ostinato train`` and ``resume``: run, then tell what came of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ostinato.cli.progress import before_after
from ostinato.cli.session import Outcome, learn
from ostinato.cli.session import resume as resume_run
from ostinato.config import Recipe
from ostinato.model.named import model_folder
from ostinato.render import Renderer
from ostinato.run import RunFolder

SIGNAL_EXIT = {"interrupted": 130, "terminated": 143}  # 128 + the signal's number, as shells have it


def train(recipe: str, overrides: Sequence[str]) -> int:
    """Returns the exit code."""
    return _finish(lambda: learn(recipe, *overrides))


def resume(run: Path, overrides: Sequence[str]) -> int:
    return _finish(lambda: resume_run(run, *overrides))


def _finish(work: Callable[[], Outcome]) -> int:
    try:
        outcome = work()
    except KeyboardInterrupt:
        print("ostinato: stopped at once; what was saved before is in the run folder", file=sys.stderr)
        return SIGNAL_EXIT["interrupted"]
    console = Console()
    if outcome.after is not None:
        console.print(before_after(outcome.before, outcome.after))
    console.print(f"adapter      {RunFolder(outcome.folder).adapter}", highlight=False, soft_wrap=True)
    console.print(f"report       {write_report(outcome.folder)}", highlight=False, soft_wrap=True)
    if code := SIGNAL_EXIT.get(outcome.why, 0):
        console.print(f"{outcome.why} after step {outcome.step}; to go on: ostinato resume {outcome.folder}")
        return code
    return 0


def write_report(path: Path) -> Path:
    """Write report.html of a run folder and return its path."""
    from ostinato.report import write_report as write

    run = RunFolder.open(path)
    return write(run, renderer=_renderer(Recipe.load(run.recipe)))


def _renderer(recipe: Recipe) -> Renderer | None:
    """The tokenizer of the run's model; None, and a sentence, where the model is not on this machine."""
    try:
        return Renderer(model_folder(recipe.model.path))
    except ValueError as error:
        print(f"ostinato: the report shows tokens by number: {error}", file=sys.stderr)
        return None
