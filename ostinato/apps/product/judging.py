"""The pure part of a generative judge: prompts, verdicts in both orders, their reward, calibration.

    template -> prompt -> (a model) -> critique, verdict -> parse -> both orders -> Choice -> reward

A verdict that cannot be read, or that changes with the order of the answers, is counted and is no tie.
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

from ostinato.apps.product.texts import split_words


class Choice(StrEnum):
    """The better of two answers, or the reason why there is none."""

    A = "A"
    B = "B"
    TIE = "tie"
    UNREADABLE = "unreadable"  # no verdict, or two that differ
    INCONSISTENT = "inconsistent"  # of both orders: another verdict when the answers change places

    @property
    def swapped(self) -> Choice:
        """The same choice with A and B exchanged."""
        return {Choice.A: Choice.B, Choice.B: Choice.A}.get(self, self)


TEMPLATE = (
    "Which answer is better?\n<prompt>\n{prompt}\n</prompt>\n<answer_a>\n{a}\n</answer_a>\n"
    "<answer_b>\n{b}\n</answer_b>\nWrite a short critique of both, then one last line:\n"
    "Verdict: A, Verdict: B or Verdict: tie\n"
)


def check_template(template: str) -> None:
    """Raise ValueError for a field of ``str.format`` that is missing or unknown, and for a broken
    template."""
    fields = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    if fields != (required := {"prompt", "a", "b"}):
        raise ValueError(f"the template has fields {sorted(fields)}; it needs {sorted(required)}")


def _strip_markup(text: str) -> str:
    """Remove our tags, and break verdict lines so that a verdict in an answer does not count as the
    judge's."""
    text = re.sub(r"</?(prompt|answer(?:_\w+)?)>", "", text)
    return re.sub(r"(?im)^(\W*)(verdict)(\W*):", r"\1\2\3", text)


def build_prompts(template: str, prompt: str, a: str, b: str) -> tuple[str, str]:
    """Return the prompts of both orders, (a, b) and (b, a). ``template``: "" is TEMPLATE."""
    prompt, a, b = _strip_markup(prompt), _strip_markup(a), _strip_markup(b)
    form = (template or TEMPLATE).format
    return form(prompt=prompt, a=a, b=b), form(prompt=prompt, a=b, b=a)


_VERDICT = re.compile(r"(?im)^\W*verdict\W*:\W*(?:answer[ _])?(a|b|tie)\b\W*$")


def parse_verdict(text: str) -> Choice:
    """Return the verdict of the verdict lines in a judge's answer; UNREADABLE without a line or if lines
    differ."""
    verdicts = {match.lower() for match in _VERDICT.findall(text)}
    if len(verdicts) != 1:
        return Choice.UNREADABLE
    return {"a": Choice.A, "b": Choice.B}.get(verdicts.pop(), Choice.TIE)


def extract_critique(text: str) -> str:
    """Return the text before the first verdict line."""
    verdict = _VERDICT.search(text)
    return text[: verdict.start() if verdict else None].strip()


def merge_orders(ab: Choice, ba: Choice) -> Choice:
    """Merge the verdicts of the orders (a, b) and (b, a) into one about (a, b); UNREADABLE if either is."""
    if Choice.UNREADABLE in (ab, ba):
        return Choice.UNREADABLE
    return ab if ab == ba.swapped else Choice.INCONSISTENT


def verdict_reward(ab: Choice, ba: Choice, label: Choice, process: float = 1.0) -> float:
    """The reward of a judge's answers to both orders: ``process`` (in 0 to 1, the score of its critiques)
    where both orders agree and are right, else 0. A process reward counts behind a right label alone
    (RM-NLHF, arXiv 2601.07349). Raises ValueError for ``process`` outside 0 to 1."""
    if not 0 <= process <= 1:
        raise ValueError(f"process is {process}; a share from 0 to 1")
    return process if merge_orders(ab, ba) == label else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Shares of n pairs. Unreadable and inconsistent verdicts are wrong in ``accuracy`` and have counts of
    their own."""

    n: int
    accuracy: float  # both orders agree and are right
    consistency: float  # both orders can be read and agree
    first: float  # of the readable verdicts for one side, the share for the first answer: 0.5 without bias
    counts: Mapping[str, int]  # of the verdicts of both orders


def count_verdicts(verdicts: Sequence[tuple[Choice, Choice]], labels: Sequence[Choice]) -> Tally:
    """Count verdicts in the orders (a, b) and (b, a). A share of no verdicts is NaN."""
    choices = [merge_orders(*verdict) for verdict in verdicts]
    n = len(choices)
    decisive_choices = [
        choice for verdict in verdicts for choice in verdict if choice in (Choice.A, Choice.B)
    ]
    right_count = sum(choice == label for choice, label in zip(choices, labels, strict=True))
    consistent_count = sum(choice in (Choice.A, Choice.B, Choice.TIE) for choice in choices)
    return Tally(
        n=n,
        accuracy=right_count / n if n else math.nan,
        consistency=consistent_count / n if n else math.nan,
        first=sum(choice is Choice.A for choice in decisive_choices) / len(decisive_choices)
        if decisive_choices
        else math.nan,
        counts=Counter(choice.value for choice in choices),
    )


_COMMON = frozenset(
    split_words(
        "a an and answer answers are as at be better both but by for from good has have i in is it its more"
        " no not of on or response so than that the them then there these they this to too very was well"
        " which while with worse"
    )
)


def split_claims(critique: str) -> list[str]:
    """Return the sentences and lines of a critique that have at least two content words."""
    parts = re.split(r"(?<=[.!?;])\s+|\n+", critique)
    return [part.strip() for part in parts if len(_extract_content(part)) >= 2]


def _extract_content(text: str) -> set[str]:
    """Return the words of a text that carry meaning: no stop words, no single letters; single digits stay."""
    content = {word for word in split_words(text.lower()) if word[0].isalnum() and word not in _COMMON}
    return {word for word in content if len(word) > 1 or word.isdigit()}


def critique_f1(critique: str, reference: str, alike: float = 0.5) -> float:
    """Compute the F1 of the claims of a critique against those of a reference. Two claims match if the Dice
    overlap of their content words is at least ``alike``; each claim matches once. NaN if the reference has no
    claims.

    In RM-NLHF (arXiv 2601.07349) a model matches the arguments.
    """
    ours, theirs = (
        [_extract_content(claim) for claim in split_claims(text)] for text in (critique, reference)
    )
    if not theirs:
        return math.nan
    overlap = np.array([[2 * len(a & b) / (len(a) + len(b)) for b in theirs] for a in ours])
    matches = 0
    while overlap.size and overlap.max() >= alike:  # the closest two first
        i, j = np.unravel_index(overlap.argmax(), overlap.shape)
        overlap = np.delete(np.delete(overlap, i, 0), j, 1)
        matches += 1
    return 2 * matches / (len(ours) + len(theirs))


def list_pairings(n: int) -> list[tuple[int, int]]:
    """Return the ordered pairs to judge in a group of n: a ring of 2 n, which compares each with two others
    in both orders. For n < 4 that is all pairs."""
    if n < 4:
        return [(i, j) for i in range(n) for j in range(n) if i != j]
    return [pair for i in range(n) for pair in ((i, (i + 1) % n), ((i + 1) % n, i))]


def win_rates(n: int, verdicts: Mapping[tuple[int, int], Choice]) -> tuple[np.ndarray, Mapping[str, int]]:
    """Return ([n] wins per decided comparison, a tie is half a win; counts of merged verdicts). The reward of
    Pref-GRPO, from verdicts that hold in both orders. NaN for an answer without such a verdict: it has no win
    rate, not an average one."""
    wins, comparisons = np.zeros(n), np.zeros(n)
    counts: Counter[str] = Counter()
    for i, j in {(min(pair), max(pair)) for pair in verdicts}:
        default = Choice.UNREADABLE
        choice = merge_orders(verdicts.get((i, j), default), verdicts.get((j, i), default))
        counts[choice.value] += 1
        if (score := {Choice.A: 1.0, Choice.B: 0.0, Choice.TIE: 0.5}.get(choice)) is not None:
            wins[[i, j]] += score, 1 - score
            comparisons[[i, j]] += 1
    return np.divide(wins, comparisons, out=np.full(n, math.nan), where=comparisons > 0), counts


def log_odds(ab: np.ndarray, ba: np.ndarray) -> np.ndarray:
    """Return log-odds that a is better, without the bias of the order. ``ab`` and ``ba`` are log P("A") -
    log P("B") in the orders (a, b) and (b, a)."""
    return (np.asarray(ab, float) - np.asarray(ba, float)) / 2


def fit_temperature(
    log_odds: np.ndarray, labels: np.ndarray, least: float = 0.05, most: float = 20.0
) -> float:
    """Fit the temperature T in [``least``, ``most``] that minimises the cross-entropy of sigmoid(log_odds /
    T) against ``labels`` in 0 or 1 (Guo et al., arXiv 1706.04599, section 4.2). It is convex in 1 / T, so a
    bisection of its slope finds T."""
    x, y = np.asarray(log_odds, float), np.asarray(labels, float)
    low, high = 1 / most, 1 / least

    def slope(b: float) -> float:
        return float(np.sum((compute_probability(x * b) - y) * x))

    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / math.sqrt(low * high)


def compute_probability(log_odds: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(np.asarray(log_odds, float) / 2))


def compute_calibration_gaps(
    p: np.ndarray, labels: np.ndarray, bins: int = 10
) -> tuple[np.ndarray, np.ndarray]:
    """Return ([n] bin of the confidence max(p, 1 - p), equal widths over 0.5 to 1; [n] confidence less
    correctness). ``p``: probability that the label is 1."""
    p, y = np.asarray(p, float), np.asarray(labels, float)
    conf = np.maximum(p, 1 - p)
    return np.minimum(((conf - 0.5) * 2 * bins).astype(int), bins - 1), conf - np.where(p >= 0.5, y, 1 - y)


def compute_calibration_error(p: np.ndarray, labels: np.ndarray, bins: int = 10) -> float:
    """Compute the expected calibration error (arXiv 1706.04599, section 2): the mean over bins of the
    distance between confidence and accuracy. NaN without labels."""
    place, gap = compute_calibration_gaps(p, labels, bins)
    return float(np.abs(np.bincount(place, gap, bins)).sum() / len(gap)) if len(gap) else math.nan


# ---- the environment that trains a judge, and its reward


class BothOrders:
    """An environment of two turns. The first is the row's prompt. The second is the chat in its column
    ``swapped``, a new conversation with the two compared answers in the other order. Reward functions get
    both answers of the policy."""

    def reset(self, *, seed: int, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self._swapped_chat = list(options["swapped"])
        return "", {}

    def step(self, action: str) -> tuple[list[dict[str, str]], float, bool, bool, dict[str, Any]]:
        swapped_chat, self._swapped_chat = self._swapped_chat, []
        return swapped_chat, 0.0, not swapped_chat, False, {}


def both_right(
    completions: Sequence[Sequence[Mapping[str, str]]],
    answer: Sequence[str],
    critiques: Sequence[Sequence[str]] | None = None,
    **columns: Any,
) -> list[float]:
    """Return the rewards of answers to ``BothOrders``. A reward is 0 unless the verdicts of both orders agree
    and are right; ``answer`` is the label in the first order. It is then 1, or 1/2 plus half of the mean F1
    if the row has ``critiques`` of both orders."""
    references = critiques if critiques is not None else [("", "")] * len(completions)
    return [_compute_reward(*row) for row in zip(completions, answer, references, strict=True)]


def _compute_reward(replies: Sequence[Mapping[str, str]], label: str, references: Sequence[str]) -> float:
    """Compute the reward of the replies to both orders; 0 without a second reply."""
    texts = [reply["content"] for reply in replies]
    if len(texts) < 2:  # the first answer was cut off
        return 0.0
    ab, ba = (parse_verdict(text) for text in texts)
    f1 = [
        critique_f1(extract_critique(text), reference)
        for text, reference in zip(texts, references, strict=True)
    ]
    known_scores = [score for score in f1 if not math.isnan(score)]  # NaN: the reference claims nothing
    process = 0.5 + 0.5 * sum(known_scores) / len(known_scores) if known_scores else 1.0
    return verdict_reward(ab, ba, Choice(label), process)
