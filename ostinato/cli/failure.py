"""The error of a run, by itself: the command line must know it without loading anything heavy."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A run ended before its time, for a reason that has a name. The message is one sentence."""
