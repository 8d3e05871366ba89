"""The reward of ``bench warm-start``: an answer that ends with "= N", N the right number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def ends_with(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    texts = (one if isinstance(one, str) else one[-1]["content"] for one in completions)
    found = (re.search(r" = (\d+)$", text.strip()) for text in texts)
    return [float(one is not None and one[1] == right) for one, right in zip(found, answer, strict=True)]
