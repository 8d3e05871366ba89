"""The pure part of a generative judge: prompts, verdicts in both orders, their reward, calibration.

    template -> prompt -> (a model) -> critique, verdict -> parse -> both orders -> Choice -> reward

A verdict that cannot be read, or that turns with the order of the answers, is counted and is never taken
for a tie.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from string import Formatter
from typing import Any

import numpy as np

from ostinato.apps.product.texts import words


class Choice(StrEnum):
    """Which of two answers is better."""

    A = "A"
    B = "B"
    TIE = "tie"
    UNREADABLE = "unreadable"  # no verdict, or two that differ
    INCONSISTENT = "inconsistent"  # of both orders: another verdict when the answers change places

    @property
    def swapped(self) -> Choice:
        """The same with A and B exchanged."""
        return {Choice.A: Choice.B, Choice.B: Choice.A}.get(self, self)


TEMPLATE = (
    "Which answer is better?\n<prompt>\n{prompt}\n</prompt>\n<answer_a>\n{a}\n</answer_a>\n"
    "<answer_b>\n{b}\n</answer_b>\nWrite a short critique of both, then one last line:\n"
    "Verdict: A, Verdict: B or Verdict: tie\n"
)


def check_template(template: str) -> None:
    """Raises ValueError for a field of ``str.format`` that is missing or unknown."""
    found = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    if found != (needed := {"prompt", "a", "b"}):
        raise ValueError(f"the template has fields {sorted(found)}; it needs {sorted(needed)}")


def _inert(text: str) -> str:
    """Without tags and verdict lines of ours: an answer that writes its own verdict is not one."""
    text = re.sub(r"</?(prompt|answer(?:_\w+)?)>", "", text)
    return re.sub(r"(?im)^(\W*)(verdict)(\W*):", r"\1\2\3", text)


def pairwise_prompts(template: str, prompt: str, a: str, b: str) -> tuple[str, str]:
    """Both orders: (a, b) and (b, a). ``template``: "" is the usual one."""
    prompt, a, b = _inert(prompt), _inert(a), _inert(b)
    form = (template or TEMPLATE).format
    return form(prompt=prompt, a=a, b=b), form(prompt=prompt, a=b, b=a)


_VERDICT = re.compile(r"(?im)^\W*verdict\W*:\W*(?:answer[ _])?(a|b|tie)\b\W*$")


def parse_verdict(text: str) -> Choice:
    """The verdict line of a judge's answer; UNREADABLE without one, or with several that differ."""
    found = {one.lower() for one in _VERDICT.findall(text)}
    if len(found) != 1:
        return Choice.UNREADABLE
    return {"a": Choice.A, "b": Choice.B}.get(found.pop(), Choice.TIE)


def critique_of(text: str) -> str:
    """What stands before the verdict."""
    found = _VERDICT.search(text)
    return text[: found.start() if found else None].strip()


def both_orders(ab: Choice, ba: Choice) -> Choice:
    """The verdict about (a, b) of one in that order and one in the order (b, a)."""
    if Choice.UNREADABLE in (ab, ba):
        return Choice.UNREADABLE
    return ab if ab == ba.swapped else Choice.INCONSISTENT


def verdict_reward(ab: Choice, ba: Choice, label: Choice, process: float = 1.0) -> float:
    """Of a judge's two answers: ``process`` (in 0 to 1, of its critiques) where both orders agree and are
    right, else 0. A process reward counts behind a right label alone (RM-NLHF, arXiv 2601.07349)."""
    if not 0 <= process <= 1:
        raise ValueError(f"process is {process}; a share from 0 to 1")
    return process if both_orders(ab, ba) == label else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Shares of n pairs. What was unreadable or inconsistent is wrong in ``accuracy`` and stands apart."""

    n: int
    accuracy: float  # both orders agree and are right
    consistency: float  # both orders can be read and agree
    first: float  # of all readable verdicts for one side, those for whichever stood first: 0.5 without bias
    counts: Mapping[str, int]  # of the verdicts of both orders


def tally(verdicts: Sequence[tuple[Choice, Choice]], labels: Sequence[Choice]) -> Tally:
    """Of verdicts in the orders (a, b) and (b, a). NaN where nothing was judged."""
    merged = [both_orders(*verdict) for verdict in verdicts]
    n = len(merged)
    single = [one for two in verdicts for one in two if one in (Choice.A, Choice.B)]
    right = sum(one == label for one, label in zip(merged, labels, strict=True))
    agreed = sum(one in (Choice.A, Choice.B, Choice.TIE) for one in merged)
    return Tally(
        n=n,
        accuracy=right / n if n else math.nan,
        consistency=agreed / n if n else math.nan,
        first=sum(one is Choice.A for one in single) / len(single) if single else math.nan,
        counts=Counter(one.value for one in merged),
    )


_COMMON = frozenset(
    words(
        "a an and answer answers are as at be better both but by for from good has have i in is it its more"
        " no not of on or response so than that the them then there these they this to too very was well"
        " which while with worse"
    )
)


def claims(critique: str) -> list[str]:
    """Sentences and lines that say something: those with at least two words of content."""
    parts = re.split(r"(?<=[.!?;])\s+|\n+", critique)
    return [part.strip() for part in parts if len(_content(part)) >= 2]


def _content(text: str) -> set[str]:
    """Words that say what is meant; numbers of one digit too, letters and stop words not."""
    content = {word for word in words(text.lower()) if word[0].isalnum() and word not in _COMMON}
    return {word for word in content if len(word) > 1 or word.isdigit()}


def critique_f1(critique: str, reference: str, alike: float = 0.5) -> float:
    """F1 of the claims of a critique against a reference's: two match where their content words have a Dice
    overlap of ``alike``, each claim once. NaN where the reference claims nothing. (RM-NLHF, arXiv
    2601.07349, lets a model match the arguments.)"""
    ours, theirs = ([_content(claim) for claim in claims(text)] for text in (critique, reference))
    if not theirs:
        return math.nan
    overlap = np.array([[2 * len(a & b) / (len(a) + len(b)) for b in theirs] for a in ours])
    matched = 0
    while overlap.size and overlap.max() >= alike:  # the closest two first
        i, j = np.unravel_index(overlap.argmax(), overlap.shape)
        overlap = np.delete(np.delete(overlap, i, 0), j, 1)
        matched += 1
    return 2 * matched / (len(ours) + len(theirs))


def pairings(n: int, ring: bool = False) -> list[tuple[int, int]]:
    """Ordered pairs of a group of n to judge, every pair in both orders: all n (n - 1), or a ring of 2 n."""
    if not ring or n < 4:  # a ring of three is all pairs
        return [(i, j) for i in range(n) for j in range(n) if i != j]
    return [pair for i in range(n) for pair in ((i, (i + 1) % n), ((i + 1) % n, i))]


def win_rates(n: int, verdicts: Mapping[tuple[int, int], Choice]) -> tuple[np.ndarray, Mapping[str, int]]:
    """([n] wins per decided comparison, ties half; counts of merged verdicts). Pref-GRPO's reward, of
    verdicts that hold in both orders; NaN for an answer without any: no verdict, not an average one."""
    wins, seen = np.zeros(n), np.zeros(n)
    counts: Counter[str] = Counter()
    for i, j in {(min(pair), max(pair)) for pair in verdicts}:
        missing = Choice.UNREADABLE
        merged = both_orders(verdicts.get((i, j), missing), verdicts.get((j, i), missing))
        counts[merged.value] += 1
        if (won := {Choice.A: 1.0, Choice.B: 0.0, Choice.TIE: 0.5}.get(merged)) is not None:
            wins[[i, j]] += won, 1 - won
            seen[[i, j]] += 1
    return np.divide(wins, seen, out=np.full(n, math.nan), where=seen > 0), counts


def log_odds(ab: np.ndarray, ba: np.ndarray) -> np.ndarray:
    """That a is better, free of order: ``ab`` are log P("A") - log P("B") in the order (a, b), ``ba`` in the
    other."""
    return (np.asarray(ab, float) - np.asarray(ba, float)) / 2


def temperature(log_odds: np.ndarray, labels: np.ndarray, least: float = 0.05, most: float = 20.0) -> float:
    """T that minimises the cross-entropy of sigmoid(log_odds / T) against ``labels`` in 0 or 1 (Guo et al.,
    arXiv 1706.04599, section 4.2): convex in 1 / T, so a bisection of its slope."""
    x, y = np.asarray(log_odds, float), np.asarray(labels, float)
    low, high = 1 / most, 1 / least

    def slope(b: float) -> float:
        return float(np.sum((probability(x * b) - y) * x))

    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / math.sqrt(low * high)


def probability(log_odds: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(np.asarray(log_odds, float) / 2))


def calibration_gaps(p: np.ndarray, labels: np.ndarray, bins: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """([n] bin of the confidence max(p, 1 - p), equal widths over 0.5 to 1; [n] confidence less correctness).
    ``p``: that the label is 1."""
    p, y = np.asarray(p, float), np.asarray(labels, float)
    sure = np.maximum(p, 1 - p)
    return np.minimum(((sure - 0.5) * 2 * bins).astype(int), bins - 1), sure - np.where(p >= 0.5, y, 1 - y)


def calibration_error(p: np.ndarray, labels: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error (arXiv 1706.04599, section 2): the mean over bins of the distance between
    confidence and accuracy. NaN of nothing."""
    place, gap = calibration_gaps(p, labels, bins)
    return float(np.abs(np.bincount(place, gap, bins)).sum() / len(gap)) if len(gap) else math.nan


# ---- the environment of a judge in training, and its reward


class BothOrders:
    """A row's prompt and then, in a new conversation, the chat in its column ``swapped``: a comparison with
    its two answers in the other order. Reward functions get both answers of the policy."""

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self._swapped = list(options["swapped"])
        return "", {}

    def step(self, action: str) -> tuple[list[dict[str, str]], float, bool, bool, dict[str, Any]]:
        swapped, self._swapped = self._swapped, []
        return swapped, 0.0, not swapped, False, {}


def both_right(
    completions: Sequence[Sequence[Mapping[str, str]]],
    answer: Sequence[str],
    critiques: Sequence[Sequence[str]] | None = None,
    **columns: Any,
) -> list[float]:
    """Behind ``BothOrders``. 0 unless the verdicts of both orders agree and are right (``answer``:
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
