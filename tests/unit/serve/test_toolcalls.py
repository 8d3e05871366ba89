"""Tools in prompts, calls in answers, and text that a stream must not show too early."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nouns import completion

import ostinato
from ostinato.apps.serve.bodies import ChatBody, parse_body
from ostinato.apps.serve.calls import ApiError
from ostinato.apps.serve.service import Limits, Service
from ostinato.apps.serve.toolcalls import TextStream, read_calls
from ostinato.env.custom import EnvEpisode
from ostinato.env.dialogue import Dialogue
from ostinato.env.tools import make_schema
from ostinato.render import Renderer
from ostinato.types import Prompt, Stop

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


# The forms of Qwen2.5's template.
WITH_TOOLS = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% elif not (loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def with_template(folder: Path, template: str) -> Renderer:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((FOLDER / name).read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return Renderer(folder)


def test_a_template_without_tools_gets_them_in_the_system_message() -> None:
    text = RENDERER.chat_text(CHAT, tools=[ADD])
    assert not RENDERER.takes_tools and text.index("Be brief.") < text.index('{"name": "add", "param')
    assert (
        CALL in text and read_calls(CALL, "n")[1][0].arguments == '{"a": 1}'
    )  # as the policy itself writes it


def test_a_template_with_tools_writes_them_itself(tmp_path: Path) -> None:
    own = with_template(tmp_path, WITH_TOOLS)
    text = own.chat_text(CHAT, tools=[ADD])
    assert own.takes_tools and text.count("Be brief.") == 1 and "# Tools" in text and json.dumps(ADD) in text
    assert CALL in text and "<tool_response>3</tool_response>" in text


def test_a_template_whose_calls_are_not_read_is_given_tools_in_the_system_message(tmp_path: Path) -> None:
    """Llama's tells the model to write calls without tags, which no episode would have read."""
    own = with_template(tmp_path, WITH_TOOLS.replace("<tool_call>", "").replace("</tool_call>", ""))
    text = own.chat_text(CHAT, tools=[ADD])
    assert not own.takes_tools and "# Tools" not in text and CALL in text


def test_a_template_that_writes_no_calls_gets_them_in_the_answers(tmp_path: Path) -> None:
    own = with_template(
        tmp_path, "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    text = own.chat_text(CHAT, tools=[ADD])
    assert text == f"{json.dumps([ADD])}<system>Be brief.<user>1 + 2?<assistant>{CALL}<tool>3"


def price(thing: str) -> int:
    """The price of a thing."""
    return len(thing)


class Shop:
    tools = ("price",)
    price = staticmethod(price)

    def reset(self, *, seed: int, options: Any) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}


@pytest.mark.parametrize("template", [WITH_TOOLS, None])
@pytest.mark.parametrize("system", [True, False])
def test_training_and_serving_have_one_prompt_for_one_tool(
    tmp_path: Path, template: str | None, system: bool
) -> None:
    """``task.tools`` and ``task.env`` trained on a text of our own, and ``serve`` gave the template's."""
    renderer = with_template(tmp_path, template) if template else RENDERER
    messages = CHAT[0 if system else 1 : 2]
    body = {"messages": messages, "tools": [make_schema("price", price)]}
    requested = parse_body(ChatBody, json.dumps(body).encode()).to_call()
    service: Any = Service.__new__(Service)  # of which a prompt needs these two alone
    service.renderer, service.limits = renderer, Limits(context=10_000, vocab_size=renderer.vocab_size)
    served = service.make_prompt(requested).tolist()
    prompt = Prompt(uid="p", messages=tuple(messages))
    dialogue = Dialogue(prompt, renderer, {"price": price}, 2)
    assert dialogue.start().tolist() == served
    episode = EnvEpisode(prompt, renderer, Shop, 2)
    asyncio.run(episode.open())
    assert episode.start().tolist() == served
    # the reply to a call, behind the tokens that were sampled
    answer = '<tool_call>\n{"name": "price", "arguments": {"thing": "tea"}}\n</tool_call>'
    tokens = renderer.encode(answer)
    reply = asyncio.run(dialogue.step(completion(tokens.tolist(), stop=Stop.EOS, text=answer)))
    called = {"name": "price", "arguments": '{"thing": "tea"}'}
    chat = [
        *messages,
        {"role": "assistant", "tool_calls": [{"id": "x", "type": "function", "function": called}]},
        {"role": "tool", "content": "3", "tool_call_id": "x"},
    ]
    again = parse_body(ChatBody, json.dumps({**body, "messages": chat}).encode()).to_call()
    assert isinstance(reply, np.ndarray)
    assert [*served, *tokens, *reply] == service.make_prompt(again).tolist()


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
        assert final.startswith(shown) and shown + stream.get_rest(final) == final


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
        parse_body(ChatBody, json.dumps(body).encode())
    assert str(refused.value).startswith(sentence) and refused.value.status == 400


def test_fields_without_effect_are_taken() -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "user": "u",
        "store": True,
    }
    call = parse_body(
        ChatBody, json.dumps(body | {"frequency_penalty": 0, "logit_bias": None}).encode()
    ).to_call()
    assert call.messages == ({"role": "user", "content": "a"},)
