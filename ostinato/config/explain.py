"""Errors of a TOML file (a recipe, a product) as one sentence: the field, the value, the fix."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from ostinato.other_names import key_hint

Model = type[BaseModel]

_MENDS = {
    "int_type": "use a whole number",
    "int_parsing": "use a whole number",
    "int_from_float": "use a whole number",
    "float_type": "use a number",
    "float_parsing": "use a number",
    "bool_type": "use true or false",
    "bool_parsing": "use true or false",
    "string_type": "use a string in quotes",
    "path_type": "use a path in quotes",
    "tuple_type": "use a list in brackets",
    "dict_type": "use a table",
    "model_type": "use a section of keys",
    "greater_than": "use a number above {gt}",
    "greater_than_equal": "use {ge} or more",
    "less_than": "use a number below {lt}",
    "less_than_equal": "use {le} or less",
    "finite_number": "use a finite number",
}

_UNIONS = {
    "trainer.replay": 'use true, false or "shuffled"',
    "engine.threads": 'use "auto" or a whole number of 1 or more',
    "reward.solved_at": 'use "full" or a number',
    "trainer.budget": 'use a number of steps, or an amount of compute, e.g. "2e14 flops"',
    "eval.every": 'use a number of steps, or an amount of compute, e.g. "2e14 flops"',
}


def explain(error: ValidationError, model: Model, what: str = "a recipe") -> str:
    """All unknown keys, else the first fault: field, value, fix. The number of other faults follows in
    brackets; ``what`` is the file that ``model`` describes."""
    faults = error.errors(include_url=False)
    unknown = [fault for fault in faults if fault["type"] == "extra_forbidden"]  # a typo explains the rest
    named = unknown or faults[:1]
    # members of a union report one fault each
    count = len({fault["loc"][:2] for fault in faults} - {fault["loc"][:2] for fault in named})
    others = f" (and {count} more in {what.replace('a ', 'this ', 1)})" if count else ""
    return "; ".join(_explain_fault(fault, model, what) for fault in named) + others


def _explain_fault(fault: Any, model: Model, what: str) -> str:
    """The sentence of one of pydantic's faults."""
    loc = [str(part) for part in fault["loc"] if part != "[key]"]
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    if fault["type"] == "extra_forbidden":
        return _explain_unknown(loc, model, what)
    field = _join_name(loc, model)
    if fault["type"] == "missing":
        entry = f"every {_join_name(loc[:-2], model)} section names its own" if len(loc) > 2 else "add it"
        return f"{field} is missing; {entry}"
    if (
        union := "eval.every" if (loc[:2] == ["eval", "downstream"] and loc[3:4] == ["every"]) else field
    ) in _UNIONS:  # pydantic reports each branch
        fix = _UNIONS[union]
    elif fault["type"] in ("literal_error", "enum"):
        fix = f"use one of {fault['ctx']['expected'].replace(' or ', ', ')}"
    else:
        fix = str(_MENDS.get(fault["type"], fault["msg"])).format(**fault.get("ctx", {}))
    return f"{field} is {fault['input']!r:.200}; {fix}"


def _join_name(loc: Sequence[str], model: Model) -> str:
    """The dotted name of a field, without the branches of a union that pydantic appends."""
    depth, _ = _find_section(loc, model)
    text = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in loc[:depth]).removeprefix(".")
    return text + "".join(f"[{part}]" for part in loc[depth:] if part.isdigit())


def _find_section(loc: Sequence[str], model: Model) -> tuple[int, Model | None]:
    """(number of leading parts of ``loc`` that name fields and entries, the section that they end in or
    None)."""
    depth, section = 0, model
    while depth < len(loc):
        field = section.model_fields.get(loc[depth])
        if field is None:
            return depth + 1, None
        inner, entries = _unwrap_section(field.annotation)
        depth += 1 + entries
        if inner is None or depth >= len(loc):
            return min(depth, len(loc)), inner
        section = inner
    return depth, section


def _unwrap_section(annotation: Any) -> tuple[Model | None, bool]:
    """(class of the sections in a field, or None; whether the field holds several, by name or number)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    several = typing.get_origin(annotation) not in (typing.Union, types.UnionType, typing.Annotated)
    for argument in typing.get_args(annotation):
        section, inside = _unwrap_section(argument)
        if section is not None:
            return section, several or inside
    return None, False


def _list_sections(model: Model, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Model]]:
    """Yield (path, section) of the root and of every single section."""
    yield path, model
    for name, field in model.model_fields.items():
        section, several = _unwrap_section(field.annotation)
        if section is not None and not several:
            yield from _list_sections(section, (*path, name))


def _explain_unknown(loc: Sequence[str], model: Model, what: str) -> str:
    """The sentence of an unknown key, with a hint, a section that has it, or a similar key."""
    parent, key = tuple(loc[:-1]), loc[-1]
    section = _find_section(parent, model)[1] or model
    matches = difflib.get_close_matches(key, section.model_fields, n=1, cutoff=0.6)
    elsewhere = [
        ".".join((*path, key))
        for path, section_model in _list_sections(model)
        if key in section_model.model_fields
    ]
    if what == "a recipe" and (name := key_hint(".".join(loc))):
        fix = name
    elif elsewhere:
        fix = f"did you mean {elsewhere[0]}?"
    elif matches:
        fix = f"did you mean {'.'.join((*parent, matches[0]))}?"
    else:
        fix = f"the keys of {'.'.join(parent) or what} are {', '.join(section.model_fields)}"
    return f"{'.'.join(loc)} is not a key of {what}; {fix}"
