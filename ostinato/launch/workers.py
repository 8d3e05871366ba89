"""Factories of a cluster's workers, from a recipe's text and plain names.

They run in the worker's own process, on any host; ``workers.host`` calls them by name. The recipe comes as
TOML, and the base is the one copy on the worker's host.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

from ostinato.config import Recipe
from ostinato.engine.serve import SamplerServer
from ostinato.launch.device_memory import step_need
from ostinato.launch.drafts import Memory, new_memory
from ostinato.launch.engine import new_engine, shares
from ostinato.launch.inputs import longest_answer
from ostinato.launch.models import load_decoder
from ostinato.launch.trainer import new_adapters, new_teacher, new_trainer, save_refused
from ostinato.model.named import model_folder
from ostinato.model.shared import sweep
from ostinato.model.wire import unpack
from ostinato.render import Renderer
from ostinato.train.remote import TrainerServer
from ostinato.types import HistoryEntry


def sampler(recipe: str, name: str, history: str = "") -> SamplerServer:
    """The local engine behind ``protocols.Sampler``; drafts begin with the ``history`` of the run, if any."""
    parsed, folder = _read(recipe)
    decoder = load_decoder(parsed.model, folder, shared=shares(parsed))
    saved = Path(history) if history and Path(history).exists() else None
    memory = new_memory(parsed.draft, saved)
    renderer = Renderer(folder)
    need = step_need(parsed, longest_answer(parsed.rollout, renderer)[0])
    engine = new_engine(parsed, decoder, renderer, memory, need=need, name=name)
    remember = None if memory is None else Remembering(memory)
    return SamplerServer(engine, name, lambda payload: unpack(payload, decoder.config), remember=remember)


def trainer(recipe: str, refused: str) -> TrainerServer:
    """The policy trainer; batches that it refuses are kept in the folder ``refused``."""
    parsed, folder = _read(recipe)
    decoder = load_decoder(parsed.model, folder, shared=shares(parsed))
    adapters = new_adapters(parsed, decoder)
    keep, teacher = save_refused(Path(refused)), new_teacher(parsed, decoder)
    return TrainerServer(new_trainer(parsed, decoder, adapters, keep, teacher))


class Remembering:
    """Adds answers of other samplers to the history: drafts for the prompt's next epoch."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __call__(self, uid: str, step: int, answers: Sequence[HistoryEntry]) -> None:
        self._memory.history.add(uid, step, answers)
        self._memory.drafter.forget()  # live text of ended answers, which is in the history by now


def _read(recipe: str) -> tuple[Recipe, Path]:
    """(recipe of its TOML, folder of its model on this host)."""
    sweep()  # copies that a killed run left on this host
    parsed = Recipe.parse(tomllib.loads(recipe))
    return parsed, model_folder(parsed.model.path)
