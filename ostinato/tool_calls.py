"""Tools in prompts and tool calls in answers, the same in training and serving.

A chat template that takes ``tools`` writes them its own way; for any other, they go into the system message
as ``add_instructions`` writes them, and replies into a user's message where it has no role for them. Calls
are read in the form that Qwen, Hermes and SmolLM3 use:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ostinato.control_tokens import strip_thinking
from ostinato.inputs import parse_json

Message = Mapping[str, Any]

FormOfCalls = Literal["read", "other", "none"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"

_INSTRUCTIONS = """You may call functions. Their signatures:
<tools>
{tools}
</tools>
For each call return a JSON object with the function's name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""
_ARGUMENTS = r'"(?:arguments|parameters|args)"\s*:'
_UNTAGGED = re.compile(rf'\{{\s*"(?:name|function)"\s*:\s*"([^"\n]+)"\s*,\s*{_ARGUMENTS}(\s*\{{)?')
_OTHER_FORMS = (  # forms of calls of other models
    re.compile(rf'{_ARGUMENTS}.*?\}}\s*,\s*"(?:name|function)"\s*:\s*"([^"\n]+)"', re.DOTALL),
    re.compile(r"<function=([^>\s]+)>"),
    re.compile(r"```\w*\s*\n\s*(\w+)\("),
)


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call as the policy wrote it; ``error`` is the reason if it cannot be read."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    error: str = ""


def parse_calls(text: str, names: Collection[str] = ()) -> list[Call]:
    """The tool calls of an answer, in order, without those in its thoughts.

    A call without a closing tag extends to the end: the tag may have been the stop string. If there are tools
    (``names``) and no call has tags, every call without them (in a fence of ```json, or in the form of
    another model) is returned as an error.
    """
    answer = strip_thinking(text)
    tagged_parts = answer.split(OPEN)[1:]
    if not tagged_parts:
        matches = _UNTAGGED.findall(answer) if names else []
        untagged_names = [name for name, opening in matches if opening or name in names]
        untagged_names = untagged_names or [
            name for form in _OTHER_FORMS for name in form.findall(answer) if name in names
        ]
        return [Call(error=f"write the call of {name} within {OPEN}{CLOSE}.") for name in untagged_names]
    return [_parse_call(part.partition(CLOSE)[0]) for part in tagged_parts]


def _parse_call(text: str) -> Call:
    """The call in a JSON text, or an error if it has none."""
    try:
        call = parse_json(text, surrogates=True)
    except ValueError as error:
        return Call(error=f"the call is not JSON ({error}).")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call(error='the call has no "name"; write {"name": .., "arguments": {..}}.')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(error=f'"arguments" of {call["name"]} is not an object.')
    return Call(name=call["name"], arguments=arguments)


def find_form_of_calls(render: Callable[[list[Message], list[Mapping[str, Any]]], str]) -> FormOfCalls:
    """The form in which a chat template writes calls: "none" if it leaves them out, "read" if ``parse_calls``
    reads them, and "other" if it does not or the template refuses them. ``render`` applies the template to
    (messages, tools)."""
    function = {"name": "probe", "arguments": {"a": 1}}
    call = {"id": "probe0000", "type": "function", "function": function}
    user, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": ""}
    tools: list[Mapping[str, Any]] = [{"type": "function", "function": function}]
    try:
        text_without_calls, text = (
            render([user, message], tools) for message in (answer, {**answer, "tool_calls": [call]})
        )
    except ValueError:
        return "other"
    if text == text_without_calls:
        return "none"
    is_read = parse_calls(text[text.rfind(OPEN) :]) == [Call(name="probe", arguments={"a": 1})]
    return "read" if is_read else "other"


def prepare_for_template(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    takes_tools: bool,
    writes_calls: bool,
    unwritten: Collection[str] = (),
) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
    """(messages, tools) for a chat template: contents as text, arguments of calls parsed. Calls that the
    template does not write (not ``writes_calls``) are put into the assistant's text, and replies of tools, if
    "tool" is one of the ``unwritten`` roles, into user messages. Tools that it does not take (not
    ``takes_tools``) are put into a system message or, if "system" is unwritten, into the user's first
    message."""
    chat = [_simplify_message(message, writes_calls) for message in messages]
    if "tool" in unwritten:
        chat = _move_replies(chat)
    if not tools or takes_tools:
        return chat, list(tools)
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    chat = add_instructions(chat, lines)
    if "system" in unwritten and [m["role"] for m in chat[:2]] == ["system", "user"]:
        system, user, *rest = chat
        chat = [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *rest]
    return chat, []


def find_unwritten_roles(render: Callable[[list[Message]], str]) -> frozenset[str]:
    """Roles whose words a chat template, which ``render`` applies to messages, refuses or leaves out."""
    user, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    words, roles = "what-it-says", set[str]()
    for role, messages_before, messages_after in (("system", [], [user]), ("tool", [user, answer], [])):
        try:
            if words not in render([*messages_before, {"role": role, "content": words}, *messages_after]):
                roles.add(role)
        except ValueError:
            roles.add(role)
    return frozenset(roles)


def _move_replies(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat with replies of tools as user messages, as Qwen and Hermes write them, one message per answer:
    Gemma and Llama 2 refuse the role "tool", and Phi-3.5 leaves it out."""
    messages: list[dict[str, Any]] = []
    for previous, message in zip([None, *chat], chat, strict=False):
        if message["role"] != "tool":
            messages.append(message)
            continue
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        if previous is not None and previous["role"] == "tool":
            messages[-1]["content"] += f"\n{text}"
        else:
            messages.append({"role": "user", "content": text})
    return messages


def _simplify_message(message: Message, writes_calls: bool) -> dict[str, Any]:
    """A message with its content as text, and calls with parsed arguments, or in the text."""
    plain = {**message, "content": message.get("content") or ""}
    if not (calls := plain.pop("tool_calls", None)):
        return plain
    functions = [{"name": c["function"]["name"], "arguments": parse_arguments(c)} for c in calls]
    if writes_calls:
        plain["tool_calls"] = [
            {**call, "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ]
    else:
        texts = [f"{OPEN}\n{json.dumps(f, ensure_ascii=False)}\n{CLOSE}" for f in functions]
        plain["content"] = "\n".join(filter(None, [plain["content"], *texts]))
    return plain


def parse_arguments(call: Mapping[str, Any]) -> Any:
    """The arguments of a call, parsed, as templates write the JSON themselves; as they are if invalid."""
    arguments = call["function"].get("arguments") or "{}"
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def add_instructions(messages: Sequence[Message], tools: Sequence[str]) -> list[dict[str, Any]]:
    """The chat with a system message that says how to call ``tools``, one line per tool."""
    instructions, chat = _INSTRUCTIONS.format(tools="\n".join(tools)), [dict(message) for message in messages]
    if chat and chat[0]["role"] == "system":
        instructions = f"{chat.pop(0)['content']}\n\n{instructions}"
    return [{"role": "system", "content": instructions}, *chat]
