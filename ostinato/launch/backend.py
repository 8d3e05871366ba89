"""``model.backend``: our own decoder, or any causal model that ``transformers`` loads, in its place.

Nothing heavy is imported at the top: threads have to be chosen before torch is loaded.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path

from ostinato.config import Recipe
from ostinato.model.config import NotNative, read_config
from ostinato.model.named import model_folder

logger = logging.getLogger(__name__)
INSTALL = 'pip install "ostinato[transformers]"'


def with_backend(recipe: Recipe) -> Recipe:
    """``recipe`` with a backend in place of "auto"; with transformers, the reason logged, nothing is drafted.

    Raises ValueError for a model that cannot be read or needs a package, and for keys that do not go with it.
    """
    if recipe.model.backend == "auto":
        name, why = chosen(model_folder(recipe.model.path))
        if name != "native":
            logger.info(f"model.backend auto: {name}; {why}")
        section = recipe.model.model_copy(update={"backend": name})
        recipe = recipe.model_copy(update={"model": section})
    if recipe.model.backend != "transformers":
        return recipe
    check(recipe)
    return recipe.model_copy(update={"draft": recipe.draft.model_copy(update={"enabled": False})})


def chosen(folder: Path) -> tuple[str, str]:
    """(backend of the model in ``folder``, why). Raises ValueError for one that has none here."""
    try:
        return "native", f"our decoder has the family {read_config(folder).model_type}"
    except NotNative as error:
        if find_spec("transformers") is None:
            raise ValueError(f"{error}; for any other model: {INSTALL}") from error
        return "transformers", str(error)


def check(recipe: Recipe) -> None:
    """Raises ValueError, in one sentence, for what a model of transformers cannot do here."""
    if find_spec("transformers") is None:
        raise ValueError(f'model.backend is "transformers", which needs a package: {INSTALL}')
    model, engine = recipe.model, recipe.engine
    apart = {
        'adapter.kind "full"': (recipe.adapter.kind == "full", 'set it to "lora"'),
        f'parallel.layout "{recipe.parallel.layout}"': (recipe.parallel.sharded, "leave it empty"),
        f"cluster.samplers {recipe.cluster.samplers}": (recipe.cluster.samplers > 0, "set it to 0"),
        f'engine.backend "{engine.backend}"': (engine.backend != "local", 'set it to "local"'),
        f'engine.weights "{engine.weights}"': (engine.weights != "model", 'set it to "model"'),
        f'model.storage "{model.storage}"': (model.storage != "same", 'set it to "same"'),
        "model.exact true": (model.exact, "set it to false"),
        "model.fp32_head true": (model.fp32_head, "set it to false"),
    }
    for what, (given, fix) in apart.items():
        if given:
            raise ValueError(f'model.backend is "transformers", which does not go with {what}; {fix}')
