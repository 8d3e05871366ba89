"""The threads that suit the model of a recipe."""

from __future__ import annotations

from ostinato.config import Recipe
from ostinato.engine.threads import Products, Threads, configure_early


def configure(recipe: Recipe) -> Threads | None:
    """Chosen, and set, before torch is imported; None, and nothing done, once it is."""
    section = recipe.model
    work = Products(model=section.path, dtype=section.dtype, native=recipe.engine.native)
    return configure_early(recipe.engine.threads, work)
