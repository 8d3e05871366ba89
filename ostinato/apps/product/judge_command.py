"""``ostinato judge``: train a judge on pairs, say how good it is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ostinato.config import Recipe
from ostinato.launch import NothingToLearn
from ostinato.launch.machine import configure_threads
from ostinato.run import atomic_write
from ostinato.terminal import Screen, say, show_log

app = typer.Typer(
    name="judge",
    help="A judge of answers: trained on pairs, measured; a reward function (docs/judge.md).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Of the recipe.", show_default=False)
]
Pairs = Annotated[
    str,
    typer.Argument(
        metavar="ROWS|STORE", help="Pairs: prompt, chosen, rejected, critique.", show_default=False
    ),
]
JudgeName = Annotated[
    str,
    typer.Argument(
        metavar="JUDGE", help="A run, an adapter folder, a model, or an address.", show_default=False
    ),
]


@app.command()
def train(
    rows: Pairs,
    overrides: Overrides = None,
    template: Annotated[
        Path | None, typer.Option(help="What the judge reads, with {prompt}, {a}, {b}.")
    ] = None,
    holdout: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of questions that is held out.")
    ] = 0.1,
    warm: Annotated[bool, typer.Option("--warm/--no-warm", help="SFT before RL.")] = True,
    rl: Annotated[bool, typer.Option("--rl/--no-rl", help="RL behind the warm start.")] = True,
) -> None:
    """SFT on critiques and verdicts, then RL that rewards verdicts which are right in both orders."""
    from ostinato.apps.product.judge_runs import plan_runs
    from ostinato.apps.product.judges import write_spec
    from ostinato.cli.train import finish, run
    from ostinato.launch.session import Outcome, learn

    judge_plan = plan_runs(rows, overrides or [], template.read_text() if template else "", holdout)
    folders: list[Path] = []

    def save_spec(folder: Path) -> None:
        write_spec(judge_plan.spec, folder)
        folders.append(folder)

    def train_rl() -> Outcome:
        outcome = learn(judge_plan.after(folders[0]) if folders else judge_plan.rl)
        save_spec(outcome.folder)
        return outcome

    code = run(judge_plan.warm, None, save_spec) if warm else 0
    if rl and not code:
        try:
            code = finish(train_rl)
        except NothingToLearn as error:
            if not folders:
                raise
            say(f"the judge is that of the warm start, for RL failed: {error}", error=True)
    if folders and not code:
        say(f"as a reward  ostinato train RECIPE reward.functions='[\"judge:{folders[-1]}\"]'")
    raise typer.Exit(code)


@app.command("eval")
@show_log()
def evaluate(
    judge: JudgeName,
    rows: Pairs,
    overrides: Overrides = None,
    against: Annotated[str, typer.Option(metavar="JUDGE", help="Another one, by its side.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="One JSON object into this file.")] = None,
) -> None:
    """Accuracy in each order, consistency, what cannot be read, calibration; with 95 % Wilson intervals."""
    recipe = Recipe.load("judge_rl", *(overrides or []))
    configure_threads(recipe)
    from ostinato.apps.product.judge_runs import compute_figures, read_preferences
    from ostinato.apps.product.judges import open_sources
    from ostinato.apps.product.panel import Bench

    pairs, row_of = read_preferences(rows), dict[str, dict[str, Any]]()
    (first_source,) = open_sources(judge)
    counters_of = {name: Counter[str]() for name in (judge, *filter(None, [against]))}
    for name, counters in counters_of.items():
        (source,) = open_sources(name, like=first_source.spec)
        rows_of = ((pair.chat, pair.chosen, pair.rejected) for pair in pairs)
        row = compute_figures(Bench(recipe=recipe, counters=counters).compare(source, rows_of))
        row_of[name] = {"revision": source.revision, **row, **counters}
    Screen().print(_build_table(row_of))
    if json_file is not None:
        atomic_write(json_file, json.dumps(row_of, indent=1).encode())


def _build_table(row_of: dict[str, dict[str, Any]]) -> Table:
    table = Table(title=f"{next(iter(row_of.values()))['pairs']} pairs, each in both orders")
    for header in ("", *row_of):
        table.add_column(header, justify="right" if header else "left")
    for name in next(iter(row_of.values())):
        table.add_row(name, *(_format_cell(row.get(name)) for row in row_of.values()))
    return table


def _format_cell(value: Any) -> str:
    if isinstance(value, dict):
        low, high = value["interval"]
        return f"{value['value']:.3f} [{low:.3f}, {high:.3f}]"
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
