"""A recipe: one TOML file, a frozen tree of plain values, dotted overrides from the command line.

Each value exists once, with its default in ``sections``; nothing is written back after loading. What a user
wrote wrongly raises ``ValueError`` with one sentence that names the field, the value and the fix. Only what
needs no model is checked here; ``launch.checks.check_recipe`` checks the rest (algorithm keys, context
length).

>>> recipe = Recipe.load("recipes/quickstart.toml", "trainer.steps=10", "algo.name=dapo")
"""

from ostinato.config.fields import check_files
from ostinato.config.recipe import Recipe, dump_toml, find_recipe, override, resolve_paths
from ostinato.config.sections import (
    AdapterSection,
    AlgoSection,
    ClusterSection,
    DownstreamSection,
    DraftSection,
    EngineSection,
    EvalSection,
    ForecastSection,
    ModelSection,
    PipelineSection,
    TrainerSection,
)

__all__ = [
    "AdapterSection",
    "AlgoSection",
    "ClusterSection",
    "DownstreamSection",
    "DraftSection",
    "EngineSection",
    "EvalSection",
    "ForecastSection",
    "ModelSection",
    "PipelineSection",
    "Recipe",
    "TrainerSection",
    "check_files",
    "dump_toml",
    "find_recipe",
    "override",
    "resolve_paths",
]
