"""Anthropic's messages API: the parts that agents use."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ostinato.apps.serve.bodies import ACCOUNT_FIELDS, MAX_MESSAGES, MAX_TOOLS, StrictBody, check_body
from ostinato.apps.serve.calls import Answer, ApiError, Call, Piece, Usage
from ostinato.apps.serve.grammar import make_call_grammar
from ostinato.apps.serve.openai_chat import format_event
from ostinato.types import Stop

_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class Block(StrictBody):
    """A part of a message."""

    harmless = frozenset({"cache_control", "citations", "caller", "is_error", "signature"})
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] | None = None
    tool_use_id: str = ""
    content: Any = None


class _Message(StrictBody):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Thinking(StrictBody):
    """``thinking``. A budget of tokens is refused, as this server cannot keep it."""

    harmless = frozenset({"display"})
    type: Literal["disabled", "adaptive"]


class MessagesBody(StrictBody):
    """POST /v1/messages and /v1/messages/count_tokens."""

    harmless = ACCOUNT_FIELDS | {"betas", "inference_geo"}
    model: str = ""
    messages: Annotated[list[_Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    stream: bool | None = False
    seed: int | None = None  # our addition, for reproducible answers

    def to_call(self) -> Call:
        choice = (self.tool_choice or {}).get("type", "auto")
        tool_choice = {"any": "required", "tool": self.tool_choice}.get(choice, choice)
        tools, thinking = tuple(_convert_tool(tool) for tool in self.tools or ()), self.thinking
        return Call(
            model=self.model,
            messages=tuple(self._convert_messages()),
            tools=tools,
            tool_choice="none" if choice == "none" else "auto",
            parallel_calls=not (self.tool_choice or {}).get("disable_parallel_tool_use"),
            template_kwargs={} if thinking is None else {"enable_thinking": thinking.type == "adaptive"},
            continue_final=self._continues_answer(),
            grammar=make_call_grammar(tool_choice, tools),
            seed=self.seed,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
        )

    def _continues_answer(self) -> bool:
        """Return whether the last message is the beginning of the answer."""
        *_, last_message = ({}, *self._convert_messages())  # messages without blocks are left out
        return last_message.get("role") == "assistant" and not last_message.get("tool_calls")

    def _convert_messages(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": _join_text(self.system)}
        for message in self.messages:
            yield from _to_openai(message)


def _join_text(content: str | list[Block]) -> str:
    """Return the text of a content. Raises ApiError for blocks of another type."""
    if isinstance(content, str):
        return content
    for block in content:
        _check_type(block, "text")
    return "".join(block.text for block in content)


def _check_type(block: Block, *types: str) -> None:
    if block.type not in types:
        raise ApiError(f"blocks of type {block.type!r} are not supported by this server", param="messages")


def _to_openai(message: _Message) -> Iterator[dict[str, Any]]:
    """Yield the message in OpenAI's format; results of tools come before the user's own text."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    for block in message.content:
        _check_type(block, "text", "tool_use", "tool_result", "thinking")
        if block.type == "tool_result":
            result = block.content or ""
            if not isinstance(result, str):
                result = _join_text([check_body(Block, part, "messages") for part in result])
            yield {"role": "tool", "content": result, "tool_call_id": block.tool_use_id}
    thought = "".join(block.thinking for block in message.content if block.type == "thinking")
    text = "".join(block.text for block in message.content if block.type == "text")
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input or {})},
        }
        for block in message.content
        if block.type == "tool_use"
    ]
    extra = {"tool_calls": calls, "reasoning_content": thought}
    if text or calls or thought:
        yield {"role": message.role, "content": text, **{key: value for key, value in extra.items() if value}}


def _convert_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str) or "input_schema" not in tool:
        raise ApiError("a tool has no name or no input_schema; server tools are not supported", param="tools")
    function = {
        "name": tool["name"],
        "description": tool.get("description", ""),
        "parameters": tool["input_schema"],
    }
    return {"type": "function", "function": function}


def make_response(id_: str, model: str, answers: list[Answer]) -> dict[str, Any]:
    """Return the response to a request that does not stream; without answers, the start of a stream."""
    blocks: list[dict[str, Any]] = []
    for answer in answers:
        blocks += [{"type": "text", "text": answer.content}] if answer.content else []
        blocks += [
            _make_tool_use(call.id, call.name, json.loads(call.arguments)) for call in answer.tool_calls
        ]
    return {
        "id": f"msg_{id_}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks,
        "stop_reason": find_stop_reason(answers[0]) if answers else None,
        "stop_sequence": None,
        "usage": _make_usage(answers),
    }


def _make_tool_use(id_: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input": arguments}


def _make_usage(answers: list[Answer]) -> dict[str, int]:
    usage = Usage.count(answers)
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.sampled,
    }


def find_stop_reason(answer: Answer) -> str:
    if answer.finish_reason == "length":
        return "max_tokens"
    if answer.tool_calls:
        return "tool_use"
    return "stop_sequence" if answer.completion.stop is Stop.STRING else "end_turn"


async def stream_events(
    id_: str, model: str, parts: AsyncIterator[tuple[int, Piece | Answer]]
) -> AsyncIterator[str]:
    """Yield the event stream of an answer."""

    def make_event(kind: str, **data: Any) -> str:
        return format_event({"type": kind, **data}, kind)

    yield make_event("message_start", message=make_response(id_, model, []))
    has_text, index = False, 0
    async for _, part in parts:
        text = part.text if isinstance(part, Piece) else part.rest
        if text and not has_text:
            has_text = True
            yield make_event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        if text:
            yield make_event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})
        if isinstance(part, Answer):
            if has_text:
                yield make_event("content_block_stop", index=0)
            index = int(has_text)
            for call in part.tool_calls:
                block = _make_tool_use(call.id, call.name, {})
                yield make_event("content_block_start", index=index, content_block=block)
                delta = {"type": "input_json_delta", "partial_json": call.arguments}
                yield make_event("content_block_delta", index=index, delta=delta)
                yield make_event("content_block_stop", index=index)
                index += 1
            end = {"stop_reason": find_stop_reason(part), "stop_sequence": None}
            yield make_event("message_delta", delta=end, usage=_make_usage([part]))
            yield make_event("message_stop")


def make_error_body(error: ApiError) -> dict[str, Any]:
    """Return the error in Anthropic's format."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
