"""``ostinato compare``: arms x seeds. Models and methods under one budget (an arms file), or a recipe and its
arms: which choice moves the ceiling, which only B (``ostinato ablate``, the same command)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ostinato.apps.scaling.answers import Answer
from ostinato.apps.scaling.arms import jobs as arm_jobs
from ostinato.apps.scaling.arms.answer import build_answer, compare_runs
from ostinato.apps.scaling.arms.compare import parse_budget, race_arms, read_arms
from ostinato.apps.scaling.arms.compared import build_curves, build_race_answer
from ostinato.apps.scaling.arms.jobs import Job, State, check_jobs, plan_jobs
from ostinato.apps.scaling.arms.kept import (
    MEASURE,
    Measure,
    Row,
    collect_lines,
    list_run_folders,
    read_kept,
    write_kept,
)
from ostinato.apps.scaling.commands import show_answer
from ostinato.apps.scaling.reading import parse_amount
from ostinato.config import Recipe, find_recipe
from ostinato.every import Axis
from ostinato.inputs import parse_toml
from ostinato.launch.machine import resolve_auto
from ostinato.observe.page import html
from ostinato.run import atomic_write
from ostinato.terminal import Screen


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The runs to make: every arm with so many seeds."""

    arms: Sequence[str] = ()  # of a recipe; empty: all arms of the recipe
    seeds: int | None = None  # 3, of a recipe 2
    workers: int = 1
    out: Path | None = None  # by default runs/<arms>-compare, of a recipe <log.dir>/<recipe>-ablate
    leave_one_out: bool = False  # run the arms of a recipe
    budget: str = ""  # of each run of an arms file


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The scores to fit, and the files to write."""

    axis: str = Axis.FLOPS
    cut: str = ""
    measure: Measure = MEASURE
    kept: Path | None = None
    json_file: Path | None = None
    against: str = ""  # an arm of an arms file, to which differences are shown
    page: Path | None = None


def run_command(source: str, overrides: Sequence[str], study: Study, output: Output) -> int:
    """Run the command and return its exit code. ``source`` is a recipe (with ``leave_one_out``), an arms file
    (with ``budget``), or a folder or file of runs, which are only fitted. Raises ValueError for options of
    another kind of source."""
    Axis.parse(output.axis, "--axis")  # raises its own error for a wrong axis
    path = Path(source)
    if study.budget:
        if overrides or study.arms or study.leave_one_out:
            raise ValueError(
                "overrides, --arms and --leave-one-out are for a recipe, and --budget is for an arms file"
            )
        return run_arms_file(path, study, output)
    holds_runs = path.is_dir() or source.endswith(".jsonl")
    if study.leave_one_out and not holds_runs:
        return run_recipe(source, overrides, study, output)
    if not holds_runs:
        if path.suffix == ".toml" and path.is_file() and "arms" in parse_toml(path.read_text("utf-8")):
            raise ValueError(f'{source} holds arms; add --budget, e.g. --budget "2e14 flops"')
        find_recipe(source)  # raises its own error for a wrong name
        raise ValueError(
            f"{source} is a recipe; add --leave-one-out to run its arms, or name a folder of runs"
        )
    if not path.exists():
        raise ValueError(f"{source} is not there; name a folder of runs or a file that --collect wrote")
    if any((Path(name) / "recipe.toml").is_file() for name in overrides):
        raise ValueError(f"two run folders are compared by: ostinato report {' '.join([source, *overrides])}")
    if overrides or study != Study():
        raise ValueError(
            f"{source} holds runs that are only fitted; drop --leave-one-out, overrides, --arms, --seeds,"
            " --workers and --out, or name the recipe"
        )
    if path.is_dir():
        show_fits(*collect_lines(list_run_folders(path), output.measure), output)
    else:
        show_fits(read_kept(path, output.measure), [], output)
    return 0


def run_recipe(source: str, overrides: Sequence[str], study: Study, output: Output) -> int:
    """Finish the runs of a recipe, then show the fits. Return 1 where a run failed; exit with 130 on
    Ctrl-C."""
    base = Recipe.load(source, *overrides)
    if base.model.dtype == "auto":  # all runs that are compared get the same
        overrides = [*overrides, f"model.dtype={resolve_auto(base).model.dtype}"]
    out = study.out or Path(base.log.dir) / f"{base.name}-ablate"
    seeds = range(base.seed, base.seed + (study.seeds or 2))
    jobs = plan_jobs(source, overrides, seeds=seeds, arms=study.arms, out=out, workers=study.workers)
    states = finish_jobs(jobs, study, out, output.json_file)
    failed = [state for state in states if state.what == "failed"]
    notes = [f"{state.job.folder.name} failed: {state.error}." for state in failed]
    folders = [state.job.folder for state in states if state.what == "done"]
    try:
        rows, left_out = collect_lines(folders, output.measure)
        show_fits(rows, [*notes, *left_out], output)
    except ValueError as error:  # too few runs are left to compare: show why they failed instead
        if not failed:
            raise
        reason = str(error).rstrip(".") if folders else "no run has come to its end"
        for sentence in (*notes, f"Nothing can be compared: {reason}."):
            make_console(output.json_file).print(sentence, highlight=False, markup=False, soft_wrap=True)
    return 1 if failed else 0


def run_arms_file(source: Path, study: Study, output: Output) -> int:
    """Sweep, choose and race the arms of a file under one budget. Return 1 where a run failed; exit with 130
    on Ctrl-C. Differences are to the arm ``output.against``, or to the first arm of the file."""
    file, terms, against = read_arms(source), parse_budget(study.budget), output.against
    if against and against not in file.arms:
        raise ValueError(f"--against is {against!r}; use one of the arms of {source}: {'; '.join(file.arms)}")
    out = study.out or Path("runs") / f"{source.stem}-compare"
    seeds = range(study.seeds or 3)
    comparison = race_arms(
        file, terms, seeds, out, lambda jobs: finish_jobs(jobs, study, out, output.json_file)
    )
    result = build_race_answer(comparison, study.budget, file.threshold, against)
    show_answer(result, output.json_file)
    write_page(output.page or out / "compare.html", source.stem, result, build_curves(comparison.lines))
    return 1 if comparison.failed else 0


def write_page(path: Path, name: str, answered: Answer, drawn: Sequence[dict[str, Any]]) -> None:
    """Write the tables and the charts of the courses as a file that opens offline."""
    tables = [asdict(table) for table in answered.tables]
    parts = {"title": name, "kind": "arms compared", "lead": answered.lead, "tables": tables, "charts": drawn}
    atomic_write(path, html(parts))


def show_fits(rows: Sequence[Row], notes: Sequence[str], output: Output) -> None:
    """Write the lines of runs, if a file is given, compare the runs and show the answer."""
    axis, first = Axis(output.axis), parse_amount(output.cut, "--cut") if output.cut else 0.0
    if output.kept is not None:
        write_kept(output.kept, rows)
    show_answer(build_answer(compare_runs(rows, axis, first), notes), output.json_file)


def make_console(json_file: Path | None) -> Console:
    return Screen(sys.stderr if str(json_file) == "-" else sys.stdout)


def finish_jobs(jobs: Sequence[Job], study: Study, out: Path, json_file: Path | None) -> list[State]:
    """Run all jobs that have not ended, show their progress and return their states; exit with 130 on Ctrl-C.
    Raises ValueError for jobs that cannot run."""
    check_jobs(jobs)
    console = make_console(json_file)
    console.print(f"{len(jobs)} runs in {out}", highlight=False, soft_wrap=True)
    try:
        return arm_jobs.run_jobs(jobs, study.workers, make_progress(console))
    except KeyboardInterrupt:
        console.print("stopped; what was done is kept, and the same command goes on with it")
        raise SystemExit(130) from None


def make_progress(console: Console) -> Callable[[Sequence[State]], None]:
    """Return a function that prints a line for each run that begins or ends."""
    printed_states: dict[Path, str] = {}

    def update(states: Sequence[State]) -> None:
        for state in states:
            if printed_states.get(state.job.folder) != state.what:
                trainer = state.job.recipe.trainer  # a budget ends before any number of steps
                steps = f"step {state.step}" if trainer.budget else f"{state.step}/{trainer.steps}"
                cells = (state.job.folder.name, state.what, steps, state.error)
                console.print("  ".join(cells), highlight=False, markup=False, soft_wrap=True)
            printed_states[state.job.folder] = state.what

    return update
