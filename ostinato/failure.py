"""What ends a run by name: printed as one sentence with how to go on, and not as a traceback."""

from __future__ import annotations


class NamedFailure(RuntimeError):
    """Of a run; the message says what is wrong and what is to be done."""


class Lost(NamedFailure):
    """A process or a machine that the run needs is gone, or gets on no more. Nothing has to be changed before
    the run is resumed: ``--restarts`` does it, other failures need a person."""
