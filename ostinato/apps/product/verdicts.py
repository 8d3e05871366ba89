"""The reward of a judge in training, with TRL's signature: verdicts in both orders, then its critiques."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ostinato.apps.product.judging import Choice, critique_f1, critique_of, parse_verdict, verdict_reward


def both_right(
    completions: Sequence[Sequence[Mapping[str, str]]],
    answer: Sequence[str],
    critiques: Sequence[Sequence[str]] | None = None,
    **columns: Any,
) -> list[float]:
    """Behind ``env.games.BothOrders``. 0 unless the verdicts of both orders agree and are right (``answer``:
    of the first); then 1, or, where the row has ``critiques`` of both, 1/2 and half their mean F1."""
    references = critiques if critiques is not None else [("", "")] * len(completions)
    return [_reward(*one) for one in zip(completions, answer, references, strict=True)]


def _reward(replies: Sequence[Mapping[str, str]], right: str, references: Sequence[str]) -> float:
    texts = [reply["content"] for reply in replies]
    if len(texts) < 2:  # the first answer was cut off
        return 0.0
    ab, ba = (parse_verdict(text) for text in texts)
    f1 = [critique_f1(critique_of(text), one) for text, one in zip(texts, references, strict=True)]
    known = [one for one in f1 if not math.isnan(one)]  # NaN: the reference claims nothing
    process = 0.5 + 0.5 * sum(known) / len(known) if known else 1.0
    return verdict_reward(ab, ba, Choice(right), process)
