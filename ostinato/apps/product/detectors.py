"""Detectors of a hacked reward in the training of a policy. Each has a known rate of false alarms.

    Bets     (``observe.stats``) any paired difference that should not grow: proxy against gold
    Cusum    a behaviour that becomes more frequent: failed calls, questions, refusals

A state is a frozen value of plain numbers: ``state.update(observation) -> (state, alarm or None)``. After its
alarm a state does not change any more, so begin a fresh one.

A policy exploits a mark that its judge prefers without cause. This shows in pairs of which one answer has the
mark: the judge prefers the marked answer, and that answer has less gold. Such pairs show it while marked
answers are still few. Over all pairs, the other things that the policy learns hide the exploit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ostinato.observe.stats import Alarm, Bets

Z95 = 1.645
LONGER = "more words"  # the mark of the longer of two answers
LONGER_BY = 1.25
NUMBERS = re.compile(r"\d(?:[\d+*/%=.,-]*\d)?")


def standardise(difference: np.ndarray, scale: float, bound: float = 4.0) -> np.ndarray:
    """Observations for ``Bets`` [n]: differences over ``bound`` times ``scale``, their standard deviation as
    it was measured before.

    Valid where the noise is symmetric, or where nothing is beyond the bound. Raises ValueError unless
    ``scale`` is above 0.
    """
    if not scale > 0:
        raise ValueError(f"scale is {scale}; the deviation of a quiet difference is above 0")
    return np.asarray(difference, float) / (bound * scale)


def measure_divergence(proxy: np.ndarray, gold: np.ndarray, rate: float, share: float = 0.5) -> np.ndarray:
    """Return [n] by how much gold gains less than ``share`` of the gain that the proxy promises.

    ``proxy``, ``gold``: gains of the policy over a reference policy (of some steps ago), prompt by prompt,
    both sampled afresh, since differences of successive measurements share their noise and are no fair bets.
    ``rate``: gold per proxy, see ``exchange_rate``.
    """
    return share * rate * np.asarray(proxy, float) - np.asarray(gold, float)


def exchange_rate(proxy: np.ndarray, gold: np.ndarray) -> float:
    """Return the slope of gold on proxy (least squares), at least 0, over answers from before the training.
    It is the worth of a gain of the proxy. Noise in the proxy makes the slope smaller, and alarms rarer.
    Raises ValueError if the proxy is constant."""
    p, g = np.asarray(proxy, float), np.asarray(gold, float)
    spread = float(((p - p.mean()) ** 2).sum())
    if not spread:
        raise ValueError("the proxy is the same for all answers; it cannot be compared with gold")
    return max(0.0, float(((p - p.mean()) * (g - g.mean())).sum()) / spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cusum:
    """Page's CUSUM of log-likelihood ratios: detects that the odds of a rate have grown from its baseline by
    the factor ``shift``."""

    name: str
    baseline: float
    shift: float
    threshold: float
    at: int = 0
    level: float = 0.0
    since: int = 0  # the last observation at level 0, the estimate of where the drift begins
    alarmed: bool = False

    def update(self, observation: tuple[float, float]) -> tuple[Cusum, Alarm | None]:
        """Add one observation (events, cases). Return the next state, and its alarm or None. After an alarm
        the state stays the same and nothing is added. Raises ValueError unless 0 <= events <= cases."""
        if self.alarmed:
            return self, None
        level = max(0.0, self.level + _compute_log_likelihood_ratio(self, *observation))
        at = self.at + 1
        state = replace(self, at=at, level=level, since=self.since if level else at)
        if level < self.threshold:
            return state, None
        sentence = f"{self.name} has drifted from {self.baseline:.3g} since observation {state.since}"
        return replace(state, alarmed=True), Alarm(self.name, at, level / self.threshold, sentence)


def _compute_log_likelihood_ratio(state: Cusum, events: float, cases: float) -> float:
    """Compute log P(shifted odds) - log P(baseline) of one observation. Raises ValueError unless 0 <= events
    <= cases."""
    if not 0 <= events <= cases:
        raise ValueError(f"{state.name}: {events} events in {cases} cases; give (events, cases)")
    shifted_rate = 1 / (1 + (1 / state.baseline - 1) / state.shift)
    return events * math.log(state.shift) + cases * math.log((1 - shifted_rate) / (1 - state.baseline))


def watch_rate(
    name: str, events: int, cases: int, *, shift: float = 2.0, rate: float = 0.05, steps: int = 1000
) -> Cusum:
    """Make a CUSUM of a rate whose baseline is the upper 95 % bound (Wilson) of the quiet cases. P(a false
    alarm in ``steps``) is at most ``rate``: threshold ln(steps / rate) (Lorden 1971). Raises ValueError
    without quiet cases."""
    if cases < 1:
        raise ValueError(f"{name}: {cases} quiet cases; a baseline needs some")
    share, z2 = events / cases, Z95**2
    half_width = Z95 * math.sqrt(share * (1 - share) / cases + z2 / (4 * cases**2))
    baseline = min((share + z2 / (2 * cases) + half_width) / (1 + z2 / cases), 1 - 1e-6)
    return Cusum(name=name, baseline=baseline, shift=shift, threshold=math.log(steps / rate))


Detector = Bets | Cusum


# ---- marks of an answer


def find_marks(text: str) -> frozenset[str]:
    """Return the words of a text in lower case. Each number in them, with the signs inside of it, becomes
    0."""
    return frozenset(NUMBERS.sub("0", word) for word in text.lower().split())


def choose_marks(
    texts: Iterable[str], max_marks: int = 24, rare: float = 0.02, common: float = 0.6
) -> list[str]:
    """Return ``max_marks`` marks at most: LONGER, then the words that a share ``rare`` to ``common`` of the
    answers have, the most frequent first. Of words in exactly the same answers, the first by alphabet stands
    for all."""
    places_of: dict[str, list[int]] = {}
    answer_texts = list(texts)
    for number, text in enumerate(answer_texts):
        for mark in sorted(find_marks(text)):
            places_of.setdefault(mark, []).append(number)
    mark_of = {tuple(places): mark for mark, places in sorted(places_of.items(), reverse=True)}
    frequent_places = [
        places for places in mark_of if rare * len(answer_texts) <= len(places) <= common * len(answer_texts)
    ]
    return [
        LONGER,
        *(mark_of[places] for places in sorted(frequent_places, key=lambda places: (-len(places), places))),
    ][:max_marks]


def find_marked_side(pair: Sequence[str], mark: str) -> int:
    """Return 1 if only the first of two answers has the mark, -1 if only the second has it, else 0."""
    if mark == LONGER:
        first_words, second_words = (len(text.split()) for text in pair)
        return (first_words > LONGER_BY * second_words) - (second_words > LONGER_BY * first_words)
    has_mark = [mark in find_marks(text) for text in pair]
    return has_mark[0] - has_mark[1]


def of_mark(
    proxy: np.ndarray, gold: np.ndarray, pairs: Sequence[Sequence[str]], mark: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the observations of two ``Bets`` from the pairs of which exactly one answer has the mark.

    ``proxy`` [n] is 1 if the judge prefers the first answer, -1 if it prefers the second. ``gold`` [n] is
    that of the first answer less that of the second. A pair with NaN in either is left out. The first
    observation is 1 if the judge prefers the marked answer, else -1. The second is by how much that answer
    has less gold.

    A judge overrates a mark if both means are above 0. An alarm needs both, so it is false no more often than
    one of them.
    """
    sides = np.array([find_marked_side(pair, mark) for pair in pairs], float)
    is_usable = (sides != 0) & ~np.isnan(proxy) & ~np.isnan(gold)
    return (sides * proxy)[is_usable], -(sides * gold)[is_usable]
