"""``ostinato plan fit RUN [RUN ...]``: the factors of a kind of device from runs that were planned, kept
where later plans for it look.

    plan.json, metrics.jsonl, recipe.toml of every run -> plan.fit -> a table; plan-<hash>.json in the cache
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import rich.box
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ostinato.inputs import parse_json, parse_toml
from ostinato.plan import calibrate
from ostinato.plan.fit import Fit, Lesson, fit, lesson
from ostinato.plan.record import FILE
from ostinato.run import RunFolder

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def fit_runs(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Run folders that have a plan.")],
    dry: Annotated[bool, typer.Option("--dry", help="Tell what is found, and keep nothing.")] = False,
) -> None:
    """Learn from runs how fast a kind of device is, for later plans."""
    lessons = read(runs)
    file = calibrate.kept_file(lessons[0].device)
    stale = file.is_file() and calibrate.kept(file) is None
    found = fit(lessons, calibrate.kept(file))
    console = Console()
    console.print(table(found))
    for one in lessons:
        if one.note:
            console.print(one.note, highlight=False, markup=False)
    if not dry:
        calibrate.keep(found.calibration, file)
    console.print(told(found, file, dry=dry, stale=stale), highlight=False, markup=False, soft_wrap=True)


def read(runs: Sequence[Path]) -> list[Lesson]:
    """What each run teaches. Raises ValueError, in one sentence, for one without a plan or without steps, and
    for one that is named twice."""
    places = [path.resolve() for path in runs]
    if twice := [path for path, place in zip(runs, places, strict=True) if places.count(place) > 1]:
        raise ValueError(f"{twice[0]} is named twice, and would weigh twice; name it once")
    return [_lesson(RunFolder.open(path)) for path in runs]


def _lesson(run: RunFolder) -> Lesson:
    file = run.path / FILE
    if not file.is_file():
        raise ValueError(f"{file} does not exist; plan the run first, with --record {run.path}")
    try:
        plan = parse_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON; plan the run anew, with --record {run.path}") from error
    recipe = parse_toml(run.recipe.read_text(encoding="utf-8"))
    layout, engine = str(recipe.get("parallel", {}).get("layout", "")), recipe.get("engine")
    sampler = (str(engine.get("backend", "")), engine.get("server_args", ())) if engine else None
    return lesson(str(run.path), plan, list(run.metrics.rows()), layout, sampler)


def table(found: Fit) -> Table:
    """Seconds of every part, by its plan and by the new factors."""
    shown = Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    names = ("run and part", "planned s", "measured s", "measured / planned", "fitted s", "measured / fitted")
    for index, name in enumerate(names):
        shown.add_column(name, justify="left" if index == 0 else "right")
    for one in found.parts:
        shown.add_row(
            Text(one.name),
            f"{one.planned:.3g}",
            f"{one.measured:.3g}",
            f"{one.measured / one.planned:.2f}",
            f"{one.fitted:.3g}",
            f"{one.measured / one.fitted:.2f}",
        )
    return shown


def told(found: Fit, file: Path, *, dry: bool, stale: bool) -> str:
    """What became of it, in one sentence. ``stale``: there was a file of another version."""
    made = found.calibration
    what = (
        f"factors of {len(made.factors)} terms of {found.device}, from {made.observations} measured steps, "
        f"median error {made.median:.0%}, at most {made.worst:.0%}"
    )
    if dry:
        return f"nothing was kept (--dry): {what}"
    instead = " in place of what another version had kept" if stale else ""
    return f"kept in {file}{instead}: {what}; later plans for {found.device} use them"


__all__ = ["app"]
