"""Extract preferences from events: an edit beats the generated text, an accepted answer beats its rivals.

    exchanges, events -> extract -> deduplicated -> split by time, user and prompt

A pair counts with ``strength`` (how clear the sign is) x ``weight`` (inverse propensity of the shown
answers). An event or answer that gives no pair is counted by the reason.
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
from ostinato.apps.product.texts import measure_similarity, only_adds

LIKES = (Kind.ACCEPT, Kind.TASK_DONE)
DISLIKES = (Kind.REJECT, Kind.UNDO, Kind.REGENERATE, Kind.ABANDON)


class Source(StrEnum):
    EDIT = "edit"  # edited > generated
    REGENERATE = "regenerate"  # the accepted second > the first
    TOGETHER = "together"  # chosen > each of those that were shown beside it
    APART = "apart"  # A/B: accepted in one arm > not accepted in another, the same prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A preference: ``chosen`` over ``rejected`` as an answer to ``messages``, at ``ts`` of the last
    event."""

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
        """The hash of the messages, which is the same for equal prompts."""
        return hash_prompt(self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """Pairs and their counts. ``counts``: pairs by source, weights that were clipped, and answers that gave
    no pair, by the reason."""

    pairs: tuple[Pair, ...]
    counts: Mapping[str, int]


@dataclass(slots=True)
class _Interaction:
    """The events of one user on one answer."""

    exchange: Exchange
    user: str
    liked: float | None = None  # the time of the last sign that the user likes it
    edit: Event | None = None
    shown: Event | None = None

    @property
    def arm(self) -> str:
        return (self.shown and self.shown.exposure.arm) or self.exchange.arm

    @property
    def propensity(self) -> float:
        return self.exchange.propensity * (self.shown.exposure.propensity if self.shown else 1.0)


def hash_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
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
    """Return all pairs that the events up to ``now`` show.

    An edit that keeps less than ``least_kept`` is a new intent. An answer without a sign counts as not
    accepted ``horizon_s`` after it. A pair of exposures weighs 1 / their propensities, at most ``clip``. Of
    one prompt at most ``most`` pairs across arms are taken, chosen by a hash that depends neither on outcome
    nor on time. Pairs with equal texts are dropped and counted.
    """
    counts: Counter[str] = Counter()
    answers = {exchange.response_id: exchange for exchange in exchanges}
    interactions = _collect_interactions(answers, events, counts)
    pairs = [*_pair_edits(interactions, least_kept, counts), *_pair_regenerations(interactions, counts)]
    pairs += [
        *_pair_alternatives(interactions, answers, clip, counts),
        *_pair_arms(interactions, now - horizon_s, clip, most, counts),
    ]
    distinct_pairs = [pair for pair in pairs if pair.chosen.strip() != pair.rejected.strip()]
    counts.update({"equal": len(pairs) - len(distinct_pairs)})
    counts.update(Counter(str(pair.source) for pair in distinct_pairs))
    return Extracted(
        pairs=tuple(sorted(distinct_pairs, key=lambda pair: (pair.ts, pair.ids))), counts=+counts
    )


def _collect_interactions(
    answers: Mapping[str, Exchange], events: Iterable[Event], counts: Counter[str]
) -> dict[tuple[str, str], _Interaction]:
    """Collect the events by (response id, user), in order of time; a later event of a kind replaces an
    earlier one. Count the unusable ones by their reason."""
    unique_events = {event.event_id: event for event in events}.values()
    interactions: dict[tuple[str, str], _Interaction] = {}
    for event in sorted(unique_events, key=lambda event: (event.ts, event.event_id)):
        answer = answers.get(event.response_id)
        if answer is None or not event.consent:
            counts["orphan" if answer is None else "no_consent"] += 1
            continue
        user = event.user or answer.user or f"session:{event.session or answer.session or answer.response_id}"
        interaction = interactions.setdefault((answer.response_id, user), _Interaction(answer, user))
        rating = (event.value or 0.0) if event.kind is Kind.RATING else 0.0
        if event.kind in LIKES or rating > 0:
            interaction.liked = event.ts
        elif event.kind in DISLIKES or rating < 0:
            interaction.liked = None
        elif event.kind is Kind.EDIT:
            interaction.edit = event
        elif event.kind is Kind.SHOWN:
            interaction.shown = event
    return interactions


def _pair_edits(
    interactions: Mapping[tuple[str, str], _Interaction], least_kept: float, counts: Counter[str]
) -> Iterator[Pair]:
    """Pair each edited answer with the original answer. The pair is weaker the more of it is kept. Count
    edits that give no pair."""
    for interaction in interactions.values():
        if interaction.edit is None or interaction.edit.after is None:
            continue
        before, after = interaction.exchange.output, interaction.edit.after
        kept_share = measure_similarity(before, after)
        reason = "unchanged" if kept_share == 1 else "additive" if only_adds(before, after) else ""
        if reason or kept_share < least_kept:
            counts[reason or "new_intent"] += 1
            continue
        ids = (interaction.exchange.response_id, interaction.exchange.response_id)
        yield _build_pair(
            interaction, (after, before), ids, Source.EDIT, interaction.edit.ts, strength=1 - kept_share
        )


def _pair_regenerations(
    interactions: Mapping[tuple[str, str], _Interaction], counts: Counter[str]
) -> Iterator[Pair]:
    """Pair each liked answer with the answer that it replaces, if that was not liked and has the same prompt.
    Count the others."""
    for second in interactions.values():
        if second.shown is None or not second.shown.replaces or second.liked is None:
            continue
        first = interactions.get((second.shown.replaces, second.user))
        if first is None or first.liked is not None or first.exchange.messages != second.exchange.messages:
            reason = "first_unknown" if first is None else "both_liked" if first.liked else "other_prompt"
            counts[reason] += 1
            continue
        yield _pair_answers(second, first, Source.REGENERATE)


def _pair_alternatives(
    interactions: Mapping[tuple[str, str], _Interaction],
    answers: Mapping[str, Exchange],
    clip: float,
    counts: Counter[str],
) -> Iterator[Pair]:
    """Pair each liked answer with every answer that was shown beside it and not liked. Count the others, and
    clipped weights."""
    for winner in interactions.values():
        if winner.liked is None or winner.shown is None or not winner.shown.exposure.alternatives:
            continue
        names = [name for name in winner.shown.exposure.alternatives if name in answers]
        counts["alternative_unknown"] += len(winner.shown.exposure.alternatives) - len(names)
        rivals = [
            interactions.get((name, winner.user)) or _Interaction(answers[name], winner.user)
            for name in names
        ]
        losers = [rival for rival in rivals if rival.liked is None]
        counts["both_liked"] += len(rivals) - len(losers)
        weight = _compute_weight(winner.propensity, clip, counts)
        for loser in losers:  # one choice counts once, however many rivals it has
            yield _pair_answers(winner, loser, Source.TOGETHER, strength=1 / len(losers), weight=weight)


def _pair_arms(
    interactions: Mapping[tuple[str, str], _Interaction],
    close_time: float,
    clip: float,
    max_pairs: int,
    counts: Counter[str],
) -> Iterator[Pair]:
    """Pair liked answers of one arm with answers of other arms to the same prompt that were not liked by
    ``close_time``. Count answers that are undecided, pairs over ``max_pairs``, and clipped weights."""
    prompts: dict[str, list[_Interaction]] = defaultdict(list)
    for interaction in interactions.values():
        if interaction.arm and interaction.shown is not None and not interaction.shown.exposure.alternatives:
            prompts[hash_prompt(interaction.exchange.messages)].append(interaction)
    for group in prompts.values():
        ready_members = [
            member for member in group if member.liked is not None or member.exchange.ts <= close_time
        ]
        counts["undecided"] += len(group) - len(ready_members)
        rivals = [
            (winner, loser)
            for winner in ready_members
            for loser in ready_members
            if winner.liked is not None and loser.liked is None and winner.arm != loser.arm
        ]
        counts["over_most"] += max(0, len(rivals) - max_pairs)
        for interaction, rival in sorted(rivals, key=_hash_ids)[:max_pairs]:
            weight = _compute_weight(interaction.propensity * rival.propensity, clip, counts)
            yield _pair_answers(interaction, rival, Source.APART, weight=weight)


def _hash_ids(pair: tuple[_Interaction, _Interaction]) -> bytes:
    """Hash the ids of a pair, in an order that does not depend on which answer was liked."""
    names = sorted(f"{interaction.exchange.response_id} {interaction.user}" for interaction in pair)
    return hashlib.sha256("\n".join(names).encode()).digest()


def _compute_weight(propensity: float, clip: float, counts: Counter[str]) -> float:
    counts["clipped"] += 1 / propensity > clip  # a bool, which counts as 0 or 1
    return min(1 / propensity, clip)


def _pair_answers(
    winner: _Interaction, loser: _Interaction, source: Source, *, strength: float = 1.0, weight: float = 1.0
) -> Pair:
    assert winner.liked is not None
    texts = (winner.exchange.output, loser.exchange.output)
    ids = (winner.exchange.response_id, loser.exchange.response_id)
    return _build_pair(winner, texts, ids, source, winner.liked, strength, weight)


def _build_pair(
    interaction: _Interaction,
    texts: tuple[str, str],
    ids: tuple[str, str],
    source: Source,
    ts: float,
    strength: float,
    weight: float = 1.0,
) -> Pair:
    return Pair(
        messages=interaction.exchange.messages,
        chosen=texts[0],
        rejected=texts[1],
        source=source,
        user=interaction.user,
        ts=ts,
        ids=ids,
        strength=strength,
        weight=weight,
    )


def deduplicate(pairs: Iterable[Pair], cap: float) -> tuple[list[Pair], Mapping[str, int]]:
    """Keep the newest pair of each user and couple of texts, and scale weights down so that all pairs of a
    user weigh at most ``cap``. Return the pairs, and the counts of repeated pairs and of capped users."""
    newest_of: dict[tuple[str, str, frozenset[str]], Pair] = {}
    sorted_pairs = sorted(pairs, key=lambda pair: (pair.ts, pair.ids))
    for pair in sorted_pairs:
        newest_of[pair.user, pair.prompt, frozenset((pair.chosen, pair.rejected))] = pair
    total: dict[str, float] = defaultdict(float)
    for pair in newest_of.values():
        total[pair.user] += pair.importance
    unique_pairs = [
        replace(pair, weight=pair.weight * min(1.0, cap / importance))
        if (importance := total[pair.user]) > cap
        else pair
        for pair in newest_of.values()
    ]
    capped_users = sum(importance > cap for importance in total.values())
    return sorted(unique_pairs, key=lambda pair: (pair.ts, pair.ids)), {
        "repeated": len(sorted_pairs) - len(unique_pairs),
        "capped_users": capped_users,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Pairs in three parts, which share no user and no prompt. ``dropped``: pairs whose user or prompt
    belongs to another part."""

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
    """Split pairs by time: training before ``times[0]``, validation before ``times[1]``, test from there on.

    A user (or prompt) of several windows belongs to one of them, drawn by a hash with ``shares``, and their
    pairs elsewhere are dropped: otherwise regular users would leave the training or the test empty. ``users =
    False`` splits by time and prompt alone, for a product with few users: the test then says nothing about
    new users. Raises ValueError where ``times`` is not in order.
    """
    if not times[0] <= times[1]:
        raise ValueError(f"times is {times}; the training ends before the validation")
    window = [int(np.searchsorted(times, pair.ts, side="right")) for pair in pairs]
    keys = {"prompt": [pair.prompt for pair in pairs]} | ({"user": [p.user for p in pairs]} if users else {})
    homes = {name: _assign_windows(values, window, shares, seed) for name, values in keys.items()}
    parts: tuple[list[Pair], ...] = ([], [], [])
    drop_counts: Counter[str] = Counter()
    for i, (pair, part) in enumerate(zip(pairs, window, strict=True)):
        conflicts = [name for name, home in homes.items() if home[keys[name][i]] != part]
        if conflicts:
            drop_counts[conflicts[0]] += 1
        else:
            parts[part].append(pair)
    train, validation, test = map(tuple, parts)
    return Split(train=train, validation=validation, test=test, dropped=dict(drop_counts))


def _assign_windows(
    keys: Sequence[str], window: Sequence[int], shares: Sequence[float], seed: int
) -> dict[str, int]:
    """Return the window that each key belongs to: one of those in which it occurs."""
    windows_of: dict[str, set[int]] = defaultdict(set)
    for key, index in zip(keys, window, strict=True):
        windows_of[key].add(index)
    homes = {}
    for key, windows in windows_of.items():
        choices = sorted(windows)
        edges = np.cumsum([shares[index] for index in choices])
        draw = int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:6]) / 2**48
        homes[key] = choices[int(np.searchsorted(edges, draw * edges[-1], side="right"))]
    return homes
