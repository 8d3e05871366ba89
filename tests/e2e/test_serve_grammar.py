"""Answers of a grammar: JSON, JSON of a schema, forced tool calls; and schemas that are refused in time."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from qwen_like import save_qwen_like
from serving import At, server

from ostinato.apps.serve.calls import ApiError
from ostinato.apps.serve.grammar import Guides, close_objects, make_call_grammar, make_json_grammar

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

MODEL = "seed-moe"
QUESTION: list[Any] = [{"role": "user", "content": "Compute: 23 + 45"}]
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 999}, "y": {"enum": ["a", "b"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
ARGUMENTS = {
    key: value for key, value in POINT.items() if key != "additionalProperties"
}  # as frameworks write
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": ARGUMENTS}}
    for name in ("add", "move")
]


@pytest.fixture(scope="module")
def at() -> Iterator[At]:
    with server(sequences=300) as running:
        yield running


@pytest.fixture(scope="module")
def client(at: At) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{at.url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def chat(client: Any, **fields: Any) -> Any:
    defaults = {"model": MODEL, "messages": QUESTION, "max_tokens": 300, "seed": 5}
    return client.chat.completions.create(**{**defaults, **fields})


def is_point(text: str) -> bool:
    point = json.loads(text)
    return set(point) == {"x", "y"} and type(point["x"]) is int and point["y"] in ("a", "b")


def test_json_of_a_schema_comes_whole_and_streamed_the_same(client: Any) -> None:
    whole = chat(client, response_format=FORMAT, n=4, logprobs=True, top_logprobs=3)
    texts: dict[int, str] = dict.fromkeys(range(4), "")
    for chunk in chat(client, response_format=FORMAT, n=4, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    for choice in whole.choices:
        assert choice.finish_reason == "stop" and is_point(choice.message.content)
        assert texts[choice.index] == choice.message.content
        for entry in choice.logprobs.content:  # of what the grammar left: a token that is forced has 0
            assert entry.logprob - 1e-6 <= entry.top_logprobs[0].logprob <= 1e-6
    assert any(entry.logprob == 0 for entry in whole.choices[0].logprobs.content)
    greedy = chat(client, response_format=FORMAT, temperature=0).choices[0]
    assert greedy.finish_reason == "length" or is_point(greedy.message.content)


def test_an_answer_of_a_grammar_is_the_same_among_others_which_are_untouched(client: Any) -> None:
    free = chat(client, max_tokens=40, logprobs=True).choices[0]
    alone = chat(client, response_format=FORMAT, logprobs=True).choices[0]
    with ThreadPoolExecutor(12) as pool:
        both = [
            pool.submit(chat, client, logprobs=True, **fields)
            for _ in range(6)
            for fields in ({"max_tokens": 40}, {"response_format": FORMAT})
        ]
        for n, one in enumerate(both):
            assert one.result().choices[0] == (alone if n % 2 else free)


@pytest.mark.slow
def test_an_object_the_text_format_and_a_completion(client: Any) -> None:
    choices = chat(client, response_format={"type": "json_object"}, n=16, max_tokens=600).choices
    whole = [one.message.content for one in choices if one.finish_reason == "stop"]  # an object may be large
    assert whole and all(isinstance(json.loads(text), dict) for text in whole)
    text: Any = {"format": {"type": "json_schema", "name": "p", "schema": POINT, "strict": True}}
    output = client.responses.create(
        model=MODEL, input="1+1=", text=text, max_output_tokens=600, extra_body={"seed": 3}
    )
    assert is_point(output.output_text)
    plain = client.completions.create(
        model=MODEL, prompt="1+1=", max_tokens=600, extra_body={"response_format": FORMAT}
    )
    assert is_point(plain.choices[0].text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}])
def test_a_forced_tool_is_called_with_arguments_of_its_schema(client: Any, choice: Any) -> None:
    (output,) = chat(client, tools=TOOLS, tool_choice=choice).choices
    (call,) = output.message.tool_calls
    assert output.finish_reason == "tool_calls" and is_point(call.function.arguments)
    assert call.function.name in (("add", "move") if choice == "required" else ("move",))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[At]:
    with server(str(save_qwen_like(tmp_path_factory.mktemp("qwen")))) as running:
        yield running


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "move"}}])
def test_a_forced_call_has_the_tokens_of_its_tags(qwen: At, choice: Any) -> None:
    """Where <tool_call> is an added token (Qwen), the grammar spelled it, llguidance forced the token and
    then refused it: every forced call was 400 grammar_refused."""
    with openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        (output,) = chat(
            client,
            model="",
            tools=TOOLS,
            tool_choice=choice,
            logprobs=True,
            extra_body={"return_token_ids": True},
        ).choices
    (call,) = output.message.tool_calls
    assert output.finish_reason == "tool_calls" and is_point(call.function.arguments)
    renderer = qwen.served.service.renderer
    tags = [renderer.tokenizer.token_to_id(tag) for tag in ("<tool_call>", "</tool_call>")]
    assert [token for token in output.token_ids if token in tags] == tags
    assert output.token_ids[0] == tags[0] and output.logprobs.content[0].logprob == 0


def test_a_schema_may_hold_the_text_of_an_added_token(qwen: At) -> None:
    """Text that a schema forces was tokenised into added tokens, which are not that text."""
    texts = ["<think>", "a<|im_end|>b", "<tool_call>"]
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": texts}}}
    with openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        for choice in chat(client, model="", response_format=form, n=4).choices:
            assert json.loads(choice.message.content) in texts


def test_messages_force_a_tool_too(at: At) -> None:
    anthropic = pytest.importorskip("anthropic")
    tools: Any = [{"name": "add", "description": "The sum.", "input_schema": POINT}]
    with anthropic.Anthropic(base_url=at.url, api_key="none", max_retries=0) as client:
        for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
            output = client.messages.create(
                model=MODEL, messages=QUESTION, max_tokens=300, tools=tools, tool_choice=choice
            )
            (block,) = [block for block in output.content if block.type == "tool_use"]
            assert output.stop_reason == "tool_use" and is_point(json.dumps(block.input))


REFUSED: list[tuple[Any, str]] = [
    ({"enum": [f"{k:08d}" for k in range(9000)]}, "this server takes 65536"),
    ({"type": "integer", "multipleOf": 999983}, "takes over 2 s"),  # minutes to build
    ({"allOf": [{"type": "string", "pattern": f".*a.{{{k}}}b.*"} for k in range(12)]}, "cannot be enforced"),
    ({"type": "object", "properties": {f"p{k}": {"type": "string"} for k in range(1200)}}, "max is 2000"),
    ({"not": {"type": "string"}}, "cannot be enforced"),
    ({"$ref": "http://example.com/schema.json"}, "cannot be enforced"),
    ({"$ref": "#"}, "cannot be enforced"),
    ({"type": "string", "pattern": "(?=a)b"}, "cannot be enforced"),
]


@pytest.mark.parametrize(("schema", "sentence"), REFUSED)
def test_what_cannot_be_enforced_in_time_is_refused(client: Any, schema: Any, sentence: str) -> None:
    body = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=sentence):
        chat(client, response_format=body)
    assert chat(client, max_tokens=3).choices[0].message.content is not None  # others are answered meanwhile


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT, "extra_body": {"ignore_eos": True}},
        {"response_format": FORMAT, "extra_body": {"min_tokens": 5}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": TOOLS, "tool_choice": "sometimes"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}},
    ],
)
def test_what_contradicts_a_grammar_is_refused(client: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, **fields)


def test_without_the_library_the_extra_is_named(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    guides = Guides(at.served.service.renderer, at.served.decoder.config.vocab_size)
    with pytest.raises(ApiError, match=r'pip install "ostinato\[grammar\]"'):
        asyncio.run(guides.make_guides(make_json_grammar({"type": "json_object"}, "response_format"), 1))


def test_a_guide_leaves_what_its_grammar_may_go_on_with_and_an_end_only_where_it_may_end(at: At) -> None:
    """A random walk over what it leaves: always JSON of the schema, whatever is drawn."""
    renderer, vocab_size = at.served.service.renderer, at.served.decoder.config.vocab_size
    guides = Guides(renderer, vocab_size)
    grammars = [make_json_grammar(FORMAT, "response_format"), make_call_grammar("required", TOOLS)]
    for grammar in grammars:
        for seed, guide in enumerate(asyncio.run(guides.make_guides(grammar, 8))):
            rng, answer = np.random.default_rng(seed), [0] * 0
            while not answer or answer[-1] not in renderer.stop_tokens:
                free = np.flatnonzero(~guide(np.array(answer, np.int32)))
                answer.append(int(rng.choice(free)))
                assert len(answer) < 5000
            text = renderer.decode(answer[:-1])
            if grammar is grammars[0]:
                assert is_point(text)
            else:
                call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
                assert call["name"] in ("add", "move") and is_point(json.dumps(call["arguments"]))


def test_a_tool_takes_the_arguments_that_it_names_and_no_others() -> None:
    """An untrained policy wrote an argument of its own into the open object that smolagents describes, which
    refused the call."""
    inner = {"type": "object", "properties": {"allOf": {"type": "string"}}}
    closed = close_objects({"type": "object", "properties": {"a": {"type": "array", "items": inner}}})
    assert closed["additionalProperties"] is False
    items = closed["properties"]["a"]["items"]
    assert items == {**inner, "additionalProperties": False}  # a property's name is no word of the schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},  # any arguments
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]},  # each would forbid the other's
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
    ],
)
def test_an_object_that_says_what_else_it_takes_stays_as_it_is(schema: dict[str, Any]) -> None:
    assert close_objects(schema) == schema
