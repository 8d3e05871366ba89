"""Who does the work of a run: a trainer, an engine and a grader, in this process or over a cluster.

The loop is the same for all; only what stands behind its protocols differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ostinato.cli import parts
from ostinato.cli.build import Prepared, environment, new_drafting
from ostinato.cli.drafts import Memory
from ostinato.cli.ranks import new_trainer
from ostinato.cli.vllm import vllm_engine
from ostinato.engine.vllm_proof import Verdict
from ostinato.pipeline.loop import Finish, Finished, Loop
from ostinato.pipeline.remember import Drafting
from ostinato.pipeline.signals import Abandoned, StopSignals
from ostinato.protocols import Engine, Timed

STATUS_S = 1.0  # between two writings of workers.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """``trainer`` has what ``train.PolicyTrainer`` has. ``ready`` is awaited before the loop begins, ``end``
    when it has ended, both in its event loop."""

    trainer: Any
    engine: Engine
    memory: Memory | None = None
    drafting: Drafting | None = None
    counters: Sequence[Counter[str]] = ()  # beside those of the grader and the tools
    figures: Callable[[], Mapping[str, float]] = dict  # more for each row of metrics
    sampled: Callable[[], float] = lambda: 0.0  # grows while the engine gets on
    timed: Sequence[Timed] = ()  # whoever is at work beside the loop
    loop_worker: str = "trainer"  # what the loop's own time is drawn as
    pools: Mapping[str, int] = field(default_factory=dict)  # devices by pool; empty: one process does it all
    lines: Sequence[str] = ()  # who works where, for a person
    status: Callable[[], Sequence[Mapping[str, Any]]] | None = None  # rows of workers.json
    whole: Callable[[], bool] = lambda: False  # is the trainer's last state safe while a step fails?
    ready: Callable[[], Coroutine[Any, Any, None]] | None = None
    end: Callable[[], Awaitable[None]] | None = None

    async def run(self, loop: Loop, folder: Path) -> Finished:
        """Run ``loop``; meanwhile workers.json in ``folder`` tells of the workers."""
        telling = asyncio.create_task(_tell(folder / "workers.json", self.status)) if self.status else None
        try:
            if self.ready is not None:
                with StopSignals(0.0, at_once=True) as signals, contextlib.suppress(Abandoned):
                    await signals.bounded(self.ready())
                if signals.received is not None:
                    return Finished(state=loop.state, why=Finish.of(signals.received))
            return await loop.run()
        finally:
            if telling is not None and self.status is not None:
                telling.cancel()
                _write(folder / "workers.json", self.status())  # before they end: what did the work
            if self.end is not None:
                await self.end()


@contextlib.contextmanager
def hired(
    prepared: Prepared, folder: Path, memory: Memory | None, say: parts.Say, workers: str
) -> Iterator[tuple[Prepared, Crew]]:
    """The crew that the recipe asks for, and what it has prepared to work with, until the context ends.
    ``folder`` is of the run, ``workers`` the module that makes those of a cluster."""
    if prepared.recipe.cluster.samplers:
        from ostinato.cli.cluster import clustered

        with clustered(prepared, folder, memory, say, workers) as found:
            yield found
        return
    recipe, decoder = prepared.recipe, prepared.decoder
    with contextlib.ExitStack() as held:
        trainer = held.enter_context(new_trainer(prepared, folder, say))
        if recipe.engine.backend == "vllm":
            vllm = held.enter_context(_sampling_by_vllm(prepared, folder, say))
            yield prepared, Crew(trainer=trainer, **vllm)
            return
        engine = parts.new_engine(recipe, decoder, prepared.renderer, say, memory)
        yield (
            prepared,
            Crew(
                trainer=trainer,
                engine=engine,
                memory=memory,
                drafting=new_drafting(memory, engine) if memory else None,
                sampled=lambda: engine.counters.decoded + engine.counters.prefilled,
                timed=(engine,),
            ),
        )


@contextlib.contextmanager
def _sampling_by_vllm(prepared: Prepared, folder: Path, say: parts.Say) -> Iterator[dict[str, Any]]:
    """What a crew has of it: no drafts, and what policies were proven by in each row of metrics."""
    recipe, renderer = prepared.recipe, prepared.renderer
    prompt = environment(recipe, renderer)(prepared.train_prompts[0]).start()
    places = {"model": prepared.folder, "folder": folder / "vllm"}
    with vllm_engine(recipe, prepared.decoder, renderer, **places, prompt=prompt, say=say) as engine:

        async def end() -> None:
            """A thread that waits for a server to come back would keep the event loop from ending."""
            await asyncio.to_thread(engine.close)

        yield {
            "end": end,
            "engine": engine,
            "counters": (engine.counters,),
            "figures": lambda: proof_row(engine.take_verdict()),
            "sampled": lambda: engine.signs,
            "timed": (engine,),
        }


def proof_row(verdict: Verdict | None) -> dict[str, float]:
    """In the row of the step in which a policy was judged, and in no other one."""
    if verdict is None:
        return {}
    row = {"k3": verdict.k3, "k3_version": verdict.version, "k3_tokens": verdict.tokens}
    return {f"publish/{name}": float(value) for name, value in row.items()}


async def _tell(path: Path, status: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
    while True:
        _write(path, status())
        await asyncio.sleep(STATUS_S)


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Not flushed to the disk: the rows are of now, and gone with the process."""
    aside = path.with_name(f".{path.name}")
    with contextlib.suppress(OSError):  # a full disk is the loop's to tell
        aside.write_text(json.dumps(list(rows)))
        aside.replace(path)
