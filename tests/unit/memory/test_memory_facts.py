"""Numbers, dates and names of a text, relative dates, importance and what is fitted to a loss."""

from __future__ import annotations

from datetime import date

import pytest

from ostinato.apps.memory.blocks import Kept, MemoryState, Turn
from ostinato.apps.memory.facts import find_dates, find_names, find_numbers, find_unsupported, resolve_dates
from ostinato.apps.memory.importance import score_blocks
from ostinato.apps.memory.keep import Memory, Sizes
from ostinato.apps.memory.refill import build_messages, clean_answer, drop_fillers, make_extract


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1,000.50 or 1000.5", {"1000.5"}),
        ("seven, 7th and 07", {"7"}),
        ("twenty-five, not -25 nor 20-25", {"25", "-25", "20"}),
        ("B12 at 10:30, v2.3.1", {"b12", "10:30", "v2.3.1"}),
        ("2 hours, 3pm, 50%, $20", {"2", "3", "50", "20"}),
        ("nothing here", set()),
    ],
)
def test_numbers_have_one_way_of_writing(text: str, found: set[str]) -> None:
    assert find_numbers(text) == found


def test_dates_are_by_the_calendar() -> None:
    assert find_dates("7 May 2023, May 7th, 2023 and 2023-05-07") == {(2023, 5, 7), (2023, 5, 0)}
    assert find_dates("in May 2023, on the 3rd of June, on Sept. 4") == {(2023, 5, 0), (0, 6, 3), (0, 9, 4)}
    assert find_dates("I may go, version 2023-99-1") == set()


def test_names_are_words_with_capitals_that_begin_no_ordinary_sentence() -> None:
    assert find_names("The dog Rex met Ann's friend. He was from Oslo, I think.") == {"rex", "ann", "oslo"}


@pytest.mark.parametrize(
    ("refill", "original", "found"),
    [
        ("Bob has 8 cars", "bob has seven cars", ["8"]),
        ("Bob has 7 cars in May", "bob has seven cars", ["may"]),
        ("He met Ann on 7 June 2024", "He met Ann on 7 May 2023 and Bob on 9 June 2024", ["2024-6-7"]),
        ("In May 2023 he met Ann", "He met Ann on 7 May 2023", []),
        ("ANN'S car", "the car of Ann", []),
        ("25 cars", "in 2025 a car", ["25"]),
    ],
)
def test_what_an_original_does_not_support(refill: str, original: str, found: list[str]) -> None:
    assert find_unsupported(refill, original) == found


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("yesterday", "7 May 2023"),
        ("Tomorrow morning", "the morning of 9 May 2023"),
        ("the day before yesterday", "6 May 2023"),
        ("last night", "the night of 7 May 2023"),
        ("three days ago", "5 May 2023"),
        ("2 weeks ago", "2 weeks before 8 May 2023"),
        ("a few days ago", "a few days before 8 May 2023"),
        ("in 24 days", "1 June 2023"),
        ("in a month", "one month after 8 May 2023"),
        ("last Friday", "the Friday before 8 May 2023"),
        ("next week", "the week after 8 May 2023"),
        ("this weekend", "the weekend of 8 May 2023"),
        ("last month", "April 2023"),
        ("last year", "2022"),
        ("at last weeks passed", "at last weeks passed"),
    ],
)
def test_relative_dates_become_absolute(text: str, written: str) -> None:
    assert resolve_dates(text, date(2023, 5, 8)) == written
    assert resolve_dates(text, None) == text


def test_turns_of_a_year_and_the_ends_of_the_calendar() -> None:
    assert resolve_dates("last month, next month", date(2023, 1, 1)) == "December 2022, February 2023"
    assert resolve_dates("next month", date(2023, 12, 31)) == "January 2024"
    assert resolve_dates("yesterday", date(1, 1, 1)) == "yesterday"


def test_extracts_take_facts_first_and_keep_what_denies() -> None:
    text = "Oh wow, that is so nice to hear from you. I will not move to Oslo before 2025. How are things?"
    assert make_extract(text, lambda text: len(text) <= 45) == "I will not move to Oslo before 2025."
    assert make_extract(text, lambda text: len(text) <= 14) == "not move Oslo"
    assert make_extract(text, lambda text: False) == "" and make_extract("", lambda text: True) == ""
    assert drop_fillers("I have the 7 of them and that is so nice") == "I the 7 of them and nice"


def test_a_request_to_a_model_has_the_original_and_its_answer_is_cleaned() -> None:
    chat = build_messages("before", "ORIGINAL", "", 20)
    assert "ORIGINAL" in chat[1]["content"] and "14 words" in chat[1]["content"]
    assert "After it" not in chat[1]["content"]
    assert clean_answer('<think>hm</think>\n---\n"Ann is 7."') == "Ann is 7."


def test_importance_puts_facts_before_small_talk() -> None:
    keeper = Memory(sizes=Sizes(budget=4000, recent=200), count=len, originals=Kept())
    state = MemoryState()
    texts = [
        "Hello there, how are things?",
        "I moved to Oslo on 3 May 2021 with Bob.",
        "Nice, great to hear that.",
    ]
    for text in texts * 3:
        state = keeper.append(state, Turn(speaker="user", text=text))
    scores = score_blocks(state, state.blocks[:3])
    assert scores[1] > max(scores[0], scores[2]) and min(scores) > 0
