"""``ostinato scale``: ``reading`` reads the sources, ``answers`` computes, and this module shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ostinato.apps.scaling import answers
from ostinato.apps.scaling.answers import Answer
from ostinato.apps.scaling.decide import Terms
from ostinato.apps.scaling.reading import (
    Price,
    Reading,
    parse_amount,
    read_one,
    read_several,
    reading_options,
)
from ostinato.run import RunFolder, atomic_write, to_json
from ostinato.tables import terminal_table
from ostinato.terminal import Screen

app = typer.Typer(
    name="scale",
    help="Where a run will end, how well that is known, and whether to go on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Source = Annotated[
    Path, typer.Argument(metavar="RUN|CSV", help="A run folder, or a CSV of evaluations.", show_default=False)
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", help="One JSON object into this file, - for standard output.", show_default=False),
]


@app.command()
@reading_options
def fit(source: Source, reading: Reading, json_file: JsonFile = None) -> None:
    """Fit R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B), and say how well it is known."""
    show_and_exit(answers.answer_fit(read_one(source, reading)), json_file)


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
) -> None:
    """The score at a compute, or the compute for a score."""
    if not at and not target:
        raise ValueError("nothing to compute; give --at a compute or --target a score")
    computes = [parse_amount(text, "--at") for text in at or ()]
    show_and_exit(answers.answer_forecasts(read_one(source, reading), computes, target or ()), json_file)


@app.command()
@reading_options
def compare(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN|CSV..", help="The first is what others are compared with.", show_default=False
        ),
    ],
    reading: Reading,
    json_file: JsonFile = None,
) -> None:
    """Which ceiling is higher, and which run is only more efficient; for several seeds: ostinato compare."""
    show_and_exit(answers.answer_comparison(read_several(sources, reading)), json_file)


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
) -> None:
    """Go on (exit code 0), stop (10) or undecided (20).

    Stop: the whole rest of the budget brings less than --min-gain, or than --price for each unit, with 90 %;
    a smaller --budget may yet pay. Go on: it brings more than both, with 90 %. All else is undecided, and so
    is a curve that is not identified, and one to which a law that predicted it better promises the gain.
    Exit codes 1 and 2 are errors, as of every command.
    """
    terms = Terms(budget=parse_amount(budget, "--budget"), min_gain=min_gain, price=price)
    show_and_exit(answers.answer_decision(read_one(source, reading), terms), json_file)


@app.command()
def ledger(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN..", help="Run folders, side by side.", show_default=False)
    ],
    price_per_device_hour: Price = 0.0,
    json_file: JsonFile = None,
) -> None:
    """What runs have cost: time, tokens, FLOPs, money, compute on every axis."""
    show_and_exit(
        answers.answer_ledgers([RunFolder.open(run) for run in runs], price_per_device_hour), json_file
    )


def show_and_exit(answer: Answer, json_file: Path | None) -> None:
    """Show the answer, and raise typer.Exit with its code unless that is 0."""
    show_answer(answer, json_file)
    if answer.exit_code:
        raise typer.Exit(answer.exit_code)


def show_answer(answer: Answer, json_file: Path | None) -> None:
    """Print sentences and tables and write the JSON file, if one is named. For "-" print the JSON object
    alone."""
    text = to_json(answer.result)
    if json_file is not None and str(json_file) == "-":
        print(text, flush=True)
        return
    if json_file is not None:
        atomic_write(json_file, f"{text}\n".encode())
    console = Screen()
    for sentence in answer.lead:
        console.print(sentence, highlight=False, markup=False)
    for table in answer.tables:
        console.print(terminal_table(table, console.width))
        if table.note:
            console.print(table.note, style="dim", highlight=False, markup=False)
