"""Named failures that end a run: printed as one sentence with the way to go on, without a traceback."""

from __future__ import annotations


class NamedFailure(RuntimeError):
    """A failure of a run; the message is the fault and its fix."""


class Lost(NamedFailure):
    """A process or a machine that the run needs is gone, or makes no progress any more. The run can be
    resumed without a change, as ``--restarts`` does; after other failures a person has to change
    something."""
