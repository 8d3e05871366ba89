"""Ostinato: frugal RL for LLMs, dense and mixture-of-experts, from a laptop CPU to a cluster.

The file and the API say the same thing::

    from ostinato import learn

    outcome = learn("recipes/quickstart.toml", "trainer.steps=10")  # or with objects: data=rows, reward=score
    print(outcome.before["pass@1"], outcome.after["pass@1"], outcome.folder)

Importing the package loads nothing heavy; each name is imported when it is first requested.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ostinato.config import Recipe
    from ostinato.launch.session import Outcome, learn, resume

__version__ = "0.1.0"
__all__ = ["Outcome", "Recipe", "__version__", "learn", "resume"]
__dir__ = __all__.copy  # names that are not imported yet, too

_HOMES = {
    "Recipe": "ostinato.config",
    "learn": "ostinato.launch.session",
    "resume": "ostinato.launch.session",
    "Outcome": "ostinato.launch.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ostinato' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
