"""OpenAI's responses: the parts that agents use. Nothing is stored: a client sends the whole conversation."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from ostinato.serve.bodies import MOST_MESSAGES, Format, Lenient, checked
from ostinato.serve.calls import Answer, ApiError, Call, Piece, Usage
from ostinato.serve.grammar import call_grammar, json_grammar
from ostinato.serve.openai_chat import sse


class ResponsesBody(Lenient):
    """POST /v1/responses."""

    model: str = ""
    input: str | Annotated[list[dict[str, Any]], Field(max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = False
    seed: int | None = None
    previous_response_id: str | None = None
    text: dict[str, Any] | None = None

    def to_call(self) -> Call:
        if self.previous_response_id:
            raise ApiError(
                "previous_response_id: responses are not stored here; send the whole conversation as input",
                param="previous_response_id",
            )
        tools = tuple(_tool(tool) for tool in self.tools or ())
        format_ = checked(Format, (self.text or {}).get("format") or {}).model_dump()
        forced = call_grammar(self.tool_choice, tools)
        return Call(
            model=self.model,
            messages=tuple(self._messages()),
            tools=tools,
            tool_choice="none" if self.tool_choice == "none" else "auto",
            grammar=forced or json_grammar(format_, "text.format"),
            seed=self.seed,
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_output_tokens,
        )

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        yield from _merged(_message(item) for item in self.input)


def _merged(messages: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Merges an answer's text and its calls, which are separate items, into one message."""
    last: dict[str, Any] | None = None
    for message in messages:
        if last is not None and last["role"] == message["role"] == "assistant" and "tool_calls" in message:
            last = last | {"tool_calls": [*last.get("tool_calls", []), *message["tool_calls"]]}
            continue
        if last is not None:
            yield last
        last = message
    if last is None:
        raise ApiError("input is an empty list; give at least one item", param="input")
    yield last


class _Item(Lenient):
    type: str = "message"
    role: str = "user"
    content: str | list[dict[str, Any]] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Any = ""


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    one = checked(_Item, item)
    if one.type == "message":
        parts = one.content if isinstance(one.content, list) else [{"text": one.content or ""}]
        text = "".join(str(part.get("text", "")) for part in parts)
        return {"role": "system" if one.role == "developer" else one.role, "content": text}
    if one.type == "function_call":
        function = {"name": one.name, "arguments": one.arguments}
        call = {"id": one.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if one.type == "function_call_output":
        output = one.output if isinstance(one.output, str) else json.dumps(one.output, ensure_ascii=False)
        return {"role": "tool", "content": output, "tool_call_id": one.call_id}
    raise ApiError(f"input items of type {one.type!r} are not supported by this server", param="input")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise ApiError(f"tools of type {tool.get('type')!r} are not supported by this server", param="tools")
    known = ("name", "description", "parameters")
    return {"type": "function", "function": {key: tool[key] for key in known if tool.get(key) is not None}}


def response(id_: str, model: str, answers: list[Answer], *, done: bool = True) -> dict[str, Any]:
    """The response object; ``done``: False while it is in progress."""
    usage = Usage.of(answers)
    cut = any(answer.finish_reason == "length" for answer in answers)
    return {
        "id": id_,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress" if not done else "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [item for answer in answers for item in items(id_, answer)],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": usage.sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.sampled,
        }
        if done
        else None,
    }


def items(id_: str, answer: Answer) -> list[dict[str, Any]]:
    """The output items of an answer: its text, then its calls."""
    found: list[dict[str, Any]] = []
    if answer.content or not answer.tool_calls:
        found.append(_text_item(id_, answer.content, "completed"))
    for number, call in enumerate(answer.tool_calls):
        found.append(
            {
                "type": "function_call",
                "id": f"fc_{id_}_{number}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return found


def _text_item(id_: str, text: str, status: str) -> dict[str, Any]:
    content = [_text_part(text)] if status == "completed" else []
    return {"type": "message", "id": f"msg_{id_}", "role": "assistant", "status": status, "content": content}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


async def events(
    id_: str, model: str, parts: AsyncIterator[tuple[int, Piece | Answer]]
) -> AsyncIterator[str]:
    """The event stream of one answer."""
    number = 0

    def event(kind: str, **data: Any) -> str:
        nonlocal number
        number += 1
        return sse({"type": kind, "sequence_number": number - 1, **data}, kind)

    place: dict[str, Any] = {"item_id": f"msg_{id_}", "output_index": 0, "content_index": 0}
    for kind in ("response.created", "response.in_progress"):
        yield event(kind, response=response(id_, model, [], done=False))
    begun = False
    async for _, part in parts:
        text = part.text if isinstance(part, Piece) else part.rest
        if not begun and (text or (isinstance(part, Answer) and not part.tool_calls)):
            begun = True
            item = _text_item(id_, "", "in_progress")
            yield event("response.output_item.added", output_index=0, item=item)
            yield event("response.content_part.added", **place, part=_text_part(""))
        if text:
            yield event("response.output_text.delta", **place, delta=text, logprobs=[])
        if isinstance(part, Answer):
            if begun:
                yield event("response.output_text.done", **place, text=part.content, logprobs=[])
                yield event("response.content_part.done", **place, part=_text_part(part.content))
            for index, item in enumerate(items(id_, part)):
                if item["type"] == "function_call":
                    where = {"item_id": item["id"], "output_index": index}
                    empty = item | {"arguments": "", "status": "in_progress"}
                    yield event("response.output_item.added", output_index=index, item=empty)
                    kind = "response.function_call_arguments"
                    yield event(f"{kind}.delta", **where, delta=item["arguments"])
                    yield event(f"{kind}.done", **where, arguments=item["arguments"], name=item["name"])
                yield event("response.output_item.done", output_index=index, item=item)
            last = response(id_, model, [part])
            yield event(f"response.{last['status']}", response=last)
