"""Assembly of a run, from a recipe to its end; it begins in ``session``."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A run ended before its time, for a reason that has a name. The message is one sentence."""


class NothingToLearn(RunFailed):
    """Too many steps in a row had nothing to learn from."""
