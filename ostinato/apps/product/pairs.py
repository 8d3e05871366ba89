"""Preferences out of what users did: an edit beats what was generated, an accepted answer beats its rivals.

    exchanges, events -> extract -> deduplicated -> split by time, user and prompt

A pair counts with ``strength`` (how clear the sign is) x ``weight`` (inverse propensity, of what a user was
shown). What gives no pair is counted by its reason.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from ostinato.apps.product.events import Event, Exchange, Kind
from ostinato.apps.product.texts import only_adds, similarity

LIKES = (Kind.ACCEPT, Kind.TASK_DONE)
DISLIKES = (Kind.REJECT, Kind.UNDO, Kind.REGENERATE, Kind.ABANDON)


class Source(StrEnum):
    EDIT = "edit"  # edited > generated
    REGENERATE = "regenerate"  # the accepted second > the first
    TOGETHER = "together"  # chosen > each of those that were shown beside it
    APART = "apart"  # A/B: accepted in one arm > not accepted in another, the same prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """``chosen`` was preferred to ``rejected`` as an answer to ``messages``, at ``ts`` of the last event."""

    messages: tuple[Mapping[str, Any], ...]
    chosen: str
    rejected: str
    source: Source
    user: str
    ts: float
    ids: tuple[str, str]  # response ids of both; of an edit twice the same
    strength: float = 1.0
    weight: float = 1.0

    @property
    def importance(self) -> float:
        return self.strength * self.weight

    @property
    def prompt(self) -> str:
        """One name for equal prompts."""
        return prompt_name(self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """``counts``: pairs by source, weights that were clipped, and what gave none, by its reason."""

    pairs: tuple[Pair, ...]
    counts: Mapping[str, int]


@dataclass(slots=True)
class _Seen:
    """What one user did with one answer."""

    exchange: Exchange
    user: str
    liked: float | None = None  # when
    edit: Event | None = None
    shown: Event | None = None

    @property
    def arm(self) -> str:
        return (self.shown and self.shown.exposure.arm) or self.exchange.arm

    @property
    def propensity(self) -> float:
        return self.exchange.propensity * (self.shown.exposure.propensity if self.shown else 1.0)


def prompt_name(messages: Sequence[Mapping[str, Any]]) -> str:
    text = json.dumps(list(messages), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def extract(
    exchanges: Iterable[Exchange],
    events: Iterable[Event],
    now: float,
    *,
    horizon_s: float = 600.0,
    least_kept: float = 0.2,
    clip: float = 10.0,
    most: int = 64,
) -> Extracted:
    """All pairs that the events up to ``now`` show.

    An edit that keeps less than ``least_kept`` is a new intent. Silence counts as not accepted ``horizon_s``
    behind the answer. A pair of exposures weighs 1 / their propensities, at most ``clip``. Of one prompt at
    most ``most`` pairs across arms are taken, by a hash that knows neither outcome nor time.
    """
    counts: Counter[str] = Counter()
    answers = {exchange.response_id: exchange for exchange in exchanges}
    seen = _seen(answers, events, counts)
    found = [*_edits(seen, least_kept, counts), *_second(seen, counts)]
    found += [*_together(seen, answers, clip, counts), *_apart(seen, now - horizon_s, clip, most, counts)]
    kept = [pair for pair in found if pair.chosen.strip() != pair.rejected.strip()]
    counts.update({"equal": len(found) - len(kept)})
    counts.update(Counter(str(pair.source) for pair in kept))
    return Extracted(pairs=tuple(sorted(kept, key=lambda one: (one.ts, one.ids))), counts=+counts)


def _seen(
    answers: Mapping[str, Exchange], events: Iterable[Event], counts: Counter[str]
) -> dict[tuple[str, str], _Seen]:
    unique = {event.event_id: event for event in events}.values()
    seen: dict[tuple[str, str], _Seen] = {}
    for event in sorted(unique, key=lambda one: (one.ts, one.event_id)):
        answer = answers.get(event.response_id)
        if answer is None or not event.consent:
            counts["orphan" if answer is None else "no_consent"] += 1
            continue
        who = event.user or answer.user or f"session:{event.session or answer.session or answer.response_id}"
        one = seen.setdefault((answer.response_id, who), _Seen(answer, who))
        rating = (event.value or 0.0) if event.kind is Kind.RATING else 0.0
        if event.kind in LIKES or rating > 0:
            one.liked = event.ts
        elif event.kind in DISLIKES or rating < 0:
            one.liked = None
        elif event.kind is Kind.EDIT:
            one.edit = event
        elif event.kind is Kind.SHOWN:
            one.shown = event
    return seen


def _edits(seen: Mapping[tuple[str, str], _Seen], least_kept: float, counts: Counter[str]) -> Iterator[Pair]:
    for one in seen.values():
        if one.edit is None or one.edit.after is None:
            continue
        before, after = one.exchange.output, one.edit.after
        kept = similarity(before, after)
        reason = "unchanged" if kept == 1 else "additive" if only_adds(before, after) else ""
        if reason or kept < least_kept:
            counts[reason or "new_intent"] += 1
            continue
        twice = (one.exchange.response_id, one.exchange.response_id)
        yield _pair(one, (after, before), twice, Source.EDIT, one.edit.ts, strength=1 - kept)


def _second(seen: Mapping[tuple[str, str], _Seen], counts: Counter[str]) -> Iterator[Pair]:
    for one in seen.values():
        if one.shown is None or not one.shown.replaces or one.liked is None:
            continue
        first = seen.get((one.shown.replaces, one.user))
        if first is None or first.liked is not None or first.exchange.messages != one.exchange.messages:
            reason = "first_unknown" if first is None else "both_liked" if first.liked else "other_prompt"
            counts[reason] += 1
            continue
        yield _against(one, first, Source.REGENERATE)


def _together(
    seen: Mapping[tuple[str, str], _Seen], answers: Mapping[str, Exchange], clip: float, counts: Counter[str]
) -> Iterator[Pair]:
    for one in seen.values():
        if one.liked is None or one.shown is None or not one.shown.exposure.alternatives:
            continue
        others = [name for name in one.shown.exposure.alternatives if name in answers]
        counts["alternative_unknown"] += len(one.shown.exposure.alternatives) - len(others)
        rivals = [seen.get((name, one.user)) or _Seen(answers[name], one.user) for name in others]
        losers = [rival for rival in rivals if rival.liked is None]
        counts["both_liked"] += len(rivals) - len(losers)
        weight = _weight(one.propensity, clip, counts)
        for loser in losers:  # one choice counts once
            yield _against(one, loser, Source.TOGETHER, strength=1 / len(losers), weight=weight)


def _apart(
    seen: Mapping[tuple[str, str], _Seen], closed: float, clip: float, most: int, counts: Counter[str]
) -> Iterator[Pair]:
    prompts: dict[str, list[_Seen]] = defaultdict(list)
    for one in seen.values():
        if one.arm and one.shown is not None and not one.shown.exposure.alternatives:
            prompts[prompt_name(one.exchange.messages)].append(one)
    for group in prompts.values():
        ready = [one for one in group if one.liked is not None or one.exchange.ts <= closed]
        counts["undecided"] += len(group) - len(ready)
        rivals = [
            (one, other)
            for one in ready
            for other in ready
            if one.liked is not None and other.liked is None and one.arm != other.arm
        ]
        counts["over_most"] += max(0, len(rivals) - most)
        for one, other in sorted(rivals, key=_blind)[:most]:
            weight = _weight(one.propensity * other.propensity, clip, counts)
            yield _against(one, other, Source.APART, weight=weight)


def _blind(pair: tuple[_Seen, _Seen]) -> bytes:
    names = sorted(f"{one.exchange.response_id} {one.user}" for one in pair)
    return hashlib.sha256("\n".join(names).encode()).digest()


def _weight(propensity: float, clip: float, counts: Counter[str]) -> float:
    counts["clipped"] += 1 / propensity > clip
    return min(1 / propensity, clip)


def _against(one: _Seen, other: _Seen, source: Source, *, strength: float = 1.0, weight: float = 1.0) -> Pair:
    assert one.liked is not None
    texts = (one.exchange.output, other.exchange.output)
    ids = (one.exchange.response_id, other.exchange.response_id)
    return _pair(one, texts, ids, source, one.liked, strength, weight)


def _pair(
    one: _Seen,
    texts: tuple[str, str],
    ids: tuple[str, str],
    source: Source,
    ts: float,
    strength: float,
    weight: float = 1.0,
) -> Pair:
    return Pair(
        messages=one.exchange.messages,
        chosen=texts[0],
        rejected=texts[1],
        source=source,
        user=one.user,
        ts=ts,
        ids=ids,
        strength=strength,
        weight=weight,
    )


def deduplicate(pairs: Iterable[Pair], cap: float) -> tuple[list[Pair], Mapping[str, int]]:
    """Of each user and couple of texts the newest pair alone; the pairs of one user together weigh at most
    ``cap`` (their weights are scaled down). Second: how many were repeated, and how many users capped."""
    newest: dict[tuple[str, str, frozenset[str]], Pair] = {}
    given = sorted(pairs, key=lambda one: (one.ts, one.ids))
    for pair in given:
        newest[pair.user, pair.prompt, frozenset((pair.chosen, pair.rejected))] = pair
    total: dict[str, float] = defaultdict(float)
    for pair in newest.values():
        total[pair.user] += pair.importance
    kept = [
        replace(pair, weight=pair.weight * min(1.0, cap / much)) if (much := total[pair.user]) > cap else pair
        for pair in newest.values()
    ]
    capped = sum(much > cap for much in total.values())
    return sorted(kept, key=lambda one: (one.ts, one.ids)), {
        "repeated": len(given) - len(kept),
        "capped_users": capped,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """No user and no prompt is in two parts. ``dropped``: pairs whose user or prompt belongs to another."""

    train: tuple[Pair, ...]
    validation: tuple[Pair, ...]
    test: tuple[Pair, ...]
    dropped: Mapping[str, int]


def split(
    pairs: Sequence[Pair],
    times: tuple[float, float],
    *,
    shares: tuple[float, float, float] = (0.5, 0.2, 0.3),
    users: bool = True,
    seed: int = 0,
) -> Split:
    """Training before ``times[0]``, validation before ``times[1]``, test from there on.

    A user (or prompt) of several windows belongs to one of them, drawn by a hash with ``shares``, and their
    pairs elsewhere are dropped: regular users would else empty the training or the test. ``users = False``
    parts by time and prompt alone, for a product with few users: the test then says nothing of new ones.
    """
    if not times[0] <= times[1]:
        raise ValueError(f"times is {times}; the training ends before the validation")
    window = [int(np.searchsorted(times, pair.ts, side="right")) for pair in pairs]
    keys = {"prompt": [pair.prompt for pair in pairs]} | ({"user": [p.user for p in pairs]} if users else {})
    homes = {name: _homes(each, window, shares, seed) for name, each in keys.items()}
    parts: tuple[list[Pair], ...] = ([], [], [])
    dropped: Counter[str] = Counter()
    for i, (pair, at) in enumerate(zip(pairs, window, strict=True)):
        away = [name for name, home in homes.items() if home[keys[name][i]] != at]
        if away:
            dropped[away[0]] += 1
        else:
            parts[at].append(pair)
    train, validation, test = map(tuple, parts)
    return Split(train=train, validation=validation, test=test, dropped=dict(dropped))


def _homes(keys: Sequence[str], window: Sequence[int], shares: Sequence[float], seed: int) -> dict[str, int]:
    """The one window that each key belongs to, of those it occurs in."""
    occurs: dict[str, set[int]] = defaultdict(set)
    for key, at in zip(keys, window, strict=True):
        occurs[key].add(at)
    homes = {}
    for key, where in occurs.items():
        ways = sorted(where)
        edges = np.cumsum([shares[at] for at in ways])
        drawn = int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:6]) / 2**48
        homes[key] = ways[int(np.searchsorted(edges, drawn * edges[-1], side="right"))]
    return homes
