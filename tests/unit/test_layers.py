"""The plan of the house, asserted: imports point down, importing is cheap, nothing grows beyond reading."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ostinato"
LEAVES = {"timeline", "types", "protocols", "axis", "config", "every", "toml", "run", "render", "routes"}
LEAVES |= {"jobs", "ledger"}

# room -> rooms it may import. Deferred imports and those for type checkers count too.
ARROWS: dict[str, set[str]] = {
    "types": set(),
    "axis": set(),
    "every": {"axis"},
    "toml": set(),
    "energy": set(),
    "isa": set(),
    "ledger": {"axis", "run"},
    "config": {"axis", "every", "toml"},
    "protocols": {"timeline", "types"},
    "timeline": set(),
    "jobs": set(),
    "routes": {"types"},
    "run": {"types", "routes"},
    "render": {"types"},
    "algo": {"types"},
    "model": {"types", "run", "compiler", "isa"},
    "engine": {"timeline", "types", "protocols", "jobs", "run", "render", "routes", "algo", "model"}
    | {"parallel"},
    "parallel": {"axis", "types", "run", "model"},  # every collective of torch.distributed is here
    "plan": {"axis", "toml", "types", "run", "model", "parallel"},  # of the last two what knows no torch
    "compiler": set(),
    "history": {"types", "protocols", "run", "compiler", "isa", "algo"},
    "env": {"types", "protocols", "render"},
    "reward": {"types", "protocols", "render"},
    "rollout": {"types", "protocols", "jobs", "run", "algo"},
    "train": {"types", "protocols", "run", "algo", "model", "parallel"},
    "cluster": {"timeline", "types", "protocols", "run"},  # and Ray, which nothing else imports
    "pipeline": {"timeline", "types", "protocols", "jobs", "config", "every", "run", "routes", "algo"}
    | {"model", "history", "rollout", "train", "ledger"},
    "report": LEAVES,
    "board": LEAVES | {"report"},
    "interop": {"types", "protocols", "routes", "algo", "history"},
    "scaling": {"axis", "run", "ledger"},
    "bench": LEAVES
    | {"algo", "model", "engine", "history", "env", "reward", "rollout", "train", "pipeline", "scaling"}
    | {"cluster", "parallel", "plan"},
    "cli": LEAVES
    | {"algo", "model", "engine", "history", "env", "reward", "rollout", "train", "pipeline", "cluster"}
    | {"report", "board", "bench", "interop", "scaling", "energy", "isa", "parallel", "plan", ""},
    "": {"config", "cli"},  # the lazy names of __init__, and __main__
}

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room(file: Path) -> str:
    """ "algo" for ostinato/algo/pack.py, "types" for ostinato/types.py, "" for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts[0] in ("__init__", "__main__") else parts[0]


def imported_rooms(tree: ast.AST, file: Path) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of ours anywhere in the file."""
    package = ("ostinato", *file.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "ostinato" else [module]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "ostinato":
                yield node.lineno, _room_of_name(parts)


def _room_of_name(parts: list[str]) -> str:
    known = len(parts) > 1 and ((PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file())
    return parts[1] if known else ""


@pytest.mark.parametrize("file", modules(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_down(file: Path) -> None:
    here = room(file)
    assert here in ARROWS, f"{here} is a new room; draw its arrows in docs/design.md and here"
    wrong = [
        f"{file.name}:{line} imports ostinato.{there or '__init__'}"
        for line, there in imported_rooms(ast.parse(file.read_text(encoding="utf-8")), file)
        if there != here and there not in ARROWS[here]
    ]
    assert not wrong, wrong


def test_the_arrows_have_no_cycle() -> None:
    seen: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        for below in ARROWS[name] - seen - {""}:
            visit(below, (*path, name))
        seen.add(name)

    for name in ARROWS:
        visit(name, ())


@pytest.mark.parametrize("file", modules(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_files_and_functions_can_be_read(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES, (
        f"{file.name} has {text.count(chr(10))} lines; split it by subject"
    )
    long = [
        f"{file.name}:{node.lineno} {node.name} has {size} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (size := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not long, long


def loaded_by(statement: str) -> tuple[float, set[str]]:
    """(seconds, first-level modules) of ``statement`` in a fresh interpreter, its own start not counted."""
    code = (
        "import json, sys, time; start = time.perf_counter()\n"
        f"{statement}\n"
        "print(json.dumps([time.perf_counter() - start, sorted({m.split('.')[0] for m in sys.modules})]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=PACKAGE.parent,
        timeout=60,
    )
    seconds, names = json.loads(done.stdout.splitlines()[-1])
    return seconds, set(names)


HEAVY = {
    "torch",
    "transformers",
    "vllm",
    "ray",
    "wandb",
    "trackio",
    "plotly",
    "tensorboard",
    "datasets",
    "peft",
}


def test_importing_the_package_is_cheap() -> None:
    seconds, names = loaded_by("import ostinato")
    assert seconds < 1.0
    assert not names & (HEAVY | {"numpy", "pydantic"})


def test_types_config_and_command_line_load_no_torch() -> None:
    seconds, names = loaded_by("import ostinato.types, ostinato.protocols, ostinato.config, ostinato.cli.app")
    assert seconds < 3.0  # typer, pydantic and numpy; generous for a busy machine
    assert not names & HEAVY


def test_threads_can_be_configured_before_torch() -> None:
    _, names = loaded_by("from ostinato.engine import threads")
    assert not names & HEAVY
