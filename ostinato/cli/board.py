"""``ostinato board``: serve the page that follows a run, until Ctrl-C."""

from __future__ import annotations

import webbrowser
from pathlib import Path

from ostinato.access import Access, is_loopback
from ostinato.cli.report import local_renderer
from ostinato.observe.board import JOURNAL, Board, ProductBoard, open_server
from ostinato.run import RunFolder
from ostinato.terminal import say


def board(path: Path, host: str, port: int, access: Access, *, show: bool) -> None:
    """Follow the run or the product's loop in ``path``. Raises ValueError where there is none, or the port is
    taken."""
    with open_server(_board(path), host, port, access) as server:
        say(f"board of {path}: {server.address} (Ctrl-C ends it)")
        if not is_loopback(host):
            say("everyone who can reach this port reads the prompts and answers of the run", error=True)
        if show:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("")


def _board(path: Path) -> Board | ProductBoard:
    if (path / JOURNAL).is_file():
        return ProductBoard(path)
    run = RunFolder.open(path)
    return Board(run, local_renderer(run))
