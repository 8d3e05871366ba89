"""Factories of a cluster's workers, from a recipe's text and plain names.

They run in the worker's own process, on any host; ``workers.host`` calls them by name. The recipe is text in
TOML. On a CPU the base is the one copy that all workers of a host share.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from ostinato.config import Recipe
from ostinato.engine.serve import SamplerServer
from ostinato.launch.device_memory import compute_step_need
from ostinato.launch.drafts import Memory, new_memory
from ostinato.launch.engine import new_engine, shares_base
from ostinato.launch.inputs import find_longest_answer
from ostinato.launch.models import load_decoder
from ostinato.launch.trainer import make_refused_saver, new_adapters, new_teacher, new_trainer
from ostinato.model.named import find_model_folder
from ostinato.model.shared import sweep_copies
from ostinato.model.wire import unpack_adapters
from ostinato.render import Renderer
from ostinato.train.remote import TrainerServer
from ostinato.types import HistoryEntry


def sampler(recipe: str, name: str, history: str = "") -> SamplerServer:
    """Make the local engine behind ``protocols.Sampler``, named ``name`` in the timeline. Its drafts begin
    with the run's history in the file ``history``, if that is there. Copies of the base that no process holds
    are deleted first."""
    parsed, folder = _read_recipe(recipe)
    decoder = load_decoder(parsed.model, folder, shared=shares_base(parsed))
    history_path = Path(history) if history and Path(history).exists() else None
    memory = new_memory(parsed.draft, history_path)
    renderer = Renderer(folder)
    need = compute_step_need(parsed, find_longest_answer(parsed.rollout, renderer)[0])
    engine = new_engine(parsed, decoder, renderer, memory, need=need, name=name)
    remember = None if memory is None else HistoryRecorder(memory)
    return SamplerServer(
        engine, name, lambda payload: unpack_adapters(payload, decoder.config), remember=remember
    )


def trainer(recipe: str, refused: str) -> TrainerServer:
    """Make the policy trainer, with its teacher. It writes microbatches of steps that it refuses into the
    folder ``refused``. Copies of the base that no process holds are deleted first."""
    parsed, folder = _read_recipe(recipe)
    decoder = load_decoder(parsed.model, folder, shared=shares_base(parsed))
    adapters = new_adapters(parsed, decoder)
    on_refused, teacher = make_refused_saver(Path(refused)), new_teacher(parsed, decoder)
    return TrainerServer(new_trainer(parsed, decoder, adapters, on_refused, teacher))


class HistoryRecorder:
    """Adds answers of other samplers to the history, from which the prompt's next epoch is drafted."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __call__(self, uid: str, step: int, answers: Sequence[HistoryEntry]) -> None:
        self._memory.history.add(uid, step, answers)
        # The drafter's text of answers that have ended is in the history by now.
        self._memory.drafter.forget()


def _read_recipe(recipe: str) -> tuple[Recipe, Path]:
    """Parse the recipe and find its model; returns (recipe, folder of the model on this host). Copies of
    models that no process holds are deleted."""
    sweep_copies()  # a killed run may have left some on this host
    parsed = Recipe.parse(tomllib.loads(recipe))
    return parsed, find_model_folder(parsed.model.path)
