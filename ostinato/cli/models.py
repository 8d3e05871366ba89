"""From what a user names, a run, a recipe or a model, to a policy that can be sampled from."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ostinato.cli.failure import RunFailed
from ostinato.config import AdapterSection, ModelSection, Recipe, find_recipe
from ostinato.model.named import is_model_name, model_folder

if TYPE_CHECKING:
    from ostinato.model.decoder import Decoder
    from ostinato.model.lora import Adapters, AdapterSpec
    from ostinato.render import Renderer
    from ostinato.run import RunFolder
    from ostinato.train.checkpoint import Checkpoint
    from ostinato.train.trainer import PolicyTrainer


def load_decoder(section: ModelSection, folder: Path) -> Decoder:
    """The model in ``folder`` as the recipe wants it: dtype, device, precision of the head; frozen."""
    import torch

    from ostinato.model.hf import load_model

    device = section.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device is {device!r}, but torch sees no CUDA device; use auto or cpu")
    return load_model(folder, dtype=getattr(torch, section.dtype), device=device, fp32_head=section.fp32_head)


def adapter_spec(section: AdapterSection) -> AdapterSpec:
    """The LoRA that a recipe asks for."""
    from ostinato.model.lora import AdapterSpec, ExpertScheme

    return AdapterSpec(
        rank=section.rank,
        alpha=section.alpha,
        targets=section.targets,
        expert_scheme=ExpertScheme(section.expert_scheme),
        expert_rank=section.expert_rank or None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A model that can be sampled from: base, adapters (None: the base itself), tokenizer and its recipe."""

    recipe: Recipe
    folder: Path  # of the base model
    decoder: Decoder
    adapters: Adapters | None
    renderer: Renderer
    step: int = 0  # training steps behind it


def load_policy(target: str, *overrides: str) -> Policy:
    """The last policy of a run folder, or the model of a recipe or name with its adapter.path, if any.

    Raises ValueError when ``target`` is none of these.
    """
    from ostinato.render import Renderer

    recipe, run = recipe_of(target, *overrides)
    folder = model_folder(recipe.model.path)
    renderer = Renderer(folder)
    decoder = load_decoder(recipe.model, folder)
    step, adapters = trained(recipe, run, decoder) if run else (0, _given(recipe, decoder))
    return Policy(
        recipe=recipe, folder=folder, decoder=decoder, adapters=adapters, renderer=renderer, step=step
    )


def _given(recipe: Recipe, decoder: Decoder) -> Adapters | None:
    """The adapter that an untrained recipe begins with, None without adapter.path."""
    from ostinato.cli.build import new_adapters

    return new_adapters(recipe, decoder) if recipe.adapter.path else None


def recipe_of(target: str, *overrides: str) -> tuple[Recipe, RunFolder | None]:
    """What ``target`` means: a run folder (recipe and run), a recipe, or a model (a recipe with its path)."""
    from ostinato.run import RunFolder

    path = Path(target).expanduser()
    if (path / "recipe.toml").is_file():
        run = RunFolder.open(path)
        return Recipe.load(run.recipe, *overrides), run
    if is_model_name(target):
        return Recipe.load("quickstart", f"model.path={target}", *overrides), None
    try:
        return Recipe.load(find_recipe(target), *overrides), None
    except ValueError as error:
        if "does not exist" not in str(error):
            raise
        raise ValueError(
            f"{target!r} is no run folder, recipe or model; give one, e.g. quickstart or asset:seed-moe"
        ) from error


def newest_checkpoint(
    run: RunFolder, trainer: PolicyTrainer, say: Callable[[str], None]
) -> Checkpoint | None:
    """The newest whole checkpoint of ``run``, None without any; ``say`` hears of damaged ones.

    Raises ValueError for one of another base, and RunFailed when all are damaged.
    """
    from ostinato.train.checkpoint import CheckpointError, load_checkpoint

    try:
        return load_checkpoint(run.checkpoints, identity=trainer.identity(), warn=say)
    except CheckpointError as error:
        raise RunFailed(str(error)) from error


def trained(recipe: Recipe, run: RunFolder, decoder: Decoder) -> tuple[int, Adapters | None]:
    """(step, adapters) of the newest whole checkpoint of ``run``.

    Full-parameter checkpoints are loaded into ``decoder`` itself, and the adapters are None.
    """
    from ostinato.cli.build import new_adapters, new_trainer

    adapters = new_adapters(recipe, decoder)
    trainer = new_trainer(recipe, decoder, adapters)
    checkpoint = newest_checkpoint(run, trainer, lambda line: print(f"ostinato: {line}", file=sys.stderr))
    if checkpoint is None:
        raise ValueError(
            f"run {run.path} has no checkpoint yet; let it train first: ostinato resume {run.path}"
        )
    trainer.restore(checkpoint.tensors, checkpoint.state["trainer"])
    decoder.trainable(False)
    return checkpoint.step, trainer.adapters()
