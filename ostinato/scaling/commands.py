"""``ostinato scale``: reading (what is named) -> answers, views (what is answered) -> here (shown)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from ostinato.axis import Axis
from ostinato.observe.ledger import Event
from ostinato.observe.report.reading import last_step, mean
from ostinato.observe.report.reading import read_run as run_rows
from ostinato.observe.report.scaling import Page, write_page
from ostinato.observe.report.terminal import terminal_table
from ostinato.run import RunFolder, atomic_write, to_json
from ostinato.scaling import answers
from ostinato.scaling.curve import Sigmoid
from ostinato.scaling.decide import Terms
from ostinato.scaling.fit import PARAMETERS
from ostinato.scaling.gates import Truncation, truncation
from ostinato.scaling.reading import (
    AXIS,
    Price,
    Reading,
    Window,
    amount,
    read_one,
    read_pair,
    reading_options,
)
from ostinato.scaling.seeds import FLOOR
from ostinato.scaling.views import Answer, books

app = typer.Typer(
    name="scale",
    help="Where a run will end, how well that is known, and whether to go on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

RECENT = 10  # steps over which truncated answers are averaged

Source = Annotated[
    Path, typer.Argument(metavar="RUN|CSV", help="A run folder, or a CSV of evaluations.", show_default=False)
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="One JSON object into this file, - for standard output.", show_default=False),
]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", help="A page with plots that opens offline.", show_default=False)
]
UnitOfC = Annotated[Axis, typer.Option(help="What compute is counted in.", **AXIS)]
R0Option = Annotated[float, typer.Option("--R0", help="The score before training.")]
AOption = Annotated[float, typer.Option("--A", help="The ceiling.", show_default=False)]
BOption = Annotated[float, typer.Option("--B", help="The steepness.", show_default=False)]
CMidOption = Annotated[
    str,
    typer.Option(
        "--c-mid",
        "--cmid",
        metavar="C",
        help="The compute at which half of the gain is had.",
        show_default=False,
    ),
]


@app.command()
@reading_options
def fit(
    source: Source,
    reading: Reading,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Fit R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B), and say how well it is known."""
    tell(answers.fit(read_one(source, reading)), json_file, html_file)


@app.command()
@reading_options
def forecast(
    source: Source,
    reading: Reading,
    at: Annotated[
        list[str] | None,
        typer.Option(metavar="C", help="The score at this compute; may be repeated.", show_default=False),
    ] = None,
    target: Annotated[
        list[float] | None,
        typer.Option(
            metavar="R", help="The compute for this score, 0 to 1; may be repeated.", show_default=False
        ),
    ] = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """The score at a compute, or the compute for a score."""
    if not at and not target:
        raise ValueError("nothing is asked; give --at a compute or --target a score")
    computes = [amount(text, "--at") for text in at or ()]
    tell(answers.foretell(read_one(source, reading), computes, target or ()), json_file, html_file)


@app.command()
@reading_options
def compare(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CSV",
            help="Several seeds of one recipe: a0,a1,a2, one run each.",
            show_default=False,
        ),
    ],
    reading: Reading,
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN|CSV]", help="Without it: two --series of the first.", show_default=False
        ),
    ] = None,
    at: Annotated[str, typer.Option(metavar="C", help="Compare the scores at this compute too.")] = "",
    floor: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="How far A differs by the seed alone, before your own seeds tell: half of a 90 % interval;"
            " 0: not at all.",
        ),
    ] = FLOOR,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Which of two recipes has the higher ceiling, and where one overtakes the other; by one seed or more."""
    pair = read_pair([source] if other is None else [source, other], reading)
    tell(answers.versus(pair, amount(at, "--at") if at else None, floor), json_file, html_file)


@app.command()
@reading_options
def decide(
    source: Source,
    reading: Reading,
    budget: Annotated[str, typer.Option(metavar="C", help="Compute in all.", show_default=False)],
    price: Annotated[float, typer.Option(min=0.0, help="Score that a unit of compute has to bring.")] = 0.0,
    min_gain: Annotated[
        float, typer.Option(min=0.0, help="Score that the rest of the budget has to bring.")
    ] = 0.01,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Go on (exit code 0), stop (10) or undecided (20), and the compute that would settle it.

    Stop: the whole rest of the budget brings less than --min-gain, or than --price for each unit, with 90 %;
    a smaller --budget may yet pay. Go on: it brings more than both, with 90 %. All else is undecided, and so
    is a curve that is not identified, and one to which a law that foretold it better promises the gain.
    Exit codes 1 and 2 are errors, as of every command.
    """
    terms = Terms(budget=amount(budget, "--budget"), min_gain=min_gain, price=price)
    tell(answers.judge(read_one(source, reading), terms), json_file, html_file)


@app.command()
@reading_options
def watch(
    source: Source,
    reading: Reading,
    follow: Annotated[bool, typer.Option("--follow", help="Look again until the run has ended.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 30.0,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Refit, and hold later evaluations against the forecast; an alarm of drift, collapse or truncation exits
    with code 10.

    --follow does so at every evaluation, and waits for those that are not there yet.
    """

    def look() -> Watched | None:
        run = RunFolder.open(source)
        if not any(
            row.get("set", row["split"]) == reading.split for row in run.eval.rows()
        ) and not has_ended(run):
            return None
        return watched(read_one(source, reading, waiting=follow))

    def say(answer: Answer) -> int:
        return show(answer, json_file, html_file)

    if follow and not source.is_dir():
        raise ValueError(f"--follow is for a run folder and {source} is none; drop it")
    if follow:
        code = following(look, say, lambda: time.sleep(every))
    else:
        code = say(watched(read_one(source, reading)).answer())
    if code:
        raise typer.Exit(code)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Watched:
    """A run at one look."""

    window: Window
    truncated: float | None = None  # share of training answers that were cut off of late
    ended: bool = True  # see ``has_ended``

    def answer(self) -> Answer:
        return answers.watch(self.window, self.truncated)


def watched(window: Window) -> Watched:
    if window.run is None:
        return Watched(window=window)
    run = RunFolder.open(window.run)
    data = run_rows(run)
    truncated = mean(data.metrics[-RECENT:], "completions/clipped_ratio")
    return Watched(window=window, truncated=truncated, ended=has_ended(run))


def has_ended(run: RunFolder) -> bool:
    """All steps of its recipe are done, or its last process has taken its leave. A killed run has not ended:
    it may be resumed."""
    data = run_rows(run)
    *_, last = [{}, *run.ledger.rows()]
    done = last_step(data.metrics) >= data.setting("trainer.steps", math.inf)
    return done or last.get("event") == Event.END


def following(
    look: Callable[[], Watched | None], say: Callable[[Answer], int], pause: Callable[[], object]
) -> int:
    """Tell every new evaluation, and every change of the truncation alarm, until the run has ended; the last
    exit code. ``look`` gives None so long as nothing has been evaluated. A run that ends with too few
    evaluations for a fit raises ValueError."""
    told, code = (0, Truncation.FINE), 0
    while True:
        if (found := look()) is not None:
            evaluations = len(found.window.fitted)
            cut = Truncation.FINE if found.truncated is None else truncation(found.truncated)
            if (evaluations, cut) != told and (evaluations >= PARAMETERS or found.ended):
                told, code = (evaluations, cut), say(found.answer())
            if found.ended:
                return code
        pause()


@app.command("plan-pilot")
def plan_pilot(
    A: AOption,
    B: BOption,
    c_mid: CMidOption,
    every: Annotated[str, typer.Option(metavar="C", help="Compute between evaluations.", show_default=False)],
    width: Annotated[float, typer.Option(help="Wanted 90 % width of A.")] = 0.04,
    r0: R0Option = 0.0,
    first: Annotated[str, typer.Option(metavar="C", help="Evaluations before it are not fitted.")] = "",
    axis: UnitOfC = Axis.DEVICE_HOURS,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """How long a pilot has to be for its ceiling to be known, if its curve is as you guess."""
    guess = _curve(r0, A, B, c_mid)
    start = amount(first, "--first") if first else 0.0
    tell(answers.pilot(guess, amount(every, "--every"), width, start, axis), json_file, html_file)


def _curve(R0: float, A: float, B: float, C_mid: str) -> Sigmoid:
    if not 0 <= R0 <= A <= 1:
        raise ValueError(f"--R0 is {R0:g} and --A is {A:g}; use scores with 0 <= R0 <= A <= 1")
    return Sigmoid(R0=R0, A=A, B=B, C_mid=amount(C_mid, "--c-mid"))


@app.command()
def simulate(
    A: AOption,
    B: BOption,
    c_mid: CMidOption,
    r0: R0Option = 0.0,
    until: Annotated[str, typer.Option(metavar="C", help="By default five times --c-mid.")] = "",
    evaluations: Annotated[int, typer.Option(min=1)] = 20,
    sd: Annotated[float, typer.Option(min=0.0, help="Of one evaluation.")] = 0.0042,
    rho: Annotated[float, typer.Option(min=0.0, max=0.999, help="Correlation of neighbours.")] = 0.45,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    axis: UnitOfC = Axis.DEVICE_HOURS,
    out: Annotated[
        Path | None, typer.Option(help="Write a CSV that scale fit reads.", show_default=False)
    ] = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Evaluations of a known curve with the noise of real ones."""
    truth = _curve(r0, A, B, c_mid)
    last = amount(until, "--until") if until else 5 * truth.C_mid
    compute = np.linspace(0, last, evaluations + 1)[1:]
    answer = answers.imagine(truth, compute, sd, rho, seed, axis)
    if out is not None:
        atomic_write(out, answers.csv_of(answer))
    tell(answer, json_file, html_file)


@app.command()
def ledger(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN..", help="Run folders, side by side.", show_default=False)
    ],
    price_per_device_hour: Price = 0.0,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """What runs have cost: time, tokens, FLOPs useful and wasted, money, compute on every axis."""
    tell(books([RunFolder.open(run) for run in runs], price_per_device_hour), json_file, html_file)


# -- telling


def tell(answer: Answer, json_file: Path | None, html_file: Path | None) -> None:
    """Show the answer and exit with its code."""
    if code := show(answer, json_file, html_file):
        raise typer.Exit(code)


def show(answer: Answer, json_file: Path | None, html_file: Path | None) -> int:
    """Tables on the terminal (or the JSON object alone where it is asked for there), and the files; returns
    the exit code."""
    if html_file is not None:
        page = Page(
            title=answer.title,
            kind=answer.kind,
            lead=answer.lead,
            alarms=answer.alarms,
            tables=answer.tables,
            forests=answer.forests(),
            sections=answer.sections(),
        )
        write_page(html_file, page)
    text = to_json(answer.result)
    if json_file is not None and str(json_file) != "-":
        atomic_write(json_file, f"{text}\n".encode())
    if json_file is not None and str(json_file) == "-":
        print(text, flush=True)
    else:
        _print(answer)
    return answer.exit_code


def _print(answer: Answer) -> None:
    """At the width of the terminal, and wide where there is none."""
    console = Console()
    console = console if console.is_terminal else Console(width=140)
    for sentence in answer.alarms:
        console.print(f"ALARM: {sentence}", style="bold red", highlight=False, markup=False)
    for sentence in answer.lead:
        console.print(sentence, highlight=False, markup=False)
    for one in answer.tables:
        console.print(terminal_table(one))
        if one.note:
            console.print(one.note, style="dim", highlight=False, markup=False)
