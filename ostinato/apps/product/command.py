"""``ostinato product``: the continual loop of a product, and where it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ostinato.terminal import say, show_log

app = typer.Typer(
    name="product",
    help="Feedback -> judge -> policy -> canary, again and again, with gates between (docs/product.md).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="e.g. policy.steps=40", show_default=False),
]
Folder = Annotated[Path, typer.Option(help="Where the loop is kept.")]


@app.command("run")
@show_log()
def run(
    settings: Annotated[Path, typer.Argument(metavar="PRODUCT.TOML", show_default=False)],
    overrides: Overrides = None,
    folder: Folder = Path("runs/product"),
    rounds: Annotated[int, typer.Option(min=1, help="End after so many, counted from the first.")] = 10**9,
) -> None:
    """Work the loop, stage by stage, from where its journal ends."""
    from ostinato.apps.product.runs.loop import ProductLoop
    from ostinato.apps.product.runs.policy import STAGES
    from ostinato.apps.product.runs.settings import read_settings
    from ostinato.apps.product.store import open_store
    from ostinato.database import Unavailable
    from ostinato.launch import RunFailed
    from ostinato.lock import hold_lock

    product_settings = read_settings(settings, *(overrides or []))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with (
            hold_lock(folder, "product folder", "--folder OTHER"),
            open_store(product_settings.store) as store,
        ):
            ProductLoop(product_settings, folder, store, STAGES).run(rounds)
    except Unavailable as error:
        raise RunFailed(f"{error}; once it does, the same command goes on from the last decision") from error


@app.command("status")
def status(folder: Annotated[Path, typer.Argument(show_default=False)]) -> None:
    """Every decision so far, the last one last."""
    from ostinato.observe.page.serve import JOURNAL
    from ostinato.run import Jsonl

    for row in Jsonl(folder / JOURNAL).rows():
        before, finding = row["before"], row["finding"]
        say(f"round {before['round']}  {before['stage']:<13} {row['what']}  {'; '.join(finding['reasons'])}")
