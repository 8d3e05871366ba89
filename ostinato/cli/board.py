"""``ostinato board``: serve the page that follows a run, until Ctrl-C."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import typer

from ostinato.cli.report import local_renderer
from ostinato.observe.board import is_loopback, open_server
from ostinato.run import RunFolder


def board(path: Path, host: str, port: int, *, show: bool) -> None:
    """Follow the run in ``path``. Raises ValueError where there is none, or the port is taken."""
    run = RunFolder.open(path)
    with open_server(run, host, port, local_renderer(run)) as server:
        typer.echo(f"board of {path}: {server.address} (Ctrl-C ends it)")
        if not is_loopback(host):
            typer.echo("whoever reaches this port reads the prompts and answers of the run", err=True)
        if show:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo()
