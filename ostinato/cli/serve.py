"""``ostinato serve`` with a store of feedback and a memory of sessions: the applications put together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ostinato.apps.serve.additions import Additions, OpenAdditions
    from ostinato.apps.serve.served import Served


def additions(feedback: str, budget: int, file: Path, refill: str) -> OpenAdditions:
    """``feedback``: the store, "" for none; ``budget``: tokens of a session's messages, 0 for no memory,
    which ``file`` keeps and ``refill`` shortens (docs/memory.md)."""

    @contextmanager
    def opened(served: Served, address: str, key: str) -> Iterator[Additions]:
        from ostinato.apps.memory.conversations import Keeping, open_memory
        from ostinato.apps.memory.refill import At
        from ostinato.apps.product.feedback import open_feedback
        from ostinato.apps.serve.additions import Additions

        keeping = Keeping(budget=budget, file=file, refill=refill) if budget else None
        itself = At(f"{address}/v1", key=key)
        with (
            open_feedback(feedback, served.service) as store,
            open_memory(keeping, served.service.renderer, itself) as memory,
        ):
            yield Additions(feedback=store, memory=memory)

    return opened
