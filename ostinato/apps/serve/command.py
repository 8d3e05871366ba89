"""``ostinato serve`` and ``ostinato proxy``: a policy behind OpenAI-compatible addresses, until SIGTERM or
Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.access import STRICT, Access
from ostinato.launch.machine import configure_threads
from ostinato.launch.models import load_recipe
from ostinato.terminal import say

if TYPE_CHECKING:
    from ostinato.apps.serve.served import OpenAdditions, RunningService


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a server, and the rules of access to it."""

    host: str
    port: int
    key: str = ""  # "": the key in the environment
    access: Access = STRICT
    drain_s: float = 30.0


def parse_adapters(texts: Sequence[str]) -> dict[str, str]:
    """Parse NAME=PATH, NAME=PATH, ... Raises ValueError for anything else."""
    pairs = [text.partition("=") for text in texts]
    for text, (name, _, path) in zip(texts, pairs, strict=True):
        if not name or not path:
            raise ValueError(f"--adapter {text!r} is not NAME=PATH, e.g. --adapter maths=runs/maths")
    return {name: path for name, _, path in pairs}


def serve(
    target: str,
    overrides: Sequence[str],
    adapters: Mapping[str, str],
    where: Address,
    *,
    name: str,
    limits: Mapping[str, Any],
    feedback: str = "",
    product: Path | None = None,
    catalog: tuple[Path, int] | None = None,
    additions: OpenAdditions | None = None,
) -> None:
    """Serve ``target`` until a signal, with the additions of other applications; ``feedback``: the address of
    their store; ``catalog``: a folder, and the MB of its policies in memory. Raises ValueError for a target
    that cannot be served, and for a catalog with keys beside additions, which do not keep keys apart."""
    say(f"loading {target}")
    try:
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401

        from ostinato.apps.serve.server import HttpServer, choose_key, format_address, open_socket
    except ModuleNotFoundError as error:
        raise ValueError(f'serve needs {error.name}; install it: pip install "ostinato[serve]"') from None
    key = choose_key(where.host, "--host", where.key)
    server_socket = open_socket(where.host, where.port)
    with server_socket:
        recipe, _ = load_recipe(target, *overrides)
        configure_threads(recipe)
        from ostinato.apps.serve.app import make_app
        from ostinato.apps.serve.served import NO_ADDITIONS, ServiceSpec, open_service
        from ostinato.apps.serve.service import Limits

        serving = ServiceSpec(
            target=target,
            overrides=tuple(overrides),
            adapters=adapters,
            limits=Limits(context=0, **limits),
            name=name,
            catalog=catalog[0] if catalog else None,
            catalog_mb=catalog[1] if catalog else 0,
        )

        with contextlib.ExitStack() as stack:
            served = stack.enter_context(open_service(serving))
            if additions is not None and served.policies is not None and served.policies.catalog.has_owners:
                raise ValueError(
                    "--feedback and --memory do not keep the keys of --catalog apart; leave them out"
                )
            base, extras = format_address(server_socket), NO_ADDITIONS
            if additions is not None:
                extras = stack.enter_context(additions(served, base, key))
            app = make_app(served.service, key=key, added=extras, lifespan=_make_lifespan(served, product))
            _announce(served, base, feedback)
            HttpServer(app, server_socket, where.access, drain_s=where.drain_s).serve_until_signal()


def _announce(served: RunningService, base: str, feedback: str) -> None:
    for model in served.service.models.values():
        say(f"{model.name:24} version {model.version}")
    say(f"OpenAI address {base}/v1, chat page {base}/ (Ctrl-C ends it)")
    if feedback:
        say(f"Feedback {base}/feedback, kept in {feedback.rpartition('@')[2]}")


def _make_lifespan(
    served: RunningService, product: Path | None
) -> Callable[[object], contextlib.AbstractAsyncContextManager[None]]:
    """Return a lifespan that serves, beside the application, the newest policies of runs that still learn and
    of a product's loop."""
    from ostinato.apps.serve.served import follow_catalog, follow_product, follow_runs

    @contextlib.asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(follow_runs(served))]
        tasks += [asyncio.create_task(follow_product(served, product))] if product else []
        if served.policies is not None:
            tasks.append(asyncio.create_task(follow_catalog(served.policies)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    return lifespan


def proxy(target: str, overrides: Sequence[str], out: Path, where: Address, idle_s: float) -> None:
    """Record rollouts until a signal. Raises ValueError for a target that cannot be served."""
    say(f"loading {target}")
    recipe, _ = load_recipe(target, *overrides)
    configure_threads(recipe)
    try:
        from ostinato.apps.serve.elsewhere import Place
        from ostinato.apps.serve.proxy import record_rollouts
        from ostinato.apps.serve.server import choose_key
    except ModuleNotFoundError as error:
        raise ValueError(f'proxy needs {error.name}; install it: pip install "ostinato[serve]"') from None
    key = choose_key(where.host, "--host")
    place = Place(host=where.host, port=where.port, key=key, access=where.access)
    record_rollouts(target, recipe, overrides, out=out, place=place, idle_s=idle_s)
