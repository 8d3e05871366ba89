"""Pairs: which events make one and which do not, propensities, one user's share, splits without leaks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from product_rows import event, exchange

from ostinato.apps.product.events import Event, Exchange, Exposure, Kind
from ostinato.apps.product.pairs import (
    Pair,
    Source,
    deduplicate,
    extract,
    split,
)

LATE = 1e9


def shown(response_id: str, *beside: str, ts: float = 1000.5, p: float = 1.0, **changes: object) -> Event:
    exposure = Exposure(alternatives=beside, propensity=p, arm=str(changes.pop("arm", "")))
    return event(Kind.SHOWN, response_id, ts=ts, exposure=exposure, **changes)


def pair(chosen: str = "a", rejected: str = "b", **changes: object) -> Pair:
    prompt = changes.pop("prompt", "p")
    usual = {
        "messages": ({"role": "user", "content": prompt},),
        "source": Source.EDIT,
        "user": "u",
        "ts": 1.0,
        "ids": ("x", "y"),
    }
    return Pair(chosen=chosen, rejected=rejected, **{**usual, **changes})  # type: ignore[arg-type]


def test_an_edit_beats_what_was_generated() -> None:
    found = extract([exchange()], [event(Kind.EDIT)], LATE)
    (one,) = found.pairs
    assert (one.chosen, one.rejected, one.source) == ("one two three five", "one two three four", Source.EDIT)
    assert one.strength == 0.25 and one.weight == 1


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ("one two three four and five", "additive"),
        ("Hello: one two three four", "additive"),
        ("quite another thing altogether", "new_intent"),
        ("one  two three\nfour", "unchanged"),
    ],
)
def test_edits_that_say_nothing_are_dropped_and_counted(after: str, reason: str) -> None:
    found = extract([exchange()], [event(Kind.EDIT, after=after)], LATE)
    assert not found.pairs and found.counts == {reason: 1}


def test_the_accepted_second_answer_beats_the_first() -> None:
    answers = [exchange("a", output="first"), exchange("b", output="second", ts=1010)]
    events = [
        event(Kind.REGENERATE, "a", ts=1005),
        shown("b", ts=1010, replaces="a"),
        event(Kind.ACCEPT, "b", ts=1020),
    ]
    (one,) = extract(answers, events, LATE).pairs
    assert (one.chosen, one.rejected, one.source) == ("second", "first", Source.REGENERATE)
    assert not extract(answers, events[:2], LATE).pairs  # not accepted
    undone = [*events, event(Kind.UNDO, "b", ts=1030)]
    assert not extract(answers, undone, LATE).pairs
    other = [exchange("a", prompt="else", output="first"), answers[1]]
    assert extract(other, events, LATE).counts == {"other_prompt": 1}


def test_a_choice_among_several_counts_once() -> None:
    answers = [exchange(name, output=name) for name in "abc"]
    events = [shown("b", "a", "c", "gone", p=0.25), event(Kind.ACCEPT, "b")]
    found = extract(answers, events, LATE)
    assert {(one.chosen, one.rejected) for one in found.pairs} == {("b", "a"), ("b", "c")}
    assert all(one.source is Source.TOGETHER and one.weight == 4 for one in found.pairs)
    assert math.fsum(one.strength for one in found.pairs) == 1
    assert found.counts == {"together": 2, "alternative_unknown": 1}


def test_a_rival_in_another_arm_loses_only_when_its_time_is_over() -> None:
    answers = [
        exchange("a", output="x", arm="a", user="u"),
        exchange("b", output="y", arm="b", user="v", ts=1500),
    ]
    events = [
        shown("a", p=0.5),
        event(Kind.ACCEPT, "a"),
        shown("b", ts=1501, p=0.04, user="v"),
    ]
    found = extract(answers, events, 1600.0)
    assert not found.pairs and found.counts == {"undecided": 1}
    found = extract(answers, events, 2101.0)
    assert [(one.chosen, one.rejected, one.weight) for one in found.pairs] == [("x", "y", 10.0)]
    assert found.counts == {"apart": 1, "clipped": 1}


def test_what_users_keep_to_themselves_or_nobody_recorded_is_counted() -> None:
    events = [event(Kind.EDIT, consent=False), event(Kind.ACCEPT, "gone")]
    assert extract([exchange()], events, LATE).counts == {"no_consent": 1, "orphan": 1}


def test_extraction_knows_no_order_and_no_repetition() -> None:
    answers = [exchange(name, output=name) for name in "abc"]
    events = [shown("b", "a", "c"), event(Kind.ACCEPT, "b"), event(Kind.EDIT, "a", after="a better a")]
    assert extract(answers, [*events, *events][::-1], LATE) == extract(answers, events, LATE)


def preferred(pairs: tuple[Pair, ...], weighted: bool) -> float:
    """The share of A's wins."""
    wins = {"A": 0.0, "B": 0.0}
    for one in pairs:
        wins[one.chosen] += one.strength * (one.weight if weighted else 1.0)
    return wins["A"] / (wins["A"] + wins["B"])


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(0, 10), st.integers(0, 10))
def test_weights_bring_back_the_true_preference_whatever_stands_first_how_often(
    first: int, ahead: int, behind: int
) -> None:
    """A stands first in ``first`` of 10 and is chosen in ``ahead`` of 10 then, in ``behind`` of 10 otherwise:
    each as often as that, so its share is exactly that of both orders alike."""
    answers, events = [], list[Event]()
    for i, (place, draw) in enumerate((place, draw) for place in range(10) for draw in range(10)):
        p, chosen = (first / 10, ahead) if place < first else (1 - first / 10, behind)
        names = {text: f"{i}{text}" for text in "AB"}
        answers += [exchange(names[text], output=text, user=f"u{i}") for text in "AB"]
        took, left = ("A", "B") if draw < chosen else ("B", "A")
        events += [shown(names[took], names[left], p=p, user=f"u{i}")]
        events += [event(Kind.ACCEPT, names[took], user=f"u{i}")]
    found = extract(answers, events, LATE).pairs
    assert preferred(found, weighted=True) == pytest.approx((ahead + behind) / 20)


def test_weights_bring_back_the_true_preference_between_arms() -> None:
    """Generous users mostly saw A, strict ones B, and both kinds like B more: Simpson's paradox. Accepting A
    has 0.5 and 0.2 (0.35 on average), accepting B 0.7 and 0.4 (0.55)."""
    draw = np.random.default_rng(1)
    answers, events = list[Exchange](), list[Event]()
    for i in range(300):
        generous = draw.random() < 0.5
        p_a = 0.9 if generous else 0.1
        text = "A" if draw.random() < p_a else "B"
        p = p_a if text == "A" else 1 - p_a
        likes = {("A", True): 0.5, ("A", False): 0.2, ("B", True): 0.7, ("B", False): 0.4}
        user = f"u{i}"
        answers.append(exchange(str(i), output=text, arm=text, user=user, propensity=p))
        events.append(shown(str(i), user=user))
        if draw.random() < likes[text, generous]:
            events.append(event(Kind.ACCEPT, str(i), user=user))
    found = extract(answers, events, LATE, clip=1000.0, most=10**6).pairs
    odds_a = 0.35 * 0.45
    odds_b = 0.55 * 0.65
    assert preferred(found, weighted=True) == pytest.approx(odds_a / (odds_a + odds_b), abs=0.12)
    assert preferred(found, weighted=False) > preferred(found, weighted=True) + 0.1


some_pairs = st.lists(
    st.builds(
        lambda user, prompt, ts, ab, weight: pair(
            *ab, user=f"u{user}", prompt=f"p{prompt}", ts=ts, weight=weight
        ),
        st.integers(0, 5),
        st.integers(0, 5),
        st.floats(0, 30),
        st.sampled_from([("a", "b"), ("b", "a"), ("a", "c")]),
        st.floats(0.1, 10),
    ),
    max_size=40,
)


@given(some_pairs, st.floats(0.5, 5))
def test_one_user_weighs_no_more_than_the_cap(pairs: list[Pair], cap: float) -> None:
    kept, counts = deduplicate(pairs, cap)
    for user in {one.user for one in pairs}:
        own = [one for one in kept if one.user == user]
        assert math.fsum(one.importance for one in own) <= cap + 1e-9
        assert len({(one.prompt, frozenset((one.chosen, one.rejected))) for one in own}) == len(own)
    assert counts["repeated"] == len(pairs) - len(kept)
    assert deduplicate(kept, cap * (1 + 1e-9))[0] == kept


def test_who_changes_their_mind_counts_once_by_the_last() -> None:
    kept, counts = deduplicate([pair("a", "b", ts=2.0), pair("b", "a", ts=3.0), pair("a", "b", ts=1.0)], 10)
    assert [(one.chosen, one.rejected) for one in kept] == [("b", "a")] and counts["repeated"] == 2


@given(some_pairs, st.floats(0, 30), st.floats(0, 30), st.booleans(), st.integers(0, 3))
def test_no_user_and_no_prompt_of_the_test_is_in_training(
    pairs: list[Pair], one: float, other: float, users: bool, seed: int
) -> None:
    times = (min(one, other), max(one, other))
    found = split(pairs, times, users=users, seed=seed)
    parts = (found.train, found.validation, found.test)
    for name in ("prompt", "user") if users else ("prompt",):
        homes = [{getattr(each, name) for each in part} for part in parts]
        assert sum(map(len, homes)) == len(set().union(*homes))
    assert sum(map(len, parts)) + sum(found.dropped.values()) == len(pairs)
    assert all(each.ts < times[0] for each in found.train)
    assert all(times[0] <= each.ts < times[1] for each in found.validation)
    assert all(each.ts >= times[1] for each in found.test)


def test_regular_users_empty_no_part() -> None:
    draw = np.random.default_rng(2)
    pairs = [
        pair(user=f"u{draw.integers(40)}", prompt=f"p{i}", ts=float(draw.uniform(0, 30))) for i in range(1000)
    ]
    found = split(pairs, (18, 21))
    assert all((found.train, found.validation, found.test))
    assert len(found.train) > 200 and len(found.test) > 60


def test_a_split_backwards_is_refused() -> None:
    with pytest.raises(ValueError, match="times is"):
        split([], (2, 1))
