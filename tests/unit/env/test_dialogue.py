"""Episodes: when they end, what the tools reply, and that tokens are only ever appended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion

from ostinato.env.dialogue import Dialogue
from ostinato.env.tools import calculator, parse_calls, resolve_tools
from ostinato.types import Completion, Prompt, Stop

ASK = Prompt(uid="p", messages=({"role": "user", "content": "2*3?"},))


class Letters:
    """A renderer of one token per character; remembers what it was asked for."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self.turns: list[tuple[list[Any], list[Any], list[int]]] = []

    def prompt(self, prompt: Prompt) -> np.ndarray:
        self.prompts.append(prompt)
        return np.array([1, 2, 3], np.int32)

    def after_turn(
        self, messages: Sequence[Any], new_messages: Sequence[Any], answer: Any = ()
    ) -> np.ndarray:
        self.turns.append((list(messages), list(new_messages), list(answer)))
        return np.array([ord(letter) for message in new_messages for letter in message["content"]], np.int32)


def says(text: str, stop: Stop = Stop.EOS) -> Completion:
    return completion([ord(letter) for letter in text], stop=stop, text=text)


def call(expression: str = "2*3", name: str = "calculator") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def play(
    tools: dict[str, Callable[..., Any]], *texts: str, **options: Any
) -> tuple[list[str | None], Letters]:
    """The replies to each of ``texts``, None where the episode is over."""
    letters = Letters()
    dialogue = Dialogue(ASK, letters, tools, **{"max_turns": 9, **options})
    dialogue.start()

    async def replies() -> list[str | None]:
        contexts = [await dialogue.step(says(text)) for text in texts]
        return [None if context is None else "".join(map(chr, context)) for context in contexts]

    return asyncio.run(replies()), letters


def test_a_single_turn_is_one_answer() -> None:
    letters = Letters()
    dialogue = Dialogue(ASK, letters)
    assert dialogue.start().tolist() == [1, 2, 3]
    assert letters.prompts == [ASK]
    assert asyncio.run(dialogue.step(says(call()))) is None


def test_a_call_is_answered_and_the_answer_without_a_call_ends_it() -> None:
    replies, letters = play({"calculator": calculator}, f"Let me see. {call()}", "It is 6.")
    assert replies == ["6", None]
    (messages, new, answer) = letters.turns[0]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert new == [{"role": "tool", "content": "6"}]
    assert "".join(map(chr, answer)) == f"Let me see. {call()}", "the tokens that were sampled, as they are"


def test_the_history_grows_by_answers_and_replies() -> None:
    _, letters = play({"calculator": calculator}, call("1+1"), call("2+2") + call("3+3"), "done")
    assert [message["role"] for message in letters.turns[1][0]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [message["content"] for message in letters.turns[1][1]] == ["4", "6"]


@pytest.mark.parametrize("stop", [Stop.LENGTH, Stop.ABORT, Stop.ERROR])
def test_half_an_answer_ends_the_episode(stop: Stop) -> None:
    dialogue = Dialogue(ASK, Letters(), {"calculator": calculator}, 3)
    assert asyncio.run(dialogue.step(says(call(), stop))) is None


def test_the_tools_are_described_in_the_system_message() -> None:
    letters = Letters()
    rules = {"role": "system", "content": "Be brief."}
    asked = Prompt(uid="p", messages=(rules, *(ASK.messages or ())), columns={"answer": 6})
    Dialogue(asked, letters, {"calculator": calculator}, 2).start()
    (prompt,) = letters.prompts
    assert prompt.messages is not None
    assert prompt.messages[0]["content"].startswith("Be brief.\n\n")
    assert "calculator(expression: str) -> str: Evaluate an arithmetic" in prompt.messages[0]["content"]
    assert (prompt.messages[1:], prompt.columns) == (ASK.messages, {"answer": 6})


def hangs() -> str:
    time.sleep(5)
    return ""


def breaks() -> str:
    raise RuntimeError("out of ink")


def leaves() -> str:
    raise SystemExit


def stops() -> str:
    raise StopIteration


@pytest.mark.parametrize(
    ("text", "reply", "kind"),
    [
        ("<tool_call>not json</tool_call>", "Error: the call is not JSON", "unreadable"),
        ("<tool_call>[1]</tool_call>", 'Error: the call has no "name"', "unreadable"),
        (
            '<tool_call>{"name": "hangs", "arguments": 3}</tool_call>',
            'Error: "arguments" of hangs',
            "unreadable",
        ),
        (call(name="calc"), "Error: there is no function 'calc', only", "unknown"),
        (
            '<tool_call>{"name": "calculator"}</tool_call>',
            "Error: calculator: missing a required",
            "unreadable",
        ),
        (call("2+"), "Error: calculator: SyntaxError", "raised"),
        ('<tool_call>{"name": "breaks"}</tool_call>', "Error: breaks: RuntimeError: out of ink", "raised"),
        ('<tool_call>{"name": "leaves"}</tool_call>', "Error: leaves: RuntimeError: SystemExit", "raised"),
        ('<tool_call>{"name": "stops"}</tool_call>', "Error: stops: RuntimeError: StopIteration", "raised"),
        ('<tool_call>{"name": "hangs"}</tool_call>', "Error: hangs gave no result in 0.05 s", "timeout"),
        ('<tool_call>{"name": "floods"}</tool_call>', "xxxx", "cut"),
    ],
)
def test_whatever_goes_wrong_is_an_ordinary_reply_and_counted(text: str, reply: str, kind: str) -> None:
    tools: dict[str, Callable[..., Any]] = {
        tool.__name__: tool for tool in (hangs, breaks, leaves, stops, calculator)
    }
    tools["floods"] = lambda: "x" * 10_000_000
    counters: Counter[str] = Counter()
    (said, over), _ = play(tools, text, "done", tool_timeout_s=0.05, counters=counters)
    assert said is not None
    assert said.startswith(reply)
    assert len(said) < 5000
    assert over is None
    assert counters == {"tools/calls": 1, f"tools/{kind}": 1}


def test_a_reply_that_is_no_unicode_is_made_readable_and_counted() -> None:
    """A policy that wrote half of a surrogate pair into a call had it said back, which no tokenizer takes."""
    counters: Counter[str] = Counter()
    text = '<tool_call>{"name": "echo", "arguments": {"text": "a\\ud83d"}}</tool_call>'
    (said, _), _ = play({"echo": lambda text: text}, text, "done", counters=counters)
    assert said == "a\ufffd"
    assert counters == {"tools/calls": 1, "tools/replaced": 1}


def test_a_call_that_is_nested_too_deeply_is_an_ordinary_reply() -> None:
    assert "nested deeper" in parse_calls(f"<tool_call>{'[' * 100_000}")[0].error


def test_a_flood_of_calls_is_cut_and_counted() -> None:
    counters: Counter[str] = Counter()
    (said, _), _ = play({"calculator": calculator}, call() * 50, "done", counters=counters)
    assert said is not None
    assert said.endswith("Error: only the first 8 calls of an answer are made.")
    assert counters == {"tools/calls": 8, "tools/refused": 42}


def test_bad_settings_are_refused() -> None:
    text = Prompt(uid="p", text="2*3?")
    for arguments, sentence in [
        ((ASK, Letters(), {}, 0), "max_turns is 0"),
        ((ASK, Letters(), {"calculator": calculator}, 1), "max_turns is 1"),
        ((text, Letters(), {"calculator": calculator}, 2), "plain text"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            Dialogue(*arguments)


def test_calls_are_read_outside_of_thoughts_and_without_the_stop_string() -> None:
    assert parse_calls(f"<think>{call()}</think> no") == []
    assert parse_calls(f"<think>{call()}") == []
    (first, second) = parse_calls(f"<think>hm</think>{call('1')}{call('2')[: -len('</tool_call>')]}")
    assert [first.arguments, second.arguments] == [{"expression": "1"}, {"expression": "2"}]
    assert parse_calls("<tool_call>" + "[" * 100_000)[0].error


@given(st.text(alphabet='<tool_call>/think{}"name: arguments[]', max_size=200))
@settings(max_examples=50, deadline=None)
def test_any_text_parses(text: str) -> None:
    for found in parse_calls(text):
        assert found.error or found.name


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2*3", "6"), ("-(1 + 2) ** 2", "-9"), ("7 // 2 + 7 % 4", "6"), ("1/4", "0.25"), (" 2e3 ", "2000.0")],
)
def test_calculator(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "2**99999",
        "(-8)**0.5",
        "__import__('os')",
        "x",
        "True",
        "'a'*9",
        "1" * 300,
        "1/0",
        "[1]",
        "",
        "a.b",
    ],
)
def test_calculator_refuses_what_is_no_bounded_arithmetic(expression: str) -> None:
    with pytest.raises((ValueError, ArithmeticError, SyntaxError)):
        calculator(expression)


def test_tools_by_name(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text("def shout(text: str) -> str:\n    return text.upper()\n")
    tools = resolve_tools(["calculator", f"{tmp_path}/mine.py:shout", "json:dumps"])
    assert list(tools) == ["calculator", "shout", "dumps"]
    assert tools["shout"]("a") == "A"
    for spec, sentence in [
        ("calculater", "use 'calculator'"),
        ("no.py:f", "there is no file no.py"),
        ("no_module:f", "there is no module 'no_module'"),
        ("json:nothing", "has no function 'nothing'"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            resolve_tools([spec])
