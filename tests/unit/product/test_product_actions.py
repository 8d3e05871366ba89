"""Every answer is of exactly one action, by its text and its calls alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.apps.product.actions import CALL_MARKS, classify_answer
from ostinato.apps.product.events import Action

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a"],
        },
    },
}


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("", Action.EMPTY),
        (" \n\t", Action.EMPTY),
        ("<think>Well, 2 and 2", Action.EMPTY),
        ("<think>Is it 4? Or 5?</think>", Action.EMPTY),
        ("<think>I cannot know. Is it 4?</think> 4", Action.ANSWER),
        ("The answer is 4.", Action.ANSWER),
        ("Which city do you mean?", Action.QUESTION),
        ("Sure. Which city do you mean?", Action.QUESTION),
        ("Why did it rain? Because of the clouds.", Action.ANSWER),
        ("It rains in Paris. Bring a coat. Anything else?", Action.ANSWER),
        ("```js\nconst a = b ? c : d\n```\nDoes this help?", Action.ANSWER),
        ("I'm sorry, but I can't help with that.", Action.REFUSAL),
        ("I\N{RIGHT SINGLE QUOTATION MARK}m sorry, but I won't.", Action.REFUSAL),
        ("As an AI language model, I cannot do so.", Action.REFUSAL),
        ("I cannot answer. What do you want?", Action.REFUSAL),
        ("Sorry for the delay: it is 4.", Action.ANSWER),
        ("It can't be 5.", Action.ANSWER),
        ("<tool_call>\n{add", Action.INVALID),
    ],
)
def test_texts(text: str, action: Action) -> None:
    assert classify_answer(text) is action


@pytest.mark.parametrize(
    ("name", "arguments", "action"),
    [
        ("add", '{"a": 1}', Action.ANSWER),
        ("add", '{"a": 1, "b": 2}', Action.ANSWER),
        ("add", '{"b": 2}', Action.INVALID),  # what is required is not there
        ("add", '{"a": 1, "c": 2}', Action.INVALID),  # unknown
        ("add", '{"a": 1', Action.INVALID),
        ("add", "[1]", Action.INVALID),
        ("sub", '{"a": 1}', Action.INVALID),  # no such tool
    ],
)
def test_calls(name: str, arguments: str, action: Action) -> None:
    assert classify_answer("", [(name, arguments)], [ADD]) is action
    assert (
        classify_answer("Which one do you mean?", [("add", '{"a": 1}'), (name, arguments)], [ADD]) is action
    )


@given(before=st.text(max_size=20), mark=st.sampled_from(CALL_MARKS), after=st.text(max_size=20))
def test_a_call_that_cannot_be_read_is_never_an_answer(before: str, mark: str, after: str) -> None:
    assert classify_answer(before + mark + after, tools=[ADD]) is Action.INVALID


@given(st.text(), st.lists(st.tuples(st.text(), st.text()), max_size=2))
def test_every_output_has_an_action(text: str, calls: list[tuple[str, str]]) -> None:
    assert classify_answer(text, calls, [ADD]) in Action
