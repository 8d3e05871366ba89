"""Named failures that end a run: printed as one sentence with the way to go on, without a traceback."""

from __future__ import annotations


class NamedFailure(RuntimeError):
    """A failure of a run; the message is the fault and its fix."""


class Lost(NamedFailure):
    """A process or a machine that the run needs is gone, or gets on no more. Nothing has to be changed before
    the run is resumed: ``--restarts`` does it, other failures need a person."""
