"""What ends a run by name: printed as one sentence with how to go on, and not as a traceback."""

from __future__ import annotations


class NamedFailure(RuntimeError):
    """Of a run; the message says what is wrong and what is to be done."""
