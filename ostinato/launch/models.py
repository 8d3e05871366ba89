"""Loading of what a user names: the recipe, base model and checkpoint of a run, a recipe or a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostinato.config import AdapterSection, ModelSection, Recipe, find_recipe
from ostinato.launch import RunFailed
from ostinato.launch.machine import choose_backend, choose_device
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
    """Load the model in ``folder``, frozen, with the recipe's dtype, storage, device and precision of the
    head: a ``TransformersModel`` for model.backend "transformers" (``shared`` and ``share`` do nothing), else
    a ``Decoder``.

    ``shared``: on a CPU, map the one copy of a host instead, which the first process makes. ``share``: load
    only this part. Raises ValueError for a missing device, for int8 storage on a GPU, and for a folder that
    cannot be read.
    """
    import torch

    from ostinato.model.hf import load_model

    assert section.dtype != "auto", "launch.machine.resolve_auto comes before the model is loaded"
    device, dtype = choose_device(section), getattr(torch, section.dtype)
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
        from ostinato.model.shared import load_shared_model  # Linux only

        return load_shared_model(folder, dtype, storage=storage, fp32_head=section.fp32_head)
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


def read_facts(section: ModelSection, folder: Path) -> Facts:
    """Read the sizes of the model in ``folder`` from its config.json; on a GPU the context of a native model
    is at most its window. Raises ValueError for a model that no backend here has, and for a missing
    device."""
    name = choose_backend(folder)[0] if section.backend == "auto" else section.backend
    if name == "native":
        config = read_config(folder)
        return config if choose_device(section) == "cpu" else config.windowless_config
    from ostinato.hf.facts import ModelFacts

    return ModelFacts.read(folder)


def make_adapter_spec(section: AdapterSection) -> AdapterSpec:
    """Make the specification of a recipe's LoRA."""
    from ostinato.model.shapes import AdapterSpec, ExpertScheme

    return AdapterSpec(
        rank=section.rank,
        alpha=section.alpha,
        targets=section.targets,
        expert_scheme=ExpertScheme(section.expert_scheme),
        expert_rank=section.expert_rank or None,
    )


def load_recipe(target: str, *overrides: str) -> tuple[Recipe, RunFolder | None]:
    """Load the recipe of ``target``: a run folder, a recipe, or a model, for which it is the recipe
    quickstart with its path. Returns (recipe, run folder or None). Raises ValueError for anything else, and
    for keys."""
    from ostinato.run import RunFolder

    path = Path(target).expanduser()
    if (path / "recipe.toml").is_file():
        run = RunFolder.open(path)
        return Recipe.load(run.recipe, *overrides), run
    if is_model_name(target):
        recipe = Recipe.load("quickstart")
        model_overrides = [f"model.path={target}"]
        if target != recipe.model.path:  # quickstart chooses model.fp32_head for its own model
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


def load_newest_checkpoint(run: RunFolder, trainer: RestorableTrainer) -> Checkpoint | None:
    """Load the newest whole checkpoint of ``run``; None if there is none. Damaged ones are skipped, with a
    warning.

    Raises ValueError for a checkpoint of another base, and RunFailed if all are damaged.
    """
    from ostinato.train.checkpoint import CheckpointError, load_checkpoint

    try:
        return load_checkpoint(run.checkpoints, identity=trainer.identity())
    except CheckpointError as error:
        raise RunFailed(str(error)) from error
