"""The workers of a cluster as actors of Ray: samplers, and optionally graders and the trainer.

    recipe -> Cluster (places) -> links -> EnginePool, GraderLink, TrainerLink -> RunComponents

This process keeps the loop, the ledger, the history, and a decoder on the base that the workers of its host
share, with which it counts FLOPs and exports.
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
from ostinato.engine.pool import EnginePool, publish_adapters
from ostinato.engine.serve import SamplerLink
from ostinato.history.store import History
from ostinato.launch import RunFailed
from ostinato.launch.drafts import Memory, SeenLengths
from ostinato.launch.engine import choose_kernels
from ostinato.launch.inputs import RunInputs
from ostinato.launch.loop import RunComponents
from ostinato.launch.ranks import open_trainer
from ostinato.model.decoder import Decoder
from ostinato.model.shared import create_own_folder, sweep_copies
from ostinato.model.wire import fingerprint_weights, pack_weights
from ostinato.protocols import RestorableTrainer, Sampler
from ostinato.reward.remote import GraderLink
from ostinato.rollout.schedule import find_placement
from ostinato.train.remote import TrainerLink
from ostinato.types import HistoryEntry, Publication
from ostinato.workers.ray_cluster import Cluster, Need, RayRemote
from ostinato.workers.remote import WorkerFault, WorkerLost

CALLS_PER_PLACE = 2  # in a sampler's batch, so that no place waits for a message
SAMPLER_NICE = 5  # of a shared core, the trainer gets 3/4 and such a sampler 1/4
NUM_WEIGHT_FILES = 3  # the newest published files of all weights, which are not deleted
IMPORT_S = 60.0  # longest time in which a grader's child imports the reward functions


@contextlib.contextmanager
def open_cluster(
    inputs: RunInputs, folder: Path, memory: Memory | None, workers: str
) -> Iterator[tuple[RunInputs, RunComponents]]:
    """Start or join Ray and open the recipe's workers, which functions of the module ``workers`` make; all
    end with the context. Yields the inputs and the components. With remote graders the inputs' own grader is
    closed, and the yielded inputs have the remote one. Shared models of ended processes are deleted before
    and after.

    Raises ValueError if no Ray answers or the workers do not fit, and RunFailed if the trainer's worker
    cannot be started.
    """
    recipe, section = inputs.recipe, inputs.recipe.cluster
    choose_kernels(recipe.engine, inputs.decoder)  # compiled once, here, and not by every worker at once
    sweep_copies()  # copies of the base that a killed run left behind
    with contextlib.ExitStack() as stack:
        opened = Cluster.open(
            section.address,
            list_needs(recipe),
            start_s=section.start_s,
            silence_s=section.silence_s,
            last_words="ostinato: the run was killed, or Ray ended it as its daemon on this host was lost; "
            f"what was saved is in {folder}, to go on: ostinato resume {folder}",
        )
        factory = WorkerFactory(
            cluster=stack.enter_context(opened), recipe=recipe, folder=folder, workers=workers
        )
        if section.remote_trainer:
            try:
                trainer = link = factory.new_trainer()
            except (WorkerLost, WorkerFault) as error:
                raise RunFailed(f"the trainer's worker could not be started: {error}") from error
            stack.callback(link.close)
        else:
            trainer, link = stack.enter_context(open_trainer(inputs, folder)), None
        publication = publish_adapters
        if recipe.adapter.kind == "full":
            publication = stack.enter_context(open_weight_publisher(inputs.decoder))
        graders = factory.new_graders() if section.graders else None
        if graders is not None:
            stack.callback(graders.close)
            inputs.grader.close()
            inputs = replace(inputs, grader=graders)
        pool = factory.new_pool(memory, publication)
        yield inputs, _new_components(factory, pool, trainer, link, graders, memory)
    sweep_copies()


@contextlib.contextmanager
def open_weight_publisher(decoder: Decoder) -> Iterator[Callable[[Any, int], Publication]]:
    """Yield a function that publishes all weights of ``decoder`` as a file on this host, in memory if
    possible. It deletes all but the newest NUM_WEIGHT_FILES, which stay for samplers that load slowly or
    restart."""
    with create_own_folder() as folder:
        paths: deque[Path] = deque()

        def publication(adapters: Any, version: int) -> Publication:
            path = folder / f"weights-{version}.safetensors"
            pack_weights(decoder, path)
            paths.append(path)
            if len(paths) > NUM_WEIGHT_FILES:
                paths.popleft().unlink()
            return Publication(version=version, fingerprint=fingerprint_weights(decoder), path=str(path))

        yield publication


def _new_components(
    factory: WorkerFactory,
    pool: EnginePool,
    trainer: RestorableTrainer,
    link: TrainerLink | None,  # the trainer itself where it is a worker
    graders: GraderLink | None,
    memory: Memory | None,
) -> RunComponents:
    """The components of a run with these workers."""
    recipe, shared = factory.recipe, SharedHistory(memory.history, pool) if memory else None

    async def wait_until_ready() -> None:  # all workers begin at the same time
        await asyncio.gather(pool.ready(), *([graders.ready()] if graders else []))

    sources = [pool, *([link] if link else []), *([graders] if graders else [])]
    return RunComponents(
        trainer=trainer,
        engine=pool,
        memory=memory,
        drafting=memory.new_drafting(shared, shared.measure_saved_s) if memory and shared else None,
        counters=[pool.counters],
        extra_metrics=lambda: take_pool_metrics(pool),
        tokens_sampled=lambda: sum(pool.work.get(name, 0) for name in ("decoded", "prefilled")),
        span_sources=sources,
        loop_worker="controller" if link else "trainer",
        pools=count_devices(recipe.cluster),
        lines=[*describe_workers(recipe.cluster)],
        status=lambda: [row | factory.locate(row["worker"]) for source in sources for row in source.status()],
        ready=wait_until_ready,
        end=pool.close,
        # After a step that failed, the link still has the tensors and counters of the last one.
        trainer_consistent=lambda: link is not None,
    )


def list_needs(recipe: Recipe) -> list[Need]:
    """List what the place of each worker needs, the trainer's first.

    Samplers that may share cores with the trainer have a lower priority, as all wait for a step and rarely
    for one pass of a sampler (docs/pipeline.md)."""
    section = recipe.cluster
    cpus = section.cpus_per_worker
    trainer = (
        [Need(name="trainer", cpus=cpus, gpus=section.gpus_per_trainer)] if section.remote_trainer else []
    )
    has_own_cores = section.remote_trainer or section.address or section.gpus_per_sampler
    nice = SAMPLER_NICE if recipe.pipeline.overlap and not has_own_cores else 0
    samplers = [
        Need(name=f"sampler-{i}", cpus=cpus, gpus=section.gpus_per_sampler, nice=nice)
        for i in range(section.samplers)
    ]
    return [*trainer, *samplers, *(Need(name=f"grader-{i}", cpus=cpus) for i in range(section.graders))]


def describe_workers(section: ClusterSection) -> Iterator[str]:
    """Yield lines that say which workers run where."""
    threads = f"{section.cpus_per_worker} thread{'s' * (section.cpus_per_worker > 1)} each"
    location = f"the Ray at {section.address}" if section.address else "a Ray of its own on this machine"
    kinds = [(section.samplers, "sampler"), (section.graders, "grader"), (section.remote_trainer, "trainer")]
    workers = ", ".join(f"{int(count)} {kind}{'s' * (count > 1)}" for count, kind in kinds if count)
    yield f"workers      {workers} on {location}, {threads}"
    local = [kind for count, kind in kinds[1:] if not count]
    if local:
        yield f"             this process: the loop and the {' and the '.join(local)}"


def count_devices(section: ClusterSection) -> dict[str, int]:
    """Count devices by pool for the ledger: at least one GPU of samplers and trainer if workers have some
    (graders have none), else one device for each worker, with one for a trainer in this process."""
    if section.gpus_per_sampler or section.gpus_per_trainer:
        samplers = math.ceil(section.samplers * section.gpus_per_sampler)
        return {"samplers": max(1, samplers), "trainer": max(1, math.ceil(section.gpus_per_trainer))}
    graders = {"graders": section.graders} if section.graders else {}
    return {"samplers": section.samplers, "trainer": 1} | graders


def take_pool_metrics(pool: EnginePool) -> dict[str, float]:
    """Return metrics of the pool's workers, and of its publications since the last call, which are removed
    from it."""
    publications = pool.take_publications()
    metrics = {
        "publish/count": float(len(publications)),
        "publish/bytes": float(sum(publication.bytes for publication in publications)),
        "publish/seconds": sum(publication.seconds for publication in publications),
    }
    return pool.gauges() | metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFactory:
    """Makes links to workers on the places of ``cluster``; the workers start with the links' first calls."""

    cluster: Cluster
    recipe: Recipe
    folder: Path
    workers: str  # the module that makes samplers and trainers

    def _new_remote(self, worker: str, factory: str, **arguments: Any) -> RayRemote:
        arguments = {"recipe": dump_toml(self.recipe), **arguments}
        return self.cluster.remote(worker, factory, arguments, start_s=self.recipe.cluster.start_s)

    def locate(self, worker: str) -> dict[str, Any]:
        """Return {"pid", "host"} of a worker; empty while it has no process."""
        place = self.cluster.place(worker)
        return {} if place is None else {"pid": place.pid, "host": place.host}

    def new_pool(self, memory: Memory | None, publication: Callable[[Any, int], Publication]) -> EnginePool:
        section, seen_lengths = self.recipe.cluster, SeenLengths()

        async def spawn(index: int) -> Sampler:
            name = f"sampler-{index}"
            history = str((self.folder / "history.bin").absolute())
            remote = self._new_remote(name, f"{self.workers}:sampler", name=name, history=history)
            return await SamplerLink(remote, section.silence_s).wait_until_built()

        return EnginePool(
            spawn,
            section.samplers,
            place=find_placement(self.recipe.pipeline.placement),
            expect=seen_lengths.expect if memory is None else memory.expect,
            on_answer=seen_lengths.observe,
            slots=CALLS_PER_PLACE * self.recipe.engine.max_batch,
            silence_s=section.silence_s,
            start_s=section.start_s,
            publication=publication,
        )

    def new_trainer(self) -> TrainerLink:
        refused = str((self.folder / "refused").absolute())
        return TrainerLink(
            self._new_remote("trainer", f"{self.workers}:trainer", refused=refused),
            within_s=self.recipe.pipeline.watch_s,
        )

    def new_graders(self) -> GraderLink:
        reward, factory = self.recipe.reward, "ostinato.launch.graders:grader"
        names = [f"grader-{index}" for index in range(self.recipe.cluster.graders)]
        calls = 2 * len(reward.functions)  # each may hang once and die once
        workers = [self._new_remote(name, factory, name=name) for name in names]
        return GraderLink(workers, within_s=IMPORT_S + calls * reward.timeout_s)


# ---- drafts


class SharedHistory:
    """A ``pipeline.draft_metrics.Store`` that adds answers to the history and sends them to the samplers."""

    def __init__(self, history: History, pool: EnginePool) -> None:
        self._history, self._pool = history, pool

    @property
    def num_tokens(self) -> int:
        return self._history.num_tokens

    @property
    def num_bytes(self) -> int:
        return self._history.num_bytes

    def measure_saved_s(self) -> float:
        """Measure the seconds that drafts have saved so far, on all samplers."""
        return self._pool.work.get("seconds_without", 0.0) - self._pool.work.get("seconds", 0.0)

    def add(self, uid: str, step: int, pasts: Sequence[HistoryEntry]) -> None:
        self._history.add(uid, step, pasts)
        self._pool.remember(uid, step, pasts)
