"""A chat template in jinja2's sandbox, with limits on loops, recursion, time and the size of texts.

A template comes with a model's folder and is not trusted. It reads the names it is given and writes text: no
files, no code, and no more rounds, seconds or characters than the limits below. Operations that could make a
huge text or number at once are checked first (``*``, ``replace``), or removed where no chat template uses
them (``center``, ``lipsum``). Otherwise templates render as in transformers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARS = 1 << 20
MAX_CHARS = 16 << 20  # characters of a text, and items of a list
MAX_VALUES = 1 << 20  # in nested lists that are written
MAX_ROUNDS = 1_000_000  # of loops, and calls
MAX_SECONDS = 10.0  # of the processor, for one chat
MAX_BITS = 4096  # of a number
MAX_WIDTH = 10_000  # of an indentation, a truncated text

# Filters that no chat template uses, and filters whose arguments are checked, as they can make a huge text.
_NO_FILTERS = {"batch", "center", "filesizeformat", "format", "pprint", "random", "slice", "sum", "urlize"}
_NO_FILTERS |= {"wordwrap", "xmlattr"}
_CHECKED_FILTERS = {
    "capitalize",
    "e",
    "escape",
    "forceescape",
    "indent",
    "join",
    "lower",
    "replace",
    "round",
    "safe",
}
_CHECKED_FILTERS |= {
    "string",
    "striptags",
    "title",
    "tojson",
    "trim",
    "truncate",
    "upper",
    "urlencode",
    "wordcount",
}
_NO_METHODS = {"center", "encode", "expandtabs", "ljust", "rjust", "to_bytes", "translate", "zfill"}
_WIDE = re.compile(r"%[^a-zA-Z%]*([0-9]{4}|\*)|\{[^}]*([0-9]{4}|\{)")  # a width in a format


class ChatTemplate:
    """The compiled template ``text`` of ``folder``. Raises ValueError for an invalid template."""

    def __init__(self, text: str, folder: object, now: datetime) -> None:
        """``now``: the date for templates that print it."""
        self._folder = folder
        if len(text) > MAX_TEMPLATE_CHARS:
            raise ValueError(
                f"the chat template of {folder} has {len(text)} characters; "
                f"{MAX_TEMPLATE_CHARS} are read at most, shorten it"
            )
        try:
            self._template = _Environment(now).from_string(text)
        except Exception as error:  # deep nesting ends in errors of Python's own compiler
            raise ValueError(
                f"the chat template of {folder} is no jinja template ({_explain_error(error)}); fix it"
            ) from error

    def render(self, **names: Any) -> str:
        """The rendered text. Raises ValueError where the template refuses ``names`` or exceeds a limit."""
        try:
            context = self._template.new_context(names)
            return self._template.environment.concat(self._template.root_render_func(context))  # type: ignore[attr-defined]
        except Exception as error:  # an untrusted program can raise anything
            raise ValueError(
                f"the chat template of {self._folder} refuses these messages: "
                f"{_explain_error(error)}; fix either"
            ) from error


def _explain_error(error: Exception) -> str:
    """The first line of the error's message, or the reason for an error without one."""
    if isinstance(error, RecursionError):
        return "it calls itself without end"
    if isinstance(error, MemoryError):
        return "its text does not fit in memory"
    return str(error).partition("\n")[0] or type(error).__name__


class _CountedContext(Context):
    """The names of one rendering, with its use of rounds and seconds."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._rounds, self._deadline = 0, time.thread_time() + MAX_SECONDS

    def count(self) -> None:
        """Count one round of a loop or one call. Raises SecurityError beyond a limit."""
        self._rounds += 1
        if self._rounds > MAX_ROUNDS:
            raise SecurityError(f"it has taken {MAX_ROUNDS} rounds")
        if self._rounds % 64 == 0 and time.thread_time() > self._deadline:
            raise SecurityError(f"it has taken {MAX_SECONDS:g} s")


class _Generation(Extension):
    """{% generation %}, which marks the assistant's text in some templates, writes its content alone."""

    tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    context_class = _CountedContext

    def __init__(self, now: datetime) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_check_nested,
        )
        filters = {**self.filters, "tojson": _to_json}
        self.filters = {
            name: _guard_filter(name, filter_) if name in _CHECKED_FILTERS else filter_
            for name, filter_ in filters.items()
            if name not in _NO_FILTERS
        }
        self.filters |= {"counted": _count_items, "joined": _concat}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now.strftime(_check_width(form))

    concat = staticmethod(lambda pieces: _concat(pieces))  # joins the pieces of outputs, macros and blocks

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The syntax tree of the template, with counted loops and a bounded ``~``."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _wrap_filter(loop.iter, "counted")
        _replace_concats(tree)
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_width(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_size(sum(len(side) for side in (left, right) if isinstance(side, Sized)))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**" and not (abs(left) < 1 << 32 and abs(right) <= 64):
            raise SecurityError(f"{left} ** {right} is too large")
        elif operator == "%" and isinstance(left, str):
            _check_width(left)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, called: Any, /, *given: Any, **named: Any) -> Any:
        context.count()
        text = getattr(called, "__self__", None)
        if isinstance(text, str) and called.__name__ == "replace":
            _check_replace(text, *given)
        elif isinstance(text, str) and called.__name__ == "join" and given:
            given = (_check_nested([*given[0]]),)
            _check_size(len(text) * len(given[0]))
        return super().call(context, called, *given, **named)


def _wrap_filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _replace_concats(node: nodes.Node) -> None:
    """Replace every ``~`` below ``node`` by the bounded filter "joined"."""
    for field, value in node.iter_fields():
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, nodes.Node):
                _replace_concats(child)
        if isinstance(value, nodes.Concat):
            setattr(node, field, _wrap_join(value))
        elif isinstance(value, list):
            value[:] = [
                _wrap_join(child_node) if isinstance(child_node, nodes.Concat) else child_node
                for child_node in value
            ]


def _wrap_join(node: nodes.Concat) -> nodes.Filter:
    return _wrap_filter(nodes.List(node.nodes, lineno=node.lineno), "joined")


@pass_context
def _count_items(context: _CountedContext, items: Iterable[Any]) -> Iterator[Any]:
    """Yield ``items``, and count a round for each. Raises SecurityError beyond a limit."""
    for item in items:
        context.count()
        yield item


def _concat(pieces: Iterable[Any]) -> str:
    """The joined texts of ``pieces``. Raises SecurityError for a text beyond MAX_CHARS."""
    texts, length = list[str](), 0
    for piece in pieces:
        texts.append(str(_check_nested(piece)))
        length += len(texts[-1])
        _check_size(length)
    return "".join(texts)


def _check_size(size: int) -> None:
    """Raises SecurityError for a text or list larger than MAX_CHARS."""
    if size > MAX_CHARS:
        raise SecurityError(f"it makes a text or list of {size}; {MAX_CHARS} are the most")


def _check_product(left: Any, right: Any) -> None:
    """Raises SecurityError if ``left * right`` is too large a number, text or list."""
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            raise SecurityError("it makes a number that is too large")
        return
    sizes = [len(side) if isinstance(side, Sized) else side for side in (left, right)]
    if all(isinstance(size, int) for size in sizes):
        _check_size(sizes[0] * sizes[1])


def _check_replace(text: str, old: str = "", new: str = "", *_: Any) -> None:
    """Raises SecurityError if ``text.replace(old, new)`` could be too long."""
    num_matches = text.count(old) if isinstance(old, str) else 0
    _check_size(len(text) + num_matches * len(new))


def _check_width(form: str) -> str:
    """The format itself. Raises SecurityError if it has a large or variable width."""
    if _WIDE.search(form):
        raise SecurityError(f"the format {form[:40]!r} has a width")
    return form


def _check_nested(value: Any) -> Any:
    """``value`` itself. Raises SecurityError if its text is too large or has too many values; a list that
    occurs several times counts each time."""
    if not isinstance(value, Mapping | list | tuple):
        return value
    size, num_values, pending = 0, 0, [value]
    while pending:
        item = pending.pop()
        size += len(item) if isinstance(item, Sized) else 1
        num_values += 1
        _check_size(size)
        if num_values > MAX_VALUES:
            raise SecurityError(f"it writes a list of over {MAX_VALUES} values")
        if isinstance(item, Mapping):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            pending += item
    return value


def _guard_filter(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with a check of its arguments that raises SecurityError for too large a result."""
    index = int(hasattr(filter_, "jinja_pass_arg"))  # index of the value: behind jinja2's own argument

    @wraps(filter_)
    def call_checked(*given: Any, **named: Any) -> Any:
        value, options = given[index], (*given[index + 1 :], *named.values())
        if isinstance(value, Iterator):
            value = list(value)
        _check_nested(value)
        if any(isinstance(option, int) and option > MAX_WIDTH for option in options):
            raise SecurityError(f"the filter {name} has an option over {MAX_WIDTH}")
        if name == "replace":
            _check_replace(str(value), *(str(option) for option in options[:2]))
        elif name in ("indent", "join", "tojson"):
            size = len(value) if isinstance(value, Sized) else 1
            _check_size(size * sum(len(option) for option in options if isinstance(option, str)))
        return filter_(*given[:index], value, *given[index + 1 :], **named)

    return call_checked


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``value`` as JSON, with the options of the filter in ``transformers``."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
