"""Plain values as TOML: what the standard library reads and cannot write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def dumps(tree: Mapping[str, Any]) -> str:
    """Keys first, then a section for each table; tables inside a section are inline.

    ``tomllib.loads(dumps(tree)) == tree``, but for tuples, which become lists. Raises ValueError for what
    TOML cannot hold (None).
    """
    lines = [f"{_key(key)} = {_literal(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for section, values in tree.items():
        if isinstance(values, dict):
            pairs = (f"{_key(key)} = {_literal(value)}" for key, value in values.items())
            lines += ["", f"[{_key(section)}]", *pairs]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return '"' + "".join(_ESCAPES.get(char) or _escape(char) for char in value) + '"'
        case list() | tuple():
            return "[" + ", ".join(_literal(item) for item in value) + "]"
        case dict():
            return "{" + ", ".join(f"{_key(key)} = {_literal(item)}" for key, item in value.items()) + "}"
    raise ValueError(f"a recipe cannot hold {value!r}; use a string, number, boolean, list or table")


_ESCAPES = {'"': '\\"', "\\": "\\\\"}


def _escape(char: str) -> str:
    return f"\\u{ord(char):04x}" if ord(char) < 32 or ord(char) == 127 else char


def _key(key: str) -> str:
    bare = key and key.isascii() and all(char.isalnum() or char in "_-" for char in key)
    return key if bare else _literal(key)
