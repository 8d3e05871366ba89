"""Options of every command that listens: under which names, and for which web pages (docs/security.md)."""

from __future__ import annotations

from typing import Annotated

import typer

from ostinato.access import Access

Hosts = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", metavar="NAME", help="A further name of this server, e.g. of a proxy."),
]
Origins = Annotated[
    list[str] | None,
    typer.Option("--origin", metavar="URL", help="A web page that may call it (CORS); '*': all."),
]


def access(hosts: list[str] | None, origins: list[str] | None) -> Access:
    """What the options allow."""
    return Access(hosts=frozenset(hosts or ()), origins=frozenset(origins or ()))
