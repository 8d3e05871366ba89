"""``ostinato memory serve``: another program's chats within a budget of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ostinato.options import Hosts, Origins, make_access
from ostinato.terminal import say

app = typer.Typer(
    name="memory",
    help="Contexts that are kept within a budget of tokens (docs/memory.md).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def memory() -> None:
    """Contexts that are kept within a budget of tokens (docs/memory.md)."""


@app.command("serve")
def serve(
    url: Annotated[
        str, typer.Argument(help="An OpenAI-compatible address: http://host:8000/v1", show_default=False)
    ],
    budget: Annotated[
        int, typer.Option(min=1, help="Tokens that the messages of a request may have.")
    ] = 4096,
    recent: Annotated[int, typer.Option(min=0, help="Of them the newest, verbatim; 0: a third.")] = 0,
    file: Annotated[Path, typer.Option(help="Where sessions are kept.")] = Path("runs/memory.sqlite"),
    tokenizer: Annotated[
        str, typer.Option(metavar="MODEL", help="That counts; without, 3 bytes a token.")
    ] = "",
    refill: Annotated[
        str, typer.Option(metavar="extract|model|diffusion:FOLDER", help="Who shortens: docs/memory.md.")
    ] = "extract",
    model: Annotated[str, typer.Option(help="With --refill model: its name there.")] = "",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8200,
    allowed_hosts: Hosts = None,
    origins: Origins = None,
) -> None:
    """Pass all on to an OpenAI-compatible address, chats within a budget; $OPENAI_API_KEY is its key."""
    import os

    try:
        from ostinato.apps.memory.upstream import FILES, Upstream
        from ostinato.apps.serve.server import HttpServer, format_address, open_socket
    except ModuleNotFoundError as error:
        raise ValueError(
            f'memory serve needs {error.name}; install it: pip install "ostinato[serve]"'
        ) from None
    from ostinato.access import is_loopback
    from ostinato.apps.memory.conversations import Keeping, open_memory
    from ostinato.apps.memory.refill import ChatModel
    from ostinato.model.named import find_model_folder
    from ostinato.render import Renderer

    key = os.environ.get("OPENAI_API_KEY", "")
    if key and not is_loopback(host):
        raise ValueError(
            f"--host {host} can be reached by other machines, which would use your OPENAI_API_KEY; unset it, "
            "or listen on 127.0.0.1"
        )
    keeping = Keeping(budget=budget, recent=recent, file=file, refill=refill)
    renderer = Renderer(find_model_folder(tokenizer)) if tokenizer else None
    with (
        open_memory(keeping, renderer, ChatModel(url, model, key)) as chats,
        open_socket(host, port) as listening,
    ):
        assert chats is not None
        app = Upstream(url, chats, key).app()
        own_address = format_address(listening)
        say(f"OpenAI address {own_address}/v1 in front of {url}, {budget} tokens (Ctrl-C ends it)")
        allowed = make_access(allowed_hosts, origins).permit_types(FILES)
        HttpServer(app, listening, allowed).serve_until_signal()
