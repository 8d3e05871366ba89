"""Trainer, engine and grader of a run, open in a context: in this process, by vLLM, or over a cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ostinato.engine.local import LocalEngine
from ostinato.engine.vllm_proof import Verdict
from ostinato.hf.ranks_sampler import RanksEngine
from ostinato.launch.device_memory import free_cached_memory, lends_memory, take_gpu_figures
from ostinato.launch.drafts import Memory
from ostinato.launch.engine import new_any_engine, open_vllm_engine
from ostinato.launch.inputs import RunInputs, compute_rollout_need, new_episode_factory
from ostinato.launch.loop import RunComponents
from ostinato.launch.models import divides_transformers
from ostinato.launch.ranks import open_sharded_trainer, open_trainer
from ostinato.launch.trainer import SamplingRank
from ostinato.protocols import RestorableTrainer
from ostinato.rollout.rollout import start_env
from ostinato.types import Batch, StepReport

if TYPE_CHECKING:
    from ostinato.launch.shared_base import SharedPlace

T = TypeVar("T")


@contextlib.contextmanager
def open_components(
    inputs: RunInputs, folder: Path, memory: Memory | None, workers: str, place: SharedPlace | None = None
) -> Iterator[tuple[RunInputs, RunComponents]]:
    """Yield (inputs, components) of the recipe; the components end with the context. A cluster's graders
    replace the inputs' own. ``folder``: of the run; ``workers``: the module that makes a cluster's workers;
    ``place``: where other runs go side by side with it.

    Raises ValueError and RunFailed as ``open_trainer``, ``open_vllm_engine`` and ``cluster.open_cluster``."""
    if place is not None:
        with place.open_components(inputs, folder) as components:
            yield inputs, components
        return
    if inputs.recipe.cluster.samplers:
        from ostinato.launch.cluster import open_cluster

        with open_cluster(inputs, folder, memory, workers) as opened:
            yield opened
        return
    if divides_transformers(inputs.recipe):
        with _train_divided(inputs, folder) as opened:
            yield opened
        return
    recipe, decoder = inputs.recipe, inputs.decoder
    with contextlib.ExitStack() as stack:
        trainer = stack.enter_context(open_trainer(inputs, folder))
        if recipe.engine.backend == "vllm":
            yield inputs, stack.enter_context(_open_vllm_components(inputs, trainer, folder))
            return
        engine = new_any_engine(recipe, decoder, inputs.renderer, memory, need=compute_rollout_need(inputs))
        if isinstance(engine, LocalEngine) and lends_memory(recipe, decoder):
            trainer = LentTrainer(trainer, engine.lend_memory)
        drafting = None
        if memory is not None and isinstance(engine, LocalEngine):
            counters = engine.counters
            drafting = memory.new_drafting(
                memory.history, lambda: counters.seconds_without - counters.seconds
            )
        yield (
            inputs,
            RunComponents(
                trainer=trainer,
                engine=engine,
                memory=memory,
                drafting=drafting,
                extra_metrics=lambda: take_gpu_figures(decoder),
                tokens_sampled=lambda: engine.counters.decoded + engine.counters.prefilled,
                span_sources=(engine,),
            ),
        )


@contextlib.contextmanager
def _train_divided(inputs: RunInputs, folder: Path) -> Iterator[tuple[RunInputs, RunComponents]]:
    """Yield components over ranks that each train and sample with their part of a model of transformers, and
    inputs with this rank's part as the decoder."""
    with open_sharded_trainer(inputs, folder) as (trainer, local):
        assert isinstance(local, SamplingRank)
        engine = RanksEngine(local.sampler, trainer.call_all)
        model: Any = local.sampler.decoder
        yield (
            replace(inputs, decoder=model),
            RunComponents(
                trainer=trainer,
                engine=engine,
                extra_metrics=lambda: take_gpu_figures(model),
                tokens_sampled=lambda: engine.counters.decoded + engine.counters.prefilled,
                span_sources=(engine,),
            ),
        )


@contextlib.contextmanager
def _open_vllm_components(
    inputs: RunInputs, trainer: RestorableTrainer, folder: Path
) -> Iterator[RunComponents]:
    """Start or join the vLLM server and yield components with it: without drafts, and with metrics of the
    verdicts on published policies."""
    recipe, renderer = inputs.recipe, inputs.renderer
    prompt = asyncio.run(
        start_env(new_episode_factory(recipe, renderer, inputs.tools)(inputs.train_prompts[0]))
    )
    with open_vllm_engine(
        recipe,
        inputs.decoder,
        renderer,
        model=inputs.folder,
        prompt=prompt,
        folder=folder / "vllm",
        need=compute_rollout_need(inputs),
    ) as engine:
        yield RunComponents(
            trainer=LentTrainer(trainer, engine.lend_memory)
            if lends_memory(recipe, inputs.decoder)
            else trainer,
            engine=engine,
            extra_metrics=lambda: make_proof_row(engine.take_verdict()) | take_gpu_figures(inputs.decoder),
            tokens_sampled=lambda: engine.signs,
            span_sources=(engine,),
        )


class LentTrainer:
    """A trainer whose steps and scores run in the context ``lend_memory``, in which the sampler frees its GPU
    memory. The memory that torch caches is then released, so that the sampler gets its own back."""

    def __init__(
        self, trainer: RestorableTrainer, lend_memory: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._trainer, self._lend_memory = trainer, lend_memory
        self.adapters, self.identity = trainer.adapters, trainer.identity
        self.tensors, self.counters, self.restore = trainer.tensors, trainer.counters, trainer.restore

    @property
    def progress(self) -> float:
        return self._trainer.progress

    def step(self, batch: Batch) -> StepReport:
        return self._run_with_memory(lambda: self._trainer.step(batch))

    def score(self, batch: Batch) -> Sequence[Any]:
        return self._run_with_memory(lambda: self._trainer.score(batch))

    def _run_with_memory(self, work: Callable[[], T]) -> T:
        with self._lend_memory():
            try:
                return work()
            finally:
                free_cached_memory()


def make_proof_row(verdict: Verdict | None) -> dict[str, float]:
    """Return metrics of the verdict on a policy; empty for None, a step without one."""
    if verdict is None:
        return {}
    row = {"k3": verdict.k3, "k3_version": verdict.version, "k3_tokens": verdict.tokens}
    return {f"publish/{name}": float(value) for name, value in row.items()}
