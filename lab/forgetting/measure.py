"""Figures of a contender over held-out histories: accuracy by kind, evidence that is left, false answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lab.forgetting.contenders import Count, Lines
from lab.forgetting.world import KINDS, UNKNOWN, History, Question, reply, supported, words_of
from lab.paired import wilson
from ostinato.apps.memory.facts import unsupported

View = Callable[[History], Callable[[Question], Lines]]  # a history read once, then its questions


@dataclass(slots=True)
class Tally:
    right: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    questions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    false: int = 0  # answers that are neither right nor "unknown"
    evidence: float = 0.0
    answerable: int = 0
    lines: int = 0
    unsupported: int = 0  # lines with a number, date or name that their turn lacks
    most: int = 0  # tokens in the context
    seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        n, right = sum(self.questions.values()), sum(self.right.values())
        return {
            "accuracy": round(right / n, 4),
            "interval": [round(one, 4) for one in wilson(right, n)],
            "kinds": {kind: round(self.right[kind] / max(1, self.questions[kind]), 4) for kind in KINDS},
            "evidence": round(self.evidence / max(1, self.answerable), 4),
            "false": round(self.false / n, 4),
            "unsupported": round(self.unsupported / max(1, self.lines), 4),
            "questions": n,
            "most_tokens": self.most,
            "seconds": round(self.seconds, 2),
        }


def tally(histories: Sequence[History], view: View, count: Count) -> dict[str, Any]:
    """``view`` over all ``histories``, read by a careful reader, who finds what is still stated and nothing
    else. ``seconds`` are processor time of ``view``."""
    found = Tally()
    for one in histories:
        began = time.process_time()
        ready = view(one)
        found.seconds += time.process_time() - began
        for question in one.questions:
            began = time.process_time()
            lines = ready(question)
            found.seconds += time.process_time() - began
            _add(found, lines, question, count)
    return found.row()


def _add(found: Tally, lines: Lines, question: Question, count: Count) -> None:
    got = reply(question.chain, supported(lines, question.chain))
    found.questions[question.kind] += 1
    found.right[question.kind] += got == question.answer
    found.false += got not in (question.answer, UNKNOWN)
    if question.evidence:
        stated = {turn.idx for turn, text in lines if turn.fact and turn.fact.words <= set(words_of(text))}
        found.evidence += sum(at in stated for at in question.evidence) / len(question.evidence)
        found.answerable += 1
    found.lines += len(lines)
    found.unsupported += sum(bool(unsupported(text, turn.line)) for turn, text in lines if text != turn.line)
    found.most = max(found.most, sum(count(text) for _, text in lines))


def area(rows: Sequence[tuple[int, float]]) -> float:
    """Under accuracy against the logarithm of the budget, as a share of its width: the mean over the
    octaves."""
    total = 0.0
    for (low, a), (high, b) in pairwise(rows):
        total += (a + b) / 2 * math.log(high / low)
    return total / math.log(rows[-1][0] / rows[0][0])


__all__ = ["Tally", "View", "area", "tally"]
