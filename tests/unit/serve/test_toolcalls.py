"""Tools in prompts, calls in answers, and text that a stream must not show too early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ostinato
from ostinato.env.tools import for_template
from ostinato.render import Renderer
from ostinato.serve.bodies import ChatBody, parsed
from ostinato.serve.calls import ApiError
from ostinato.serve.toolcalls import TextStream, read_calls

FOLDER = Path(ostinato.__file__).parent / "assets" / "seed-moe"
RENDERER = Renderer(FOLDER)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 2?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "content": "3", "tool_call_id": "x"},
]


def test_a_template_without_tools_gets_them_in_the_system_message() -> None:
    chat, native = for_template(RENDERER, CHAT, [ADD])
    assert not native and [message["role"] for message in chat] == ["system", "user", "assistant", "tool"]
    assert chat[0]["content"].startswith("Be brief.") and '"name": "add"' in chat[0]["content"]
    assert read_calls(chat[2]["content"], "n")[1][0].arguments == '{"a": 1}'  # as the policy itself writes it
    assert CALL in RENDERER.chat_text(chat)


def test_a_template_with_tools_writes_them_itself(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
        "{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.arguments.a }}){% endfor %}"
        "{% endfor %}"
    )
    own = Renderer(tmp_path)
    chat, native = for_template(own, CHAT, [ADD])
    text = own.chat_text(chat, tools=native)
    assert text == "[add]<system>Be brief.<user>1 + 2?<assistant>(1)<tool>3"


def test_calls_are_read_in_order_and_what_is_none_stays_text() -> None:
    content, calls = read_calls(f"I add. {CALL}\n{CALL}", "k")
    assert content == "I add." and [(c.id, c.name, json.loads(c.arguments)) for c in calls] == [
        ("call_k0", "add", {"a": 1}),
        ("call_k1", "add", {"a": 1}),
    ]
    assert read_calls("<tool_call>{not JSON", "k") == ("<tool_call>{not JSON", ())
    assert read_calls("3", "k") == ("3", ())


@settings(deadline=None)
@given(st.lists(st.sampled_from(["12", " + ", "STOP", "ST", "O", "\n", "<tool", "_call>", "x"]), max_size=12))
def test_a_stream_shows_a_prefix_of_the_answer_and_never_a_part_of_a_stop(parts: list[str]) -> None:
    """Whatever the tokens, what was shown and the rest are the answer."""
    text = "".join(parts)
    for stop, tools in ((("STOP",), False), ((), True)):
        stream = TextStream(RENDERER, stop, tools=tools)
        shown = "".join(stream.push([token]) for token in RENDERER.encode(text).tolist())
        final = text.partition("STOP")[0] if stop else text.partition("<tool_call>")[0].rstrip()
        if tools and "<tool_call>" not in text:
            final = text
        assert final.startswith(shown) and shown + stream.rest(final) == final


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"messages": 3}, "messages: Input should be a valid list"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role: Input should be 'system'"),
        ({"messages": [{"role": "user"}], "stop": [""]}, "stop"),
        ({"messages": [{"role": "user"}], "logit_bias": {"5": 1}}, "logit_bias is not supported"),
        ({"messages": [{"role": "user"}], "max_tokens": 0}, "max_tokens: Input should be greater"),
    ],
)
def test_a_wrong_body_is_named_by_its_field(body: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(ChatBody, json.dumps(body).encode())
    assert str(refused.value).startswith(sentence) and refused.value.status == 400


def test_fields_without_effect_are_taken() -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "user": "u",
        "store": True,
    }
    call = parsed(
        ChatBody, json.dumps(body | {"frequency_penalty": 0, "logit_bias": None}).encode()
    ).to_call()
    assert call.messages == ({"role": "user", "content": "a"},)
