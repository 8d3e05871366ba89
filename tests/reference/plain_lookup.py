"""Looking up what followed a context: the plain twins of native/match.h, live.h and lookup.h."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from reference.plain_blocks import DEPTH, Span, longest, narrow, next_at
from reference.plain_estimate import Estimator, Evidence, features, log_odds

from ostinato.history.blocks import END, Block
from ostinato.history.rules import Rules, Source

FOLLOWED = 16  # more new tokens than this are searched for, not followed
MOST_OCCURRENCES = 32  # counted in one look-up
MOST_CANDIDATES = 8  # kept at one node
FAR = 0.05  # outside its interval by this much, a token is not looked at
GOOD = 0.95  # an estimate from which on no further source is asked


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A token that came after the context, with its interval; prob 0: not known."""

    token: int
    edge: float
    prob: float
    reward: int
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    token: int
    source: Source
    estimate: float
    x: list[float]


@dataclass(slots=True, kw_only=True, eq=False)
class Match:
    """The longest match in every block: (tokens that agree, their places) as of ``seen`` tokens of text."""

    found: dict[int, tuple[int, Span]] = field(default_factory=dict)  # by number of the block
    seen: dict[int, int] = field(default_factory=dict)

    def copy(self) -> Match:
        return Match(found=dict(self.found), seen=dict(self.seen))


@dataclass(slots=True, kw_only=True, eq=False)
class Live:
    """What has just been written, by the tokens before it: the newest ``most`` observations."""

    levels: tuple[int, ...]  # context lengths, longest first
    most: int
    seen: list[tuple[tuple[int, ...], Occurrence, int]] = field(default_factory=list)  # with context, writer

    def __post_init__(self) -> None:
        self.most = 1 << (self.most - 1).bit_length()

    def add(self, before: Sequence[int], seen: Occurrence, writer: int) -> None:
        if self.levels and len(before) >= self.levels[-1]:
            self.seen.append((tuple(before[-self.levels[0] :]), seen, writer))
            del self.seen[: -self.most]

    def walk(self, before: Sequence[int], walk: int) -> list[tuple[Occurrence, int, int]]:
        """(occurrence, writer, level) of the newest ``walk`` after the shortest context; the level is that of
        the longest context that agrees."""
        if not self.levels or len(before) < self.levels[-1]:
            return []

        def agrees(context: tuple[int, ...], length: int) -> bool:
            both = len(context) >= length and len(before) >= length
            return both and tuple(before[-length:]) == context[-length:]

        found = [one for one in reversed(self.seen) if agrees(one[0], self.levels[-1])][:walk]
        return [
            (seen, writer, next(i for i, length in enumerate(self.levels) if agrees(context, length)))
            for context, seen, writer in found
        ]


def good(found: list[Candidate]) -> bool:
    return bool(found) and found[0].estimate >= GOOD


def join(found: list[Candidate], candidate: Candidate) -> None:
    """Distinct tokens, each with its best estimate, the best first; the first found among equals."""
    same = [one for one in found if one.token == candidate.token]
    if same and same[0].estimate >= candidate.estimate:
        return
    kept = [one for one in found if one.token != candidate.token]
    place = bisect_right([-one.estimate for one in kept], -candidate.estimate)
    kept.insert(place, candidate)
    found[:] = kept[:MOST_CANDIDATES]


def update(match: Match, number: int, block: Block, text: list[int], rules: Rules) -> tuple[int, Span]:
    """The longest match in a block (length 0: none): followed while it goes on, else searched for."""
    news = len(text) - match.seen.get(number, 0)
    length, span = match.found.get(number, (0, (0, 0)))
    match.seen[number] = len(text)
    if news == 0 and number in match.found:
        return length, span
    follows = 0 < news <= FOLLOWED and length > 0
    for token in text[len(text) - news :] if follows else []:
        span = narrow(block, span, length, token)
        places = span[1] - span[0]
        follows = follows and (places == 1 or (places > 1 and length + 1 < DEPTH))
        if not follows:
            break
        length += 1
    if not follows:
        length, span = longest(block, text[-rules.most :], rules.least)
    match.found[number] = length, span
    return length, span


def window(block: Block, span: Span, depth: int, use_noise: bool, u: float) -> Span:
    """The places of a span that are worth reading: those that go on and, with noise, of a long span those
    around ``u`` (it is sorted by its next token, and intervals lie in the order of tokens)."""
    low, high = span
    while low < high and next_at(block, low, depth).token == END:
        low += 1
    if not use_noise or high - low <= MOST_OCCURRENCES:
        return low, high
    edges = [next_at(block, place, depth).edge for place in range(low, high)]
    behind = low + bisect_right(edges, u)  # the first place whose interval begins behind u
    first = min(max(behind - 3 * MOST_OCCURRENCES // 4, low), high - MOST_OCCURRENCES)
    return first, first + MOST_OCCURRENCES


def tally(
    estimator: Estimator, found: list[Candidate], seen: list[Occurrence], length: int, age: int, u: float
) -> None:
    """Occurrences of one context in one source give a candidate for each token, with its estimate."""

    def inside(one: Occurrence) -> float:
        return min(u - one.edge, one.edge + one.prob - u) if one.prob > 0 else -2.0

    holding = sum(inside(one) > 0 for one in seen)
    for token in dict.fromkeys(one.token for one in seen):
        its = [one for one in seen if one.token == token]
        best = max(its, key=inside)  # the first among equals
        if best.prob > 0 and inside(best) < -FAR:
            continue
        x = features(
            Evidence(
                u=log_odds(u),
                edge=best.edge,
                prob=best.prob,
                count=len(its),
                total=len(seen),
                votes=sum(inside(one) > 0 for one in its) / holding if holding else 0.0,
                reward=best.reward,
                age=age,
                length=length,
                source=best.source,
            )
        )
        estimate = estimator.probability(x)
        join(found, Candidate(token=token, source=best.source, estimate=estimate, x=x))
