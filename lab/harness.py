"""What all benches share: options from the fields of a dataclass, progress, a table, one JSON object.

@dataclass(frozen=True, slots=True, kw_only=True)
class Products(Bench):
    rounds: int = option(7, "Of all contenders in turn.")     # --rounds; a plain field is no option

    def measure(self, say: Say) -> dict[str, Any]: ...        # JSON; machine and settings are added
"""

from __future__ import annotations

import json
import sys
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, BooleanOptionalAction
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

from rich.console import RenderableType
from rich.table import Table

from lab.contender import ContenderFailed
from lab.settings import faster_dtype, folder_of, machine
from ostinato.terminal import Screen

Say = Callable[[str], None]
Result = Mapping[str, Any]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What is measured; the fields are its parameters."""

    def quick(self) -> Self:
        """With ``--quick``: whether it works, not what it says."""
        return self

    def settled(self) -> Self:
        """With what depends on the machine filled in, once threads are set."""
        return self

    def measure(self, say: Say) -> dict[str, Any]:
        """The JSON of the command. Raises ContenderFailed, or ValueError for parameters that do not fit."""
        raise NotImplementedError

    @staticmethod
    def table(result: Result) -> RenderableType:
        """The result for people."""
        raise NotImplementedError

    @staticmethod
    def passed(result: Result) -> bool:
        """Whether the command exits with 0."""
        return True


def option(default: Any, help: str, name: str = "", parse: Callable[[str], Any] | None = None) -> Any:
    """A field that is an option ``--name``, after the field where it has no other; ``parse`` reads its text
    where the type of the field does not say how."""
    return field(default=default, metadata={"help": help, "name": name, "parse": parse})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBench(Bench):
    """Of one model."""

    model: str = option("smollm2-135m", "A Hugging Face folder or a model name.")
    dtype: str = option("", "Of ours; empty: the faster one, as in a run.")

    @property
    def folder(self) -> Path:
        return folder_of(self.model)

    def settled(self) -> Self:
        return replace(self, dtype=self.dtype or faster_dtype(self.folder))


def seeds(text: str) -> tuple[int, ...]:
    """ "3" is 0 to 2, "10:15" 10 to 14. Raises ValueError."""
    first, _, end = text.rpartition(":")
    return tuple(range(int(first or 0), int(end)))


def parser(prog: str, bench: type[Bench]) -> ArgumentParser:
    """Of the options of a bench: ``parse_args`` gives those that were named, and ``quick`` and ``json``."""
    made = ArgumentParser(prog, description=bench.__doc__, argument_default=SUPPRESS)
    made.add_argument("--quick", action="store_true", help="Shorter: whether it works, not what it says.")
    made.add_argument("--json", metavar="FILE", help="Write the result there, - for standard output.")
    hints = get_type_hints(bench)
    for one in fields(bench):
        if "help" in one.metadata:
            flag = f"--{one.metadata['name'] or one.name.replace('_', '-')}"
            shown = f"{one.metadata['help']} Default: {_shown(one.default)}".replace("%", "%%")
            made.add_argument(
                flag, dest=one.name, help=shown, **_reads(hints[one.name], one.metadata["parse"])
            )
    return made


def _reads(hint: Any, parse: Callable[[str], Any] | None) -> dict[str, Any]:
    """How argparse reads a value of a type: words with commas for a tuple."""
    if parse is not None:
        return {"type": parse, "metavar": "N|FIRST:END" if parse is seeds else "TEXT"}
    if isinstance(hint, UnionType):  # X | None
        hint = get_args(hint)[0]
    if hint is bool:
        return {"action": BooleanOptionalAction}
    if get_origin(hint) is tuple:
        return {"type": partial(_words, get_args(hint)[0]), "metavar": "A,B,..."}
    return {"type": hint, "choices": list(hint)} if issubclass(hint, Enum) else {"type": hint}


def _words(of: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    try:
        return tuple(of(word.strip()) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r}: {error}") from None


def _shown(default: Any) -> str:
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def main(prog: str, bench: type[Bench], args: Sequence[str]) -> int:
    """Run a bench as a command. Returns the exit code."""
    given = vars(parser(prog, bench).parse_args(args))
    quick, file = given.pop("quick", False), given.pop("json", None)
    requested = bench(**given)
    try:
        result = measured((requested.quick() if quick else requested).settled())
    except ContenderFailed as error:
        say(f"ostinato: {error}")
        return 1
    tell(result, bench.table, file)
    return 0 if bench.passed(result) else 1


def measured(bench: Bench, say: Say = say) -> dict[str, Any]:
    """The result of a bench, with the machine before it (the load of the bench itself is not others')."""
    before = machine()
    return {"machine": before, "settings": asdict(bench)} | bench.measure(say)


def tell(result: Result, table: Callable[[Result], RenderableType], file: str | None) -> None:
    from ostinato.run import to_json

    text = json.dumps(json.loads(to_json(dict(result))), indent=1)  # no NaN, which JSON lacks
    if file == "-":
        print(text)
        return
    show(table(result))
    if file is not None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(f"{text}\n")


def show(table: RenderableType) -> None:
    """Text as it is; a rich table at the width of the terminal, and wide where there is none."""
    if isinstance(table, str):
        print(table, end="\n" if table else "")
    else:
        Screen().print(table)


def columns(title: str, names: Iterable[str], rows: Iterable[Iterable[object]], **more: Any) -> Table:
    """A table whose first column is of words and the others of numbers."""
    shown = Table(title=title, title_justify="left", **more)
    for number, name in enumerate(names):
        shown.add_column(name, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*map(str, row))
    return shown


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table of a page."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
