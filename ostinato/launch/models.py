"""The recipe, base model and checkpoint of a run, a recipe or a model that a user names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.config import AdapterSection, ModelSection, Recipe, find_recipe
from ostinato.launch import RunFailed
from ostinato.launch.machine import choose_backend, device_of
from ostinato.model.config import read_config
from ostinato.model.named import is_model_name

if TYPE_CHECKING:
    from ostinato.model.base import Facts
    from ostinato.model.shapes import AdapterSpec
    from ostinato.model.share import Share
    from ostinato.protocols import RestorableTrainer
    from ostinato.run import RunFolder
    from ostinato.train.checkpoint import Checkpoint


def load_decoder(
    section: ModelSection, folder: Path, *, shared: bool = False, share: Share | None = None
) -> Any:
    """The model in ``folder`` as the recipe has it: dtype, device, precision of the head; frozen.

    ``shared``: over the one copy of the whole that all processes of a host map, where the device is the CPU.
    ``share``: only this part of it. Of ``model.backend`` "transformers" it is a ``TransformersModel``.
    """
    import torch

    from ostinato.model.hf import load_model

    assert section.dtype != "auto", "launch.machine.resolve_auto comes before the model is loaded"
    device, dtype = device_of(section), getattr(torch, section.dtype)
    storage = None if section.storage == "same" else getattr(torch, section.storage)
    if section.storage == "int8" and device != "cpu":
        raise ValueError(
            f'model.storage is "int8", which is for a CPU, and model.device is {device}; use "same"'
        )
    if section.backend == "transformers":
        from ostinato.hf.model import load_transformers

        return load_transformers(folder, dtype=dtype, device=device)
    if shared and device == "cpu":
        assert share is None
        from ostinato.model.shared import shared_model  # Linux only

        return shared_model(folder, dtype, storage=storage, fp32_head=section.fp32_head)
    return load_model(
        folder, dtype=dtype, device=device, storage=storage, fp32_head=section.fp32_head, share=share
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Unloaded:
    """In the place of a model of which every rank will load its part."""

    config: Facts


def divides_transformers(recipe: Recipe) -> bool:
    """Whether the ranks of a run each have a part of a model of transformers, and no process the whole."""
    return recipe.model.backend == "transformers" and recipe.parallel.sharded


def facts_of(section: ModelSection, folder: Path) -> Facts:
    """Sizes of the model in ``folder`` by its config.json alone. Raises ValueError for what its backend has
    not."""
    name = choose_backend(folder)[0] if section.backend == "auto" else section.backend
    if name == "native":
        config = read_config(folder)
        return config if device_of(section) == "cpu" else config.within_window
    from ostinato.hf.facts import ModelFacts

    return ModelFacts.read(folder)


def adapter_spec(section: AdapterSection) -> AdapterSpec:
    """The LoRA of a recipe."""
    from ostinato.model.shapes import AdapterSpec, ExpertScheme

    return AdapterSpec(
        rank=section.rank,
        alpha=section.alpha,
        targets=section.targets,
        expert_scheme=ExpertScheme(section.expert_scheme),
        expert_rank=section.expert_rank or None,
    )


def recipe_of(target: str, *overrides: str) -> tuple[Recipe, RunFolder | None]:
    """(recipe, run or None) of ``target``: a run folder, a recipe, or a model (a recipe with its path)."""
    from ostinato.run import RunFolder

    path = Path(target).expanduser()
    if (path / "recipe.toml").is_file():
        run = RunFolder.open(path)
        return Recipe.load(run.recipe, *overrides), run
    if is_model_name(target):
        recipe = Recipe.load("quickstart")
        model_overrides = [f"model.path={target}"]
        if target != recipe.model.path:  # its other keys of [model] are chosen for its own model
            model_overrides.append(f"model.fp32_head={str(ModelSection().fp32_head).lower()}")
        return Recipe.load("quickstart", *model_overrides, *overrides), None
    try:
        return Recipe.load(find_recipe(target), *overrides), None
    except ValueError as error:
        if "does not exist" not in str(error):
            raise
        raise ValueError(
            f"{target!r} is no run folder, recipe or model; give one, e.g. quickstart or asset:seed-moe"
        ) from error


def newest_checkpoint(run: RunFolder, trainer: RestorableTrainer) -> Checkpoint | None:
    """The newest whole checkpoint of ``run``, None without any; damaged ones are skipped.

    Raises ValueError for one of another base, and RunFailed when all are damaged.
    """
    from ostinato.train.checkpoint import CheckpointError, load_checkpoint

    try:
        return load_checkpoint(run.checkpoints, identity=trainer.identity())
    except CheckpointError as error:
        raise RunFailed(str(error)) from error
