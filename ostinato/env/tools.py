"""Tools that a policy calls: their schemas in a prompt, running them, and looking them up by name.

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

    async def run_calls(self, answer: str) -> list[Message]:
        """Run the first MAX_CALLS calls of an answer, one after the other, count them, and return the replies
        as messages; [] without calls. Raises ToolLost."""
        calls = parse_calls(answer, self._tools) if self._tools else []
        replies: list[dict[str, Any]] = [
            {"role": "tool", "content": self._replace_surrogates(await self._run_call(call))}
            for call in calls[:MAX_CALLS]
        ]
        if len(calls) > MAX_CALLS:
            self.counters["tools/refused"] += len(calls) - MAX_CALLS
            replies[-1]["content"] += f"\nError: only the first {MAX_CALLS} calls of an answer are made."
        return [*replies]

    @cached_property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """The tools as chat templates and OpenAI's clients write them."""
        return tuple(make_schema(name, tool) for name, tool in self._tools.items())

    async def _run_call(self, call: Call) -> str:
        """Run and count a call, and return its result, cut to MAX_REPLY_CHARS, or for the policy a sentence
        on its failure. Raises ToolLost."""
        self.counters["tools/calls"] += 1
        if call.error:
            return self._count_error("unreadable", call.error)
        if call.name not in self._tools:
            return self._count_error(
                "unknown", f"there is no function {call.name!r}, only {', '.join(self._tools)}."
            )
        tool, arguments = self._tools[call.name], call.arguments or {}
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            return self._count_error("unreadable", f"{call.name}: {error}.")
        try:
            text = str(await call_in_time(tool, arguments, self._tool_timeout_s))
        except TimeoutError:
            return self._count_error("timeout", f"{call.name} gave no result in {self._tool_timeout_s:g} s.")
        except mcp_tools.ToolLost:
            raise
        except Exception as error:  # a user's code: the policy reads its failure
            return self._count_error("raised", f"{call.name}: {type(error).__name__}: {error}")
        if len(text) > MAX_REPLY_CHARS:
            self.counters["tools/cut"] += 1
            text = f"{text[:MAX_REPLY_CHARS]}... ({len(text)} characters in all)"
        return text

    def _replace_surrogates(self, text: str) -> str:
        r"""Replace lone surrogates, which a tool can return (``"\\ud83d"``) and no tokenizer takes, and count
        the text."""
        readable = replace_surrogates(text)
        if readable != text:
            self.counters["tools/replaced"] += 1
        return readable

    def _count_error(self, kind: str, sentence: str) -> str:
        """Count an error, and return the sentence that the policy reads."""
        self.counters[f"tools/{kind}"] += 1
        return f"Error: {sentence[:MAX_REPLY_CHARS]}"


async def call_in_time(tool: Tool, arguments: Mapping[str, Any], timeout_s: float) -> Any:
    """Return the tool's result. Raises TimeoutError after ``timeout_s``: the tool's Python code is then
    ended, and a call that waits in C is abandoned. Raises what the tool raises, but RuntimeError for what
    would be mistaken here: its own TimeoutError or StopIteration, and SystemExit and the like."""
    threads, lock = list[int](), threading.Lock()

    def run_tool() -> Any:
        threads.append(threading.get_ident())
        try:
            return tool(**arguments)
        except BaseException as error:  # SystemExit is the tool's failure; TimeoutError means our limit
            if isinstance(error, Exception) and not isinstance(error, TimeoutError | StopIteration):
                raise
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            with lock:  # a later thread may get the same id
                threads.clear()

    try:
        return await asyncio.wait_for(in_thread(run_tool), timeout_s)
    except TimeoutError:
        with lock:
            for thread in threads:
                end_python(thread)
        raise


def make_schema(name: str, tool: Tool) -> dict[str, Any]:
    """Describe ``tool`` as a function of OpenAI's API. This is its attribute ``schema``, if it has one.
    Otherwise it is a JSON schema of its signature, described by its docstring: the first paragraph, and the
    lines ``name: what it is`` of ``Args:``."""
    if hasattr(tool, "schema"):
        return dict(tool.schema)
    try:
        hints = get_type_hints(tool)
    except Exception:  # a user's code: an annotation may name a type that does not exist
        hints = {}
    summary, descriptions = _parse_docstring(inspect.getdoc(tool) or "")
    fields, required = dict[str, Any](), list[str]()
    for field, parameter in inspect.signature(tool).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        fields[field] = _make_type_schema(hints.get(field, Any))
        if field in descriptions:
            fields[field]["description"] = descriptions[field]
        if parameter.default is parameter.empty:
            required.append(field)
    parameters = {"type": "object", "properties": fields, **({"required": required} if required else {})}
    function = {"name": name, "description": summary, "parameters": parameters}
    return {"type": "function", "function": function}


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return (the first paragraph, the descriptions of arguments) of a docstring."""
    summary = " ".join(text.partition("\n\n")[0].split())
    arguments = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE)
    descriptions = re.findall(
        r"^[ \t]+(\w+)(?: *\([^)]*\))?: *(.+)", arguments[1] if arguments else "", re.MULTILINE
    )
    return summary.partition(" Args:")[0], dict(descriptions)


def _make_type_schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type; {} for a type that JSON does not have."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return {"anyOf": [_make_type_schema(argument) for argument in arguments]}
    if origin in (list, tuple, Sequence):
        return {"type": "array", "items": _make_type_schema(arguments[0])}
    return {"type": "object"} if origin in (dict, Mapping) else {}


# --- tools by name -----------------------------------------------------------------------------------------

MAX_EXPRESSION_CHARS = 200
MAX_BITS = 2048  # of a power; keeps every result printable and every step short

_BINARY_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
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
    return str(_evaluate(ast.parse(expression.strip(), mode="eval").body))


def _evaluate(node: ast.expr) -> int | float:
    """Evaluate the syntax tree of an arithmetic expression. Raises ValueError for other nodes and too large
    powers."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _raise_to_power(_evaluate(left), _evaluate(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY_OPERATIONS:
            return _BINARY_OPERATIONS[type(op)](_evaluate(left), _evaluate(right))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic; use numbers, + - * / // % ** and parentheses")


def _raise_to_power(base: int | float, exponent: int | float) -> int | float:
    """Compute a power. Raises ValueError if it has more than MAX_BITS, or is complex."""
    if isinstance(base, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise ValueError(f"{base} ** {exponent} is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError(f"{base} ** {exponent} is not a real number")
    return result


BUILT_IN: dict[str, Tool] = {"calculator": calculator}


def resolve_tools(specs: Sequence[str]) -> dict[str, Tool]:
    """Return tools by name. A spec is a built-in (``calculator``), ``module:function``, ``path.py:function``,
    or an MCP server ("mcp:COMMAND", "mcp:https://..."), which is started and gives all its tools.

    Raises ValueError with one sentence, also for two tools of the same name.
    """
    tools = dict[str, Tool]()
    for spec in specs:
        if spec.startswith(mcp_tools.PREFIX):
            new_tools: Mapping[str, Tool] = mcp_tools.McpServer(spec).tools
        else:
            new_tools = {spec.rpartition(":")[2]: BUILT_IN.get(spec) or _import_tool(spec)}
        if repeated_names := sorted(tools.keys() & new_tools):
            raise ValueError(
                f"task.tools has {repeated_names[0]!r} twice, the second time from {spec!r}; drop one"
            )
        tools |= new_tools
    return tools


def _import_tool(spec: str) -> Tool:
    return load_named(spec, "tool", nearest=get_close_matches(spec, BUILT_IN, n=1, cutoff=0)[0])
