"""A reward that is graded and needs no reference: shorter is better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LONG = 600  # characters


def brief(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 for nothing said, 0 from LONG characters on; chats are judged by their last message."""
    texts = [said if isinstance(said, str) else said[-1]["content"] for said in completions]
    return [max(0.0, 1 - len(text) / LONG) for text in texts]
