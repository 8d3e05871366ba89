"""The shape of the house: no circle of files, readable classes, rooms that hold no more ideas than before.

    python tests/unit/test_house.py      write tests/rooms.toml: what is counted now

An idea is a module, a class or a function. A commit that lets a number of tests/rooms.toml rise says on a
line of its message that begins with "Replaces:" which idea the new one replaces, or why nothing can be.
"""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from math import ceil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ostinato"
TABLE = ROOT / "tests" / "rooms.toml"
MAX_CLASS_LINES = 300
ROUND = 500  # lines of the wheel, the lab and the tests are rounded up to it

Counts = Mapping[str, Mapping[str, int]]  # "modules", "classes", "functions" by room; "lines" by folder


def files() -> dict[str, Path]:
    """Every file of the package by the name of its module."""
    modules = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return modules


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imports(tree: ast.AST, modules: dict[str, Path]) -> Iterator[str]:
    """Modules of ours that a file imports anywhere, for type checkers too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield from (
                    name for name in (inside if inside in modules else node.module,) if name in modules
                )
        yield from imports(node, modules)


def room_of(file: Path) -> str:
    """ "algo", "apps.serve", "(files of their own)"."""
    parts = list(file.relative_to(PACKAGE).parts)
    if len(parts) == 1:
        return "(files of their own)"
    return ".".join(parts[:2]) if parts[0] == "apps" and len(parts) > 2 else parts[0]


def count_rooms() -> dict[str, dict[str, int]]:
    """What tests/rooms.toml holds, as it is now."""
    counts: dict[str, dict[str, int]] = {}
    for file in files().values():
        room = counts.setdefault(room_of(file), {"modules": 0, "classes": 0, "functions": 0})
        nodes = list(ast.walk(parsed(file)))
        room["modules"] += 1
        room["classes"] += sum(isinstance(node, ast.ClassDef) for node in nodes)
        room["functions"] += sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    lines = {
        "wheel": count_lines(PACKAGE),
        "lab": count_lines(ROOT / "lab", without="tests"),
        "tests": count_lines(ROOT / "tests", ROOT / "lab" / "tests"),
    }
    return {
        **dict(sorted(counts.items())),
        "lines": {name: ceil(n / ROUND) * ROUND for name, n in lines.items()},
    }


def count_lines(*folders: Path, without: str = "-") -> int:
    sources = (file for folder in folders for file in folder.rglob("*.py") if without not in file.parts)
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in sources)


def rises(before: Counts, after: Counts) -> list[str]:
    """In words: the numbers of ``after`` that are above those of ``before``."""
    return [
        f"{room} has {n} {what}, tests/rooms.toml says {before.get(room, {}).get(what, 0)}"
        for room, numbers in after.items()
        for what, n in numbers.items()
        if n > before.get(room, {}).get(what, 0)
    ]


def test_files_import_each_other_in_no_circle() -> None:
    modules = files()
    graph = {name: {*imports(parsed(file), modules)} - {name, "ostinato"} for name, file in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"files import each other: {' <- '.join(error.args[1])}") from None


def test_classes_can_be_read() -> None:
    long = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name} has {size} lines"
        for file in files().values()
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ClassDef)
        and (size := (node.end_lineno or 0) - node.lineno + 1) > MAX_CLASS_LINES
    ]
    assert not long, "\n".join(long)


def test_no_room_holds_more_than_the_table_says() -> None:
    above = rises(tomllib.loads(TABLE.read_text(encoding="utf-8")), count_rooms())
    assert not above, "\n".join([*above, "replace something, or say in the commit what nothing can replace"])


def test_a_number_that_rose_has_its_reason_in_the_commit() -> None:
    """The budgets of lines before this table were raised in 108 commits, mostly without a word."""
    newest = git("log", "-1", "--format=%H", "--", "tests/rooms.toml")
    old = newest and git("show", f"{newest}~1:tests/rooms.toml")
    if not old:
        pytest.skip("no history of tests/rooms.toml here")
    above = rises(tomllib.loads(old), tomllib.loads(git("show", f"{newest}:tests/rooms.toml")))
    message = git("show", "-s", "--format=%B", newest)
    assert not above or any(line.startswith("Replaces:") for line in message.splitlines()), "\n".join(above)


def git(*arguments: str) -> str:
    """What git prints; empty where it fails, or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def write_table() -> None:
    lines = ["# Ideas by room, written by tests/unit/test_house.py; numbers fall, or the commit says why."]
    for room, numbers in count_rooms().items():
        lines += [f'\n["{room}"]', *(f"{what} = {n}" for what, n in numbers.items())]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_table()
