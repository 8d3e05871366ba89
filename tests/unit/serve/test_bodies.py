"""Fields of requests: what is not done is refused by name, in every dialect."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ostinato.apps.serve.anthropic_messages import MessagesBody
from ostinato.apps.serve.bodies import ChatBody, CompletionBody, StrictBody, parse_body
from ostinato.apps.serve.calls import ApiError, Call
from ostinato.apps.serve.openai_responses import ResponsesBody

CHAT = [{"role": "user", "content": "a"}]
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
RESULT = {"type": "tool_result", "tool_use_id": "t"}
NEEDED: dict[type[StrictBody], dict[str, Any]] = {
    ChatBody: {"messages": CHAT},
    CompletionBody: {"prompt": "a"},
    ResponsesBody: {"input": "a"},
    MessagesBody: {"messages": CHAT, "max_tokens": 4},
}
BODIES = [*NEEDED]


def call_of(kind: type[Any], **fields: Any) -> Call:
    body = parse_body(kind, json.dumps({**NEEDED[kind], **fields}).encode())
    return body.to_calls()[0] if isinstance(body, CompletionBody) else body.to_call()


def item(*parts: Any, **more: Any) -> list[Any]:
    return [{"type": "message", "role": "user", "content": [*parts], **more}]


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        *((kind, {"no_such_field": 1}, "no_such_field") for kind in BODIES),
        *((kind, {"chat_template": "{{ messages }}"}, "chat_template") for kind in BODIES),
        *((kind, {"truncate_prompt_tokens": 3}, "truncate_prompt_tokens") for kind in BODIES),
        *((kind, {"include_stop_str_in_output": True}, "include_stop_str_in_output") for kind in BODIES),
        *((kind, {"skip_special_tokens": False}, "skip_special_tokens") for kind in BODIES),
        *((kind, {"allowed_token_ids": [1]}, "allowed_token_ids") for kind in BODIES),
        *((kind, {"repetition_penalty": 1.1}, "repetition_penalty") for kind in BODIES),
        (ChatBody, {"web_search_options": {"a": 1}}, "web_search_options"),
        (ChatBody, {"modalities": ["text", "audio"]}, "modalities"),
        (ChatBody, {"verbosity": "low"}, "verbosity"),
        (ChatBody, {"echo": True}, "echo"),
        (ChatBody, {"add_special_tokens": True}, "add_special_tokens"),
        (ChatBody, {"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage"),
        (ChatBody, {"messages": [CHAT[0] | {"prefix": True}]}, "messages.0.prefix"),
        (ChatBody, {"messages": [CHAT[0] | {"content": [IMAGE]}]}, "messages.0.content.0.type"),
        (CompletionBody, {"suffix": "b"}, "suffix"),
        (CompletionBody, {"best_of": 4}, "best_of"),
        (CompletionBody, {"add_special_tokens": False}, "add_special_tokens"),
        (CompletionBody, {"echo": True, "stream": True}, "stream"),
        (ResponsesBody, {"background": True}, "background"),
        (ResponsesBody, {"conversation": "c"}, "conversation"),
        (ResponsesBody, {"truncation": "auto"}, "truncation"),
        (ResponsesBody, {"include": ["file_search_call.results"]}, "include.0"),
        (ResponsesBody, {"top_logprobs": 2}, "top_logprobs"),
        (ResponsesBody, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (ResponsesBody, {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        (ResponsesBody, {"input": item(IMAGE)}, "input.content.0.type"),
        (ResponsesBody, {"input": item({"type": "input_file", "file_id": "f"})}, "input.content.0.type"),
        (ResponsesBody, {"input": item({"type": "new", "text": "a"})}, "input.content.0.type"),
        (
            ResponsesBody,
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [IMAGE]}]},
            "input.output.0.type",
        ),
        (MessagesBody, {"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.type"),
        (MessagesBody, {"context_management": {"edits": [{}]}}, "context_management"),
        (MessagesBody, {"system": [{"type": "image"}]}, "messages"),
        (
            MessagesBody,
            {"messages": [{"role": "user", "content": [RESULT | {"content": [{"type": "image"}]}]}]},
            "messages",
        ),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    kind: type[Any], fields: dict[str, Any], param: str
) -> None:
    """They were ignored, with 200: chat_template_kwargs and others did nothing, and of a question with a
    picture the model saw the text alone."""
    with pytest.raises(ApiError) as refused:
        call_of(kind, **fields)
    assert refused.value.status == 400 and (refused.value.param or "").startswith(param)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *((kind, {"user": "u", "metadata": {"a": "b"}, "store": False}) for kind in BODIES),
        *((kind, {"no_such_field": None, "logit_bias": {}, "frequency_penalty": 0}) for kind in BODIES),
        *((kind, {"skip_special_tokens": True, "repetition_penalty": 1.0}) for kind in BODIES),
        (ChatBody, dict.fromkeys(("n", "min_tokens", "ignore_eos", "add_generation_prompt", "model"))),
        (ChatBody, {"modalities": ["text"], "verbosity": "medium", "best_of": 1, "echo": False}),
        (ChatBody, {"stream_options": {"include_obfuscation": False}}),
        (ChatBody, {"messages": [CHAT[0] | {"refusal": None, "audio": None, "annotations": []}]}),
        (ResponsesBody, {"truncation": "disabled", "include": ["reasoning.encrypted_content"]}),
        (ResponsesBody, {"input": item({"type": "input_text", "text": "a"}, id="m", status="completed")}),
        (MessagesBody, {"service_tier": "auto", "betas": ["x"], "thinking": {"type": "disabled"}}),
    ],
)
def test_what_has_no_effect_is_taken(kind: type[Any], fields: dict[str, Any]) -> None:
    assert call_of(kind, **fields).stop == ()


def test_a_last_message_without_blocks_continues_nothing() -> None:
    """The prompt ended inside the user's words, which the model then went on with."""
    user = {"role": "user", "content": "a"}
    asked = [
        call_of(MessagesBody, messages=[user, *more]) for more in ([], [{"role": "assistant", "content": []}])
    ]
    assert asked[0].messages == asked[1].messages and not asked[1].continue_final
    begun = call_of(MessagesBody, messages=[user, {"role": "assistant", "content": "It"}])
    assert begun.continue_final
    with pytest.raises(ApiError, match="role"):
        call_of(MessagesBody, messages=[{"role": "banana", "content": "a"}])


def test_parts_and_names_of_messages_reach_the_template() -> None:
    """The text of a refusal, names, ids of calls and earlier thoughts were dropped."""
    messages: list[Any] = [
        {"role": "user", "name": "ann", "content": "a"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning_content": "hm"},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    call = call_of(ChatBody, messages=messages)
    assert call.messages == (
        {"role": "user", "content": "a", "name": "ann"},
        {"role": "assistant", "content": "no", "reasoning_content": "hm"},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    )
    thought = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "b"}]
    call = call_of(MessagesBody, messages=[*CHAT, {"role": "assistant", "content": thought}])
    assert call.messages and call.messages[1] == {
        "role": "assistant",
        "content": "b",
        "reasoning_content": "hm",
    }
    assert call.continue_final and not call_of(MessagesBody).continue_final
