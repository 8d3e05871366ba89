"""A reward that is graded and needs no reference: shorter is better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LONG = 600  # characters


def brief(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 for an empty answer, 0 from LONG characters on; chats are judged by their last message."""
    texts = [
        completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions
    ]
    return [max(0.0, 1 - len(text) / LONG) for text in texts]
