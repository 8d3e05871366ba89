"""OpenAI's responses: the parts that agents use. Nothing is stored: a client sends the whole conversation."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from ostinato.apps.serve.bodies import (
    ACCOUNT_FIELDS,
    MAX_MESSAGES,
    MAX_TOOLS,
    Format,
    Part,
    StreamOptions,
    StrictBody,
    check_body,
    join_text,
)
from ostinato.apps.serve.calls import Answer, ApiError, Call, Piece, Usage
from ostinato.apps.serve.grammar import make_call_grammar, make_json_grammar
from ostinato.apps.serve.openai_chat import format_event, format_logprobs
from ostinato.render import Renderer
from ostinato.types import Emitted

LOGPROBS = "message.output_text.logprobs"


class TextOptions(StrictBody):
    """``text``."""

    format: Format | None = None


class ReasoningOptions(StrictBody):
    """``reasoning``."""

    effort: str | None = None


class ResponsesBody(StrictBody):
    """POST /v1/responses."""

    harmless = ACCOUNT_FIELDS | {"max_tool_calls"}  # about tools that run at the server: this one has none
    model: str = ""
    input: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = True
    reasoning: ReasoningOptions | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    previous_response_id: str | None = None
    text: TextOptions | None = None

    def to_call(self) -> Call:
        if self.previous_response_id:
            raise ApiError(
                "previous_response_id: responses are not stored here; send the whole conversation as input",
                param="previous_response_id",
            )
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise ApiError(
                f"top_logprobs come with logprobs; add {LOGPROBS!r} to include", param="top_logprobs"
            )
        tools = tuple(_convert_tool(tool) for tool in self.tools or ())
        format_ = self.text.format if self.text is not None else None
        tool_grammar = make_call_grammar(self.tool_choice, tools)
        effort = self.reasoning.effort if self.reasoning is not None else None
        return Call(
            model=self.model,
            messages=tuple(self._convert_messages()),
            tools=tools,
            tool_choice="none" if self.tool_choice == "none" else "auto",
            parallel_calls=self.parallel_tool_calls is not False,
            template_kwargs={"reasoning_effort": effort} if effort else {},
            grammar=tool_grammar or make_json_grammar(format_.model_dump() if format_ else {}, "text.format"),
            seed=self.seed,
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_output_tokens,
            logprobs=LOGPROBS in (self.include or ()),
            top_logprobs=self.top_logprobs or 0,
        )

    def _convert_messages(self) -> Iterator[dict[str, Any]]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        yield from _merge(_convert_item(item) for item in self.input)


def _merge(messages: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Merge an answer's text and its calls, which are separate items, into a message."""
    turn: dict[str, Any] | None = None
    for message in messages:
        if turn is not None and turn["role"] == message["role"] == "assistant" and "tool_calls" in message:
            turn = turn | {"tool_calls": [*turn.get("tool_calls", []), *message["tool_calls"]]}
            continue
        if turn is not None:
            yield turn
        turn = message
    if turn is None:
        raise ApiError("input is an empty list; give at least one item", param="input")
    yield turn


class _Item(StrictBody):
    harmless = frozenset({"id", "status", "phase", "caller"})
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str | list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Part] = ""


def _convert_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an input item in the format of chat templates. Raises ApiError for an unsupported item."""
    if (kind := item.get("type", "message")) not in ("message", "function_call", "function_call_output"):
        raise ApiError(f"input items of type {kind!r} are not supported by this server", param="input")
    body = check_body(_Item, item, "input")
    if body.type == "message":
        return {
            "role": "system" if body.role == "developer" else body.role,
            "content": join_text(body.content),
        }
    if body.type == "function_call":
        function = {"name": body.name, "arguments": body.arguments}
        call = {"id": body.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    return {"role": "tool", "content": join_text(body.output), "tool_call_id": body.call_id}


def _convert_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise ApiError(f"tools of type {tool.get('type')!r} are not supported by this server", param="tools")
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {key: tool[key] for key in names if tool.get(key) is not None}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseShape:
    """The settings of a response, and the methods that write it."""

    id: str
    model: str
    renderer: Renderer
    call: Call
    body: ResponsesBody

    def make_response(self, answers: list[Answer], *, is_done: bool = True) -> dict[str, Any]:
        """The response object, with the request's settings; ``is_done``: False while it is in progress."""
        usage, body, call = Usage.count(answers), self.body, self.call
        is_cut = any(answer.finish_reason == "length" for answer in answers)
        settings = body.model_dump(include={"instructions", "max_output_tokens", "tools", "reasoning"})
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress" if not is_done else "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "model": self.model,
            "output": [item for answer in answers for item in self._make_items(answer)],
            **settings,
            "tools": body.tools or [],
            "metadata": (body.model_extra or {}).get("metadata") or {},
            "user": (body.model_extra or {}).get("user"),
            "parallel_tool_calls": call.parallel_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": call.temperature,
            "text": body.text.model_dump(exclude_none=True)
            if body.text and body.text.format
            else {"format": {"type": "text"}},
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "top_logprobs": call.top_logprobs,
            "top_p": call.top_p,
            "truncation": "disabled",
            "usage": _format_usage(usage) if is_done else None,
        }

    def _make_items(self, answer: Answer) -> list[dict[str, Any]]:
        """Return the output items of an answer: its text, then its calls."""
        items: list[dict[str, Any]] = []
        if answer.content or not answer.tool_calls:
            items.append(self._make_text_item(self._make_text_part(answer.content, answer.emitted)))
        for number, call in enumerate(answer.tool_calls):
            items.append(
                {
                    "type": "function_call",
                    "id": f"fc_{self.id}_{number}",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": call.arguments,
                    "status": "completed",
                }
            )
        return items

    def _make_text_item(self, part: dict[str, Any] | None) -> dict[str, Any]:
        """Return the message with its only part; None for a message that has just begun."""
        status, content = ("in_progress", []) if part is None else ("completed", [part])
        head = {"type": "message", "id": f"msg_{self.id}", "role": "assistant"}
        return head | {"status": status, "content": content}

    def _make_text_part(self, text: str, emitted: Sequence[Emitted]) -> dict[str, Any]:
        return {
            "type": "output_text",
            "text": text,
            "annotations": [],
            "logprobs": self._format_logprobs(emitted),
        }

    def _format_logprobs(self, emitted: Sequence[Emitted]) -> list[dict[str, Any]]:
        if not self.call.logprobs:
            return []
        decode = self.renderer.decode
        return format_logprobs(self.call, emitted, lambda token: decode([token], skip_special=False))

    async def stream_events(self, parts: AsyncIterator[tuple[int, Piece | Answer]]) -> AsyncIterator[str]:
        """Yield the event stream of an answer."""
        number = 0

        def make_event(kind: str, **data: Any) -> str:
            nonlocal number
            number += 1
            return format_event({"type": kind, "sequence_number": number - 1, **data}, kind)

        place: dict[str, Any] = {"item_id": f"msg_{self.id}", "output_index": 0, "content_index": 0}
        for kind in ("response.created", "response.in_progress"):
            yield make_event(kind, response=self.make_response([], is_done=False))
        has_text = False
        silent_tokens: list[Emitted] = []  # tokens whose text has not been sent
        async for _, part in parts:
            text = part.text if isinstance(part, Piece) else part.rest
            silent_tokens += [part.emitted] if isinstance(part, Piece) else []
            if not has_text and (text or (isinstance(part, Answer) and not part.tool_calls)):
                has_text = True
                yield make_event(
                    "response.output_item.added", output_index=0, item=self._make_text_item(None)
                )
                yield make_event("response.content_part.added", **place, part=self._make_text_part("", ()))
            if text:
                logprobs, silent_tokens = self._format_logprobs(silent_tokens), []
                yield make_event("response.output_text.delta", **place, delta=text, logprobs=logprobs)
            if isinstance(part, Answer):
                if has_text:
                    text_part = self._make_text_part(part.content, part.emitted)
                    fields = {"text": part.content, "logprobs": text_part["logprobs"]}
                    yield make_event("response.output_text.done", **place, **fields)
                    yield make_event("response.content_part.done", **place, part=text_part)
                for index, item in enumerate(self._make_items(part)):
                    for kind, data in _list_item_events(index, item):
                        yield make_event(kind, **data)
                response = self.make_response([part])
                yield make_event(f"response.{response['status']}", response=response)


def _list_item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the last events of an output item: a whole call, or the end of a text."""
    if item["type"] == "function_call":
        place = {"item_id": item["id"], "output_index": index}
        empty = item | {"arguments": "", "status": "in_progress"}
        yield "response.output_item.added", {"output_index": index, "item": empty}
        kind = "response.function_call_arguments"
        yield f"{kind}.delta", {**place, "delta": item["arguments"]}
        yield f"{kind}.done", {**place, "arguments": item["arguments"], "name": item["name"]}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _format_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.sampled,
    }
