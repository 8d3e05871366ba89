"""``ostinato tinker``: a server for the Tinker SDK, until SIGTERM or Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ostinato.apps.serve.command import Address
from ostinato.launch.machine import configure_threads
from ostinato.launch.models import load_recipe
from ostinato.terminal import say, show_log

EXAMPLE = """
    import tinker
    client = tinker.ServiceClient().create_lora_training_client("{name}", rank=16).result()
    print(client.save_weights_and_get_sampling_client().result().get_base_model())
"""


@show_log(error=True)
def tinker(
    target: str, overrides: Sequence[str], where: Address, state: Path, name: str, models_mb: int
) -> None:
    """Serve until a signal; ``models_mb``: of models in memory. Raises ValueError for a target that cannot be
    served."""
    say(f"loading {target}")
    for package in ("tinker", "uvicorn", "sqlalchemy"):
        if find_spec(package) is None:  # not imported: the SDK loads torch, and threads are chosen before
            raise ValueError(f'tinker needs {package}; install it: pip install "ostinato[tinker]"')
    from ostinato.apps.serve.server import HttpServer, choose_key, format_address, open_socket

    key = choose_key(where.host, "--host", where.key)
    if key and not key.startswith("tml-"):
        raise ValueError("the key does not begin with tml-, and the SDK sends no other; choose one that does")
    server_socket = open_socket(where.host, where.port)
    with server_socket:
        recipe, _ = load_recipe(target, *overrides)
        configure_threads(recipe)
        from ostinato.apps.tinker.app import make_app
        from ostinato.apps.tinker.models import MODEL
        from ostinato.apps.tinker.registry import PROTO
        from ostinato.apps.tinker.work import CHECKPOINT, open_work

        with open_work(target, tuple(overrides), state, name, models_mb << 20) as workshop:
            app = make_app(workshop.work, workshop.registry, key=key)
            say(f"export TINKER_BASE_URL={format_address(server_socket)}")
            say(f"export TINKER_API_KEY={key or 'tml-local'}")
            say(EXAMPLE.format(name=name or target))
            num_models, num_checkpoints = (
                len(workshop.registry.list_all(kind)) for kind in (MODEL, CHECKPOINT)
            )
            kept = f"models: {num_models}, checkpoints: {num_checkpoints}"
            say(f"what clients make is kept in {state} ({kept}); Ctrl-C ends the server")
            options = {"drain_s": where.drain_s, "end_waits": app.state.end_waits}
            HttpServer(app, server_socket, where.access.permit_types(PROTO), **options).serve_until_signal()
