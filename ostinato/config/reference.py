"""The reference of all recipe keys as Markdown: ``python -m ostinato.config.reference > docs/recipe.md``.

Types and defaults come from the sections, comments from the text of their source. The keys of ``[algo]`` are
those of ``algo.algorithms.Algorithm``, which is read as text: a recipe can be read without torch.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
import types
import typing
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from pydantic.fields import FieldInfo

from ostinato.config.recipe import Recipe
from ostinato.config.sections import AlgoSection, DownstreamSection, Section
from ostinato.config.tasks import MixedTask, TaskSection

ALGO = Path(__file__).parent.parent / "algo"
HEAD = """# All recipe keys

This page is generated: `python -m ostinato.config.reference > docs/recipe.md`. A recipe is a TOML file; each
section below is a table of it. On the command line a key is written with its section: `trainer.steps=200`.

A relative path to what is read (rows, models, adapters, `file.py:name`) begins at the folder of the recipe's
file, on the command line at the current one. `log.dir`, which is written to, begins at the current folder.
"""
NAMES = {"str": "string", "float": "number", "int": "integer", "bool": "boolean"}
BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


def reference() -> str:
    """The whole page."""
    here = Path(__file__).parent
    sections, tasks, recipe = (
        comments_of((here / name).read_text(encoding="utf-8"))
        for name in ("sections.py", "tasks.py", "recipe.py")
    )
    comments = sections | tasks
    fields = Recipe.model_fields
    plain = {name: field for name, field in fields.items() if not _is_section(field)}
    parts = [HEAD, "## Top level\n", _table(plain, recipe["Recipe"])]
    for name, field in fields.items():
        if _is_section(field):
            section = typing.cast(type[Section], field.annotation)
            parts += _section(f"[{name}]", section, comments)
            if section is AlgoSection:
                parts += [_algorithm()]
            if section is TaskSection:
                parts += _section("[[task.mix]]", MixedTask, comments, own=True)
            if name == "eval":
                parts += _section("[eval.downstream.NAME]", DownstreamSection, comments)
    return "\n".join(parts)


def find_keys(pattern: str) -> Iterator[str]:
    """A line for each key whose name or description has ``pattern``. Raises ValueError where none has."""
    section, number = "", 0
    for line in reference().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").strip("[]")
        if not line.startswith("| `"):
            continue
        cells = re.split(r"(?<!\\)\|", line.strip()[1:-1])
        name, kind, default, comment = (cell.replace("`", "").strip() for cell in cells)
        key = name if section == "Top level" else f"{section}.{name}"
        text = f"{key}  ({kind}; {default or '-'})  {comment}".rstrip()
        if pattern.lower() in text.lower():
            number += 1
            yield text
    if not number:
        raise ValueError(f"no key of a recipe has {pattern!r} in its name or description; see ostinato keys")


def _section(
    title: str, section: type[Section], comments: Mapping[str, Mapping[str, str]], *, own: bool = False
) -> list[str]:
    """Its part of the page; ``own``: without the keys of the class above it."""
    described = {
        key: text for one in reversed(section.__mro__) for key, text in comments.get(one.__name__, {}).items()
    }
    above = section.__mro__[1].model_fields if own else {}
    fields = {key: field for key, field in section.model_fields.items() if key not in above}
    return [f"## {title}\n", _text(section), _table(fields, described)]


def comments_of(source: str) -> dict[str, dict[str, str]]:
    """By class and field: the comment at the end of the field's line."""
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


def algorithm_keys() -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, comment) of every key that ``[algo]`` takes beside its name."""
    source = (ALGO / "algorithms.py").read_text(encoding="utf-8")
    comments = comments_of(source)["Algorithm"]
    choices = _choices()
    record = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Algorithm"
    )
    for item in record.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name) or item.value is None:
            continue
        if (name := item.target.id) in ("name", "overridden"):
            continue
        kind = ast.unparse(item.annotation)
        if isinstance(item.value, ast.Attribute):
            members = choices[kind.partition(" | ")[0]]
            default: Any = members[item.value.attr]
            kind = " or ".join(f"`{_toml(value)}`" for value in members.values())
        else:
            default, kind = ast.literal_eval(item.value), NAMES[kind]
        yield name, kind, _toml(default), comments[name]


def _choices() -> dict[str, dict[str, str]]:
    """By enumeration of ``algo`` and member: the value that a recipe writes."""
    choices: dict[str, dict[str, str]] = {}
    for file in sorted(ALGO.glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "StrEnum" for base in node.bases):
                members = [item for item in node.body if isinstance(item, ast.Assign)]
                choices[node.name] = {ast.unparse(m.targets[0]): ast.literal_eval(m.value) for m in members}
    return choices


def _algorithm() -> str:
    head = """Keys beside `name`; the defaults are those of `grpo`. Every other name changes some of them,
and a `correction` brings its own bounds: the tables `NAMED` and `BOUNDS` in `ostinato/algo/algorithms.py`.
"""
    rows = (row for row in algorithm_keys() if row[0] not in AlgoSection.model_fields)
    return f"{head}\n{_rows(rows)}"


def _table(fields: Mapping[str, FieldInfo], comments: Mapping[str, str]) -> str:
    return _rows((name, _type(field), _default(field), comments[name]) for name, field in fields.items())


def _rows(rows: typing.Iterable[tuple[str, str, str, str]]) -> str:
    lines = ["| key | type | default | |", "| --- | --- | --- | --- |"]
    for name, kind, default, comment in rows:
        cells = (f"`{name}`", kind, f"`{default}`" if default else "", comment)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _text(section: type[Section]) -> str:
    lines = [line.strip() for line in (section.__doc__ or "").strip().splitlines()]
    return "\n".join(lines).replace("``", "`").replace("<", "&lt;") + "\n"


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _default(field: FieldInfo) -> str:
    return "" if field.is_required() else _toml(field.get_default(call_default_factory=True))


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return str(value)


def _type(field: FieldInfo) -> str:
    limits = [
        words.format(f"{limit:g}")
        for metadata in field.metadata
        for name, words in BOUNDS.items()
        if (limit := getattr(metadata, name, None)) is not None
    ]
    return ", ".join([_kind(field.annotation), *limits])


def _kind(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{_toml(value)}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(part) for part in arguments)
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"table of {_kind(arguments[1])}" if arguments[1] is not Any else "table"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return " or ".join(f"`{_toml(str(value))}`" for value in annotation)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return NAMES[annotation.__name__]


if __name__ == "__main__":
    print(reference(), end="")
