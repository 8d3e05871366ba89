"""``model.dtype = "auto"`` becomes the dtype that suits model and machine; one that is written is obeyed.

Nothing heavy is imported at the top: threads have to be chosen before torch is loaded.
"""

from __future__ import annotations

import logging
from pathlib import Path

from ostinato.config import Recipe
from ostinato.launch.backend import with_backend
from ostinato.run import RunFolder

logger = logging.getLogger(__name__)


def resolved(recipe: Recipe, *, run: Path | None = None, warn: bool = False) -> Recipe:
    """``recipe`` with a dtype in place of "auto"; the reason is logged. ``run``: the folder of the run that
    goes on, whose dtype is kept. ``warn``: also of a dtype that is written and much slower here than the
    other. Raises ValueError for a model that cannot be read."""
    recipe = with_backend(recipe)
    section = recipe.model
    if section.dtype == "auto" and run is not None:
        before = Recipe.load(RunFolder.open(run).recipe).model.dtype
        if before != "auto":
            return _with(recipe, before)
    if section.dtype == "auto" and recipe.adapter.kind == "full":
        logger.info('model.dtype auto: float32; adapter.kind = "full" trains fp32 parameters')
        return _with(recipe, "float32")
    if section.dtype != "auto" and not warn:
        return recipe
    if section.backend == "transformers":
        return _of_transformers(recipe)
    from ostinato.engine import products
    from ostinato.launch.models import device_of
    from ostinato.model.config import read_config
    from ostinato.model.named import model_folder

    device, config = device_of(section), read_config(model_folder(section.path))
    if section.dtype == "auto":
        chosen = products.choose(
            config, device=device, native=recipe.engine.native, fp32_head=section.fp32_head
        )
        logger.info(f"model.dtype auto: {chosen.dtype}; {chosen.reason}")
        return _with(recipe, chosen.dtype)
    if device == "cpu" and recipe.adapter.kind != "full":
        slow = products.warning(
            config, section.dtype, native=recipe.engine.native, fp32_head=section.fp32_head
        )
        if slow:
            logger.warning(f'model.dtype {section.dtype}, as written: {slow}; "auto" would choose')
    return recipe


def _of_transformers(recipe: Recipe) -> Recipe:
    """bfloat16 on a GPU; on a CPU float32, in which backward of torch's own layers is fast."""
    from ostinato.launch.models import device_of

    if recipe.model.dtype != "auto":
        return recipe
    device = device_of(recipe.model)
    name = "float32" if device == "cpu" else "bfloat16"
    logger.info(f"model.dtype auto: {name}; a model of transformers on {device}")
    return _with(recipe, name)


def _with(recipe: Recipe, dtype: str) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})
