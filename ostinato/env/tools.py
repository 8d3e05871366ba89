"""Tools that a policy calls: the format of calls, parsing and running them, and looking up tools by name.

Tools are trusted code that runs in a thread of this process. A tool that exceeds its limit is abandoned,
not killed; one that never releases the GIL (a C loop) blocks the process.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import importlib.util
import inspect
import json
import operator
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ostinato.inputs import parse_json, replaced
from ostinato.render import Renderer
from ostinato.threads import in_thread
from ostinato.types import Prompt

Tool = Callable[..., Any]
Message = Mapping[str, Any]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
EQUALS = re.compile(r"([0-9]{1,6}) *=\s*$")  # an answer that ends like this looks up the number
MAX_CALLS = 8  # per answer; more are refused, and counted
MAX_REPLY_CHARS = 4000

_INSTRUCTIONS = """You may call functions. Their signatures:
<tools>
{tools}
</tools>
For each call return a JSON object with the function's name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call as the policy wrote it; ``error`` says why it cannot be read."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    error: str = ""


class Toolbox:
    """Runs calls of ``tools`` (by name), each within ``timeout_s``. Counts in ``counters``:
    ``tools/{calls,unreadable,unknown,raised,timeout,cut,replaced,refused}``."""

    def __init__(self, tools: Mapping[str, Tool], timeout_s: float, counters: Counter[str]) -> None:
        self._tools, self._tool_timeout_s, self.counters = dict(tools), timeout_s, counters

    def __len__(self) -> int:
        return len(self._tools)

    async def replies(self, answer: str) -> list[Message]:
        """The replies to the calls in an answer, as messages; empty where it has none."""
        calls = parse_calls(answer) if self._tools else []
        replies: list[dict[str, Any]] = [
            {"role": "tool", "content": self._readable(await self._reply(call))} for call in calls[:MAX_CALLS]
        ]
        if len(calls) > MAX_CALLS:
            self.counters["tools/refused"] += len(calls) - MAX_CALLS
            replies[-1]["content"] += f"\nError: only the first {MAX_CALLS} calls of an answer are made."
        return [*replies]

    def described(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The chat with a system message that says how to call the tools."""
        return with_instructions(messages, [_describe(name, tool) for name, tool in self._tools.items()])

    async def _reply(self, call: Call) -> str:
        self.counters["tools/calls"] += 1
        if call.error:
            return self._error("unreadable", call.error)
        if call.name not in self._tools:
            return self._error(
                "unknown", f"there is no function {call.name!r}, only {', '.join(self._tools)}."
            )
        tool, arguments = self._tools[call.name], call.arguments or {}
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return self._error("unreadable", f"{call.name}: {error}.")
        try:
            text = str(await in_time(tool, arguments, self._tool_timeout_s))
        except TimeoutError:
            return self._error("timeout", f"{call.name} gave no result in {self._tool_timeout_s:g} s.")
        except Exception as error:  # a user's code: the policy reads its failure
            return self._error("raised", f"{call.name}: {type(error).__name__}: {error}")
        if len(text) > MAX_REPLY_CHARS:
            self.counters["tools/cut"] += 1
            text = f"{text[:MAX_REPLY_CHARS]}... ({len(text)} characters in all)"
        return text

    def _readable(self, text: str) -> str:
        """Lone surrogates replaced: no tokenizer takes them, and a tool can return one (``"\\ud83d"``)."""
        readable = replaced(text)
        if readable != text:
            self.counters["tools/replaced"] += 1
        return readable

    def _error(self, kind: str, sentence: str) -> str:
        self.counters[f"tools/{kind}"] += 1
        return f"Error: {sentence[:MAX_REPLY_CHARS]}"


def parse_calls(text: str) -> list[Call]:
    """The tool calls of an answer, in order, without those in its reasoning (before ``</think>``).

    A call without a closing tag extends to the end of the text: the tag may have been the stop string.
    """
    _, closed, rest = text.rpartition("</think>")
    if not closed and "<think>" in rest:
        return []
    return [_parse_call(part.partition(CLOSE)[0]) for part in rest.split(OPEN)[1:]]


def _parse_call(text: str) -> Call:
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


async def in_time(tool: Tool, arguments: Mapping[str, Any], timeout_s: float) -> Any:
    """The tool's result. Raises TimeoutError after ``timeout_s``; the tool is then abandoned."""

    def work() -> Any:
        try:
            return tool(**arguments)
        except BaseException as error:  # SystemExit is the tool's failure; TimeoutError means our limit
            if isinstance(error, Exception) and not isinstance(error, TimeoutError | StopIteration):
                raise
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return await asyncio.wait_for(in_thread(work), timeout_s)


def for_template(
    renderer: Renderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
    """(messages, tools) as the chat template takes them: contents as text, arguments of calls parsed. A
    template that takes ``tools`` writes them its own way; for any other, they are in the system message and
    calls in the assistant's text."""
    native = renderer.takes_tools
    chat = [_plain(message, native) for message in messages]
    if not tools or native:
        return chat, list(tools)
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    return with_instructions(chat, lines), []


def as_template_takes(renderer: Renderer, prompt: Prompt) -> Prompt:
    """The prompt of a row with its tools and calls as the chat template takes them."""
    chat = prompt.messages or ()
    if not prompt.tools and not any("tool_calls" in message for message in chat):
        return prompt
    messages, tools = for_template(renderer, chat, prompt.tools)
    return replace(prompt, messages=tuple(messages), tools=tuple(tools))


def _plain(message: Message, native: bool) -> dict[str, Any]:
    plain = {**message, "content": message.get("content") or ""}
    if not (calls := plain.pop("tool_calls", None)):
        return plain
    functions = [{"name": c["function"]["name"], "arguments": arguments_of(c)} for c in calls]
    if native:
        plain["tool_calls"] = [
            {**call, "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ]
    else:
        texts = [f"{OPEN}\n{json.dumps(f, ensure_ascii=False)}\n{CLOSE}" for f in functions]
        plain["content"] = "\n".join(filter(None, [plain["content"], *texts]))
    return plain


def arguments_of(call: Mapping[str, Any]) -> Any:
    """The arguments of a call, parsed, as templates write the JSON themselves."""
    arguments = call["function"].get("arguments") or "{}"
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def with_instructions(messages: Sequence[Message], tools: Sequence[str]) -> list[dict[str, Any]]:
    """The chat with a system message that says how to call ``tools``, one line per tool."""
    instructions, chat = _INSTRUCTIONS.format(tools="\n".join(tools)), [dict(one) for one in messages]
    if chat and chat[0]["role"] == "system":
        instructions = f"{chat.pop(0)['content']}\n\n{instructions}"
    return [{"role": "system", "content": instructions}, *chat]


def _describe(name: str, tool: Tool) -> str:
    """``calculator(expression: str) -> str: Evaluate ...``: the signature and the docstring's first line."""
    signature = str(inspect.signature(tool)).replace("'", "")
    summary = (inspect.getdoc(tool) or "").partition("\n")[0]
    return f"{name}{signature}: {summary}".rstrip(": ")


# --- tools by name -----------------------------------------------------------------------------------------

MAX_EXPRESSION_CHARS = 200
MAX_BITS = 2048  # of a power; keeps every result printable and every step short

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression of numbers with + - * / // % ** and parentheses."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(
            f"the expression has {len(expression)} characters, at most {MAX_EXPRESSION_CHARS} are read"
        )
    return str(_value(ast.parse(expression.strip(), mode="eval").body))


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic; use numbers, + - * / // % ** and parentheses")


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise ValueError(f"{base} ** {exponent} is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError(f"{base} ** {exponent} is not a real number")
    return result


BUILT_IN: dict[str, Tool] = {"calculator": calculator}


def resolve_tools(specs: Sequence[str]) -> dict[str, Tool]:
    """Tools by name: a built-in (``calculator``), ``module:function`` or ``path.py:function``.

    Raises ValueError with one sentence.
    """
    return {spec.rpartition(":")[2]: BUILT_IN.get(spec) or _import_tool(spec) for spec in specs}


def _import_tool(spec: str) -> Tool:
    return imported(spec, "tool", nearest=get_close_matches(spec, BUILT_IN, n=1, cutoff=0)[0])


def imported(spec: str, what: str, nearest: str) -> Callable[..., Any]:
    """The user's callable at ``module:name`` or ``path.py:name``. Raises ValueError with one sentence."""
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise ValueError(f"{what} {spec!r} is unknown; use {nearest!r}, module:name or path.py:name")
    if where.endswith(".py") and not Path(where).is_file():
        raise ValueError(f"{what} {spec!r}: there is no file {where} in {Path.cwd()}; give its path")
    if where.endswith(".py"):
        loader = importlib.util.spec_from_file_location(f"ostinato_file_{Path(where).stem}", where)
        assert loader is not None and loader.loader is not None
        module = importlib.util.module_from_spec(loader)
        sys.modules[loader.name] = module  # where dataclasses and pydantic look up what annotations name
        try:
            loader.loader.exec_module(module)
        except Exception as error:  # a user's file can raise anything while it is imported
            fix = f"install {error.name}" if isinstance(error, ModuleNotFoundError) else "fix the file"
            raise ValueError(
                f"{what} {spec!r}: importing {where} raised {type(error).__name__}: {error}; {fix}"
            ) from error
    elif importlib.util.find_spec(where.partition(".")[0]) is None:
        raise ValueError(f"{what} {spec!r}: there is no module {where!r}; check the name")
    else:
        module = importlib.import_module(where)
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{what} {spec!r}: {where} has no function {name!r}; define it there")
    return found
