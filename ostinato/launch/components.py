"""Who does the work of a run: a trainer, an engine and a grader, in this process or over a cluster.

The loop is the same for all; only what stands behind its protocols differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.launch.drafts import Memory
from ostinato.pipeline.draft_metrics import Drafting
from ostinato.pipeline.loop import Finish, Finished, Loop
from ostinato.pipeline.signals import Abandoned, StopSignals
from ostinato.protocols import Engine, RestorableTrainer, Timed

STATUS_S = 1.0  # between two writings of workers.json


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents:
    """``ready`` is awaited before the loop begins, ``end`` when it has ended, both in its event loop. The
    loop's ``Workers`` are these."""

    trainer: RestorableTrainer
    engine: Engine
    memory: Memory | None = None
    drafting: Drafting | None = None
    counters: Sequence[Counter[str]] = ()  # beside those of the grader and the tools
    extra_metrics: Callable[[], Mapping[str, float]] = dict
    tokens_sampled: Callable[[], float] = lambda: 0.0  # grows while the engine gets on
    span_sources: Sequence[Timed] = ()  # what is at work beside the loop
    loop_worker: str = "trainer"  # what the loop's own time is drawn as
    pools: Mapping[str, int] = field(default_factory=dict)  # devices by pool; empty: one process does it all
    lines: Sequence[str] = ()  # who works where, for a person
    status: Callable[[], Sequence[Mapping[str, Any]]] | None = None  # rows of workers.json
    trainer_consistent: Callable[[], bool] = lambda: False
    ready: Callable[[], Coroutine[Any, Any, None]] | None = None
    end: Callable[[], Awaitable[None]] | None = None

    def progress(self) -> float:
        return self.tokens_sampled() + self.trainer.progress

    async def run(self, loop: Loop, folder: Path) -> Finished:
        """Run ``loop``; meanwhile workers.json in ``folder`` has the state of the workers."""
        writing = (
            asyncio.create_task(_keep_writing(folder / "workers.json", self.status)) if self.status else None
        )
        try:
            if self.ready is not None:
                with StopSignals(0.0, at_once=True) as signals, contextlib.suppress(Abandoned):
                    await signals.bounded(self.ready())
                if signals.received is not None:
                    return Finished(state=loop.state, why=Finish.of(signals.received))
            return await loop.run()
        finally:
            if writing is not None and self.status is not None:
                writing.cancel()
                _write(folder / "workers.json", self.status())  # before they end: what did the work
            if self.end is not None:
                await self.end()


async def _keep_writing(path: Path, status: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
    while True:
        _write(path, status())
        await asyncio.sleep(STATUS_S)


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Not flushed to the disk: the rows are of now, and gone with the process."""
    aside = path.with_name(f".{path.name}")
    with contextlib.suppress(OSError):  # a full disk is reported by the loop
        aside.write_text(json.dumps(list(rows)))
        aside.replace(path)
