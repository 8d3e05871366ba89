"""Building blocks of a recipe's sections: their base class, types of values, and those that name files.

A relative name in a file begins at that file's folder, on the command line at the current folder. A loaded
recipe, and the one in a run folder, has absolute names.
"""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import tokenize
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ostinato.inputs import has_surrogate
from ostinato.objects import PICKLE

ALGO = Path(__file__).parent.parent / "algo"  # read as text: importing it loads torch


class PathKind(StrEnum):
    """Kinds of texts of a recipe that may name a file or a folder."""

    FILE = "file"  # always
    ROWS = "rows"  # unless a source by name: arithmetic, seeds, gym:NAME, hf:NAME
    MODEL = "model"  # unless asset:NAME, smollm2-135m or owner/name of the hub
    CODE = "code"  # file.py:name, or file.pkl:name; mcp:COMMAND, words of which may be files
    REWARD = "reward"  # as code, or judge:MODEL,MODEL@REVISION
    PROGRAM = "program"  # with a slash; else a command of the PATH
    WORD = "word"  # of a command line, where there is such a file
    RECIPE = "recipe"  # unless a packaged one by name
    OVERRIDE = "override"  # key=value, whose value may be any of these


Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, le=1)]
Names = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has arrays, not tuples
Rewards = Annotated[Names, PathKind.REWARD]
Overrides = Annotated[Names, PathKind.OVERRIDE]
Floats = Annotated[tuple[float, ...], Field(strict=False)]
Counts = Annotated[tuple[int, ...], Field(strict=False)]

File = Annotated[str, PathKind.FILE]
RowsName = Annotated[str, PathKind.ROWS]
ModelName = Annotated[str, PathKind.MODEL]
Code = Annotated[str, PathKind.CODE]
Program = Annotated[str, PathKind.PROGRAM]


class Section(BaseModel):
    """Frozen, typed without coercion (no "3" for 3), and closed: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


_FOLDERS = re.compile(r"(^|[:, ])/(?:[^/,:@]*/)*")  # in /a/rows.jsonl, /a/file.py:name, judge:/a/x@2,/b/y
Change = Callable[[str, PathKind, str], str]  # (dotted key, kind, text) -> text


def map_paths(tree: Mapping[str, Any], section: Any, change: Change, prefix: str = "") -> dict[str, Any]:
    """A copy of ``tree``, the keys of ``section``, with ``change`` applied to every text that has a PathKind.
    A value of a wrong type stays, for validation to refuse."""
    result = dict(tree)
    for key, field in section.model_fields.items():
        if key not in tree:
            continue
        kind = next((metadata for metadata in field.metadata if isinstance(metadata, PathKind)), None)
        subsection = next(_find_sections(field.annotation), None)
        if kind is not None:
            result[key] = _texts(tree[key], lambda text, at=prefix + key, kind=kind: change(at, kind, text))
        elif subsection is not None:
            result[key] = _map_sections(
                tree[key], subsection, change, prefix + key, field.annotation is subsection
            )
    return result


def without_folders(tree: Mapping[str, Any], section: Any) -> dict[str, Any]:
    """``tree`` with names of files in place of absolute paths, so that it is the same in any folder."""
    return map_paths(
        tree, section, lambda key, kind, text: text if "://" in text else _FOLDERS.sub(r"\1", text)
    )


def _find_sections(annotation: Any) -> Iterator[Any]:
    """Yield the section classes in a type annotation."""
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _find_sections(part)


def _map_sections(value: Any, section: Any, change: Change, prefix: str, single: bool) -> Any:
    """``map_paths`` on ``value``: a ``single`` section, or several of them by name or in a list."""
    if isinstance(value, Mapping):
        if single:
            return map_paths(value, section, change, f"{prefix}.")
        return {
            key: _map_sections(item, section, change, f"{prefix}.{key}", True) for key, item in value.items()
        }
    if isinstance(value, list | tuple) and not single:
        return [_map_sections(item, section, change, f"{prefix}[{k}]", True) for k, item in enumerate(value)]
    return value


def _texts(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with ``change`` applied to every text in it, keys excepted."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _texts(item, change) for key, item in value.items()}
    return [_texts(item, change) for item in value] if isinstance(value, list | tuple) else value


def make_absolute(kind: PathKind, text: str, base: Path) -> str:
    """``text`` with its path made absolute from ``base``; unchanged if it does not name a file or folder."""
    if has_surrogate(text):
        return text
    match kind:
        case PathKind.FILE:
            is_path = bool(text)
        case PathKind.ROWS | PathKind.RECIPE:
            by_name = text in ("", "arithmetic", "seeds") or text.startswith(("gym:", "hf:"))
            is_path = not by_name and ("/" in text or bool(Path(text).suffix) or _is_there(text, base))
        case PathKind.MODEL:
            by_name = text in ("", "smollm2-135m") or text.startswith("asset:")
            is_hub_name = text.count("/") < 2 and not text.startswith((".", "~", "/"))
            is_path = not by_name and (not is_hub_name or _is_there(text, base))
        case PathKind.PROGRAM:
            is_path = "/" in text
        case PathKind.WORD:
            is_path = os.path.isfile(base / text)
        case PathKind.REWARD if text.startswith("judge:"):
            judges = text.removeprefix("judge:").split(",")
            return "judge:" + ",".join(_resolve_judge(judge.strip(), base) for judge in judges)
        case PathKind.CODE if text.startswith("mcp:"):
            if "://" in text:
                return text
            command = shlex.split(text.removeprefix("mcp:"))
            return "mcp:" + shlex.join(make_absolute(PathKind.WORD, word, base) for word in command)
        case PathKind.CODE | PathKind.REWARD:
            file, colon, name = text.rpartition(":")
            return _to_absolute(file, base) + colon + name if file.endswith((".py", PICKLE)) else text
        case PathKind.OVERRIDE:
            raise AssertionError("a value has a kind of its own")
    return _to_absolute(text, base) if is_path else text


def _is_there(text: str, base: Path) -> bool:
    """Whether the path exists from ``base``, or from the current folder (and then must not be read as a
    name)."""
    return os.path.exists(base / text) or os.path.exists(text)


def _resolve_judge(text: str, base: Path) -> str:
    """The model of a judge, with an optional @revision, with its path made absolute."""
    if text.startswith(("http://", "https://")):
        return text
    name, at, revision = text.rpartition("@") if "@" in text.rpartition("/")[2] else (text, "", "")
    return make_absolute(PathKind.MODEL, name, base) + at + revision


def _to_absolute(text: str, base: Path) -> str:
    return os.path.normpath(base.resolve() / os.path.expanduser(text))


def check_files(recipe: Any) -> None:
    """Raises ValueError for the first missing file or folder that a loaded ``recipe`` names."""

    def look(key: str, kind: PathKind, text: str) -> str:
        is_code = kind is PathKind.CODE or kind is PathKind.REWARD
        path = text.rpartition(":")[0] if is_code else text
        if os.path.isabs(path) and not os.path.exists(path) and not text.startswith("judge:"):
            raise ValueError(
                f"{key} is {text!r}, and there is no such file or folder; check the path (it begins at the "
                "recipe's folder, on the command line at the current one)"
            )
        return text

    map_paths(recipe.model_dump(mode="json"), type(recipe), look)


def comments_of(source: str) -> dict[str, dict[str, str]]:
    """{class: {field: comment at the end of its line}} of Python source."""
    lines = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        node.name: {
            item.target.id: lines.get(item.end_lineno or 0, "")
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }
