"""What sections of a recipe are made of: their base, types of values, and which of these name files.

A relative name in a file begins at that file's folder, on the command line at the shell's. A loaded recipe,
and the one that a run folder keeps, has absolute names.
"""

from __future__ import annotations

import os
import re
import shlex
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ostinato.inputs import has_surrogate
from ostinato.objects import PICKLE


class PathKind(StrEnum):
    """What a text of a recipe names, if it names a file or a folder."""

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


_FOLDERS = re.compile(r"(^|[:, ])/(?:[^/,:@]*/)*")  # of /a/rows.jsonl, /a/file.py:name, judge:/a/x@2,/b/y
Change = Callable[[str, PathKind, str], str]  # (dotted key, kind, text) -> text


def map_paths(tree: Mapping[str, Any], section: Any, change: Change, prefix: str = "") -> dict[str, Any]:
    """A copy of ``tree``, the keys of ``section``, with ``change`` applied to every text that has a PathKind.
    What has another type than the section says is left to its validation."""
    result = dict(tree)
    for key, field in section.model_fields.items():
        if key not in tree:
            continue
        kind = next((one for one in field.metadata if isinstance(one, PathKind)), None)
        inner = next(_sections_in(field.annotation), None)
        if kind is not None:
            result[key] = _texts(tree[key], lambda text, at=prefix + key, kind=kind: change(at, kind, text))
        elif inner is not None:
            result[key] = _sections(tree[key], inner, change, prefix + key, field.annotation is inner)
    return result


def without_folders(tree: Mapping[str, Any], section: Any) -> dict[str, Any]:
    """``tree`` with names of files in place of absolute paths: what is the same in any folder."""
    return map_paths(
        tree, section, lambda key, kind, text: text if "://" in text else _FOLDERS.sub(r"\1", text)
    )


def _sections_in(annotation: Any) -> Iterator[Any]:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _sections_in(part)


def _sections(value: Any, section: Any, change: Change, prefix: str, single: bool) -> Any:
    """``value`` is one section, or several of them by name or in a list."""
    if isinstance(value, Mapping):
        if single:
            return map_paths(value, section, change, f"{prefix}.")
        return {key: _sections(one, section, change, f"{prefix}.{key}", True) for key, one in value.items()}
    if isinstance(value, list | tuple) and not single:
        return [_sections(one, section, change, f"{prefix}[{k}]", True) for k, one in enumerate(value)]
    return value


def _texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _texts(one, change) for key, one in value.items()}
    return [_texts(one, change) for one in value] if isinstance(value, list | tuple) else value


def make_absolute(kind: PathKind, text: str, base: Path) -> str:
    """``text`` with an absolute path where it names a file or a folder, a relative one beginning at ``base``;
    as it is where it names something else, or cannot be a name of a file."""
    if has_surrogate(text):
        return text
    match kind:
        case PathKind.FILE:
            is_path = bool(text)
        case PathKind.ROWS | PathKind.RECIPE:
            by_name = text in ("", "arithmetic", "seeds") or text.startswith(("gym:", "hf:"))
            is_path = not by_name and ("/" in text or bool(Path(text).suffix) or _exists(text, base))
        case PathKind.MODEL:
            by_name = text in ("", "smollm2-135m") or text.startswith("asset:")
            is_hub_name = text.count("/") < 2 and not text.startswith((".", "~", "/"))
            is_path = not by_name and (not is_hub_name or _exists(text, base))
        case PathKind.PROGRAM:
            is_path = "/" in text
        case PathKind.WORD:
            is_path = os.path.isfile(base / text)
        case PathKind.REWARD if text.startswith("judge:"):
            judges = text.removeprefix("judge:").split(",")
            return "judge:" + ",".join(_judge(judge.strip(), base) for judge in judges)
        case PathKind.CODE if text.startswith("mcp:"):
            if "://" in text:
                return text
            command = shlex.split(text.removeprefix("mcp:"))
            return "mcp:" + shlex.join(make_absolute(PathKind.WORD, word, base) for word in command)
        case PathKind.CODE | PathKind.REWARD:
            where, colon, name = text.rpartition(":")
            return _absolute_path(where, base) + colon + name if where.endswith((".py", PICKLE)) else text
        case PathKind.OVERRIDE:
            raise AssertionError("a value has a kind of its own")
    return _absolute_path(text, base) if is_path else text


def _exists(text: str, base: Path) -> bool:
    """There; or in the shell's folder, from where it must not be taken instead."""
    return os.path.exists(base / text) or os.path.exists(text)


def _judge(text: str, base: Path) -> str:
    if text.startswith(("http://", "https://")):
        return text
    name, at, revision = text.rpartition("@") if "@" in text.rpartition("/")[2] else (text, "", "")
    return make_absolute(PathKind.MODEL, name, base) + at + revision


def _absolute_path(text: str, base: Path) -> str:
    return os.path.normpath(base.resolve() / os.path.expanduser(text))


def check_files(recipe: Any) -> None:
    """Raises ValueError for the first file or folder that a loaded ``recipe`` names and that is not there."""

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
