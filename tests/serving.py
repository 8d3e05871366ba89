"""A server in this process, on a port of its own, for tests of ``ostinato.apps.serve``."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ostinato.access import STRICT, Access
from ostinato.apps.memory import refill
from ostinato.apps.memory.conversations import Keeping, open_memory
from ostinato.apps.product.feedback import open_feedback
from ostinato.apps.serve.app import make_app
from ostinato.apps.serve.served import Additions, RunningService, ServiceSpec, open_service
from ostinato.apps.serve.server import HttpServer, format_address, open_socket
from ostinato.apps.serve.service import Limits


@dataclass(frozen=True, slots=True)
class At:
    """A server that answers at ``url``."""

    url: str
    served: RunningService


@contextlib.contextmanager
def server(
    target: str = "asset:seed-moe",
    *,
    key: str = "",
    adapters: dict[str, str] | None = None,
    feedback: str = "",
    memory: Keeping | None = None,
    catalog: Path | None = None,
    catalog_mb: int = 1024,
    access: Access = STRICT,
    **limits: Any,
) -> Iterator[At]:
    """Serve ``target`` while the context lasts."""
    # "auto" depends on the processor and its load; a run has its own
    overrides = () if (Path(target) / "recipe.toml").is_file() else ("model.dtype=float32",)
    serving = ServiceSpec(
        target=target,
        overrides=overrides,
        adapters=adapters or {},
        limits=Limits(context=0, **limits),
        catalog=catalog,
        catalog_mb=catalog_mb,
    )
    with (
        open_service(serving) as served,
        open_feedback(feedback, served.service) as kept,
        open_socket("127.0.0.1", 0) as listening,
        contextlib.ExitStack() as stack,
    ):
        url = format_address(listening)
        itself = refill.ChatModel(f"{url}/v1", key=key)
        remembered = stack.enter_context(open_memory(memory, served.service.renderer, itself))
        added = Additions(feedback=kept, memory=remembered)
        app = make_app(served.service, key=key, added=added)
        runner = HttpServer(app, listening, access, log_level="error", lifespan="off")
        thread = threading.Thread(target=runner.serve_until_signal, daemon=True)
        thread.start()
        while not runner.started:
            time.sleep(0.01)
        try:
            yield At(format_address(listening), served)
        finally:
            runner.should_exit = True
            thread.join(20)


def until(what: Any, seconds: float = 20.0) -> None:
    """Wait until ``what()`` is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)
