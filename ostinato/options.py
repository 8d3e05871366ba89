"""The options of a command as the fields of a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import typer

from ostinato.access import Access

Command = Callable[..., None]


def add_options(kind: type[Any], name: str) -> Callable[[Command], Command]:
    """A decorator that replaces the parameter ``name`` of a command by an option per field of the dataclass
    ``kind``, with its annotation and default; the command gets an instance."""
    hints = get_type_hints(kind, include_extras=True)
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default if field.default_factory is MISSING else field.default_factory(),
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]

    def decorate(command: Command) -> Command:
        originals = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [
            parameter.replace(kind=parameter.KEYWORD_ONLY)
            for parameter in originals
            if parameter.name != name
        ] + options

        @functools.wraps(command)
        def with_options(**values: Any) -> None:
            instance = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            command(**values, **{name: instance})

        with_options.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        return with_options

    return decorate


Hosts = Annotated[
    list[str] | None,
    typer.Option("--allowed-host", metavar="NAME", help="A further name of this server, e.g. of a proxy."),
]
Origins = Annotated[
    list[str] | None,
    typer.Option("--origin", metavar="URL", help="A web page that may call it (CORS); '*': all."),
]


def make_access(hosts: list[str] | None, origins: list[str] | None) -> Access:
    """The access that the options allow."""
    return Access(hosts=frozenset(hosts or ()), origins=frozenset(origins or ()))
