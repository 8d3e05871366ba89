"""The workers of a cluster: samplers, and if the recipe says so graders and the trainer, as actors of Ray.

    recipe -> Cluster (places) -> links -> EnginePool, GraderLink, TrainerLink -> RunComponents

This process keeps the loop, the accounts, the history, and a decoder that maps the same base as the workers
of its host: it counts FLOPs and exports with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ostinato.config import ClusterSection, Recipe, dump_toml
from ostinato.engine.pool import EnginePool, adapters_only
from ostinato.engine.serve import SamplerLink
from ostinato.history.store import History
from ostinato.launch import RunFailed
from ostinato.launch.drafts import Memory, Seen
from ostinato.launch.engine import kernels
from ostinato.launch.inputs import RunInputs
from ostinato.launch.loop import RunComponents
from ostinato.launch.ranks import open_trainer
from ostinato.model.decoder import Decoder
from ostinato.model.shared import own_folder, sweep
from ostinato.model.wire import fingerprint_weights, pack_weights
from ostinato.protocols import RestorableTrainer, Sampler
from ostinato.reward.remote import GraderLink
from ostinato.rollout.schedule import placement
from ostinato.train.remote import TrainerLink
from ostinato.types import HistoryEntry, Publication
from ostinato.workers.ray_cluster import Cluster, Need, RayRemote
from ostinato.workers.remote import WorkerFault, WorkerLost

AHEAD = 2  # calls that a sampler has for each that it decodes: no place in the batch waits for a message
GIVE_WAY = 5  # nice: of a core that they share, 3/4 go to the trainer and 1/4 to a sampler
KEPT_WEIGHTS = 3  # files of all weights
IMPORT_S = 60.0  # that a child of a grader may take to import the reward functions


@contextlib.contextmanager
def open_cluster(
    inputs: RunInputs, folder: Path, memory: Memory | None, workers: str
) -> Iterator[tuple[RunInputs, RunComponents]]:
    """Start or join Ray and open the workers of the recipe, made by the functions of the module ``workers``;
    all of it has ended when the context does.

    Raises ValueError where no Ray answers or the workers do not fit.
    """
    recipe, section = inputs.recipe, inputs.recipe.cluster
    kernels(recipe.engine, inputs.decoder)  # compiled once, here, and not by every worker at once
    sweep()  # copies of the base that a killed run left behind
    with contextlib.ExitStack() as held:
        opened = Cluster.open(
            section.address,
            places(recipe),
            pin=section.pin,
            start_s=section.start_s,
            silence_s=section.silence_s,
            last_words="ostinato: the run was killed, or Ray ended it as its daemon on this host was lost; "
            f"what was saved is in {folder}, to go on: ostinato resume {folder}",
        )
        factory = WorkerFactory(
            cluster=held.enter_context(opened), recipe=recipe, folder=folder, workers=workers
        )
        if section.remote_trainer:
            try:
                trainer = link = factory.trainer()
            except (WorkerLost, WorkerFault) as error:
                raise RunFailed(f"the trainer's worker could not be started: {error}") from error
            held.callback(link.close)
        else:
            trainer, link = held.enter_context(open_trainer(inputs, folder)), None
        publication = adapters_only
        if recipe.adapter.kind == "full":
            publication = held.enter_context(all_weights(inputs.decoder))
        graders = factory.graders() if section.graders else None
        if graders is not None:
            held.callback(graders.close)
            inputs.grader.close()
            inputs = replace(inputs, grader=graders)
        pool = factory.pool(memory, publication)
        yield inputs, _components(factory, pool, trainer, link, graders, memory)
    sweep()


@contextlib.contextmanager
def all_weights(decoder: Decoder) -> Iterator[Callable[[Any, int], Publication]]:
    """How a policy is published where every weight is trained: as a file on this host, in memory if it can.
    The last few stay for samplers that are slow to load or begin anew."""
    with own_folder() as folder:
        kept: deque[Path] = deque()

        def publication(adapters: Any, version: int) -> Publication:
            path = folder / f"weights-{version}.safetensors"
            pack_weights(decoder, path)
            kept.append(path)
            if len(kept) > KEPT_WEIGHTS:
                kept.popleft().unlink()
            return Publication(version=version, fingerprint=fingerprint_weights(decoder), path=str(path))

        yield publication


def _components(
    factory: WorkerFactory,
    pool: EnginePool,
    trainer: RestorableTrainer,
    link: TrainerLink | None,  # the trainer itself where it is a worker
    graders: GraderLink | None,
    memory: Memory | None,
) -> RunComponents:
    recipe, shared = factory.recipe, SharedHistory(memory.history, pool) if memory else None

    async def ready() -> None:  # all of them, at the same time
        await asyncio.gather(pool.ready(), *([graders.ready()] if graders else []))

    sources = [pool, *([link] if link else []), *([graders] if graders else [])]
    return RunComponents(
        trainer=trainer,
        engine=pool,
        memory=memory,
        drafting=memory.drafting(shared, shared.saved_s) if memory and shared else None,
        counters=[pool.counters],
        extra_metrics=lambda: pool_metrics(pool),
        tokens_sampled=lambda: sum(pool.work.get(name, 0) for name in ("decoded", "prefilled")),
        span_sources=sources,
        loop_worker="controller" if link else "trainer",
        pools=pools(recipe.cluster),
        lines=[*lines(recipe.cluster)],
        status=lambda: [row | factory.where(row["worker"]) for source in sources for row in source.status()],
        ready=ready,
        end=pool.close,
        trainer_consistent=lambda: link is not None,  # it has the state after the last step
    )


def places(recipe: Recipe) -> list[Need]:
    """A place for each worker, the trainer's first: with pinning it has the first cores.

    A trainer without cores of its own learns while samplers work beside it. They give way, since all wait for
    a step and hardly ever for one pass of a sampler (docs/pipeline.md)."""
    section = recipe.cluster
    cpus = section.cpus_per_worker
    trainer = (
        [Need(name="trainer", cpus=cpus, gpus=section.gpus_per_trainer)] if section.remote_trainer else []
    )
    apart = (
        section.remote_trainer or section.address or section.gpus_per_sampler
    )  # no core is shared for sure
    nice = GIVE_WAY if recipe.pipeline.overlap and not apart else 0
    samplers = [
        Need(name=f"sampler-{i}", cpus=cpus, gpus=section.gpus_per_sampler, nice=nice)
        for i in range(section.samplers)
    ]
    return [*trainer, *samplers, *(Need(name=f"grader-{i}", cpus=cpus) for i in range(section.graders))]


def lines(section: ClusterSection) -> Iterator[str]:
    """Who works where, for a person."""
    threads = f"{section.cpus_per_worker} thread{'s' * (section.cpus_per_worker > 1)} each"
    where = f"the Ray at {section.address}" if section.address else "a Ray of its own on this machine"
    kinds = [(section.samplers, "sampler"), (section.graders, "grader"), (section.remote_trainer, "trainer")]
    who = ", ".join(f"{int(n)} {kind}{'s' * (n > 1)}" for n, kind in kinds if n)
    pinned = ", pinned to cores of their own" if section.pin else ""
    yield f"workers      {who} on {where}, {threads}{pinned}"
    here = [kind for n, kind in kinds[1:] if not n]
    if here:
        yield f"             this process: the loop and the {' and the '.join(here)}"


def pools(section: ClusterSection) -> dict[str, int]:
    """Devices by pool, for the ledger: GPUs where workers have some, otherwise the places of the workers."""
    if section.gpus_per_sampler or section.gpus_per_trainer:
        samplers = math.ceil(section.samplers * section.gpus_per_sampler)
        return {"samplers": max(1, samplers), "trainer": max(1, math.ceil(section.gpus_per_trainer))}
    graders = {"graders": section.graders} if section.graders else {}
    return {"samplers": section.samplers, "trainer": 1} | graders


def pool_metrics(pool: EnginePool) -> dict[str, float]:
    """For a row of metrics: which workers are there, and what was published since the last one."""
    published = pool.take_publications()
    sent = {
        "publish/count": float(len(published)),
        "publish/bytes": float(sum(one.bytes for one in published)),
        "publish/seconds": sum(one.seconds for one in published),
    }
    return pool.gauges() | sent


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFactory:
    """Workers by kind, on the places of ``cluster``."""

    cluster: Cluster
    recipe: Recipe
    folder: Path
    workers: str  # the module that makes samplers and trainers

    def _remote(self, worker: str, factory: str, **arguments: Any) -> RayRemote:
        arguments = {"recipe": dump_toml(self.recipe), **arguments}
        return self.cluster.remote(worker, factory, arguments, start_s=self.recipe.cluster.start_s)

    def where(self, worker: str) -> dict[str, Any]:
        """Process and host, while it has one."""
        place = self.cluster.place(worker)
        return {} if place is None else {"pid": place.pid, "host": place.host}

    def pool(self, memory: Memory | None, publication: Callable[[Any, int], Publication]) -> EnginePool:
        section, seen = self.recipe.cluster, Seen()

        async def spawn(index: int) -> Sampler:
            name = f"sampler-{index}"
            history = str((self.folder / "history.bin").absolute())
            remote = self._remote(name, f"{self.workers}:sampler", name=name, history=history)
            return await SamplerLink(remote, section.silence_s).built()

        return EnginePool(
            spawn,
            section.samplers,
            place=placement(self.recipe.pipeline.placement),
            expect=seen.expect if memory is None else memory.expect,
            on_answer=seen.observe,
            slots=AHEAD * self.recipe.engine.max_batch,
            silence_s=section.silence_s,
            start_s=section.start_s,
            publication=publication,
        )

    def trainer(self) -> TrainerLink:
        refused = str((self.folder / "refused").absolute())
        return TrainerLink(
            self._remote("trainer", f"{self.workers}:trainer", refused=refused),
            within_s=self.recipe.pipeline.watch_s,
        )

    def graders(self) -> GraderLink:
        reward, factory = self.recipe.reward, "ostinato.launch.graders:grader"
        names = [f"grader-{index}" for index in range(self.recipe.cluster.graders)]
        calls = 2 * len(reward.functions)  # each may hang once and die once
        workers = [self._remote(name, factory, name=name) for name in names]
        return GraderLink(workers, within_s=IMPORT_S + calls * reward.timeout_s)


# ---- drafts


class SharedHistory:
    """``pipeline.draft_metrics.Store``: adds to the history, and sends the same to the samplers."""

    def __init__(self, history: History, pool: EnginePool) -> None:
        self._history, self._pool = history, pool

    @property
    def num_tokens(self) -> int:
        return self._history.num_tokens

    @property
    def num_bytes(self) -> int:
        return self._history.num_bytes

    def saved_s(self) -> float:
        """Seconds that drafts have saved so far, on all samplers."""
        return self._pool.work.get("seconds_without", 0.0) - self._pool.work.get("seconds", 0.0)

    def add(self, uid: str, step: int, pasts: Sequence[HistoryEntry]) -> None:
        self._history.add(uid, step, pasts)
        self._pool.remember(uid, step, pasts)
