"""What is wrong with a recipe, in one sentence: the field, the value, the fix."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ostinato.config.sections import DownstreamSection, MixedTask

Keys = Mapping[tuple[str, ...], Sequence[str]]  # of each section, by its path


_MENDS = {
    "int_type": "use a whole number",
    "float_type": "use a number",
    "bool_type": "use true or false",
    "string_type": "use a string in quotes",
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


def explain(error: ValidationError, keys: Keys) -> str:
    """The first fault in one sentence: field, value, fix. The number of other faults follows in brackets;
    ``keys`` are those that there are."""
    faults = error.errors(include_url=False)
    first = min(faults, key=lambda fault: fault["type"] != "extra_forbidden")  # a typo explains the rest
    fields = {fault["loc"][:2] for fault in faults}  # members of a union report one fault each
    more = f" (and {len(fields) - 1} more in this recipe)" if len(fields) > 1 else ""
    return _sentence(first, keys) + more


def _sentence(fault: Any, keys: Keys) -> str:
    loc = [str(part) for part in fault["loc"]]
    if fault["type"] == "value_error":
        return str(fault["ctx"]["error"])
    if fault["type"] == "extra_forbidden":
        return _unknown_key(loc, keys)
    field = _dotted(loc)
    if fault["type"] == "missing":
        return f"{field} is missing; every {_dotted(loc[:-2])} section names its own"
    if (union := "eval.every" if _is_schedule(loc) else field) in _UNIONS:  # pydantic reports each branch
        fix = _UNIONS[union]
    elif fault["type"] in ("literal_error", "enum"):
        fix = f"use one of {fault['ctx']['expected'].replace(' or ', ', ')}"
    else:
        fix = str(_MENDS.get(fault["type"], fault["msg"])).format(**fault.get("ctx", {}))
    return f"{field} is {fault['input']!r}; {fix}"


def _dotted(loc: Sequence[str]) -> str:
    tables = (["eval", "downstream"], ["task", "mix"])  # sections by name or number
    depth = 4 if loc[:2] in tables else 2
    text = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in loc[:depth]).removeprefix(".")
    return text + "".join(f"[{part}]" for part in loc[depth:] if part.isdigit())


def _is_schedule(loc: Sequence[str]) -> bool:
    return loc[:2] == ["eval", "downstream"] and loc[3:4] == ["every"]


def _unknown_key(loc: Sequence[str], keys: Keys) -> str:
    parent, key = tuple(loc[:-1]), loc[-1]
    deep = MixedTask if parent[:1] == ("task",) else DownstreamSection  # no other section is so deep
    here = keys.get(parent, tuple(deep.model_fields))
    near = difflib.get_close_matches(key, here, n=1, cutoff=0.6)
    elsewhere = [".".join((*path, key)) for path, names in keys.items() if key in names and path != parent]
    if near:
        fix = f"did you mean {'.'.join((*parent, near[0]))}?"
    elif elsewhere:
        fix = f"did you mean {elsewhere[0]}?"
    else:
        fix = f"the keys of {'.'.join(parent) or 'a recipe'} are {', '.join(here)}"
    return f"{'.'.join(loc)} is not a key of a recipe; {fix}"
