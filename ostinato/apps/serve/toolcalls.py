"""Tools in prompts, tool calls in answers, and the text of an answer while it is sampled.

Calls are read in the format that Qwen, Hermes and SmolLM3 use:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

Agents of small models have a shorter form, ``equals``: an answer that ends in "5=" calls the only tool with
5, as with the calculator of GSM8K (arXiv 2110.14168). The result of the tool is a user message. The prompt
does not describe the tool, as such a model has not learned to read a description.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ostinato.apps.serve.calls import ApiError, Message, ToolCall
from ostinato.env.tools import EQUALS
from ostinato.render import IncrementalDecoder, Renderer
from ostinato.tool_calls import OPEN, parse_arguments, parse_calls

CallForm = Literal["json", "equals"]


def read_calls(text: str, prefix: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Return (text without its tool calls, the calls). If a call cannot be parsed, all stay text.

    Ids are ``prefix`` and a number, so that the same request gives the same answer.
    """
    calls = parse_calls(text)
    if not calls or any(call.error for call in calls):
        return text, ()
    tool_calls = tuple(
        ToolCall(
            id=f"call_{prefix}{number}",
            name=call.name,
            arguments=json.dumps(call.arguments or {}, ensure_ascii=False),
        )
        for number, call in enumerate(calls)
    )
    return text.partition(OPEN)[0].rstrip(), tool_calls


def convert_to_equals(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Convert messages for a model that calls its tool by "argument=". Raises ApiError unless ``tools`` is
    empty or a single tool with a single parameter."""
    if tools:
        _read_only_tool(tools)
    chat = []
    for message in messages:
        role, text = message["role"], message.get("content") or ""
        for call in message.get("tool_calls") or ():
            text += f"{next(iter(parse_arguments(call).values()))}="
        chat.append({"role": "user" if role == "tool" else role, "content": text})
    return chat


def read_equals(
    text: str, tools: Sequence[Mapping[str, Any]], prefix: str
) -> tuple[str, tuple[ToolCall, ...]]:
    """Do the same as ``read_calls`` for the format ``equals``; ``text`` includes its stop string."""
    match = EQUALS.search(text)
    if match is None:
        return text, ()
    name, parameter, number = *_read_only_tool(tools), int(match[1])
    arguments = json.dumps({parameter[0]: str(number) if parameter[1] == "string" else number})
    return text[: match.start()], (ToolCall(id=f"call_{prefix}0", name=name, arguments=arguments),)


def _read_only_tool(tools: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[str, str]]:
    """Return (name, (parameter, its type)) of the only tool. Raises ApiError unless there is just one, with
    one parameter."""
    functions = [tool.get("function", tool) for tool in tools]
    fields = [(function.get("parameters") or {}).get("properties") or {} for function in functions]
    if len(tools) != 1 or len(fields[0]) != 1:
        raise ApiError(
            'task.agent_tool_calls is "equals", which is for one tool with one parameter; the request has '
            f"{len(tools)} with {', '.join(str(len(parameters)) for parameters in fields)} parameters",
            param="tools",
        )
    ((name, schema),) = fields[0].items()
    return functions[0]["name"], (name, schema.get("type", "integer"))


class TextStream:
    """The final text of a growing answer: without an end that may still become part of a stop string or a
    tool call."""

    def __init__(self, renderer: Renderer, stop: Sequence[str], *, tools: bool) -> None:
        self._decoder = IncrementalDecoder(renderer, stop)
        self._markers = (*stop, OPEN) if tools else tuple(stop)
        self._tools, self._num_sent, self._stopped = tools, 0, False

    def push(self, tokens: Sequence[int]) -> str:
        """Add ``tokens`` and return the text that has become final."""
        for token in tokens:
            if self._stopped:
                break
            self._stopped = self._decoder.push(token)
        text = self._decoder.text
        if self._tools and OPEN in text:
            text = text[: text.index(OPEN)].rstrip()
        else:
            text = text if self._stopped else text[: len(text) - _measure_overhang(text, self._markers)]
            text = text.rstrip() if self._tools else text  # blanks before a call are not content
        new_text = text[self._num_sent :]
        self._num_sent = max(self._num_sent, len(text))
        return new_text

    def get_rest(self, content: str) -> str:
        """Return the part of the whole ``content`` that has not been returned yet."""
        return content[self._num_sent :]


def _measure_overhang(text: str, strings: Sequence[str]) -> int:
    """Return the length of the longest suffix of ``text`` that is a prefix of one of ``strings``."""
    max_length = max((len(string) for string in strings), default=0)
    for length in range(min(max_length, len(text)), 0, -1):
        if any(string.startswith(text[-length:]) for string in strings):
            return length
    return 0
