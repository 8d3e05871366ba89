"""Rewards of feedback: everything has a worth, failing never pays, windows close, one user moves little."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from product_rows import event, exchange

from ostinato.apps.product.events import Action, Event, Kind
from ostinato.apps.product.rewards import (
    Standing,
    Table,
    break_even,
    parse_table,
    read_table,
    reward,
    rewards,
)
from ostinato.apps.product.texts import count_edits, measure_similarity, only_adds, split_words

FILE = Path(__file__).parents[3] / "recipes" / "product" / "rewards.toml"
TEXT = FILE.read_text()
TABLE = read_table(FILE)
LATE = 1e6

kinds = st.sampled_from(list(Kind))
sayings = st.lists(
    st.builds(
        lambda kind, ts, user, value, after: event(
            kind,
            ts=ts,
            user=user,
            **({"value": value} if kind in (Kind.RATING, Kind.DWELL) else {}),
            **({"after": after} if kind is Kind.EDIT else {}),
        ),
        kinds,
        st.floats(950, 3000),
        st.sampled_from(["u", "v", "w"]),
        st.floats(-1, 1),
        st.sampled_from(["one two three four", "one", "nine", "one two three four five"]),
    ),
    max_size=8,
)


def changed(line: str, by: str) -> str:
    assert line in TEXT
    return TEXT.replace(line, by)


def value_of(events: Sequence[Event], action: Action = Action.ANSWER, table: Table = TABLE) -> float | None:
    return reward(exchange(action=action), events, LATE, table).value


@given(sayings, st.sampled_from(list(Action)))
def test_everything_that_can_happen_has_a_reward_or_an_abstention(
    events: list[Event], action: Action
) -> None:
    found = reward(exchange(action=action), events, LATE, TABLE)
    if found.standing is Standing.ABSTAINED:
        assert found.value is None and any(one.kind is Kind.CANCEL for one in events)
        assert action is Action.ANSWER
    else:
        assert found.standing is Standing.DECIDED and found.value is not None
        low = TABLE.action[action].weight
        assert low + TABLE.floor - 1e-9 <= found.value <= low + TABLE.ceiling + 1e-9


@given(sayings, sayings, st.sampled_from([Action.QUESTION, Action.INVALID, Action.EMPTY]))
def test_failing_and_asking_back_never_score_above_an_honest_attempt(
    one: list[Event], other: list[Event], action: Action
) -> None:
    """Whatever users say to either. Composer's policy had found broken calls, which cost nothing, and
    questions, which nobody edits."""
    honest = value_of(other)
    assert (value_of(one, action) or 0.0) <= (0.0 if honest is None else honest) + 1e-9


@given(sayings, st.sampled_from(list(Action)))
def test_no_action_is_worth_more_than_an_answer_with_the_same_feedback(
    events: list[Event], action: Action
) -> None:
    honest, other = value_of(events), value_of(events, action)
    if honest is not None and other is not None:
        assert other <= honest + 1e-9


@given(st.floats(0, 1))
def test_an_answer_pays_exactly_above_the_break_even(p: float) -> None:
    """Cursor's +0.75, -0.25 and 0 for silence: shown if and only if accepted more often than in 1 of 4."""
    accepted, rejected = value_of([event(Kind.ACCEPT)]), value_of([event(Kind.REJECT)])
    assert accepted is not None and rejected is not None and value_of([]) == 0
    assert break_even(TABLE) == 0.25
    if abs(p - 0.25) > 1e-9:
        assert (p * accepted + (1 - p) * rejected > 0) == (p > 0.25)


def test_values_by_hand() -> None:
    kept = measure_similarity("one two three four", "one two three five")
    assert kept == 0.75
    assert value_of([event(Kind.EDIT)]) == pytest.approx(0.5 * (kept - 0.5))
    assert value_of([event(Kind.RATING, value=-1.0)]) == -0.25  # the floor
    assert value_of(
        [event(Kind.RATING, value=-1.0), event(Kind.RATING, ts=1002, value=0.2)]
    ) == pytest.approx(0.15)  # the last of a kind
    assert value_of([event(Kind.ACCEPT), event(Kind.TASK_DONE)]) == 1  # the ceiling
    assert value_of([event(Kind.ACCEPT)], Action.INVALID) == -0.5  # no credit
    found = reward(exchange(), [event(Kind.ACCEPT), event(Kind.UNDO)], LATE, TABLE)
    assert found.terms == {"action:answer": 0, "accept": 0.75, "undo": -0.25} and found.value == 0.5


@given(sayings, st.randoms())
def test_repeated_and_reordered_events_change_nothing(events: list[Event], order: object) -> None:
    twice = [*events, *events]
    order.shuffle(twice)  # type: ignore[attr-defined]
    assert value_of(events) == value_of(twice)


@given(sayings, st.floats(900, 3000))
def test_nothing_is_decided_before_the_longest_horizon_has_closed(events: list[Event], now: float) -> None:
    closes = 1000 + TABLE.horizon_s + TABLE.lateness_s
    found = reward(exchange(), events, now, TABLE)
    assert found.closes == closes
    assert (found.standing is Standing.UNDECIDED) == (now < closes)
    if now >= closes:  # and from there on it stays, whatever comes later
        late = event(Kind.REJECT, ts=closes + 1, user="late")
        assert reward(exchange(), [*events, late], LATE, TABLE).value == found.value


def test_what_is_outside_of_its_horizon_or_without_consent_is_counted() -> None:
    events = [
        event(Kind.ACCEPT, ts=1601),
        event(Kind.REJECT, ts=900),
        event(Kind.UNDO, consent=False),
        event(Kind.COPY, ts=970),  # a clock that is behind
    ]
    found = reward(exchange(), events, LATE, TABLE)
    assert (found.value, found.ignored) == (0.25, 3)


def test_an_abstention_is_its_users_own_and_saves_no_failure() -> None:
    gone = event(Kind.CANCEL)
    assert reward(exchange(), [gone], LATE, TABLE).standing is Standing.ABSTAINED
    assert value_of([gone, event(Kind.REJECT)]) is None
    assert value_of([gone, event(Kind.ACCEPT, user="v")]) == 0.75
    assert value_of([gone], Action.INVALID) == -0.5


def test_an_event_of_another_answer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is of other, not of r"):
        reward(exchange(), [event(Kind.ACCEPT, "other")], LATE, TABLE)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 4), kinds, st.sampled_from(["u", "v", "w"])), max_size=40),
    st.floats(0.1, 2.0),
)
def test_one_user_cannot_move_the_sum_beyond_the_cap(votes: list[tuple[int, Kind, str]], cap: float) -> None:
    table = TABLE.model_copy(update={"cap": cap})
    answers = [exchange(f"r{i}", action=list(Action)[i]) for i in range(5)]
    events = [event(kind, f"r{i}", user=user) for i, kind, user in votes]

    def total(events: list[Event]) -> float:
        found = rewards(answers, events, LATE, table).outcomes
        return math.fsum(one.value or 0.0 for one in found.values())

    without = total([one for one in events if one.user != "u"])
    assert abs(total(events) - without) <= cap + 1e-9


def test_caps_scale_a_user_down_in_their_window_alone() -> None:
    day = TABLE.cap_window_s
    answers = [exchange(f"r{i}", ts=day + i) for i in range(40)] + [exchange("next", ts=2 * day)]
    events = [event(Kind.ACCEPT, one.response_id, ts=one.ts + 1) for one in answers]
    found = rewards(answers, [*events, event(Kind.ACCEPT, "nowhere")], 1e7, TABLE)
    assert found.orphans == 1 and found.capped == 1
    values = [found.outcomes[f"r{i}"].value for i in range(40)]
    assert values == pytest.approx([0.5] * 40)  # 40 x 0.75 = 30, scaled to 20
    assert found.outcomes["next"].value == 0.75


def test_without_a_cap_the_account_is_the_single_rewards() -> None:
    answers = [exchange("a"), exchange("b", action=Action.QUESTION)]
    events = [event(Kind.ACCEPT, "a"), event(Kind.REJECT, "b")]
    found = rewards(answers, events, LATE, TABLE)
    for one in answers:
        own = [each for each in events if each.response_id == one.response_id]
        assert found.outcomes[one.response_id] == reward(one, own, LATE, TABLE)


@pytest.mark.parametrize("name", [*(f"{one}" for one in Kind), *(f"{one}" for one in Action)])
def test_a_missing_class_is_refused_by_name(name: str) -> None:
    text = re.sub(rf"(?m)^{name} = .*\n", "", TEXT)
    with pytest.raises(ValueError, match=rf"\.{name} is missing"):
        parse_table(text)


@pytest.mark.parametrize(
    ("line", "by", "says"),
    [
        (
            "invalid = {weight = -0.5}",
            "invalid = {weight = -0.1}",
            "action.invalid.weight is -0.1, above -0.25",
        ),
        ("question = {weight = -0.25}", "question = {weight = 0}", "action.question.weight is 0, above"),
        ("empty = {weight = -0.5}", "empty = {weight = -0.5, credit = true}", "action.empty.credit is true"),
        ("refusal = {weight = -0.1,", "refusal = {weight = 0.1,", "action.refusal.weight is 0.1, above 0"),
        ("answer = {weight = 0,", "answer = {weight = 0.1,", "silence is worth 0"),
        ("shown = {weight = 0}", "shown = {weight = 0.1}", "silence is worth 0"),
        ("return_visit = {weight = 0}", "return_visit = {weight = 0.1}", "returning is no reward"),
        ("undo = {weight = -0.25,", "undo = {weight = 0.25,", "event.undo.weight is 0.25; positive"),
        ("copy = {weight = 0.25,", "copy = {weight = -0.25,", "event.copy.weight is -0.25; negative"),
        ("break_even = 0.25", "break_even = 0.5", "break_even is 0.5, where .* make it 0.25"),
        ("cap = 20.0", "cap = inf", "cap is inf"),
        ("cap = 20.0", "cup = 20.0", r"cup is not a key .*cap\?"),
        ("comment = {weight = 0}", "comment = {wait = 0}", "event.comment"),
        ("dwell = {weight = 0}", "dwell = {weight = 0, zero_at = 0.5}", "only an edit has one"),
        ("comment = {weight = 0}", "comment = {weight = 0}\nwink = {weight = 0}", "event.wink"),
        ("floor = -0.25", "floor = ", "(?i)invalid value"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused_in_a_sentence(line: str, by: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        parse_table(changed(line, by), "mine.toml")
    assert str(caught.value).startswith("mine.toml: ") and "\n" not in str(caught.value)


def test_a_table_is_named_with_its_contents() -> None:
    other = parse_table(changed("ceiling = 1.0", "ceiling = 0.9"))
    assert TABLE.revision.startswith("chat-1-") and other.revision != TABLE.revision
    assert parse_table(TEXT).revision == TABLE.revision


def slow_distance(a: list[str], b: list[str]) -> int:
    if not a or not b:
        return len(a) + len(b)
    if a[-1] == b[-1]:
        return slow_distance(a[:-1], b[:-1])
    return 1 + min(slow_distance(a[:-1], b), slow_distance(a, b[:-1]), slow_distance(a[:-1], b[:-1]))


short = st.lists(st.sampled_from("abc"), max_size=5)


@given(short, short)
def test_distance_equals_its_slow_twin(a: list[str], b: list[str]) -> None:
    assert count_edits(a, b) == slow_distance(a, b)


@given(short, short)
def test_additions_keep_every_word(a: list[str], b: list[str]) -> None:
    """An addition is what the distance explains by insertions alone."""
    one, other = " ".join(a), " ".join(b)
    inserted = len(b) - len(a)
    assert only_adds(one, other) == (inserted > 0 and count_edits(a, b) == inserted)
    assert split_words(one) == a
