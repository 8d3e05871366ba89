"""The reference of all recipe keys as Markdown: ``python -m ostinato.config.reference > docs/recipe.md``.

Types and defaults come from the sections, comments from the text of their source. The keys of ``[algo]`` are
those of ``algo.algorithms.Algorithm``, which is read as text, so that torch is not needed.
"""

from __future__ import annotations

import ast
import types
import typing
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic.fields import FieldInfo

from ostinato.config.fields import ALGO, comments_of
from ostinato.config.recipe import Recipe
from ostinato.config.sections import AlgoSection, DownstreamSection, Section
from ostinato.config.tasks import MixedTask, OneTask
from ostinato.other_names import key_hint

HEAD = """# All recipe keys

This page is generated: `python -m ostinato.config.reference > docs/recipe.md`. A recipe is a TOML file; each
section below is a table of it. On the command line a key is written with its section: `trainer.steps=200`.

A relative path to what is read (rows, models, adapters, `file.py:name`) begins at the folder of the recipe's
file, on the command line at the current one. `log.dir`, which is written to, begins at the current folder.
"""
ALGORITHM = """Keys beside `name`; the defaults are those of `grpo`. Every other name changes some of them,
and a `correction` brings its own bounds: the tables `NAMED` and `BOUNDS` in `ostinato/algo/algorithms.py`.
"""
TOP = "Top level"
NAMES = {"str": "string", "float": "number", "int": "integer", "bool": "boolean"}
BOUNDS = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}"}


Key = tuple[str, str, str, str]  # name, type, default, comment


def reference() -> str:
    """The text of the page."""
    parts = [HEAD]
    for title, text, keys in sections():
        lines = ["| key | type | default | |", "| --- | --- | --- | --- |"]
        for name, kind, default, comment in keys:
            cells = (f"`{name}`", kind, f"`{default}`" if default else "", comment)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts += [f"## {title}\n"] if title else []
        parts += [*([text] if text else []), "\n".join(lines) + "\n"]
    return "\n".join(parts)


def find_keys(pattern: str) -> Iterator[str]:
    """Yield what ``pattern`` of another trainer is here, and a line for each key whose name or description
    has it. Raises ValueError without any."""
    number, section = 0, ""
    if hint := key_hint(pattern):
        number = 1
        yield hint
    for title, _, keys in sections():
        section = title.strip("[]") if title else section
        for name, kind, default, comment in keys:
            key = name if section == TOP else f"{section}.{name}"
            text = f"{key}  ({kind}; {default or '-'})  {comment}".replace("`", "").rstrip()
            if pattern.lower() in text.lower():
                number += 1
                yield text
    if not number:
        raise ValueError(f"no key of a recipe has {pattern!r} in its name or description; see ostinato keys")


def sections() -> Iterator[tuple[str, str, list[Key]]]:
    """Yield (title, text, keys) of each table of the page; a title of "" continues the section before."""
    folder, fields = Path(__file__).parent, Recipe.model_fields
    comments: dict[str, dict[str, str]] = {}
    for name in ("sections.py", "tasks.py", "recipe.py"):
        comments |= comments_of((folder / name).read_text(encoding="utf-8"))

    def table(title: str, section: type[Section], above: Mapping[str, Any] = MappingProxyType({})) -> Any:
        described = {
            k: v for base in reversed(section.__mro__) for k, v in comments.get(base.__name__, {}).items()
        }
        lines = [line.strip() for line in (section.__doc__ or "").strip().splitlines()]
        text = "\n".join(lines).replace("``", "`").replace("<", "&lt;") + "\n"
        new_fields = {name: field for name, field in section.model_fields.items() if name not in above}
        return title, text, _describe_keys(new_fields, described)

    tables = {
        name: field.annotation
        for name, field in fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }
    yield TOP, "", _describe_keys({n: f for n, f in fields.items() if n not in tables}, comments["Recipe"])
    for name in fields:
        if name in tables:
            yield table(f"[{name}]", tables[name])
        if name == "algo":
            yield "", ALGORITHM, [key for key in algorithm_keys() if key[0] not in AlgoSection.model_fields]
        if name == "task":
            yield table("[[task.mix]]", MixedTask, OneTask.model_fields)
        if name == "eval":
            yield table("[eval.downstream.NAME]", DownstreamSection)


def algorithm_keys() -> Iterator[Key]:
    """Yield (key, type, default, comment) of every key of ``[algo]`` but its name."""
    source = (ALGO / "algorithms.py").read_text(encoding="utf-8")
    comments = comments_of(source)["Algorithm"]
    choices = _read_choices()
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
            kind = " or ".join(f"`{_to_toml(value)}`" for value in members.values())
        else:
            default, kind = ast.literal_eval(item.value), NAMES[kind]
        yield name, kind, _to_toml(default), comments[name]


def _read_choices() -> dict[str, dict[str, str]]:
    """{enumeration: {member: value in a recipe}} of the package ``algo``."""
    choices: dict[str, dict[str, str]] = {}
    for file in sorted(ALGO.glob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "StrEnum" for base in node.bases):
                members = [item for item in node.body if isinstance(item, ast.Assign)]
                choices[node.name] = {ast.unparse(m.targets[0]): ast.literal_eval(m.value) for m in members}
    return choices


def _describe_keys(fields: Mapping[str, FieldInfo], comments: Mapping[str, str]) -> list[Key]:
    """The keys of a section, with bounds in their type."""
    keys = []
    for name, field in fields.items():
        default = "" if field.is_required() else _to_toml(field.get_default(call_default_factory=True))
        limits = [
            words.format(f"{limit:g}")
            for metadata in field.metadata
            for bound, words in BOUNDS.items()
            if (limit := getattr(metadata, bound, None)) is not None
        ]
        keys.append((name, ", ".join([_describe_type(field.annotation), *limits]), default, comments[name]))
    return keys


def _to_toml(value: Any) -> str:
    """A default value as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(_to_toml(item) for item in value)}]"
    return str(value)


def _describe_type(annotation: Any) -> str:
    """The description of a type in the page."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _describe_type(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{_to_toml(value)}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe_type(part) for part in arguments)
    if origin is tuple:
        return f"list of {_describe_type(arguments[0])}"
    if origin is dict:
        return f"table of {_describe_type(arguments[1])}" if arguments[1] is not Any else "table"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return " or ".join(f"`{_to_toml(str(value))}`" for value in annotation)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    return NAMES[annotation.__name__]


if __name__ == "__main__":
    print(reference(), end="")
