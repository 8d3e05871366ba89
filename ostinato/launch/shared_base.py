"""The base and the engine that runs side by side share, and the place of each run there."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ostinato.config import Recipe
from ostinato.engine.engine_thread import EngineThread
from ostinato.engine.local import LocalEngine
from ostinato.engine.threads import Threads
from ostinato.engine.view import PolicyView
from ostinato.launch.device_memory import choose_kv_memory_mb, compute_step_need
from ostinato.launch.engine import new_engine
from ostinato.launch.inputs import RunInputs, find_longest_answer
from ostinato.launch.loop import RunComponents
from ostinato.launch.machine import choose_device
from ostinato.launch.models import load_decoder
from ostinato.launch.ranks import open_trainer
from ostinato.model.decoder import Decoder
from ostinato.model.lora import Adapters
from ostinato.model.named import find_model_folder
from ostinato.pipeline.signals import SignalRelay
from ostinato.protocols import RestorableTrainer
from ostinato.render import Renderer
from ostinato.types import Batch, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBase:
    """What runs side by side share. ``start``: at which each waits until all are ready."""

    decoder: Decoder
    thread: EngineThread[LocalEngine]
    threads: Threads
    relay: SignalRelay
    start: threading.Barrier


@contextlib.contextmanager
def open_base(recipes: Sequence[Recipe], threads: Threads, relay: SignalRelay) -> Iterator[SharedBase]:
    """Yield the base of ``recipes``, which share [model] and [engine], with an engine that has the slots and
    the KV cache of all. Raises ValueError for a model on a GPU, where a row depends on its batch."""
    first = recipes[0]
    if (device := choose_device(first.model)) != "cpu":
        raise ValueError(f'runs side by side are for a CPU, and model.device is {device}; use "cpu"')
    folder = find_model_folder(first.model.path)
    renderer = Renderer(folder)
    decoders: list[Decoder] = []

    def make() -> LocalEngine:
        decoder = load_decoder(first.model, folder)
        decoders.append(decoder)
        return new_engine(_join_engines(recipes, decoder, renderer), decoder, renderer)

    thread = EngineThread(make)
    start = threading.Barrier(len(recipes))
    try:
        yield SharedBase(decoder=decoders[0], thread=thread, threads=threads, relay=relay, start=start)
    finally:
        with contextlib.suppress(TimeoutError):  # after a second Ctrl-C it may be within a step
            thread.close()


def _join_engines(recipes: Sequence[Recipe], decoder: Decoder, renderer: Renderer) -> Recipe:
    """The first recipe with the slots of all and, unless the recipes set it, a KV cache for the steps of
    all, as far as there is memory."""
    engine = recipes[0].engine
    slots = engine.model_copy(update={"max_batch": engine.max_batch * len(recipes)})
    joined = recipes[0].model_copy(update={"engine": slots})
    needs = [
        compute_step_need(recipe, find_longest_answer(recipe.rollout, renderer)[0]) for recipe in recipes
    ]
    need = replace(
        needs[0],
        prompts=sum(other.prompts for other in needs),
        group=max(other.group for other in needs),
        answer_tokens=max(other.answer_tokens for other in needs),
    )
    cache = slots.model_copy(update={"kv_memory_mb": choose_kv_memory_mb(joined, decoder, need)})
    return joined.model_copy(update={"engine": cache})


class SharedPlace:
    """The place of one run on a shared base, where its policy has the name ``policy`` and this ``share`` of
    the engine's slots."""

    def __init__(self, base: SharedBase, policy: str, share: float) -> None:
        self.has_begun = False
        self._base, self._policy, self._share = base, policy, share

    @property
    def decoder(self) -> Decoder:
        return self._base.decoder

    @property
    def threads(self) -> Threads:
        return self._base.threads

    def wait_for_all(self) -> None:
        """Wait until all runs are ready. Raises BrokenBarrierError if one of them cannot begin."""
        self._base.start.wait()
        self.has_begun = True

    @contextlib.contextmanager
    def open_components(self, inputs: RunInputs, folder: Path) -> Iterator[RunComponents]:
        """Yield the run's components: a view of the engine, and a trainer in the engine's thread. Without
        drafts, which change no token."""
        thread = self._base.thread
        with contextlib.ExitStack() as stack:
            trainer = thread.run(
                lambda engine: stack.enter_context(open_trainer(inputs, folder, engine.driver.advance))
            )
            view = stack.enter_context(contextlib.closing(PolicyView(thread, self._policy, self._share)))
            yield RunComponents(
                trainer=TrainerInThread(trainer, thread),
                engine=view,
                tokens_sampled=lambda: view.progress,
                relay=self._base.relay,
            )


class TrainerInThread:
    """``trainer``, whose tensors are worked on in the engine's thread, between two passes: a second team of
    OpenMP threads would halve the speed of both."""

    def __init__(self, trainer: RestorableTrainer, thread: EngineThread[LocalEngine]) -> None:
        self._trainer, self._thread = trainer, thread
        self.counters, self.identity = trainer.counters, trainer.identity

    @property
    def progress(self) -> float:
        return self._trainer.progress

    def step(self, batch: Batch) -> StepReport:
        return self._thread.run(lambda _: self._trainer.step(batch))

    def score(self, batch: Batch) -> Sequence[Any]:
        return self._thread.run(lambda _: self._trainer.score(batch))

    def adapters(self) -> Adapters | None:
        return self._thread.run(lambda _: self._trainer.adapters())

    def tensors(self) -> Mapping[str, Any]:
        return self._thread.run(lambda _: self._trainer.tensors())

    def restore(self, tensors: Mapping[str, Any], counters: Mapping[str, int]) -> None:
        self._thread.run(lambda _: self._trainer.restore(tensors, counters))
