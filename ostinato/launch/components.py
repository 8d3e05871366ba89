"""Trainer, engine and grader of a run, opened for a context: in this process, by vLLM, or over a cluster."""

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
from ostinato.launch.device_memory import free_cached_memory, gpu_figures, lends_memory
from ostinato.launch.drafts import Memory
from ostinato.launch.engine import any_engine, vllm_engine
from ostinato.launch.inputs import RunInputs, environment, rollout_need
from ostinato.launch.loop import RunComponents
from ostinato.launch.models import divides_transformers
from ostinato.launch.ranks import open_trainer, sharded_trainer
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
    """Yield (inputs, components) of the recipe. ``folder``: of the run; ``workers``: the module that makes a
    cluster's workers; ``place``: where others run side by side with it."""
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
            yield inputs, stack.enter_context(_sample_by_vllm(inputs, trainer, folder))
            return
        engine = any_engine(recipe, decoder, inputs.renderer, memory, need=rollout_need(inputs))
        if isinstance(engine, LocalEngine) and lends_memory(recipe, decoder):
            trainer = LentTrainer(trainer, engine.lend_memory)
        drafting = None
        if memory is not None and isinstance(engine, LocalEngine):
            counters = engine.counters
            drafting = memory.drafting(memory.history, lambda: counters.seconds_without - counters.seconds)
        yield (
            inputs,
            RunComponents(
                trainer=trainer,
                engine=engine,
                memory=memory,
                drafting=drafting,
                extra_metrics=lambda: gpu_figures(decoder),
                tokens_sampled=lambda: engine.counters.decoded + engine.counters.prefilled,
                span_sources=(engine,),
            ),
        )


@contextlib.contextmanager
def _train_divided(inputs: RunInputs, folder: Path) -> Iterator[tuple[RunInputs, RunComponents]]:
    """Yield components over ranks that each train and sample with their part of a model of transformers, and
    inputs with this rank's part as the decoder."""
    with sharded_trainer(inputs, folder) as (trainer, local):
        assert isinstance(local, SamplingRank)
        engine = RanksEngine(local.sampler, trainer.call_all)
        model: Any = local.sampler.decoder
        yield (
            replace(inputs, decoder=model),
            RunComponents(
                trainer=trainer,
                engine=engine,
                extra_metrics=lambda: gpu_figures(model),
                tokens_sampled=lambda: engine.counters.decoded + engine.counters.prefilled,
                span_sources=(engine,),
            ),
        )


@contextlib.contextmanager
def _sample_by_vllm(inputs: RunInputs, trainer: RestorableTrainer, folder: Path) -> Iterator[RunComponents]:
    """Yield components without drafts, whose metrics have the verdicts on published policies."""
    recipe, renderer = inputs.recipe, inputs.renderer
    prompt = asyncio.run(start_env(environment(recipe, renderer, inputs.tools)(inputs.train_prompts[0])))
    with vllm_engine(
        recipe,
        inputs.decoder,
        renderer,
        model=inputs.folder,
        prompt=prompt,
        folder=folder / "vllm",
        need=rollout_need(inputs),
    ) as engine:
        yield RunComponents(
            trainer=LentTrainer(trainer, engine.lend_memory)
            if lends_memory(recipe, inputs.decoder)
            else trainer,
            engine=engine,
            extra_metrics=lambda: proof_row(engine.take_verdict()) | gpu_figures(inputs.decoder),
            tokens_sampled=lambda: engine.signs,
            span_sources=(engine,),
        )


class LentTrainer:
    """``trainer``, with each step in the context ``lent``, in which the sampler lends its GPU memory."""

    def __init__(
        self, trainer: RestorableTrainer, lent: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._trainer, self._lent = trainer, lent
        self.adapters, self.identity = trainer.adapters, trainer.identity
        self.tensors, self.counters, self.restore = trainer.tensors, trainer.counters, trainer.restore

    @property
    def progress(self) -> float:
        return self._trainer.progress

    def step(self, batch: Batch) -> StepReport:
        return self._borrow_memory(lambda: self._trainer.step(batch))

    def score(self, batch: Batch) -> Sequence[Any]:
        return self._borrow_memory(lambda: self._trainer.score(batch))

    def _borrow_memory(self, work: Callable[[], T]) -> T:
        """The result of ``work``, done in lent memory, which is then given back."""
        with self._lent():
            try:
                return work()
            finally:
                free_cached_memory()


def proof_row(verdict: Verdict | None) -> dict[str, float]:
    """Metrics of the verdict on a policy; empty in steps without one."""
    if verdict is None:
        return {}
    row = {"k3": verdict.k3, "k3_version": verdict.version, "k3_tokens": verdict.tokens}
    return {f"publish/{name}": float(value) for name, value in row.items()}
