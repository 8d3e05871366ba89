"""Tools that a policy calls: what a prompt says of them, running them, and looking them up by name.

Tools are trusted code that runs in a thread of this process. A tool that exceeds its limit is ended where it
runs Python, and abandoned where it waits in C; one that never releases the GIL (a C loop) blocks the process.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import operator
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ostinato.env import mcp_tools
from ostinato.inputs import replace_surrogates
from ostinato.objects import load_named
from ostinato.threads import end_python, in_thread
from ostinato.tool_calls import Call, parse_calls

Tool = Callable[..., Any]
Message = Mapping[str, Any]

EQUALS = re.compile(r"([0-9]{1,6}) *=\s*$")  # an answer that ends like this looks up the number
MAX_CALLS = 8  # per answer; more are refused, and counted
MAX_REPLY_CHARS = 4000
_JSON_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
    NoneType: "null",
}


class Toolbox:
    """Runs calls of ``tools`` (by name), each within ``timeout_s``. Counts in ``counters``:
    ``tools/{calls,unreadable,unknown,raised,timeout,cut,replaced,refused}``."""

    def __init__(self, tools: Mapping[str, Tool], timeout_s: float, counters: Counter[str]) -> None:
        self._tools, self._tool_timeout_s, self.counters = dict(tools), timeout_s, counters

    def __len__(self) -> int:
        return len(self._tools)

    async def replies(self, answer: str) -> list[Message]:
        """The replies to the calls in an answer, as messages; empty where it has none."""
        calls = parse_calls(answer, self._tools) if self._tools else []
        replies: list[dict[str, Any]] = [
            {"role": "tool", "content": self._replace_surrogates(await self._reply(call))}
            for call in calls[:MAX_CALLS]
        ]
        if len(calls) > MAX_CALLS:
            self.counters["tools/refused"] += len(calls) - MAX_CALLS
            replies[-1]["content"] += f"\nError: only the first {MAX_CALLS} calls of an answer are made."
        return [*replies]

    @cached_property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """The tools as chat templates and OpenAI's clients write them."""
        return tuple(schema_of(name, tool) for name, tool in self._tools.items())

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
            text = str(await call_in_time(tool, arguments, self._tool_timeout_s))
        except TimeoutError:
            return self._error("timeout", f"{call.name} gave no result in {self._tool_timeout_s:g} s.")
        except mcp_tools.ToolLost:
            raise
        except Exception as error:  # a user's code: the policy reads its failure
            return self._error("raised", f"{call.name}: {type(error).__name__}: {error}")
        if len(text) > MAX_REPLY_CHARS:
            self.counters["tools/cut"] += 1
            text = f"{text[:MAX_REPLY_CHARS]}... ({len(text)} characters in all)"
        return text

    def _replace_surrogates(self, text: str) -> str:
        """Lone surrogates replaced: no tokenizer takes them, and a tool can return one (``"\\ud83d"``)."""
        readable = replace_surrogates(text)
        if readable != text:
            self.counters["tools/replaced"] += 1
        return readable

    def _error(self, kind: str, sentence: str) -> str:
        self.counters[f"tools/{kind}"] += 1
        return f"Error: {sentence[:MAX_REPLY_CHARS]}"


async def call_in_time(tool: Tool, arguments: Mapping[str, Any], timeout_s: float) -> Any:
    """The tool's result. Raises TimeoutError after ``timeout_s``; what it still does in Python ends then, a
    call that waits in C is left to itself."""
    running, lock = list[int](), threading.Lock()

    def work() -> Any:
        running.append(threading.get_ident())
        try:
            return tool(**arguments)
        except BaseException as error:  # SystemExit is the tool's failure; TimeoutError means our limit
            if isinstance(error, Exception) and not isinstance(error, TimeoutError | StopIteration):
                raise
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            with lock:  # the id may be another thread's next
                running.clear()

    try:
        return await asyncio.wait_for(in_thread(work), timeout_s)
    except TimeoutError:
        with lock:
            for thread in running:
                end_python(thread)
        raise


def schema_of(name: str, tool: Tool) -> dict[str, Any]:
    """``tool`` as a function of OpenAI's API: its attribute ``schema``, else a JSON schema of its signature,
    described by its docstring (the first paragraph, and of ``Args:`` the lines ``name: what it is``)."""
    if hasattr(tool, "schema"):
        return dict(tool.schema)
    try:
        hints = get_type_hints(tool)
    except Exception:  # a user's code: an annotation may name what is not there
        hints = {}
    summary, described = _parse_docstring(inspect.getdoc(tool) or "")
    fields, required = dict[str, Any](), list[str]()
    for field, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        fields[field] = _type_schema(hints.get(field, Any))
        if field in described:
            fields[field]["description"] = described[field]
        if parameter.default is parameter.empty:
            required.append(field)
    parameters = {"type": "object", "properties": fields, **({"required": required} if required else {})}
    function = {"name": name, "description": summary, "parameters": parameters}
    return {"type": "function", "function": function}


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """(the first paragraph, descriptions of arguments) of a docstring."""
    summary = " ".join(text.partition("\n\n")[0].split())
    arguments = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE)
    descriptions = re.findall(
        r"^[ \t]+(\w+)(?: *\([^)]*\))?: *(.+)", arguments[1] if arguments else "", re.MULTILINE
    )
    return summary.partition(" Args:")[0], dict(descriptions)


def _type_schema(hint: Any) -> dict[str, Any]:
    """JSON schema of a type; {} for one that is not of JSON."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return {"anyOf": [_type_schema(argument) for argument in arguments]}
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": _type_schema(arguments[0])}
    return {"type": "object"} if origin in (dict, Mapping) else {}


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
    """Tools by name: a built-in (``calculator``), ``module:function``, ``path.py:function``, and all those of
    an MCP server ("mcp:COMMAND", "mcp:https://..."), which is started.

    Raises ValueError with one sentence.
    """
    tools = dict[str, Tool]()
    for spec in specs:
        if spec.startswith(mcp_tools.PREFIX):
            new: Mapping[str, Tool] = mcp_tools.McpServer(spec).tools
        else:
            new = {spec.rpartition(":")[2]: BUILT_IN.get(spec) or _import_tool(spec)}
        if twice := sorted(tools.keys() & new):
            raise ValueError(f"task.tools has {twice[0]!r} twice, the second time from {spec!r}; drop one")
        tools |= new
    return tools


def _import_tool(spec: str) -> Tool:
    return load_named(spec, "tool", nearest=get_close_matches(spec, BUILT_IN, n=1, cutoff=0)[0])
