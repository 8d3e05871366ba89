"""JSON, TOML and text from outside, with an error in words for what the rest of the program cannot hold.

Python's readers accept more than the formats allow: half of a surrogate pair (``"\\ud83d"`` alone), which no
UTF-8 file, tokenizer or terminal takes, and nesting until the interpreter's stack is used up, which is a
RecursionError and no ValueError.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Any, TextIO, cast

MAX_DEPTH = 100  # of nested lists and objects: every writer and walker of ours recurses
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_PRINTABLE = re.compile(  # control characters, surrogates, and what changes the direction of other text
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")  # in JSON text: all that can become a surrogate


def parse_json(data: str | bytes, *, surrogates: bool = False) -> Any:
    """The value of a JSON text. Raises ValueError for what is no JSON or no UTF-8, is nested deeper than
    ``MAX_DEPTH``, or holds half of a surrogate pair (unless ``surrogates``: the caller checks or escapes)."""
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if not surrogates and _ESCAPE.search(text) and has_surrogate(value):
        raise ValueError("a text in it holds half of a surrogate pair, which is no character")
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """The tree of a TOML text. Raises ValueError for invalid TOML, and for too deep a nesting."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None


def _is_deep(value: Any) -> bool:
    """Whether lists and objects are nested deeper than ``MAX_DEPTH``."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return False
    return True


def has_surrogate(value: Any) -> bool:
    """Whether a text anywhere in ``value`` (keys too) holds half of a surrogate pair."""
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, str):
            if not node.isascii() and _SURROGATE.search(node):
                return True
        elif isinstance(node, Mapping):
            pending += [*node, *node.values()]
        elif isinstance(node, list | tuple):
            pending += node
    return False


def escape_surrogates(text: str) -> str:
    """``text`` with halves of surrogate pairs written as ``\\udc80``, the same value in JSON, so that writing
    or printing it never fails."""
    return text if text.isascii() else _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def make_printable(text: str) -> str:
    """``text`` for a person's terminal: control characters, but for line ends and tabs, are written as
    ``\\u001b``, so that what a model, a row or an exception says cannot move the cursor, set a title or the
    clipboard; halves of surrogate pairs likewise."""
    return _NOT_PRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def escape_stream(stream: TextIO) -> TextIO:
    """``stream`` for text, which passes through ``make_printable`` before it is written."""
    return cast(TextIO, _Escaping(stream))


class _Escaping:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(make_printable(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def replace_surrogates(text: str) -> str:
    """``text`` with U+FFFD for halves of surrogate pairs: what a tokenizer can read."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)
